"""The key that guards all of a server, and what it says of itself."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from polopt import __version__
from polopt.ext.vllm.auth import ABOUT, KEY, RequireKey


def ask(path, authorization=None, kind="http", state=None):
    """Return what reached the application, and what was answered instead."""
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope.get("path"))

    async def send(message):
        sent.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization)]
    scope = {"type": kind, "path": path, "headers": headers, "app": SimpleNamespace(state=state)}
    asyncio.run(RequireKey(app)(scope, None, send))
    return reached, sent


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv(KEY, "secret")


@pytest.mark.parametrize("path", ["/v1/models", "/update_weights", "/collective_rpc", "/"])
def test_every_path_needs_the_key(path):
    for wrong in (None, b"", b"secret", b"Bearer secreT", b"Bearer secret ", b"Basic secret"):
        reached, sent = ask(path, wrong)
        assert not reached
        assert sent[0]["status"] == 401
    assert ask(path, b"Bearer secret") == ([path], [])


def test_whether_the_server_is_there_may_be_asked_by_all():
    assert ask("/health") == (["/health"], [])
    assert ask("/healthy")[0] == []


def test_who_has_the_key_is_told_versions_and_model(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.0"))
    model = SimpleNamespace(to_dict=lambda: {"vocab_size": 7, "dtype": complex})  # any object
    state = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=model))
    )
    assert ask(ABOUT, state=state)[1][0]["status"] == 401
    reached, sent = ask(ABOUT, b"Bearer secret", state=state)
    assert not reached
    told = json.loads(sent[1]["body"])
    assert (told["vllm"], told["polopt"]) == ("0.31.0", __version__)
    assert told["model"]["vocab_size"] == 7


def test_a_websocket_without_the_key_is_closed():
    reached, sent = ask("/v1/realtime", kind="websocket")
    assert not reached
    assert sent[0]["type"] == "websocket.close"


def test_without_a_key_there_is_no_server(monkeypatch):
    monkeypatch.delenv(KEY)
    with pytest.raises(RuntimeError, match=KEY):
        RequireKey(None)
