"""Rewards for the form of a completion: format, length, repetition."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polopt.envs.contract import text_of

__all__ = ["Length", "Repetition", "TextFormat"]


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """1 if a completion has the wanted form, else 0.

    Attributes:
        pattern: A regular expression that the whole text must match; `.` matches newlines.
        tags: Instead, tags that the text consists of, each once and in this order, with only
            blanks between them: `[think, answer]` is `<think>…</think> <answer>…</answer>`.
    """

    pattern: str | None = None
    tags: tuple[str, ...] = ()
    __name__ = "format"

    def __post_init__(self) -> None:
        if (self.pattern is None) == (not self.tags):
            raise ValueError("give TextFormat either a pattern or tags")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(
                f"pattern {self.pattern!r} is no regular expression: {error}"
            ) from error
        odd = [tag for tag in self.tags if not re.fullmatch(r"[\w-]+", tag)]
        if odd:
            raise ValueError(f"tags are names such as think, got {odd[0]!r}")

    def __call__(self, completions: Sequence[Any], **_: object) -> list[float]:
        """Score completions."""
        return [float(self._fits(text_of(completion))) for completion in completions]

    def _fits(self, text: str) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, text, re.DOTALL) is not None
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        if any(text.count(mark) != 1 for mark in marks):
            return False
        places = [text.index(mark) for mark in marks]
        outside = [text[: places[0]], text[places[-1] + len(marks[-1]) :]]
        outside += [
            text[places[i] + len(marks[i]) : places[i + 1]] for i in range(1, len(marks) - 1, 2)
        ]
        return places == sorted(places) and not "".join(outside).strip()


@dataclass(frozen=True, kw_only=True)
class Length:
    """DAPO's soft punishment of long answers: 0 up to `limit - cache` tokens, then down to −1.

    Source: https://arxiv.org/abs/2503.14476 eq. 13.

    Attributes:
        limit: Longest answer, tokens.
        cache: Width of the slope, tokens.
    """

    limit: int
    cache: int
    in_trainer = True  # nothing in it can hang
    __name__ = "length"

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.limit:
            raise ValueError(f"cache must be in [1, limit={self.limit}], got {self.cache}")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        """Score completions."""
        import torch

        from polopt.losses import soft_overlong

        length = torch.tensor([len(ids) for ids in completion_ids])
        return soft_overlong(length, limit=self.limit, cache=self.cache).tolist()


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Minus the share of n-grams of tokens that an answer has had before, in (−1, 0].

    Source: https://arxiv.org/abs/2502.03373 appendix C.2.

    Attributes:
        ngram: Tokens in an n-gram.
    """

    ngram: int = 3
    in_trainer = True
    __name__ = "repetition"

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ValueError(f"ngram must be at least 1, got {self.ngram}")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        """Score completions."""
        scores = []
        for ids in completion_ids:
            grams = list(zip(*(ids[i:] for i in range(self.ngram)), strict=False))
            scores.append(len(set(grams)) / len(grams) - 1.0 if grams else 0.0)
        return scores
