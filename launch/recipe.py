"""Recipes: YAML files that name functions of Python and their arguments.

A mapping with the entry `use` is a call: `use` names what is called, the other entries are
its keyword arguments. `use: dapo` looks in the given namespace, `use: my.module:name` imports.
Arguments are checked against the signature, so a recipe has no schema of its own, and a new
algorithm needs no registration.

A recipe that differs in a few lines from another names it as its `base` and states those lines:

    base: cartpole-ppo            # one that ships; ./mine.yaml is a file beside this one
    algorithm: {clip_high: 0.28}  # merged into the base's, as its `use` is the same

Mappings are merged key by key, except that one with another `use` takes the place of the base's;
everything else takes its place too, `null` with none. A base has no base of its own.

A recipe can import and call any code of the machine. Trust it like a script: read a stranger's
recipe before you run it, and never build one from data or logs.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from polopt.launch import yaml12
from polopt.launch.extras import explain
from polopt.launch.values import convert

__all__ = [
    "FORMAT",
    "RecipeError",
    "build",
    "call",
    "check_arguments",
    "check_keys",
    "complete",
    "dump",
    "load",
    "nearest",
    "override",
    "resolve",
    "shipped",
]

FORMAT = 1
"""Version of the recipe format; a recipe may state it as `format: 1`."""


class RecipeError(ValueError):
    """A recipe or an override is wrong; the message says where, what was found, and the mend."""


def load(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe with its base, and apply overrides to it.

    Args:
        path: A YAML file.
        overrides: Strings `a.b.c=value`, the value in YAML. `a.b.c=null` sets none, and
            `a.0.b=value` reaches into a list.

    Returns:
        The plain tree.

    Raises:
        RecipeError: If the file or its base cannot be read, is not a mapping, has a newer
            format, or an override does not fit.
    """
    tree = _read(path)
    if "base" in tree:
        where = _base(path, tree.pop("base"))
        base = _read(where)
        if "base" in base:
            raise RecipeError(
                f"{path}: its base {where} has a base itself: name {base['base']!r} as the base, "
                "and state what differs from it"
            )
        tree = _merge(base, tree)
    for item in overrides:
        override(tree, item)
    return tree


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise RecipeError(f"cannot read the recipe {path}: {reason}") from error
    try:
        tree = _parse(text)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    if not isinstance(tree, dict) or not tree:
        raise RecipeError(f"{path}: a recipe is a mapping with the key 'task', got {tree!r}")
    version = tree.pop("format", FORMAT)
    if version != FORMAT:
        raise RecipeError(
            f"{path}: format is {version!r}, this polopt reads {FORMAT}: "
            "upgrade polopt, or write the recipe anew"
        )
    return tree


def _base(path: Path, base: object) -> Path:
    """Return the file of a recipe's base."""
    if not isinstance(base, str) or not base:
        raise RecipeError(f"{path}: 'base' must be the name of a recipe or a file, got {base!r}")
    if base.endswith((".yaml", ".yml")):
        return path.parent / base
    names = shipped()
    if base not in names:
        raise RecipeError(
            f"{path}: there is no recipe {base!r} to be its base, {nearest(base, names)}"
        )
    return names[base]


def _merge(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with what `tree` states in place of its own."""
    merged = dict(base)
    for key, value in tree.items():
        old: Any = base.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        same = both and value.get("use", old.get("use")) == old.get("use")
        merged[key] = _merge(old, value) if same else value
    return merged


def shipped() -> dict[str, Path]:
    """Return the recipes that ship with the package, by name, sorted."""
    folder = Path(str(files("polopt.launch").joinpath("recipes")))
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def dump(tree: Mapping[str, Any]) -> str:
    """Return a tree as YAML text that `load` reads back."""
    return yaml12.dump(tree)


def _parse(text: str) -> Any:  # noqa: ANN401
    try:
        return yaml12.parse(text)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def override(tree: dict[str, Any], item: str) -> None:
    """Apply one override `a.b.c=value` to a tree, in place.

    Raises:
        RecipeError: If it has no `=`, its value is not YAML, or its path leads through a value.
    """
    key, found, text = item.partition("=")
    names = key.split(".")
    if not found or not all(names):
        raise RecipeError(f"override {item!r} is not of the form key=value or key.sub=value")
    try:
        value = _parse(text)
    except RecipeError as error:
        raise RecipeError(f"override {item!r}: {error}") from error
    node: Any = tree
    for depth, name in enumerate(names):
        path, last = ".".join(names[:depth]), depth == len(names) - 1
        if isinstance(node, list):
            if not name.isdecimal() or int(name) >= len(node):
                raise RecipeError(
                    f"override {item!r}: {path} has {len(node)} items, {name!r} is no index of it"
                )
            index: Any = int(name)
        elif isinstance(node, dict):
            index = name
            if not last:
                node.setdefault(name, {})
        else:
            raise RecipeError(
                f"override {item!r}: {path} is {node!r}, which has no entries; "
                f"set it whole with {path}=…"
            )
        if last:
            node[index] = value
        else:
            node = node[index]


def nearest(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name: the nearest names, or all of them."""
    folded = {re.sub(r"[-_]", "", k).lower(): k for k in sorted(known)}
    plain = re.sub(r"[-_]", "", str(name)).lower()
    close = difflib.get_close_matches(plain, folded, n=1)
    parts = set(re.split("[-_]", str(name).lower()))
    # cartpole-sac leaves out a part, and is not cartpole-dqn.
    longer = [k for k in known if parts < set(re.split("[-_]", str(k).lower()))]
    if plain not in folded and len(parts) > 1 and len(longer) == 1:
        return f"did you mean {longer[0]!r}?"
    if close:
        return f"did you mean {folded[close[0]]!r}?"
    if not known:
        return "it takes no settings"
    if len(known) > _MANY:
        some = difflib.get_close_matches(str(name).lower(), folded, n=3, cutoff=0.0)
        names = ", ".join(folded[s] for s in some)
        return f"expected one of {len(known)} names, the nearest are {names}"
    return f"expected {'one of ' if len(known) > 1 else ''}{', '.join(sorted(known))}"


def check_keys(section: object, known: Collection[str], path: str = "") -> None:
    """Refuse a section that is not a mapping or has keys other than the known ones.

    Args:
        section: What the recipe holds at `path`.
        known: The keys that may stand there.
        path: Where it stands, empty for the whole recipe.

    Raises:
        RecipeError: With the path, the key and the nearest known one.
    """
    if not isinstance(section, Mapping):
        raise RecipeError(f"{path} must be a mapping of settings, got {section!r}")
    for key in section:
        if key not in known:
            what = f"unknown key '{path}.{key}'" if path else f"unknown section {key!r}"
            name, colon, value = str(key).partition(":")
            if colon and section[key] is None:  # YAML reads {a:1} as a key alone
                raise RecipeError(f"{what}, write a space after the colon: {name}: {value}")
            raise RecipeError(f"{what}, {nearest(key, known)}")


def build(tree: object, namespace: Mapping[str, Callable[..., Any]], path: str = "") -> Any:  # noqa: ANN401
    """Return `tree` with every call replaced by its result, innermost first.

    Args:
        tree: What `load` returned, or a part of it.
        namespace: What short names stand for.
        path: Where `tree` sits in the recipe, for messages.

    Raises:
        RecipeError: If a name is unknown or an argument does not fit the signature.
    """
    if isinstance(tree, list):
        return [build(item, namespace, f"{path}.{i}") for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    children = {
        k: build(v, namespace, f"{path}.{k}".lstrip(".")) for k, v in tree.items() if k != "use"
    }
    if "use" not in tree:
        return children
    return call(resolve(tree["use"], namespace, path), children, path)


def call(target: Callable[..., Any], arguments: Mapping[str, Any], path: str = "") -> Any:  # noqa: ANN401
    """Call `target` with a section of a recipe, after checking it against the signature.

    Args:
        target: A function or class.
        arguments: Its keyword arguments; values are converted to the annotated types.
        path: Where they stand in the recipe, for messages.

    Raises:
        RecipeError: If an argument is unknown, missing or of the wrong type, or if the call
            raises ValueError, TypeError or ImportError.
    """
    check_arguments(target, arguments, path)
    types = _signature(target)[1]
    try:
        checked = {
            name: convert(value, types.get(name, Any), f"{path}.{name}")
            for name, value in arguments.items()
        }
    except ValueError as error:
        raise RecipeError(str(error)) from None
    try:
        return target(**checked)
    except RecipeError:
        raise
    except ImportError as error:
        raise RecipeError(f"{path}: {explain(error)}") from error
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{path}: {str(error) or type(error).__name__}") from error
    except SystemExit as error:  # a script's main
        raise RecipeError(f"{path}: {_name(target)} called sys.exit({error.code!r})") from error


def resolve(
    name: object, namespace: Mapping[str, Callable[..., Any]], path: str = ""
) -> Callable[..., Any]:
    """Return what `use: name` stands for.

    Args:
        name: A short name, or `module:name`, which is imported.
        namespace: What short names stand for.
        path: Where the call stands in the recipe, for messages.

    Raises:
        RecipeError: If there is no such function or class.
    """
    where = f"{path}.use".lstrip(".")
    if not isinstance(name, str) or not name:
        raise RecipeError(f"'{where}' must be a name, got {name!r}")
    if ":" not in name:
        if name not in namespace:
            raise RecipeError(f"'{where}': unknown name {name!r}, {nearest(name, namespace)}")
        return namespace[name]
    module, _, attribute = name.partition(":")
    if module.startswith("."):
        raise RecipeError(f"'{where}': {name!r} is relative, write the whole name of the module")
    if os.getcwd() not in sys.path:  # like `python -m`, but installed packages come first
        sys.path.append(os.getcwd())
    try:
        target: Any = importlib.import_module(module)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # whatever that module does when it is imported
        why = explain(error) if isinstance(error, ImportError) else error
        if not isinstance(error, ImportError | AttributeError | ValueError | SyntaxError):
            why = f"{type(error).__name__}: {error}"
        raise RecipeError(f"'{where}': cannot import {name!r}: {why}") from error
    if not callable(target):
        raise RecipeError(f"'{where}': {name!r} is not a function or class, got {target!r}")
    return target


def check_arguments(
    target: Callable[..., Any], arguments: Mapping[str, Any], path: str = ""
) -> None:
    """Check arguments against the signature of `target`, without calling it.

    Args:
        target: A function or class.
        arguments: Keyword arguments.
        path: Where they stand in the recipe, for messages.

    Raises:
        RecipeError: If one is unknown or missing.
    """
    check_keys(arguments, arguments, path)
    parameters = _signature(target)[0]
    settable = {n for n, p in parameters.items() if p.kind in _BY_NAME}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        check_keys(arguments, settable, path)
    for name in settable - set(arguments):
        if parameters[name].default is inspect.Parameter.empty:
            raise RecipeError(f"'{path}.{name}' is missing, {_name(target)} needs it")


def complete(tree: object, namespace: Mapping[str, Callable[..., Any]], path: str = "") -> Any:  # noqa: ANN401
    """Return a copy of `tree` in which every call also states its defaults.

    Defaults that YAML cannot hold (objects) are left out. Reading the copy means the same as
    reading `tree`, and keeps meaning it when a default changes.

    Raises:
        RecipeError: If a name is unknown.
    """
    if isinstance(tree, list):
        return [complete(item, namespace, f"{path}.{i}") for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    result = {k: complete(v, namespace, f"{path}.{k}".lstrip(".")) for k, v in tree.items()}
    if "use" in tree:
        for name, parameter in _signature(resolve(tree["use"], namespace, path))[0].items():
            if parameter.kind in _BY_NAME and _writable(parameter.default):
                result.setdefault(name, yaml12.plain(parameter.default))
    return result


_MANY = 30  # names that a message may list
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _signature(target: Callable[..., Any]) -> tuple[Mapping[str, inspect.Parameter], dict]:
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # some functions written in C do not tell
        parameters = {"_": inspect.Parameter("_", inspect.Parameter.VAR_KEYWORD)}
    try:
        # A dataclass tells the types of inherited fields itself, its `__init__` may not.
        made = inspect.isclass(target) and not is_dataclass(target)
        types = get_type_hints(target.__init__ if made else target)
    except (NameError, TypeError, AttributeError):  # hints for type checkers only
        types = {}
    return parameters, types


def _writable(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_writable(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


def _name(target: Callable[..., Any]) -> str:
    return getattr(target, "__name__", repr(target))
