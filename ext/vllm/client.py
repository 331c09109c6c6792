"""The trainer's side: TRL's client of a vLLM server, with weights sent by our engines."""

import contextlib
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter
from safetensors.torch import save_file
from torch import Tensor
from trl.generation.vllm_client import VLLMClient
from urllib3.connection import HTTPConnection
from urllib3.util.retry import Retry

from polopt.ext.vllm.errors import ServerError
from polopt.ext.vllm.plugin import BACKENDS
from polopt.ext.vllm.wire import Buffer, broadcast, chunks, describe, join, open_store, pack

__all__ = ["WeightClient"]

_SILENCE = 30
"""Seconds without a sign of the server's host after which a request has failed."""


class _Adapter(HTTPAdapter):
    """Notices within `_SILENCE` seconds that the server's host is gone, however long it works."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        tcp = socket.IPPROTO_TCP
        options = [
            *HTTPConnection.default_socket_options,
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (tcp, socket.TCP_KEEPIDLE, _SILENCE // 3),
            (tcp, socket.TCP_KEEPINTVL, _SILENCE // 6),
            (tcp, socket.TCP_KEEPCNT, 4),
            (tcp, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE),
        ]
        super().init_poolmanager(*args, socket_options=options, **kwargs)


class WeightClient(VLLMClient):
    """TRL's client, for a server whose `--weight-transfer-config` names one of our engines.

    With vLLM's own `nccl` everything is left to TRL.

    Args:
        *args: As for `VLLMClient`.
        key: Of the server, see `polopt.ext.vllm.auth`.
        trainer_host: The trainer's address, as the server reaches it.
        folder: Where chunks are written for the safetensors engine; both sides must see it.
        chunk_bytes: The most that is in memory, or in one file, at a time.
        seconds: The longest that one message of an update may take.
        answer_seconds: The longest that one request for completions may take.
        **kwargs: As for `VLLMClient`.

    Attributes:
        version: Counts the updates that arrived whole. The server's `/weight_info` says the same,
            with the name of this client before it, and is asked for after each completion: one by
            other weights is an error.
        failure: Why the latest request for completions has no answer, else None.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        key: str = "",
        trainer_host: str = "127.0.0.1",
        folder: Path = Path("/dev/shm"),
        chunk_bytes: int = 256 << 20,
        seconds: float = 120.0,
        answer_seconds: float = 1800.0,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self.trainer_host, self.folder = trainer_host, folder
        self.chunk_bytes, self.seconds = chunk_bytes, seconds
        self.answer_seconds = answer_seconds
        self.version, self._name = 0, uuid.uuid4().hex[:8]
        self.failure: ServerError | None = None
        self._key, self._backend = key, ""
        self._store, self._meetings, self._buffer = None, 0, Buffer()
        super().__init__(*args, **kwargs)

    def check_server(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """See `VLLMClient`: it asks here first, before any request that needs the key."""
        if self._key:
            self.session.headers["Authorization"] = f"Bearer {self._key}"
        # TRL repeats for a minute, and whatever the server refuses, too.
        adapter = _Adapter(max_retries=Retry(connect=2, read=0, status=0, backoff_factor=0.2))
        self.session.mount("http://", adapter)
        self.session.mount("https://", adapter)
        self.session.trust_env = False  # a proxy would see the key, .netrc would replace it
        super().check_server(*args, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict:  # noqa: ANN401
        return _answer(lambda: self.session.post(url, timeout=self._patience, **kwargs))

    def _get(self, url: str, **kwargs: Any) -> dict:  # noqa: ANN401
        return _answer(lambda: self.session.get(url, timeout=self._patience, **kwargs))

    @property
    def _patience(self) -> tuple[float, float]:
        return 10.0, self.answer_seconds  # to connect, and for the answer

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        """See `VLLMClient`; without an answer the result is empty and `failure` says why.

        Only the main rank asks, and all wait for what it got: an error here would leave them
        waiting. `polopt.ext.vllm.generation` raises it on all.
        """
        self.failure = None
        try:
            answer = super().generate(*args, **kwargs)
            self._check_version()
            return answer
        except ServerError as error:
            self.failure = error
            return {"prompt_ids": [], "completion_ids": [], "logprobs": None}

    def _check_version(self) -> None:
        """Refuse completions of a server that holds other weights than were sent to it."""
        if not self.version or self._backend not in BACKENDS:
            return
        held = self._get(f"{self.base_url}/weight_info").get("weight_version")
        if held != self._label():
            raise ServerError(
                f"the vLLM server answered with the weights {held!r}, not with {self._label()!r} "
                "of this run: it was restarted by others, or another run sends it weights, too"
            )

    def _label(self) -> str:
        return f"{self._name}-{self.version}"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """See `VLLMClient`: meet the server's workers.

        Raises:
            ServerError: If the server transfers no weights, or the meeting fails.
        """
        info = self.get_server_info()
        transfer = info["weight_transfer_config"]
        if transfer is None or transfer["backend"] not in BACKENDS:
            super().init_communicator(device)  # nccl, and the sentence about no engine
            return
        self._backend = transfer["backend"]
        self._dtype = getattr(torch, str(info["model_config"]["dtype"]).removeprefix("torch."))
        with contextlib.suppress(ServerError):  # there is none, unless a trainer died in the middle
            self._call("finish_weight_update")
        if self._backend == "safetensors":
            self._call("init_weight_transfer_engine", init_info={})
            return
        if self._store is None:
            try:
                self._store = open_store(
                    self.trainer_host, self.group_port, master=True, seconds=self.seconds
                )
            except OSError as error:
                raise ServerError(
                    f"the trainer cannot listen on port {self.group_port} of {self.trainer_host} "
                    f"({error.strerror}): set trainer.vllm_group_port to a free one and "
                    "vllm.trainer_host to an address of this host that the server reaches"
                ) from error
        self._meetings += 1
        size = self.get_world_size() + 1
        self.communicator = self._beside(
            lambda: join(self._store, self._meetings, 0, size, self.seconds),
            "init_weight_transfer_engine",
            init_info={
                "host": self.trainer_host,
                "port": self.group_port,
                "meeting": self._meetings,
                "size": size,
                "seconds": self.seconds,
            },
        )

    def close_communicator(self) -> None:
        """See `VLLMClient`."""
        if self._backend in BACKENDS:
            self.communicator = None
        else:
            super().close_communicator()

    def update_named_params(
        self,
        metadata: Sequence[tuple[str, str, list[int]]],
        named_params: Iterator[tuple[str, Tensor]],
    ) -> None:
        """See `VLLMClient`: send all weights, and have the server say that it has them all.

        Raises:
            ServerError: If a tensor was lost, changed or missing on the way, or the server
                did not answer in time. It then serves a mixture, until an update succeeds.
        """
        if self._backend not in BACKENDS:
            super().update_named_params(metadata, named_params)
            return
        try:
            self._call("start_weight_update")
            for part in chunks(named_params, self.chunk_bytes, self._dtype):
                self._send(part)
            self._call("update_weights", update_info={"complete": True})
        finally:
            for _ in named_params:  # gathering is a collective: the other ranks go on to its end
                pass
        self.version += 1
        self._call("finish_weight_update", weight_version=self._label())

    def _send(self, part: list[tuple[str, Tensor]]) -> None:
        info = describe(part)
        if self._backend == "gloo":
            self._beside(
                lambda: broadcast(self.communicator, pack(part, self._buffer)),
                "update_weights",
                update_info=info,
            )
            return
        path = self.folder / f"polopt-{os.getpid()}-{uuid.uuid4().hex}.safetensors"
        try:
            save_file(dict(part), path)
            self._call("update_weights", update_info={**info, "path": str(path)})
        finally:
            path.unlink(missing_ok=True)

    def _beside(self, act: Callable[[], Any], route: str, **body: Any) -> Any:  # noqa: ANN401
        """Act while the server answers: both sides of a collective must be under way at once."""
        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(self._call, route, **body)
            try:
                result = act()
            except RuntimeError as error:  # gloo's, which knows neither who nor why
                answer.result()  # the server's word first, if it has one
                raise ServerError(
                    f"the weights did not reach {self.base_url} within {self.seconds} s: {error}"
                ) from error
            answer.result()
        return result

    def _call(self, route: str, **body: Any) -> dict:  # noqa: ANN401
        """Post once: half an update must not be repeated."""
        with requests.Session() as session:  # without the other's adapter, which may repeat
            session.trust_env = False
            session.headers.update(self.session.headers)
            url = f"{self.base_url}/{route}"
            return _answer(lambda: session.post(url, json=body, timeout=self.seconds))


def _answer(ask: Callable[[], requests.Response]) -> dict:
    try:
        answer = ask()
        if answer.status_code == 200:
            return answer.json()
    except requests.exceptions.RequestException as error:  # of what is no JSON, too
        raise ServerError(f"the vLLM server did not answer: {error}") from error
    # What a worker said, without vLLM's words around it.
    said = re.search(r"Worker failed with error '(.*?)', please check", answer.text, re.DOTALL)
    reason = said[1] if said else f"it answered {answer.status_code} to {answer.url}: {answer.text}"
    refused = 400 <= answer.status_code < 500
    raise ServerError(f"the vLLM server: {reason}"[:1000], refused=refused)
