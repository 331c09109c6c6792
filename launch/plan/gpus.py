"""The memory of GPUs."""

import re
from dataclasses import dataclass

from polopt.launch.recipe import nearest

__all__ = ["GIB", "GPUS", "Gpu", "find_gpu"]

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A card.

    Attributes:
        name: As it is asked for, for example `H100-80`.
        memory: Memory that a program can allocate, in GiB. Less than the plate says: drivers
            and error correction keep some.
    """

    name: str
    memory: float


# Plate size in GB -> what a process sees, in GiB. Nobody measured these here: they are the totals
# that nvidia-smi and its kin report, and vary by a few hundred MiB between drivers.
GPUS = {
    name: Gpu(name, memory)
    for name, memory in {
        "H100-80": 79.6,
        "H100-96": 94.9,
        "H200-141": 139.8,
        "H20-96": 95.0,
        "H800-80": 79.6,
        "B200-180": 178.3,
        "GH200-96": 94.9,
        "A100-40": 39.4,
        "A100-80": 79.3,
        "A800-80": 79.3,
        "A40-48": 44.4,
        "A10-24": 22.1,
        "A6000-48": 47.5,
        "L4-24": 22.2,
        "L40S-48": 44.5,
        "V100-16": 15.8,
        "V100-32": 31.7,
        "T4-16": 14.6,
        "RTX3090-24": 23.6,
        "RTX4090-24": 23.6,
        "RTX5090-32": 31.4,
        "MI250-64": 63.9,
        "MI300X-192": 191.5,
        "ASCEND910B-64": 61.0,
    }.items()
}


def find_gpu(name: str) -> Gpu:
    """Return the card of that name, or one of any size: `48GiB`.

    Args:
        name: A name of `GPUS`, without regard to case, `-` and `_`; the size may be left out
            where only one is sold; or a number with the unit GiB or GB, taken as usable.

    Raises:
        ValueError: If the name is unknown or ambiguous, or the size absurd.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gib|gb)", name.strip().lower())
    if size:
        memory = float(size[1]) * (1.0 if size[2] == "gib" else 1e9 / GIB)
        if not 1 <= memory <= 2000:
            raise ValueError(f"gpu: {name!r} is {memory:.4g} GiB, expected 1 to 2000 GiB")
        return Gpu(name, memory)
    wanted = _fold(name)
    exact = [g for key, g in GPUS.items() if _fold(key) == wanted]
    if exact:
        return exact[0]
    family = [g for key, g in GPUS.items() if _fold(key.split("-")[0]) == wanted]
    if len(family) == 1:
        return family[0]
    if family:
        names = " or ".join(g.name for g in family)
        raise ValueError(f"gpu: {name!r} comes in several sizes, name one: {names}")
    raise ValueError(f"gpu: unknown card {name!r}, {nearest(name, GPUS)} A size works too: 48GiB")


def _fold(name: str) -> str:
    return re.sub(r"[-_ ]|gb$|gib$", "", name.strip().lower())
