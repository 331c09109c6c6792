"""How a server's processes live and die, with a small program in place of vLLM."""

import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

pytest.importorskip("psutil")

from polopt.ext.vllm import server as module
from polopt.ext.vllm.errors import StartError
from polopt.ext.vllm.server import EngineSettings, Server

HOST = "127.0.0.1"

FAKE = textwrap.dedent("""
    import http.server, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
    print("up", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
""")


class Fake(Server):
    """A server that answers and has a child of its own."""

    program = FAKE

    def command(self, *, gpu):
        return [sys.executable, "-c", self.program, str(self.port)]


def fake(tmp_path, program=FAKE, **settings):
    made = Fake("model", EngineSettings(**settings), tmp_path / "server.log")
    made.program = program
    return made


def test_it_is_healthy_when_started_and_gone_when_stopped_with_its_children(tmp_path):
    with fake(tmp_path) as server:
        group = server._guard.pid
        assert server.healthy()
        assert len(module._members(group)) == 3  # guard, server, child
    assert module._members(group) == []
    assert "up" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_whoever_is_killed_nobody_stays(tmp_path, victim):
    with fake(tmp_path) as server:
        group = server._guard.pid
        os.kill(sorted(module._members(group))[victim], signal.SIGKILL)
        time.sleep(0.3)
        assert server.healthy() == (victim == 2)
    assert module._members(group) == []


def test_it_is_no_rank_of_the_launcher_that_started_the_trainer(tmp_path, monkeypatch):
    # A group of one needs no other process, unless torch is told of a launcher's store.
    group = (
        "import torch.distributed as dist; dist.init_process_group("
        f"'gloo', rank=0, world_size=1, init_method='tcp://127.0.0.1:{module._free_port(HOST)}'); "
    )
    told = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_PORT")
    for name in (*told, "ACCELERATE_USE_FSDP", "FSDP_VERSION", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("OF_THE_USER", "kept")
    seen = "import json, os; print(json.dumps(dict(os.environ)), flush=True);"
    with fake(tmp_path, group + seen + FAKE, start_seconds=60) as server:
        lines = server.log.read_text().splitlines()
    found = json.loads(next(line for line in lines if line.startswith("{")))
    assert found["OF_THE_USER"] == "kept"
    assert not [name for name in found if name in told or name.startswith(("TORCHEL", "ACCEL"))]


def test_a_restart_takes_the_same_port(tmp_path):
    with fake(tmp_path) as server:
        first, url = server._guard.pid, server.url
        server.restart()
        assert server.healthy()
        assert (server._guard.pid != first, server.url) == (True, url)
        assert module._members(first) == []


def test_a_trainer_that_is_killed_leaves_no_server(tmp_path):
    program = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(os.path.dirname(__file__))!r})
        from pathlib import Path
        import test_vllm_guard
        server = test_vllm_guard.fake(Path({str(tmp_path)!r}))
        server.start()
        print(server._guard.pid, flush=True)
        time.sleep(600)
    """)
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    group = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + 15
    while module._members(group) and time.monotonic() < end:
        time.sleep(0.1)
    assert module._members(group) == []


def test_a_server_that_fails_says_why(tmp_path):
    broken = "raise RuntimeError('no memory for the cache')"
    with pytest.raises(StartError, match=r"ended while starting; its log .* no memory for the c"):
        fake(tmp_path, broken).start()


def test_a_server_that_never_gets_healthy_is_ended(tmp_path):
    server = fake(tmp_path, "import time; time.sleep(600)", start_seconds=1.0)
    with pytest.raises(StartError, match=r"not healthy after 1\.0 s"):
        server.start()
    assert not server.alive()


def test_a_port_that_is_taken(tmp_path):
    class Quiet(http.server.BaseHTTPRequestHandler):
        pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        port = other.server_address[1]
        with pytest.raises(StartError, match=f"port {port} of 127.0.0.1 is taken"):
            fake(tmp_path, port=port).start()
        other.shutdown()


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "0x0", "::", "::ffff:0.0.0.0", "", "*"])
def test_every_interface_is_refused(host):
    with pytest.raises(ValueError, match="is every interface"):
        EngineSettings(host=host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_a_sentence(tmp_path, host):
    with pytest.raises(StartError, match=f"host {host} is no address of this machine"):
        fake(tmp_path, host=host)


def test_wrong_settings():
    with pytest.raises(ValueError, match="backend must be nccl, gloo or safetensors, got 'mpi'"):
        EngineSettings(backend="mpi")
    with pytest.raises(ValueError, match="port must be from 0 to 65535, got 70000"):
        EngineSettings(port=70000)
    with pytest.raises(ValueError, match="start_seconds must be positive, got 0"):
        EngineSettings(start_seconds=0)


def test_the_command_line(tmp_path):
    settings = EngineSettings(
        port=1234, max_model_length=64, flags={"max_num_seqs": 8, "lora": None, "x": {"a": 1}}
    )
    words = Server("folder", settings, tmp_path / "log", key="k").command(gpu=True)
    line = " ".join(words[1:])
    assert line.startswith("-m vllm.entrypoints.openai.api_server --model folder --host 127.0.0.1")
    assert '--weight-transfer-config {"backend": "nccl"}' in line
    assert "--max-model-len 64" in line
    assert '--max-num-seqs 8 --x {"a": 1}' in line
    assert "lora" not in line
    assert "enforce-eager" not in line
    assert " k" not in line.replace("--kv", "")  # the key is not for all eyes
    cpu = " ".join(Server("folder", settings, tmp_path / "log").command(gpu=False))
    assert '{"backend": "gloo"}' in cpu
    assert "--enforce-eager" in cpu
