"""How to spread a model over cards, and the numbers behind the choice."""

from dataclasses import dataclass, replace
from typing import Any

from polopt.launch.plan.phases import Plan, plan
from polopt.launch.plan.setup import Setup

__all__ = ["ENOUGH", "Choice", "choose"]

ENOUGH = 32
"""Sequences of full length that a replica should hold: a choice, not a measurement."""

LONG = 4096
"""Tokens above which a sequence counts as long in the guide's rule, which names no number."""

_GOOD = ("fits", "edge", "risk")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice and its tables; sizes in GiB per GPU.

    Attributes:
        settings: What is recommended, attributes of `Setup`.
        verdict: Of the setup with these settings.
        reasons: One sentence per decision.
        sharding: Rows of cards per copy, states, peaks, verdict of the whole setup.
        tensor: Rows of tensor parallel size, weights, sequences per replica, replicas, whether
            verl's rule (memory × share × size > weights) holds.
        guide: What the tuning guide's rule (10.3) says for this model and length.
    """

    settings: dict[str, Any]
    verdict: str
    reasons: list[str]
    sharding: list[dict[str, Any]]
    tensor: list[dict[str, Any]]
    guide: str


def choose(setup: Setup) -> Choice:
    """Compare ways to spread the model over the cards of a setup.

    Args:
        setup: Its model, lengths, batches, offload and cards are kept.
    """
    reasons, settings = [], {}
    tensor = [_tensor(setup, n) for n in _powers(setup.gpus) if setup.model.heads % n == 0]
    if setup.vllm != "none":
        enough = [r for r in tensor if r["sequences"] >= min(ENOUGH, r["waiting"])]
        best = min(enough, key=lambda r: r["tensor_parallel"], default=tensor[-1])
        settings["tensor_parallel"] = best["tensor_parallel"]
        reasons.append(
            f"vLLM at {setup.vllm_memory:.0%} of a card: tensor parallel {best['tensor_parallel']} "
            f"holds {best['weights']:.1f} GiB of weights and {best['sequences']} sequences of "
            f"{setup.length} tokens per replica; it splits the sampler only, not the training"
        )
    plans = [_spread(replace(setup, **settings), n) for n in _powers(setup.gpus)]
    chosen = next((p for p in plans if p.verdict in ("fits", "edge")), None)
    chosen = chosen or next((p for p in plans if p.verdict == "risk"), None)
    reasons.append(_sharding(setup, plans, chosen))
    spread = (chosen or plans[-1]).setup
    settings["sharding"] = spread.sharding
    if spread.sharding != "none":
        settings["shards"] = spread.degree
    sequence, reason = _sequence(spread)
    settings |= sequence
    reasons.append(reason)
    return Choice(
        settings=settings,
        verdict=_spread(replace(setup, **sequence, **_only(settings)), spread.degree).verdict,
        reasons=reasons,
        sharding=[_row(p) for p in plans],
        tensor=tensor,
        guide=_guide(setup, fits=chosen is not None and spread.degree == 1),
    )


def _only(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k == "tensor_parallel"}


def _powers(most: int) -> list[int]:
    return [2**i for i in range(30) if most % 2**i == 0] if most else []


def _spread(setup: Setup, shards: int) -> Plan:
    """Plan with the states of one copy shared by some cards."""
    if shards == 1 and setup.engine == "trl":
        off = {"parameter_offload": False, "optimizer_offload": False}
        precision = "mixed" if setup.dtype == "mixed" else setup.precision
        return plan(replace(setup, sharding="none", shards=0, precision=precision, **off))
    if setup.sharding != "none":
        return plan(replace(setup, shards=shards))
    return plan(replace(setup, sharding="fsdp", shards=shards, precision="auto"))


def _sharding(setup: Setup, plans: list[Plan], chosen: Plan | None) -> str:
    name, card, single = setup.model.name, setup.gpu, plans[0]
    one = f"{single.phase('update').total:.1f} of {card.memory:.1f} GiB"
    if chosen is None:
        return (
            f"{name} does not fit {setup.gpus} × {card.name} at any degree (update on one card: "
            f"{one}): shard over all of them, and turn the knobs"
        )
    if chosen is single:
        return (
            f"{name} trains on one card (its update needs {one}): no sharding, more cards are "
            "data-parallel"
        )
    n, worst = chosen.setup.degree, chosen.worst
    peak = f"{worst.total:.1f} in its tightest phase, {worst.name}"
    return (
        f"one card does not do at this precision (the update would need {one}); over {n} cards a "
        f"run needs {peak}: the smallest power of two that works; further cards are data-parallel"
    )


def _row(planned: Plan) -> dict[str, Any]:
    update = planned.phase("update")
    states = ("weights", "optimizer", "gradients", "gradient buckets")
    return {
        "shards": planned.setup.degree,
        "states": sum(update.parts.get(name, 0.0) for name in states),
        "update": update.total,
        "generation": planned.phase("generation").total,
        "verdict": planned.verdict,
    }


def _tensor(setup: Setup, tp: int) -> dict[str, Any]:
    engine = plan(replace(setup, tensor_parallel=tp)).engine
    if engine is None:
        return {"tensor_parallel": tp, "sequences": 0, "replicas": 0, "waiting": 0}
    return {
        "tensor_parallel": tp,
        "weights": engine.weights,
        "sequences": engine.sequences,
        "replicas": engine.replicas,
        "waiting": engine.waiting,
        "verl_rule": engine.share > engine.weights,
    }


def _sequence(setup: Setup) -> tuple[dict[str, int], str]:
    """Whether a single sequence is too long for one card."""
    one = plan(replace(setup, micro_batch=1, sequence_parallel=1)).phase("update")
    text = f"one sequence of {setup.length} tokens at a time makes the update {one.total:.1f} GiB"
    if one.verdict in _GOOD:
        return {}, f"{text}: a small micro-batch does, sequence parallel is not needed"
    if setup.engine == "trl":
        return {}, f"even {text}, and this trainer has no sequence parallel: turn the knobs"
    for size in _powers(setup.gpus)[1:]:
        if setup.model.heads % size:
            break
        tried = replace(setup, micro_batch=1, sequence_parallel=size)
        if plan(tried).phase("update").verdict in _GOOD:
            return (
                {"sequence_parallel": size},
                f"even {text}: sequence parallel over {size} cards divides its activations, and "
                "nothing else",
            )
    return {}, f"even {text}, and no sequence parallel mends that: the states are too large"


def _guide(setup: Setup, *, fits: bool) -> str:
    if fits:
        return "fits on one card: no tensor parallel, FSDP only"
    if setup.length > LONG:
        return f"does not fit, {setup.length} tokens are long: tensor parallel and Ulysses"
    return f"does not fit, {setup.length} tokens are short: mainly FSDP"
