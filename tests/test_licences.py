"""Everything that `pip install polopt[all]` brings along is under a permissive licence.

Read from the metadata of what is installed here; `tox run -e latest` installs all of it. What
vLLM brings is not read: no environment of ours installs it.
"""

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("torchrl", "trl", "control", "all")

PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "HPND",
    "ISC",
    "MIT",
    "MIT-CMU",
    "PSF-2.0",
    "Python-2.0",
    "Unlicense",
    "Zlib",
}

# What older metadata writes, in the `License` field or as a classifier.
SPELLINGS = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
    "zlib": "Zlib",
}

# Read by hand. Each entry says what the metadata lacks, or why the package may stay.
EXCEPTIONS = {
    "torchrl": "MIT in its LICENSE file; the metadata has no licence",
    "zss": "BSD-2-Clause in its LICENSE file; the metadata has no licence",
    "orjson": "MPL-2.0 for parts: a requirement of tensordict, used unchanged",
    "tqdm": "MPL-2.0 for parts: a requirement of transformers and datasets, used unchanged",
    "pygame-ce": "LGPL-2.1: gymnasium imports it to draw Box2D (extra control only), unchanged",
}

# PyTorch's CUDA builds bring NVIDIA's libraries, under NVIDIA's terms. CPU builds do not.
CUDA = re.compile(r"nvidia-|cuda-")


def requirements(dist: Distribution, extras: tuple[str, ...]) -> Iterator[Requirement]:
    for line in dist.requires or ():
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("", *extras)):
            yield need


def closure() -> dict[str, Distribution]:
    """Return the installed packages that polopt and its extras need, by canonical name."""
    found: dict[str, Distribution] = {}
    todo, seen = [("polopt", EXTRAS)], set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # belongs to an extra that is not installed here
        todo += [
            (canonicalize_name(need.name), tuple(sorted(need.extras)))
            for need in requirements(found[name], extras)
        ]
    return found


def licences(dist: Distribution) -> list[str]:
    """Return the parts of the licence expression, or what older fields say, as SPDX names."""
    expression = dist.metadata.get("License-Expression")
    if expression:
        return re.split(r" AND | OR ", re.sub(r"[()]", "", expression))
    classifiers = [
        line.split(" :: ")[-1]
        for line in dist.metadata.get_all("Classifier") or ()
        if line.startswith("License :: ")
    ]
    field = (dist.metadata.get("License") or "").strip()
    # Some packages put the whole text into the field; their classifiers say the same in short.
    short = re.split(r" AND | OR ", field) if field and "\n" not in field else []
    return [SPELLINGS.get(name, name) for name in (short or classifiers)]


PACKAGES = closure()


def test_the_closure_is_walked():
    assert {"polopt", "torch", "tensordict", "numpy", "pydantic-core"} <= PACKAGES.keys()


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_licence_is_permissive(name):
    if name in EXCEPTIONS or CUDA.match(name):
        return
    names = licences(PACKAGES[name])
    assert names, f"{name} names no licence: read it, then add an exception that says what it is"
    assert set(names) <= PERMISSIVE, f"{name} is under {names}"


@pytest.mark.parametrize("name", sorted(EXCEPTIONS.keys() & PACKAGES.keys()))
def test_exception_is_needed(name):
    names = licences(PACKAGES[name])
    assert not names or not set(names) <= PERMISSIVE


def test_a_copyleft_licence_would_be_seen():
    class Metadata(dict):
        def get_all(self, key):
            return [self[key]]

    class Fake:
        metadata = Metadata(Classifier="License :: OSI Approved :: GPL", License="GPL-3.0")

    assert not set(licences(Fake)) <= PERMISSIVE
