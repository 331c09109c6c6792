"""`polopt list` and `polopt show`: answers that come from the recipes and the code itself."""

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polopt.launch.job import algorithm_names, loss_names, prepare
from polopt.launch.recipe import RecipeError, build, call, load, nearest, override, resolve
from polopt.launch.result import Result
from polopt.launch.signals import Signals
from polopt.launch.train import find_recipe, is_file, recipe_names
from polopt.launch.values import flatten

__all__ = ["list_all", "show"]


def list_all(args: argparse.Namespace, signals: Signals) -> Result:
    """List recipes and algorithms, one line each."""
    recipes = {n: _comment(find_recipe(n)) for n in recipe_names()}
    algorithms = {n: _first_line(f) for n, f in algorithm_names().items()}
    width = max(map(len, [*recipes, *algorithms]), default=0)
    lines = ["recipes (polopt train NAME)"]
    lines += [f"  {n:{width}}  {text}" for n, text in recipes.items()]
    lines += ["", "algorithms (algorithm: {use: NAME})"]
    lines += [f"  {n:{width}}  {text}" for n, text in algorithms.items()]
    return Result(content={"recipes": recipes, "algorithms": algorithms}, text="\n".join(lines))


def show(args: argparse.Namespace, signals: Signals) -> Result:
    """Show one recipe or one algorithm, which may be a `package.module:name`.

    Raises:
        RecipeError: If there is no such name, or a setting does not fit.
    """
    if not args.arguments:
        raise RecipeError("name a recipe or an algorithm, `polopt list` has them")
    name, *overrides = args.arguments
    if name in recipe_names() or is_file(Path(name)):
        return _recipe(name, overrides)
    algorithms = algorithm_names()
    if name in algorithms or ":" in name:
        return _algorithm(name, resolve(name, algorithms), overrides)
    known = [*recipe_names(), *algorithms]
    raise RecipeError(
        f"there is no recipe or algorithm {name!r}, {nearest(Path(name).stem, known)}"
    )


def _recipe(name: str, overrides: list[str]) -> Result:
    path = find_recipe(name)
    stated = flatten(load(path))
    changed = [o.partition("=")[0] for o in overrides]
    job = prepare(load(path, overrides), name=Path(name).stem)
    values = {}
    for key, value in flatten(job.tree).items():
        if any(key == c or key.startswith(c + ".") for c in changed):
            source = "override"
        else:
            source = "recipe" if key in stated else "default"
        values[key] = {"value": value, "source": source}
    content = {"recipe": name, "file": str(path), "description": _comment(path), "values": values}
    rows = [(k, _plain(v["value"]), v["source"]) for k, v in values.items()]
    head = [f"{job.name}: {_comment(path)}".rstrip(": "), f"file: {path}", ""]
    return Result(content=content, text="\n".join(head + _table(rows)))


def _algorithm(name: str, preset: Callable[..., Any], overrides: list[str]) -> Result:
    arguments: dict[str, Any] = {}
    for item in overrides:
        override(arguments, item)
    try:
        parameters = inspect.signature(preset).parameters.values()
    except ValueError as error:  # some written in C
        raise RecipeError(f"{name} does not tell what arguments it takes") from error
    empty = inspect.Parameter.empty
    missing = [p.name for p in parameters if p.default is empty and p.name not in arguments]
    settings = {p.name: "required" if p.default is empty else _value(p.default) for p in parameters}
    names = loss_names()
    built = {k: build(v, names, f"{name}.{k}") for k, v in arguments.items()}
    axes = {} if missing else flatten(_value(call(preset, built, name)))
    doc = inspect.getdoc(preset) or ""
    content = {"algorithm": name, "settings": settings, "axes": axes, "doc": doc}
    given = ", ".join(k if v == "required" else f"{k}={v!r}" for k, v in settings.items())
    lines = [f"{name}({given})", "", doc, ""]
    from polopt.losses.catalog import catalog, off_policy_catalog  # imports torch

    facts = {entry.name: entry for entry in (*catalog(), *off_policy_catalog())}.get(name)
    if facts is not None:
        content |= {"formula": facts.formula, "paper": facts.paper, "others": facts.peers}
        lines += [f"loss of a step: {facts.formula}", f"others: {facts.peers}", ""]
    if missing:
        lines += [f"Give {', '.join(f'{m}=…' for m in missing)} to see its axes."]
    rows = [(k, _plain(v), "override" if k in arguments else "") for k, v in axes.items()]
    return Result(content=content, text="\n".join(lines + _table(rows)))


def _value(value: Any) -> Any:  # noqa: ANN401
    """Return a JSON-able picture of a setting: dataclasses by field, functions by name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _value(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"use": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(k): _value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_value(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", repr(value))


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    first = max((len(r[0]) for r in rows), default=0)
    second = min(max((len(r[1]) for r in rows), default=0), 40)
    return [f"{a:{first}}  {b:{second}}  {c}".rstrip() for a, b, c in rows]


def _plain(value: object) -> str:
    return "none" if value is None else str(value)


def _comment(path: Path) -> str:
    """Return the first line of the comment that a recipe begins with."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").rstrip(". ") if first.startswith("#") else ""


def _first_line(target: Callable[..., Any]) -> str:
    return (inspect.getdoc(target) or "").partition("\n")[0].rstrip(".")
