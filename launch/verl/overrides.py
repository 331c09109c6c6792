"""Hydra's command line: from the words of a launch to keys and values.

Values are read by Hydra's own parser; see https://hydra.cc/docs/advanced/override_grammar.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from polopt.launch.verl import schema
from polopt.launch.verl.shell_state import Field, Unknowns
from polopt.launch.verl.shell_words import ShellError

__all__ = ["LOOKS_LIKE_OVERRIDE", "Override", "read_overrides"]

LOOKS_LIKE_OVERRIDE = re.compile(r"(?:\+\+|\+|~)?[\w@./$\-\ue000-\uf8ff]+=|~[\w.]+$")
_KEY = re.compile(r"(\+\+|\+|~)?([^=]*)(=?)(.*)", re.DOTALL)
_MARKED = re.compile("([\ue000-\uf8ff])")
_MAX_VALUE = 20_000


@dataclass
class Override:
    """One `key=value` of the command line.

    Attributes:
        key: As in the script.
        name: As in verl 0.9.1, if the key has moved since.
        prefix: `+`, `++`, `~` or nothing.
        value: The parsed value; unknown text in it is shown as the script writes it.
        text: The value as it stands on the command line.
        line: Line of the script; 0 for overrides given with `--set`.
        raw: The word as it is written there.
        asks: Names that the user can supply to make the value known.
        traps: What is wrong with it.
    """

    key: str
    name: str
    prefix: str
    value: Any
    text: str
    line: int
    raw: str
    asks: tuple[str, ...] = ()
    traps: list[str] = field(default_factory=list)


def read_overrides(words: list[Field], unknowns: Unknowns) -> tuple[list[Override], list[str]]:
    """Read the words after the module of a launch.

    Returns:
        The overrides in order, and remarks about words that are none.

    Raises:
        ModuleNotFoundError: If Hydra is not installed.
        ShellError: If a value is absurdly long.
    """
    found, remarks = [], []
    for word in words:
        shown = unknowns.show(word.text)
        if len(word.text) > _MAX_VALUE:
            raise ShellError(word.line, f"a value of {len(word.text)} characters is not read")
        if word.text in ("", "$", "\\"):
            continue
        if not word.text.startswith("~") and "=" not in word.text:
            key = schema.prefix_of(word.text)
            if key is None:
                asks = unknowns.asks(word.text)
                hint = f", give it with --set {asks[0]}=…" if asks else ""
                remarks.append(f"line {word.line}: {shown[:60]!r} is no override{hint}")
                continue
            item = _read(Field(f"{key}={word.text[len(key) :]}", word.line, word.raw), unknowns)
            item.traps.append(f"the copy lost its '=', read as {key}={word.text[len(key) :]}")
        else:
            item = _read(word, unknowns)
        found.append(item)
    return found, remarks


def _read(word: Field, unknowns: Unknowns) -> Override:
    match = _KEY.fullmatch(word.text)
    prefix, key, equals, text = match.groups() if match else ("", word.text, "", "")
    key = unknowns.show(key)
    item = Override(
        key=key,
        name=schema.canonical(key),
        prefix=prefix or "",
        value=None,
        text=unknowns.show(text),
        line=word.line,
        raw=word.raw,
        asks=unknowns.asks(word.text),
    )
    if item.prefix == "~" and not equals:
        return item
    item.value, problem = _value(text, unknowns)
    if problem:
        item.traps.append(problem)
    if item.value == "None" and text == "None":
        item.traps.append("None is the string 'None' in Hydra, null is the empty value")
        item.value = None
    return item


def _value(text: str, unknowns: Unknowns) -> tuple[Any, str]:
    parser = _parser()  # first: it says what to install
    from hydra.errors import HydraException

    tokens: dict[str, str] = {}

    def token(mark: "re.Match[str]") -> str:
        name = f"UNKNOWN{ord(mark.group()):X}Z"
        tokens[name] = mark.group()
        return name

    replaced = _MARKED.sub(token, text)
    try:
        parsed = parser.parse_override(f"k={replaced}")
        if parsed.is_sweep_override():
            problem = "a list of runs (Hydra's multirun), only its text is kept"
            return unknowns.show(text), problem
        value = parsed.value()
    except (HydraException, RecursionError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return unknowns.show(text), f"Hydra cannot read this value ({reason[:80]}): verl stops here"
    return _restore(value, tokens, unknowns), ""


def _restore(value: Any, tokens: Mapping[str, str], unknowns: Unknowns) -> Any:  # noqa: ANN401
    """Plain Python values, with the unknown text put back."""
    if isinstance(value, Mapping):
        return {str(k): _restore(v, tokens, unknowns) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_restore(v, tokens, unknowns) for v in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = getattr(value, "text", None)
    text = text if isinstance(text, str) else str(value)
    for name, mark in tokens.items():
        text = text.replace(name, mark)
    return unknowns.show(text)


@cache
def _parser() -> Any:  # noqa: ANN401
    try:
        from hydra.core.override_parser.overrides_parser import OverridesParser
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "import-verl reads values with Hydra's parser: pip install 'polopt[verl]'",
            name=error.name,
        ) from None
    return OverridesParser.create()
