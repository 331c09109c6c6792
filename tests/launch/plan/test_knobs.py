import pytest

from polopt.launch.plan.architecture import load
from polopt.launch.plan.gpus import GPUS, find_gpu
from polopt.launch.plan.knobs import GUIDE, KNOBS, effect, effects, faster, way_out
from polopt.launch.plan.parallel import choose
from polopt.launch.plan.phases import plan
from polopt.launch.plan.setup import Setup


def helping(planned):
    return [e.knob.name for e in effects(planned) if e.helps]


def test_memory_of_generation(guide):
    """E35: the micro-batch, first in 10.6, cannot help where sampling overflows."""
    planned = plan(guide(vllm_memory=0.9))
    assert planned.worst.name == "generation"
    assert helping(planned)[:2] == ["optimizer_offload", "vllm_memory"]
    marks = {n: effect(KNOBS[n], planned, planned.worst).helps for n in GUIDE["10.6"]}
    assert marks == {"micro_batch": False, "log_prob_batch": False, "parameter_offload": False}


def test_memory_of_the_update(guide):
    """verl's offload cannot help an update: states come back for it."""
    planned = plan(guide(checkpointing=False, parameter_offload=False))
    assert planned.worst.name == "update"
    found = helping(planned)
    assert found[:2] == ["checkpointing", "micro_batch"]
    assert not {"parameter_offload", "optimizer_offload", "vllm_memory"} & set(found)


def test_whole_gradients_are_reduced_first(guide):
    assert helping(plan(guide(gradient_sync="last")))[0] == "gradient_sync"


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_memory": 0.9},
        {"checkpointing": False},
        {"gradient_sync": "last"},
        {"gpus": 8},
        {"gpus": 4, "tensor_parallel": 4},
        {"vllm_memory": 0.15},
    ],
)
def test_way_out_ends_where_it_says(guide, changes):
    planned = plan(guide(**changes))
    assert planned.verdict == "does not fit"
    chain = way_out(planned)
    assert chain
    assert chain[-1].plan.verdict != "does not fit"
    # Replaying the settings gives the same plan: nothing else was turned.
    settings = dict(changes)
    for step in chain:
        settings |= step.settings
    assert plan(guide(**settings)).verdict == chain[-1].plan.verdict


def test_more_cards_come_last(guide):
    """They are taken where nothing else helps the phase that overflows."""
    current = plan(guide(gpus=4))
    names = []
    for step in way_out(current):
        if step.knob.name == "gpus":
            assert [e.knob.name for e in effects(current) if e.helps] == ["gpus"]
        names.append(step.knob.name)
        current = step.plan
    assert "gpus" in names


def test_no_way_out_of_a_model_that_is_too_large():
    setup = Setup(model=load("llama-3.3-70b"), gpu=find_gpu("T4"), vllm="none")
    assert way_out(plan(setup)) == [] or way_out(plan(setup))[-1].plan.verdict == "does not fit"


def test_nothing_is_turned_where_it_fits(guide):
    assert way_out(plan(guide())) == []


def test_vllm_without_room_gets_more(guide):
    planned = plan(guide(vllm_memory=0.2, tensor_parallel=4))
    assert planned.worst.problem
    found = {e.knob.name: e for e in effects(planned)}
    assert found["vllm_memory"].helps
    assert found["vllm_memory"].settings == {"vllm_memory": 0.25}
    assert found["tensor_parallel"].helps


def test_speed_steps_of_the_guide(guide):
    verdicts = {text: p.verdict for text, p in faster(plan(guide()))}
    assert verdicts["parameter_offload=false"] == "fits"
    assert verdicts["vllm_memory=0.8"] == "edge"


def test_a_small_model_needs_no_sharding():
    setup = Setup(model=load("qwen2.5-0.5b"), gpu=find_gpu("H100-80"), gpus=8)
    choice = choose(setup)
    assert choice.settings == {"tensor_parallel": 1, "sharding": "none"}
    assert choice.guide.startswith("fits on one card")


def test_a_large_model_is_sharded_as_far_as_needed(guide):
    choice = choose(guide())
    assert choice.settings["sharding"] == "fsdp"
    assert choice.settings["shards"] == 32
    rows = {r["shards"]: r["verdict"] for r in choice.sharding}
    assert rows[8] == "does not fit"
    assert rows[16] == "risk"
    assert rows[32] == choice.verdict == "fits"
    assert "over 32 cards" in " ".join(choice.reasons)


def test_sequence_parallel_is_chosen_for_one_long_sequence(guide):
    long = guide(
        model=load("qwen2.5-7b"), gpus=4, completion_length=200_000, optimizer_offload=True
    )
    choice = choose(long)
    assert choice.settings["sequence_parallel"] in (2, 4)
    assert "long: tensor parallel and Ulysses" in choice.guide


def test_the_choice_holds_when_planned(guide):
    choice = choose(guide())
    assert plan(guide(**choice.settings)).verdict == choice.verdict


@pytest.mark.parametrize(
    ("name", "found"),
    [("h100_80", "H100-80"), ("H100-80GB", "H100-80"), ("l4", "L4-24"), ("rtx4090", "RTX4090-24")],
)
def test_cards_by_other_spellings(name, found):
    assert find_gpu(name) is GPUS[found]


def test_cards_by_size():
    assert find_gpu("48GiB").memory == 48
    assert find_gpu("80GB").memory == pytest.approx(80e9 / 2**30)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("H100-81", "did you mean 'H100-80'"),
        ("A100", "A100-40 or A100-80"),
        ("0GiB", "expected 1 to 2000 GiB"),
        ("", "unknown card ''"),
    ],
)
def test_cards_that_are_not_known(name, words):
    with pytest.raises(ValueError, match=words):
        find_gpu(name)
