"""Trains short runs, healthy ones and ones with a fault, and keeps their logs.

    python tests/launch/doctor/plant.py --out FOLDER [--half report …] [--only WORD …]
    python tests/launch/doctor/plant.py --out FOLDER --pack

plan.yaml says which. The runs of `report`, with other seeds and strengths, were not used to choose
the thresholds of the rules; all others were. `score.py` counts. `--pack` packs them into logs/, one
archive for each.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from worlds import RUNNERS, Case

FAULTS = yaml.safe_load((HERE / "faults.yaml").read_text())
PLAN = yaml.safe_load((HERE / "plan.yaml").read_text())


def cases(half: str) -> Iterator[Case]:
    """Yield the runs of a half."""
    for row in PLAN[half]["faults"]:
        for fault in FAULTS[row["table"]]:
            name = fault["fault"]
            if name in row.get("but", ()) or name not in row.get("only", [name]):
                continue
            for strength in row["strengths"]:
                yield Case(
                    world=row["world"], table=row["table"], base=row["task"], seed=row["seed"],
                    settings=fault[strength], fault=name, strength=strength,
                )  # fmt: skip
    for row in PLAN[half]["healthy"]:
        for base in row["tasks"]:
            for seed in row["seeds"]:
                yield Case(
                    world=row["world"], base=base, seed=seed, settings=row.get("settings", {}),
                    strength=row.get("kind", ""),
                )  # fmt: skip


def train(case: Case, place: Path) -> float:
    """Train one run, and return its CPU seconds."""
    began = time.process_time()
    quiet = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
    with quiet[0], quiet[1]:
        RUNNERS[case.world](case, place)
    spent = time.process_time() - began
    meta = {
        "fault": case.fault, "strength": case.strength, "world": case.world, "table": case.table,
        "cpu_seconds": round(spent, 1),
    }  # fmt: skip
    (place / "case.json").write_text(json.dumps(meta))
    return spent


def pack(folder: Path, target: Path) -> None:
    """Pack the runs of a half; the same runs give the same bytes."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, str(path.relative_to(folder)), filter=plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--half", nargs="+", default=list(PLAN))
    parser.add_argument("--only", nargs="*", default=[], help="words that the name must contain")
    parser.add_argument("--skip", nargs="*", default=[], help="words that it must not contain")
    parser.add_argument("--pack", action="store_true", help="pack what is there, train nothing")
    args = parser.parse_args()
    if args.pack:
        for half in args.half:
            pack(args.out / half, HERE / "logs" / f"{half}.tar.xz")
        return
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("POLOPT_CACHE", str(args.out.resolve() / "cache"))
    args.out.mkdir(parents=True, exist_ok=True)
    for half in args.half:
        for case in cases(half):
            folder = args.out / half / case.name
            if folder.exists() or not all(word in case.name for word in args.only):
                continue
            if any(word in case.name for word in args.skip):
                continue
            with tempfile.TemporaryDirectory(dir=args.out) as scratch:
                place = Path(scratch) / "run"
                place.mkdir()
                spent = train(case, place)
                folder.parent.mkdir(parents=True, exist_ok=True)
                place.rename(folder)
            print(f"{case.name}: {spent:.1f} s", flush=True)


if __name__ == "__main__":
    main()
