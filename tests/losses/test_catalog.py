"""The table in the docs is what the code says."""

from pathlib import Path

from polopt.losses import off_policy, outcome_presets, presets
from polopt.losses.catalog import catalog, off_policy_catalog, replace_table

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_every_preset_has_a_row():
    names = {e.name for e in catalog()}
    assert names == {*presets.__all__, *outcome_presets.__all__}
    assert all(e.paper.startswith("https://") and e.formula and e.peers for e in catalog())


def test_every_off_policy_algorithm_has_a_row():
    algorithms = {n for n in off_policy.__all__ if n.islower()}
    assert {e.name for e in off_policy_catalog()} == algorithms
    for e in off_policy_catalog():
        assert e.paper.startswith("https://")
        assert e.formula
        assert e.peers


def test_table_is_current():
    text = DOCS.read_text(encoding="utf-8")
    assert replace_table(text) == text, "run: python -m polopt.losses.catalog docs/algorithms.md"
