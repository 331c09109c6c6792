"""Tests of the shell, `[ … ]` and `[[ … ]]`, as far as they are about known text."""

import re
from collections.abc import Callable, Sequence

from polopt.launch.verl.shell_arith import ArithError, arithmetic
from polopt.launch.verl.shell_expand import Expander
from polopt.launch.verl.shell_state import State
from polopt.launch.verl.shell_words import ShellError, Word

__all__ = ["bracket_test", "double_test"]

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_PLAIN_REGEX = re.compile(r"\^?[\w ./:-]*\$?")
Tri = bool | None


def bracket_test(state: State, words: Sequence[str]) -> Tri:
    """Evaluate the words of `test` or `[`; None where the answer needs the machine."""
    words = list(words)
    if words[-1:] == ["]"]:
        words.pop()
    for link, join in (("-o", _either), ("-a", _both)):
        if link in words and len(words) > 3:
            at = words.index(link)
            return join(bracket_test(state, words[:at]), bracket_test(state, words[at + 1 :]))
    if words[:1] == ["!"]:
        return _not(bracket_test(state, words[1:]))
    if len(words) == 3:
        return _compare(state, words[0], words[1], words[2])
    if len(words) == 2:
        return _unary(state, words[0], words[1])
    return bool(words and words[0]) if len(words) <= 1 else None


def double_test(state: State, words: Sequence[Word]) -> Tri:
    """Evaluate the words between `[[` and `]]`."""
    for link, join in (("||", _either), ("&&", _both)):
        depth = 0
        for at, word in enumerate(words):
            depth += {"(": 1, ")": -1}.get(word.raw, 0)
            if word.literal == link and depth == 0:
                return join(double_test(state, words[:at]), double_test(state, words[at + 1 :]))
    if words and words[0].literal == "!":
        return _not(double_test(state, words[1:]))
    if len(words) > 2 and words[0].literal == "(" and words[-1].literal == ")":
        return double_test(state, words[1:-1])
    expander = Expander(state, lenient=True)
    if len(words) == 2 and (words[0].literal or "").startswith("-"):
        return _unary(state, words[0].literal or "", expander.text(words[1]))
    if len(words) == 1:
        return _unary(state, "-n", expander.text(words[0]))
    if len(words) != 3:
        return None
    left, operator = expander.text(words[0]), words[1].literal or ""
    if operator in ("==", "=", "!="):
        right = expander.text(words[2])
        if state.unknowns.within(left + right):
            return _unknown(state, left + right)
        same = bool(expander.glob(words[2]).fullmatch(left))
        return same if operator != "!=" else not same
    if operator == "=~":
        right = expander.text(words[2])
        if state.unknowns.within(left + right):
            return _unknown(state, left + right)
        if all(p.quoted for p in words[2].parts if p.text):
            return right in left
        return bool(re.search(right, left)) if _PLAIN_REGEX.fullmatch(right) else None
    return _compare(state, left, operator, expander.text(words[2]))


def _unary(state: State, operator: str, text: str) -> Tri:
    state.unknowns.why = state.unknowns.asks(text)
    if operator in ("-z", "-n"):
        known = "".join(c for c in text if not state.unknowns.within(c))
        if not known and text:
            return None
        return bool(text) == (operator == "-n")
    if operator == "-v":
        return text in state.variables or state.supplied(text) is not None
    if operator == "!":
        return not text if not state.unknowns.within(text) else None
    return None  # files and terminals


def _compare(state: State, left: str, operator: str, right: str) -> Tri:
    if state.unknowns.within(left + right):
        return _unknown(state, left + right)
    if operator in ("=", "=="):
        return left == right
    if operator == "!=":
        return left != right
    if operator in ("<", ">"):
        return left < right if operator == "<" else left > right
    if operator in _NUMBERS:
        try:
            return _NUMBERS[operator](_number(state, left), _number(state, right))
        except ArithError as error:
            raise ShellError(0, str(error)) from None
    return None


def _unknown(state: State, text: str) -> None:
    """Note the names that would decide the test."""
    state.unknowns.why = state.unknowns.asks(text)


def _number(state: State, text: str) -> int:
    def read(name: str) -> int:
        value = state.variables.get(name)
        known = isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value)
        return int(value) if known and isinstance(value, str) else 0

    return arithmetic(text, read)


def _not(value: Tri) -> Tri:
    return None if value is None else not value


def _both(a: Tri, b: Tri) -> Tri:
    if a is False or b is False:
        return False
    return None if a is None or b is None else True


def _either(a: Tri, b: Tri) -> Tri:
    if a or b:
        return True
    return None if a is None or b is None else False
