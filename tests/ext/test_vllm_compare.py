"""Servers that are not those of the run, each told in one sentence; small programs play them."""

import http.server
import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("requests")
transformers = pytest.importorskip("transformers")

from polopt import __version__
from polopt.ext.vllm.compare import unfit

SIZES = {"vocab_size": 16, "hidden_size": 64, "num_hidden_layers": 2}
MODEL = transformers.Qwen3Config(**SIZES)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.0"))


@pytest.fixture
def ask():
    """Return what is wrong with a server whose pages are changed as given."""
    running = []

    def asked(gpu=False, backend="gloo", pages=None, **about):
        told = {"vllm": "0.31.0+cpu", "polopt": __version__, "model": MODEL.to_dict(), **about}
        transfer = backend and {"backend": backend}
        content = {
            "/health": "",
            "/polopt": json.dumps(told),
            "/server_info": json.dumps({"vllm_config": {"weight_transfer_config": transfer}}),
            **(pages or {}),
        }

        class Page(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                page = content.get(path)
                known = self.headers["Authorization"] == "Bearer key" or path == "/health"
                self.send_response(404 if page is None else 200 if known else 401)
                self.end_headers()
                self.wfile.write((page or "").encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        return unfit(url, "key", MODEL, seconds=1, gpu=gpu), url

    yield asked
    for server in running:
        server.shutdown()
        server.server_close()


def test_the_server_of_this_run_fits(ask):
    assert ask()[0] is None
    assert ask(gpu=True, backend="nccl")[0] is None


def test_a_server_that_polopt_did_not_start_may_fit(ask):
    assert ask(gpu=True, backend="nccl", pages={"/polopt": None})[0] is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vllm": "0.30.1"}, "runs vllm 0.30.1, this trainer has 0.31.0: install the same on both"),
        ({"polopt": "0.0.9"}, f"runs polopt 0.0.9, this trainer has {__version__}"),
        (
            {"model": transformers.Qwen3Config(**{**SIZES, "vocab_size": 151936}).to_dict()},
            "has a vocabulary of 151936, the trained one of 16: serve the model that is trained",
        ),
        (
            {"model": transformers.Qwen3Config(**{**SIZES, "num_hidden_layers": 3}).to_dict()},
            "serves another model: its num_hidden_layers is 3, that of the trained one 2",
        ),
        (
            {"model": transformers.LlamaConfig(**SIZES).to_dict()},
            "serves another model: its model_type is llama, that of the trained one qwen3",
        ),
        ({"backend": None}, "takes no weights: start it with polopt serve RECIPE"),
        ({"backend": "nccl"}, "takes weights by nccl, and the trainer has no GPU"),
        ({"pages": {"/server_info": None}}, "does not offer what sends weights to vLLM"),
        ({"pages": {"/server_info": "<html>"}}, "is no vLLM server that can be used"),
        ({"pages": {"/polopt": "[]"}}, "is no vLLM server that can be used"),
    ],
)  # fmt: skip
def test_another_server_is_told_in_one_sentence(ask, changes, told):
    said, url = ask(**changes)
    assert told in said
    assert url in said
    assert "\n" not in said


def test_a_server_with_another_key(ask):
    _, url = ask()
    said = unfit(url, "mine", MODEL, seconds=1, gpu=False)
    assert said == f"the vLLM server at {url} has another key: set POLOPT_VLLM_KEY to the server's"


def test_nobody_there_is_told_in_time(ask):
    began = time.monotonic()
    said = unfit("http://127.0.0.1:1", "key", MODEL, seconds=0.5, gpu=False)
    assert time.monotonic() - began < 5
    assert "no vLLM server answers at http://127.0.0.1:1 within 0.5 s (ConnectionError)" in said


def test_a_server_that_starts_late_is_waited_for(ask):
    _, url = ask(pages={"/health": None})
    assert "it is not healthy" in unfit(url, "key", MODEL, seconds=0.2, gpu=False)


def test_neither_a_proxy_nor_netrc_sees_or_replaces_the_key(ask, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    fault, _ = ask()
    assert fault is None
