"""Generation: TRL's vLLM fields for colocation, and flags of a vLLM server."""

from importlib.resources import files
from typing import Any

from polopt.launch.verl.batch import Batch
from polopt.launch.verl.plan import Plan

__all__ = ["convert_rollout", "server_flags", "server_version"]

_ROLLOUT = "actor_rollout_ref.rollout."
_ENGINE = _ROLLOUT + "engine_kwargs.vllm."


def _stored() -> list[str]:
    text = (files("polopt.launch.verl") / "data" / "vllm_flags.txt").read_text()
    return text.split()


def server_version() -> str:
    """The vLLM version whose flags are stored."""
    return _stored()[0]


def server_flags() -> frozenset[str]:
    """The flags of `vllm serve` that an import may write."""
    return frozenset(_stored()[1:])


def convert_rollout(plan: Plan, batch: Batch) -> None:
    """Write lengths, sampling and the engine."""
    trainer = plan.trainer
    prompt = plan.integer("data.max_prompt_length", low=1)
    response = plan.integer("data.max_response_length", low=1)
    trainer["max_completion_length"] = response
    plan.say("data.max_response_length", "exact", "trainer.max_completion_length", "")
    plan.default("data.max_response_length", "trainer.max_completion_length", "verl: 512")
    for name, value in (("prompt_length", prompt), ("response_length", response)):
        item = plan.override(_ROLLOUT + name)
        if item is not None and item.value != value:
            plan.traps.append(
                f"line {item.line}: rollout.{name}={item.text} differs from data's "
                f"{value}, which the recipe takes"
            )
        plan.say(_ROLLOUT + name, "inert", "", f"verl copies it from data: {value}")
    _sampling(plan)
    _engine(plan, batch, prompt, response)
    _server(plan, batch)
    _engine_arguments(plan)


def _sampling(plan: Plan) -> None:
    trainer = plan.trainer
    for name in ("temperature", "top_p"):
        trainer[name] = plan.number(_ROLLOUT + name)
        plan.say(_ROLLOUT + name, "exact", f"trainer.{name}", "")
    top_k = plan.integer(_ROLLOUT + "top_k", low=-1)
    trainer["top_k"] = max(top_k, 0)
    plan.say(
        _ROLLOUT + "top_k",
        "converted" if top_k < 0 else "exact",
        "trainer.top_k",
        "-1 (off in vLLM) is 0 in TRL" if top_k < 0 else "",
    )
    if plan.flag(_ROLLOUT + "ignore_eos"):
        trainer["generation_kwargs"] = {"ignore_eos": True}
        plan.say(_ROLLOUT + "ignore_eos", "exact", "trainer.generation_kwargs", "")
    else:
        plan.say(_ROLLOUT + "ignore_eos", "no effect", "", "off")


def _engine(plan: Plan, batch: Batch, prompt: int, response: int) -> None:
    trainer = plan.trainer
    engine = plan.text(_ROLLOUT + "name") or "vllm"
    trainer["use_vllm"] = engine != "hf"
    if engine in ("vllm", "hf"):
        plan.say(_ROLLOUT + "name", "converted", "trainer.use_vllm", f"{engine != 'hf'}".lower())
    else:
        plan.say(
            _ROLLOUT + "name",
            "refused",
            "trainer.use_vllm",
            f"TRL generates with vLLM, not with {engine}; with --allow it does",
        )
    tensor = plan.integer(_ROLLOUT + "tensor_model_parallel_size", low=1)
    if tensor > batch.world or batch.world % tensor:
        plan.refusals.append(
            f"{_line(plan, 'tensor_model_parallel_size')}tensor parallelism of {tensor} does not "
            f"divide the {batch.world} processes"
        )
        tensor = 1
    used = plan.number(_ROLLOUT + "gpu_memory_utilization")
    if not 0 < used <= 1:
        raise plan.fail(_ROLLOUT + "gpu_memory_utilization", "in (0, 1]")
    longest = plan.value(_ROLLOUT + "max_model_len")
    length = prompt + response if longest is None else plan.integer(_ROLLOUT + "max_model_len")
    sleep = plan.flag(_ROLLOUT + "free_cache_engine")
    if trainer["use_vllm"]:
        trainer["vllm_mode"] = "colocate"
        trainer["vllm_tensor_parallel_size"] = tensor
        trainer["vllm_gpu_memory_utilization"] = used
        trainer["vllm_max_model_length"] = length
        trainer["vllm_enable_sleep_mode"] = sleep
    plan.say(
        _ROLLOUT + "tensor_model_parallel_size",
        "exact",
        "trainer.vllm_tensor_parallel_size",
        f"{batch.world // tensor} replicas",
    )
    plan.default(
        _ROLLOUT + "tensor_model_parallel_size",
        "trainer.vllm_tensor_parallel_size",
        f"verl: {tensor}",
    )
    plan.say(
        _ROLLOUT + "gpu_memory_utilization",
        "exact",
        "trainer.vllm_gpu_memory_utilization",
        "optimizer states stay on the GPU beside vLLM in TRL: polopt plan says if it fits",
    )
    plan.default(
        _ROLLOUT + "gpu_memory_utilization",
        "trainer.vllm_gpu_memory_utilization",
        f"verl: {used:g}, TRL: 0.3",
    )
    plan.say(
        _ROLLOUT + "max_model_len",
        "exact" if longest is not None else "converted",
        "trainer.vllm_max_model_length",
        "" if longest is not None else f"{length}",
    )
    plan.say(_ROLLOUT + "free_cache_engine", "converted", "trainer.vllm_enable_sleep_mode", "")
    plan.default(
        _ROLLOUT + "free_cache_engine",
        "trainer.vllm_enable_sleep_mode",
        "verl frees the cache during updates, TRL does not by default",
    )
    plan.say(
        "data.max_prompt_length",
        "ours",
        "task.max_prompt_length",
        f"TRL has no limit: the task drops longer prompts; with the response it gives "
        f"vllm_max_model_length = {prompt} + {response} = {prompt + response}",
    )
    plan.default("data.max_prompt_length", "task.max_prompt_length", f"verl: {prompt}")
    plan.vllm.update(
        {
            "--tensor-parallel-size": tensor,
            "--data-parallel-size": max(batch.world // tensor, 1),
            "--gpu-memory-utilization": used,
            "--max-model-len": length,
        }
    )


def _line(plan: Plan, name: str) -> str:
    item = plan.override(_ROLLOUT + name)
    return f"line {item.line}: " if item and item.line else ""


def _server(plan: Plan, batch: Batch) -> None:
    """What only a server of vLLM can be told; colocation in TRL fixes these."""
    fixed = {
        "max_num_batched_tokens": ("--max-num-batched-tokens", "4096"),
        "max_num_seqs": (
            "--max-num-seqs",
            f"{batch.per_device * batch.steps_per_generation} × tensor parallelism",
        ),
    }
    for name, (flag, colocated) in fixed.items():
        plan.vllm[flag] = plan.integer(_ROLLOUT + name, low=1)
        plan.say(
            _ROLLOUT + name,
            "approximate",
            f"vllm.txt {flag}",
            f"a server takes it; colocated in TRL it is {colocated}: speed and memory only",
        )
    switches = {
        "enforce_eager": ("--enforce-eager", "colocated vLLM captures CUDA graphs"),
        "enable_chunked_prefill": ("--enable-chunked-prefill", "vLLM's default is on"),
        "enable_prefix_caching": ("--enable-prefix-caching", "vLLM's default is on"),
        "disable_log_stats": ("--disable-log-stats", "logging only"),
    }
    for name, (flag, note) in switches.items():
        on = plan.flag(_ROLLOUT + name)
        if on:
            plan.vllm[flag] = None
        elif name in ("enable_chunked_prefill", "enable_prefix_caching"):
            plan.vllm[flag.replace("--enable", "--no-enable")] = None
        same = (on and name != "enforce_eager") or (not on and name == "enforce_eager")
        plan.say(
            _ROLLOUT + name,
            "exact" if same else "approximate",
            f"vllm.txt {flag}",
            note if same else f"a server takes it; {note}",
        )
    plan.vllm["--dtype"] = plan.text(_ROLLOUT + "dtype") or "bfloat16"
    plan.say(
        _ROLLOUT + "dtype",
        "approximate",
        "vllm.txt --dtype",
        "colocated it follows the model's dtype",
    )
    if plan.integer(_ROLLOUT + "expert_parallel_size", low=1) > 1:
        plan.vllm["--enable-expert-parallel"] = None
    plan.say(
        _ROLLOUT + "expert_parallel_size",
        "no effect" if plan.integer(_ROLLOUT + "expert_parallel_size") == 1 else "approximate",
        "vllm.txt --enable-expert-parallel",
        "only a server can be told",
    )
    quantization = plan.value(_ROLLOUT + "quantization")
    if quantization is not None:
        plan.vllm["--quantization"] = plan.text(_ROLLOUT + "quantization")
    plan.say(
        _ROLLOUT + "quantization",
        "no effect" if quantization is None else "approximate",
        "vllm.txt --quantization",
        "colocated vLLM loads the weights as they are",
    )
    plan.say(
        _ROLLOUT + "data_parallel_size",
        "approximate",
        "vllm.txt --data-parallel-size",
        "replicas follow from processes / tensor parallelism",
    )
    if plan.flag("actor_rollout_ref.model.trust_remote_code"):
        plan.vllm["--trust-remote-code"] = None
    # TRL weighs with the probabilities that were sampled from, temperature included.
    plan.vllm["--logprobs-mode"] = "processed_logprobs"
    plan.vllm["--weight-transfer-config"] = {"backend": "nccl"}


def _engine_arguments(plan: Plan) -> None:
    whole = plan.override(_ENGINE.rstrip("."))
    found: dict[str, Any] = dict(whole.value) if whole and isinstance(whole.value, dict) else {}
    if whole:
        plan.say(_ENGINE.rstrip("."), "approximate", "vllm.txt", "a server takes them")
    for name in [n for n in plan.names() if n.startswith(_ENGINE)]:
        path = name[len(_ENGINE) :].replace("_", "-").split(".")
        flag = "--" + ".".join(path)
        if "--" + path[0] not in server_flags():
            plan.say(
                name,
                "unsupported",
                "",
                f"--{path[0]} is not among the stored flags of vLLM {server_version()}",
            )
            continue
        value = plan.value(name)
        if flag == "--max-model-len":
            plan.trainer["vllm_max_model_length"] = plan.integer(name, low=1)
            plan.vllm[flag] = plan.integer(name, low=1)
            plan.say(name, "exact", "trainer.vllm_max_model_length", "")
            continue
        if value is not False:
            plan.vllm[flag] = None if value is True else value
        plan.say(name, "approximate", f"vllm.txt {flag}", "a server takes it, colocation cannot")
    for key, value in found.items():
        flag = "--" + str(key).replace("_", "-")
        if flag in server_flags() and value is not False:
            plan.vllm[flag] = None if value is True else value
