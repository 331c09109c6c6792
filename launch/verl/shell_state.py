"""What is known while a script is read: variables, and what could not be known."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from polopt.launch.verl.shell_tree import Command
from polopt.launch.verl.shell_words import ShellError

__all__ = [
    "HOME",
    "PWD",
    "Array",
    "Conflict",
    "Field",
    "State",
    "Unknown",
    "Unknowns",
    "Value",
    "set_option",
]

# Unknown text stands in strings as one private-use character each.
HOME, PWD, _FIRST, _LAST = "\ue000", "\ue001", 0xE002, 0xF8FF


class Field(NamedTuple):
    """A word after expansion, with the place where its text was written."""

    text: str
    line: int
    raw: str


class Array(dict[str, Field]):
    """An array of the shell; indexed ones have decimal keys."""

    def append(self, value: Field) -> None:
        """Add an element behind the last."""
        numbers = [int(k) for k in self if k.isdigit()]
        self[str(max(numbers, default=-1) + 1)] = value


class Conflict(NamedTuple):
    """An array that has different elements depending on a test that cannot be evaluated."""

    line: int
    asks: tuple[str, ...]


Value: TypeAlias = str | Array | Conflict


def set_option(name: str) -> str:
    """How the user supplies a value, as it is typed in a shell."""
    return (
        f"--set {name}=…" if re.fullmatch(r"[\w.]+", name) else f"--set {shlex.quote(name + '=…')}"
    )


class Unknown(NamedTuple):
    """Text that only running the script would give.

    Attributes:
        text: How the script writes it, such as `$(hostname)` or `${NODES}`.
        asks: The names by which the user can supply it.
        line: Where it was met first.
    """

    text: str
    asks: tuple[str, ...]
    line: int


class Unknowns:
    """The table behind the private-use characters.

    Attributes:
        why: Names that would have decided the last test that could not be evaluated.
    """

    def __init__(self) -> None:
        self.why: tuple[str, ...] = ()
        self._marks: dict[tuple[str, tuple[str, ...]], str] = {}
        self._table: dict[str, Unknown] = {}

    def mark(self, text: str, asks: tuple[str, ...], line: int) -> str:
        """Return the character that stands for this unknown text."""
        key = (text, asks)
        if key not in self._marks:
            if _FIRST + len(self._table) > _LAST:
                raise ShellError(line, "too many values are unknown")
            mark = chr(_FIRST + len(self._table))
            self._marks[key], self._table[mark] = mark, Unknown(text, asks, line)
        return self._marks[key]

    def within(self, text: str) -> list[Unknown]:
        """The unknowns in a text, the folders HOME and PWD excepted."""
        return [self._table[c] for c in dict.fromkeys(text) if c in self._table]

    def asks(self, text: str) -> tuple[str, ...]:
        """The names to supply for a text to become known."""
        return tuple(dict.fromkeys(name for u in self.within(text) for name in u.asks))

    def show(self, text: str) -> str:
        """The text as a reader of the report should see it: unknowns as they were written."""
        for mark, short, long in ((HOME, "~", "$HOME"), (PWD, ".", "$PWD")):
            if text == mark or text.startswith(mark + "/"):
                text = short + text[1:]
            text = text.replace(mark, long)
        return "".join(self._table[c].text if c in self._table else c for c in text)


@dataclass
class State:
    """Variables, functions and arguments at one point of the script.

    Attributes:
        given: Values from the command line; they stand for the environment.
        unknowns: Shared by all states of one script.
        notes: Remarks for the report, as (line, text); shared.
        used: Names of `given` that the script has read; shared.
        arguments: Those of the function that runs; None: those of the script.
        shifted: How many arguments of the script `shift` has dropped.
        reads_empty: Whether tests read what is not set as empty; otherwise they are unknown.
        ended: Whether the script or function has ended, and how.
    """

    given: Mapping[str, str]
    unknowns: Unknowns = field(default_factory=Unknowns)
    notes: list[tuple[int, str]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    variables: dict[str, Value] = field(default_factory=dict)
    functions: dict[str, Command] = field(default_factory=dict)
    arguments: list[Field] | None = None
    shifted: int = 0
    reads_empty: bool = True
    ended: Literal["", "return", "exit"] = ""

    def fork(self) -> "State":
        """A copy whose variables change independently."""
        variables = {k: Array(v) if isinstance(v, Array) else v for k, v in self.variables.items()}
        return State(
            self.given,
            self.unknowns,
            self.notes,
            self.used,
            variables,
            dict(self.functions),
            self.arguments,
            self.shifted,
            self.reads_empty,
            self.ended,
        )

    def adopt(self, other: "State") -> None:
        """Become a copy of `other`."""
        self.variables, self.functions = other.variables, other.functions
        self.arguments, self.shifted = other.arguments, other.shifted
        self.ended = other.ended

    def merge(self, one: "State", two: "State", line: int) -> None:
        """Keep what two branches agree on; what differs becomes unknown."""
        if one.ended or two.ended:
            self.adopt(two if one.ended == "exit" or not two.ended else one)
            return
        self.adopt(one)
        for name in list(dict.fromkeys([*one.variables, *two.variables])):
            left, right = one.variables.get(name), two.variables.get(name)
            if left == right:
                continue
            if isinstance(left, str | None) and isinstance(right, str | None):
                if name in self.given:
                    self.used.add(name)
                    self.variables[name] = self.given[name]
                else:
                    asks = (*(self.unknowns.why or (f"line{line}",)), name)
                    self.variables[name] = self.unknowns.mark(f"${{{name}}}", asks, line)
            else:
                self.variables[name] = Conflict(line, self.unknowns.why)

    def note(self, line: int, text: str) -> None:
        """Add a remark once."""
        if (line, text) not in self.notes:
            self.notes.append((line, text))

    def supplied(self, name: str) -> str | None:
        """The value from the command line, if there is one."""
        if name in self.given:
            self.used.add(name)
            return self.given[name]
        return None

    def lookup(self, name: str, line: int) -> Value | None:
        """The value of a variable, None if it is not set."""
        if name in self.variables:
            value = self.variables[name]
            if isinstance(value, Conflict):
                test = f"{name} depends on the test on line {value.line}, "
                if value.asks:
                    sets = " ".join(map(set_option, value.asks))
                    raise ShellError(line, f"{test}which needs what is unknown: supply {sets}")
                raise ShellError(
                    line,
                    f"{test}which needs the machine; say how it turns out with "
                    f"--set line{value.line}=true or =false",
                )
            return value
        given = self.supplied(name)
        if given is not None:
            return given
        return {"HOME": HOME, "PWD": PWD}.get(name)

    def assign(self, name: str, value: Value, line: int) -> None:
        """Set a variable; a value that cannot be known is replaced by a given one."""
        if isinstance(value, str) and self.unknowns.within(value):
            given = self.supplied(name)
            if given is not None:
                value = given
            elif len(value) == 1:
                value = self.unknowns.mark(self.unknowns.within(value)[0].text, (name,), line)
        self.variables[name] = value
