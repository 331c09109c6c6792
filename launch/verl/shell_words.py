"""Words of shell source: quoting, and the expansions that stand in them.

Nothing is expanded or run here. A word is a tuple of parts: plain text, `$name` or `${…}`,
`$((…))`, and `$(…)`, backticks or `<(…)`, which are kept as text. The rules are those of
bash (https://www.gnu.org/software/bash/manual/bash.html#Quoting).
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Part", "Reader", "ShellError", "Word"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "f": "\f",
    "v": "\v",
}
_BREAKS = frozenset(" \t\n;&|()<>")
_MAX_DEPTH = 60


class ShellError(ValueError):
    """The source cannot be read as a shell script; the message starts with the line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


@dataclass(frozen=True)
class Part:
    """A piece of a word.

    Attributes:
        kind: `text`, `param` (the inside of `${…}`), `arith` (the inside of `$((…))`),
            `command` (a substitution, delimiters included) or `loose` (text out of an
            expansion, which is split).
        text: The text.
        quoted: Whether it stands in quotes: then it is neither split nor brace-expanded.
    """

    kind: Literal["text", "param", "arith", "command", "loose"]
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Word:
    """One word of a command, with its place in the source."""

    parts: tuple[Part, ...]
    line: int
    raw: str

    @property
    def literal(self) -> str | None:
        """The text of a word without quotes and expansions, else None."""
        if all(p.kind == "text" and not p.quoted for p in self.parts):
            return "".join(p.text for p in self.parts)
        return None


class Reader:
    """A position in shell source that moves over words.

    Args:
        source: The text.
        first_line: The number of its first line, for messages.
        depth: How deep this text is nested in substitutions of other texts.
    """

    def __init__(self, source: str, first_line: int = 1, depth: int = 0) -> None:
        self.source = source
        self.at = 0
        self.first_line = first_line
        self.depth = depth
        self._newlines = [i for i, c in enumerate(source) if c == "\n"]
        if depth > _MAX_DEPTH:
            raise ShellError(first_line, "expansions are nested too deeply")

    @property
    def line(self) -> int:
        """Number of the line at the position."""
        return self.line_of(self.at)

    def line_of(self, at: int) -> int:
        """Number of the line at index `at`."""
        return self.first_line + bisect_right(self._newlines, at - 1)

    def peek(self, text: str) -> bool:
        """Whether the source goes on with `text`."""
        return self.source.startswith(text, self.at)

    def skip_blanks(self) -> None:
        """Move over blanks, joined lines and a comment."""
        while self.at < len(self.source):
            if self.source[self.at] in " \t":
                self.at += 1
            elif self.peek("\\\n"):
                self.at += 2
            else:
                break
        if self.peek("#"):
            end = self.source.find("\n", self.at)
            self.at = len(self.source) if end < 0 else end

    def word(self, stop: frozenset[str] = _BREAKS) -> Word | None:
        """Read the word at the position, or None if there is none."""
        start, line = self.at, self.line
        parts: list[Part] = []
        while self.at < len(self.source):
            c = self.source[self.at]
            if self.peek("<(") or self.peek(">("):
                begin = self.at
                self.at += 2
                self._balance("(", ")", begin)
                parts.append(Part("command", self.source[begin : self.at]))
            elif c in stop:
                break
            else:
                self._piece(parts, quoted=False)
        if self.at == start:
            return None
        return Word(_joined(parts), line, self.source[start : self.at])

    def operand(self, *, quoted: bool) -> tuple[Part, ...]:
        """Read the whole source as the operand of an expansion such as `${X:-operand}`."""
        parts: list[Part] = []
        while self.at < len(self.source):
            if quoted and self.source[self.at] == "'":
                parts.append(Part("text", "'", True))
                self.at += 1
            else:
                self._piece(parts, quoted=quoted)
        return _joined(parts)

    def _piece(self, parts: list[Part], *, quoted: bool) -> None:
        """Read one character, quotation or expansion; `quoted`: inside double quotes."""
        c = self.source[self.at]
        if c == "\\":
            after = self.source[self.at + 1 : self.at + 2]
            self.at += 2
            if after == "\n":
                return
            keep = not after or (quoted and after not in '$`"\\}')
            parts.append(Part("text", "\\" + after if keep else after, True))
        elif c == "'":
            begin = self.at
            end = self.source.find("'", self.at + 1)
            if end < 0:
                raise ShellError(self.line_of(begin), "unbalanced single quote")
            parts.append(Part("text", self.source[begin + 1 : end], True))
            self.at = end + 1
        elif c == '"':
            self._double(parts)
        elif self.peek("$'") and not quoted:
            self._ansi(parts)
        elif self.peek('$"') and not quoted:
            self.at += 1
        elif c == "$":
            self._dollar(parts, quoted=quoted)
        elif c == "`":
            begin = self.at
            end = self.at + 1
            while end < len(self.source) and self.source[end] != "`":
                end += 2 if self.source[end] == "\\" else 1
            if end >= len(self.source):
                raise ShellError(self.line_of(begin), "unbalanced backtick")
            self.at = end + 1
            parts.append(Part("command", self.source[begin : self.at], quoted))
        else:
            parts.append(Part("text", c, quoted))
            self.at += 1

    def _double(self, parts: list[Part]) -> None:
        begin = self.at
        self.at += 1
        parts.append(Part("text", "", True))  # "" is an empty word, not no word
        while not self.peek('"'):
            if self.at >= len(self.source):
                raise ShellError(self.line_of(begin), "unbalanced double quote")
            if self.source[self.at] == "'":
                parts.append(Part("text", "'", True))
                self.at += 1
            else:
                self._piece(parts, quoted=True)
        self.at += 1

    def _ansi(self, parts: list[Part]) -> None:
        begin = self.at
        self.at += 2
        text = ""
        while not self.peek("'"):
            if self.at >= len(self.source):
                raise ShellError(self.line_of(begin), "unbalanced single quote")
            c = self.source[self.at]
            if c == "\\" and self.at + 1 < len(self.source):
                self.at += 1
                c = _ESCAPES.get(self.source[self.at], self.source[self.at])
            text += c
            self.at += 1
        self.at += 1
        parts.append(Part("text", text, True))

    def _dollar(self, parts: list[Part], *, quoted: bool) -> None:
        begin = self.at
        if self.peek("$((") and (end := self._arith_end()):
            parts.append(Part("arith", self.source[self.at + 3 : end - 2], quoted))
            self.at = end
        elif self.peek("$("):
            self.at += 2
            self._balance("(", ")", begin)
            parts.append(Part("command", self.source[begin : self.at], quoted))
        elif self.peek("${"):
            self.at += 2
            self._balance("{", "}", begin, quoted=quoted)
            parts.append(Part("param", self.source[begin + 2 : self.at - 1], quoted))
        elif found := _NAME.match(self.source, self.at + 1):
            self.at = found.end()
            parts.append(Part("param", found.group(), quoted))
        elif self.source[self.at + 1 : self.at + 2] in tuple("@*#?$!-0123456789"):
            self.at += 2
            parts.append(Part("param", self.source[self.at - 1], quoted))
        else:
            self.at += 1
            parts.append(Part("text", "$", quoted))

    def _arith_end(self) -> int:
        """Index after the `))` that closes the `$((` at the position, 0 if there is none."""
        depth, i = 0, self.at + 3
        while i < len(self.source):
            c = self.source[i]
            if c == "(":
                depth += 1
            elif c == ")":
                if depth == 0:
                    return i + 2 if self.source.startswith("))", i) else 0
                depth -= 1
            i += 1
        return 0

    def _balance(self, opening: str, closing: str, begin: int, *, quoted: bool = False) -> None:
        """Move behind the `closing` that belongs to the opening just passed."""
        depth = 1
        while depth:
            if self.at >= len(self.source):
                text = self.source[begin : begin + 2]
                raise ShellError(self.line_of(begin), f"unbalanced {text!r}")
            c = self.source[self.at]
            if c == "\\":
                self.at += 2
            elif c == "'":  # in pairs even inside of double quotes, where they stay
                end = self.source.find("'", self.at + 1)
                if end < 0:
                    raise ShellError(self.line, "unbalanced single quote")
                self.at = end + 1
            elif c == '"':
                self._nested(self._double)
            elif c == "$" and self.source[self.at + 1 : self.at + 2] in ("(", "{"):
                self._nested(lambda parts: self._dollar(parts, quoted=quoted))
            else:
                depth += (c == opening and opening != "{") - (c == closing)
                self.at += 1

    def _nested(self, read: Callable[[list[Part]], None]) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ShellError(self.line, "expansions are nested too deeply")
        read([])
        self.depth -= 1


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Merge neighbouring texts of the same kind of quoting."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and part.kind == last.kind == "text" and part.quoted == last.quoted:
            joined[-1] = Part("text", last.text + part.text, part.quoted)
        else:
            joined.append(part)
    return tuple(joined)
