"""`polopt serve`: the vLLM server of a recipe, for trainers that run elsewhere."""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from polopt.launch.result import Result

__all__ = ["EPILOG", "add_arguments", "serve"]

EPILOG = """\
examples:
  polopt serve my.yaml vllm.port=8000
  polopt serve my.yaml --model runs/mine-20260131-120000/checkpoints/checkpoint-200
  polopt serve my.yaml vllm.host=10.0.0.5 vllm.port=8000 vllm.trainer_host=10.0.0.7

A recipe whose `trainer` names no server starts its own; this is for a server on another host or
one that outlives a run. It runs in the foreground until Ctrl-C or SIGTERM. Its folder under ./runs
has its log and, readable by you alone, its key: whoever has both address and key may replace the
weights. On all requests but /health the key is asked for; it is not encrypted on its way, so
choose an interface that only the trainers reach.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE [key=value ...]",
        help="a recipe with trainer.use_vllm=true, and settings to change in it",
    )
    parser.add_argument("--model", metavar="MODEL", help="served instead of the recipe's model")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where the folder goes")


def serve(args: argparse.Namespace, signals: object) -> Result:
    """Start the server of a recipe and wait until it ends.

    Raises:
        RecipeError: If the recipe does not generate by a vLLM server, or the folder cannot be
            made.
    """
    from polopt.ext.vllm.auth import KEY
    from polopt.ext.vllm.errors import StartError
    from polopt.ext.vllm.server import Server
    from polopt.launch.job import prepare
    from polopt.launch.llm import LlmJob
    from polopt.launch.llm_vllm import LOG
    from polopt.launch.recipe import RecipeError, load
    from polopt.launch.run import new_folder
    from polopt.launch.train import find_recipe

    if not args.arguments or "=" in args.arguments[0]:
        raise RecipeError("name a recipe first: polopt serve RECIPE [key=value …]")
    name, *overrides = args.arguments
    job = prepare(load(find_recipe(name), overrides), name=Path(name).stem)
    if not isinstance(job, LlmJob) or job.engine is None:
        raise RecipeError(
            f"{name} does not generate with vLLM: add trainer.use_vllm=true "
            "trainer.vllm_mode=server"
        )
    job.check_here()
    model = str(args.model or job.model.make(job.task, _no_progress))
    try:
        folder = new_folder(Path(args.runs), f"{job.name}-server")
    except ValueError as error:
        raise RecipeError(f"{error}; use --runs DIR") from error
    content = {"model": model, "folder": str(folder)}
    try:
        server = Server(model, job.engine, folder / LOG, key=os.environ.get(KEY))
        content["url"] = server.url
        with (
            open(os.open(folder / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
            server,
        ):
            file.write(server.key)
            file.flush()
            sys.stderr.write(
                f"{model} is served at {server.url}, log and key are in {folder}\n"
                f"train with it: {KEY}=$(cat {shlex.quote(str(folder / 'key'))}) polopt train "
                f"{shlex.join(args.arguments)} trainer.vllm_server_base_url={server.url}\n"
            )
            sys.stderr.flush()
            while server.alive():
                time.sleep(0.5)
    except StartError as error:
        print(f"polopt: {error}", file=sys.stderr)
        return Result(content={**content, "error": str(error)}, text="", code=1)
    finally:
        (folder / "key").unlink(missing_ok=True)
    error = f"the server ended by itself; see {folder / LOG}"
    print(f"polopt: {error}", file=sys.stderr)
    return Result(content={**content, "error": error}, text="", code=1)


def _no_progress(done: float, total: float, text: str) -> None:
    pass
