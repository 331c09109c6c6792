"""`polopt plan`: the command."""

import argparse
from pathlib import Path
from typing import Any

__all__ = ["EPILOG", "add_arguments", "plan_command"]

EPILOG = """\
examples:
  polopt plan qwen3-8b --gpu H100-80 --gpus 8 sharding=fsdp vllm_memory=0.5
  polopt plan --model models/my-model --gpu 48GiB micro_batch=2
  polopt plan my-recipe.yaml --gpu A100-80 trainer.per_device_train_batch_size=2
  polopt plan run_verl.sh --gpu H100-80 vllm_memory=0.9 --set data.rows=7473

Settings without a dot are the planner's (docs/planner.md lists them), those with a dot belong to
the recipe or script. Nothing is loaded, run or downloaded.

exit status: 0 fine (also at the edge or at risk), 1 does not fit, 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE|SCRIPT|MODEL [key=value ...]",
        help="a recipe, a launch script of verl or a known model, and settings to change",
    )
    parser.add_argument("--model", metavar="DIR|NAME", help="a config.json or a known model")
    parser.add_argument("--gpu", metavar="NAME", help="the card, such as H100-80, or 48GiB")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many cards train")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value that a script alone does not give",
    )


def plan_command(args: argparse.Namespace) -> dict[str, Any]:
    """Plan what the command line names.

    Args:
        args: What `add_arguments` parsed.

    Returns:
        `content` for `--json`, `text` in Markdown, and the exit status `code`.

    Raises:
        RecipeError: If the input is wrong; one sentence.
    """
    from polopt.launch.recipe import RecipeError

    try:
        return _plan(args)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    from polopt.launch.plan.architecture import load
    from polopt.launch.plan.gpus import GPUS, find_gpu
    from polopt.launch.plan.phases import plan
    from polopt.launch.plan.report import as_json, as_markdown
    from polopt.launch.plan.setup import Setup, change

    words = list(args.arguments)
    name = words.pop(0) if words and "=" not in words[0] else None
    stray = [w for w in words if "=" not in w]
    if stray:
        raise ValueError(f"{stray[0]!r} is not of the form key=value; one thing at a time")
    if not args.gpu:
        raise ValueError(f"--gpu is missing, for example --gpu H100-80; known: {', '.join(GPUS)}")
    card = find_gpu(args.gpu)
    own = [w for w in words if "." not in w.partition("=")[0]]
    source = _source(name, args, [w for w in words if w not in own])
    model = load(args.model) if args.model else source.model
    if model is None:
        raise ValueError(
            f"the model {source.model_name!r} is neither here nor known: name one of its shape "
            "with --model DIR or --model NAME"
        )
    settings = source.settings | _values(own)
    if args.gpus is not None:
        settings["gpus"] = args.gpus
    if settings.get("gpus", 1) != 1:
        settings.setdefault("sharding", "fsdp")
    planned = plan(change(Setup(model=model, gpu=card), settings))
    return {
        "content": as_json(planned, source.said),
        "text": as_markdown(planned, source.said),
        "code": 1 if planned.verdict == "does not fit" else 0,
    }


def _values(words: list[str]) -> dict[str, Any]:
    from polopt.launch.recipe import override

    values: dict[str, Any] = {}
    for word in words:
        override(values, word)
    return values


def _source(name: str | None, args: argparse.Namespace, dotted: list[str]) -> Any:  # noqa: ANN401
    """Find out what is planned: a recipe, a script, or a model alone."""
    from polopt.launch.plan.architecture import load
    from polopt.launch.plan.sources import Source, from_recipe, from_script
    from polopt.launch.train import find_recipe, is_file, recipe_names

    path = Path(name) if name else None
    if path is not None and (name in recipe_names() or path.suffix in (".yaml", ".yml")):
        world = [] if args.gpus is None else [f"launch.processes={args.gpus}"]
        return from_recipe(find_recipe(str(name)), [*dotted, *world])
    if path is not None and is_file(path) and path.suffix != ".json":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not a text file"
            raise ValueError(f"cannot read {path}: {reason}") from error
        given = dict(_pair(item) for item in [*args.set, *dotted])
        try:
            return from_script(text, given)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if dotted:
        raise ValueError(f"{dotted[0]!r} belongs to a recipe or script, and none is named")
    if name is None and args.model is None:
        raise ValueError("name what to plan: polopt plan RECIPE, SCRIPT or MODEL, or --model DIR")
    found = load(str(name)) if name else None
    return Source(model=found, model_name=str(name), settings={}, said=[])


def _pair(item: str) -> tuple[str, str]:
    from polopt.launch.verl.command import split_set

    name, found, value = split_set(item)
    if not found or not name:
        raise ValueError(f"{item!r} is not of the form NAME=VALUE")
    return name, value
