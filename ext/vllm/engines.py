"""vLLM's side: two engines of weight transfer for its own factory.

An update is a row of chunks, each described and checksummed by the sender, and a last message
that asks whether every parameter arrived. Whatever is wrong ends the update in an error that
names the tensor; the weights that were not replaced stay as they were.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from polopt.ext.vllm.wire import Buffer, broadcast, checksum, join, nbytes, open_store, unpack

__all__ = ["GlooEngine", "SafetensorsEngine", "load", "repack_kept_weights"]


@dataclass
class Chunk(WeightTransferUpdateInfo):
    """Part of an update.

    Attributes:
        names: Parameters as in the checkpoint.
        dtypes: Names of torch's dtypes.
        shapes: Shapes.
        checksums: See `polopt.ext.vllm.wire.checksum`.
        path: A safetensors file that holds them.
        complete: Nothing follows: every parameter must have arrived.
    """

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    path: str | None = None
    complete: bool = False


@dataclass
class Nothing(WeightTransferInitInfo):
    """The file engine needs no meeting."""


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where trainer and workers meet.

    Attributes:
        host: The trainer's address, as the workers reach it.
        port: Of its store.
        meeting: Counts the groups that met there.
        size: Members: the trainer and all workers.
        seconds: The longest that one operation may take.
    """

    host: str
    port: int
    meeting: int
    size: int
    seconds: float


class _Engine(WeightTransferEngine):
    update_info_cls = Chunk

    def start_weight_update(self) -> None:
        self._expected = _names(self.model)
        initialize_layerwise_reload(self.model)
        self._open = True

    def receive_weights(self, update_info: Chunk) -> None:
        try:
            self._receive(update_info)
        except BaseException:
            self.finish_weight_update()  # layers that got nothing keep what they had
            raise

    def _receive(self, chunk: Chunk) -> None:
        if chunk.names:
            part = self._tensors(chunk)
            for (name, tensor), wanted in zip(part, chunk.checksums, strict=True):
                if checksum(tensor) != wanted:
                    raise ValueError(f"{name} did not arrive as it was sent: send all weights anew")
            self._expected -= _load(self.model, part)
        if chunk.complete and self._expected:
            missing = sorted(self._expected)
            raise ValueError(
                f"{len(missing)} parameters of the served model were not sent, the first is "
                f"{missing[0]}: the trainer holds another model, or stopped in the middle"
            )

    def _tensors(self, chunk: Chunk) -> list[tuple[str, Tensor]]:
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        if self._open:
            self._open = False
            finalize_layerwise_reload(self.model, self.model_config)
            repack_kept_weights(self.model)

    def shutdown(self) -> None:
        pass


class SafetensorsEngine(_Engine):
    """Reads chunks from files on a file system that both sides see, such as /dev/shm."""

    init_info_cls = Nothing

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """There is nothing to prepare."""

    def _tensors(self, chunk: Chunk) -> list[tuple[str, Tensor]]:
        with safe_open(chunk.path, framework="pt") as file:
            # The sender removes the file, and vLLM may keep views until the layer is complete.
            return [(name, file.get_tensor(name).clone()) for name in chunk.names]


class GlooEngine(_Engine):
    """Receives chunks in one broadcast each, over a gloo group."""

    init_info_cls = Meeting
    group: Any = None
    buffer: Buffer

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Join the trainer's group; a second call joins a new one."""
        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        i = init_info
        store = open_store(i.host, i.port, master=False, seconds=i.seconds)
        self.buffer = Buffer()
        self.group = join(store, i.meeting, rank, i.size, i.seconds)

    def _tensors(self, chunk: Chunk) -> list[tuple[str, Tensor]]:
        data = self.buffer.take(sum(map(nbytes, chunk.dtypes, chunk.shapes)))
        broadcast(self.group, data)
        return unpack(data, chunk.names, chunk.dtypes, chunk.shapes)

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def _names(model: nn.Module) -> set[str]:
    """Return what an update must bring; before a reload begins, while tied weights are one."""
    return {name for name, _ in model.named_parameters()}


def _load(model: nn.Module, part: Iterable[tuple[str, Tensor]]) -> set[str]:
    loaded = model.load_weights(iter(part))
    if loaded is None:
        raise TypeError(f"{type(model).__name__} does not say which weights it loaded")
    return set(loaded)


def load(worker: Any, named: Iterable[tuple[str, Tensor]]) -> None:  # noqa: ANN401
    """Load all weights into a worker in this very process, for `LLM.collective_rpc`.

    Args:
        worker: vLLM's, which `collective_rpc` fills in.
        named: All parameters by the names of the checkpoint.

    Raises:
        ValueError: If a parameter of the engine's model is not among them, or one of them is none
            of its own.
    """
    from vllm.config import set_current_vllm_config

    runner = worker.model_runner
    model = runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        expected = _names(model)
        initialize_layerwise_reload(model)
        try:
            missing = expected - _load(model, named)
        finally:  # layers that got nothing keep what they had
            finalize_layerwise_reload(model, runner.model_config)
            repack_kept_weights(model)
    if missing:
        raise ValueError(f"the engine holds {min(missing)}, which the trainer's model lacks")


def repack_kept_weights(model: nn.Module) -> int:
    """Pack anew what vLLM's CPU backend packed and does not reload; return how many layers.

    A tied head is not in the checkpoint, so the reload passes it by, and its packed copy stays
    that of the first weights, in silence (vLLM 0.31 and 0.32). Such layers keep `weight` beside
    the packed `cpu_linear`.
    """
    if not current_platform.is_cpu():
        return 0
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    kept = [
        layer
        for layer in model.modules()
        if "cpu_linear" in vars(layer)
        and isinstance(weight := getattr(layer, "weight", None), Tensor)
        and weight.ndim == 2
        and weight.numel()
    ]
    for layer in kept:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return len(kept)
