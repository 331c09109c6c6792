"""Settings that lie beside a log: Hydra's files of verl, the saved model of stable-baselines3."""

import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polopt.launch import yaml12
from polopt.launch.doctor.log import Mention

__all__ = ["hydra_settings", "lost_overrides", "sb3_settings"]

_CONFIG, _DATA, _MODELS = 1 << 20, 1 << 25, 8
_DAMAGED = (
    OSError, EOFError, KeyError, ValueError, RecursionError, RuntimeError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


def hydra_settings(source: Path) -> tuple[dict[str, Any] | None, list[Mention]]:
    """Return verl's configuration if Hydra left it beside a log, and overrides without effect."""
    folder = (source if source.is_dir() else source.parent) / ".hydra"
    tree, words = _yaml(folder / "config.yaml"), _yaml(folder / "overrides.yaml")
    words = [w for w in words if isinstance(w, str)] if isinstance(words, list) else []
    return tree if isinstance(tree, dict) else None, lost_overrides(words)


def _yaml(path: Path) -> Any:  # noqa: ANN401
    try:
        if path.is_file() and path.stat().st_size < _CONFIG:
            return yaml12.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    return None


def lost_overrides(words: Sequence[str]) -> list[Mention]:
    """Return the settings of a command line that a later one replaces by another value."""
    pairs = [word.lstrip("+").partition("=") for word in words if "=" in word]
    found = []
    for i, (key, _, value) in enumerate(pairs):
        for later, _, other in pairs[i + 1 :]:
            if (later == key and other != value) or key.startswith(later + "."):
                text = f"{key}={value} has no effect, {later}={other} comes after it"
                found.append(Mention(kind="override", phase="", line=0, text=text[:200]))
                break
    return found


def sb3_settings(source: Path) -> dict[str, Any] | None:
    """Return the arguments that a model saved beside a log was made with.

    Of a model's `.zip` only the JSON part is read, and of that no value that SB3 has pickled, such
    as schedules.
    """
    folder = source if source.is_dir() else source.parent
    for path in sorted(folder.glob("*.zip"))[:_MODELS]:
        for data in _data(path):
            if "policy_class" in data or "n_envs" in data:
                return _arguments(data)
    return None


def _data(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data") as file:
            found = json.loads(file.read(_DATA))
    except _DAMAGED:
        return  # another archive, or a damaged one
    if isinstance(found, dict):
        yield found


def _arguments(data: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in data.items() if isinstance(v, bool | int | float)}
    if "buffer_size" in plain:  # n-step returns, and SAC's temperature, under names of PPO's
        for name in ("n_steps", "ent_coef"):
            plain.pop(name, None)
    elif "n_steps" in plain and "n_envs" in plain:
        plain["n_steps"] *= plain["n_envs"]  # a batch, of all environments
    return plain
