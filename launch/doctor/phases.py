"""Where the time of a run goes, which phase binds, and what moves it."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from polopt.launch.doctor.log import Log, Series
from polopt.launch.doctor.predicates import show

__all__ = ["PHASES", "Bottleneck", "bottleneck", "phase_seconds", "questions", "spoken"]

PHASES: Mapping[str, str] = {
    "environment_time": "environment",
    "collect_time": "generation",
    "sample_time": "generation and rewards",
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

_UPDATE = "update_time"  # forward and backward in one (in verl with the optimizer)


def spoken(phase: str, kind: str, seconds: Mapping[str, float]) -> str:
    """Return what a phase is called in a run of a kind (`control` or `llm`).

    Args:
        phase: One of `PHASES`.
        kind: Of the run.
        seconds: By phase: what collecting is depends on whether the environment stands apart, and
            the loss stands for the whole update where that was logged in one.
    """
    if phase == "collect_time" and kind == "control":
        return "acting" if "environment_time" in seconds else "collecting"
    if phase == "loss_time" and "backward_time" not in seconds:
        return "update"
    return PHASES[phase]


def phase_seconds(log: Log) -> dict[str, float]:
    """Return the seconds that were logged for each phase, in the order of `PHASES`.

    The environment is part of collecting where both are logged, and is taken out of it.
    """
    found = {}
    for phase in PHASES:
        column = log.columns.get(phase)
        if phase == "loss_time" and not column:
            column = log.columns.get(_UPDATE)
        if column and column.points:
            found[phase] = _total(column, log.kind)
    if "environment_time" in found and "collect_time" in found:
        found["collect_time"] = max(found["collect_time"] - found["environment_time"], 0.0)
    return found


def _total(column: Series, kind: str) -> float:
    """Return seconds over a run: of one iteration a line, or of one step, with steps between."""
    if kind == "control":
        return sum(mean * count for _, mean, _, _, count in column.points)
    steps = column.steps
    between = [b - a for a, b in itertools.pairwise(steps)]
    # What was before the first line is not known if the log begins in the middle.
    first = min(steps[0], between[0]) if between else steps[0]
    return sum(n * v for n, v in zip([max(first, 1.0), *between], column.values, strict=True))


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
    name = spoken(phase, log.kind, seconds)
    return Bottleneck(
        phase=phase, name=name, share=seconds[phase] / total, seconds=seconds[phase],
        knob=_knob("backward_time" if name == "update" else phase, log),
    )  # fmt: skip


def _knob(phase: str, log: Log) -> str:
    text = _LLM.get(phase) if log.kind == "llm" else _CONTROL.get(phase)
    if log.replays:
        text = _OFF_POLICY.get(phase, text)
    text = text or _CONTROL.get(phase) or _LLM[phase]
    if phase == "replay_time" and log.settings.get("prioritised") and not find_spec("numba"):
        text += _COMPILED
    return text.format(**{s: log.parameter(s) for s in _SETTINGS})


def questions(log: Log, found: Sequence[str]) -> dict[str, str]:
    """Answer the three questions to ask first: is a loss NaN, the reward flat, the device idle?

    Args:
        log: The run.
        found: The rules that found something.
    """
    answers = {}
    broken = {n: c for n, c in log.columns.items() if c.nonfinite and n in _FINITE}
    if broken:
        name, column = min(broken.items(), key=lambda item: item[1].first_nonfinite)
        answers["NaN"] = f"yes, {log.names[name]} from step {show(column.first_nonfinite)} on"
    elif "nonfinite" in found:
        answers["NaN"] = "yes (nonfinite)"
    elif any(n in log.columns for n in _FINITE):
        answers["NaN"] = "no"
    reward = log.columns.get("reward")
    if reward and len(reward) > 1:
        tenth = max(1, len(reward) // 10)
        first, last = (statistics.fmean(v) for v in (reward.values[:tenth], reward.values[-tenth:]))
        flat = [rule for rule in found if rule in _FLAT]
        word = f"yes ({flat[0]})" if flat else "no" if last > first else "it does not rise"
        answers["reward flat"] = f"{word}, {show(first)} at the beginning, {show(last)} at the end"
    use = log.columns.get("device_use")
    seconds = phase_seconds(log)
    total = sum(seconds.values())
    if use and use.points:
        share = use.median()
        answers["accelerator idle"] = f"{'yes' if share < _IDLE else 'no'}, it works {share:.0%}"
    elif 0.0 < total < math.inf and (away := [phase for phase in seconds if phase in _AWAY]):
        parts = [f"{spoken(p, log.kind, seconds)} {seconds[p] / total:.0%}" for p in away]
        share = sum(seconds[p] for p in away) / total
        answers["accelerator idle"] = (
            f"use of one was not logged; {share:.0%} of the time needs none: {', '.join(parts)}"
        )
    return answers


_FINITE = ("loss", "loss_policy", "loss_value", "grad_norm")
_FLAT = ("reward-flat", "reward-constant", "zero-signal", "reward-collapse")
_AWAY = ("environment_time", "replay_time", "reward_time", "sync_time", "wait_time")
_IDLE = 0.15  # as in the rule `device-idle`

_SETTINGS = ("num_envs", "minibatch", "epochs", "group", "max_length", "update_ratio", "batch")
_CONTROL = {
    "environment_time": (
        "More environments step at once with a larger {num_envs}; `polopt tune-envs` measures "
        "which number is best here, in one process and in several."
    ),
    "collect_time": (
        "A larger {num_envs} makes one call of policy and environment give more steps; "
        "`polopt tune-envs` measures how far."
    ),
    "replay_time": "Fewer, larger draws: a larger {minibatch} with a smaller {update_ratio}.",
    "advantage_time": "A larger {num_envs} with the same {batch} leaves fewer steps to go through.",
    "loss_time": "Fewer passes ({epochs}), or a larger {minibatch}: small ones are overhead.",
    "backward_time": "Fewer passes ({epochs}), or a larger {minibatch}: small ones are overhead.",
    "optimizer_time": "Fewer optimizer steps: a larger {minibatch}, or fewer {epochs}.",
}
_COMPILED = (
    " numba compiles the tree of priorities, and is not installed here: "
    "`pip install 'polopt[replay]'`."
)
_OFF_POLICY: Mapping[str, str] = dict.fromkeys(
    ("loss_time", "backward_time", "optimizer_time"),
    "Fewer gradient steps for what is collected ({update_ratio}), as long as it learns as well.",
)
_LLM = {
    "collect_time": (
        "Generate with vLLM if you do not; then a shorter {max_length}, or a smaller {group} where "
        "groups still differ in their rewards."
    ),
    "sample_time": (
        "Time the reward by itself, on the answers of one step. If it is not what takes long, "
        "generate with vLLM if you do not; then a shorter {max_length} or a smaller {group}."
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
