"""Accuracy on held-out problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polopt.envs.text import TextTask

__all__ = ["Answers", "answer"]


@dataclass(frozen=True)
class Answers:
    """Completions of problems, and which are correct.

    Attributes:
        completions: N texts.
        correct: N flags.
    """

    completions: list[str]
    correct: list[bool]

    @property
    def accuracy(self) -> float:
        """Share of correct answers."""
        return sum(self.correct) / len(self.correct)


@torch.no_grad()
def answer(
    model: nn.Module,
    tokenizer: Any,  # noqa: ANN401
    task: TextTask,
    rows: Sequence[Mapping[str, Any]],
    *,
    sample: bool,
    max_new_tokens: int,
    batch_size: int = 256,
    seed: int = 0,
) -> Answers:
    """Let a model answer problems.

    Leaves the random state of the process and the mode of the model as they were.

    Args:
        model: A causal language model of transformers, not wrapped for training.
        tokenizer: Its tokenizer, padding on the left.
        task: Tells what is correct.
        rows: N problems; prompts are texts or conversations.
        sample: Draw at temperature 1 from the whole vocabulary; otherwise greedy.
        max_new_tokens: Longest answer.
        batch_size: Problems at a time.
        seed: Of the draws.
    """
    completions: list[str] = []
    training, device = model.training, next(model.parameters()).device
    model.eval()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            for start in range(0, len(rows), batch_size):
                prompts = [_prompt(row, tokenizer) for row in rows[start : start + batch_size]]
                inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
                choice = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
                output = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=max_new_tokens,
                    do_sample=sample,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                    **choice,
                )
                new = output[:, inputs["input_ids"].shape[1] :]
                completions += tokenizer.batch_decode(new, skip_special_tokens=True)
    finally:
        model.train(training)
    return Answers(completions, task.correct(rows, completions))


def _prompt(row: Mapping[str, Any], tokenizer: Any) -> str:  # noqa: ANN401
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
