"""The other end of `polopt.envs.isolation`: a process that scores what it is sent.

The trainer sends pickles, which this process trusts as it trusts the trainer. It answers in JSON:
what a reward does to this process must not reach the trainer.
"""

import contextlib
import ctypes
import json
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from polopt.envs.contract import RewardError, because, name_of, scores_of

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Load a reward, then score until the pipe is closed."""
    descriptor, parent = map(int, sys.argv[1:])
    if sys.platform == "linux":  # also while a reward hangs
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.dup2(2, 1)  # stdout may belong to a program that reads it
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        _serve(connection)


def _serve(connection: Connection) -> None:
    def answer(kind: str, content: object = None) -> None:
        connection.send_bytes(json.dumps([kind, content]).encode())

    sys.path[:], pickled = pickle.loads(connection.recv_bytes())
    try:
        reward = pickle.loads(pickled)
    except Exception as error:
        answer("error", f"a worker process cannot load the reward: {because(error)}")
        return
    answer("ready")
    while True:
        call: dict[str, Any] = pickle.loads(connection.recv_bytes())
        try:
            found = reward(**call)
            scores = scores_of(found, len(call["completions"]), name_of(reward))
        except RewardError as error:
            answer("error", str(error))
        except BaseException as error:  # SystemExit, too, costs the sample and no more
            answer("raised", because(error))
        else:
            answer("scores", scores)
