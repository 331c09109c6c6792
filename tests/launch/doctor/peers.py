"""What rldoctor and rlwatch say of the runs that `score.py FOLDER --export OTHER` wrote.

    python tests/launch/doctor/peers.py FOLDER OTHER

Needs neither polopt nor torch: pip install rldoctor rlwatch. Both are made for language models, so
control runs are counted apart. Counted as named first: their first finding is one of a generous
list for each fault (`others` in faults.yaml), at any severity that they call a finding.
"""

import json
import logging
import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from score import collapsed, rewards

FAULTS = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())


def rldoctor(path):
    """Return its findings, as ranked by `rl-doctor diagnose FILE --format json`."""
    import contextlib
    import io

    from rl_doctor.cli import main

    out = io.StringIO()
    quiet = contextlib.redirect_stderr(io.StringIO())
    with contextlib.redirect_stdout(out), quiet, contextlib.suppress(SystemExit):
        main(["diagnose", str(path), "--format", "json"])
    try:
        found = json.loads(out.getvalue())["findings"]
    except (ValueError, KeyError):
        return []
    order = {"CRITICAL": 0, "WARNING": 1}
    real = [f for f in found if f["severity"] in order]
    return [f["detector"] for f in sorted(real, key=lambda f: order[f["severity"]])]


def rlwatch(path):
    """Return the alerts that its detectors raise, in order of steps."""
    import rlwatch as library

    found = []
    with tempfile.TemporaryDirectory() as folder:
        monitor = library.attach(framework="manual", log_dir=folder)
        names = {"reward": "reward_mean", "kl": "kl_divergence", "policy_loss": "loss",
                 "clip_ratio/region_mean": "clip_fraction"}  # fmt: skip
        known = ("entropy", "reward_std", "grad_norm", "learning_rate", *names.values())
        for line in path.read_text().splitlines():
            row = {names.get(k, k): v for k, v in json.loads(line).items()}
            given = {k: row[k] for k in known if k in row}
            given = {k: v for k, v in given.items() if k == "loss" or math.isfinite(v)}
            found += [a.detector for a in monitor.log_step(int(row["step"]), **given) or ()]
        monitor.stop()
    return list(dict.fromkeys(found))


def main():
    logging.disable(logging.CRITICAL)
    runs, exported = Path(sys.argv[1]), Path(sys.argv[2])
    lists = {}
    for table, rows in FAULTS.items():
        for row in rows:
            lists[table, row["fault"]] = set(row.get("others", ()))
    counts = defaultdict(lambda: defaultdict(int))
    for meta in sorted(runs.glob("*/case.json")):
        case = json.loads(meta.read_text())
        if not case["fault"] and collapsed(rewards(meta.parent)):
            continue
        part = "control" if case["world"] in ("polopt", "sb3") else "language models"
        for tool in (rldoctor, rlwatch):
            found = tool(exported / f"{meta.parent.name}.jsonl")
            c = counts[tool.__name__, part]
            if case["fault"]:
                c["faults"] += 1
                meant = lists[case["table"], case["fault"]]
                c["first"] += bool(found) and found[0] in meant
                c["named"] += bool(set(found) & meant)
                c["silent"] += not found
            else:
                c["healthy"] += 1
                c["false alarms"] += bool(found)
    keys = ("faults", "first", "named", "silent", "healthy", "false alarms")
    print("| tool | runs | " + " | ".join(keys) + " |\n| --- | --- |" + " --- |" * len(keys))
    for (tool, part), c in counts.items():
        print(f"| {tool} | {part} | " + " | ".join(str(c.get(k, 0)) for k in keys) + " |")


if __name__ == "__main__":
    main()
