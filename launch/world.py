"""What the ranks of a run must agree on before they work: how many they are, and with what."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object

from polopt.launch.environment import versions
from polopt.launch.llm import LlmJob
from polopt.launch.recipe import RecipeError
from polopt.launch.start import config_file
from polopt.launch.values import flatten

__all__ = ["check_folder", "meet", "obtained"]

_LIBRARIES = ("polopt", "torch", "transformers", "trl", "accelerate")


def meet(job: LlmJob) -> Accelerator:
    """Join the other ranks, and refuse a world that is not the one asked for.

    accelerate starts one process where it was asked for two on a CPU, and makes DDP of FSDP2
    there; neither is an error to it.

    Args:
        job: Says how many processes and which strategy; where it leaves the strategy open, what
            the launcher has set up counts.

    Raises:
        RecipeError: On every rank, with what was asked for and what there is.
    """
    timeout = timedelta(seconds=job.tree["trainer"].get("ddp_timeout", 1800))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    count = accelerator.num_processes
    if count != job.processes:
        raise RecipeError(
            f"'launch.processes' is {job.processes}, but {count} {'runs' if count == 1 else 'run'}:"
            f" start it with polopt train --procs {job.processes}, or torchrun --nproc-per-node "
            f"{job.processes} -m polopt train …"
        )
    asked, found = job.strategy or _set_up(), obtained(accelerator)
    if asked != found and (count > 1 or asked != "ddp"):
        mend = (
            f"start it with accelerate launch --config_file {config_file(asked)}"
            if torch.cuda.is_available()
            else "it needs GPUs, and accelerate falls back without a word; set launch.strategy=ddp"
        )
        raise RecipeError(f"'launch.strategy' is {asked}, but accelerate made {found}: {mend}")
    _compare(job)
    return accelerator


def obtained(accelerator: Accelerator) -> str:
    """Return which strategy is in force, in the names of `launch.strategy`."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED and (plugin := accelerator.state.deepspeed_plugin):
        return f"zero{plugin.zero_stage}"
    if kind == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    return "ddp" if accelerator.num_processes > 1 else "a single process"


def _set_up() -> str:
    """Return the strategy that the launcher's environment asks for."""
    environment = os.environ
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return f"fsdp{environment.get('FSDP_VERSION', '1')}"
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return f"zero{environment.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    return "ddp"


def _compare(job: LlmJob) -> None:
    """Refuse ranks with other releases or another recipe than the main one; a collective."""
    found = versions()
    mine: dict[str, Any] = {name: found.get(name) for name in _LIBRARIES}
    mine |= {f"the setting {key}": value for key, value in flatten(job.tree).items()}
    ranks = gather_object([(socket.gethostname(), mine)])
    host, main = ranks[0]
    for rank, (other, theirs) in enumerate(ranks):
        for key in {**main, **theirs}:
            if theirs.get(key) != main.get(key):
                raise RecipeError(
                    f"the ranks differ in {key}: {main.get(key)!r} on rank 0 ({host}), "
                    f"{theirs.get(key)!r} on rank {rank} ({other}); install and start the same on "
                    "all hosts"
                )


def check_folder(folder: Path, accelerator: Accelerator) -> None:
    """Refuse a run folder that not all hosts see: checkpoints would be incomplete; a collective.

    Raises:
        RecipeError: On every rank.
    """
    accelerator.wait_for_everyone()  # the main rank has made it
    end = time.monotonic() + 5.0  # shared file systems may be late
    while not (seen := (folder / "config.yaml").exists()) and time.monotonic() < end:
        time.sleep(0.1)
    hosts = gather_object([None if seen else socket.gethostname()])
    blind = sorted({host for host in hosts if host is not None})
    if blind:
        raise RecipeError(
            f"{', '.join(blind)} cannot see the run folder {folder}: give --runs a folder on a "
            "file system that all hosts share"
        )
