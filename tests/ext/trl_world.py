"""Trains a few steps and keeps every gradient, on as many processes and hosts as started it.

    python trl_world.py FOLDER
    torchrun --standalone --nproc-per-node 2 trl_world.py FOLDER
    accelerate launch --config_file …/fsdp2.yaml --num_processes 2 … trl_world.py FOLDER

Answers depend on the prompt alone, so that all of these train on the same samples. FOLDER, which
all processes see, gets `world.safetensors` (`gradient.STEP.NAME` before clipping, `weight.NAME`
after the last step) and `world.json`; compare two with `difference`.
"""

import argparse
import json
import os
import random
import socket
import sys
from collections import Counter
from pathlib import Path

import fsdp_cpu  # noqa: F401  accelerate may shard on a CPU
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.trainer_callback import PrinterCallback
from trl_setup import WORDS, build, tiny

from polopt import losses
from polopt.ext.trl.trainer import PolicyTrainer
from polopt.launch.peers import leave_group

BATCH = 16  # answers in an optimizer step, on all processes


class Keeper(PolicyTrainer):
    """Answers without sampling, and keeps gradients."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = {}

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        seen = Counter()
        answers = []
        for prompt in prompt_ids:
            ids = tuple(int(i) for i in prompt)
            draw = random.Random(str((ids, seen[ids])))
            seen[ids] += 1
            words = draw.choices(range(3, len(WORDS)), k=draw.randint(1, 6))
            answers.append([*words, self.eos_token_ids[0]])
        return answers, None

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            for name, parameter in self.accelerator.unwrap_model(self.model).named_parameters():
                self.kept[f"gradient.{self.state.global_step}.{name}"] = whole(parameter.grad)
        return loss


def whole(tensor):
    """Return a tensor that may be in shards, on every rank."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args(argv)
    state = PartialState(cpu=True)
    model, tokenizer = tiny()
    if state.is_main_process:
        model.save_pretrained(args.folder / "model")
    state.wait_for_everyone()
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    config = {
        "per_device_train_batch_size": BATCH // state.num_processes // args.accumulate,
        "gradient_accumulation_steps": args.accumulate,
        "max_steps": args.steps,
        "max_grad_norm": 0.5,
        "optim": "adamw_torch",  # it has a state to resume
        "learning_rate": 0.003,
        "save_strategy": "steps",
        "save_steps": args.steps - 1,
    }
    sync = {"sync_each_batch": sharded}

    def trained(checkpoint=None):
        trainer = build(
            Keeper,
            args.folder / "out",
            model=str(args.folder / "model"),
            tokenizer=tokenizer,
            algorithm=losses.grpo(kl_coef=0.1),
            config={**config, "accelerator_config": {"gradient_accumulation_kwargs": {**sync}}},
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=checkpoint)
        policy = trainer.accelerator.unwrap_model(trainer.model)
        return trainer, {f"weight.{n}": whole(p) for n, p in policy.named_parameters()}

    trainer, weights = trained()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    _, resumed = trained(str(args.folder / "out" / f"checkpoint-{args.steps - 1}"))
    hosts = gather_object([os.environ.get("POLOPT_TEST_HOST", socket.gethostname())])
    if state.is_main_process:
        save_file({**trainer.kept, **weights}, args.folder / "world.safetensors")
        units = [name for name, m in trainer.ref_model.named_modules() if isinstance(m, FSDPModule)]
        log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        report = {
            "processes": state.num_processes,
            "hosts": hosts,
            "sharded": all(isinstance(p, DTensor) for p in policy.parameters()),
            "reference_units": units,
            "resumed": all(torch.equal(weights[name], resumed[name]) for name in weights),
            "grad_norm": [entry["grad_norm"] for entry in log],
            "kl": [entry["kl"] for entry in log],
        }
        (args.folder / "world.json").write_text(json.dumps(report))
    del trainer, policy, weights, resumed
    leave_group()


def difference(one, other, kind):
    """Return the largest relative L2 difference of two runs, over steps (and so all weights).

    Args:
        one: Folder of a run.
        other: Folder of another one.
        kind: "gradient" or "weight".
    """
    first, second = (load_file(Path(f) / "world.safetensors") for f in (one, other))
    assert set(first) == set(second)
    parts = {}
    for name in first:
        if name.startswith(f"{kind}."):
            step = name.split(".")[1] if kind == "gradient" else ""
            parts.setdefault(step, []).append(name)
    found = []
    for names in parts.values():
        a, b = (torch.cat([side[n].flatten() for n in names]) for side in (first, second))
        found.append(((a - b).norm() / a.norm()).item())
    return max(found)


if __name__ == "__main__":
    main(sys.argv[1:])
