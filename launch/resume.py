"""Going on with a run: what may differ from its recipe, and whether anything is left to do."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polopt.launch.recipe import RecipeError
from polopt.launch.values import flatten

__all__ = ["changes", "finished"]

_LENGTH = ("collector.total_frames", "trainer.max_steps", "evaluation.stop_at")
"""What may differ when a run is resumed: how long it goes on."""

_PLACE = (
    *(f"vllm.{key}" for key in ("host", "port", "trainer_host")),
    *(f"vllm.{key}" for key in ("start_seconds", "transfer_seconds")),
    *(f"trainer.vllm_{key}" for key in ("server_base_url", "server_host", "server_port")),
    *(f"trainer.vllm_{key}" for key in ("server_timeout", "group_port")),
    "trainer.ddp_timeout",
)
"""What may differ as well, since it changes no result: where servers are, and how long to wait."""

_MEND = {
    "evaluation.stop_at": "a higher evaluation.stop_at (null for none)",
    "collector.total_frames": "more collector.total_frames",
}


def changes(
    tree: Mapping[str, Any], kept: Mapping[str, Any], resume: Path
) -> dict[str, dict[str, Any]]:
    """Return the settings that a resumed run has from now on.

    Args:
        tree: Its recipe now.
        kept: Its recipe so far.
        resume: Its folder, for messages.

    Returns:
        What differs, by dotted path: its values `before` and `now`.

    Raises:
        RecipeError: If another setting differs than those that may.
    """
    now, then = flatten(tree), flatten(kept)
    found = {}
    for key in {**then, **now}:
        if now.get(key) == then.get(key):
            continue
        if key not in (*_LENGTH, *_PLACE):
            raise RecipeError(
                f"{resume} was started with {key}={_written(then.get(key))}, not "
                f"{_written(now.get(key))}: a resumed run may change {', '.join(_LENGTH)}, where "
                "servers are and how long to wait; start a new run for the rest"
            )
        found[key] = {"before": then.get(key), "now": now.get(key)}
    return found


def finished(
    tree: Mapping[str, Any],
    summary: Mapping[str, Any],
    changed: Mapping[str, Mapping[str, Any]],
    resume: Path,
) -> str | None:
    """Tell that a run has nothing left to do and what would let it go on, or return None.

    Args:
        tree: Its recipe now.
        summary: How it ended; empty if it did not.
        changed: As from `changes`.
        resume: Its folder.

    Raises:
        RecipeError: If its length was changed, but not in what ended it.
    """
    if summary.get("status") != "completed":
        return None
    longer = {key: change["now"] for key, change in changed.items() if key in _LENGTH}
    if "frames" not in summary:
        return _by_steps(tree, summary, longer, resume)
    reasons = _reasons(tree, summary)
    if not reasons:
        return None
    mend = " and ".join(_MEND[key] for key in reasons)
    if longer:
        given = ", ".join(f"{k}={_written(v)}" for k, v in longer.items())
        raise RecipeError(
            f"{resume} ended at frame {summary['frames']}, and {given} does not let it go on: "
            f"give {mend}"
        )
    return f"finished already: {resume}; give {mend} to go on"


def _by_steps(
    tree: Mapping[str, Any], summary: Mapping[str, Any], longer: Mapping[str, Any], resume: Path
) -> str | None:
    """As `finished`, for language models; what ended a run only its trainer knows."""
    if not longer:
        keys = [key for key in _LENGTH if key in flatten(tree)] or ["trainer.max_steps"]
        mend = " or ".join(f"another {key}" for key in keys)
        return f"finished already: {resume}; give {mend} to go on"
    most, done = longer.get("trainer.max_steps"), summary.get("steps", 0)
    if most is not None and 0 < most <= done:
        raise RecipeError(
            f"{resume} ended at step {done}, and trainer.max_steps={most} does not let it go on: "
            "give more trainer.max_steps"
        )
    return None


def _written(value: object) -> str:
    """Return a value as recipes write it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _reasons(tree: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return the settings that end a control run where it is."""
    collector, bar = tree["collector"], tree["evaluation"]["stop_at"]
    found = []
    if summary.get("solved") and bar is not None and summary["final_return"] >= bar:
        found.append("evaluation.stop_at")
    # Only whole batches are collected; groups of rollouts have no such number.
    if summary["frames"] + collector.get("frames_per_batch", 1) > collector["total_frames"]:
        found.append("collector.total_frames")
    return found
