"""TRL's generation by vLLM, with weights that also arrive without CUDA."""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from accelerate.utils import broadcast_object_list, is_peft_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from polopt.ext.trl.sharding import reshard
from polopt.ext.vllm.client import WeightClient
from polopt.ext.vllm.compare import unfit
from polopt.ext.vllm.engines import load
from polopt.ext.vllm.errors import ServerError, StartError
from polopt.ext.vllm.plugin import register
from polopt.ext.vllm.server import Server

__all__ = ["Generation", "heads", "installed"]

logger = logging.get_logger(__name__)


_RESTARTS = 3
"""In one run: what fails more often has a cause that a new process does not cure."""


class Generation(VLLMGeneration):
    """`VLLMGeneration` whose server may use our engines, and which colocates on a CPU.

    A server that this run started and that dies, or loses part of an update, is started anew
    with the current weights, and what was asked is asked again. Where that fails, all ranks
    raise.

    Args:
        engine: Further arguments of `vllm.LLM` (colocated): TRL names few of them.
        client: Further arguments of `WeightClient` (server).
        server: The server, on the main rank of the run that started it.
        **kwargs: As for `VLLMGeneration`.

    Raises:
        ValueError: On all ranks, if the server is not one for this trainer.
    """

    def __init__(
        self,
        *,
        engine: Mapping[str, Any],
        client: Mapping[str, Any],
        server: Server | None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self._engine, self._client, self._server = engine, client, server
        self._restarts = 0
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self._check_server()
        register()  # in this process, should the package not be installed with its entry points
        if self.accelerator.device.type == "cpu":
            # The engine in this very process: weights are handed over, and start-up is quicker.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with contextlib.ExitStack() as stack:
            for name, made, settings in (
                ("LLM", vllm_generation.LLM, self._engine),
                ("VLLMClient", WeightClient, self._client),
            ):
                partial = functools.partial(made, **settings)
                stack.enter_context(mock.patch.object(vllm_generation, name, partial))
            failure = None
            try:
                super()._init_vllm()
            except ServerError as error:  # on the main rank, while the others wait at the end
                failure = error
                self.accelerator.wait_for_everyone()
        if self.mode == "server" and (failure := self._agree(failure)):
            raise failure

    def _check_server(self) -> None:
        """Refuse a server that is not one for this trainer, on all ranks."""
        fault = None
        if self.accelerator.is_main_process:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            fault = unfit(
                url,
                self._client.get("key", ""),
                self.model.config,
                seconds=self.server_timeout,
                gpu=self.accelerator.device.type != "cpu",
            )
        if fault := self._agree(fault):
            raise ValueError(fault)

    def sync_weights(self) -> None:
        """See `VLLMGeneration`.

        Raises:
            ServerError: On all ranks, if the weights did not arrive.
        """
        reshard(self.model)
        if self.mode == "server":
            while failure := self._send():
                self._restart(failure)
        elif self.accelerator.device.type == "cpu":
            # TRL calls the model's loader, which finds packed weights on a CPU and fails.
            # Copies: adapters are merged only while the parameters are read, layers may load later.
            named = ((name, tensor.detach().clone()) for name, tensor in self._iter_named_params())
            self.llm.collective_rpc(load, args=(named,))
            self.llm.reset_prefix_cache()
        else:
            super().sync_weights()

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """See `VLLMGeneration`; `heads` are gathered as all parameters are, and stay here."""
        kept = heads(self.model)
        for name, tensor in super()._iter_named_params():
            if name.partition(".")[0] not in kept:
                yield name, tensor

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple:  # noqa: ANN401
        """See `VLLMGeneration`.

        Raises:
            ServerError: On all ranks, if no server answers.
        """
        output = super().generate(prompts, *args, **kwargs)
        while self.mode == "server" and len(output[1]) != len(prompts):
            main = self.accelerator.is_main_process
            self._restart(self._agree(self.vllm_client.failure if main else None))
            self.sync_weights()
            output = super().generate(prompts, *args, **kwargs)
        return output

    def close(self) -> None:
        """End an engine in this process, and with it the process group.

        Left to the end of the process it would look for a group that is gone, and say so at length.
        """
        if self.mode == "colocate":
            self.llm.llm_engine.engine_core.shutdown()

    def _send(self) -> ServerError | None:
        """Send the weights; return why they did not arrive, the same on all ranks."""
        failure = None
        try:
            super().sync_weights()
        except ServerError as error:
            failure = error
        return self._agree(failure)

    def _restart(self, failure: ServerError) -> None:
        self._restarts += 1
        final = None
        if self.accelerator.is_main_process:
            if failure.refused:
                final = f"{failure}"
            elif self._server is None:
                final = f"{failure}; this run did not start the server, so it cannot restart it"
            elif self._restarts > _RESTARTS:
                final = f"{failure}; the server was restarted {_RESTARTS} times before"
            else:
                logger.warning("%s; the server is started anew", failure)
                try:
                    self._server.restart()
                    self.vllm_client.init_communicator(self.accelerator.device)
                except (ServerError, StartError) as error:
                    final = f"{failure}; a new one could not be started: {error}"
        if final := self._agree(final):
            raise ServerError(final)

    def _agree(self, word: Any) -> Any:  # noqa: ANN401
        """Return what the main rank holds on all ranks."""
        return broadcast_object_list([word], from_process=0)[0]


def heads(model: PreTrainedModel) -> set[str]:
    """Return the names of the modules that vLLM must not see, such as a value head.

    These are the modules right under the model that are neither its base model nor its output
    layer: the architecture that is served has no more. Any other parameter that it lacks is the
    server's to refuse, by name.

    Args:
        model: The trained causal language model, with or without adapters of PEFT.
    """
    model = model.get_base_model() if is_peft_model(model) else model
    base, output = model.base_model, model.get_output_embeddings()
    if base is model or output is None:  # it does not say which of its modules are which
        return set()
    return {
        name
        for name, module in model.named_children()
        if module is not base and module is not output
    }


@contextlib.contextmanager
def installed(
    engine: Mapping[str, Any] | None = None,
    client: Mapping[str, Any] | None = None,
    server: Server | None = None,
) -> Iterator[None]:
    """Let a GRPOTrainer that is made within generate by `Generation`, with these arguments.

    It names the class in its constructor and offers no argument for it.
    """
    made = functools.partial(Generation, engine=engine or {}, client=client or {}, server=server)
    with mock.patch.object(grpo_trainer, "VLLMGeneration", made):
        yield
