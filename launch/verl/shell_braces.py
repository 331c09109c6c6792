"""Brace expansion: `a{b,c}` is `ab ac`, `{1..3}` is `1 2 3`."""

import re
from itertools import pairwise

from polopt.launch.verl.shell_words import Part, ShellError, Word

__all__ = ["braces"]

_MAX_WORDS = 5_000


def braces(word: Word) -> list[tuple[Part, ...]]:
    """Return the parts of every word that brace expansion makes of this one.

    Raises:
        ShellError: If it makes too many.
    """
    if not any(p.kind == "text" and not p.quoted and "{" in p.text for p in word.parts):
        return [word.parts]
    items: list[str | Part] = []
    for part in word.parts:
        items.extend(part.text if part.kind == "text" and not part.quoted else [part])
    return [_parts(found) for found in _expand_braces(items, word.line)]


def _expand_braces(items: list[str | Part], line: int) -> list[list[str | Part]]:
    for start, item in enumerate(items):
        if item != "{":
            continue
        depth, commas, end = 0, [start], None
        for i in range(start, len(items)):
            if items[i] == "{":
                depth += 1
            elif items[i] == "}":
                depth -= 1
                if depth == 0:
                    end = i
                    break
            elif items[i] == "," and depth == 1:
                commas.append(i)
        if end is None:
            continue
        options = _options(items, [*commas, end])
        if options is None:
            continue
        tails = _expand_braces(items[end + 1 :], line)
        heads = [h for option in options for h in _expand_braces(option, line)]
        if len(heads) * len(tails) > _MAX_WORDS:
            raise ShellError(line, "a brace expansion makes too many words")
        return [items[:start] + head + tail for head in heads for tail in tails]
    return [items]


def _options(items: list[str | Part], cuts: list[int]) -> list[list[str | Part]] | None:
    if len(cuts) > 2:
        return [items[a + 1 : b] for a, b in pairwise(cuts)]
    inside = items[cuts[0] + 1 : cuts[1]]
    text = "".join(c for c in inside if isinstance(c, str))
    found = re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})", text)
    if not found or len(text) != len(inside):
        return None
    first, last = int(found[1]), int(found[2])
    if abs(last - first) > _MAX_WORDS:
        return None
    step = 1 if last >= first else -1
    return [list(str(n)) for n in range(first, last + step, step)]


def _parts(items: list[str | Part]) -> tuple[Part, ...]:
    parts: list[Part] = []
    for item in items:
        if isinstance(item, Part):
            parts.append(item)
        elif parts and parts[-1].kind == "text" and not parts[-1].quoted:
            parts[-1] = Part("text", parts[-1].text + item)
        else:
            parts.append(Part("text", item))
    return tuple(parts)
