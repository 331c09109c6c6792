"""`polopt show` of an algorithm that does not ship."""

import json

import pytest

from polopt.launch.cli import main

ALGORITHM = '''
from polopt.losses import Algorithm, dapo


def steep(*, high: float = 0.5) -> Algorithm:
    """DAPO with a higher bound."""
    return dapo(high=high)
'''


def test_an_algorithm_of_ones_own(tmp_path, monkeypatch, capfd):
    (tmp_path / "own_algorithms.py").write_text(ALGORITHM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["show", "own_algorithms:steep", "high=0.3", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["settings"] == {"high": 0.5}
    assert 0.3 in shown["axes"].values()
    assert shown["doc"].startswith("DAPO with a higher bound")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["json:none"], "'use': cannot import 'json:none'"),
        (["builtins:dict"], "builtins:dict does not tell what arguments it takes"),
    ],
)
def test_what_is_no_algorithm_is_one_sentence(words, message, capfd):
    assert main(["show", *words]) == 2
    assert message in capfd.readouterr().err
