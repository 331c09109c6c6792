"""Which phase binds, what moves it, and the three questions to ask first."""

import json
import math

import pytest

from polopt.ext.metrics import PHASES as LOGGED
from polopt.launch.cli import main
from polopt.launch.doctor import phases
from polopt.launch.doctor.log import Log, Series
from polopt.launch.doctor.names import canonical
from polopt.launch.doctor.phases import PHASES, bottleneck, phase_seconds, questions
from polopt.launch.record import phase_seconds as summary_seconds


def log_of(kind="control", framework="polopt", steps=(1, 2, 3), **columns):
    found = Log(source="here", framework=framework, kind=kind, rows=len(steps))
    for name, values in columns.items():
        values = values if isinstance(values, list) else [values] * len(steps)
        found.columns[name], found.names[name] = Series(), name
        for step, value in zip(steps, values, strict=True):
            found.columns[name].add(step, value)
    return found


def test_every_phase_that_is_logged_has_a_name_and_a_knob():
    for phase in LOGGED:
        alias = canonical(f"time_{phase}", "polopt")
        assert alias is not None
        assert alias.name in PHASES
    for kind in ("control", "llm"):
        for framework in ("polopt", "trl", "verl", "sb3", "torchrl"):
            for phase in PHASES:
                assert "{" not in phases._knob(phase, log_of(kind, framework))


def test_the_environment_is_taken_out_of_collecting():
    log = log_of(collect_time=3.0, environment_time=2.0, backward_time=1.0)
    assert phase_seconds(log) == {
        "environment_time": 6.0, "collect_time": 3.0, "backward_time": 3.0
    }  # fmt: skip
    binds = bottleneck(log)
    assert (binds.name, binds.share, binds.seconds) == ("environment", 0.5, 6.0)
    assert "tune-envs" in binds.text


def test_seconds_of_language_models_count_for_their_steps():
    log = log_of("llm", steps=(10, 20, 50), collect_time=[1.0, 2.0, 3.0], backward_time=0.5)
    assert phase_seconds(log) == {"collect_time": 120.0, "backward_time": 25.0}
    lines = [
        {"step": s, "step_time": 9.0, "time_generate": v}
        for s, v in ((10, 1.0), (20, 2.0), (50, 3.0))
    ]
    lines.insert(1, {"step": 10, "eval/accuracy_greedy": 0.5})
    assert summary_seconds(lines) == {"generate": 120.0}
    # A log that begins in the middle of a run.
    log = log_of("llm", steps=(1010, 1020, 1030), collect_time=1.0, backward_time=0.5)
    assert phase_seconds(log)["collect_time"] == 30.0


@pytest.mark.parametrize(
    ("metric", "word"),
    [
        ("collect_time", "trainer.max_completion_length"),
        ("reward_time", "worker"),
        ("log_prob_time", "on policy"),
        ("sync_time", "shared memory"),
        ("wait_time", "slowest"),
        ("backward_time", "trainer.per_device_train_batch_size"),
    ],
)
def test_the_knob_of_a_language_model(metric, word):
    columns = {"optimizer_time": 0.1, metric: 5.0}
    assert word in bottleneck(log_of("llm", **columns)).knob


def test_the_knob_of_off_policy_learning():
    log = log_of(collect_time=1.0, replay_time=1.0, loss_time=5.0)
    assert "update.steps_per_batch" in bottleneck(log).knob
    log = log_of(collect_time=1.0, loss_time=5.0)
    assert "update.epochs" in bottleneck(log).knob


def test_updates_that_verl_logs_as_one():
    log = log_of("llm", "verl", update_time=5.0, collect_time=1.0)
    binds = bottleneck(log)
    assert binds.name == "update"
    assert "data.max_response_length" in binds.knob


def test_nothing_binds_without_phases():
    assert bottleneck(log_of(collect_time=1.0)) is None
    assert bottleneck(log_of(reward=1.0)) is None
    assert bottleneck(log_of(collect_time=0.0, loss_time=0.0)) is None


def test_three_questions():
    log = log_of(loss=1.0, reward=[1.0, 2.0, 5.0], device_use=0.05)
    assert questions(log, []) == {
        "NaN": "no",
        "reward flat": "no, 1 at the beginning, 5 at the end",
        "accelerator idle": "yes, it works 5%",
    }
    log = log_of(loss=[1.0, math.nan, math.nan], reward=1.0, collect_time=2.0, environment_time=1.0)
    assert questions(log, ["reward-constant"]) == {
        "NaN": "yes, loss from step 2 on",
        "reward flat": "yes (reward-constant), 1 at the beginning, 1 at the end",
        "accelerator idle": (
            "use of one was not logged; 50% of the time needs none: environment 50%"
        ),
    }
    assert questions(log_of(), []) == {}


def test_the_command_prints_them(tmp_path, capsys):
    lines = [
        {"format": 1, "step": 64 * i, "time": i, "cpu": i, "return_mean": float(i), "loss": 0.5,
         "time_collect": 3.0, "time_environment": 2.0, "time_backward": 1.0}
        for i in range(1, 9)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["doctor", str(tmp_path)])
    text = capsys.readouterr().out
    assert "  NaN? no\n" in text
    assert "  reward flat? no, 1 at the beginning, 8 at the end\n" in text
    assert "  time: environment 50%, acting 25%, backward 25%\n" in text
    assert "  environment binds: 50% of the measured time." in text
    main(["doctor", str(tmp_path), "--json"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["bottleneck"]["phase"] == "environment_time"
    assert run["phase_seconds"]["environment_time"] == 16.0
