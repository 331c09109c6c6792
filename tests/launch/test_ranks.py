"""What the process that starts the ranks says when it cannot, or when one was ended."""

import errno
import socket
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from polopt.launch import ranks


def start(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(ranks.run, "main", fail)
    monkeypatch.setattr(sys, "argv", ["ranks", "torchrun", "-m", "polopt"])
    return ranks.main()


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistNetworkError("timed out"),
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        socket.gaierror(-2, "Name or service not known"),
    ],
)
def test_hosts_that_do_not_meet(monkeypatch, capsys, error):
    assert start(monkeypatch, error) == 2
    assert "the hosts did not meet" in capsys.readouterr().err


def test_a_full_disk_is_no_matter_of_hosts(monkeypatch, capsys):
    assert start(monkeypatch, OSError(errno.ENOSPC, "No space left on device")) == 1
    said = capsys.readouterr().err
    assert said == "polopt: the ranks cannot be started: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(("code", "name"), [(-9, "SIGKILL"), (-40, "signal 40")])
def test_the_signal_that_ended_a_rank_is_named(monkeypatch, capsys, code, name):
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = {1: SimpleNamespace(exitcode=code)}
    assert start(monkeypatch, error) == 1
    assert capsys.readouterr().err == f"polopt: rank 1 was ended by {name}\n"
