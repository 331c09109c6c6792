"""Reads the reference values under `tests/data/golden`."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import torch

DATA = Path(__file__).parents[1] / "data" / "golden"


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Return one file with its tensors. Do not write to it: it is shared."""
    with gzip.open(DATA / f"{name}.json.gz", "rt") as file:
        return _decode(json.load(file))


def _decode(node: Any) -> Any:
    if isinstance(node, dict):
        if node.keys() == {"dtype", "shape", "data"}:
            data = torch.tensor(_number(node["data"]), dtype=getattr(torch, node["dtype"]))
            return data.reshape(node["shape"])
        return {key: _decode(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_decode(value) for value in node]
    return _number(node) if node in ("NaN", "Infinity", "-Infinity") else node


def _number(node: Any) -> Any:
    if isinstance(node, list):
        return [_number(value) for value in node]
    return float(node.replace("Infinity", "inf")) if isinstance(node, str) else node
