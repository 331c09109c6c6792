"""The settings of a training run that decide about memory."""

from dataclasses import dataclass, fields, replace
from typing import Any

from polopt.launch.plan.architecture import Architecture
from polopt.launch.plan.gpus import Gpu
from polopt.launch.recipe import nearest

__all__ = ["Setup", "change"]

CHOICES = {
    "engine": ("trl", "verl"),
    "sharding": ("none", "fsdp", "zero1", "zero2", "zero3"),
    "precision": ("auto", "bf16", "mixed", "fp32"),
    "attention": ("flash", "sdpa", "eager"),
    "head": ("fused", "full"),
    "vllm": ("colocate", "server", "none"),
    "critic": ("none", "shared", "separate"),
    "gradient_sync": ("auto", "each", "last"),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is planned. Lengths are tokens, batches are completions unless they say prompts.

    Attributes:
        model: The policy.
        gpu: The card.
        gpus: Cards that train.
        engine: `trl`: TRL's trainer under accelerate; the head is fused, offload streams.
            `verl`: verl with FSDP; offload moves whole shards between phases.
        sharding: `none` (every card holds all), `fsdp` (all sharded), `zero1`, `zero2`, `zero3`.
        shards: Cards that share one copy, 0 for all.
        precision: `bf16` (weights, gradients and Adam's moments in bfloat16), `mixed` (float32
            masters, bfloat16 arithmetic), `fp32`; `auto` is `mixed` where states are sharded,
            else `bf16`, as checkpoints are loaded.
        prompt_length: Longest prompt.
        completion_length: Longest completion.
        micro_batch: Completions in one forward and backward pass, per data-parallel rank.
        log_prob_batch: The same for passes without gradient, 0 for `micro_batch`.
        sequence_parallel: Cards that share the tokens of one micro-batch (verl's Ulysses).
        checkpointing: Whether activations are recomputed.
        attention: `flash`, `sdpa` with a padding mask, or `eager`.
        head: `fused` (no logits in memory) or `full`.
        gradient_sync: When gradients are reduced: in `each` micro-batch, or in the `last` of a
            step only, and FSDP keeps them unsharded until then. `auto` is what the engine does
            unless told otherwise: verl 0.9.1 each, accelerate last.
        parameter_offload: Whether weights live in host memory.
        optimizer_offload: Whether Adam's moments live in host memory.
        streaming: Whether offloaded shards of verl stay there while training (offload_policy)
            instead of coming back for each phase. accelerate's always stay.
        reference: Whether there is a reference model.
        critic: `none`, `shared` (a value head on the policy) or `separate` (of equal size).
        vllm: `colocate` (on the training cards), `server` (on cards of its own) or `none`.
        vllm_memory: Share of the card that vLLM takes (gpu_memory_utilization).
        vllm_sleep: Whether a colocated vLLM frees its memory while training goes on.
        tensor_parallel: Cards that share one vLLM replica.
        max_batched_tokens: Tokens of one vLLM forward pass.
        max_sequences: Sequences that one replica decodes at a time.
        prompts_per_rollout: Prompts between two weight updates of the sampler.
        num_generations: Completions per prompt.
        completions_per_step: Completions per optimizer step, 0 for all of the rollout.
        iterations: Passes over a rollout.
        rows: Prompts in the data set, 0 if not known.
        epochs: Passes over the data set.

    Raises:
        ValueError: If a value is out of range, or settings exclude each other.
    """

    model: Architecture
    gpu: Gpu
    gpus: int = 1
    engine: str = "trl"
    sharding: str = "none"
    shards: int = 0
    precision: str = "auto"
    prompt_length: int = 512
    completion_length: int = 1024
    micro_batch: int = 4
    log_prob_batch: int = 0
    sequence_parallel: int = 1
    checkpointing: bool = True
    attention: str = "flash"
    head: str = "fused"
    gradient_sync: str = "auto"
    parameter_offload: bool = False
    optimizer_offload: bool = False
    streaming: bool = False
    reference: bool = False
    critic: str = "none"
    vllm: str = "colocate"
    vllm_memory: float = 0.3
    vllm_sleep: bool = True
    tensor_parallel: int = 1
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    prompts_per_rollout: int = 64
    num_generations: int = 8
    completions_per_step: int = 0
    iterations: int = 1
    rows: int = 0
    epochs: float = 1.0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}: unknown value {value!r}, {nearest(str(value), choices)}")
        for name in _POSITIVE:
            _range(name, getattr(self, name), 1)
        for name in ("shards", "log_prob_batch", "completions_per_step", "rows"):
            _range(name, getattr(self, name), 0)
        if not 0.0 < self.vllm_memory <= 1.0:
            raise ValueError(f"vllm_memory: must be in (0, 1], got {self.vllm_memory}")
        if not 0.0 < self.epochs <= 1e6:
            raise ValueError(f"epochs: must be in (0, 1000000], got {self.epochs}")
        self._check_parallel()
        self._check_offload()
        if self.attention == "sdpa" and self.model.model_type == "gemma2":
            raise ValueError("attention: transformers has no 'sdpa' for gemma2, use flash or eager")
        if self.engine == "trl" and self.head == "full":
            raise ValueError("head: TRL always uses the fused head, leave head at 'fused'")

    def _check_parallel(self) -> None:
        if self.shards and self.gpus % self.shards:
            raise ValueError(f"shards: {self.shards} must divide gpus={self.gpus}")
        if self.sharding == "none" and self.shards > 1:
            raise ValueError(f"shards: {self.shards} needs sharding, for example sharding=fsdp")
        if self.gpus % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel: {self.sequence_parallel} must divide gpus={self.gpus}"
            )
        if self.sequence_parallel > 1 and self.engine == "trl":
            raise ValueError(
                "sequence_parallel: TRL has none for this trainer, divide micro_batch instead"
            )
        heads = self.model.heads
        for name in ("tensor_parallel", "sequence_parallel"):
            if heads % getattr(self, name):
                fitting = [n for n in (1, 2, 4, 8, 16, 32) if heads % n == 0]
                raise ValueError(
                    f"{name}: {getattr(self, name)} does not divide the {heads} attention heads "
                    f"of {self.model.name}, use one of {fitting}"
                )
        if self.vllm == "colocate" and self.gpus % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel: {self.tensor_parallel} must divide gpus={self.gpus}"
            )

    def _check_offload(self) -> None:
        offload = self.parameter_offload or self.optimizer_offload
        if offload and self.sharding == "none":
            raise ValueError(
                "parameter_offload and optimizer_offload need sharding (fsdp; zero1 to zero3)"
            )
        whole = self.sharding == "fsdp" and (self.engine == "trl" or self.streaming)
        if whole and self.parameter_offload != self.optimizer_offload:
            raise ValueError(
                "parameter_offload: streaming FSDP offload (fsdp_offload_params, offload_policy) "
                "takes weights and optimizer together: set optimizer_offload to the same value"
            )
        if self.engine == "verl" and self.sharding != "fsdp":
            raise ValueError(f"sharding: verl is planned with fsdp only, got {self.sharding!r}")
        if self.parameter_offload and self.sharding in ("zero1", "zero2"):
            raise ValueError(
                f"parameter_offload: DeepSpeed offloads weights in zero3 only, not {self.sharding}"
            )
        if self.dtype != "mixed" and self.sharding.startswith("zero"):
            raise ValueError(
                f"precision: ZeRO is planned with float32 masters only, got {self.precision!r}, "
                "set precision=mixed"
            )

    @property
    def degree(self) -> int:
        """Cards that share one copy of the training states."""
        return 1 if self.sharding == "none" else self.shards or self.gpus

    @property
    def dtype(self) -> str:
        """`precision` with `auto` resolved."""
        if self.precision != "auto":
            return self.precision
        return "bf16" if self.sharding == "none" else "mixed"

    @property
    def synced(self) -> bool:
        """Whether gradients are reduced in every micro-batch."""
        usual = "each" if self.engine == "verl" else "last"
        return (usual if self.gradient_sync == "auto" else self.gradient_sync) == "each"

    @property
    def streams(self) -> bool:
        """Whether offloaded FSDP shards never come back to the GPU as a whole."""
        return (
            self.sharding == "fsdp"
            and self.parameter_offload
            and (self.engine == "trl" or self.streaming)
        )

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_length + self.completion_length

    @property
    def data_parallel(self) -> int:
        """Ranks that work on different completions."""
        return self.gpus // self.sequence_parallel


_POSITIVE = (
    "gpus",
    "prompt_length",
    "completion_length",
    "micro_batch",
    "sequence_parallel",
    "tensor_parallel",
    "max_batched_tokens",
    "max_sequences",
    "prompts_per_rollout",
    "num_generations",
    "iterations",
)


def _range(name: str, value: int, low: int) -> None:
    if not low <= value <= 10**9:
        raise ValueError(f"{name}: must be a whole number from {low} to 1000000000, got {value}")


def change(setup: Setup, settings: dict[str, Any]) -> Setup:
    """Return the setup with other values.

    Args:
        setup: Where they are changed.
        settings: Values by the name of an attribute of `Setup`.

    Raises:
        ValueError: If a name is unknown, or a value of the wrong kind or out of range.
    """
    types = {f.name: f.type for f in fields(Setup) if f.name not in ("model", "gpu")}
    for name, value in settings.items():
        if name not in types:
            raise ValueError(f"unknown setting {name!r}, {nearest(name, types)}")
        kind = types[name]
        good = type(value) is kind or (kind is float and type(value) is int)
        if not good:
            word = getattr(kind, "__name__", kind)
            raise ValueError(f"{name}: must be {_WORDS.get(str(word), word)}, got {value!r}")
    return replace(setup, **settings)


_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}
