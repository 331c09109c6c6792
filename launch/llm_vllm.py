"""vLLM in a run: the server that it starts, and what the trainer needs to reach it."""

import contextlib
import os
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

from polopt.ext.vllm.auth import KEY
from polopt.ext.vllm.server import Server, has_gpu
from polopt.launch.llm import LlmJob
from polopt.launch.recipe import RecipeError
from polopt.launch.run import Run

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

__all__ = ["LOG", "generation"]

LOG = "vllm.log"
"""The server's output, in the run folder."""

_ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")


def generation(
    job: LlmJob, run: Run, model: str, config: "GRPOConfig", stack: ExitStack, *, main: bool
) -> AbstractContextManager[None]:
    """Return the context in which the trainer is made, and start a server where one is asked for.

    A recipe that names no server (`trainer.vllm_server_base_url`, `_host` or `_port`) has one of
    its own, which ends with the run. The key of another is read from POLOPT_VLLM_KEY.

    Args:
        job: The recipe.
        run: Where the server's log goes.
        model: A folder or hub name.
        config: Its address is set to that of the server.
        stack: Ends the server.
        main: Whether this is the main rank, which alone talks to the server.

    Raises:
        RecipeError: If other ranks would not wait for the server's start.
        StartError: If the server does not come up.
    """
    if job.engine is None:
        return contextlib.nullcontext()
    own = config.vllm_mode == "server"
    own &= not any(job.tree["trainer"].get(name) for name in _ADDRESS)
    if own and job.processes > 1 and job.engine.start_seconds >= config.ddp_timeout:
        raise RecipeError(
            f"'vllm.start_seconds' {job.engine.start_seconds} must be below 'trainer.ddp_timeout' "
            f"{config.ddp_timeout}: the other ranks wait while the server starts"
        )
    from polopt.ext.vllm.generation import installed

    if config.vllm_mode == "colocate":
        return installed(engine=job.engine.arguments(gpu=has_gpu()))
    server, key = None, os.environ.get(KEY, "")
    if own and main:
        run.progress(0, 1, "starting the vLLM server")
        with run.at_once():
            server = stack.enter_context(Server(model, job.engine, run.path / LOG))
        config.vllm_server_base_url, key = server.url, server.key
    client = {
        "key": key,
        "trainer_host": job.engine.trainer_host,
        "seconds": job.engine.transfer_seconds,
        "answer_seconds": 0.9 * config.ddp_timeout,  # the other ranks wait for no longer
    }
    return installed(client=client, server=server)
