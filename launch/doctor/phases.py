"""Where the time of a run goes, which phase binds, and what moves it."""

from collections.abc import Mapping
from dataclasses import dataclass

from polopt.launch.doctor.log import Log
from polopt.launch.doctor.names import parameter

__all__ = ["PHASES", "Bottleneck", "bottleneck", "phase_seconds", "spoken"]

PHASES: Mapping[str, str] = {
    "environment_time": "environment",
    "collect_time": "generation",
    "replay_time": "replay",
    "reward_time": "rewards",
    "log_prob_time": "log-probabilities",
    "reference_time": "reference",
    "advantage_time": "advantages",
    "loss_time": "forward and loss",
    "backward_time": "backward",
    "optimizer_time": "optimizer",
    "sync_time": "weight sync",
    "wait_time": "waiting",
}
"""Metrics that are seconds of a phase, in the order of a round, and what the phase is called."""

_UPDATE = "update_time"  # forward, backward and optimizer in one, as verl logs it


def spoken(phase: str, kind: str) -> str:
    """Return what a phase is called in a run of a kind (`control` or `llm`)."""
    if phase == "collect_time" and kind == "control":
        return "acting"
    return PHASES[phase]


def phase_seconds(log: Log) -> dict[str, float]:
    """Return the seconds that were logged for each phase, in the order of `PHASES`.

    The environment is part of collecting where both are logged, and is taken out of it.
    """
    found = {}
    for phase in PHASES:
        column = log.columns.get(phase)
        if column and column.points:
            found[phase] = sum(mean * count for _, mean, _, _, count in column.points)
    if _UPDATE in log.columns and "loss_time" not in found:
        column = log.columns[_UPDATE]
        found["loss_time"] = sum(mean * count for _, mean, _, _, count in column.points)
    if "environment_time" in found and "collect_time" in found:
        found["collect_time"] = max(found["collect_time"] - found["environment_time"], 0.0)
    return found


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The phase that takes the most time.

    Attributes:
        phase: One of `PHASES`.
        name: What it is called.
        share: Of the time of all phases that were measured, in [0, 1].
        seconds: What it took.
        knob: What moves it.
    """

    phase: str
    name: str
    share: float
    seconds: float
    knob: str

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.name} binds: {self.share:.0%} of the measured time. {self.knob}"


def bottleneck(log: Log, seconds: Mapping[str, float] | None = None) -> Bottleneck | None:
    """Return the phase that binds; None where fewer than two phases were measured.

    Args:
        log: The run.
        seconds: By phase, of several runs together; those of the run by default.
    """
    seconds = phase_seconds(log) if seconds is None else seconds
    total = sum(seconds.values())
    if len(seconds) < 2 or not 0.0 < total < float("inf"):
        return None
    phase = max(seconds, key=seconds.__getitem__)
    if phase == "loss_time" and "backward_time" not in seconds:
        knob, name = _knob("backward_time", log), "update"
    else:
        knob, name = _knob(phase, log), spoken(phase, log.kind)
    return Bottleneck(
        phase=phase, name=name, share=seconds[phase] / total, seconds=seconds[phase], knob=knob
    )


def _knob(phase: str, log: Log) -> str:
    text = _LLM.get(phase) if log.kind == "llm" else _CONTROL.get(phase)
    text = text or _CONTROL.get(phase) or _LLM[phase]
    names = {s: parameter(s, log.framework, log.kind) for s in _SETTINGS}
    return text.format(**names)


_SETTINGS = ("num_envs", "minibatch", "epochs", "group", "max_length", "update_ratio", "batch")
_CONTROL = {
    "environment_time": (
        "More environments step at once with a larger {num_envs}; `polopt tune-envs` measures "
        "which number is best here, in one process and in several."
    ),
    "collect_time": (
        "Each action costs a pass of the policy: a larger {num_envs} spreads it over more steps, "
        "`polopt tune-envs` measures how far."
    ),
    "replay_time": "Fewer, larger draws: a larger {minibatch} with a smaller {update_ratio}.",
    "advantage_time": "A larger {num_envs} with the same {batch} leaves fewer steps to go through.",
    "loss_time": "Fewer passes ({epochs}), or a larger {minibatch}: small ones are overhead.",
    "backward_time": "Fewer passes ({epochs}), or a larger {minibatch}: small ones are overhead.",
    "optimizer_time": "Fewer optimizer steps: a larger {minibatch}, or fewer {epochs}.",
}
_LLM = {
    "collect_time": (
        "Generate with vLLM; then a shorter {max_length}, or a smaller {group} where groups "
        "still differ in their rewards."
    ),
    "reward_time": (
        "Give the reward more worker processes, or make it cheaper; with an asynchronous server "
        "several answers are judged at a time."
    ),
    "log_prob_time": (
        "One optimizer step per generation on policy needs no pass for the old log-probabilities; "
        "else a larger {minibatch} makes the pass cheaper."
    ),
    "reference_time": "A KL coefficient of 0 needs no reference; else place it beside the sampler.",
    "advantage_time": "Look at what the advantage needs: a greedy baseline generates once more.",
    "loss_time": "A larger {minibatch} as memory allows, trimmed padding, a shorter {max_length}.",
    "backward_time": (
        "A larger {minibatch} as memory allows, no gradient checkpointing if it fits without, a "
        "shorter {max_length}, fewer passes ({epochs})."
    ),
    "optimizer_time": "A larger {batch} takes fewer optimizer steps; offloaded states are slow.",
    "sync_time": (
        "Hand weights over less often, or by a faster engine: shared memory on one host, NCCL or "
        "gloo between hosts."
    ),
    "wait_time": (
        "Ranks wait for the slowest: deal answers by length, bound {max_length}, and look for a "
        "slow reward on one of them."
    ),
}
