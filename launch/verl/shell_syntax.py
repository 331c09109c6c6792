"""A parser for the commands of a shell script: source to a tree, nothing is run."""

from polopt.launch.verl.shell_tree import (
    AndOr,
    Arith,
    Assign,
    Case,
    Command,
    Function,
    Group,
    If,
    Loop,
    Pipeline,
    Simple,
    Test,
)
from polopt.launch.verl.shell_words import Reader, ShellError, Word

__all__ = ["parse"]

_MAX_NESTING = 100


def parse(source: str, first_line: int = 1, depth: int = 0) -> list[AndOr]:
    """Parse a script.

    Args:
        source: The script.
        first_line: The number of its first line, for messages.
        depth: How deep it is nested in other sources (`eval`, `bash -c`).

    Raises:
        ShellError: If it is not a shell script.
    """
    return _Parser(source, first_line, depth).script()


class _Parser(Reader):
    def __init__(self, source: str, first_line: int, depth: int) -> None:
        super().__init__(source, first_line, depth)
        self._heredocs: list[tuple[str, bool, int]] = []
        self._nesting = 0

    def script(self) -> list[AndOr]:
        commands = self._list(())
        if self.at < len(self.source):
            raise ShellError(self.line, f"unexpected {self.source[self.at]!r}")
        if self._heredocs:
            tag, _, line = self._heredocs[0]
            raise ShellError(line, f"the here-document has no closing {tag!r}")
        return commands

    def _newline(self) -> None:
        self.at += 1
        for tag, indented, line in self._heredocs:
            while True:
                if self.at >= len(self.source):
                    raise ShellError(line, f"the here-document has no closing {tag!r}")
                end = self.source.find("\n", self.at)
                end = len(self.source) if end < 0 else end
                text = self.source[self.at : end]
                self.at = min(end + 1, len(self.source))
                if (text.lstrip("\t") if indented else text) == tag:
                    break
        self._heredocs.clear()

    def _separators(self) -> None:
        while True:
            self.skip_blanks()
            if self.peek("\n"):
                self._newline()
            elif self.peek(";") and not self.peek(";;") and not self.peek(";&"):
                self.at += 1
            else:
                return

    def _reserved(self) -> str:
        """The reserved word at the position, without moving."""
        if self.peek("((") or self.peek("("):
            return ""
        start = self.at
        word = self.word() if self.at < len(self.source) else None
        self.at = start
        return (word.literal or "") if word else ""

    def _take(self, expected: str, line: int, what: str) -> None:
        self._separators()
        if self._reserved() != expected:
            raise ShellError(line, f"{what} has no {expected!r}")
        self.at += len(expected)

    def _list(self, ends: tuple[str, ...]) -> list[AndOr]:
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise ShellError(self.line, "commands are nested too deeply")
        commands = []
        while True:
            self._separators()
            if self.at >= len(self.source) or self.peek(")") or self.peek(";"):
                break
            if self._reserved() in ends:
                break
            commands.append(self._and_or())
            self.skip_blanks()
            if self.peek("&") and not self.peek("&&"):
                self.at += 1
            elif self.at < len(self.source) and self.source[self.at] not in "\n;)":
                raise ShellError(self.line, f"unexpected {self.source[self.at]!r}")
        self._nesting -= 1
        return commands

    def _and_or(self) -> AndOr:
        items, links = [self._pipeline()], []
        while True:
            self.skip_blanks()
            link = "&&" if self.peek("&&") else "||" if self.peek("||") else ""
            if not link:
                return AndOr(items, links)
            self.at += 2
            self._newlines_only()
            links.append(link)
            items.append(self._pipeline())

    def _newlines_only(self) -> None:
        self.skip_blanks()
        while self.peek("\n"):
            self._newline()
            self.skip_blanks()

    def _pipeline(self) -> Pipeline:
        self.skip_blanks()
        line, negated = self.line, False
        while (word := self._reserved()) in ("!", "time"):
            negated ^= word == "!"
            self.at += len(word)
            self.skip_blanks()
        commands = [self._command()]
        while True:
            self.skip_blanks()
            if not self.peek("|") or self.peek("||"):
                return Pipeline(line, commands, negated)
            self.at += 2 if self.peek("|&") else 1
            self._newlines_only()
            commands.append(self._command())

    def _command(self) -> Command:
        self.skip_blanks()
        line = self.line
        if self.peek("(("):
            end = self.source.find("))", self.at)
            if end < 0:
                raise ShellError(line, "unbalanced '(('")
            text = self.source[self.at + 2 : end]
            self.at = end + 2
            return self._redirected(Arith(line, text))
        if self.peek("("):
            self.at += 1
            body = self._list(())
            if not self.peek(")"):
                raise ShellError(line, "unbalanced '('")
            self.at += 1
            return self._redirected(Group(line, body, subshell=True))
        reader = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": self._braces,
            "[[": self._test,
        }.get(self._reserved())
        if reader is None:
            return self._simple()
        return self._redirected(reader(line))

    def _redirected(self, command: Command) -> Command:
        self.skip_blanks()
        while self._redirection():
            self.skip_blanks()
        return command

    def _if(self, line: int) -> If:
        clauses, word = [], "if"
        while word in ("if", "elif"):
            self.at += len(word)
            test = self._list(("then",))
            self._take("then", line, "this 'if'")
            clauses.append((test, self._list(("elif", "else", "fi"))))
            word = self._reserved()
        orelse: list[AndOr] = []
        if word == "else":
            self.at += 4
            orelse = self._list(("fi",))
        self._take("fi", line, "this 'if'")
        return If(line, clauses, orelse)

    def _for(self, line: int) -> Loop:
        self.at += len(self._reserved())
        self.skip_blanks()
        if self.peek("(("):
            end = self.source.find("))", self.at)
            if end < 0:
                raise ShellError(line, "unbalanced '(('")
            header = self.source[self.at + 2 : end]
            self.at = end + 2
            return Loop(line, "for", self._do(line), header=header)
        name = self.word()
        if name is None or not (name.literal or "").isidentifier():
            raise ShellError(line, "this 'for' has no variable")
        self._newlines_only()
        words: list[Word] | None = None
        if self._reserved() == "in":
            self.at += 2
            words = []
            self.skip_blanks()
            while word := self.word():
                words.append(word)
                self.skip_blanks()
        return Loop(line, "for", self._do(line), name=name.literal or "", words=words)

    def _while(self, line: int) -> Loop:
        kind = self._reserved()
        self.at += 5
        test = self._list(("do",))
        return Loop(line, "while" if kind == "while" else "until", self._do(line), test=test)

    def _do(self, line: int) -> list[AndOr]:
        self._take("do", line, "this loop")
        body = self._list(("done",))
        self._take("done", line, "this loop")
        return body

    def _case(self, line: int) -> Case:
        self.at += 4
        self.skip_blanks()
        subject = self.word()
        if subject is None:
            raise ShellError(line, "this 'case' has no subject")
        self._newlines_only()
        self._take("in", line, "this 'case'")
        arms = []
        while True:
            self._separators()
            if self._reserved() == "esac":
                break
            if self.peek("("):
                self.at += 1
            patterns = []
            while True:
                self.skip_blanks()
                pattern = self.word()
                if pattern is None:
                    raise ShellError(line, "this 'case' has no 'esac'")
                patterns.append(pattern)
                self.skip_blanks()
                if not self.peek("|"):
                    break
                self.at += 1
            if not self.peek(")"):
                raise ShellError(self.line, "a pattern of 'case' must end with ')'")
            self.at += 1
            arms.append((patterns, self._list(("esac",))))
            if self.peek(";"):
                self.at += 3 if self.peek(";;&") else 2
        self.at += 4
        return Case(line, subject, arms)

    def _function(self, line: int) -> Function:
        self.at += len("function")
        self.skip_blanks()
        name = self.word()
        if name is None or not name.literal:
            raise ShellError(line, "this 'function' has no name")
        self.skip_blanks()
        if self.peek("()"):
            self.at += 2
        self._newlines_only()
        return Function(line, name.literal, self._command())

    def _braces(self, line: int) -> Group:
        self.at += 1
        body = self._list(("}",))
        self._take("}", line, "this '{'")
        return Group(line, body, subshell=False)

    def _test(self, line: int) -> Test:
        self.at += 2
        words = []
        while True:
            self._newlines_only()
            word = self.word(frozenset(" \t\n;"))
            if word is None:
                raise ShellError(line, "this '[[' has no ']]'")
            if word.literal == "]]":
                return Test(line, words)
            words.append(word)

    def _simple(self) -> Simple | Function:
        line = self.line
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        start = self.at
        while True:
            self.skip_blanks()
            if self._redirection():
                continue
            assign = self._assign() if not words or _declares(words[0]) else None
            if assign:
                (words if words else assigns).append(assign)
                continue
            word = self.word()
            if word is None:
                break
            if not words and not assigns and self.peek("("):
                return self._definition(word)
            words.append(word)
        if self.at == start:
            found = self.source[self.at] if self.at < len(self.source) else "the end of the file"
            raise ShellError(line, f"a command is missing before {found!r}")
        return Simple(line, assigns, words)

    def _definition(self, name: Word) -> Function:
        self.at += 1
        self.skip_blanks()
        if not self.peek(")") or not name.literal:
            raise ShellError(name.line, f"unexpected '(' after {name.raw!r}")
        self.at += 1
        self._newlines_only()
        return Function(name.line, name.literal, self._command())

    def _assign(self) -> Assign | None:
        start, line = self.at, self.line
        end = start
        while end < len(self.source) and (self.source[end].isalnum() or self.source[end] == "_"):
            end += 1
        name = self.source[start:end]
        if not name.isidentifier():
            return None
        index = None
        if self.source.startswith("[", end):
            close = self.source.find("]", end)
            if close < 0 or "\n" in self.source[end:close]:
                return None
            index, end = self.source[end + 1 : close], close + 1
        append = self.source.startswith("+=", end)
        if not append and not self.source.startswith("=", end):
            return None
        self.at = end + (2 if append else 1)
        if self.peek("(") and index is None:
            return Assign(name, self._array(line), append, None, line)
        return Assign(name, self.word() or Word((), line, ""), append, index, line)

    def _array(self, line: int) -> list[Word]:
        self.at += 1
        words = []
        while True:
            self._newlines_only()
            if self.peek(")"):
                self.at += 1
                return words
            word = self.word()
            if word is None:
                raise ShellError(line, "this array has no ')'")
            words.append(word)

    def _redirection(self) -> bool:
        start = self.at
        while self.at < len(self.source) and self.source[self.at].isdigit():
            self.at += 1
        for operator in ("<<<", "<<-", "<<", "&>>", "&>", ">>", ">&", "<&", ">|", "<>", ">", "<"):
            if self.peek(operator):
                break
        else:
            self.at = start
            return False
        if self.peek("<(") or self.peek(">("):
            self.at = start
            return False
        line = self.line
        self.at += len(operator)
        self.skip_blanks()
        target = self.word()
        if target is None:
            raise ShellError(line, f"nothing follows {operator!r}")
        if operator in ("<<", "<<-"):
            tag = "".join(p.text for p in target.parts)
            self._heredocs.append((tag, operator == "<<-", line))
        return True


def _declares(word: "Word | Assign") -> bool:
    return isinstance(word, Word) and word.literal in (
        "export",
        "declare",
        "typeset",
        "local",
        "readonly",
        "env",
    )
