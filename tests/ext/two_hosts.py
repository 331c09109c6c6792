"""Two network namespaces as two hosts, joined by one link that can be cut.

All that runs on them sees their link and their own loopback, and nothing else. Needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def skip_without_namespaces():
    """Skip where no namespace can be made, and say why."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`")
    name = f"po{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    _ip("netns", "del", name)


class Hosts:
    """Two hosts at `ADDRESSES`, which are gone with all their processes at the end.

    Attributes:
        interfaces: The name of each host's end of the link.
    """

    def __init__(self):
        stem = f"po{os.getpid()}"  # names of interfaces have at most 15 letters
        self.names = [f"{stem}a", f"{stem}b"]
        self.interfaces = [f"{stem}va", f"{stem}vb"]
        self.started = []

    def __enter__(self):
        """Make them."""
        try:
            for name in self.names:
                _ip("netns", "add", name)
            a, b = self.interfaces
            _ip("link", "add", a, "type", "veth", "peer", "name", b)
            for name, interface, address in zip(
                self.names, self.interfaces, ADDRESSES, strict=True
            ):
                _ip("link", "set", interface, "netns", name)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        """End what runs on them, and remove them."""
        for name in self.names:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        # The link goes with either end, unless it never left this namespace.
        subprocess.run(["ip", "link", "del", self.interfaces[0]], capture_output=True)

    def start(self, host, *words, output=None, **environment):
        """Start Python with these words on a host; `output` is a file for all that it says."""
        command = ["ip", "netns", "exec", self.names[host], sys.executable, *words]
        process = subprocess.Popen(
            command,
            env={**os.environ, "GLOO_SOCKET_IFNAME": self.interfaces[host],
                 "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if output is None else output,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, host, *words):
        """Return what a command says that runs on a host to its end."""
        command = ["ip", "netns", "exec", self.names[host], *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def cut(self):
        """Take the link down at host 1's end: what host 0 sends is lost without a word."""
        _ip("-n", self.names[1], "link", "set", self.interfaces[1], "down")

    def mend(self):
        """Take it up again."""
        _ip("-n", self.names[1], "link", "set", self.interfaces[1], "up")

    @staticmethod
    def pids(name):
        """Return the processes that run on a host."""
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def left(self, *hosts, seconds=10.0):
        """Return the processes that still run on these hosts after so long."""
        end = time.monotonic() + seconds
        names = [self.names[host] for host in hosts]
        while (found := [p for n in names for p in self.pids(n)]) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def wait(self, seconds, ready, alive=()):
        """Wait until `ready()`, for processes that must not end before."""
        end = time.monotonic() + seconds
        while not ready():
            for process in alive:
                assert process.poll() is None, process.stdout and process.stdout.read()
            assert time.monotonic() < end, f"not ready after {seconds} s"
            time.sleep(0.1)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
