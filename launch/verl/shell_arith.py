"""Arithmetic of the shell: the expressions of `$((…))`, evaluated on 64-bit integers."""

import re
from collections.abc import Callable
from typing import NoReturn

__all__ = ["ArithError", "arithmetic"]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#[0-9a-zA-Z]+|0[xX][0-9a-fA-F]+|\d+)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<op>\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&^|]=|[-+*/%<>=!~&^|?:(),]))"
)
_BINARY: list[dict[str, Callable[[int, int], int]]] = [
    {"||": lambda a, b: int(bool(a) or bool(b))},
    {"&&": lambda a, b: int(bool(a) and bool(b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
    },
    {"<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63)},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: _divide(a, b), "%": lambda a, b: _modulo(a, b)},
]
_OPERATORS = {op: function for level in _BINARY for op, function in level.items()}
_MAX_LENGTH, _MAX_DEPTH = 2000, 40


class ArithError(ValueError):
    """The expression cannot be evaluated."""


def arithmetic(
    text: str, read: Callable[[str], int], write: Callable[[str, int], None] | None = None
) -> int:
    """Evaluate an arithmetic expression whose `$name`s are already replaced.

    Args:
        text: The expression; empty gives 0, as in the shell.
        read: Returns the value of a variable.
        write: Called for `=`, `+=`, `++` and the like.

    Raises:
        ArithError: If it is malformed, divides by zero, or leaves 64-bit integers.
    """
    if len(text) > _MAX_LENGTH:
        raise ArithError(
            f"the expression has {len(text)} characters, at most {_MAX_LENGTH} are read"
        )
    tokens, at = [], 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if not found:
            raise ArithError(f"cannot read {text[at:].strip()[:20]!r} in the arithmetic {text!r}")
        tokens.append(found.group().strip())
        at = found.end()
    return _Evaluator(text, tokens, read, write).result() if tokens else 0


class _Evaluator:
    def __init__(
        self,
        text: str,
        tokens: list[str],
        read: Callable[[str], int],
        write: Callable[[str, int], None] | None,
    ) -> None:
        self._text, self._tokens, self._at, self._depth = text, tokens, 0, 0
        self._read, self._write = read, write
        self._skipping = 0  # inside the branch that && || ?: do not take

    def result(self) -> int:
        value = self._comma()
        if self._at < len(self._tokens):
            self._fail()
        return value

    def _fail(self) -> NoReturn:
        found = self._tokens[self._at] if self._at < len(self._tokens) else "the end"
        raise ArithError(f"unexpected {found!r} in the arithmetic {self._text.strip()!r}")

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _eat(self, token: str) -> bool:
        if self._next() == token:
            self._at += 1
            return True
        return False

    def _comma(self) -> int:
        value = self._assignment()
        while self._eat(","):
            value = self._assignment()
        return value

    def _assignment(self) -> int:
        name = self._next()
        operator = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else ""
        if name.isidentifier() and operator.endswith("=") and operator not in _OPERATORS:
            self._at += 2
            value = self._assignment()
            if operator != "=":
                value = self._apply(operator[:-1], self._variable(name), value)
            return self._store(name, value)
        return self._ternary()

    def _ternary(self) -> int:
        test = self._binary(0)
        if not self._eat("?"):
            return test
        self._skipping += not test
        yes = self._assignment()
        self._skipping += bool(test) - (not test)
        if not self._eat(":"):
            self._fail()
        no = self._assignment()
        self._skipping -= bool(test)
        return yes if test else no

    def _binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self._power()
        value = self._binary(level + 1)
        while (operator := self._next()) in _BINARY[level]:
            self._at += 1
            skip = (operator == "&&" and not value) or (operator == "||" and bool(value))
            self._skipping += skip
            right = self._binary(level + 1)
            self._skipping -= skip
            value = self._apply(operator, value, right)
        return value

    def _power(self) -> int:
        value = self._unary()
        if not self._eat("**"):
            return value
        exponent = self._power()
        if self._skipping:
            return 0
        if exponent < 0 or exponent > 64:
            raise ArithError(f"the exponent {exponent} in {self._text.strip()!r} is out of range")
        return self._bounded(value**exponent)

    def _unary(self) -> int:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ArithError(f"the arithmetic {self._text.strip()[:40]!r} is nested too deeply")
        token = self._next()
        self._at += 1
        if token in ("+", "-", "!", "~"):
            value = self._unary()
            value = {"+": value, "-": -value, "!": int(not value), "~": ~value}[token]
        elif token in ("++", "--") and self._next().isidentifier():
            name = self._next()
            self._at += 1
            value = self._store(name, self._variable(name) + (1 if token == "++" else -1))
        elif token == "(":
            value = self._comma()
            if not self._eat(")"):
                self._fail()
        elif token.isidentifier():
            value = self._variable(token)
            for operator, step in (("++", 1), ("--", -1)):
                if self._eat(operator):
                    self._store(token, value + step)
        elif token[:1].isdigit():
            value = self._bounded(self._number(token))
        else:
            self._at -= 1
            self._fail()
        self._depth -= 1
        return value

    def _number(self, token: str) -> int:
        base, mark, digits = token.partition("#")
        try:
            if mark:
                return int(digits, int(base))
            if token[:2].lower() == "0x":
                return int(token, 16)
            return int(token, 8 if len(token) > 1 and token.startswith("0") else 10)
        except ValueError:
            raise ArithError(f"{token!r} is not a number of the shell") from None

    def _variable(self, name: str) -> int:
        return 0 if self._skipping else self._read(name)

    def _store(self, name: str, value: int) -> int:
        if self._write and not self._skipping:
            self._write(name, self._bounded(value))
        return value

    def _apply(self, operator: str, left: int, right: int) -> int:
        return 0 if self._skipping else self._bounded(_OPERATORS[operator](left, right))

    def _bounded(self, value: int) -> int:
        if not -(2**63) <= value < 2**63:
            raise ArithError(f"the arithmetic {self._text.strip()!r} leaves 64-bit integers")
        return value


def _divide(a: int, b: int) -> int:
    if b == 0:
        raise ArithError("division by zero")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _modulo(a: int, b: int) -> int:
    return a - b * _divide(a, b)
