"""Rewards in worker processes: one that hangs or crashes costs its sample and not the run.

`concurrent.futures` and loky give up a whole pool when a worker dies and cannot end a call that
hangs, and a forked worker may deadlock beside the threads of PyTorch. So each worker here is a
fresh interpreter at the end of a pipe, which is killed with all that it started and replaced.
"""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from polopt.envs.contract import (
    RewardError,
    because,
    import_reward,
    is_async,
    name_of,
    scores_of,
)

__all__ = ["CAUSES", "Isolated", "isolated"]

CAUSES = ("timed_out", "crashed", "raised")
"""Why a sample may be without a score."""

_STOP_AFTER = 16  # samples in a row without a score, a whole call among them
_START = 120.0  # seconds that a worker may take to start and to load the reward
_OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")

logger = logging.getLogger(__name__)


def isolated(
    reward: Callable[..., Any] | str,
    *,
    timeout: float = 10.0,
    workers: int = 2,
    chunk: int | None = 1,
) -> "Isolated":
    """Return a reward that costs a sample where it fails, and not the run.

    A sync reward is called in worker processes, for `chunk` completions at a time. It gets
    `prompts`, `completions`, `completion_ids` and the columns of the rows, but not what belongs to
    the trainer (`trainer_state`, `log_extra`, `log_metric`, `environments`). Workers see no GPU,
    use one thread, and print to stderr. An async reward stays in the trainer's event loop, is
    called per completion, all at once, and each call may wait for `timeout` seconds; what blocks
    the loop is not guarded against.

    A sample whose call raises, hangs or crashes gets None, and `PolicyTrainer` leaves it out of its
    group, whatever other rewards give it. A
    call that returns the wrong number of scores, or no numbers, ends the run, and so does a
    reward that scores none of a whole batch and of at least 16 samples in a row.

    Args:
        reward: A reward, or the name `module:function` of one. It is sent to the workers by
            cloudpickle, so it may be a closure, but may not hold open files, locks or connections.
        timeout: Seconds that a call may take.
        workers: Processes, per rank.
        chunk: Completions per call, which fail together; None: the whole batch, for rewards that
            compare completions.

    Raises:
        ValueError: If a number is out of its range, or `reward` is not a function.
    """
    if isinstance(reward, str):
        reward = import_reward(reward)
    if not callable(reward) or hasattr(reward, "forward"):
        raise ValueError(f"isolated takes a reward function, got {type(reward).__name__}")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
    for key, value in (("workers", workers), ("chunk", 1 if chunk is None else chunk)):
        if value < 1:
            raise ValueError(f"{key} must be at least 1, got {value}")
    if is_async(reward):
        return IsolatedAsync(reward, timeout=timeout)
    return IsolatedSync(reward, timeout=timeout, workers=workers, chunk=chunk)


class Isolated:
    """A reward whose failing samples are left out; made by `isolated`.

    Attributes:
        reward: The reward itself.
        failures: How many samples were left out, by cause (`CAUSES`), since the start.
        scored: How many samples were scored.
        failed: Which samples of the latest call were left out because they failed. They differ
            from those for which the reward itself returned None, as it may where it does not apply.
    """

    __call__: Callable[..., Any]

    def __init__(self, reward: Callable[..., Any], *, timeout: float) -> None:
        self.reward, self.timeout = reward, timeout
        self.__name__ = name_of(reward)
        self.failures: Counter[str] = Counter()
        self.scored = 0
        self.failed: set[int] = set()
        self._row: Counter[str] = Counter()  # failures since the last score
        self._first = ""

    def close(self) -> None:
        """End the workers. The next call starts new ones."""

    def _fail(self, cause: str, samples: Collection[int], detail: str) -> None:
        if not self.failures[cause]:
            logger.warning(
                "The reward %r %s on a sample, which is left out of its group: %s.",
                self.__name__, cause.replace("_", " "), detail,
            )  # fmt: skip
        self._first = self._first or detail
        self.failures[cause] += len(samples)
        self._row[cause] += len(samples)
        self.failed.update(samples)

    def _succeeded(self, count: int) -> None:
        self.scored += count
        self._first = ""
        self._row.clear()

    @contextlib.contextmanager
    def _batch(self, count: int, log_metric: Callable[[str, float], None] | None) -> Iterator[None]:
        """Tell the trainer what share of a batch failed, and stop where nothing works."""
        scored = self.scored
        self.failed.clear()
        yield
        if log_metric is not None and count:
            log_metric(f"rewards/{self.__name__}/failed", len(self.failed) / count)
        if count and self.scored == scored and self._row.total() >= _STOP_AFTER:
            causes = ", ".join(f"{n} {c.replace('_', ' ')}" for c, n in self._row.items())
            raise RewardError(
                f"the reward {self.__name__!r} scored none of the last {self._row.total()} "
                f"completions ({causes}); the first of them: {self._first}"
            )


class IsolatedAsync(Isolated):
    """An async reward with a limit on each of its calls."""

    async def __call__(
        self,
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,  # noqa: ANN401
    ) -> list[float | None]:
        """Score completions, as TRL calls rewards."""
        columns = {k: v for k, v in columns.items() if k not in _OF_THE_TRAINER}
        with self._batch(len(completions), log_metric):
            calls = [
                self._one(i, {k: _part(v, slice(i, i + 1)) for k, v in columns.items()}, completion)
                for i, completion in enumerate(completions)
            ]
            return list(await asyncio.gather(*calls))

    async def _one(self, i: int, columns: dict[str, Any], completion: Any) -> float | None:  # noqa: ANN401
        try:
            call = self.reward(completions=[completion], **columns)
            found = await asyncio.wait_for(call, self.timeout)
        except TimeoutError:
            self._fail("timed_out", [i], f"it took more than {self.timeout:g} s")
            return None
        except RewardError:
            raise
        except Exception as error:
            self._fail("raised", [i], because(error))
            return None
        (score,) = scores_of(found, 1, self.__name__)
        self._succeeded(1)
        return score


class IsolatedSync(Isolated):
    """A reward that is called in worker processes."""

    def __init__(
        self, reward: Callable[..., Any], *, timeout: float, workers: int, chunk: int | None
    ) -> None:
        super().__init__(reward, timeout=timeout)
        self._chunk, self._count = chunk, workers
        self._workers: list[_Worker] = []
        self._pickled: bytes | None = None

    def __call__(
        self,
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,  # noqa: ANN401
    ) -> list[float | None]:
        """Score completions, as TRL calls rewards."""
        columns = {k: v for k, v in columns.items() if k not in _OF_THE_TRAINER and v is not None}
        columns["completions"] = completions
        size = self._chunk or max(len(completions), 1)
        todo = deque(slice(i, i + size) for i in range(0, len(completions), size))
        scores: list[float | None] = [None] * len(completions)
        try:
            with self._batch(len(completions), log_metric):
                while todo or any(w.part for w in self._workers):
                    self._hand_out(todo, columns)
                    self._collect(scores)
        except BaseException:
            self.close()  # the answers of calls that still run would be taken for others
            raise
        return scores

    def _hand_out(self, todo: deque[slice], columns: dict[str, Any]) -> None:
        busy = sum(w.part is not None for w in self._workers)
        while len(self._workers) < min(self._count, busy + len(todo)):
            self._workers.append(self._start())
        for i, worker in enumerate(self._workers):
            if worker.part is not None or not todo:
                continue
            if worker.process.poll() is not None:  # it died between two calls
                worker.kill()
                worker = self._workers[i] = self._start()
            part = todo.popleft()
            try:
                call = pickle.dumps({k: _part(v, part) for k, v in columns.items()})
            except Exception as error:
                raise RewardError(
                    f"the columns for the reward {self.__name__!r} cannot be sent to a worker: "
                    f"{error}"
                ) from error
            worker.part, worker.call = part, call
            if worker.ready:
                worker.send(self.timeout)

    def _start(self) -> "_Worker":
        if self._pickled is None:
            import cloudpickle

            try:
                self._pickled = cloudpickle.dumps(self.reward)
            except Exception as error:
                raise RewardError(
                    f"the reward {self.__name__!r} cannot be sent to a worker process ({error}): "
                    "define it without open files, locks and connections, or do not isolate it"
                ) from error
        return _Worker.start(self._pickled)

    def _collect(self, scores: list[float | None]) -> None:
        """Wait for the next answer, or for the next worker that takes too long."""
        busy = [w for w in self._workers if w.part is not None]
        if not busy:
            return
        left = max(0.0, min(w.deadline for w in busy) - time.monotonic())
        ready = wait([w.connection for w in busy], left)
        now = time.monotonic()
        for worker in busy:
            if worker.connection in ready:
                self._receive(worker, scores)
            elif now >= worker.deadline:
                if not worker.ready:
                    raise RewardError(f"a worker for the reward {self.__name__!r} does not start")
                self._lost(worker, scores, "timed_out", f"it took more than {self.timeout:g} s")

    def _receive(self, worker: "_Worker", scores: list[float | None]) -> None:
        try:
            kind, content = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            if not worker.ready:
                raise RewardError(
                    f"a worker for the reward {self.__name__!r} {worker.ending()} while it loaded "
                    "the reward; what it printed is above"
                ) from None
            self._lost(worker, scores, "crashed", f"the worker {worker.ending()}")
            return
        if kind == "ready":
            worker.ready = True
            worker.send(self.timeout)
            return
        if kind == "error":
            raise RewardError(content)
        part, worker.part = worker.part, None
        assert part is not None
        samples = range(*part.indices(len(scores)))
        if kind == "raised":
            self._fail("raised", samples, content)
        else:
            scores[part] = scores_of(content, len(samples), self.__name__)
            self._succeeded(len(samples))

    def _lost(self, worker: "_Worker", scores: list[float | None], cause: str, detail: str) -> None:
        assert worker.part is not None
        samples = range(*worker.part.indices(len(scores)))
        worker.kill()
        self._workers.remove(worker)
        self._fail(cause, samples, detail)

    def close(self) -> None:
        """End the workers. The next call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


def _part(values: Any, part: slice) -> Any:  # noqa: ANN401
    """Return what belongs to some completions, of a column or of something else."""
    return values[part] if isinstance(values, list | tuple) else values


@dataclass(eq=False)
class _Worker:
    """A process that scores; see `polopt.envs.reward_worker`.

    Attributes:
        process: It leads a process group.
        connection: This end of the pipe.
        ready: Whether it has loaded the reward.
        part: The completions that it scores now.
        call: What it is sent for them, once it is ready: before that it does not read, and
            sending what exceeds the pipe would wait without a limit.
        deadline: When it has to be done, or ready, by `time.monotonic`.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    part: slice | None = None
    call: bytes = b""
    deadline: float = field(default_factory=lambda: time.monotonic() + _START)

    @classmethod
    def start(cls, reward: bytes) -> "_Worker":
        ours, theirs = Pipe()
        code = "from polopt.envs.reward_worker import main; main()"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        worker = cls(process, ours)
        with contextlib.suppress(OSError):  # it has died already, which `_receive` notices
            ours.send_bytes(pickle.dumps((sys.path, reward)))
        return worker

    def send(self, timeout: float) -> None:
        """Let it score its part within so many seconds."""
        # One that has died is noticed as one that crashed on this part.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(self.call)
        self.deadline = time.monotonic() + timeout

    def kill(self) -> None:
        """End it and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()

    def ending(self) -> str:
        """Return how it ended, in words."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"
