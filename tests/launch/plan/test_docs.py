"""docs/planner.md is true: every excerpt and every row is what the command beside it prints."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from polopt.launch.cli import main
from polopt.launch.plan.setup import Setup

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(
    r"^```console\n\$ polopt (plan [^\n]*)\n(.*?)^```", DOCS, re.DOTALL | re.MULTILINE
)
ROWS = re.findall(r"^\| `([^`]*--gpu [^`]*)` \| (.*) \|$", DOCS, re.MULTILINE)


@pytest.fixture
def output(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    def run(words):
        if ".sh" in words:
            pytest.importorskip("hydra")
        code = main(shlex.split(words))
        return code, capsys.readouterr().out

    return run


def test_there_are_examples():
    assert len(EXAMPLES) >= 8
    assert len(ROWS) >= 20


@pytest.mark.parametrize(("words", "excerpt"), EXAMPLES)
def test_excerpts(output, words, excerpt):
    _, out = output(words)
    printed = iter(out.splitlines())
    for line in excerpt.splitlines():
        if line not in ("", "…"):
            assert line in printed, line  # each behind the one before


@pytest.mark.parametrize(("words", "cells"), ROWS)
def test_rows(output, words, cells):
    code, out = output(f"plan {words} --json")
    content = json.loads(out)
    found = [f"{phase['total_gib']:.1f}" for phase in content["phases"]]
    assert " | ".join([*found, content["verdict"]]) == cells
    assert code == (content["verdict"] == "does not fit")


def test_every_setting_is_listed_with_its_default():
    for field in fields(Setup):
        if field.name in ("model", "gpu"):
            continue
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        assert f"| `{field.name}` | {default} |" in DOCS
