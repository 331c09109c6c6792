"""Files of a run: written whole or not at all, JSON that every reader takes, versions checked."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "check_format", "decode", "encode", "read_json", "write_json", "write_text"]

FORMAT = 1
"""Version of the files in a run folder. Readers take this one and older ones."""


def encode(value: object) -> str:
    """Return JSON on one line of ASCII; NaN and infinities, which JSON lacks, become strings.

    Raises:
        ValueError: If JSON cannot hold the value.
    """
    try:
        return json.dumps(_named(value), allow_nan=False)
    except TypeError as error:
        raise ValueError(f"JSON cannot hold this: {error}") from error


def decode(text: str) -> Any:  # noqa: ANN401
    """Read what `encode` wrote, with the floats back."""
    return _floats(json.loads(text))


_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _named(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {str(k): _named(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_named(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _floats(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {k: _floats(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_floats(v) for v in value]
    return _FLOATS.get(value, value) if isinstance(value, str) else value


def write_text(path: Path, text: str) -> None:
    """Replace a file whole: after a crash the old or the new text is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file whole, with the format version as its first entry."""
    text = json.dumps(
        _named({"format": FORMAT, **content}), allow_nan=False, ensure_ascii=False, indent=2
    )
    write_text(path, text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        ValueError: If it is not there, is not JSON, or was written by a newer polopt.
    """
    try:
        content = decode(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    check_format(content, path)
    return content


def check_format(content: object, path: Path) -> None:
    """Refuse content that is not ours or was written by a newer polopt.

    Raises:
        ValueError: With the versions found and read.
    """
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int:
        raise ValueError(f"{path} was not written by polopt: it has no format version")
    if version > FORMAT:
        raise ValueError(
            f"{path} has format {version}, this polopt reads up to {FORMAT}: upgrade polopt"
        )
