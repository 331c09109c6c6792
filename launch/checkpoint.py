"""Checkpoints: safetensors and JSON, nothing pickled, whole or not there.

A checkpoint is a folder `step-N` with `tensors.safetensors` and `state.json`. It is written
beside its place, brought to the disk, and renamed: a full disk or a kill leaves the earlier
ones as they were.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polopt.launch.files import read_json, write_json

__all__ = ["newest", "read", "steps", "write"]

_NAME = re.compile(r"step-(\d+)(\.old)?")
_INSIDE = "/"  # names of tensors that stood inside the state begin with it


def steps(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a folder, newest first; none if it is not there.

    Raises:
        ValueError: If it is not a folder.
    """
    if not folder.is_dir():
        if folder.exists():
            raise ValueError(f"{folder} must be a folder of checkpoints: move the file away")
        return []
    found = [(m, p) for p in folder.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    found.sort(key=lambda item: (int(item[0][1]), item[0][2] is None), reverse=True)
    return [(int(m[1]), p) for m, p in found]


def write(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int
) -> Path:
    """Write the checkpoint of a step, then remove all but the newest `keep`.

    Args:
        folder: Where checkpoints go; made if need be.
        step: Names the checkpoint. One of the same step is replaced.
        tensors: By name; device and layout are not kept, dtype and values are.
        state: What else is needed, as `state_dict()` gives it: mappings, lists, tuples, numbers,
            text, none, and tensors.
        keep: How many stay, at least one.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: If the state holds something else (the message says where), or a name of a
            tensor starts with a slash.
        OSError: If the disk is full or not writable; earlier checkpoints are untouched.
    """
    for name in tensors:
        if name.startswith(_INSIDE):
            raise ValueError(f"the name of a tensor must not start with a slash, got {name!r}")
    everything = dict(tensors)
    content = {"step": step, "state": _pack(state, "", everything)}
    folder.mkdir(parents=True, exist_ok=True)
    target, old = folder / f"step-{step}", folder / f"step-{step}.old"
    temporary = folder / f".step-{step}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        try:
            save_file(_own(everything), temporary / "tensors.safetensors")
        except SafetensorError as error:
            raise OSError(f"cannot write the checkpoint {target}: {error}") from error
        _sync(temporary / "tensors.safetensors")
        write_json(temporary / "state.json", content)
        _sync(temporary)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        temporary.rename(target)
        _sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    for _, path in steps(folder)[max(keep, 1) :]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint, on the CPU.

    Raises:
        ValueError: If it is damaged or was written by a newer polopt.
    """
    content = read_json(path / "state.json")
    try:
        tensors = load_file(path / "tensors.safetensors")
        state = _unpack(content["state"], tensors)
    except Exception as error:  # safetensors has an exception of its own
        raise ValueError(f"the checkpoint {path} is damaged: {error}") from error
    return {n: t for n, t in tensors.items() if not n.startswith(_INSIDE)}, state


def newest(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """Return step, tensors and state of the newest checkpoint that is whole, or None.

    Damaged ones are passed over with a line on stderr.

    Raises:
        ValueError: If the newest was written by a newer polopt, or `folder` is a file.
    """
    for step, path in steps(folder):
        try:
            return step, *read(path)
        except ValueError as error:
            if "upgrade polopt" in str(error):
                raise
            sys.stderr.write(f"polopt: {error}; trying the one before\n")
    return None


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detach, and copy those that share memory: safetensors has no views."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        result[name] = tensor if whole and pointer not in seen else tensor.clone()
        seen.add(pointer)
    return result


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401
    """Return JSON for a state: tensors move to `tensors`, what JSON lacks becomes `{"!": …}`."""
    if isinstance(value, Tensor):
        name = _INSIDE + path
        while name in tensors:  # keys 1 and "1" of one mapping
            name += "'"
        tensors[name] = value
        return {"!": "tensor", "name": name}
    if isinstance(value, Mapping):
        # Optimisers number their parameters: keys need not be text.
        if all(isinstance(k, str) for k in value) and "!" not in value:
            return {k: _pack(v, f"{path}/{k}", tensors) for k, v in value.items()}
        items = [
            [_pack(k, f"{path}/key", tensors), _pack(v, f"{path}/{k}", tensors)]
            for k, v in value.items()
        ]
        return {"!": "mapping", "items": items}
    if isinstance(value, list | tuple):
        items = [_pack(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"!": "tuple", "items": items}
    if isinstance(value, float) and value - value != 0.0:
        return {"!": "float", "value": repr(value)}
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return {"!": "text", "value": value + "!"}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(
        f"a checkpoint cannot hold the {type(value).__name__} at {path or 'its root'}: "
        "turn it into tensors, numbers, text, lists and mappings"
    )


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return [_unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    match value.get("!"):
        case "tensor":
            return tensors[value["name"]]
        case "mapping":
            return {_unpack(k, tensors): _unpack(v, tensors) for k, v in value["items"]}
        case "tuple":
            return tuple(_unpack(v, tensors) for v in value["items"])
        case "float":
            return float(value["value"])
        case "text":
            return value["value"][:-1]
    return {k: _unpack(v, tensors) for k, v in value.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
