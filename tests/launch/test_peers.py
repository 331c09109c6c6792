"""Which errors say that another rank is gone, and what a run says then."""

import gc
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from polopt.launch.peers import PeersError, leave_group, lost, newest

GLOO = (
    "[/src/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.2]:19105: Connection reset by peer. "
    "This is typically caused by a remote worker hanging."
)


def test_what_gloo_says_of_a_rank_that_is_gone():
    said = "Read error [10.77.0.2]:19105: Connection reset by peer"
    assert lost(RuntimeError(GLOO)) == said
    assert lost(torch.distributed.DistNetworkError("broken pipe")) == "broken pipe"


def test_a_checkpoint_that_fails_for_it_is_the_same_fault():
    error = OSError("cannot write the checkpoint")
    error.__cause__ = RuntimeError(GLOO)
    assert "Connection reset" in lost(error)


def test_other_errors_are_not():
    for error in (RuntimeError("shapes differ"), OSError("disk full"), ValueError(GLOO)):
        assert lost(error) is None


def test_the_sentence_names_the_newest_whole_checkpoint(tmp_path):
    assert f"no checkpoint in {tmp_path} yet" in str(PeersError(1, "why", tmp_path))
    for step in (9, 10, 11):
        (tmp_path / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
        if step < 11:  # the last one was not written to its end
            (tmp_path / f"checkpoints/checkpoint-{step}/polopt.json").write_text("{}")
    assert newest(tmp_path) == tmp_path / "checkpoints/checkpoint-10"
    said = str(PeersError(1, "why", tmp_path))
    assert said.startswith("rank 1 gets no answer from another")
    assert f"checkpoint-10 is whole: start the command again with --resume {tmp_path}" in said


def test_ranks_must_wait_for_the_servers_start():
    pytest.importorskip("trl")
    from polopt.ext.vllm.server import EngineSettings
    from polopt.launch.llm_vllm import generation
    from polopt.launch.recipe import RecipeError

    job = SimpleNamespace(processes=2, engine=EngineSettings(), tree={"trainer": {}})
    config = SimpleNamespace(vllm_mode="server", ddp_timeout=60)
    with pytest.raises(RecipeError, match=r"'vllm\.start_seconds' 300\.0 must be below .* 60"):
        generation(job, None, "model", config, None, main=False)


def test_what_was_trained_is_gone_before_the_group(monkeypatch):
    """Its reducer would wait for the group's threads for ever, now and then."""
    dist = torch.distributed
    left, close = [], dist.destroy_process_group

    def train():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model.__dict__["trainer"] = [model]  # as trainers and their callbacks hold each other
        return weakref.ref(model)

    def closed():
        left.append(model() is not None)
        close()

    monkeypatch.setattr(dist, "destroy_process_group", closed)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    try:
        model = train()
        assert model() is not None
        leave_group()
    finally:
        gc.enable()
        if dist.is_initialized():
            close()
    assert left == [False]
    leave_group()  # there is none
    assert left == [False]
