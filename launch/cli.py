"""The `polopt` command. Imports torch only in the commands that need it."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from polopt import __version__
from polopt.launch import evaluate as evaluate_cli
from polopt.launch import serve as serve_cli
from polopt.launch import start as start_cli
from polopt.launch import tune_envs as tune_cli
from polopt.launch.bench import command as bench_cli
from polopt.launch.doctor import command as doctor_cli
from polopt.launch.plan import command as plan_cli
from polopt.launch.report import command as report_cli
from polopt.launch.result import SPAWNED, Result, printable, rank
from polopt.launch.verl.command import EPILOG, add_arguments

__all__ = ["main"]

_EXAMPLES = """\
examples:
  polopt list
  polopt show cartpole-ppo
  polopt train cartpole-ppo
  polopt train cartpole-ppo algorithm.clip=0.1 seed=3
  polopt train my.yaml --dry-run
  polopt train arithmetic-dapo --procs 2
  polopt train my.yaml --nodes 2 --procs 8 launch.strategy=fsdp2 --dry-run
  polopt train --resume runs/cartpole-ppo-20260131-120000

exit status: 0 fine, 1 the run failed, 2 wrong input, 130 after Ctrl-C, 143 after SIGTERM
"""


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="polopt",
        description="Train policies: TorchRL for control, TRL for language models, one loss core.",
        epilog=_EXAMPLES,
        formatter_class=form,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"polopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, text: str, epilog: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text[:1].upper() + text[1:] + ".",
            epilog=epilog,
            formatter_class=form,
            allow_abbrev=False,
        )
        sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
        return sub

    train = command(
        "train",
        "run a recipe, into a new folder under ./runs",
        _EXAMPLES + "\nA recipe can import and call any code: trust it like a script.\n",
    )
    train.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE [key=value ...]",
        help="a YAML file or the name of a recipe (`polopt list`), and settings to change in it; "
        "key.sub=value reaches inside, the value is YAML",
    )
    train.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the resolved recipe, the batch arithmetic and the launch "
        "line, and write nothing",
    )
    train.add_argument("--runs", metavar="DIR", default="runs", help="where run folders go")
    start_cli.add_arguments(train)
    command("list", "list the recipes and the algorithms, one line each", "")
    show = command(
        "show",
        "show what a recipe resolves to, or what an algorithm is made of",
        "examples:\n  polopt show cartpole-ppo seed=3\n  polopt show dapo high=0.3\n",
    )
    show.add_argument(
        "arguments",
        nargs="*",
        metavar="NAME [key=value ...]",
        help="a recipe (name or file) or an algorithm, and settings to change in it",
    )
    evaluate_cli.add_arguments(
        command(
            "eval",
            "let a trained language model answer held-out problems, or a trained policy play",
            evaluate_cli.EPILOG,
        )
    )
    add_arguments(
        command(
            "import-verl",
            "turn a launch script of verl into a recipe, without running it",
            EPILOG,
        )
    )
    plan_cli.add_arguments(
        command(
            "plan",
            "say what a run needs on each GPU, whether it fits, and what to turn",
            plan_cli.EPILOG,
        )
    )
    doctor_cli.add_arguments(
        command(
            "doctor",
            "say what is wrong with a run, of polopt or another library, or with a recipe",
            doctor_cli.EPILOG,
        )
    )
    report_cli.add_arguments(command("report", "write one HTML page about runs", report_cli.EPILOG))
    serve_cli.add_arguments(
        command("serve", "start the vLLM server of a recipe and keep it up", serve_cli.EPILOG)
    )
    tune_cli.add_arguments(
        command(
            "tune-envs",
            "measure how many environments, in how many processes, give most steps",
            tune_cli.EPILOG,
        )
    )
    bench_cli.add_arguments(
        command("bench", "compare with other libraries on the same seeds", bench_cli.EPILOG)
    )
    return parser


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse; settings may also stand behind options, which argparse leaves over."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    closed = args.command in ("list", "import-verl", "bench")
    odd = [word for word in rest if closed or word.startswith("-")]
    if odd:
        hint = "" if closed or args.command == "report" else _as_setting(rest)
        parser.error(f"unrecognized arguments: {' '.join(odd)}{hint}")
    if rest:
        args.arguments.extend(rest)
    return args


def _as_setting(rest: Sequence[str]) -> str:
    """Return the end of a message about `--key value`, if that looks like a setting."""
    for word, after in zip(rest, [*rest[1:], "-"], strict=True):
        key, found, value = word.removeprefix("--").partition("=")
        value = value if found else after
        if word.startswith("--") and not value.startswith("-"):
            return f"; if a setting of the recipe is meant, write {key.replace('-', '_')}={value}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; the process's own by default.

    Returns:
        The exit status: 0 fine, 1 failed run, 2 wrong input, 128 + n after signal n.
    """
    _open_streams()
    args = _arguments(argv)
    try:
        result = _run(args)
        try:
            _print(args.json, result)
        except BrokenPipeError:
            raise
        except OSError as error:  # a full disk
            print(f"polopt: cannot write the answer: {error.strerror}", file=sys.stderr)
            _drop_stdout()
            return result.code or 1
        return result.code
    except BrokenPipeError:  # `polopt list | head -1`
        _drop_stdout()
        return 0


def _drop_stdout() -> None:
    """Let what is still to be written to stdout go nowhere, so that the end of Python is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Give a process that was started without stdout or stderr (`>&-`) an empty one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _run(args: argparse.Namespace) -> Result:
    from polopt.launch.recipe import RecipeError
    from polopt.launch.signals import Signals, Terminated

    try:
        with _stdout_is_stderr(), Signals() as signals:
            return _command(args.command)(args, signals)
    except RecipeError as error:
        where = f"rank {os.environ.get('RANK')}: " if "WORLD_SIZE" in os.environ else ""
        print(f"polopt: {where}{printable(str(error))}", file=sys.stderr)
        return Result(content={"error": str(error)}, text="", code=2)
    except Terminated as error:
        print(f"polopt: {error}", file=sys.stderr)
        return Result(content={"error": str(error)}, text="", code=128 + error.signum)


def _command(name: str) -> Callable[..., Result]:
    if name == "train":
        from polopt.launch.train import train

        return train
    if name == "import-verl":
        return _import_verl
    if name == "plan":
        return lambda args, signals: Result(**plan_cli.plan_command(args))
    if name == "bench":
        return bench_cli.bench
    if name == "serve":
        return serve_cli.serve
    if name == "doctor":
        return doctor_cli.doctor
    if name == "tune-envs":
        return tune_cli.tune_envs
    if name == "report":
        return report_cli.report
    if name == "eval":
        return evaluate_cli.evaluate
    from polopt.launch.show import list_all, show

    return show if name == "show" else list_all


def _import_verl(args: argparse.Namespace, signals: object) -> Result:
    from polopt.launch.verl.command import import_verl

    return Result(**import_verl(args.script, args.set, args.out, allow=args.allow))


def _print(as_json: bool, result: Result) -> None:
    if SPAWNED in os.environ or rank():
        return  # the parent, or the main rank, answers
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a sign
        sys.stdout.reconfigure(errors="backslashreplace")
    if as_json:
        from polopt.launch.files import encode

        print(encode(result.content))
    elif result.text:
        print(printable(result.text.rstrip("\n")))
    sys.stdout.flush()


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Send what libraries print, from Python, C or child processes, to stderr.

    Stdout carries the answer alone.
    """
    stdout = sys.stdout
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.flush()
            stdout.flush()
        sys.stdout = stdout
        os.dup2(kept, 1)
        os.close(kept)
