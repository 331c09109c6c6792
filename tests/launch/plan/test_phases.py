import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polopt.launch.plan.architecture import load, model_names
from polopt.launch.plan.arithmetic import arithmetic, notes
from polopt.launch.plan.gpus import GIB, find_gpu
from polopt.launch.plan.phases import VERDICTS, Phase, plan
from polopt.launch.plan.report import as_json, as_markdown
from polopt.launch.plan.setup import Setup, change


@st.composite
def setups(draw):
    """Draw a setup; all of its parts are sensible, few of them fit."""
    model = load(draw(st.sampled_from(model_names())))
    engine = draw(st.sampled_from(["trl", "verl"]))
    gpus = draw(st.sampled_from([2, 4, 8, 16]))
    kinds = ["none", "fsdp", "zero1", "zero2", "zero3"] if engine == "trl" else ["fsdp"]
    sharding = draw(st.sampled_from(kinds))
    attention = ["flash", "eager"] + ([] if model.model_type == "gemma2" else ["sdpa"])
    return Setup(
        model=model,
        gpu=find_gpu("H100-80"),
        gpus=gpus,
        engine=engine,
        sharding=sharding,
        prompt_length=draw(st.integers(1, 4096)),
        completion_length=draw(st.integers(1, 4096)),
        micro_batch=draw(st.integers(1, 16)),
        checkpointing=draw(st.booleans()),
        attention=draw(st.sampled_from(attention)),
        head="fused" if engine == "trl" else draw(st.sampled_from(["fused", "full"])),
        gradient_sync=draw(st.sampled_from(["auto", "each", "last"])),
        optimizer_offload=engine == "verl" and draw(st.booleans()),
        reference=draw(st.booleans()),
        critic=draw(st.sampled_from(["none", "shared", "separate"])),
        vllm=draw(st.sampled_from(["colocate", "server", "none"])),
        vllm_memory=draw(st.floats(0.1, 0.9)),
        vllm_sleep=draw(st.booleans()),
    )


def totals(setup):
    return {phase.name: phase.total for phase in plan(setup).phases}


def check_grows(small, large):
    """Check that no phase of `large` needs less."""
    before, after = totals(small), totals(large)
    assert before.keys() == after.keys()
    for name in before:
        assert after[name] >= before[name] - 1e-9, name


def check_grows_where_both(small, large, without=""):
    before, after = totals(small), totals(large)
    for name in before.keys() & after.keys() - {without}:
        assert after[name] >= before[name] - 1e-9, name


@settings(max_examples=150, deadline=None)
@given(setups(), st.integers(1, 16))
def test_larger_batches_need_no_less(setup, more):
    if setup.sharding == "fsdp" and not setup.synced:
        setup = replace(setup, prompts_per_rollout=10**6)  # some accumulation on both sides
    check_grows(setup, replace(setup, micro_batch=setup.micro_batch + more))


@settings(max_examples=150, deadline=None)
@given(setups(), st.integers(1, 4096), st.sampled_from(["prompt_length", "completion_length"]))
def test_longer_sequences_need_no_less(setup, more, which):
    check_grows(setup, replace(setup, **{which: getattr(setup, which) + more}))


@settings(max_examples=150, deadline=None)
@given(setups())
def test_more_gpus_need_no_more(setup):
    setup = replace(setup, prompts_per_rollout=10**6)
    check_grows(replace(setup, gpus=2 * setup.gpus), setup)


@settings(max_examples=100, deadline=None)
@given(setups())
def test_more_tensor_parallel_leaves_more_cache_and_fewer_weights(setup):
    heads = setup.model.heads
    sizes = [n for n in (1, 2, 4, 8) if heads % n == 0 and setup.gpus % n == 0]
    engines = [plan(replace(setup, vllm="colocate", tensor_parallel=n)).engine for n in sizes]
    for small, large in itertools.pairwise(engines):
        assert large.weights == pytest.approx(small.weights / 2)
        assert large.cache > small.cache
        assert large.sequences >= small.sequences
        assert large.token <= small.token


@settings(max_examples=100, deadline=None)
@given(setups())
def test_a_reference_and_a_waking_vllm_need_no_less(setup):
    check_grows_where_both(replace(setup, reference=False), replace(setup, reference=True))
    check_grows_where_both(
        replace(setup, vllm_sleep=True), replace(setup, vllm_sleep=False), without="sync"
    )


@settings(max_examples=100, deadline=None)
@given(setups())
def test_parts_are_positive_and_the_verdict_is_the_worst_phase(setup):
    planned = plan(setup)
    for phase in planned.phases:
        assert all(size >= 0.0 for size in phase.parts.values())
        assert phase.total == pytest.approx(sum(phase.parts.values()))
        assert phase.margin == pytest.approx(setup.gpu.memory - phase.total)
        assert VERDICTS.index(planned.verdict) >= VERDICTS.index(phase.verdict)
    assert planned.verdict in {phase.verdict for phase in planned.phases}
    if planned.engine and planned.engine.cache > 0:
        inside = [v for k, v in planned.phase("generation").parts.items() if k.startswith("vLLM")]
        assert sum(inside) == pytest.approx(setup.vllm_memory * setup.gpu.memory)


@settings(max_examples=60, deadline=None)
@given(setups())
def test_every_plan_can_be_reported(setup):
    planned = plan(setup)
    content = json.loads(json.dumps(as_json(planned, ["x"]), allow_nan=False))
    assert content["verdict"] == planned.verdict
    assert content["worst_phase"] == planned.worst.name
    text = as_markdown(planned, ["x"])
    assert text.startswith(f"## {setup.model.name} on {setup.gpus} × H100-80: {planned.verdict}\n")
    assert "nan" not in text.split()
    for step in content["way_out"]:
        assert step["helps"]


def test_states_of_the_guide_in_gib(guide):
    """16 bytes per parameter over 32 cards: the bytes are those of the definition."""
    p = 32_762_123_264
    parts = plan(guide()).phase("update").parts
    assert parts["weights"] == pytest.approx(4 * p / 32 / 2**30)
    assert parts["optimizer"] == pytest.approx(8 * p / 32 / 2**30)
    assert parts["gradients"] == pytest.approx(4 * p / 32 / 2**30)
    assert parts["kept activations"] >= 2 * 5120 * 64 * 8192 / 2**30
    assert parts["left by a sleeping vLLM"] == 1.5


def test_vllm_of_the_guide(guide):
    engine = plan(guide()).engine
    assert engine.share == pytest.approx(0.7 * 79.6)
    assert engine.weights == pytest.approx(2 * 32_762_123_264 / 4 / GIB)
    assert engine.token == 2 * 2 * 64 * 8 * 128 // 4
    assert engine.replicas == 8
    assert engine.waiting == 512
    assert engine.sequences == int(engine.cache * GIB / engine.token / 4096) == 145


def test_more_cards_than_key_heads_keep_one_head_each(guide):
    assert (
        plan(guide(tensor_parallel=8)).engine.token == plan(guide(tensor_parallel=16)).engine.token
    )


def test_published_weights_of_a_vllm_run():
    """vLLM reported 14.2474 GiB per GPU for Qwen3-30B-A3B at tensor parallel 4."""
    setup = Setup(
        model=load("qwen3-30b-a3b"), gpu=find_gpu("H100-80"), gpus=4, sharding="fsdp",
        tensor_parallel=4,
    )  # fmt: skip
    assert plan(setup).engine.weights == pytest.approx(14.2474, rel=0.005)


@pytest.mark.parametrize(
    ("changes", "verdict", "phase"),
    [
        ({}, "fits", "generation"),
        ({"vllm_memory": 0.8}, "edge", "generation"),
        ({"vllm_memory": 0.9}, "does not fit", "generation"),
        ({"vllm_memory": 0.9, "optimizer_offload": True}, "edge", "generation"),
        ({"checkpointing": False}, "does not fit", "update"),
        ({"gradient_sync": "last"}, "does not fit", "update"),
        ({"gpus": 8}, "does not fit", "generation"),
        ({"gpus": 8, "vllm_memory": 0.6, "optimizer_offload": True}, "does not fit", "update"),
        ({"sequence_parallel": 1}, "risk", "update"),
    ],
)
def test_verdicts_of_the_guide(guide, changes, verdict, phase):
    planned = plan(guide(**changes))
    assert (planned.verdict, planned.worst.name) == (verdict, phase)


def test_offload_of_verl_helps_generation_and_not_the_update(guide):
    kept = guide(parameter_offload=False)
    for name in ("parameter_offload", "optimizer_offload"):
        before, after = totals(kept), totals(replace(kept, **{name: True}))
        assert after["generation"] < before["generation"] - 3
        assert after["update"] == pytest.approx(before["update"])


def test_streaming_offload_takes_states_off_in_every_phase():
    setup = Setup(
        model=load("qwen3-8b"), gpu=find_gpu("H100-80"), gpus=8, sharding="fsdp", vllm="server",
        gradient_sync="each",
    )  # fmt: skip
    off = plan(replace(setup, parameter_offload=True, optimizer_offload=True))
    for phase in off.phases:
        assert not {"weights", "optimizer", "gradients"} & phase.parts.keys()
    assert off.host == pytest.approx(12 * setup.model.parameters / GIB)


@pytest.mark.parametrize("streaming", [True, False])
def test_offload_policy_of_verl_streams(guide, streaming):
    off = {"parameter_offload": True, "optimizer_offload": True}
    parts = plan(guide(streaming=streaming, **off)).phase("update").parts
    assert ("optimizer" in parts) is not streaming


def test_gradients_stay_whole_where_they_are_reduced_last(guide):
    whole = 2 * guide().model.parameters / GIB
    each, last = (
        plan(guide(gradient_sync=s)).phase("update").parts["gradients"] for s in ("auto", "last")
    )
    assert last - each == pytest.approx(whole)
    one_pass = guide(gradient_sync="last", micro_batch=32)  # nothing to accumulate
    assert plan(one_pass).phase("update").parts["gradients"] == pytest.approx(each)


def test_reference_under_fsdp_of_accelerate_is_gathered_whole():
    setup = Setup(
        model=load("qwen3-8b"), gpu=find_gpu("H100-80"), gpus=8, sharding="fsdp", reference=True
    )
    whole = 2 * setup.model.parameters / GIB
    parts = plan(setup).phase("reference").parts
    assert parts["reference gathered whole"] == pytest.approx(whole)
    assert plan(setup).phase("update").parts["reference weights"] == pytest.approx(whole / 8)


@pytest.mark.parametrize(
    ("kind", "weights", "optimizer", "gradients"),
    [
        ("none", 2, 4, 2),
        ("fsdp", 4 / 8, 8 / 8, 4 / 8),
        ("zero1", 2, 12 / 8, 2),
        ("zero2", 2, 12 / 8, 2 / 8),
        ("zero3", 2 / 8, 12 / 8, 2 / 8),
    ],
)
def test_bytes_per_parameter(kind, weights, optimizer, gradients):
    setup = Setup(
        model=load("qwen3-8b"), gpu=find_gpu("H100-80"), gpus=8, sharding=kind,
        gradient_sync="each",
    )  # fmt: skip
    parts, size = plan(setup).phase("update").parts, setup.model.parameters / GIB
    found = [parts[k] / size for k in ("weights", "optimizer", "gradients")]
    assert found == pytest.approx([weights, optimizer, gradients])


def test_no_room_for_one_sequence_is_said():
    setup = Setup(model=load("qwen3-32b"), gpu=find_gpu("H100-80"), gpus=8, sharding="fsdp")
    phase = plan(setup).phase("generation")
    assert phase.verdict == "does not fit"
    assert "no room for the keys and values of one sequence of 1536 tokens" in phase.problem


@pytest.mark.parametrize(
    ("total", "pooled", "verdict"),
    [
        (70.0, True, "fits"),
        (93.0, True, "edge"),
        (98.0, True, "does not fit"),
        (70.0, False, "fits"),
        (72.0, False, "risk"),
        (98.0, False, "does not fit"),
    ],
)
def test_thresholds(total, pooled, verdict):
    phase = Phase(name="x", parts={"a": total}, card=100.0, pooled=pooled)
    assert phase.verdict == verdict


def test_arithmetic_of_the_guide(guide):
    """The numbers that verl and TRL count for its script."""
    found = arithmetic(plan(guide()))
    expected = {
        "completions_per_rollout": 4096,
        "completions_per_optimizer_step": 256,
        "optimizer_steps_per_rollout": 16,
        "micro_batches_per_optimizer_step": 4,
        "tokens_per_micro_batch_per_gpu": 8192,
        "tokens_per_optimizer_step": 1_048_576,
        "tokens_per_rollout": 16_777_216,
        "log_prob_passes_per_rollout": 64,
        "vllm_replicas": 8,
        "sequences_per_replica": 512,
        "rollouts_per_epoch": 7,
        "rows_left_over_per_epoch": 305,
        "optimizer_steps_per_epoch": 112,
        "rollouts": 350,
        "optimizer_steps": 5600,
    }
    assert {k: found[k] for k in expected} == expected
    assert notes(plan(guide())) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"completions_per_step": 250}, "4096 completions are no multiple of 250"),
        ({"completions_per_step": 8192}, "more than the rollout's 4096"),
        ({"micro_batch": 3}, "3 × 8 = 24"),
        ({"rows": 100}, "100 rows do not fill one rollout"),
    ],
)
def test_batches_that_do_not_go_up_are_noted(guide, changes, words):
    assert any(words in note for note in notes(plan(guide(**changes))))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel: 3 does not divide the 64 attention heads"),
        ({"tensor_parallel": 64}, "tensor_parallel: 64 must divide gpus=32"),
        ({"sequence_parallel": 5}, "sequence_parallel: 5 must divide gpus=32"),
        ({"shards": 5}, "shards: 5 must divide gpus=32"),
        ({"engine": "trl", "sequence_parallel": 1, "optimizer_offload": True}, "head: TRL always"),
        ({"engine": "trl", "head": "fused"}, "sequence_parallel: TRL has none"),
        ({"engine": "megatron"}, "engine: unknown value 'megatron'"),
        ({"sharding": "zero3"}, "verl is planned with fsdp only"),
        ({"sharding": "none"}, "need sharding"),
        ({"gpus": 0}, "gpus: must be a whole number from 1"),
        ({"prompt_length": 10**12}, "prompt_length: must be a whole number from 1 to 1000000000"),
        ({"vllm_memory": 1.5}, r"vllm_memory: must be in \(0, 1\], got 1.5"),
        ({"epochs": 0.0}, "epochs: must be in"),
    ],
)
def test_settings_that_cannot_be_are_refused(guide, changes, words):
    with pytest.raises(ValueError, match=words):
        guide(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_offload": True}, "takes weights and optimizer together"),
        ({"sharding": "zero2", "parameter_offload": True}, "in zero3 only, not zero2"),
        ({"sharding": "zero1", "precision": "fp32"}, "ZeRO is planned with float32 masters"),
        ({"sharding": "none", "shards": 4}, "shards: 4 needs sharding"),
    ],
)
def test_offload_that_accelerate_lacks_is_refused(changes, words):
    settings = {"sharding": "fsdp", "gpus": 8} | changes
    with pytest.raises(ValueError, match=words):
        Setup(model=load("qwen3-8b"), gpu=find_gpu("H100-80"), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"micro_batc": 1}, "unknown setting 'micro_batc', did you mean 'micro_batch'"),
        ({"micro_batch": 1.5}, "micro_batch: must be a whole number, got 1.5"),
        ({"micro_batch": True}, "micro_batch: must be a whole number, got True"),
        ({"checkpointing": 1}, "checkpointing: must be true or false, got 1"),
        ({"engine": None}, "engine: must be a word, got None"),
        ({"model": "x"}, "unknown setting 'model'"),
    ],
)
def test_changes_are_checked(guide, settings, words):
    with pytest.raises(ValueError, match=words):
        change(guide(), settings)
