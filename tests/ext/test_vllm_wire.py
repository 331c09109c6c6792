"""What travels between trainer and vLLM; nothing here needs vLLM."""

import threading

import pytest
import torch

from polopt.ext.vllm import wire


def named(*tensors):
    return [(f"p{i}", t) for i, t in enumerate(tensors)]


def test_chunks_hold_at_most_the_limit_and_keep_the_order():
    tensors = named(*(torch.randn(n) for n in (3, 5, 100, 1, 2)))
    parts = list(wire.chunks(iter(tensors), 40, torch.float32))
    assert [[name for name, _ in part] for part in parts] == [["p0", "p1"], ["p2"], ["p3", "p4"]]


def test_only_floating_point_is_cast():
    counts = torch.tensor([2**40 + 1, 7])
    [part] = wire.chunks(named(torch.ones(2), counts), 1000, torch.bfloat16)
    assert [t.dtype for _, t in part] == [torch.bfloat16, torch.int64]
    assert torch.equal(part[1][1], counts)


def test_a_chunk_keeps_what_was_there_when_its_tensors_came():
    def merged():  # as adapters are, for the time of the iteration
        weight = torch.ones(3)
        yield "p", weight
        weight.zero_()

    [[(_, sent)]] = wire.chunks(merged(), 1000, torch.float32)
    assert torch.equal(sent, torch.ones(3))


def test_unpacking_gives_back_what_was_packed_at_any_alignment():
    part = named(
        torch.tensor([1, 2, 3], dtype=torch.uint8),  # what follows begins at an odd byte
        torch.randn(2, 3),
        torch.randn(5, dtype=torch.float64),
        torch.randn(0, 4),
        torch.randn((), dtype=torch.bfloat16),
    )
    info, buffer = wire.describe(part), wire.Buffer()
    packed = wire.pack(part, buffer)
    back = wire.unpack(packed, info["names"], info["dtypes"], info["shapes"])
    packed.fill_(7)  # the buffer's next use
    assert wire.pack(named(torch.ones(2)), buffer).data_ptr() == packed.data_ptr()
    for (name, sent), (got_name, got) in zip(part, back, strict=True):
        assert name == got_name
        assert sent.dtype == got.dtype
        assert torch.equal(sent, got)
    assert info["checksums"] == [wire.checksum(t) for _, t in back]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_checksum_tells_one_changed_byte_and_a_cut(dtype):
    tensor = torch.arange(1, 12).to(dtype)
    for i in range(tensor.numel()):
        changed = tensor.clone()
        changed[i] = 0
        assert wire.checksum(changed) != wire.checksum(tensor)
    assert wire.checksum(tensor[:-1]) != wire.checksum(tensor)
    assert wire.checksum(torch.zeros_like(tensor)) != wire.checksum(tensor)


def test_the_checksum_of_a_part_of_a_tensor_is_that_of_its_copy():
    whole = torch.randn(100, dtype=torch.bfloat16)
    assert wire.checksum(whole[1:90]) == wire.checksum(whole[1:90].clone())


def test_a_group_meets_broadcasts_and_meets_again():
    store = wire.open_store("127.0.0.1", 0, master=True, seconds=20)
    sent, got = torch.arange(10_000), {}

    def member(meeting, rank):
        mine = wire.open_store("127.0.0.1", store.port, master=False, seconds=20)
        group = wire.join(mine, meeting, rank, 3, 20)
        data = torch.zeros(10_000, dtype=torch.int64)
        wire.broadcast(group, data)
        got[meeting, rank] = data

    for meeting in (1, 2):  # a server that was restarted meets in the same store
        threads = [threading.Thread(target=member, args=(meeting, rank)) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        wire.broadcast(wire.join(store, meeting, 0, 3, 20), sent.clone())
        for thread in threads:
            thread.join()
    assert len(got) == 4
    assert all(torch.equal(data, sent) for data in got.values())


def test_a_member_that_does_not_come_is_an_error_in_time():
    store = wire.open_store("127.0.0.1", 0, master=True, seconds=1)
    with pytest.raises(RuntimeError):
        wire.join(store, 1, 0, 2, 1.0)
