"""Final answers in texts: where they stand, for rewards and for majority votes."""

import re

__all__ = ["after_hashes", "after_word", "in_tags", "last_boxed"]

_HASHES = re.compile(r"####\s*\$?(-?[0-9.,]+)")


def after_hashes(text: str) -> str | None:
    """Return the number behind the last `####`, without commas, or None (GSM8K)."""
    found = _HASHES.findall(text)
    return found[-1].replace(",", "").rstrip(".") if found else None


def after_word(text: str, word: str) -> str | None:
    """Return the rest of the line behind the last `word:`, in any case, or None."""
    found = re.findall(rf"(?i){re.escape(word)}\s*:\s*([^\n]+)", text)
    return found[-1].strip().strip("$").strip() if found else None


def in_tags(text: str, tag: str) -> str | None:
    """Return what stands in the last `<tag>…</tag>`, or None."""
    _, opened, rest = text.rpartition(f"<{tag}>")
    inner, closed, _ = rest.partition(f"</{tag}>")
    return inner.strip() if opened and closed else None


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{…}`, or None if there is none or it is open."""
    _, found, rest = text.rpartition(r"\boxed{")
    depth = 1
    for i, sign in enumerate(rest if found else ""):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return rest[:i].strip()
    return None
