"""The configuration keys of verl 0.9.1: where they exist, their defaults, what they do.

The table `data/schema.tsv.gz` was made from verl's composed configuration and dataclasses
(0.9.1); meanings are in our own words.
"""

import difflib
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["VERSION", "Key", "canonical", "find", "keys", "nearest", "prefix_of"]

VERSION = "0.9.1"

# Old names that verl still reads, or that older scripts use; a final dot moves a whole group.
_MOVED = {
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    ),
    "critic.model.fsdp_config.": "critic.fsdp.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "model.partial_pretrain": "model.path",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.rollout.": "reward.reward_model.rollout.",
    "sandbox_fusion.": "reward.sandbox_fusion.",
}


@dataclass(frozen=True)
class Key:
    """One configuration key.

    Attributes:
        name: The dotted path.
        home: `ppo`: in the composed configuration; `plus`: only with `+`; another engine
            (`megatron`, `veomni`, …) or entry point (`sft`, `async`, `evaluation`); `moved`:
            not in 0.9.1.
        type: As verl annotates it.
        default: With interpolations resolved.
        status: Why the key does nothing, where that is so.
        meaning: What it does.
    """

    name: str
    home: str
    type: str
    default: Any
    status: str
    meaning: str


@cache
def keys() -> dict[str, Key]:
    """All keys by name."""
    raw = (files("polopt.launch.verl") / "data" / "schema.tsv.gz").read_bytes()
    table = {}
    for row in gzip.decompress(raw).decode().splitlines():
        name, home, kind, default, status, meaning = row.split("\t")
        table[name] = Key(name, home, kind, json.loads(default), status, meaning)
    return table


def canonical(name: str) -> str:
    """The place of a key in 0.9.1."""
    for old, new in _MOVED.items():
        if name == old or (old.endswith(".") and name.startswith(old)):
            return new + name[len(old) :]
    return name


def find(name: str) -> Key | None:
    """The key, or the free dictionary that it is an entry of; None if verl does not know it."""
    table = keys()
    if name in table and table[name].meaning:
        return table[name]
    moved = canonical(name)
    if moved != name and moved in table:
        return replace(table[moved], name=name, home="moved")
    for parent in _parents(name):
        found = table.get(parent)
        if found and (found.default == {} or "dict" in found.type.lower()):
            return Key(name, "plus", "", None, "", f"an entry of {parent}: {found.meaning}")
    return table.get(name)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def nearest(name: str) -> list[str]:
    """The keys that look most like an unknown one, at most two."""
    table = keys()
    leaf = name.rpartition(".")[2]
    same_leaf = [k for k in table if k.rpartition(".")[2] == leaf]
    found = difflib.get_close_matches(name, same_leaf or list(table), n=2, cutoff=0.6)
    return found or difflib.get_close_matches(name, list(table), n=2, cutoff=0.75)


def prefix_of(text: str) -> str | None:
    """The longest key that the text starts with (for copies that lost their `=`)."""
    found = [k for k in keys() if text.startswith(k) and len(text) > len(k) and "." in k]
    return max(found, key=len, default=None)
