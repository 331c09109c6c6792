"""Writes `tests/data/golden/ledger.csv` and `docs/parity.md` from fresh results."""

from collections import Counter

from parity.core import LEDGER
from parity.table import DOCS, SOURCES, document, ledger, read_ledger, verdicts


def main() -> None:
    rows = {source: verdicts(source) for source in SOURCES}
    everything = [v for part in rows.values() for v in part]
    for v in everything:
        if v.status == "DIFFERS":
            raise SystemExit(f"unexplained: {v}")
    LEDGER.write_text(ledger(everything))
    counts = {source: Counter(v.status for v in part) for source, part in rows.items()}
    DOCS.write_text(document(counts, read_ledger()))


if __name__ == "__main__":
    main()
