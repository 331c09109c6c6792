"""Expansion of words: parameters, arithmetic, braces and word splitting; no globbing."""

import re
from collections.abc import Callable, Sequence

from polopt.launch.verl.shell_arith import ArithError, arithmetic
from polopt.launch.verl.shell_braces import braces
from polopt.launch.verl.shell_state import HOME, PWD, Array, Field, State
from polopt.launch.verl.shell_words import Part, Reader, ShellError, Word

__all__ = ["Expander", "pattern"]

_PARAM = re.compile(
    r"(?P<prefix>[#!]?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)",
    re.DOTALL,
)
_DEFAULT = re.compile(r"(:?[-=+?])(.*)", re.DOTALL)
_PWD_COMMANDS = frozenset(("$(pwd)", "`pwd`", "$(pwd -P)", "$( pwd )"))
_MAX_TEXT, _MAX_FIELDS, _MAX_STARS = 20_000, 5_000, 6


def pattern(parts: Sequence[Part], text_of: Callable[[Part], str]) -> str:
    """Translate a glob pattern to a regular expression; quoted text is literal."""
    out = ""
    for part in parts:
        text = text_of(part)
        if part.quoted:
            out += re.escape(text)
            continue
        i = 0
        while i < len(text):
            c = text[i]
            close = text.find("]", i + 2) if c == "[" else -1
            if c in "*?":
                out += ".*" if c == "*" else "."
            elif close > 0:
                inside = text[i + 1 : close].replace("\\", r"\\").replace("[", r"\[")
                out += "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]"
                i = close
            else:
                out += re.escape(c)
            i += 1
    if out.count(".*") > _MAX_STARS:
        raise ValueError("the pattern has too many stars")
    re.compile(out)
    return out


class Expander:
    """Expands words in a state.

    Attributes:
        lenient: Read unset variables as empty, as tests of the shell do.
    """

    def __init__(self, state: State, *, lenient: bool = False, depth: int = 0) -> None:
        self.state = state
        self.lenient = lenient
        self.depth = depth

    def text(self, word: Word) -> str:
        """Expand to one string, without splitting (assignments, subjects of `case`)."""
        return self._sized(self._join(_home(word.parts), word.line), word.line)

    def fields(self, word: Word) -> list[Field]:
        """Expand to words of a command: braces, parameters, splitting."""
        found = [f for parts in braces(word) for f in self._fields(parts, word)]
        for item in found:
            self._sized(item.text, word.line)
        if len(found) > _MAX_FIELDS:
            raise ShellError(word.line, f"{word.raw[:40]!r} expands to {len(found)} words")
        return found

    def glob(self, word: Word) -> "re.Pattern[str]":
        """The word as a pattern, for `case` and `[[ … == … ]]`."""
        try:
            text = pattern(word.parts, lambda p: self._join([p], word.line))
            return re.compile(text, re.DOTALL)
        except (ValueError, re.error):
            raise ShellError(word.line, f"cannot read the pattern {word.raw[:60]!r}") from None

    def number(self, text: str, line: int) -> int | None:
        """Evaluate an arithmetic expression; None if something in it is unknown."""
        parts = Reader(text, line, self.depth + 1).operand(quoted=True)
        text = self._join(parts, line)
        if self.state.unknowns.within(text):
            return None
        unknown: list[str] = []

        def read(name: str, seen: tuple[str, ...] = ()) -> int:
            if name in seen:
                cycle = " -> ".join((*seen[seen.index(name) :], name))
                raise ShellError(line, f"variables refer to each other in a circle: {cycle}")
            value = self._scalar(name, line)
            if value is None or self.state.unknowns.within(value):
                if value is None and self.lenient and self.state.reads_empty:
                    return 0
                unknown.append(name)
                return 1
            return arithmetic(value, lambda n: read(n, (*seen, name)))

        def write(name: str, value: int) -> None:
            self.state.assign(name, str(value), line)

        try:
            value = arithmetic(text, read, write)
        except ArithError as error:
            if unknown:
                return None
            raise ShellError(line, str(error)) from None
        self._missing = tuple(dict.fromkeys(unknown))
        return None if unknown else value

    _missing: tuple[str, ...] = ()

    def _sized(self, text: str, line: int) -> str:
        if len(text) > _MAX_TEXT:
            raise ShellError(line, f"a word grows to {len(text)} characters")
        return text

    def _scalar(self, name: str, line: int) -> str | None:
        value = self.state.lookup(name, line)
        if isinstance(value, Array):
            return value["0"].text if "0" in value else None
        return value if isinstance(value, str) else None

    def _join(self, parts: Sequence[Part], line: int) -> str:
        return "".join(" ".join(f.text for f in self._part(p, line)[0]) for p in parts)

    def _fields(self, parts: Sequence[Part], word: Word) -> list[Field]:
        done: list[Field] = []
        current: str | None = None
        origin = word.line, word.raw

        def finish() -> None:
            nonlocal current
            if current is not None:
                done.append(Field(current, *origin))
            current = None

        parts = [p for part in _home(parts) for p in self._inline(part, word.line)]
        for part in parts:
            if part.kind == "text":
                current = (current or "") + part.text
                continue
            values, many = self._part(part, word.line)
            alone = all(p is part or (p.kind == "text" and not p.text) for p in parts)
            if part.quoted and many and values and alone:
                # "${A[@]}" alone: the elements keep the lines they were written on.
                done.extend(values)
                current = None
                continue
            if part.quoted and not many:
                current = (current or "") + " ".join(v.text for v in values)
            elif part.quoted and not values:
                current = current or None  # "$@" without arguments is no word
            elif part.quoted:
                for i, value in enumerate(values):
                    if i:
                        finish()
                    current = (current or "") + value.text
            else:
                for i, value in enumerate(values):
                    if i or value.text[:1].isspace():
                        finish()
                    pieces = value.text.split()
                    for j, piece in enumerate(pieces):
                        if j:
                            finish()
                        current = (current or "") + piece
                    if pieces and value.text[-1:].isspace():
                        finish()
        finish()
        return done

    def _inline(self, part: Part, line: int) -> Sequence[Part]:
        """The parts of the operand, where `${X:-operand}` stands for it outside of quotes.

        Quotes inside of the operand keep it from being split: `${X:-"a b"}` is one word.
        """
        found = _PARAM.fullmatch(part.text) if part.kind == "param" and not part.quoted else None
        default = _DEFAULT.fullmatch(found["rest"]) if found else None
        if not found or not default or found["prefix"] or found["index"] or default[1][-1] in "=?":
            return (part,)
        if found["name"] in "@*#":
            return (part,)
        text = self._one(found["name"], None, line)
        is_set = text is not None and (default[1][0] != ":" or text != "")
        if is_set is (default[1][-1] == "-"):
            return (part,)
        operand = _home(Reader(default[2], line, self.depth + 1).operand(quoted=False))
        loose = [Part("loose", p.text) if p.kind == "text" and not p.quoted else p for p in operand]
        return [p for inner in loose for p in self._inline(inner, line)]

    def _part(self, part: Part, line: int) -> tuple[list[Field], bool]:
        """Values of a part, and whether they are separate words even in quotes."""
        if part.kind in ("text", "loose"):
            return [Field(part.text, line, part.text)], False
        if part.kind == "arith":
            value = self.number(part.text, line)
            if value is None:
                asks = self._missing or self.state.unknowns.asks(
                    self._join(Reader(part.text, line, self.depth + 1).operand(quoted=True), line)
                )
                text = self.state.unknowns.mark(f"$(({part.text}))", asks, line)
            else:
                text = str(value)
            return [Field(text, line, part.text)], False
        if part.kind == "command":
            return [Field(self._command(part.text, line), line, part.text)], False
        return self._param(part.text, line, quoted=part.quoted)

    def _command(self, text: str, line: int) -> str:
        if text in _PWD_COMMANDS:
            return PWD
        name = " ".join(text.split())  # one line, as it is asked for
        given = self.state.supplied(name)
        return given if given is not None else self.state.unknowns.mark(text, (name,), line)

    def _param(self, inner: str, line: int, *, quoted: bool) -> tuple[list[Field], bool]:
        if inner == "#":
            return [Field(self._count(line), line, inner)], False
        found = _PARAM.fullmatch(inner) if inner != "!" else None
        if not found:
            return [Field(self._odd(inner, line), line, inner)], False
        name, index, rest, prefix = found["name"], found["index"], found["rest"], found["prefix"]
        many = name in "@*" or index in ("@", "*")
        if many:
            values = self._all(name, line)
            if prefix == "#":
                return [Field(str(len(values)), line, inner)], False
            if prefix == "!":
                array = self.state.lookup(name, line)
                keys = list(array) if isinstance(array, Array) else []
                return [Field(k, line, inner) for k in keys], True
            if rest.startswith(":") and rest[1:2] not in "-=+?":
                head = [Field(self._join([Part("param", "0")], line), line, inner)]
                values = self._slice(head + values if name in "@*" else values, rest[1:], line)
            elif default := _DEFAULT.fullmatch(rest):
                text = "".join(v.text for v in values) if values else None
                chosen = self._default(name, text, default[1], default[2], line, quoted=quoted)
                values = values if chosen == text and values else [Field(chosen, line, inner)]
                values = [v for v in values if v.text or len(values) > 1]
            elif rest:
                values = [v._replace(text=self._edit(v.text, rest, inner, line)) for v in values]
            separate = (index or name) == "@"
            if quoted and not separate:
                return [Field(" ".join(v.text for v in values), line, inner)], False
            return values, True
        text = self._one(name, index, line)
        if prefix == "!" and text is not None:
            text = self._one(text, None, line) if text.isidentifier() else self._odd(inner, line)
        if prefix == "#":
            if text is not None and self.state.unknowns.within(text):
                text = self._odd(inner, line)
            else:
                text = str(len(text or ""))
        elif default := _DEFAULT.fullmatch(rest):
            text = self._default(name, text, default[1], default[2], line, quoted=quoted)
        else:
            if text is None:
                text = self._unset(name, line)
            if rest:
                text = self._edit(text, rest, inner, line)
        return [Field(text, line, inner)], False

    def _all(self, name: str, line: int) -> list[Field]:
        if name in "@*":
            return list(self._arguments())
        value = self.state.lookup(name, line)
        if isinstance(value, Array):
            return list(value.values())
        return [Field(value, line, name)] if isinstance(value, str) else []

    def _arguments(self) -> list[Field]:
        if self.state.arguments is not None:
            return self.state.arguments
        found: list[Field] = []
        start = self.state.shifted + 1
        while (value := self.state.supplied(str(start + len(found)))) is not None:
            found.append(Field(value, 0, value))
        return found

    def _count(self, line: int) -> str:
        count = len(self._arguments())
        if not count and self.state.arguments is None and not self.state.reads_empty:
            return self.state.unknowns.mark("$#", ("1",), line)
        return str(count)

    def _one(self, name: str, index: str | None, line: int) -> str | None:
        if re.fullmatch(r"[0-9]{1,4}", name) and name != "0":
            if self.state.arguments is None:
                return self.state.supplied(str(int(name) + self.state.shifted))
            arguments = self._arguments()
            return arguments[int(name) - 1].text if int(name) <= len(arguments) else ""
        if index is None:
            return self._scalar(name, line)
        value = self.state.lookup(name, line)
        if not isinstance(value, Array):
            return value if isinstance(value, str) and index == "0" else None
        key = self._join(Reader(index, line, self.depth + 1).operand(quoted=True), line)
        if key not in value:
            try:
                number = self.number(index, line)
            except ShellError:
                return None
            if number is None:
                return self._odd(f"{name}[{index}]", line)
            key = str(number if number >= 0 else len(value) + number)
        return value[key].text if key in value else None

    def _unset(self, name: str, line: int) -> str:
        if self.lenient and self.state.reads_empty:
            self.state.note(line, f"{name} is not set in the script; the test reads it as empty")
            return ""
        asks = str(int(name) + self.state.shifted) if re.fullmatch(r"[0-9]{1,4}", name) else name
        return self.state.unknowns.mark(f"${{{name}}}", (asks,), line)

    def _odd(self, inner: str, line: int) -> str:
        """An expansion that is not evaluated."""
        found = re.search(r"[A-Za-z_]\w*", inner)
        name = " ".join(f"${{{inner}}}".split())
        asks = (found.group(),) if found else (name,)
        given = self.state.supplied(name)
        return given if given is not None else self.state.unknowns.mark(f"${{{inner}}}", asks, line)

    def _default(
        self, name: str, text: str | None, operator: str, operand: str, line: int, *, quoted: bool
    ) -> str:
        is_set = text is not None and (operator[0] != ":" or text != "")
        if operator[-1] == "+":
            return self._operand(operand, line, quoted=quoted) if is_set else ""
        if is_set:
            return text or ""
        if operator[-1] == "?":
            return self.state.unknowns.mark(f"${{{name}}}", (name,), line)
        text = self._operand(operand, line, quoted=quoted)
        if operator[-1] == "=":
            self.state.assign(name, text, line)
        return text

    def _operand(self, text: str, line: int, *, quoted: bool) -> str:
        parts = _home(Reader(text, line, self.depth + 1).operand(quoted=quoted))
        return Expander(self.state, lenient=self.lenient, depth=self.depth + 1)._join(parts, line)

    def _slice(self, values: list[Field], rest: str, line: int) -> list[Field]:
        offset, _, length = rest.partition(":")
        start, size = self.number(offset, line), self.number(length, line) if length else None
        if start is None:
            raise ShellError(line, f"cannot evaluate the slice {rest!r}")
        return values[max(start, 0) :][: size if size is None or size >= 0 else None]

    def _edit(self, text: str, rest: str, inner: str, line: int) -> str:
        """Apply `#`, `%`, `/`, `^`, `,` or `:offset:length`."""
        marked = bool(self.state.unknowns.within(text))
        if rest.startswith("##") and marked:
            shorter = self._strip(text, "##", rest[2:], line)
            return shorter if not self.state.unknowns.within(shorter) else self._odd(inner, line)
        if marked:
            return self._odd(inner, line)
        for operator in ("##", "#", "%%", "%"):
            if rest.startswith(operator):
                return self._strip(text, operator, rest[len(operator) :], line)
        if rest.startswith("/"):
            return self._replace(text, rest[1:], line)
        if rest in ("^^", ",,"):
            return text.upper() if rest == "^^" else text.lower()
        if rest in ("^", ","):
            return (text[:1].upper() if rest == "^" else text[:1].lower()) + text[1:]
        if rest.startswith(":"):
            offset, _, length = rest[1:].partition(":")
            start = self.number(offset, line)
            size = self.number(length, line) if length else None
            if start is None or (length and size is None):
                return self._odd(inner, line)
            start = start if start >= 0 else len(text) + start
            if start < 0:
                return ""
            return (
                text[start:] if size is None else text[start : start + size if size >= 0 else size]
            )
        return self._odd(inner, line)

    def _regex(self, text: str, line: int) -> "re.Pattern[str]":
        parts = Reader(text, line, self.depth + 1).operand(quoted=False)
        try:
            return re.compile(pattern(parts, lambda p: self._join([p], line)), re.DOTALL)
        except (ValueError, re.error):
            raise ShellError(line, f"cannot read the pattern {text[:60]!r}") from None

    def _strip(self, text: str, operator: str, glob: str, line: int) -> str:
        regex, size = self._regex(glob, line), len(text)
        cuts = range(size + 1) if operator in ("#", "%%") else range(size, -1, -1)
        for cut in cuts:
            if operator[0] == "#" and regex.fullmatch(text, 0, cut):
                return text[cut:]
            if operator[0] == "%" and regex.fullmatch(text, cut):
                return text[:cut]
        return text

    def _replace(self, text: str, rest: str, line: int) -> str:
        kind = rest[:1] if rest[:1] in ("/", "#", "%") else ""
        body = rest[len(kind) :]
        cut = re.search(r"(?<!\\)/", body)
        glob, new = (body[: cut.start()], body[cut.end() :]) if cut else (body, "")
        regex = self._regex(glob, line)
        new = self._operand(new, line, quoted=False)
        if kind in ("#", "%"):
            anchored = re.compile(
                ("" if kind == "#" else "(?:") + regex.pattern + ("" if kind == "#" else r")\Z"),
                re.DOTALL,
            )
            found = anchored.match(text) if kind == "#" else anchored.search(text)
            return text[: found.start()] + new + text[found.end() :] if found else text
        if not glob:
            return text
        return regex.sub(lambda _: new, text, count=0 if kind == "/" else 1)


def _home(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Replace a tilde at the start: `~` alone, or before a slash."""
    first = parts[0] if parts else None
    if first is None or first.kind != "text" or first.quoted or not first.text.startswith("~"):
        return tuple(parts)
    if first.text[1:2] == "/" or (first.text == "~" and len(parts) == 1):
        return (Part("text", HOME + first.text[1:]), *parts[1:])
    return tuple(parts)
