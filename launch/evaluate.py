"""`polopt eval`: how well a language model answers held-out problems, or a policy plays."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polopt.launch.result import Result

if TYPE_CHECKING:
    from polopt.launch.job import Job
    from polopt.launch.llm import LlmJob

__all__ = ["EPILOG", "add_arguments", "evaluate"]

EPILOG = """\
examples:
  polopt eval runs/arithmetic-dapo-20260131-120000
  polopt eval runs/arithmetic-dapo-20260131-120000 --checkpoint 200 --samples 16 --json
  polopt eval runs/arithmetic-dapo-20260131-120000 --checkpoint best
  polopt eval runs/arithmetic-dapo-20260131-120000 evaluation.problems=64 task.evaluation_size=64
  polopt eval Qwen/Qwen3-0.6B --recipe my-recipe.yaml
  polopt eval runs/cartpole-ppo-20260131-120000 evaluation.episodes=1000 --seed 1

greedy: accuracy of greedy answers. mean@n: accuracy of n answers sampled at temperature 1 from the
whole vocabulary. pass@k: the chance that one of k such answers is correct, unbiased. majority@n:
how often the most frequent of n answers is correct. ±: standard error over the problems.
A control run plays greedy episodes instead: mean and standard deviation of their returns.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RUN|MODEL [key=value ...]",
        help="a run folder, or a folder or hub name of a model; and settings of its recipe",
    )
    parser.add_argument("--recipe", metavar="RECIPE", help="whose task a MODEL has to answer")
    parser.add_argument(
        "--checkpoint", metavar="STEP", help="of the RUN, or `best`; the newest by default"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="answers drawn per problem (8)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the draws, or of the states in which episodes begin (0)",
    )


def evaluate(args: argparse.Namespace, signals: object) -> Result:
    """Evaluate the model or the run that the command line names.

    Raises:
        RecipeError: If there is no such model or run, or its task is of another kind.
    """
    from polopt.launch.recipe import RecipeError
    from polopt.launch.train import is_file
    from polopt.launch.words import check_words

    if not args.arguments or not args.arguments[0] or "=" in args.arguments[0]:
        raise RecipeError("name a run folder or a model first: polopt eval RUN|MODEL")
    samples = 8 if args.samples is None else args.samples
    if samples < 1:
        raise RecipeError(f"--samples must be at least 1, got {args.samples}")
    if not 0 <= args.seed < 2**32:
        raise RecipeError(f"--seed must be a whole number from 0 to 4294967295, got {args.seed}")
    name, *overrides = args.arguments
    check_words(overrides, "model")
    run = Path(name)
    if is_file(run / "config.yaml"):
        found, steps = _of_run(run, args, overrides)
        if hasattr(found, "learner"):
            return _play(found, run, args, steps)
        job, model = _language(found), _model_of(run, args, steps)
    else:
        job, model = _of_model(name, args, overrides)
    # A recipe that trusts the code of its own model does not vouch for that of another.
    own = model != name or getattr(job.model, "path", None) == name
    own = own or any(word.startswith("model.trust_remote_code=") for word in overrides)
    content = measure(job, model, samples=samples, seed=args.seed, own=own)
    return Result(content=content, text=_table(content))


def _of_run(path: Path, args: argparse.Namespace, overrides: list[str]) -> tuple["Job", list[int]]:
    """Return the job of a run, and the steps of its checkpoints."""
    from polopt.launch.job import prepare
    from polopt.launch.recipe import RecipeError, override
    from polopt.launch.record import read_run

    if args.recipe is not None:
        raise RecipeError(f"--recipe goes with a model: {path} is a run and has its own recipe")
    try:
        run = read_run(path)
    except (ValueError, OSError) as error:
        raise RecipeError(str(error)) from error
    tree = run.config
    for word in overrides:
        override(tree, word)
    return prepare(tree, name=path.name), run.checkpoints


def _play(job: Any, path: Path, args: argparse.Namespace, steps: list[int]) -> Result:  # noqa: ANN401
    from polopt.launch.evaluate_control import measure, table
    from polopt.launch.recipe import RecipeError

    if args.samples is not None:
        raise RecipeError(
            "--samples goes with a language model: a control run plays evaluation.episodes"
        )
    step = _chosen(path, args.checkpoint, steps)
    content = measure(job, path, step=int(step), seed=args.seed)
    return Result(content=content, text=table(content))


def _model_of(path: Path, args: argparse.Namespace, steps: list[int]) -> str:
    best = (path / "best" / "best.json").is_file()
    step = _chosen(path, args.checkpoint, steps, best=best)
    return str(path / "best" if step == "best" else path / "checkpoints" / f"checkpoint-{step}")


def _chosen(path: Path, asked: str | None, steps: list[int], *, best: bool = False) -> str:
    """Return the step of the checkpoint that is asked for, or `best`."""
    from polopt.launch.recipe import RecipeError

    known = [*map(str, steps), *(["best"] if best else [])]
    if not steps and not (best and asked == "best"):
        raise RecipeError(f"{path} has no checkpoint yet")
    step = str(steps[-1]) if asked is None else asked
    if step not in known:
        what = "best checkpoint" if step == "best" else f"checkpoint of step {step}"
        raise RecipeError(f"{path} has no {what}, it has {', '.join(known)}")
    return step


def _of_model(name: str, args: argparse.Namespace, overrides: list[str]) -> tuple["LlmJob", str]:
    from polopt.launch.job import prepare
    from polopt.launch.recipe import RecipeError, load
    from polopt.launch.train import find_recipe

    if args.checkpoint is not None:
        raise RecipeError(f"--checkpoint goes with a run: {name} has no config.yaml")
    if args.recipe is None:
        raise RecipeError(
            f"{name} is not a run folder (no config.yaml); for a model say whose task it has to "
            "answer: --recipe RECIPE"
        )
    tree = load(find_recipe(args.recipe), overrides)
    return _language(prepare(tree, name=Path(args.recipe).stem)), name


def _language(job: "Job") -> "LlmJob":
    from polopt.launch.llm import LlmJob
    from polopt.launch.recipe import RecipeError

    if not isinstance(job, LlmJob):
        raise RecipeError(
            f"{job.name} trains no language model: polopt eval takes a model with the recipe of "
            "one, or the run folder of one or of a control task"
        )
    return job


def measure(
    job: "LlmJob", source: str, *, samples: int, seed: int, own: bool = True
) -> dict[str, Any]:
    """Return the accuracies of a model on the held-out problems of a job.

    Args:
        job: Names the task, how many problems, the longest answer, and how a model is loaded.
        source: Folder or hub name of the model.
        samples: Answers drawn per problem.
        seed: Of the draws.
        own: Whether the job's `model.trust_remote_code` is about this model.

    Raises:
        RecipeError: If there is no such model, a prompt is longer than it can read, or the
            task's rows or reward do not work.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from polopt.ext.trl.config import check_tokenizer
    from polopt.ext.trl.evaluate import judge, report
    from polopt.launch.llm_data import check_lengths, close_rewards, held_out_rows
    from polopt.launch.recipe import RecipeError

    task, rows = job.task, held_out_rows(job.task, job.evaluation.problems)
    logging.disable_progress_bar()
    loading = dict(getattr(job.model, "loading", {}))  # of Pretrained
    trust = {"trust_remote_code": own and loading.get("trust_remote_code", False)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **trust)
        model: Any = AutoModelForCausalLM.from_pretrained(source, **{**loading, **trust})
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise RecipeError(f"cannot load a model from {source}: {reason}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if torch.cuda.is_available():
        model = model.cuda()
    try:
        check_tokenizer(tokenizer, rows)
        check_lengths([row["prompt"] for row in rows], tokenizer, model.config)
        problems, *_ = judge(
            model, tokenizer, task, rows,
            samples=samples, max_new_tokens=job.batch.max_length, seed=seed,
        )  # fmt: skip
    except ValueError as error:  # of a reward, too
        raise RecipeError(str(error)) from error
    finally:
        close_rewards(task)
    content: dict[str, Any] = {
        "model": source,
        "task": task.name,
        "problems": len(rows),
        "samples": samples,
        **report(problems),
        "standard_error": {
            "greedy": _error([float(p.greedy) for p in problems]),
            f"mean@{samples}": _error([sum(p.correct) / samples for p in problems]),
        },
    }
    return content


def _error(values: list[float]) -> float:
    """Return the standard error of the mean, 0 for one value."""
    from statistics import stdev

    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _table(content: dict[str, Any]) -> str:
    lines = [f"{content['model']} on {content['task']}: {content['problems']} held-out problems"]
    for name, value in content.items():
        if name == "greedy" or "@" in name:
            error = content["standard_error"].get(name)
            lines.append(f"  {name:12} {value:.3f}" + (f" ± {error:.3f}" if error else ""))
    for source, values in content.get("sources", {}).items():
        numbers = "  ".join(f"{k} {v:.3f}" for k, v in values.items() if k != "problems")
        lines.append(f"  {source} ({values['problems']}): {numbers}")
    return "\n".join(lines)
