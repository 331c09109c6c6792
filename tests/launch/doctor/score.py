"""Counts how the doctor, and other tools where they are installed, do on planted faults.

    python tests/launch/doctor/score.py report [--verbose] [--log-only] [--export OTHER]

Reads an archive of logs/ (a half of plan.yaml), or a folder that `plant.py` filled.
A fault is named first if the first finding is one of the rules that stand for it; a finding on a
healthy run is a false alarm.
"""

import argparse
import csv
import json
import shutil
import statistics
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path

import yaml

_FAULTS = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())
ACCEPT = {(table, row["fault"]): row["accept"] for table in _FAULTS for row in _FAULTS[table]}
"""Rules that name a fault, by table and fault."""


def collapsed(values):
    """Return whether a run really lost what it had learnt: it is not a healthy one.

    Its best is the highest mean over a fifth of the run, so that luck is no best. Its end is the
    mean of its last fifth, or of its last tenth (3 points at least), which also sees a fall at the
    very end: whichever is lower. It collapsed if its end is below its best by more than half of the
    way that it had come, and by more than half of its best's size.
    """
    size, last = max(3, len(values) // 5), max(3, len(values) // 10)
    if len(values) < 3 * size:
        return False
    means = [statistics.fmean(values[i : i + size]) for i in range(len(values) - size + 1)]
    lost = max(means) - min(means[-1], statistics.fmean(values[-last:]))
    return lost > 0.5 * (max(means) - means[0]) and lost > 0.5 * abs(max(means))


def rewards(folder):
    """Return the returns or rewards of a run, without the doctor."""
    if (path := folder / "metrics.jsonl").exists():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    elif (path := folder / "trainer_state.json").exists():
        lines = json.loads(path.read_text())["log_history"]
    else:
        lines = list(csv.DictReader((folder / "progress.csv").open()))
    names = ("return_mean", "reward", "rollout/ep_rew_mean")
    return [float(x[n]) for x in lines for n in names if x.get(n) not in (None, "")]


_SETTINGS = ("config.yaml", "model.zip")  # what tells of settings beside the log


def examine(folder):
    """Return the ids of what the doctor finds in a run."""
    from polopt.launch.doctor.diagnose import diagnose
    from polopt.launch.doctor.readers import NotALogError, read

    try:
        (log,) = read(folder)
    except NotALogError as error:
        return [f"unread: {error}"]
    return [f.id for f in diagnose(log)]


def score(root, log_only=False):
    """Return one row for each run: its case, and the findings.

    With `log_only` the settings are hidden from the doctor.
    """
    rows = []
    for meta in sorted(root.glob("*/case.json")):
        case = json.loads(meta.read_text())
        case["accept"] = ACCEPT.get((case["table"], case["fault"]), [])
        case["collapsed"] = not case["fault"] and collapsed(rewards(meta.parent))
        with tempfile.TemporaryDirectory() as scratch:
            run = meta.parent
            if log_only:
                hidden = shutil.ignore_patterns(*_SETTINGS)
                run = Path(shutil.copytree(run, Path(scratch) / run.name, ignore=hidden))
            rows.append({"name": run.name, **case, "found": examine(run)})
    return rows


def summary(rows):
    """Return counts by world: faults, named first, named at all, silent, healthy, false alarms.

    A run without a planted fault that really collapsed (see `collapsed`) is neither: it is
    counted apart, with those whose collapse was named.
    """
    counts = defaultdict(lambda: defaultdict(int))
    for row in rows:
        for world in (row["world"], "all"):
            c = counts[world]
            if row["collapsed"]:
                c["collapsed"] += 1
                c["collapse named"] += row["found"][:1] == ["reward-collapse"]
                continue
            if not row["fault"]:
                c["healthy"] += 1
                c["false alarms"] += bool(row["found"])
                continue
            c["faults"] += 1
            c["first"] += bool(row["found"]) and row["found"][0] in row["accept"]
            c["named"] += any(f in row["accept"] for f in row["found"])
            c["silent"] += not row["found"]
    return {world: dict(c) for world, c in counts.items()}


NAMES = {
    "reward": "reward", "reward_std": "reward_std", "zero_std_groups": "frac_reward_zero_std",
    "entropy": "entropy", "kl_ref": "kl", "kl_update": "kl", "grad_norm": "grad_norm",
    "clip_fraction": "clip_ratio/region_mean", "learning_rate": "learning_rate",
    "loss_policy": "policy_loss", "loss": "policy_loss", "explained_variance": "explained_variance",
    "length": "completions/mean_length", "truncated_share": "completions/clipped_ratio",
}  # fmt: skip


def export(folder, target):
    """Write a run as JSON lines under the names that other tools know."""
    from polopt.launch.doctor.readers import read

    (log,) = read(folder)
    rows = defaultdict(dict)
    for metric, name in NAMES.items():
        series = log.columns.get(metric)
        for step, value in zip(series.steps, series.values, strict=True) if series else ():
            rows[step].setdefault(name, value)
        if series and series.nonfinite:
            rows[series.first_nonfinite][name] = float("nan")
    lines = [json.dumps({"step": int(step), **rows[step]}) for step in sorted(rows)]
    target.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="HALF")
    parser.add_argument("--verbose", action="store_true", help="the runs that went wrong")
    parser.add_argument("--log-only", action="store_true", help="hide the settings")
    parser.add_argument("--export", type=Path, help="write what peers.py reads into this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if not args.folder.is_dir():
            unpack(str(args.folder), Path(scratch))
            args.folder = Path(scratch)
        show(args)


def unpack(half, target):
    """Unpack the runs of a half."""
    with tarfile.open(Path(__file__).parent / "logs" / f"{half}.tar.xz") as archive:
        archive.extractall(target, filter="data")


def show(args):
    if args.export:
        args.export.mkdir(parents=True, exist_ok=True)
        for meta in sorted(args.folder.glob("*/case.json")):
            export(meta.parent, args.export / f"{meta.parent.name}.jsonl")
    rows = score(args.folder, args.log_only)
    if args.verbose:
        for row in rows:
            wrong = bool(row["found"])
            if row["fault"] or row["collapsed"]:
                wrong = not set(row["found"][:1]) & set(row["accept"] or ["reward-collapse"])
            if wrong:
                print(row["name"], "accepts", row["accept"], "found", row["found"])
    keys = ("faults", "first", "named", "silent", "healthy", "false alarms", "collapsed",
            "collapse named")  # fmt: skip
    print("| world | " + " | ".join(keys) + " |\n| --- |" + " --- |" * len(keys))
    for world, c in summary(rows).items():
        print(f"| {world} | " + " | ".join(str(c.get(k, 0)) for k in keys) + " |")


if __name__ == "__main__":
    main()
