"""Compare the planner with torch's own memory tracker: `python -m polopt.launch.plan.validate`.

One accumulation window of TRL's loss head on a transformers model is run with fake tensors (they
have shapes and no data) under `MemTracker`, on one rank, or under FSDP2 in a process group that
only pretends to communicate. Sizes are those of the CPU backend, where FSDP gathers nothing
ahead. Two stand-ins: the Triton kernels of the head are replaced by functions that do nothing,
since both work in place; FlashAttention is PyTorch's kernel without a mask, which keeps the
same tensors.
"""

import argparse
import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.initialization import no_init_weights
from transformers.masking_utils import AttentionMaskInterface
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from polopt.launch.plan.architecture import load
from polopt.launch.plan.gpus import GIB, find_gpu
from polopt.launch.plan.phases import ASSUMED, Builder, plan
from polopt.launch.plan.setup import Setup
from polopt.launch.plan.states import gathered

__all__ = ["CASES", "Comparison", "compare", "main"]

MODELS = (
    "qwen2.5-0.5b",
    "qwen2.5-7b",
    "qwen2.5-32b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "llama-3.2-1b",
    "llama-3.1-8b",
    "mistral-7b",
    "gemma-2-2b",
    "gemma-3-1b",
    "smollm3-3b",
    "smollm2-135m",
    "phi-3-mini",
    "phi-4",
)
SHARDED = {"sharding": "fsdp", "gpus": 8, "precision": "mixed", "gradient_sync": "each"}
VARIANTS: dict[str, dict[str, Any]] = {
    "one card, bf16": {"precision": "bf16"},
    "FSDP on 8, mixed": SHARDED,
}
FURTHER: dict[str, dict[str, Any]] = {
    "one card, float32 weights under autocast": {"precision": "mixed"},
    "one card, float32": {"precision": "fp32"},
    "FSDP on 8, SDPA with a mask": SHARDED | {"attention": "sdpa"},
    "FSDP on 8, eager attention": SHARDED | {"attention": "eager"},
    "FSDP on 8, sequences of 16384": SHARDED | {"prompt_length": 15360, "micro_batch": 1},
}
CASES = [
    (model, name, checkpointing)
    for model in MODELS
    for name in VARIANTS
    for checkpointing in (True, False)
] + [
    (model, name, checkpointing)
    for model in ("qwen3-0.6b", "llama-3.2-1b", "phi-4")
    for name in FURTHER
    for checkpointing in (True, False)
]
"""Model, variant, checkpointing."""


NAMES = ("kept", "work", "update", "forward")
"""What is printed of a comparison, in GiB."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Planned and tracked bytes of one case.

    Attributes:
        parameters: Of the whole model, planned and counted by torch.
        kept: What is there between forward and backward, states left out.
        work: Peak of the update phase, states and gradients left out.
        update: Peak of the update phase.
        forward: Peak of the log-prob phase, states left out.
    """

    parameters: tuple[float, float]
    kept: tuple[float, float]
    work: tuple[float, float]
    update: tuple[float, float]
    forward: tuple[float, float]

    def error(self, name: str) -> float:
        """Return planned / tracked - 1 of one attribute."""
        planned, tracked = getattr(self, name)
        return planned / tracked - 1


def setup_of(model: str, variant: str, *, checkpointing: bool, layers: int) -> Setup:
    """Return the setup of a case, with the model cut to some layers."""
    settings: dict[str, Any] = {"micro_batch": 2, "prompt_length": 1024, "completion_length": 1024}
    settings |= VARIANTS.get(variant) or FURTHER[variant]
    return Setup(
        model=replace(load(model), layers=layers),
        gpu=find_gpu("H200"),
        vllm="none",
        checkpointing=checkpointing,
        **settings,
    )


def compare(model: str, variant: str, *, checkpointing: bool, layers: int = 3) -> Comparison:
    """Run one case under the tracker and plan it.

    Args:
        model: A name of `models.json`.
        variant: A key of `VARIANTS` or `FURTHER`.
        checkpointing: Whether layers are recomputed.
        layers: Layers that the model is cut to: all terms are linear in them.
    """
    setup = setup_of(model, variant, checkpointing=checkpointing, layers=layers)
    tracked = _track(model, setup)
    planned = plan(setup)
    update, forward = planned.phase("update"), planned.phase("log_probs")
    context = ASSUMED["CUDA context and NCCL"]
    resting = context + forward.parts["weights"] + forward.parts["optimizer"]
    work = (update.total - resting - update.parts["gradients"]) * GIB
    passed = Builder(setup).work()
    kept = passed.kept + passed.head_kept
    kept += gathered(setup).get("gathered embedding and head", 0.0)
    return Comparison(
        parameters=(setup.model.parameters, tracked["parameters"]),
        kept=(kept, tracked["kept"]),
        work=(work, tracked["work"]),
        update=((update.total - context) * GIB, tracked["update"]),
        forward=((forward.total - resting) * GIB, tracked["forward"]),
    )


def _flash(
    module: object,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: object,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _config(model: str, setup: Setup) -> Any:  # noqa: ANN401
    text = files("polopt.launch.plan").joinpath("models.json").read_text("utf-8")
    fields = json.loads(text)[model] | {"num_hidden_layers": setup.model.layers}
    return transformers.AutoConfig.for_model(**fields, pad_token_id=None)


def _track(name: str, setup: Setup) -> dict[str, float]:
    mesh = None
    if setup.sharding == "fsdp":
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=setup.gpus, store=FakeStore())
        mesh = init_device_mesh("cpu", (setup.gpus,))
    with _patched(), FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(name, setup)
        if mesh is not None:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        return _window(model, setup)


def _model(name: str, setup: Setup) -> Any:  # noqa: ANN401
    attention = "tracked" if setup.attention == "flash" else setup.attention
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if setup.dtype == "bf16" else torch.float32)
    try:
        with torch.device("cpu"), no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(
                _config(name, setup), attn_implementation=attention
            )
    finally:
        torch.set_default_dtype(default)
    model.tie_weights()
    model.train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _window(model: Any, setup: Setup) -> dict[str, float]:  # noqa: ANN401
    """Return the peak of two accumulated micro-batches, with Adam's moments there before."""
    ids = torch.zeros(setup.micro_batch, setup.length, dtype=torch.long)
    mask = None if setup.attention == "flash" else torch.ones_like(ids)
    autocast = setup.dtype == "mixed" and setup.sharding == "none"
    sharded = setup.sharding == "fsdp"

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
            return out.log_probs.sum()

    def tracker(*tracked: Any) -> Any:  # noqa: ANN401
        if sharded:
            return FSDPMemTracker(*tracked)
        plain = MemTracker()
        plain.track_external(*tracked)
        return plain

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward().backward()
    optimizer.step()
    optimizer.zero_grad()
    memory = tracker(model, optimizer)
    kept = 0.0
    with memory:
        for _ in range(2):
            memory.reset_mod_stats()
            before = _total(memory, "current")
            loss = forward()
            kept = _total(memory, "current") - before
            loss.backward()
            del loss
        states = _total(memory, "current")
    update = _total(memory, "peak")
    optimizer.zero_grad()
    memory = tracker(model)
    with memory, torch.no_grad():
        before = _total(memory, "current")
        forward()
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": float(parameters),
        "kept": kept,
        "work": update - states,
        "update": update,
        "forward": _total(memory, "peak") - before,
    }


def _total(memory: Any, kind: str) -> float:  # noqa: ANN401
    return float(sum(device["Total"] for device in memory.get_tracker_snapshot(kind).values()))


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    transformers.AttentionInterface.register("tracked", _flash)
    AttentionMaskInterface.register("tracked", lambda *_, **__: None)
    names = ("_forward_tile", "_backward_tile", "_addmm_fp32")
    originals = {name: getattr(chunked_logprob, name) for name in names}
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    try:
        for name in names:
            setattr(chunked_logprob, name, nothing)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, original in originals.items():
            setattr(chunked_logprob, name, original)


def main() -> None:
    """Print the comparison of all cases, as a Markdown table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", nargs="*", default=None, help="only these")
    chosen = parser.parse_args().models
    print("| model | variant | checkpointing |", " | ".join(f"{n} | error" for n in NAMES), "|")
    print("|---|---|---|" + "---|---|" * len(NAMES))
    for model, variant, checkpointing in CASES:
        if chosen and model not in chosen:
            continue
        c = compare(model, variant, checkpointing=checkpointing)
        cells = [f"{getattr(c, n)[1] / GIB:.2f} | {c.error(n):+.1%}" for n in NAMES]
        switch = "on" if checkpointing else "off"
        print("|", " | ".join([model, variant, switch, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
