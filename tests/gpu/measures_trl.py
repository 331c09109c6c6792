"""Measurements that need TRL: steps of two trainers on the same answers, and vLLM beside them."""

import random
import time

import measures
import torch
import trl_setup
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from polopt.ext.trl.trainer import PolicyTrainer
from polopt.losses import dapo


class Clock(TrainerCallback):
    """Seconds of each optimizer step, the first left out, and the most memory in GiB."""

    def __init__(self, device):
        self._gpu, self.seconds, self.peak = device.type == "cuda", [], None

    def _now(self):
        if self._gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if self._gpu else time.process_time()

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = self._now()
        if self._gpu and state.global_step == 1:
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 1:
            self.seconds.append(self._now() - self._began)
        if self._gpu:
            self.peak = torch.cuda.max_memory_allocated() / 2**30


def words(size):
    """A tokenizer of so many words."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, size)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def steps(kind, model, device, folder, *, micro_batch, accumulate, prompt, answer, count):
    """Train on random answers of unequal lengths by `"polopt"` or `"trl"`.

    Generation is replaced, so it costs nothing and both get the same answers.

    Returns:
        The clock, and a checksum of the answers.
    """
    rng, made = random.Random(0), []
    size = model.config.vocab_size

    def complete(self, prompt_ids, *_, **__):
        out = [
            [*(rng.randrange(3, size) for _ in range(rng.randint(answer // 8, answer) - 1)), 1]
            for _ in prompt_ids
        ]
        made.append(sum(map(sum, out)))
        return out, None

    base, own = {
        "polopt": (PolicyTrainer, {"algorithm": dapo(refill=None)}),
        "trl": (GRPOTrainer, {}),
    }[kind]
    loss = {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0} if kind == "trl" else {}
    clock = Clock(device)
    text = " ".join(f"w{i}" for i in range(3, 3 + prompt))
    trainer = type("Timed", (base,), {"_generate_single_turn": complete})(
        model,
        lambda completion_ids, **_: [sum(ids[:7]) * 37 % 101 / 101 for ids in completion_ids],
        GRPOConfig(
            output_dir=str(folder), use_cpu=device.type == "cpu", bf16=device.type == "cuda",
            per_device_train_batch_size=micro_batch, gradient_accumulation_steps=accumulate,
            num_generations=4, max_completion_length=answer, learning_rate=1e-6,
            max_steps=count + 1, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, seed=0, **loss,
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for _ in range(64)]),
        processing_class=words(size),
        callbacks=[clock],
        **own,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock, made


def served(device, folder):
    """Save a small random model that vLLM can serve, and the tests' tokenizer; return the path."""
    model = measures.qwen3(device, hidden=128, layers=2, vocabulary=len(trl_setup.WORDS))
    model.save_pretrained(folder)
    trl_setup.tiny()[1].save_pretrained(folder)
    return str(folder)


def train_by_vllm(device, model, folder, count, config, **seam):
    """Train with vLLM's answers, and return TRL's history of the mismatch.

    Args:
        device: Of the trainer.
        model: A folder.
        folder: For TRL.
        count: Optimizer steps, and as many syncs of the weights.
        config: Fields of TRL's config about vLLM.
        **seam: For `polopt.ext.vllm.generation.installed`.
    """
    from polopt.ext.vllm.generation import installed

    on_cpu = device.type == "cpu"
    with installed(**seam):
        trainer = trl_setup.build(
            PolicyTrainer, folder, model=model, algorithm=trl_setup.algorithm("dapo"),
            config={"use_vllm": True, "use_cpu": on_cpu, "bf16": not on_cpu, "max_steps": count,
                    "learning_rate": 3e-3, "optim": "adamw_torch",
                    "per_device_train_batch_size": 32, "vllm_max_model_length": 48, **config},
        )  # fmt: skip
    trainer.train()
    history = [h for h in trainer.state.log_history if "reward" in h]
    assert len(history) == count
    return trainer, history
