"""The examples that put one part of polopt into a loop of TorchRL's learn."""

import importlib
import statistics
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrl")

from polopt.envs.control import cartpole

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    "example", ["loss_in_your_loop", "advantage_in_your_loop", "loss_in_torchrl_trainer"]
)
def test_it_learns(example, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        lengths = importlib.import_module(example).train(cartpole().make(16, seed=0))
    finally:
        torch.set_num_threads(threads)
    assert len(lengths) == 12
    assert lengths[0] < 40  # a random policy
    assert statistics.mean(lengths[-3:]) > 100
