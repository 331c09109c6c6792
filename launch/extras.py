"""Which extra of polopt brings which library."""

__all__ = ["explain", "is_missing"]

_EXTRAS = {
    "torchrl": "torchrl",
    "gymnasium": "torchrl",
    "trl": "trl",
    "transformers": "trl",
    "accelerate": "trl",
    "datasets": "trl",
    "pyarrow": "trl",
    "reasoning_gym": "trl",
    "Box2D": "control",
    "mujoco": "control",
    "numba": "replay",
    "zuko": "flow",
    "vllm": "vllm",
    "math_verify": "math",
    "hydra": "verl",
}


def is_missing(error: ImportError) -> bool:
    """Whether an import failed only because an extra is not installed."""
    return "pip install 'polopt[" in str(error) or (
        isinstance(error, ModuleNotFoundError) and _library(error) in _EXTRAS
    )


def explain(error: ImportError) -> str:
    """Return a failed import as a sentence, with the pip command if an extra mends it."""
    if not is_missing(error) or "pip install" in str(error):
        return str(error)
    library = _library(error)
    return f"{library} is not installed: pip install 'polopt[{_EXTRAS[library]}]'"


def _library(error: ImportError) -> str:
    return (error.name or "").split(".")[0]
