"""Run folders: what a run leaves behind. `polopt.launch.record` reads them.

    runs/cartpole-ppo-20260131-120000/
      config.yaml         the resolved recipe; `polopt train` takes it
      environment.json    versions, machine, command line, git revision, for each start, and what
                          was changed in the recipe since the one before
      metrics.jsonl       one JSON object a line: format, step, time, cpu, and the metrics
      events.out.tfevents…  the same for TensorBoard
      checkpoints/step-N/ safetensors and JSON (text tasks: TRL's own checkpoint-N)
      summary.json        how it ended

Every file of ours carries a format version. Nothing is pickled (TRL's checkpoints hold torch files,
which are read with `weights_only`), and no folder is ever overwritten.
"""

import contextlib
import fcntl
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polopt.launch.doctor.live import Watch
from polopt.launch.doctor.report import brief
from polopt.launch.environment import describe, versions
from polopt.launch.files import decode, encode, read_json, write_json, write_text
from polopt.launch.recipe import FORMAT, RecipeError, dump
from polopt.launch.signals import Signals, Terminated
from polopt.launch.tensorboard import EventWriter
from polopt.launch.usage import Usage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Run", "cpu_seconds", "new_folder"]

_HALT, _SIGNAL = 1, 2  # why to stop; the stronger reason counts on all ranks
_OWN = ("format", "step", "time", "cpu", "resumed_from")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process since its start, with its finished children."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def new_folder(root: Path, name: str) -> Path:
    """Make the folder `root/<name>-<date>-<time>` that no one else has.

    Raises:
        ValueError: If it cannot be made.
    """
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = root / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
    except OSError as error:
        raise ValueError(f"cannot make a run folder in {root}: {error.strerror}") from error


class Run:
    """One run folder, as one rank sees it: ranks other than the main one write nothing.

    Args:
        path: The folder, which exists.
        tree: The resolved recipe; None continues the run that is there as it is.
        changed: What differs in `tree` from the recipe of the run that is there, by dotted path;
            that run is continued then, and its config.yaml is what it trains with from now on.
        main: Whether this process writes.
        signals: Where requests to end arrive.

    Attributes:
        path: The folder.
        keep: How many checkpoints stay.
        watch: Looks at what is logged, see `polopt.launch.doctor.live`; None looks at nothing.

    Raises:
        ValueError: If another process writes to the folder.
    """

    def __init__(
        self,
        path: Path,
        tree: Mapping[str, Any] | None = None,
        *,
        changed: Mapping[str, Any] | None = None,
        main: bool = True,
        signals: Signals | None = None,
    ) -> None:
        self.path = path
        self.keep = 2
        self.watch: Watch | None = None
        self._main = main
        self._signals = signals or Signals()
        self._resumed = tree is None or bool(changed)
        self._line = _Line()
        self._usage = Usage()
        self._start = time.monotonic(), 0.0
        if not main:
            return
        self._lock = (path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is writing to the run {path}") from error
        sessions = []
        session = describe() | ({"changed": dict(changed)} if changed else {})
        if self._resumed:
            sessions = read_json(path / "environment.json")["sessions"]
            self._go_on()
            (path / "summary.json").unlink(missing_ok=True)  # it runs again
        write_json(path / "environment.json", {"sessions": [*sessions, session]})
        if tree is not None:
            write_text(path / "config.yaml", _config(tree))
        self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._events: EventWriter | None = None if self._resumed else EventWriter(path)

    def _go_on(self) -> None:
        """Cut off a line that a kill left half, and let the clocks go on."""
        lines = self.path / "metrics.jsonl"
        if not lines.exists():
            return
        content = lines.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(lines, whole)
        if whole:
            last = decode(content[:whole].splitlines()[-1].decode())
            wall, cpu = self._start
            self._start = wall - last["time"], cpu - last["cpu"]

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of training, over all sessions of the run."""
        return time.monotonic() - self._start[0]

    @property
    def cpu(self) -> float:
        """CPU seconds of this process and its finished children, over all sessions."""
        return cpu_seconds() - self._start[1]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append metrics of a step to metrics.jsonl and to the TensorBoard file.

        Args:
            step: The unit is the job's: environment frames, or optimizer steps.
            metrics: Numbers, or tensors with one element, by name.

        Raises:
            ValueError: If a metric is not a number, or has a name that the lines need.
        """
        if not self._main:
            return
        values: dict[str, float] = {}
        for name, value in metrics.items():
            if name in _OWN:
                raise ValueError(f"a metric cannot have the name {name!r}")
            try:
                values[name] = value if type(value) is int else float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"the metric {name!r} is not a number: {value!r}") from error
        self._append({"step": step}, values)
        if self.watch is not None:
            for finding in self.watch.log(step, values):
                self._line.say(f"doctor: {finding.id}: {brief(finding)}")
        self._events = self._events or EventWriter(self.path)
        self._events.scalars(step, values)

    def _append(self, head: Mapping[str, int], values: Mapping[str, float]) -> None:
        clocks = {"time": round(self.seconds, 3), "cpu": round(self.cpu, 3)}
        self._metrics.write(encode({"format": 1, **head, **clocks, **values}) + "\n")
        self._metrics.flush()

    def usage(self) -> dict[str, float]:
        """Return metrics of memory and of the accelerator, see `polopt.launch.usage`."""
        return self._usage.take() if self._main else {}

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Show how far the run is on stderr, with an estimate of the rest.

        On a terminal one line is rewritten; elsewhere a line appears every ten seconds.

        Args:
            done: Work that is done, of `total`.
            total: The whole work, positive.
            text: What else is worth seeing, for example the current return.
        """
        if self._main:
            self._line.show(done, total, text)

    def should_stop(self) -> bool:
        """Return whether to save and return early: for SIGTERM, Ctrl-C, or a fatal finding.

        With a process group this is a collective (all ranks stop at the same update): call it
        on every rank, once an update.
        """
        stop = _SIGNAL * (self._signals.received is not None)
        stop = max(stop, _HALT * (self.watch is not None and self.watch.halted))
        distributed = sys.modules.get("torch.distributed")
        if distributed and distributed.is_available() and distributed.is_initialized():
            import torch

            device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
            flag = torch.tensor(stop, device=device)
            distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
            stop = int(flag.item())
            if stop == _SIGNAL and self._signals.received is None:
                self._signals.received = signal.SIGTERM
        return stop > 0

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C end at once what is done within: there is nothing to save yet.

        Raises:
            Terminated: Also if one has arrived before.
        """
        patient, self._signals.patient = self._signals.patient, False
        try:
            if self._signals.received is not None:
                raise Terminated(self._signals.received)
            yield
        finally:
            self._signals.patient = patient

    def save(self, step: int, tensors: Mapping[str, "Tensor"], state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step, see `polopt.launch.checkpoint.write`.

        The state may hold tensors anywhere, so `state_dict()` of modules and optimisers and
        states of random generators go in as they are.
        """
        from polopt.launch import checkpoint

        folder = self.path / "checkpoints"
        if not self._main:
            return folder / f"step-{step}"
        return checkpoint.write(folder, step, tensors, state, self.keep)

    def latest(self) -> "tuple[int, dict[str, Tensor], dict[str, Any]] | None":
        """Return the newest whole checkpoint: step, tensors (on the CPU), state; or None.

        What was logged after it no longer counts, see `continue_from`.

        Raises:
            RecipeError: If a newer polopt wrote it.
        """
        from polopt.launch import checkpoint

        try:
            found = checkpoint.newest(self.path / "checkpoints")
        except ValueError as error:
            raise RecipeError(str(error)) from error
        if self._resumed:
            self.continue_from(found[0] if found else -1)
        return found

    def continue_from(self, step: int) -> None:
        """Note in the metrics that what was logged after `step` is superseded.

        `latest` does it; for loops that have checkpoints of their own.
        """
        if self._main and self._resumed and self._events is None:
            if step < 0:
                self._line.say(f"polopt: {self.path} has no checkpoint yet, it starts over")
            self._append({"step": max(step, 0), "resumed_from": step}, {})
            self._events = EventWriter(self.path, purge=max(step + 1, 0))

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json and close the files.

        Returns:
            The summary as written, with wall and CPU seconds.
        """
        self._line.end()
        self._usage.close()
        result = {
            **summary,
            "run": str(self.path),
            "wall_seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu, 3),
        }
        if self._main:
            write_json(self.path / "summary.json", result)
            self._metrics.close()
            if self._events:
                self._events.close()
            self._lock.close()
        return result


class _Line:
    """The progress line."""

    def __init__(self) -> None:
        self._begin: tuple[float, float] = 0.0, 0.0
        self._total: float | None = None
        self._shown = float("-inf")
        self._open = False

    def show(self, done: float, total: float, text: str) -> None:
        now = time.monotonic()
        if total != self._total:  # new work; a resumed run begins in the middle
            self._begin, self._total = (now, done), total
        terminal = sys.stderr.isatty()
        if now - self._shown < (0.2 if terminal else 10.0) and done < total:
            return
        self._shown = now
        speed = (done - self._begin[1]) / max(now - self._begin[0], 1e-9)
        rest = f"{_clock((total - done) / speed)} left" if speed > 0 and done < total else ""
        line = " · ".join(p for p in (f"{100 * done / total:3.0f} %", rest, text) if p)
        self._open = terminal
        self._write(f"\r\033[K{line}" if terminal else f"{line}\n")

    def say(self, text: str) -> None:
        """Write a line of its own."""
        self.end()
        self._write(f"{text}\n")

    def end(self) -> None:
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except BrokenPipeError:  # nobody looks any more: no reason to stop the run
            pass


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _config(tree: Mapping[str, Any]) -> str:
    found = ", ".join(f"{n} {v}" for n, v in versions().items())
    return f"# Resolved recipe of this run, made with {found}.\n" + dump({"format": FORMAT, **tree})
