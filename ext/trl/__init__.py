"""TRL: a trainer that takes an `Algorithm`, and small models made in place."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polopt.ext.trl.trainer import PolicyTrainer

__all__ = ["PolicyTrainer"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import the trainer when it is asked for: TRL takes seconds, and is an extra."""
    if name != "PolicyTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from polopt.ext.trl.trainer import PolicyTrainer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("trl", "transformers"):
            raise
        raise ImportError(
            "PolicyTrainer needs TRL, which is not installed: pip install 'polopt[trl]'"
        ) from error
    return PolicyTrainer
