"""`polopt doctor`: the command."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polopt.launch.result import Result, printable

__all__ = ["EPILOG", "add_arguments", "check_recipe", "doctor"]

EPILOG = """\
examples:
  polopt doctor runs/cartpole-ppo-20260131-120000
  polopt doctor runs                        # all runs in a folder
  polopt doctor out/checkpoint-200          # TRL: trainer_state.json
  polopt doctor logs/progress.csv           # stable-baselines3
  polopt doctor train.log                   # console output of verl or transformers
  polopt doctor cartpole-ppo optimizer.lr=1 # a recipe, before anything runs

Read are polopt's run folders, trainer_state.json, TensorBoard files, progress.csv, JSON lines and
console output, plain or as .gz. Nothing that they hold is executed or unpickled.

"guide" as a source is a tuning guide for PPO, GRPO, DAPO and verl (in Chinese); what of it does not
hold is in README, "Where the tuning guide is wrong".

exit status: 0 nothing found, 1 findings, 2 input that is not understood
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="PATH | RECIPE [key=value ...]",
        help="logs or folders of runs; or one recipe, and settings to change in it",
    )


def doctor(args: argparse.Namespace, signals: object) -> Result:
    """Examine runs, or a recipe.

    Raises:
        RecipeError: If nothing was named, or a recipe is wrong.
    """
    from polopt.launch.recipe import RecipeError, nearest
    from polopt.launch.train import recipe_names

    words: list[str] = args.arguments
    names = recipe_names()
    if not all(words) or not words:
        raise RecipeError("name a run, a log or a recipe: polopt doctor PATH")
    first = words[0]
    file, folder = _is_there(first)
    if "=" in first and not file and not folder:
        raise RecipeError(f"{first!r} is a setting, name the recipe first: polopt doctor RECIPE")
    is_recipe = Path(first).suffix in (".yaml", ".yml") and not folder
    if is_recipe or (first in names and not file and not folder):
        return _recipe(first, words[1:])
    if not file and not folder and len(Path(first).parts) == 1 and not Path(first).suffix:
        raise RecipeError(f"there is no run, log or recipe {first!r}, {nearest(first, names)}")
    for word in words[1:]:
        if "=" in word and not any(_is_there(word)):
            raise RecipeError(
                f"{word!r} is a setting, and {first} is no recipe: settings go with one"
            )
    return _runs(words)


def _is_there(name: str) -> tuple[bool, bool]:
    """Return whether a name is that of a file, and whether it is that of a folder."""
    try:
        return Path(name).exists() and not Path(name).is_dir(), Path(name).is_dir()
    except OSError:  # no permission to look, or no name for a file
        return False, False


def _runs(words: list[str]) -> Result:
    from polopt.launch.doctor.diagnose import diagnose
    from polopt.launch.doctor.readers import NotALogError, read
    from polopt.launch.doctor.report import as_json, as_text

    runs: list[dict[str, Any]] = []
    texts: list[str] = []
    errors: list[str] = []
    for word in words:
        try:
            logs = read(Path(word))
        except NotALogError as error:
            print(f"polopt: {printable(str(error))}", file=sys.stderr)
            errors.append(str(error))
            continue
        for log in logs:
            findings = diagnose(log)
            runs.append(as_json(log, findings))
            texts.append(as_text(log, findings))
    content: dict[str, Any] = {"runs": runs}
    if errors:
        content["errors"] = errors
    found = any(run["findings"] for run in runs)
    return Result(content=content, text="\n\n".join(texts), code=2 if errors else int(found))


def _recipe(name: str, overrides: list[str]) -> Result:
    from polopt.launch.doctor.diagnose import preflight
    from polopt.launch.doctor.report import as_json, as_text
    from polopt.launch.doctor.walk import as_lines, walk
    from polopt.launch.job import prepare
    from polopt.launch.recipe import load
    from polopt.launch.train import find_recipe
    from polopt.launch.words import check_words

    check_words(overrides, "recipe")
    job = prepare(load(find_recipe(name), overrides), name=Path(name).stem)
    log = _settings(job.tree, f"recipe {name}", overrides)
    findings = preflight(log)
    items = walk(log, findings)
    content = as_json(log, findings) | {"recipe": name, "settings": log.settings}
    content["checklist"] = [asdict(item) for item in items]
    text = "\n".join([as_text(log, findings), *as_lines(items)])
    return Result(content=content, text=text, code=int(bool(findings)))


def check_recipe(tree: dict[str, Any], overrides: Sequence[str] = ()) -> list[str]:
    """Return what is seriously odd about a resolved recipe, one line each.

    `polopt train` prints them; hints are for `polopt doctor RECIPE`.

    Args:
        tree: The recipe.
        overrides: The settings of the command line, `key=value`.
    """
    from polopt.launch.doctor.diagnose import preflight
    from polopt.launch.doctor.report import brief

    findings = preflight(_settings(tree, "recipe", overrides))
    return [brief(f) for f in findings if f.level != "hint"]


def _settings(tree: dict[str, Any], source: str, overrides: Sequence[str]) -> Any:  # noqa: ANN401
    from polopt.launch.doctor.beside import lost_overrides
    from polopt.launch.doctor.log import Log
    from polopt.launch.doctor.names import settings_from

    kind = "llm" if "trainer" in tree else "control"
    settings, paths = settings_from(tree, "polopt", kind)
    return Log(
        source=source,
        framework="polopt",
        kind=kind,
        settings=settings,
        paths=paths,
        mentions=lost_overrides(overrides),
    )
