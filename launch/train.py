"""`polopt train`: from the command line to a finished run folder."""

import argparse
import errno
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from polopt.ext.vllm.errors import ServerError, StartError
from polopt.launch.doctor.command import check_recipe
from polopt.launch.doctor.live import Watch
from polopt.launch.files import read_json, write_json
from polopt.launch.job import Job, attendance, prepare, processes
from polopt.launch.peers import PeersError, kept, leave_group, newest
from polopt.launch.recipe import RecipeError, dump, load, nearest, override, shipped
from polopt.launch.record import Record, read_run
from polopt.launch.result import SPAWNED, Result, rank
from polopt.launch.resume import changes, finished
from polopt.launch.run import Run, cpu_seconds, new_folder
from polopt.launch.signals import HANDLED, Signals, Terminated, ignored
from polopt.launch.start import Hosts, await_master, hosts_of, launcher, lines, server_line
from polopt.launch.words import check_words

__all__ = ["find_recipe", "is_file", "recipe_names", "train"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

_FOLDER = "POLOPT_RUN"  # the run folder of all ranks, set by whoever starts them


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with the package, sorted."""
    return list(shipped())


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given as a path or as the name of one that ships.

    Raises:
        RecipeError: If there is neither, with the nearest name.
    """
    path, names = Path(name), shipped()
    if is_file(path):
        return path
    if name in names:
        return names[name]
    if is_file(path / "config.yaml"):
        raise RecipeError(
            f"{name} is a run folder: go on with it by polopt train --resume {name}, or start its "
            f"recipe anew by polopt train {path / 'config.yaml'}"
        )
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        known = f", did you mean the recipe {path.stem!r}?" if path.stem in names else ""
        raise RecipeError(f"there is no recipe file {name!r}{known or ': check the path'}")
    raise RecipeError(f"there is no recipe {name!r}, {nearest(path.stem, names)}")


def is_file(path: Path) -> bool:
    """Whether a path can be read: a file, or a pipe as in `polopt train <(make-recipe)`."""
    try:
        return path.exists() and not path.is_dir()
    except OSError:  # a name that is too long
        return False


def train(args: argparse.Namespace, signals: Signals) -> Result:
    """Run a recipe, or resume a run.

    Raises:
        RecipeError: If anything about the input is wrong; nothing was written then.
    """
    name, overrides = _words(args)
    hosts, more = hosts_of(args, overrides)
    resume = None if args.resume is None else Path(args.resume)
    tree, record = _read(name, [*overrides, *more], resume)
    if not args.dry_run:
        _writable(resume or Path(args.runs))
    _check_world(processes(tree), hosts)
    job = prepare(tree, name=Path(name or "run").stem)
    changed = {} if record is None else changes(job.tree, record.config, record.path)
    ended = record and finished(job.tree, record.summary or {}, changed, record.path)
    if SPAWNED not in os.environ and rank() == 0:
        for line in check_recipe(job.tree, overrides):
            print(f"polopt: check: {line}", file=sys.stderr)
    if args.dry_run:
        return _plan(args, job, hosts, more)
    if record and ended:
        return _finished(ended, record)
    for name in ("check_inputs", "check_here"):
        getattr(job, name, lambda: None)()
    if job.processes > 1 and "WORLD_SIZE" not in os.environ:
        return _spawn(
            [*launcher(job, hosts), "-m", *_command(args, more)], job, hosts, args, resume
        )
    run = _open(job, resume, changed, Path(args.runs), signals)
    try:
        return _execute(job, run, signals)
    finally:
        leave_group()


def _words(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    words = list(args.arguments)
    if words and "=" not in words[0]:
        return words[0], words[1:]
    if args.resume is not None:
        return None, words
    first = f"{words[0]!r} is a setting, " if words else ""
    raise RecipeError(f"{first}name the recipe first: polopt train RECIPE [key=value …]")


def _read(
    name: str | None, overrides: Sequence[str], resume: Path | None
) -> tuple[dict[str, Any], Record | None]:
    """Return the recipe to run, and for a resumed run what its folder holds."""
    check_words(overrides, "recipe")
    if resume is None:
        return load(find_recipe(str(name)), overrides), None
    try:
        record = read_run(resume)
    except (ValueError, OSError) as error:
        raise RecipeError(str(error)) from error
    if name is not None:
        return {**load(find_recipe(name), overrides), "name": record.config.get("name")}, record
    tree = load(resume / "config.yaml")
    for word in overrides:
        override(tree, word)
    return tree, record


def _finished(text: str, record: Record) -> Result:
    """Answer for a run that has nothing left to do: it changes nothing."""
    summary = {k: v for k, v in (record.summary or {}).items() if k != "format"}
    return Result(content=summary, text="\n".join((text, *_text(summary).splitlines()[1:])))


def _writable(folder: Path) -> None:
    """Refuse a folder in which nothing could be written, without writing."""
    place = folder.absolute()
    try:
        while not place.exists():
            place = place.parent
    except OSError as error:  # a name that is too long
        reason = f"{error.strerror}, use --runs DIR"
        raise RecipeError(f"cannot write runs to {folder}: {reason}") from error
    if not place.is_dir():
        raise RecipeError(f"cannot write runs to {folder}: {place} is not a folder, use --runs DIR")
    if not os.access(place, os.W_OK | os.X_OK):
        raise RecipeError(f"cannot write runs to {folder}: no permission, use --runs DIR")


def _check_world(asked: int, hosts: Hosts) -> None:
    """Refuse a launcher that started another number of processes than the recipe asks for."""
    started = os.environ.get("WORLD_SIZE")
    if started is None:
        # `accelerate launch --cpu --num_processes 2` starts one process, and sets this.
        if asked > 1 and "ACCELERATE_MIXED_PRECISION" in os.environ:
            raise RecipeError(
                f"'launch.processes' is {asked}, but accelerate started 1: leave accelerate launch "
                f"out, polopt train starts {asked} itself (--dry-run prints how)"
            )
        if hosts.count > asked:
            raise RecipeError(f"--nodes {hosts.count} needs as many processes: add --procs P")
        return
    if hosts.count > 1:
        raise RecipeError("a launcher has started this process already: leave --nodes out")
    if started != str(asked):
        raise RecipeError(
            f"'launch.processes' is {asked}, but the launcher started {started}: "
            f"add launch.processes={started}, or launch {asked}"
        )
    if not os.environ.get("RANK", "").isdecimal():
        raise RecipeError("WORLD_SIZE is set, but RANK is not: the launcher must set both")


def _plan(args: argparse.Namespace, job: Job, hosts: Hosts, more: list[str]) -> Result:
    arithmetic = job.arithmetic()
    line = lines(job, hosts, _command(args, more))
    title = "launch line" if line.count("\n") == 0 else "launch lines, one for each host"
    text = f"# recipe\n{dump(job.tree)}\n# batches\n{dump(arithmetic)}\n# {title}\n{line}"
    content = {"recipe": job.tree, "arithmetic": arithmetic, "launch": line}
    if server := server_line(job, args.arguments):
        content["server"] = server
        text += f"\n# the server's, where it is to run; both need the same secret in KEY\n{server}"
    content["checks"] = check_recipe(job.tree, args.arguments)
    try:
        getattr(job, "check_inputs", lambda: None)()
    except RecipeError as error:  # what is above can be read on a machine that lacks the files
        print(f"polopt: {error}", file=sys.stderr)
        return Result(content={**content, "error": str(error)}, text=text, code=2)
    return Result(content=content, text=text)


def _command(args: argparse.Namespace, more: list[str]) -> list[str]:
    words = ["polopt", "train", *args.arguments]
    words += [word for word in more if word not in words]
    words += ["--resume", args.resume] if args.resume else []
    words += ["--runs", args.runs] if args.runs != "runs" else []
    return words + (["--json"] if args.json else [])


def _spawn(
    words: list[str], job: Job, hosts: Hosts, args: argparse.Namespace, resume: Path | None
) -> Result:
    """Start this command once per rank of this host, pass signals on, and wait."""
    await_master(hosts)
    path = resume
    if resume is None and not hosts.rank:  # host 0, which tells the others
        path = _make(Path(args.runs), job.name)
    command = [sys.executable, "-m", "polopt.launch.ranks", *words]
    environment = {**os.environ, SPAWNED: "1", **({} if path is None else {_FOLDER: str(path)})}
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if child is not None:
            child.send_signal(signum)

    previous = {s: signal.signal(s, forward) for s in HANDLED if not ignored(s)}
    try:
        # In a session of its own: Ctrl-C reaches the ranks once, through `forward`.
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        if received:
            child.send_signal(received[0])
        code = child.wait()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    ended = 128 + received[0] if received else 2 if code == 2 else min(abs(code), 1)
    if hosts.rank:  # the summary is of all hosts, and host 0 writes it
        status = "stopped" if received else "failed" if code else "completed"
        summary = {"status": status, "run": f"the ranks of host {hosts.rank}"}
        return Result(content=summary, text=_text(summary), code=ended)
    assert path is not None
    try:
        summary = read_json(path / "summary.json")
        del summary["format"]
        summary["cpu_seconds"] = round(cpu_seconds(), 3)  # of all ranks
        write_json(path / "summary.json", summary)
    except (ValueError, OSError):  # it failed before it could write one
        summary = {"status": "failed", "run": str(path)}
        if newest(path) is not None:
            print(f"polopt: {kept(path)}", file=sys.stderr)
    if code and not received and summary["status"] == "completed":
        summary["status"] = "failed"
    return Result(content=summary, text=_text(summary), code=ended)


def _make(root: Path, name: str) -> Path:
    try:
        return new_folder(root, name)
    except ValueError as error:
        raise RecipeError(f"{error}; use --runs DIR") from error


def _open(
    job: Job, resume: Path | None, changed: Mapping[str, Any], root: Path, signals: Signals
) -> Run:
    main = rank() == 0
    given = os.environ.get(_FOLDER)
    if resume is not None:
        path = resume
    elif job.processes == 1 and not given:
        path = _make(root, job.name)
    else:
        path = _shared(root, job.name, given, main)
    try:
        tree = job.tree if changed or resume is None else None
        return Run(path, tree, changed=changed, main=main, signals=signals)
    except (ValueError, OSError) as error:
        raise RecipeError(f"cannot write to the run folder {path}: {error}") from error


def _shared(root: Path, name: str, given: str | None, main: bool) -> Path:
    """Make the folder on the main rank, and tell the others through the launcher's store."""
    path = Path(given) if given else None
    if path is not None and main:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise RecipeError(f"{_FOLDER} names {path}, which is not empty; name a new folder")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if path is not None:
            return path
        raise RecipeError(
            f"this launcher gives the ranks no common store: set {_FOLDER} to a new folder, "
            "the same on every rank"
        )
    if path is not None and not main:
        return path
    import torch.distributed as dist

    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        key = f"polopt/run/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if main:
            path = path or _make(root, name)
            store.set(key, str(path.absolute()))
        return path or Path(store.get(key).decode())
    except dist.DistError as error:
        raise RecipeError(
            "the main rank ended before it told the run folder; see what it said"
        ) from error


def _execute(job: Job, run: Run, signals: Signals) -> Result:
    summary: dict[str, Any] = {"name": job.name, "project": job.tree.get("project")}
    summary["seed"] = job.tree.get("seed")
    code = 0
    signals.patient = True
    kind = "llm" if "trainer" in job.tree else "control"
    run.watch = watch = Watch(job.tree, "polopt", kind, attendance(job.tree))
    try:
        summary |= {"status": "completed", **job.train(run)}
        if signals.received is not None:
            raise Terminated(signals.received)
        if watch.halted:
            summary["status"], code = "stopped", 1
    except Terminated as error:
        summary |= {"status": "stopped", "signal": signal.Signals(error.signum).name}
        code = 128 + error.signum
    except RecipeError as error:  # of the kind that only shows once the work has begun
        print(f"polopt: {error}", file=sys.stderr)
        summary |= {"status": "failed", "error": str(error)}
        code = 2
    except (FloatingPointError, OSError, PeersError, ServerError, StartError) as error:
        # A diagnosis, not a fault of the program.
        print(f"polopt: {_about_disk(error, run.path) or error}", file=sys.stderr)
        summary |= {"status": "failed", "error": f"{error}"}
        code = 1
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        summary |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        code = 1
    signals.patient = False
    if watch.found:
        summary["doctor"] = {name: finding.title for name, finding in watch.found.items()}
    try:
        summary = run.finish(summary)
    except OSError as error:
        print(f"polopt: cannot write the summary to {run.path}: {error.strerror}", file=sys.stderr)
        code = code or 1
    return Result(content=summary, text=_text(summary), code=code)


def _about_disk(error: BaseException, path: Path) -> str:
    """Say that files cannot be written and how to go on, if that is the error."""
    if not isinstance(error, OSError):
        return ""
    if str(error).startswith("cannot write"):  # a checkpoint's, which says all
        told = str(error)
    elif error.errno in _FULL:
        told = f"cannot write the run: {error.strerror}"
    else:
        return ""
    return f"{told}: make room, then go on with polopt train --resume {path}"


def _text(summary: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in summary.items() if k not in ("status", "run")}
    lines = [f"{summary['status']}: {summary.get('run', '')}"]
    lines += [f"  {k}: {_short(v)}" for k, v in rest.items()]
    if "signal" in summary:
        lines.append(f"go on with polopt train --resume {shlex.quote(summary['run'])}")
    return "\n".join(lines)


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
