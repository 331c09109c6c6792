"""CPU time of an optimizer step: TRL's own trainer against PolicyTrainer.

    python tests/bench/trim.py uniform log_normal equal

Both get the same model (Qwen3, 3.7M parameters, float32), prompts, completions and rewards:
4 completions per micro-batch, 8 micro-batches per step, one core. Generation is replaced by
random tokens of the lengths named, so it costs nothing. Trainers alternate, each run begins
with a step on short completions that is not counted.
"""

import argparse
import json
import os
import random
import tempfile
import time

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from polopt.ext.trl.trainer import PolicyTrainer
from polopt.losses import Algorithm, dapo, grpo

VOCABULARY = 2000
LENGTHS = {
    "uniform": lambda rng: rng.randint(32, 512),
    "log_normal": lambda rng: min(max(round(rng.lognormvariate(4.564, 0.8)), 4), 512),  # median 96
    "equal": lambda rng: 272,
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(folder: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder)


def measure(kind: str, lengths: str, seed: int, steps: int, iterations: int, kl: float) -> dict:
    """Train once and return CPU seconds per step, and a checksum of what was trained on."""
    rng, made, times = random.Random(seed), [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.began = time.process_time()

        def on_step_end(self, *args, **kwargs):
            times.append(time.process_time() - self.began)

    def complete(self, prompt_ids, *_, **__):
        draw = LENGTHS[lengths] if made else (lambda rng: 8)
        out = [
            [*(rng.randrange(3, VOCABULARY) for _ in range(draw(rng) - 1)), 1] for _ in prompt_ids
        ]
        made.append(sum(map(sum, out)))
        return out, None

    base = GRPOTrainer if kind == "trl" else PolicyTrainer
    trainer_class = type("Timed", (base,), {"_generate_single_turn": complete})
    algorithm: Algorithm = grpo(kl_coef=kl) if kl else dapo(refill=None, high=0.2)
    own = {"loss_type": "grpo" if kl else "dapo", "beta": kl} if kind == "trl" else {}
    prompts = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model(folder),
            lambda completion_ids, **_: [sum(ids[:7]) * 37 % 101 / 101 for ids in completion_ids],
            GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False,
                per_device_train_batch_size=4, gradient_accumulation_steps=8, num_generations=8,
                num_iterations=iterations, max_completion_length=512, learning_rate=1e-4,
                lr_scheduler_type="constant", max_steps=(steps + 1) * iterations,
                logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
                seed=seed, dataloader_pin_memory=False, **own,
            ),
            train_dataset=Dataset.from_list([
                {"prompt": " ".join(f"w{prompts.randrange(3, VOCABULARY)}"
                                    for _ in range(prompts.randint(16, 64)))}
                for _ in range(200)
            ]),
            processing_class=tokenizer(),
            callbacks=[Clock()],
            **({} if kind == "trl" else {"algorithm": algorithm}),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        weights = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    return {"seconds": times[iterations:], "tokens": made, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lengths", nargs="+", choices=LENGTHS)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each trainer")
    parser.add_argument("--steps", type=int, default=2, help="generations per run")
    parser.add_argument("--iterations", type=int, default=1, help="num_iterations")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the divergence (GRPO)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for lengths in args.lengths:
        cpu = {"trl": 0.0, "polopt": 0.0}
        for seed in range(args.rounds):
            runs = {}
            for kind in ("trl", "polopt") if seed % 2 == 0 else ("polopt", "trl"):
                runs[kind] = measure(kind, lengths, seed, args.steps, args.iterations, args.kl)
                cpu[kind] += sum(runs[kind]["seconds"])
            a, b = runs["trl"], runs["polopt"]
            if a["tokens"] != b["tokens"]:
                raise SystemExit("the two trainers were given different completions")
            apart = float((a["weights"] - b["weights"]).norm() / a["weights"].norm())
        count = args.rounds * args.steps * args.iterations
        print(
            json.dumps({
                "lengths": lengths,
                "trl_cpu_seconds_per_step": round(cpu["trl"] / count, 2),
                "polopt_cpu_seconds_per_step": round(cpu["polopt"] / count, 2),
                "speed_up": round(cpu["trl"] / cpu["polopt"], 2),
                "relative_difference_of_weights": apart,
            }),
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
