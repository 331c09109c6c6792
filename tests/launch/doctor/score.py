"""Counts how the doctor, and other tools where they are installed, do on planted faults.

    python tests/launch/doctor/score.py FOLDER [--verbose]

FOLDER holds the runs of `plant.py`. A fault is named first if the first finding is one of the
rules that stand for it, and a finding on a healthy run is a false alarm.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path


def examine(folder):
    """Return what the doctor finds in a run: ids of the findings, and those folded under each."""
    from polopt.launch.doctor.diagnose import diagnose
    from polopt.launch.doctor.readers import NotALogError, read

    try:
        (log,) = read(folder)
    except NotALogError as error:
        return [f"unread: {error}"]
    return [f.id for f in diagnose(log)]


def score(root):
    """Return one row for each run: its case, and the findings."""
    rows = []
    for meta in sorted(root.glob("*/case.json")):
        case = json.loads(meta.read_text())
        rows.append({"name": meta.parent.name, **case, "found": examine(meta.parent)})
    return rows


def summary(rows):
    """Return counts by world: faults, named first, named at all, silent, healthy, false alarms."""
    counts = defaultdict(lambda: defaultdict(int))
    for row in rows:
        for world in (row["world"], "all"):
            c = counts[world]
            if not row["fault"]:
                c["healthy"] += 1
                c["false alarms"] += bool(row["found"])
                continue
            c["faults"] += 1
            c["first"] += bool(row["found"]) and row["found"][0] in row["accept"]
            c["named"] += any(f in row["accept"] for f in row["found"])
            c["silent"] += not row["found"]
    return {world: dict(c) for world, c in counts.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true", help="the runs that went wrong")
    args = parser.parse_args()
    rows = score(args.folder)
    if args.verbose:
        for row in rows:
            wrong = bool(row["found"])
            if row["fault"]:
                wrong = not set(row["found"][:1]) & set(row["accept"])
            if wrong:
                print(row["name"], "accepts", row["accept"], "found", row["found"])
    keys = ("faults", "first", "named", "silent", "healthy", "false alarms")
    print("| world | " + " | ".join(keys) + " |\n| --- |" + " --- |" * len(keys))
    for world, c in summary(rows).items():
        print(f"| {world} | " + " | ".join(str(c.get(k, 0)) for k in keys) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
