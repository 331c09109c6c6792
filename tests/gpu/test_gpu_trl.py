"""TRL and ours side by side, the planner's peaks, and vLLM in the process and beside it."""

import gc
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")
if find_spec("vllm") and not torch.cuda.is_available():
    import vllm_setup  # noqa: F401  # how vLLM runs on a CPU

import measures
import measures_trl

MISMATCH = {"cpu": 1e-5, "cuda": 2e-2}
"""Mean difference of log-probs between vLLM and trainer: float32, and bfloat16 on a GPU."""


def test_step_time_against_trl_and_the_planned_peak(device, record, tmp_path):
    plan = pytest.importorskip("polopt.launch.plan.phases")
    from polopt.launch.plan.architecture import from_config
    from polopt.launch.plan.gpus import find_gpu
    from polopt.launch.plan.setup import Setup

    small = device.type == "cpu"
    shape = {"hidden": 64, "layers": 2, "vocabulary": 199}
    batch = {"micro_batch": 4, "accumulate": 2, "prompt": 8, "answer": 16, "count": 1}
    if not small:
        shape = {"hidden": 1024, "layers": 28, "vocabulary": 151_936}
        batch = {"micro_batch": 8, "accumulate": 4, "prompt": 128, "answer": 1024, "count": 3}
    seconds, peaks, answers = {}, {}, []
    for kind in ("trl", "polopt"):
        model = measures.qwen3(device, **shape)
        model.save_pretrained(tmp_path / kind)
        clock, made = measures_trl.steps(kind, model, device, tmp_path / kind, **batch)
        seconds[kind] = sum(clock.seconds) / len(clock.seconds)
        peaks[kind] = clock.peak
        answers.append(made)
        config = model.config.to_dict()
        del model
        gc.collect()
        if not small:
            torch.cuda.empty_cache()
    assert answers[0] == answers[1]  # both were given the same
    setup = Setup(
        model=from_config(config, name="made here"),
        gpu=find_gpu("H200"),
        precision="mixed",
        attention="sdpa",
        vllm="none",
        prompt_length=batch["prompt"],
        completion_length=batch["answer"],
        micro_batch=batch["micro_batch"],
    )
    planned = plan.plan(setup).phase("update").total - plan.ASSUMED["CUDA context and NCCL"]
    assert planned > 0
    memory = {} if small else {f"{k}_peak_gib": round(v, 2) for k, v in peaks.items()}
    record(
        f"optimizer step by TRL and by polopt, {device.type}",
        trl_s=round(seconds["trl"], 3),
        polopt_s=round(seconds["polopt"], 3),
        polopt_over_trl=round(seconds["polopt"] / seconds["trl"], 2),
        planned_peak_gib=round(planned, 2),
        **memory,
    )


@pytest.mark.slow
def test_vllm_in_the_trainers_process(device, record, tmp_path):
    pytest.importorskip("vllm")
    model = measures_trl.served(device, tmp_path / "model")
    engine = {"enforce_eager": True, "dtype": "bfloat16"}
    if device.type == "cpu":
        engine |= {"kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    trainer, history = measures_trl.train_by_vllm(
        device, model, tmp_path / "run", 8, {"vllm_mode": "colocate"}, engine=engine
    )
    mean = max(h["sampling/sampling_logp_difference/mean"] for h in history)
    assert mean <= MISMATCH[device.type]
    trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    record(
        f"vLLM colocated, {engine['dtype']}, {device.type}",
        syncs=len(history),
        mean_log_prob_difference=f"{mean:.1e}",
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_vllm_server_and_its_weights(device, record, tmp_path, monkeypatch):
    """By gloo on a CPU; on a GPU by NCCL to a server on the second one."""
    pytest.importorskip("vllm")
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from polopt.ext.vllm.server import EngineSettings, Server, _free_port

    model = measures_trl.served(device, tmp_path / "model")
    gpu = device.type == "cuda"
    dtype = "bfloat16" if gpu else "float32"
    flags = {"max_num_seqs": 64} if gpu else {"kv_cache_memory_bytes": 64 << 20}
    settings = EngineSettings(dtype=dtype, max_model_length=48, flags=flags)
    if gpu:  # of the server alone: this process has its devices by now
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with Server(model, settings, tmp_path / "log") as server:
        config = {
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_group_port": _free_port("127.0.0.1"),
        }
        trainer, history = measures_trl.train_by_vllm(
            device, model, tmp_path / "run", 6, config, client={"key": server.key}, server=server
        )
        mean = max(h["sampling/sampling_logp_difference/mean"] for h in history)
        assert mean <= MISMATCH[device.type]
        trainer.vllm_generation.vllm_client.close_communicator()
    record(
        f"vLLM server, {'nccl' if gpu else 'gloo'}, {dtype}",
        syncs=len(history),
        mean_log_prob_difference=f"{mean:.1e}",
    )
