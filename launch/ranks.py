"""Starts the ranks of a run, in place of launchers whose own traceback would hide what a rank said.

Takes the words of torchrun or accelerate: `python -m polopt.launch.ranks torchrun --nproc-per-node
2 -m polopt train …`.
"""

import logging
import signal
import socket
import sys

from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

__all__ = ["main"]


def main() -> int:
    """Start the ranks and wait.

    Returns:
        The exit status: 2 if a rank refused the input or the hosts did not meet, 1 if one failed
        otherwise or could not be started.
    """
    # They tell how ranks ended, here and on other hosts: ranks have said why, unless a signal
    # ended them.
    for module in ("multiprocessing", "agent.server"):
        name = f"torch.distributed.elastic.{module}.api"
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if sys.argv.pop(1) == "accelerate":
            from accelerate.commands.launch import main as start

            del sys.argv[1]  # "launch"
            start()
        else:
            run.main()
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code < 0 and code != -signal.SIGTERM:  # which torchrun sends to the others
                known = -code in set(signal.Signals)  # real-time ones have no names
                name = signal.Signals(-code).name if known else f"signal {-code}"
                print(f"polopt: rank {rank} was ended by {name}", file=sys.stderr)
        return 2 if 2 in codes.values() else 1
    except SignalException as error:
        return 128 + error.sigval
    except (DistError, RendezvousError, ConnectionError, TimeoutError, socket.gaierror) as error:
        said = str(error).partition("\n")[0].rstrip(".")
        print(
            f"polopt: the hosts did not meet ({said}): start all of them within --wait seconds, "
            "with the same --master, which they reach",
            file=sys.stderr,
        )
        return 2
    except OSError as error:  # a full disk, no more processes
        print(f"polopt: the ranks cannot be started: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
