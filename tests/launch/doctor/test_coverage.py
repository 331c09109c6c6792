"""What the doctor has to know, fault by fault, and which rule names each.

Faults that are planted in real runs (faults.yaml) are not repeated here: this is what cannot be
trained on one small machine, and what is told by a setting or a line of text.
"""

import math
from pathlib import Path

import pytest
import yaml

from polopt.launch.doctor.diagnose import diagnose, preflight
from polopt.launch.doctor.log import Log, Mention, Series
from polopt.launch.doctor.names import canonical
from polopt.launch.doctor.rules import rules

N = 40


def series(values):
    found = Series()
    for step, value in enumerate(values):
        found.add(step, float(value))
    return found


def flat(value, noise=0.1):
    return [value * (1 + noise * math.sin(12.9898 * i)) for i in range(N)]


def line(start, end, noise=0.05):
    size = noise * (abs(start) + abs(end))
    return [start + (end - start) * i / N + size * math.sin(12.9898 * i) for i in range(N)]


def log(kind, columns=None, settings=None, mentions=(), framework="trl"):
    made = Log(source="test", framework=framework, kind=kind, settings=settings or {})
    made.columns = {n: series(v) for n, v in (columns or {}).items()}
    made.names = {n: n for n in made.columns}
    made.paths = {n: n for n in made.settings}
    made.mentions = list(mentions)
    return made


def said(kind, phase=""):
    return [Mention(kind=kind, phase=phase, line=3, text="a line")]


RISING, STILL = line(0.2, 0.8), flat(0.3)
LLM = {  # rule: a log that shows it
    "reward-failing": {"reward_failed": flat(0.4), "reward": RISING},
    "few-groups": {"zero_std_groups": flat(0.75, 0.02), "reward": RISING},
    "loss-zero": {"grad_norm": [0.0] * N, "reward": STILL},
    "length-up": {"length": line(100, 400), "reward": STILL},
    "length-down": {"length": line(400, 100), "reward": STILL},
    "hacked": {"reward": RISING, "repetition": line(0.0, 0.8)},
    "kl-ref-high": {"kl_ref": line(0.0, 2.0), "reward": STILL},
    "llm-frozen": {"kl_ref": flat(1e-6), "reward": STILL},
    "mismatch": {"mismatch": flat(0.1), "reward": RISING},
    "weights-degenerate": {"importance_weight": flat(3.0), "reward": RISING},
    "stale-weights": {"weight_age": flat(8.0), "reward": RISING},
    "prompts-cut": {"prompt_cut_share": flat(0.1), "reward": RISING},
    "overfit": {"reward": RISING, "eval_reward": flat(0.4, 0.01)},
    "generation-bound": {"collect_time": flat(95.0), "step_time": flat(100.0)},
    "reward-slow": {"reward_time": flat(5.0), "step_time": flat(10.0)},
    "sync-slow": {"sync_time": flat(3.0), "step_time": flat(10.0)},
    "device-idle": {"device_use": flat(0.05), "reward": RISING},
    "memory-grows": {"memory_host": line(10, 60, 0.0), "reward": RISING},
    "fragmentation": {"memory_reserved": flat(60.0), "memory_device": flat(30.0)},
    "rank-imbalance": {"rank_tokens_max": flat(9e4), "rank_tokens_min": flat(4e4)},
    "slowing": {"step_time": line(2.0, 12.0, 0.0), "length": flat(100.0)},
}
CONTROL = {
    "clip-fraction-high": ({"clip_fraction": flat(0.6), "kl_update": flat(0.02)}, {}),
    "kl-high": ({"kl_update": flat(0.3), "clip_fraction": flat(0.2)}, {}),
    "critic-dead": ({"explained_variance": flat(0.001), "reward": RISING}, {}),
    "sparse-lam": ({"reward": [-200.0, -200.0, -199.0, -200.0] * 10}, {"lam": 0.8}),
    "sparse-gamma": (
        {"reward": [0.0] * 36 + [1.0, 0.0, 0.0, 0.0], "length": flat(500.0)},
        {"gamma": 0.9},
    ),
    "reward-flat": ({"reward": line(0.5, 0.2)}, {}),
    "memory-grows": ({"memory_host": line(10, 60, 0.0), "reward": RISING}, {}),
}
TEXT = {
    "oom-start": said("start"),
    "oom-generation": said("oom", "generation"),
    "oom-log-probs": said("oom", "log_probs"),
    "oom-update": said("oom", "update"),
    "oom": said("oom"),
    "host-oom": said("host_oom"),
    "preempted": said("preempted"),
    "nonfinite": said("nonfinite"),
    "override-lost": said("override"),
}
SETTINGS = {
    "no-checkpoint": ("llm", {"save_every": 500, "total": 350}),
    "top-p-corrected": ("llm", {"top_p": 0.9, "corrections": True}),
    "kl-without-coefficient": ("llm", {"use_kl": True, "kl_coef": 0}),
    "kl-unused": ("llm", {"use_kl": False, "kl_coef": 0.01}),
    "clip-without-effect": ("control", {"epochs": 1, "minibatch": 512, "batch": 512, "clip": 0.2}),
    "checkpoint-often": ("control", {"save_every": 100, "batch": 512}),
    "range-minibatch": ("control", {"minibatch": 1024, "batch": 512, "epochs": 4}),
    "range-minibatch-small": ("control", {"minibatch": 8, "batch": 512}),
    "range-batch-large": ("control", {"batch": 5000, "total": 20000}),
    "range-envs": ("control", {"num_envs": 1, "clip": 0.2}),
    "unscaled": ("control", {"reward_scaling": None}),
    "range-value-coef": ("control", {"value_coef": 0.001}),
    "buffer-unfilled": ("control", {"buffer_size": 1_000_000, "total": 50_000}),
    "buffer-large": ("control", {"buffer_size": 5_000_000, "total": 50_000}),
    "buffer-small": ("control", {"buffer_size": 500}),
    "buffer-unused": ("control", {"learning_starts": 60_000, "total": 50_000}),
    "range-exploration": ("control", {"exploration_end": 0.9}),
    "range-grad-norm": ("control", {"max_grad_norm": 100.0}),
    "range-llm-lr": ("llm", {"lr": 1e-4, "model": "pretrained"}),
    "range-group": ("llm", {"group": 2}),
    "range-llm-lam": ("llm", {"lam": 0.5}),
    "range-llm-entropy": ("llm", {"entropy_coef": 0.05}),
    "range-gpu-memory": ("llm", {"gpu_memory": 0.95}),
    "nan-hidden": ("llm", {"nan_filter": True}),
}


@pytest.mark.parametrize("rule", LLM)
def test_logs_of_language_models(rule):
    assert diagnose(log("llm", LLM[rule]))[0].id == rule


def test_a_reward_that_pays_for_length_is_hacked():
    growing = {"length": line(100, 400), "truncated_share": line(0.0, 0.9), "reward": RISING}
    assert diagnose(log("llm", growing))[0].id == "hacked"
    for without in growing:
        rest = {name: values for name, values in growing.items() if name != without}
        assert "hacked" not in [f.id for f in diagnose(log("llm", rest))]


@pytest.mark.parametrize("rule", CONTROL)
def test_logs_of_control(rule):
    columns, settings = CONTROL[rule]
    assert diagnose(log("control", columns, settings, framework="sb3"))[0].id == rule


@pytest.mark.parametrize("rule", TEXT)
def test_lines_of_text(rule):
    assert diagnose(log("llm", {"reward": RISING}, mentions=TEXT[rule]))[0].id == rule


@pytest.mark.parametrize("rule", SETTINGS)
def test_settings_before_a_run(rule):
    kind, settings = SETTINGS[rule]
    assert rule in [f.id for f in preflight(log(kind, settings=settings, framework="polopt"))]


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        # A solved task pays the same all the time, at the top.
        ({"reward": line(20, 500)[:15] + [500.0] * 25}, {"lam": 0.8}),
        ({"reward": line(20, 500)[:15] + [500.0] * 25, "length": flat(500.0)}, {"gamma": 0.9}),
        # A replay buffer fills.
        ({"memory_host": line(1, 9, 0.0), "reward": RISING}, {"buffer_size": 50_000}),
        # Nearly all time goes into environments, but they are fast.
        ({"collect_time": flat(0.9), "update_time": flat(0.05), "speed": flat(9000.0)}, {}),
        # Everything slows down alike: the machine has other work.
        ({"collect_time": line(1, 4, 0), "update_time": line(1, 4, 0),
          "speed": [2000 / (1 + 3 * i / N) for i in range(N)]}, {}),
        # Updates take longer, since fewer passes are ended by a target KL.
        ({"collect_time": flat(0.1, 0.0), "update_time": line(0.2, 1.0, 0.0),
          "speed": [3000 / (1 + 3 * i / N) for i in range(N)]}, {}),
        # Another program begins.
        ({"speed": [2000.0 - i if i < N // 2 else 800.0 - i for i in range(N)]}, {}),
        # Before learning begins a run is only faster.
        ({"speed": [9000.0] * 15 + flat(1000.0)[15:], "mean_speed": [9000.0] * N}, {}),
        # SAC holds its entropy at a target, whatever its sign.
        ({"entropy": line(0.6, 0.0, 0.0), "reward": STILL[:30], "temperature_alpha": STILL}, {}),
        # Little was learnt, little is lost.
        ({"reward": [-1390.0] * 8 + [-1190.0] * 16 + [-1270.0] * 16}, {}),
        # One bad batch at the end.
        ({"reward": [*line(20, 90)[:39], -60.0]}, {}),
        # Fewer random actions: DQN's return falls before it rises.
        ({"reward": [20.0] * 8 + [10.0] * 20 + line(10, 16)[:12]}, {}),
    ],
)  # fmt: skip
def test_what_looks_like_a_fault_and_is_none(columns, settings):
    assert diagnose(log("control", columns, settings, framework="polopt")) == []


def test_a_loss_that_is_no_divergence_is_not_its_coefficient():
    """As TRL logs at a low learning rate: the loss is small, the divergence next to nothing."""
    columns = {"loss": flat(0.05), "kl_ref": flat(1e-7), "reward": STILL}
    found = [diagnose(log("llm", {**columns, "kl_ref": flat(kl)})) for kl in (1e-7, 1e-4, 5e-3)]
    assert ["kl-coef-high" in [f.id for f in x] for x in found] == [False, False, True]


def test_a_clip_of_a_mean_over_tokens_acts_on_most_answers():
    columns = {"clip_fraction": [0.0, 0.8] * (N // 2), "kl_update": flat(0.0005), "reward": RISING}
    found = [diagnose(log("llm", columns, {"clip": c, "epochs": 2})) for c in (3e-4, 0.2)]
    assert [[f.id for f in x] for x in found] == [[], ["llm-clip-high"]]


def test_every_rule_has_a_test():
    faults = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())
    planted = {rule for table in faults.values() for row in table for rule in row["accept"]}
    tested = planted | {*LLM, *CONTROL, *TEXT, *SETTINGS}
    assert {rule.id for rule in rules()} - tested == set()


@pytest.mark.parametrize(
    ("logged", "framework", "metric", "factor"),
    [
        ("rewards/repetition/mean", "polopt", "repetition", -1.0),
        ("rewards/repetition_penalty_reward/mean", "trl", "repetition", -1.0),
        ("rewards/parses/failed", "polopt", "reward_failed", 1.0),
        ("rewards/parses/mean", "trl", "reward_part", 1.0),
        ("system/gpu_utilisation", "polopt", "device_use", 1.0),
        ("system/host_memory_gb", "polopt", "memory_host", 1.0),
        ("global_seqlen/balanced_max", "verl", "rank_tokens_max", 1.0),
        ("val-core/gsm8k/acc/mean@1", "verl", "eval_reward", 1.0),
        ("train/reward", "trl", "reward", 1.0),
        ("step_time", "polopt", "step_time", 1.0),
        ("timing_s/step", "verl", "step_time", 1.0),
    ],
)
def test_names_that_stand_for_a_metric(logged, framework, metric, factor):
    alias = canonical(logged, framework)
    assert (alias.name, alias.factor) == (metric, factor)
