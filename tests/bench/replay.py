"""Ratios of prioritised replay against the same work elsewhere, in one process.

    OMP_NUM_THREADS=1 taskset -c 0 python tests/bench/replay.py

One round draws a batch, weighs it, and updates its priorities. Prints a Markdown table of CPU
time per round, and ours divided by the other's: against a binary sum tree in C (compiled here
with gcc, called once for the draw and once for the update), a binary tree in numpy, one level
at a time for the whole batch, and cpprb where it is installed (which also reads the items: one
float each). Least of several alternating rounds, so that a busy machine does not decide.
"""

import argparse
import contextlib
import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from polopt.ext.replay import Priorities, SumTree

ALPHA, BETA, EPS = 0.6, 0.4, 1e-3

C_SOURCE = """
#include <math.h>
#include <stdint.h>
static uint64_t state = 88172645463325252ULL;
static double uniform(void) {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}
void draw(const double *tree, int64_t n, int64_t batch, double beta, int64_t *slots, double *w) {
    double part = tree[1] / batch, largest = 0;
    for (int64_t k = 0; k < batch; k++) {
        double mass = (k + uniform()) * part;
        int64_t i = 1;
        while (i < n) {
            i *= 2;
            if (mass >= tree[i]) { mass -= tree[i]; i++; }
        }
        slots[k] = i - n;
        w[k] = pow(tree[i] / tree[1], -beta);
        if (w[k] > largest) largest = w[k];
    }
    for (int64_t k = 0; k < batch; k++) w[k] /= largest;
}
void renew(double *tree, int64_t n, int64_t batch, const int64_t *slots, const double *errors,
           double alpha, double eps) {
    for (int64_t k = 0; k < batch; k++) {
        int64_t i = slots[k] + n;
        tree[i] = pow(fabs(errors[k]) + eps, alpha);
        for (i /= 2; i; i /= 2) tree[i] = tree[2 * i] + tree[2 * i + 1];
    }
}
"""


def filled(capacity: int) -> tuple[int, np.ndarray]:
    """A binary tree over random priorities: number of leaves, and nodes from the root at 1."""
    n = 1 << (capacity - 1).bit_length()
    tree = np.zeros(2 * n)
    tree[n : n + capacity] = (np.random.default_rng(0).random(capacity) + EPS) ** ALPHA
    level = n
    while level > 1:
        tree[level // 2 : level] = tree[level : 2 * level].reshape(-1, 2).sum(1)
        level //= 2
    return n, tree


def in_c(capacity: int, batch: int, folder: Path) -> Callable[[], None]:
    library = folder / "tree.so"
    if not library.exists():
        source = folder / "tree.c"
        source.write_text(C_SOURCE)
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["gcc", *flags, str(source), "-o", str(library), "-lm"], check=True)
    code = ctypes.CDLL(str(library))
    n, tree = filled(capacity)
    slots, weights = np.empty(batch, np.int64), np.empty(batch)
    errors = np.random.default_rng(1).random(batch)
    at = [ctypes.c_void_p(x.ctypes.data) for x in (tree, slots, weights, errors)]
    n, size = ctypes.c_int64(n), ctypes.c_int64(batch)
    alpha, beta, eps = map(ctypes.c_double, (ALPHA, BETA, EPS))

    def round_trip(keep: object = (tree, slots, weights, errors)) -> None:
        code.draw(at[0], n, size, beta, at[1], at[2])
        code.renew(at[0], n, size, at[1], at[3], alpha, eps)

    return round_trip


def in_numpy(capacity: int, batch: int) -> Callable[[], None]:
    n, tree = filled(capacity)
    rng = np.random.default_rng(1)
    errors, strata = rng.random(batch), np.arange(batch)

    def round_trip() -> None:
        mass = (strata + rng.random(batch)) * (tree[1] / batch)
        node = np.ones(batch, np.int64)
        for _ in range(n.bit_length() - 1):
            node *= 2
            left = tree[node]
            right = mass >= left
            mass -= np.where(right, left, 0.0)
            node += right
        weights = (tree[node] / tree[1]) ** -BETA
        weights /= weights.max()
        tree[node] = (np.abs(errors) + EPS) ** ALPHA
        while node[0] > 1:
            node = np.unique(node // 2)
            tree[node] = tree[2 * node] + tree[2 * node + 1]

    return round_trip


def in_cpprb(capacity: int, batch: int) -> Callable[[], None]:
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(capacity, {"x": {}}, alpha=ALPHA, eps=EPS)
    buffer.add(
        x=np.zeros((capacity, 1), np.float32), priorities=np.random.default_rng(0).random(capacity)
    )
    errors = np.random.default_rng(1).random(batch)

    def round_trip() -> None:
        buffer.update_priorities(buffer.sample(batch, BETA)["indexes"], errors)

    return round_trip


def ours(capacity: int, batch: int, *, compiled: bool) -> Callable[[], None]:
    priorities = Priorities(capacity, ALPHA, BETA, EPS, seed=0)
    priorities.tree = SumTree(capacity, compiled=compiled)
    everything = torch.arange(capacity)
    priorities.add(everything)
    priorities.update(everything, torch.from_numpy(np.random.default_rng(0).random(capacity)))
    errors = torch.from_numpy(np.random.default_rng(1).random(batch))

    def round_trip() -> None:
        slots, _, stamps = priorities.sample(batch)
        priorities.update(slots, errors, stamps)

    return round_trip


def least(calls: dict[str, Callable[[], None]], repeat: int, each: int = 40) -> dict[str, float]:
    """Microseconds of CPU time per call, the least of alternating rounds."""
    best = dict.fromkeys(calls, np.inf)
    for _ in range(repeat):
        for name, call in calls.items():
            call()
            began = time.process_time()
            for _ in range(each):
                call()
            best[name] = min(best[name], (time.process_time() - began) / each * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=40)
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    print("| capacity | batch | who | µs | numba / it | torch / it |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for capacity in (100_000, 1_000_000):
            for batch in (64, 256, 1024):
                calls = {
                    "ours, numba": ours(capacity, batch, compiled=True),
                    "ours, torch": ours(capacity, batch, compiled=False),
                    "numpy": in_numpy(capacity, batch),
                }
                if shutil.which("gcc"):
                    calls["C"] = in_c(capacity, batch, Path(folder))
                with contextlib.suppress(ImportError):
                    calls["cpprb"] = in_cpprb(capacity, batch)
                times = least(calls, repeat)
                for name, micros in times.items():
                    ratios = [times[f"ours, {walk}"] / micros for walk in ("numba", "torch")]
                    text = " | ".join(f"{ratio:.2f}" for ratio in ratios)
                    print(f"| {capacity:,} | {batch} | {name} | {micros:.0f} | {text} |")


if __name__ == "__main__":
    main()
