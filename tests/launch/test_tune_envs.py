"""Which number of environments is recommended, and that it is measured."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from polopt.launch.cli import main
from polopt.launch.tune_envs import Speed, _elapsed, recommend, usable_cores
from polopt.launch.tune_worker import Part, WorkerError, Workers


def speeds(processes, **by_envs):
    return [
        Speed(num_envs=int(n[1:]), processes=processes, steps_per_second=v)
        for n, v in by_envs.items()
    ]


def test_the_smallest_near_the_best():
    single = speeds(1, n1=10.0, n2=20.0, n4=37.0, n8=40.0, n16=39.0)
    best, note = recommend(single, 1, None)
    assert (best.num_envs, best.processes, note) == (4, 1, "")


def test_it_must_divide_the_batch_and_leave_steps_for_it():
    single = speeds(1, n8=80.0, n16=160.0, n32=300.0, n64=600.0, n128=1000.0)
    best, note = recommend(single, 8, 256)
    assert best.num_envs == 32  # 64 would leave four steps each
    assert note == (
        "128 environments make 3.3 times as many steps, but need batches of 1024 "
        "(collector.frames_per_batch) to make 8 steps each"
    )
    # Off-policy batches have few steps of each as it is.
    best, note = recommend(single, 16, 16)
    assert best.num_envs == 16
    assert "1 step each" in note
    assert recommend(single, 8, 3 * 256)[0].num_envs == 64  # 128 leaves six, and does divide


def test_several_processes_have_to_be_worth_it():
    single = speeds(1, n4=100.0, n8=110.0)
    assert recommend([*single, *speeds(2, n4=120.0, n8=130.0)], 4, None)[0].processes == 1
    best, note = recommend([*single, *speeds(2, n4=150.0, n8=190.0)], 4, None)
    assert (best.num_envs, best.processes) == (8, 2)
    assert "2 processes of 4 environments make 1.9 times" in note


@pytest.mark.parametrize(
    ("cores", "parts", "seconds"),
    [
        (1, [Part(1, 4.0, 1.0, 3.0)], 1.0),  # others had the core for three seconds
        (2, [Part(1, 4.0, 1.0, 0.0)], 4.0),  # an environment that sleeps
        (1, [Part(1, 2.0, 1.0, 1.0)] * 2, 2.0),  # two share one core
        (2, [Part(1, 1.0, 1.0, 0.0)] * 2, 1.0),
        (2, [Part(1, 2.0, 1.0, 1.0)] * 4, 2.0),
    ],
)
def test_time_of_other_programs_is_taken_out(cores, parts, seconds):
    assert _elapsed(parts, cores) == seconds


def test_affinity_counts():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def error_of(capsys, *words):
    assert main(["tune-envs", *words, "--json"]) == 2
    return json.loads(capsys.readouterr().out)["error"]


def test_wrong_input_is_one_sentence(capsys):
    assert error_of(capsys).startswith("name a recipe first")
    assert error_of(capsys, "seed=1").startswith("name a recipe first")
    assert "cartpole-ppo" in error_of(capsys, "cartpol-ppo")
    assert "key=value" in error_of(capsys, "cartpole-ppo", "pendulum-ppo")
    assert "--most" in error_of(capsys, "cartpole-ppo", "--most", "0")
    assert "--seconds" in error_of(capsys, "cartpole-ppo", "--seconds", "-1")
    assert error_of(capsys, "bandit-ucb") == (
        "bandit-ucb has no collector.num_envs: there is nothing to tune"
    )


def test_language_models_step_no_environments(capsys):
    pytest.importorskip("trl")
    assert "steps no environments" in error_of(capsys, "arithmetic-dapo")


def test_it_says_what_it_did_not_measure(capsys, monkeypatch):
    pytest.importorskip("torchrl")
    monkeypatch.setattr("polopt.launch.tune_worker.Workers", lambda *a: contextlib.nullcontext())
    measured = speeds(1, e1=1e3, e2=2e3)
    monkeypatch.setattr("polopt.launch.tune_envs._measure", lambda *a: measured)
    for most, told in (("16", True), ("32", False)):
        assert main(["tune-envs", "cartpole-ppo", "--most", most]) == 0
        assert ("32 environments were not measured" in capsys.readouterr().out) is told


@pytest.mark.slow
def test_on_one_core_more_processes_are_slower(tmp_path):
    pytest.importorskip("torchrl")
    cores = {min(os.sched_getaffinity(0))}
    done = subprocess.run(
        [sys.executable, "-m", "polopt", "tune-envs", "cartpole-ppo", "--most", "32",
         "--seconds", "0.2", "--json"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["cores"] == 1
    assert found["recommended"]["processes"] == 1
    assert found["recommended"]["num_envs"] == 32
    assert found["setting"] == "collector.num_envs=32"
    by_key = {(s["num_envs"], s["processes"]): s["steps_per_second"] for s in found["measured"]}
    assert sorted(by_key) == [(n, p) for n in (1, 2, 4, 8, 16, 32) for p in (1, 2) if n >= p]
    for n in (2, 8, 32):
        assert by_key[n, 2] < 0.9 * by_key[n, 1]
    assert by_key[32, 1] > 4 * by_key[1, 1]
    assert len(done.stderr.splitlines()) >= len(by_key)
    assert list(tmp_path.iterdir()) == []  # it writes nothing


FAULTS = {"raises": "raise ValueError('bad')", "exits": "os._exit(3)"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_an_environment_that_fails(tmp_path, monkeypatch, fault):
    pytest.importorskip("torchrl")
    (tmp_path / "broken_task.py").write_text(
        "import os\n"
        "from polopt.envs.control import cartpole\n"
        "from dataclasses import dataclass\n"
        "from polopt.envs.control import ClassicTask\n"
        "class Task(ClassicTask):\n"
        "    def make(self, num_envs, *, seed=None):\n"
        "        if num_envs > 1:\n"
        f"            {FAULTS[fault]}\n"
        "        return super().make(num_envs, seed=seed)\n"
        "def task():\n"
        "    return Task(**vars(cartpole()))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Workers("cartpole-ppo", ["task={use: 'broken_task:task'}"], 1) as workers:
        workers.build(1, 1)
        (part,) = workers.run(1, 0.01)
        assert part.steps > 0
        expected = "bad" if fault == "raises" else "ended by itself"
        with pytest.raises(WorkerError, match=expected):
            workers.build(1, 2)
