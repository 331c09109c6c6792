"""What travels between a trainer and vLLM's workers: chunks of tensors, and their checksums."""

import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Buffer",
    "broadcast",
    "checksum",
    "chunks",
    "describe",
    "join",
    "open_store",
    "pack",
    "unpack",
]


class Buffer:
    """Bytes that are used again: fresh memory takes longer to get than to be written to."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return uint8 [size], whose content is that of an earlier use."""
        if self._data.numel() < size:
            self._data = torch.empty(size, dtype=torch.uint8)
        return self._data[:size]


def chunks(
    named: Iterable[tuple[str, Tensor]], limit: int, dtype: torch.dtype
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of tensors on the CPU that hold at most `limit` bytes, or one larger tensor.

    Only one list is alive at a time: a model that is gathered parameter by parameter needs this
    much memory beside the largest parameter.

    Args:
        named: Parameters by name, in the order in which vLLM loads them best: as they come.
        limit: Bytes.
        dtype: Floating-point tensors are cast to it, others stay as they are.
    """
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        # A copy: where adapters are merged for the time of the iteration, the last chunk would
        # otherwise be that of the model without them.
        ready = tensor.detach().to("cpu", kept, copy=True).contiguous()
        if part and size + ready.nbytes > limit:
            yield part
            part, size = [], 0
        part.append((name, ready))
        size += ready.nbytes
    if part:
        yield part


def describe(part: Sequence[tuple[str, Tensor]]) -> dict[str, list]:
    """Return names, dtypes, shapes and checksums of a chunk, as JSON can hold them."""
    return {
        "names": [name for name, _ in part],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
        "shapes": [list(tensor.shape) for _, tensor in part],
        "checksums": [checksum(tensor) for _, tensor in part],
    }


def checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bytes, read as 64-bit integers, modulo 2**64 and signed.

    It tells a tensor that is stale, cut or empty; it is not made to resist an adversary.
    """
    data = _bytes(tensor)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    total = data[:whole].view(torch.int64).sum()
    return int(total + data[whole:].sum(dtype=torch.int64))


def pack(part: Sequence[tuple[str, Tensor]], buffer: Buffer) -> Tensor:
    """Return the bytes of a chunk in one tensor, uint8 [n], of the buffer."""
    out = buffer.take(sum(tensor.nbytes for _, tensor in part))
    return torch.cat([_bytes(tensor) for _, tensor in part], out=out)


def unpack(
    data: Tensor, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[tuple[str, Tensor]]:
    """Return the tensors of a packed chunk; they own no memory that another chunk will write.

    Args:
        data: From `pack`, uint8 [n].
        names: As from `describe`, like the next two.
        dtypes: Names of torch's dtypes.
        shapes: Their shapes.
    """
    part, start = [], 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        end = start + nbytes(dtype, shape)
        # A view may begin anywhere, and other dtypes ask for aligned memory.
        piece = data[start:end].clone().view(getattr(torch, dtype)).view(tuple(shape))
        part.append((name, piece))
        start = end
    return part


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor."""
    return getattr(torch, dtype).itemsize * torch.Size(shape).numel()


def open_store(host: str, port: int, *, master: bool, seconds: float) -> dist.Store:
    """Open the store in which a trainer (the master) and vLLM's workers find each other.

    The master listens on `host` alone; a port of 0 is any free one.

    Raises:
        OSError: If the master cannot listen there.
    """
    wait, listening = timedelta(seconds=seconds), None
    if master:  # torch would listen on every interface
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, port), family=family, backlog=64)
        port, listening = server.getsockname()[1], server.detach()
    return dist.TCPStore(
        host,
        port,
        is_master=master,
        timeout=wait,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def join(
    store: dist.Store, meeting: int, rank: int, size: int, seconds: float
) -> dist.ProcessGroup:
    """Join the gloo group of a trainer (rank 0) and vLLM's workers.

    Every operation of the group ends within `seconds`, in an error if a member is gone. The
    interface is chosen by GLOO_SOCKET_IFNAME, as everywhere in torch.

    Args:
        store: Of this trainer.
        meeting: Counts the groups that met in this store.
        rank: Of this member.
        size: Members.
        seconds: See above.
    """
    shelf = dist.PrefixStore(f"polopt/{meeting}", store)
    return dist.ProcessGroupGloo(shelf, rank, size, timedelta(seconds=seconds))


def broadcast(group: dist.ProcessGroup, data: Tensor) -> None:
    """Send a tensor from rank 0 to all members of a group, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([data], options).wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
