"""The tree of a shell script: what `shell_syntax` makes and `shell_run` walks over."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from polopt.launch.verl.shell_words import Word

__all__ = [
    "AndOr",
    "Arith",
    "Assign",
    "Case",
    "Command",
    "Function",
    "Group",
    "If",
    "Loop",
    "Pipeline",
    "Simple",
    "Test",
]


@dataclass(frozen=True)
class Assign:
    """`name=value`, `name+=value`, `name[index]=value`; a list is an array."""

    name: str
    value: Word | list[Word]
    append: bool
    index: str | None
    line: int


@dataclass(frozen=True)
class Simple:
    """Assignments and words; redirections are dropped."""

    line: int
    assigns: list[Assign]
    words: "list[Word | Assign]"


@dataclass(frozen=True)
class If:
    """`if … then … elif … else … fi`."""

    line: int
    clauses: "list[tuple[list[AndOr], list[AndOr]]]"
    orelse: "list[AndOr]"


@dataclass(frozen=True)
class Loop:
    """`for name in words`, or `while`/`until` (then `test` is set)."""

    line: int
    kind: Literal["for", "while", "until"]
    body: "list[AndOr]"
    name: str = ""
    words: list[Word] | None = None
    test: "list[AndOr] | None" = None
    header: str = ""  # the three expressions of `for ((…))`


@dataclass(frozen=True)
class Case:
    """`case subject in pattern) … esac`."""

    line: int
    subject: Word
    arms: "list[tuple[list[Word], list[AndOr]]]"


@dataclass(frozen=True)
class Function:
    """`name() { … }`."""

    line: int
    name: str
    body: "Command"


@dataclass(frozen=True)
class Group:
    """`{ … }` or `( … )`."""

    line: int
    body: "list[AndOr]"
    subshell: bool


@dataclass(frozen=True)
class Arith:
    """`((expression))`."""

    line: int
    text: str


@dataclass(frozen=True)
class Test:
    """`[[ … ]]`."""

    line: int
    words: list[Word]


Command: TypeAlias = Simple | If | Loop | Case | Function | Group | Arith | Test


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`."""

    line: int
    commands: list[Command]
    negated: bool


@dataclass(frozen=True)
class AndOr:
    """Pipelines joined by `&&` and `||`; `links[i]` stands before `items[i + 1]`."""

    items: list[Pipeline]
    links: list[str]
