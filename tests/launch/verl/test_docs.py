"""The numbers and the recipe of docs/verl.md are what the importer gives."""

from pathlib import Path
from typing import get_args

import pytest
import yaml

from polopt.launch.verl.importer import import_script
from polopt.launch.verl.plan import Verdict
from polopt.launch.verl.report import as_markdown

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs" / "verl.md"


@pytest.fixture
def text():
    return DOCS.read_text()


def test_table_of_units(text):
    report = as_markdown(import_script((HERE / "scripts" / "guide.sh").read_text()))
    table = text.partition("| quantity |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 12
    for row in table:
        assert row in report


def test_recipe_of_dapo(text):
    imported = import_script((HERE / "scripts" / "dapo_variables.sh").read_text())
    block = text.partition("```yaml\nalgorithm:")[2].partition("```")[0]
    assert yaml.safe_load("algorithm:" + block)["algorithm"] == imported.recipe["algorithm"]


def test_every_verdict_is_explained(text):
    table = text.partition("| verdict |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in table] == list(get_args(Verdict))
