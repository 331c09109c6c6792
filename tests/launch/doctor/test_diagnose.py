"""Rules as data, what the predicates see, folding and ranking."""

import math
import re
from pathlib import Path

import pytest

from polopt.launch.doctor import examine, predicates
from polopt.launch.doctor.catalog import replace_tables
from polopt.launch.doctor.diagnose import diagnose, preflight
from polopt.launch.doctor.log import Log, Mention, Series
from polopt.launch.doctor.names import FRAMEWORKS, aliases, parameter, table
from polopt.launch.doctor.rules import rules


def series(values, steps=None):
    found = Series()
    for step, value in zip(steps or range(len(values)), values, strict=True):
        found.add(step, value)
    return found


def log(kind="control", framework="polopt", settings=None, **columns):
    made = Log(source="test", framework=framework, kind=kind, settings=settings or {})
    made.columns = {n: series(v) for n, v in columns.items()}
    made.names = {n: n for n in columns}
    made.paths = {n: n for n in made.settings}
    return made


def wave(count=60, start=0.0, slope=1.0, noise=0.5):
    return [start + slope * i + noise * math.sin(12.9898 * i) for i in range(count)]


HEALTHY = {
    "reward": wave(start=20, slope=3, noise=15),
    "kl_update": wave(start=0.012, slope=0, noise=0.004),
    "clip_fraction": wave(start=0.12, slope=0, noise=0.05),
    "entropy": wave(start=0.69, slope=-0.004, noise=0.01),
    "grad_norm": wave(start=0.4, slope=0, noise=0.1),
    "explained_variance": wave(start=0.1, slope=0.01, noise=0.05),
    "loss_policy": wave(start=-0.01, slope=0, noise=0.01),
    "loss_value": wave(start=0.4, slope=0.001, noise=0.1),
}


def found(made):
    return [f.id for f in diagnose(made)]


def test_a_healthy_run_is_left_alone():
    assert found(log(**HEALTHY)) == []


def test_every_rule_has_remedies_in_every_framework():
    for rule in rules():
        for name in re.findall(r"\{(\w+)\}", rule.remedy):
            for framework in FRAMEWORKS:
                for kind in ("control", "llm"):
                    assert parameter(name, framework, kind)
        assert rule.cause.strip()
        assert rule.source.strip()


def test_the_tables_of_the_document_are_those_of_the_rules():
    text = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    assert replace_tables(text) == text, "python -m polopt.launch.doctor.catalog docs/doctor.md"


def test_names_of_metrics_are_unique_in_each_framework():
    for framework in FRAMEWORKS:
        words = [w.partition("*-")[0] for row in table("aliases") for w in row[framework].split()]
        assert len(words) == len(set(words)), framework
        assert len(aliases(framework)) == len(words)


def test_nan_is_the_root_and_fatal():
    made = log(**HEALTHY)
    made.columns["grad_norm"].add(61, math.nan)
    made.columns["explained_variance"] = series([0.0] * 60)
    (only,) = diagnose(made)
    assert (only.id, only.level) == ("nonfinite", "fatal")
    assert [s.id for s in only.symptoms] == ["critic-dead"]
    assert "first at step 61" in only.evidence[0].text


def test_a_high_learning_rate_explains_what_follows_from_it():
    columns = HEALTHY | {
        "kl_update": wave(start=0.5, slope=0, noise=0.1),
        "clip_fraction": wave(start=0.6, slope=0, noise=0.05),
        "reward": wave(30, 20, 3, 1) + wave(30, 20, 0, 5),
    }
    (only,) = diagnose(log(framework="sb3", **columns))
    assert only.id == "lr-too-high"
    assert "learning_rate" in only.remedy
    assert {"kl-high", "clip-fraction-high", "reward-collapse"} <= {s.id for s in only.symptoms}
    assert only.evidence[0].values
    assert only.evidence[0].first == 0


def test_many_passes_are_told_from_a_high_learning_rate_by_the_setting():
    columns = HEALTHY | {
        "kl_update": wave(start=0.5, slope=0, noise=0.1),
        "clip_fraction": wave(start=0.6, slope=0, noise=0.05),
    }
    assert found(log(settings={"epochs": 28}, **columns))[0] == "too-many-epochs"
    assert found(log(settings={"epochs": 8}, **columns))[0] == "lr-too-high"


def test_width_of_the_clip_shows_without_knowing_it():
    wide = HEALTHY | {"kl_update": [0.3] * 60, "clip_fraction": [0.01] * 60}
    assert found(log(**wide))[0] == "clip-too-wide"
    narrow = HEALTHY | {"kl_update": [1e-5] * 60, "clip_fraction": [0.8] * 60}
    assert found(log(**narrow))[0] == "clip-too-narrow"


def test_rules_of_the_other_kind_are_not_tried():
    wide = HEALTHY | {"kl_update": [0.3] * 60, "clip_fraction": [0.01] * 60}
    assert "clip-too-wide" not in found(log(kind="llm", framework="verl", **wide))


def test_out_of_memory_by_phase():
    made = log(kind="llm", framework="trl", reward=wave())
    made.mentions = [Mention(kind="oom", phase="update", line=7, text="CUDA out of memory")]
    first = diagnose(made)[0]
    assert first.id == "oom-update"
    assert "gradient_checkpointing" in first.remedy
    assert "line 7" in first.evidence[0].text
    assert [s.id for s in first.symptoms] == ["oom"]


def test_a_rule_is_silent_where_it_cannot_see():
    assert found(log(reward=wave())) == []
    assert found(log(**{k: v[:4] for k, v in HEALTHY.items()})) == []


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({"lr": 0.5}, "control", "range-lr"),
        ({"lr": 3e-4}, "control", None),
        ({"clip": 0.9}, "control", "range-clip"),
        ({"gamma": 0.3}, "control", "range-gamma"),
        ({"save_every": 500, "total": 350}, "llm", "no-checkpoint"),
        ({"save_every": 50, "total": 350}, "llm", None),
        ({"top_p": 0.9, "corrections": [{"use": "Reweight"}]}, "llm", "top-p-corrected"),
        ({"top_p": 0.9, "corrections": []}, "llm", None),
        ({"use_kl": True, "kl_coef": 0}, "llm", "kl-without-coefficient"),
        ({"lr": 1e-4, "model": "pretrained"}, "llm", "range-llm-lr"),
        ({"lr": 5e-4, "model": "tiny_qwen3"}, "llm", None),
        (
            {"epochs": 1, "minibatch": 512, "batch": 512, "clip": 0.2},
            "control",
            "clip-without-effect",
        ),
    ],
)
def test_checklist(settings, kind, expected):
    got = [f.id for f in preflight(log(kind=kind, settings=settings))]
    assert got == ([] if expected is None else [expected])


def test_hints_about_settings_do_not_count_against_a_finished_run():
    settings = {"epochs": 1, "minibatch": 512, "batch": 512, "clip": 0.2}
    assert found(log(settings=settings, **HEALTHY)) == []


@pytest.mark.parametrize(
    ("name", "values", "given", "seen"),
    [
        ("above", [3] * 10, {"value": 2}, True),
        ("above", [3] * 5 + [1] * 5, {"value": 2}, False),
        ("below", [1] * 10, {"value": 2}, True),
        ("spikes", [1] * 20 + [50], {"factor": 10}, True),
        ("spikes", [1] * 20 + [5], {"factor": 10}, False),
        ("grown", [1] * 10 + [9] * 10, {"factor": 5}, True),
        ("not_grown", [1] * 10 + [9] * 10, {"factor": 5}, False),
        ("shrunk", [9] * 10 + [1] * 10, {"factor": 0.2}, True),
        ("risen", wave(slope=0.1), {}, True),
        ("risen", wave(slope=0.0), {}, False),
        ("not_risen", wave(slope=0.0), {}, True),
        ("fallen", wave(slope=-0.1), {}, True),
        ("not_fallen", wave(slope=-0.1, start=10), {}, False),
        ("rising", wave(noise=0.0), {}, True),
        ("rising", wave(slope=0.0), {}, False),
        ("falling", wave(slope=-1.0, noise=0.0), {}, True),
        ("falling", [9.0] * 10 + [1.0] * 10, {}, False),
        ("constant", [5.0] * 10, {}, True),
        ("constant", [5.0] * 9 + [5.1], {}, False),
        ("collapsed", wave(30) + [0.0] * 30, {}, True),
        ("collapsed", wave(60), {}, False),
        ("collapsed", wave(30) + [14.0] * 30, {}, False),  # half of its best is left
        ("collapsed", [9.0] * 20 + [99.0, 99.0] + [9.0] * 20, {}, False),  # two lucky batches
        ("collapsed", wave(58) + [0.0] * 2, {}, False),  # too short a fall
        ("not_at_best", wave(30) + [30.0] * 30, {}, False),
        ("beyond_size", [-3.0] * 9, {"value": 2}, True),
        ("within_size", [-3.0] * 9, {"value": 2}, False),
    ],
)  # fmt: skip
def test_predicates(name, values, given, seen):
    result = predicates.PREDICATES[name](series([float(v) for v in values]), **given)
    assert (result is not None) is seen


def test_wrong_tests_are_refused_when_the_rules_are_read():
    for test in (
        {"metric": "reward", "is": "odd"},
        {"metric": "reward", "is": "above", "val": 1},
        {"setting": "lr", "is": "near"},
        {"reward": 1},
    ):
        with pytest.raises(ValueError, match=r"test|takes"):
            examine.check_test(test)
