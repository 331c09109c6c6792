"""The launch line: how the ranks of a run are started, on one host or on several.

Text tasks are started by accelerate, with one of the files in `configs/`; other jobs by torchrun.
"""

import argparse
import re
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from polopt.ext.vllm.auth import KEY
from polopt.launch.job import STRATEGIES, Job
from polopt.launch.recipe import RecipeError

__all__ = [
    "Hosts",
    "add_arguments",
    "await_master",
    "config_file",
    "hosts_of",
    "launcher",
    "lines",
    "server_line",
]

_ADDRESS, _PORT = "$MASTER_ADDR", "$MASTER_PORT"  # to fill in where the first host is not known


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """On which hosts the ranks of a run are.

    Attributes:
        count: How many there are.
        rank: Of this one, or None for all.
        master: Address and port at which the first one meets the others, or None.
        seconds: The longest that they wait for each other.
    """

    count: int = 1
    rank: int | None = None
    master: tuple[str, str] | None = None
    seconds: int = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where ranks run to the parser of `polopt train`."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--procs", type=int, metavar="P", help="processes on each host, one per GPU; "
        "launch.processes is this times the hosts",
    )  # fmt: skip
    group.add_argument("--nodes", type=int, metavar="N", help="hosts; start the command on each")
    group.add_argument(
        "--node-rank", type=int, metavar="R", help="which of them this one is, from 0"
    )
    group.add_argument("--master", metavar="HOST:PORT", help="where host 0 meets the others")
    group.add_argument(
        "--wait", type=int, metavar="SECONDS", default=300,
        help="the longest that hosts wait for each other at the start (300)",
    )  # fmt: skip


def hosts_of(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[Hosts, list[str]]:
    """Return the hosts that the arguments name, and what they add to the recipe's settings.

    Args:
        args: Of the command line.
        overrides: `key=value` of the command line.

    Raises:
        RecipeError: If they do not make sense, or contradict an override.
    """
    for flag, least in (("nodes", 1), ("procs", 1), ("node_rank", 0), ("wait", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise RecipeError(f"--{flag.replace('_', '-')} must be at least {least}, got {value}")
    count = args.nodes or 1
    for flag in ("node_rank", "master"):
        if count == 1 and getattr(args, flag) is not None:
            raise RecipeError(f"--{flag.replace('_', '-')} is for several hosts: add --nodes N")
    if args.node_rank is not None and args.node_rank >= count:
        raise RecipeError(
            f"--node-rank must be below --nodes {count}, got {args.node_rank}: it counts from 0"
        )
    master = None if args.master is None else _master(args.master)
    if count > 1 and not args.dry_run and (args.node_rank is None or master is None):
        raise RecipeError(
            "with several hosts, each needs --node-rank R and --master HOST:PORT (host 0's "
            "address); --dry-run prints the lines for all of them"
        )
    more = []
    if args.procs is not None:
        more = [f"launch.processes={count * args.procs}"]
        given = [word for word in overrides if word.startswith("launch.processes=")]
        if given and given[-1] != more[0]:
            raise RecipeError(
                f"{given[-1]} is not --nodes {count} times --procs {args.procs}: leave one out"
            )
    return Hosts(count=count, rank=args.node_rank, master=master, seconds=args.wait), more


def _master(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(\d{1,5})", text)
    if not found or not 0 < int(found[2]) < 65536:
        raise RecipeError(f"--master must be HOST:PORT, such as 10.0.0.1:29500, got {text!r}")
    return found[1].strip("[]"), found[2]


def await_master(hosts: Hosts) -> None:
    """Wait until host 0 listens: torch would tell that it does not with stacks of C++.

    Raises:
        RecipeError: If it does not in time.
    """
    if not hosts.rank or hosts.master is None:
        return
    address, end = ":".join(hosts.master), time.monotonic() + hosts.seconds
    while True:
        try:
            socket.create_connection((hosts.master[0], int(hosts.master[1])), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RecipeError(
                    f"nothing answers at --master {address} within {hosts.seconds} s ({error}): "
                    "start host 0, and give its address and a port that the other hosts reach"
                ) from error
        time.sleep(0.5)


def config_file(strategy: str) -> Path:
    """Return accelerate's file for a strategy."""
    return Path(str(files("polopt.launch").joinpath("configs", f"{strategy}.yaml")))


def launcher(job: Job, hosts: Hosts) -> list[str]:
    """Return the words before `-m polopt train …` that start the job's ranks on one host.

    Args:
        job: The job.
        hosts: Where it runs; `rank` says for which host.

    Raises:
        RecipeError: If the hosts cannot have equally many processes.
    """
    if job.processes % hosts.count:
        raise RecipeError(
            f"'launch.processes' {job.processes} cannot be shared equally by --nodes "
            f"{hosts.count}: take a multiple, or set --procs"
        )
    address, port = hosts.master or (_ADDRESS, _PORT)
    rank, timeout = str(hosts.rank), f"timeout={hosts.seconds}"
    strategy = getattr(job, "strategy", "")
    if strategy == "":
        words = ["torchrun", "--nproc-per-node", str(job.processes // hosts.count)]
        if hosts.count == 1:
            return [*words, "--standalone"]
        words += ["--nnodes", str(hosts.count), "--node-rank", rank, "--rdzv-conf", timeout]
        return [*words, "--master-addr", address, "--master-port", port]
    words = ["accelerate", "launch", "--config_file", str(config_file(strategy or STRATEGIES[0]))]
    words += ["--num_machines", str(hosts.count), "--num_processes", str(job.processes)]
    if hosts.count == 1:
        return [*words, "--main_process_port", "0"]  # any that is free
    words += ["--machine_rank", rank, "--rdzv_conf", timeout]
    return [*words, "--main_process_ip", address, "--main_process_port", port]


def lines(job: Job, hosts: Hosts, words: Sequence[str]) -> str:
    """Return the lines for a shell that start a job, one for each host.

    Args:
        job: The job.
        hosts: Where it runs.
        words: `polopt train …`, without what is about hosts.
    """
    key = f'{KEY}="$KEY" ' if _server(job) else ""
    if job.processes == 1:
        return key + shlex.join(words)
    ranks = range(hosts.count) if hosts.rank is None else [hosts.rank]
    each = []
    for rank in ranks:
        here = Hosts(count=hosts.count, rank=rank, master=hosts.master, seconds=hosts.seconds)
        start = shlex.join(launcher(job, here))
        for variable in (_ADDRESS, _PORT):
            start = start.replace(f"'{variable}'", f'"{variable}"')
        each.append(f"{key}{start} -m {shlex.join(words)}")
    return "\n".join(each)


def server_line(job: Job, arguments: Sequence[str]) -> str | None:
    """Return the line that starts the vLLM server elsewhere, or None if the job names none.

    Args:
        job: The job.
        arguments: The recipe and its settings.
    """
    url = _server(job)
    if url is None:
        return None
    words = [word for word in arguments if not word.startswith("trainer.vllm_server_")]
    words += [f"vllm.host={url.hostname}", f"vllm.port={url.port or 8000}"]
    return f'{KEY}="$KEY" {shlex.join(["polopt", "serve", *words])}'


def _server(job: Job) -> SplitResult | None:
    """Return the address of a server that the job does not start itself."""
    trainer = job.tree.get("trainer", {})
    if not trainer.get("use_vllm") or trainer.get("vllm_mode") != "server":
        return None
    host, port = (trainer.get(f"vllm_server_{part}") for part in ("host", "port"))
    named = f"http://{host or '127.0.0.1'}:{port or 8000}" if host or port else None
    url = trainer.get("vllm_server_base_url") or named
    return urlsplit(url) if url else None
