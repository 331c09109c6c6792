"""A real vLLM server: what it holds after an update, and after it was killed."""

import copy
import functools
import os
import signal
import time

import pytest
import torch

pytest.importorskip("vllm")

import peft
import requests
import trl_setup
import vllm_setup
from transformers import AutoModelForCausalLM, TrainerCallback

from polopt.ext.trl.trainer import PolicyTrainer
from polopt.ext.vllm import client as module
from polopt.ext.vllm.client import WeightClient
from polopt.ext.vllm.compare import unfit
from polopt.ext.vllm.errors import ServerError
from polopt.ext.vllm.generation import installed
from polopt.ext.vllm.server import EngineSettings, Server, _free_port, _members

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 64}


@pytest.fixture(scope="module", params=["gloo", "safetensors"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    settings = EngineSettings(
        backend=request.param, dtype="float32", max_model_length=48, flags=FLAGS
    )
    with Server(vllm_setup.make(folder / "model"), settings, folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    made = WeightClient(
        server.url, group_port=_free_port("127.0.0.1"), key=server.key, seconds=60,
        chunk_bytes=100_000,
    )  # fmt: skip
    made.init_communicator("cpu")
    return made


@pytest.fixture
def model(server):
    return AutoModelForCausalLM.from_pretrained(server.model)


def difference(client, model):
    """Return the largest difference of log-probabilities of one sequence."""
    ids = [3, 9, 5, 6, 12, 8, 4, 7]
    asked = client.get_sequence_logprobs([ids], [1], top_logprobs=16)
    theirs = torch.tensor(asked["actual_logprobs"][0])[:, 0]
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return (theirs - scores.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]).abs().max().item()


def test_five_updates_arrive_and_are_counted(client, model, server):
    assert difference(client, model) <= 5e-4
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        assert difference(client, model) > 5e-3
        client.update_model_params(model)
        client.reset_prefix_cache()
        assert difference(client, model) <= 5e-4
        assert client.version == version
        held = client._get(f"{server.url}/weight_info")["weight_version"]
        assert held.endswith(f"-{version}")


def test_what_is_wrong_with_an_update_is_named_and_the_next_one_works(client, model, monkeypatch):
    version = client.version
    named = list(model.named_parameters())
    with pytest.raises(ServerError, match=r"1 parameters .* were not sent, .* model\.norm\.weight"):
        client.update_named_params([], iter(n for n in named if n[0] != "model.norm.weight"))
    with pytest.raises(ServerError, match="no module or parameter named 'value_head'"):
        client.update_named_params([], iter([*named, ("value_head", torch.zeros(3))]))
    honest = module.describe

    def changed(part):
        info = honest(part)
        if "model.norm.weight" in info["names"]:
            info["checksums"][info["names"].index("model.norm.weight")] += 1
        return info

    monkeypatch.setattr(module, "describe", changed)
    with pytest.raises(ServerError, match=r"model\.norm\.weight did not arrive as it was sent"):
        client.update_named_params([], iter(named))
    monkeypatch.undo()
    assert client.version == version
    client.update_model_params(model)
    assert client.version == version + 1
    assert difference(client, model) <= 5e-4


def test_completions_by_other_weights_are_refused(client, model):
    client.update_model_params(model)
    assert len(client.generate([[3, 4]], n=2, max_tokens=4)["completion_ids"]) == 2
    client.version += 1  # as if the server had missed one
    assert client.generate([[3, 4]], n=2, max_tokens=4)["completion_ids"] == []
    assert "it was restarted by others, or another run" in str(client.failure)
    client.version -= 1


def test_it_says_which_model_it_serves(server, model):
    ask = functools.partial(unfit, server.url, server.key, seconds=5, gpu=False)
    assert ask(model.config) is None
    other = copy.deepcopy(model.config)
    other.vocab_size += 1
    assert "has a vocabulary of 16, the trained one of 17" in ask(other)
    other = copy.deepcopy(model.config)
    other.intermediate_size += 1
    assert "serves another model: its intermediate_size is 128" in ask(other)


def test_nobody_without_the_key(server):
    for route in ("start_weight_update", "update_weights", "collective_rpc", "v1/completions"):
        assert requests.post(f"{server.url}/{route}", json={}).status_code == 401
    assert requests.get(f"{server.url}/health").status_code == 200


def test_a_request_that_the_server_refuses_is_not_repeated(client):
    answer = client.generate([[3] * 60], n=1, max_tokens=8)
    assert answer["completion_ids"] == []
    assert client.failure.refused
    assert "maximum context length" in str(client.failure)


def test_a_server_that_hangs_is_an_error_in_time_and_may_be_used_again(server, model):
    brief = WeightClient(
        server.url, group_port=_free_port("127.0.0.1"), key=server.key, seconds=4
    )  # fmt: skip
    brief.init_communicator("cpu")
    processes = [pid for pid in _members(server._guard.pid) if pid != server._guard.pid]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(ServerError, match=r"did not answer: .*Read timed out"):
            brief.update_model_params(model)
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - began < 12
    brief.seconds = 60  # it has an update open now, which nobody will end
    brief.init_communicator("cpu")
    brief.update_model_params(model)
    assert brief.version == 1
    assert difference(brief, model) <= 5e-4


class KillOnce(TrainerCallback):
    """Kills vLLM's front, the child of the guard, between two steps."""

    def __init__(self, server):
        self.server = server

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2:
            guard, front, *_ = sorted(_members(self.server._guard.pid))
            assert guard == self.server._guard.pid
            os.kill(front, signal.SIGKILL)


def trainer(server, folder, steps, **more):
    config = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "vllm_group_port": _free_port("127.0.0.1"),
        "max_steps": steps,
        "learning_rate": 0.5,
    }
    with installed(client={"key": server.key, "seconds": 60}, server=server):
        return trl_setup.build(
            PolicyTrainer, folder, model=server.model, config=config,
            algorithm=trl_setup.algorithm("dapo"), **more,
        )  # fmt: skip


def test_adapters_are_merged_on_their_way(server, tmp_path):
    lora = peft.LoraConfig(r=4, target_modules="all-linear")
    run = trainer(server, tmp_path, 4, peft_config=lora)
    run.train()
    history = [h for h in run.state.log_history if "reward" in h]
    assert len(history) == 4
    assert max(h["sampling/sampling_logp_difference/max"] for h in history) <= 5e-4
    before = AutoModelForCausalLM.from_pretrained(server.model)
    assert difference(run.vllm_generation.vllm_client, before) > 5e-3  # they moved it


def test_a_server_that_is_killed_is_replaced_and_the_run_goes_on(server, tmp_path):
    run = trainer(server, tmp_path, 4)
    first = server._guard.pid
    run.add_callback(KillOnce(server))
    run.train()
    assert server._guard.pid != first
    assert _members(first) == []
    history = [h for h in run.state.log_history if "reward" in h]
    assert len(history) == 4
    assert max(h["sampling/sampling_logp_difference/max"] for h in history) <= 5e-4


def test_a_server_that_cannot_be_replaced_ends_the_run_with_the_reason(
    server, tmp_path, monkeypatch
):
    run = trainer(server, tmp_path, 4)
    run.add_callback(KillOnce(server))
    monkeypatch.setattr(server, "command", lambda gpu: ["sh", "-c", "echo Error: no room; exit 1"])
    with pytest.raises(ServerError, match=r"a new one could not be started: .* Error: no room"):
        run.train()
    assert run.state.global_step == 2
