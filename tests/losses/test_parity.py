"""Every number of verl, OpenRLHF, TRL and TorchRL in the reference values is ours, or explained."""

import csv
import functools
import io
from collections import Counter

import pytest
from parity.core import Verdict
from parity.reasons import EXPLAINED, OUT_OF_SCOPE
from parity.table import (
    DOCS,
    SOURCES,
    document,
    ledger,
    name_of,
    read_ledger,
    record_names,
    verdicts,
)

judged = functools.cache(verdicts)


def everything() -> list[Verdict]:
    return [v for source in SOURCES for v in judged(source)]


@pytest.mark.parametrize("source", SOURCES)
def test_agrees_or_is_explained(source):
    rows = judged(source)
    assert rows
    wrong = [v for v in rows if v.status not in ("agrees", "explained", "out of scope")]
    lines = [f"{v.id}: {v.quantity} ours {v.ours} theirs {v.theirs}" for v in wrong]
    assert not wrong, "\n".join(lines)


def test_every_record_is_judged_once():
    judged_names = Counter(name_of(v) for v in everything())
    assert set(judged_names) == record_names()
    assert [name for name, n in judged_names.items() if n > 1] == []


def test_reasons_are_written_down_and_used():
    used = {r for v in everything() if v.reason for r in v.reason.split("+")}
    assert used == EXPLAINED.keys() | OUT_OF_SCOPE.keys()
    assert not EXPLAINED.keys() & OUT_OF_SCOPE.keys()


def test_ledger_is_current():
    """Numbers within a thousandth: the last digits depend on the machine."""
    fresh = list(csv.DictReader(io.StringIO(ledger(everything()))))
    kept = read_ledger()
    key = ["record", "peer", "loss", "case", "reason"]
    assert [[r[k] for k in key] for r in fresh] == [[r[k] for k in key] for r in kept]
    for new, old in zip(fresh, kept, strict=True):
        if new["quantity"] == old["quantity"] != "out of scope":
            for side in ("ours", "theirs"):
                number = float(old[side])
                assert float(new[side]) == pytest.approx(number, 1e-3, 1e-9, nan_ok=True), old


def test_document_is_current():
    counts = {source: Counter(v.status for v in judged(source)) for source in SOURCES}
    message = "run python tests/losses/write_parity.py"
    assert DOCS.read_text() == document(counts, read_ledger()), message
