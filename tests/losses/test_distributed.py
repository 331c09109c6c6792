"""Two ranks with two micro-batches each have the gradient of one big batch, for every preset."""

import gc
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

ROWS, STEPS, RANKS, MICRO = 8, 9, 2, 2
LENGTHS = torch.tensor([9, 1, 4, 0, 2, 7, 9, 3])
MASK = torch.arange(STEPS) < LENGTHS[:, None]


class Policy(nn.Module):
    """Log-probabilities from features: something for the framework to average."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, features: Tensor) -> Tensor:
        return -nn.functional.softplus(self.layer(features)).squeeze(-1)


def main() -> None:
    """Run as one rank: launched by torch.distributed.run."""
    from axes import AGGREGATIONS, PRESETS, REGULARISERS, combine, count, draw, evaluate

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    features = torch.randn(
        ROWS, STEPS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    regularisers = ("none", "entropy", "kl k3", "kl full", "Reweight sequence", "Reject token")
    assert set(regularisers) <= REGULARISERS.keys()
    done = 0
    for preset in PRESETS:
        for aggregation in AGGREGATIONS:
            for regulariser in regularisers:
                objective = combine(preset, aggregation, regulariser)
                # What is chosen over the batch is chosen before it is cut: `draw` does.
                batch = draw(done, MASK, objective)
                whole = Policy()
                evaluate(whole(features), batch, objective)[1].backward()

                net = nn.parallel.DistributedDataParallel(Policy())
                size = ROWS // RANKS // MICRO
                parts = [slice(s, s + size) for s in range(rank * 4, rank * 4 + 4, size)]
                total = sum(count(batch.rows(p), objective) for p in parts)
                dist.all_reduce(total)
                # DDP averages over ranks; micro-batches add up.
                denominator = total / RANKS
                for i, part in enumerate(parts):
                    last = i == len(parts) - 1
                    with nullcontext() if last else net.no_sync():
                        log_prob = net(features[part])
                        rows = batch.rows(part)
                        evaluate(log_prob, rows, objective, denominator)[1].backward()
                torch.testing.assert_close(
                    net.module.layer.weight.grad,
                    whole.layer.weight.grad,
                    rtol=1e-6,
                    atol=1e-9,
                    msg=lambda m, at=(preset, aggregation, regulariser): f"{at}: {m}",
                )
                done += 1
    if rank == 0:
        print(f"compared {done}")
    del net  # a reducer that outlives its group may keep a rank from ending
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_and_micro_batches_match_one_batch():
    """A script and not multiprocessing: spawned processes cannot import a test module."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    out = subprocess.run(
        [*launch, __file__], check=False, timeout=300, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-4000:]
    compared = int(out.stdout.split("compared")[1])
    assert compared > 500


if __name__ == "__main__":
    main()
