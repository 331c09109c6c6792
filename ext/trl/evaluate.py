"""Accuracy on held-out problems."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polopt.envs.text import TextTask

__all__ = ["Answers", "Problem", "answer", "judge", "report", "scores"]


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


@dataclass(frozen=True)
class Problem:
    """One problem with its answers judged.

    Attributes:
        source: Where the problem comes from, or none.
        greedy: Whether the greedy answer is correct.
        correct: Whether each of n sampled answers is.
        answers: What the n sampled answers come to, as text.
    """

    source: str | None
    greedy: bool
    correct: list[bool]
    answers: list[str]


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


def judge(
    model: nn.Module,
    tokenizer: Any,  # noqa: ANN401
    task: TextTask,
    rows: Sequence[Mapping[str, Any]],
    *,
    samples: int,
    max_new_tokens: int,
    seed: int,
) -> tuple[list[Problem], Answers, Answers]:
    """Let a model answer problems greedily and by sampling.

    Args:
        model: As for `answer`, and so the others.
        tokenizer: Its tokenizer.
        task: Tells what is correct.
        rows: N problems; `data_source` is their source.
        samples: Sampled answers to each.
        max_new_tokens: Longest answer.
        seed: Of the draws.

    Returns:
        The N problems, the N greedy answers, and the N · `samples` sampled ones.
    """
    greedy = answer(model, tokenizer, task, rows, sample=False, max_new_tokens=max_new_tokens)
    drawn = answer(
        model, tokenizer, task, [row for row in rows for _ in range(samples)],
        sample=True, max_new_tokens=max_new_tokens, seed=seed,
    )  # fmt: skip
    finals = [task.final_answer(text) for text in drawn.completions]
    problems = []
    for i, row in enumerate(rows):
        cut = slice(i * samples, (i + 1) * samples)
        source = str(row["data_source"]) if "data_source" in row else None
        problems.append(Problem(source, greedy.correct[i], drawn.correct[cut], finals[cut]))
    return problems, greedy, drawn


def _prompt(row: Mapping[str, Any], tokenizer: Any) -> str:  # noqa: ANN401
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)


def scores(correct: Sequence[Sequence[bool]], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return what n sampled answers to each of N problems say about a model.

    `mean@n` is the share of correct answers, `pass@k` the chance that at least one of k drawn
    answers is correct (unbiased, https://arxiv.org/abs/2107.03374), and `majority@n` the share
    of problems whose most frequent answer is correct. Answers are equal if their stripped texts
    are; a tie counts as the share of the tied answers that are correct, and an answer that was
    judged in two ways (the same number, once in the wrong format) as the share judged correct.

    Args:
        correct: N lists of n flags.
        answers: N lists of n texts, for example from `TextTask.final_answer`.

    Returns:
        `mean@n`, `pass@k` for the powers of two below n and for n, and `majority@n`.
    """
    n = len(correct[0])
    hits = [sum(flags) for flags in correct]
    out = {f"mean@{n}": sum(hits) / (n * len(hits))}
    for k in [*(2**i for i in range(1, 31) if 2**i < n), n]:
        missed = [math.comb(n - c, k) / math.comb(n, k) for c in hits]
        out[f"pass@{k}"] = 1.0 - sum(missed) / len(missed)
    votes = [_majority(f, texts) for f, texts in zip(correct, answers, strict=True)]
    out[f"majority@{n}"] = sum(votes) / len(votes)
    return out


def report(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the accuracy of greedy answers and `scores`, over all problems and per source.

    Returns:
        `greedy` and what `scores` returns; with sources also `sources`: by name the same, and
        `problems`, how many.
    """

    def result(part: Sequence[Problem]) -> dict[str, float]:
        sampled = scores([p.correct for p in part], [p.answers for p in part])
        return {"greedy": sum(p.greedy for p in part) / len(part), **sampled}

    parts: dict[str, list[Problem]] = {}
    for problem in problems:
        if problem.source is not None:
            parts.setdefault(problem.source, []).append(problem)
    out: dict[str, Any] = result(problems)
    if parts:
        out["sources"] = {
            name: {"problems": len(part), **result(part)} for name, part in parts.items()
        }
    return out


def _majority(correct: Sequence[bool], texts: Sequence[str]) -> float:
    texts = [text.strip() for text in texts]
    counts = Counter(texts)
    most = max(counts.values())
    right = Counter(text for text, flag in zip(texts, correct, strict=True) if flag)
    tied = [right[text] / count for text, count in counts.items() if count == most]
    return sum(tied) / len(tied)
