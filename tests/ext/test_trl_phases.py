"""Times of phases: what lies in another pauses it, and a trainer books all of its step."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
from datasets import Dataset
from trl_setup import algorithm, build, variety

from polopt.ext import metrics
from polopt.ext.metrics import PHASES, PhaseClock
from polopt.ext.trl.trainer import PolicyTrainer


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""

    class Hand:
        now = 0.0

    monkeypatch.setattr(metrics.time, "perf_counter", lambda: Hand.now)
    return Hand


def test_an_inner_phase_pauses_the_outer(clock):
    phases = PhaseClock()
    clock.now = 5.0  # nothing is open
    with phases.phase("advantage"):
        clock.now += 1.0
        with phases.phase("reward"):
            clock.now += 10.0
        clock.now += 2.0
        with phases.phase("reward"):
            clock.now += 20.0
    clock.now += 100.0
    phases.begin("optimizer")
    clock.now += 0.5
    assert phases.take() == {"time_advantage": 3.0, "time_reward": 30.0, "time_optimizer": 0.5}
    clock.now += 0.25
    phases.end()
    phases.end()  # there is none left
    clock.now += 7.0
    assert phases.take() == {"time_optimizer": 0.25}


def test_a_phase_ends_with_what_was_begun_in_it(clock):
    phases = PhaseClock()

    def fail():
        with phases.phase("loss"):
            phases.begin("backward")
            clock.now += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now += 9.0
    assert phases.take() == {"time_backward": 1.0, "time_loss": 0.0}


@pytest.mark.parametrize("lag", [0, 3, 10_000])
def test_events_of_a_device_are_read_once_they_have_happened(monkeypatch, lag):
    """The same sums whether the device is behind the host or not, and no wait before `take`."""
    made, waited = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.when = math.nan

        def record(self):
            made.append(self)
            self.when = 1000.0 * len(made)  # in milliseconds

        def query(self):
            return made.index(self) < len(made) - lag or bool(waited)

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, other):
            assert other.query()
            return other.when - self.when

    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = PhaseClock(torch.device("cuda"))
    for _ in range(400):
        with phases.phase("loss"), phases.phase("generate"):
            pass
    assert not waited
    assert phases.take() == {"time_loss": 800.0, "time_generate": 400.0}
    assert len(waited) == 1
    assert len(phases._marks) == 1


def test_a_trainer_books_its_steps(tmp_path):
    slow = 0.03

    def reward(completions, **_):
        time.sleep(slow)
        return variety(completions)

    rows = Dataset.from_list([{"prompt": f"w{i} w3"} for i in range(8)])
    trainer = build(
        PolicyTrainer, tmp_path, reward=reward, algorithm=algorithm("grpo"), eval_dataset=rows,
        config={"max_steps": 4, "num_iterations": 2, "gradient_accumulation_steps": 2,
                "eval_strategy": "steps", "eval_steps": 2},
    )  # fmt: skip
    began = time.perf_counter()
    trainer.train()
    wall = time.perf_counter() - began
    lines = [line for line in trainer.state.log_history if "time_loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    names = {name.removeprefix("time_") for line in lines for name in line if "time_" in name[:5]}
    assert names == {"generate", "reward", "log_prob", "advantage", "loss", "backward", "optimizer"}
    assert names <= set(PHASES)
    # Every second step generates, and no evaluation counts.
    assert [line.get("time_reward", 0.0) >= slow for line in lines] == [True, False, True, False]
    assert sum(line.get("time_reward", 0.0) for line in lines) < 4 * slow
    for line in lines:
        booked = sum(v for k, v in line.items() if k.startswith("time_"))
        assert booked > 0.9 * line["step_time"]
        assert min(line["time_loss"], line["time_backward"], line["time_optimizer"]) > 0.0
    total = sum(v for line in lines for k, v in line.items() if k.startswith("time_"))
    assert total < wall
    assert not any(
        k.startswith("time_") for line in trainer.state.log_history if "eval_loss" in line
        for k in line
    )  # fmt: skip


def test_a_line_has_the_mean_of_its_steps(tmp_path):
    trainer = build(PolicyTrainer, tmp_path, algorithm=algorithm("grpo"),
                    config={"max_steps": 9, "logging_steps": 3})  # fmt: skip
    began = time.perf_counter()
    trainer.train()
    wall = time.perf_counter() - began
    lines = [line for line in trainer.state.log_history if "time_loss" in line]
    assert [line["step"] for line in lines] == [3, 6, 9]
    booked = [sum(v for k, v in line.items() if k.startswith("time_")) for line in lines]
    for line, seconds in zip(lines, booked, strict=True):
        assert seconds > 0.9 * line["step_time"]
    assert 3 * sum(booked) < wall


def test_weight_sync_and_collectives_are_phases(tmp_path):
    trainer = build(PolicyTrainer, tmp_path, algorithm=algorithm("grpo"))

    class Sampler:
        def sync_weights(self):
            """Hand over."""
            time.sleep(0.01)
            return 7

    sampler = Sampler()
    trainer._time(sampler, "sync_weights", "sync")
    trainer.model.train()
    with trainer.phases.phase("generate"):
        assert sampler.sync_weights() == 7
    taken = trainer.phases.take()
    assert taken["time_sync"] >= 0.01 > taken["time_generate"]
    trainer.model.eval()
    sampler.sync_weights()
    assert "time_sync" not in trainer.phases.take()


RANKS = """
import json, sys, time
import torch
from trl_setup import algorithm, build
from polopt.ext.trl.trainer import PolicyTrainer
from polopt.launch.peers import leave_group

trainer = build(PolicyTrainer, sys.argv[1], algorithm=algorithm("grpo"), config={"max_steps": 3})
rank, answer = trainer.accelerator.process_index, trainer._generate_single_turn

def slow(*args, **kwargs):
    time.sleep(0.3 * rank)
    return answer(*args, **kwargs)

trainer._generate_single_turn = slow
trainer.train()
if rank == 0:
    lines = [line for line in trainer.state.log_history if "time_loss" in line]
    open(sys.argv[2], "w").write(json.dumps(lines))
torch.distributed.barrier()
del trainer, answer, slow
leave_group()
"""


@pytest.mark.slow
def test_a_rank_that_is_early_waits(tmp_path):
    script, out = tmp_path / "ranks.py", tmp_path / "lines.json"
    script.write_text(RANKS)
    here = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), str(tmp_path / "run"), str(out)],
        check=True, cwd=tmp_path, timeout=240,
        env={**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = json.loads(out.read_text())
    assert len(lines) == 3
    for line in lines[1:]:  # the first starts what is slow once
        assert line["time_wait"] > 0.2
        assert line["time_generate"] < line["time_wait"]
