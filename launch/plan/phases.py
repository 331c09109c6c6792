"""The memory of one GPU in every phase of a run."""

from dataclasses import dataclass

from polopt.launch.plan.gpus import GIB
from polopt.launch.plan.setup import Setup
from polopt.launch.plan.states import States, gathered, in_flight, states
from polopt.launch.plan.terms import Pass

__all__ = ["ASSUMED", "VERDICTS", "Builder", "Engine", "Phase", "Plan", "plan"]

ASSUMED = {
    "CUDA context and NCCL": 2.5,
    "left by a sleeping vLLM": 1.5,
    "CUDA graphs of vLLM": 2.0,
}
"""GiB that nobody measured here; a first run should replace them."""

VERDICTS = ("fits", "edge", "risk", "does not fit")
"""From good to bad."""

POOL_EDGE, FULL = 0.92, 0.97
"""Shares of the card: above the first, fixed pools are at the edge; above the second, none fit."""

HEADROOM = 1.4
"""Card / peak below which an allocating phase is at risk. Published ratios of reserved to
allocated memory are 1.38, 1.50 and 1.78; the number was chosen after two reported failures that
a plain comparison had called a fit, so it is no validated bound."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase on one GPU.

    Attributes:
        name: generation, sync, log_probs, reference, values, update, critic_update.
        parts: GiB by what needs it.
        card: GiB that the GPU has.
        pooled: Whether fixed pools make up the phase; others allocate as they go, which
            fragments memory.
        problem: Why it cannot work whatever the total is, or empty.
    """

    name: str
    parts: dict[str, float]
    card: float
    pooled: bool = False
    problem: str = ""

    @property
    def total(self) -> float:
        """GiB at the peak."""
        return sum(self.parts.values())

    @property
    def margin(self) -> float:
        """GiB left."""
        return self.card - self.total

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.problem or self.total > FULL * self.card:
            return "does not fit"
        if not self.pooled and self.total * HEADROOM > self.card:
            return "risk"
        return "edge" if self.pooled and self.total > POOL_EDGE * self.card else "fits"

    @property
    def biggest(self) -> list[tuple[str, float]]:
        """The parts, largest first."""
        return sorted(self.parts.items(), key=lambda item: -item[1])


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What happens inside vLLM's share, in GiB per GPU.

    Attributes:
        share: All that vLLM may take.
        weights: The shard of the weights.
        work: Activations of one forward pass.
        graphs: CUDA graphs.
        cache: What is left for keys and values.
        token: Bytes of keys and values of one token.
        sequences: Sequences of full length that the cache holds.
        running: Sequences that one replica decodes at a time: cache and max_sequences limit it.
        waiting: Sequences of one rollout that one replica has to serve.
        replicas: Copies of vLLM.
    """

    share: float
    weights: float
    work: float
    graphs: float
    cache: float
    token: int
    sequences: int
    running: int
    waiting: int
    replicas: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planned setup.

    Attributes:
        setup: What was planned.
        phases: In the order of a run.
        engine: Inside vLLM, or None without it.
        host: GiB of host memory that offload takes, over all machines; a lower bound.
    """

    setup: Setup
    phases: list[Phase]
    engine: Engine | None
    host: float

    @property
    def worst(self) -> Phase:
        """The phase with the worst verdict, of those the one with the smallest margin."""
        return max(self.phases, key=lambda p: (VERDICTS.index(p.verdict), -p.margin / p.card))

    @property
    def verdict(self) -> str:
        """The verdict of the worst phase."""
        return self.worst.verdict

    def phase(self, name: str) -> Phase:
        """Return a phase by name.

        Raises:
            KeyError: If this setup does not have it.
        """
        return {p.name: p for p in self.phases}[name]


def plan(setup: Setup) -> Plan:
    """Plan one setup.

    Args:
        setup: Its settings.

    Returns:
        Phases with their parts in GiB per GPU.
    """
    builder = Builder(setup)
    return Plan(setup=setup, phases=builder.phases(), engine=builder.engine, host=_host(setup))


def _host(setup: Setup) -> float:
    size = setup.model.parameters / GIB * (2 if setup.critic == "separate" else 1)
    masters = 4 * size if setup.parameter_offload else 0.0
    moments = (12 if setup.sharding.startswith("zero") else 8) * size
    copy = 4 * setup.model.parameters / GIB if setup.reference and setup.engine == "verl" else 0.0
    return masters + (moments if setup.optimizer_offload else 0.0) + copy


class Builder:
    """Puts the terms of `terms` and `states` together; all its parts are in GiB."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.card = setup.gpu.memory
        self.states: States = states(setup, setup.model.parameters)
        self.engine = _engine(setup) if setup.vllm != "none" else None
        # verl moves whole shards to the host between phases; the others stream, or keep them.
        self.swaps = setup.engine == "verl" and not setup.streams

    def phases(self) -> list[Phase]:
        """Return all phases that this setup has."""
        s = self.setup
        phases = [self.generation(), self.sync(), self.forward("log_probs")]
        if s.reference:
            phases.append(self.reference())
        if s.critic == "separate":
            phases.append(self.forward("values"))
        phases.append(self.update("update"))
        if s.critic == "separate":
            phases.append(self.update("critic_update"))
        return phases

    def work(self, batch: int = 0) -> Pass:
        """Return the sizes of one pass, of `micro_batch` completions by default."""
        s, batch = self.setup, batch or self.setup.micro_batch
        return Pass(
            model=s.model,
            tokens=batch * s.length / s.sequence_parallel,
            length=s.length,
            compute=4 if s.dtype == "fp32" else 2,
            stored=4 if s.dtype == "fp32" or (s.dtype, s.sharding) == ("mixed", "none") else 2,
            checkpointing=s.checkpointing,
            attention=s.attention,
            fused_head=s.head == "fused",
        )

    def _base(self, *, weights: bool = False, optimizer: bool = False) -> dict[str, float]:
        """What is on the GPU whatever runs; the arguments say what a phase fetches back."""
        s, parts = self.setup, {"CUDA context and NCCL": ASSUMED["CUDA context and NCCL"]}
        models = 2 if s.critic == "separate" else 1
        if not (self.swaps and s.parameter_offload) or weights:
            kept = models if not (self.swaps and s.parameter_offload) else 1
            parts["weights"] = kept * self.states.weights / GIB
        if not (self.swaps and s.optimizer_offload) or optimizer:
            kept = models if not (self.swaps and s.optimizer_offload) else 1
            parts["optimizer"] = kept * self.states.optimizer / GIB
        if s.reference and s.engine == "trl":
            shards = s.degree if s.sharding in ("fsdp", "zero3") else 1
            size = self.work().stored
            parts["reference weights"] = size * s.model.parameters / shards / GIB
        return _nonzero(parts)

    def _resting(self) -> dict[str, float]:
        """What a colocated vLLM holds while the trainer works."""
        if self.setup.vllm != "colocate" or self.engine is None:
            return {}
        if not self.setup.vllm_sleep:
            return {"vLLM": self.engine.share}
        return {"left by a sleeping vLLM": ASSUMED["left by a sleeping vLLM"]}

    def generation(self) -> Phase:
        """Sampling: the trainer's resident states, and vLLM with its cache."""
        s, parts, problem = self.setup, self._base(), ""
        if self.engine is None:
            return self._generation_without_vllm()
        inside = {
            "vLLM weights": self.engine.weights,
            "vLLM activations": self.engine.work,
            "vLLM CUDA graphs": self.engine.graphs,
            "vLLM KV cache": max(0.0, self.engine.cache),
        }
        if self.engine.sequences < 1:
            problem = (
                f"vLLM's share of {self.engine.share:.1f} GiB leaves no room for the keys and "
                f"values of one sequence of {s.length} tokens"
            )
        if s.vllm == "server":  # on cards of its own
            parts = {"CUDA context and NCCL": ASSUMED["CUDA context and NCCL"]}
        return Phase(
            name="generation", parts=parts | inside, card=self.card, pooled=True, problem=problem
        )

    def _generation_without_vllm(self) -> Phase:
        s, parts = self.setup, self._base()
        m, size = s.model, 4 if s.dtype == "fp32" else 2
        rows = -(-s.prompts_per_rollout * s.num_generations // s.gpus)
        parts["KV cache"] = size * 2 * m.layers * m.kv_width * rows * s.length / GIB
        if s.sharding in ("fsdp", "zero3"):
            parts["gathered model"] = size * m.parameters / GIB
        return Phase(name="generation", parts=parts, card=self.card)

    def sync(self) -> Phase:
        """Copying the weights to vLLM: one unit at a time is gathered, vLLM has its weights."""
        s, parts = self.setup, self._base(weights=True) | self._resting()
        if s.vllm == "colocate" and s.vllm_sleep and self.engine is not None:
            parts["vLLM weights"] = self.engine.weights
        if s.sharding in ("fsdp", "zero3"):
            size = 4 if s.dtype != "bf16" else 2  # shards are gathered as they are, then cast
            parts["gathered weights"] = size * max(s.model.layer, s.model.embedding) / GIB
        return Phase(name="sync", parts=parts, card=self.card)

    def forward(self, name: str) -> Phase:
        """A pass without gradients: log-probabilities, or values of a separate critic."""
        parts = self._base(weights=True) | self._resting()
        return Phase(name=name, parts=parts | self._forward_parts(name), card=self.card)

    def _forward_parts(self, name: str) -> dict[str, float]:
        s, work = self.setup, self.work(self.setup.log_prob_batch)
        ahead = in_flight(s, backward=False)
        events = {
            "layer": {"layers in flight": ahead, "activations of one layer": work.layer_forward},
            "logits": {"logits": work.head_forward},
            # The buffer of an all-gather is split into parameters while both exist.
            "gather": {"layers in flight": ahead, "gather buffer": _root(s)},
        }
        if name == "values":
            del events["logits"]
        return _gib(gathered(s)) | _peak(events)

    def reference(self) -> Phase:
        """The pass of the reference model; TRL's is gathered whole under FSDP."""
        s = self.setup
        parts = self._base(weights=not self.swaps) | self._resting()
        parts |= self._forward_parts("reference")
        if s.engine == "trl" and s.sharding == "fsdp":
            # accelerate wraps the reference at its root only: a pass gathers all of it.
            for name in (*gathered(s), "layers in flight", "gather buffer"):
                parts.pop(name, None)
            parts["reference gathered whole"] = 2 * s.model.parameters / GIB
        return Phase(name="reference", parts=parts, card=self.card)

    def update(self, name: str) -> Phase:
        """Forward, backward and optimizer step of one micro-batch, others accumulated before."""
        s, st, work = self.setup, self.states, self.work()
        parts = self._base(weights=True, optimizer=True) | self._resting()
        parts |= _gib({"gradients": st.gradients, "gradient buckets": st.buckets} | gathered(s))
        held = s.sharding == "fsdp" or s.model.tied  # until the embedding has its gradient too
        events = {
            "logits": {
                "kept activations": work.kept + work.head_kept,
                "logits": work.head_backward,
            },
            "layer": {
                "kept activations": work.kept,
                "recomputed layer": work.recomputed,
                "gradients of activations": work.layer_backward,
                "layers in flight": in_flight(s, backward=True),
                "gradient of the head": work.stored * s.model.embedding if held else 0.0,
            },
            "embedding": {"gradient of the embedding": work.end_backward},
            "step": {"gradients in float32": st.step},
        }
        if name == "critic_update":  # its head has one column
            del events["logits"], events["layer"]["gradient of the head"]
        return Phase(name=name, parts=_nonzero(parts | _peak(events)), card=self.card)


def _root(setup: Setup) -> float:
    return gathered(setup).get("gathered embedding and head", 0.0)


def _peak(events: dict[str, dict[str, float]]) -> dict[str, float]:
    """The parts of the event that needs most, in GiB: only one of them happens at a time."""
    return _nonzero(_gib(max(events.values(), key=lambda parts: sum(parts.values()))))


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def _nonzero(parts: dict[str, float]) -> dict[str, float]:
    return {name: size for name, size in parts.items() if size}


def _engine(setup: Setup) -> Engine:
    m, tp = setup.model, setup.tensor_parallel
    share = setup.vllm_memory * setup.gpu.memory
    weights = 2 * m.parameters / tp / GIB
    work = 0.5 + 1.5 * setup.max_batched_tokens / 32768 * m.hidden / 5120
    graphs = ASSUMED["CUDA graphs of vLLM"]
    cache = share - weights - work - graphs
    # With more cards than key heads, every card keeps one head.
    token = 2 * 2 * m.layers * m.head_dim * max(1, m.kv_heads // tp)
    sequences = int(max(0.0, cache) * GIB / token / setup.length)
    replicas = max(1, setup.gpus // tp) if setup.vllm == "colocate" else 1
    completions = setup.prompts_per_rollout * setup.num_generations
    return Engine(
        share=share,
        weights=weights,
        work=work,
        graphs=graphs,
        cache=cache,
        token=token,
        sequences=sequences,
        running=min(sequences, setup.max_sequences),
        waiting=-(-completions // replicas),
        replicas=replicas,
    )
