"""From a recipe to a job: which loop a task needs, and what a job offers.

The types that the sections `task` and `algorithm` build select the loop, nothing else does.
"""

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from polopt.launch.doctor.live import Attendance
from polopt.launch.extras import explain, is_missing
from polopt.launch.recipe import RecipeError, build, call, check_keys, complete

if TYPE_CHECKING:
    from polopt.launch.run import Run

__all__ = [
    "COMMON",
    "STRATEGIES",
    "Job",
    "algorithm_names",
    "attendance",
    "exploration_names",
    "loss_names",
    "missing_extra",
    "prepare",
    "processes",
    "seed",
    "strategy",
    "task_names",
]

COMMON = ("name", "project", "seed", "launch", "doctor", "task", "algorithm")
"""Sections that every recipe may have; `prepare` has checked all but the last two."""

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
"""How a model is spread over processes: `launch.strategy`, and the files in `configs/`."""


@runtime_checkable
class Job(Protocol):
    """A checked recipe, ready to run. Building one writes nothing.

    It may have two methods that are called before a run folder is made: `check_inputs()` refuses
    what the recipe names and is not here, or what does not fit in the memory, reads and writes
    nothing, and is called for a dry run, too; `check_here()` refuses what else the machine lacks
    (a library, a folder to write to) and what the inputs hold. One that has an attribute
    `strategy`, one of `STRATEGIES` or None, is started by accelerate.

    Attributes:
        name: Names the run folder.
        tree: The resolved recipe, with the defaults that the job filled in; YAML can hold it.
        processes: The world size asked for.
    """

    name: str
    tree: dict[str, Any]
    processes: int

    def arithmetic(self) -> dict[str, Any]:
        """Return the batch arithmetic for `--dry-run`, numbers and text by name."""
        ...

    def train(self, run: "Run") -> dict[str, Any]:
        """Train until the recipe's end, and return the summary.

        Called on every rank with its own view of the run folder. Asks `run.should_stop()` once
        an update, and when told so saves and returns early. Reads `run.latest()` first, so
        that a resumed run goes on from its newest checkpoint.
        """
        ...


def prepare(tree: dict[str, Any], *, name: str) -> Job:
    """Check a recipe and return the job that runs it.

    A task may be built by anything: `polopt.envs.control.ControlTask` (with a critic, in groups
    or off-policy, as the algorithm is) and `polopt.envs.text.TextTask` go to the loops that
    ship; another object that has a method `prepare(tree, *, name)` makes its own job.

    Args:
        tree: What `polopt.launch.recipe.load` returned.
        name: Names the run, unless the recipe has a `name`.

    Raises:
        RecipeError: If the recipe is wrong, or an extra is not installed.
    """
    if "task" not in tree:
        raise RecipeError("the section 'task' is missing, for example task: {use: cartpole}")
    tree = {"name": name, "project": "polopt", "seed": 0, **tree}
    for key in ("name", "project"):
        if not isinstance(tree[key], str) or not re.fullmatch(r"\w[\w.+-]*", tree[key]):
            raise RecipeError(
                f"{key!r} must be a word of letters, digits and . _ + -, got {tree[key]!r}"
            )
    seed(tree)
    processes(tree)
    spread = strategy(tree)
    attendance(tree)
    with missing_extra(_title(tree, "task")):
        names = task_names() if _short(tree["task"]) else {}
        tree["task"] = complete(tree["task"], names, "task")
        task = build(tree["task"], names, "task")
    if "algorithm" in tree:
        _title(tree, "algorithm")
        names = loss_names() if _short(tree["algorithm"]) else {}
        tree["algorithm"] = complete(tree["algorithm"], names, "algorithm")
    with missing_extra(_title(tree, "task")):
        maker = _maker(task, tree)
        try:
            job = maker(tree, name=tree["name"])
        except RecipeError:
            raise
        except ValueError as error:  # the house's error for wrong input
            raise RecipeError(str(error)) from error
    if not isinstance(job, Job):
        raise RecipeError(
            f"'task': prepare of {type(task).__name__} must return a polopt.launch.job.Job, "
            f"got {job!r}"
        )
    if spread is not None and not hasattr(job, "strategy"):
        raise RecipeError(f"'launch.strategy' is for language models: leave out {spread!r} here")
    return job


def _maker(task: object, tree: Mapping[str, Any]) -> Callable[..., Job]:
    kinds = _kinds(task)
    if "polopt.envs.control.ControlTask" in kinds:
        algorithm = build(tree.get("algorithm"), loss_names(), "algorithm")
        name = "polopt.launch.control"
        if "polopt.losses.off_policy.OffPolicy" in _kinds(algorithm):
            name = "polopt.launch.off_policy"
        elif "polopt.losses.algorithm.Algorithm" in _kinds(algorithm) and algorithm.value is None:
            name = "polopt.launch.control_groups"
        return importlib.import_module(name).prepare
    if "polopt.envs.text.TextTask" in kinds:
        return importlib.import_module("polopt.launch.llm").prepare
    if "polopt.envs.bandit.BanditTask" in kinds:
        return importlib.import_module("polopt.launch.bandit").prepare
    maker = getattr(task, "prepare", None)
    if maker is None:
        raise RecipeError(
            f"'task' builds a {type(task).__name__}, expected a ControlTask or a TextTask "
            "(polopt.envs), or an object with a method prepare(tree, *, name)"
        )
    return maker


def _kinds(value: object) -> set[str]:
    """Names of the classes that a value is of: no class need be imported to ask."""
    return {f"{c.__module__}.{c.__qualname__}" for c in type(value).__mro__}


def _title(tree: Mapping[str, Any], key: str) -> str:
    section = tree[key]
    if not isinstance(section, dict) or "use" not in section:
        raise RecipeError(f"{key!r} must be a mapping with the entry 'use', got {section!r}")
    return f"the {key} {section['use']!r}"


def _short(node: object) -> bool:
    """Whether a short name stands anywhere in a tree: only then are the rooms imported."""
    if isinstance(node, dict):
        return ":" not in str(node.get("use", ":")) or any(map(_short, node.values()))
    return isinstance(node, list) and any(map(_short, node))


def attendance(tree: Mapping[str, Any]) -> Attendance:
    """Return the section `doctor` of a recipe, which warns by default.

    Raises:
        RecipeError: If it has other keys, or a value is wrong.
    """
    return call(Attendance, tree.get("doctor") or {}, "doctor")


def seed(tree: Mapping[str, Any]) -> int:
    """Return the recipe's seed, 0 if it has none.

    Raises:
        RecipeError: If it is not a whole number in [0, 2**32).
    """
    value = tree.get("seed", 0)
    if type(value) is not int or not 0 <= value < 2**32:
        raise RecipeError(f"'seed' must be a whole number from 0 to 4294967295, got {value!r}")
    return value


def processes(tree: Mapping[str, Any]) -> int:
    """Return `launch.processes`, the world size that the recipe asks for, 1 if it has none.

    Raises:
        RecipeError: If the section has other keys, or the number is not positive.
    """
    section = tree.get("launch", {})
    check_keys(section, ("processes", "strategy"), "launch")
    value = section.get("processes", 1)
    if type(value) is not int or value < 1:
        raise RecipeError(f"'launch.processes' must be a whole number from 1, got {value!r}")
    return value


def strategy(tree: Mapping[str, Any]) -> str | None:
    """Return `launch.strategy`, or None if the recipe leaves it to whoever starts the ranks.

    Raises:
        RecipeError: If it is none of `STRATEGIES`, or there is one process only.
    """
    value = tree.get("launch", {}).get("strategy")
    if value is None:
        return None
    if value not in STRATEGIES:
        raise RecipeError(
            f"'launch.strategy' must be one of {', '.join(STRATEGIES)}, got {value!r}"
        )
    if value != "ddp" and processes(tree) == 1:
        raise RecipeError(
            f"'launch.strategy' {value} shares a model between processes, and 'launch.processes' "
            "is 1: set it to the number of GPUs"
        )
    return value


def loss_names() -> dict[str, Callable[..., Any]]:
    """Return the short names for `algorithm`: the public functions and classes of the losses."""
    names: dict[str, Callable[..., Any]] = {}
    for module in ("polopt.losses.schedules", "polopt.losses"):
        names |= _public(module)
    return names


def task_names() -> dict[str, Callable[..., Any]]:
    """Return the short names for `task`: functions that return a task, and rewards for it.

    Raises:
        ImportError: If a library is not installed that building a task needs.
    """
    names: dict[str, Callable[..., Any]] = {}
    for module in ("control", "text", "dataset", "bandit"):
        public = _public(f"polopt.envs.{module}")
        names |= {n: f for n, f in public.items() if any(_returns(f, kind) for kind in _TASKS)}
    modules = ("envs.rewards", "envs.form_rewards", "envs.isolation", "ext.trl.rewards")
    for module in (f"polopt.{m}" for m in modules):
        names |= {n: f for n, f in _public(module).items() if _returns(f, "Isolated") or _scores(f)}
    return names


_TASKS = ("ControlTask", "TextTask", "DatasetTask", "BanditTask")


def _scores(target: object) -> bool:
    """Whether a class is one of rewards, whose objects score completions."""
    return is_dataclass(target) and "__call__" in vars(target)


def algorithm_names() -> dict[str, Callable[..., Any]]:
    """Return the named algorithms: the functions of `polopt.losses` that return one.

    Those that make one from another are no names of algorithms.
    """
    public = _public("polopt.losses").items()
    kinds = ("Algorithm", "OffPolicy")
    found = {n: f for n, f in public if any(_returns(f, kind) for kind in kinds)}
    return {n: f for n, f in found.items() if "base" not in inspect.signature(f).parameters}


def exploration_names() -> dict[str, Callable[..., Any]]:
    """Return the short names for `exploration`: its rules, and schedules."""
    from polopt.ext.torchrl.exploration import Rule
    from polopt.losses.schedules import Schedule

    public = {**_public("polopt.losses.schedules"), **_public("polopt.ext.torchrl.exploration")}
    kinds = (Rule, Schedule)
    return {
        n: c
        for n, c in public.items()
        if isinstance(c, type) and issubclass(c, kinds) and c not in kinds
    }


def _public(module: str) -> dict[str, Callable[..., Any]]:
    loaded = importlib.import_module(module)
    public = {n: getattr(loaded, n) for n in loaded.__all__}
    return {n: f for n, f in public.items() if callable(f)}


def _returns(target: Callable[..., Any], kind: str) -> bool:
    annotation = getattr(target, "__annotations__", {}).get("return")
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return inspect.isfunction(target) and name == kind


@contextlib.contextmanager
def missing_extra(what: str) -> Iterator[None]:
    """Turn the import error of a library that an extra brings into one sentence.

    Args:
        what: What needs the library, for the message.

    Raises:
        RecipeError: With the pip command.
    """
    try:
        yield
    except ImportError as error:
        if not is_missing(error):
            raise
        raise RecipeError(f"{what}: {explain(error)}") from error
