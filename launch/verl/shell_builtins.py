"""Commands of the shell itself that change what follows, or that change nothing."""

import re

from polopt.launch.verl.shell_expand import Expander
from polopt.launch.verl.shell_state import Field, State
from polopt.launch.verl.shell_test import bracket_test
from polopt.launch.verl.shell_words import Part, Word

__all__ = ["Break", "Builtins", "all_arguments"]


class Break(Exception):
    """`break` or `continue`."""


def all_arguments(line: int) -> Word:
    """The word `"$@"`."""
    return Word((Part("param", "@", True),), line, '"$@"')


class Builtins:
    """Runs builtin commands on a state; each returns whether it succeeded, None if unknown."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.loops = 0

    def is_builtin(self, name: str) -> bool:
        """Whether a command is one of these."""
        return name in _BUILTINS

    def builtin(self, name: str, line: int, rest: list[Field]) -> bool | None:
        """Run one with its arguments."""
        return getattr(self, f"_do_{_BUILTINS[name]}")(line, rest)

    def _do_nothing(self, line: int, rest: list[Field]) -> bool:
        return True

    def _do_false(self, line: int, rest: list[Field]) -> bool:
        return False

    def _do_exit(self, line: int, rest: list[Field]) -> bool:
        self.state.ended = "exit"
        return True

    def _do_return(self, line: int, rest: list[Field]) -> bool:
        self.state.ended = "return"
        return not rest or rest[0].text == "0"

    def _do_break(self, line: int, rest: list[Field]) -> bool:
        if self.loops:
            raise Break("break")
        return True

    def _do_continue(self, line: int, rest: list[Field]) -> bool:
        if self.loops:
            raise Break("continue")
        return True

    def _do_shift(self, line: int, rest: list[Field]) -> bool:
        count = int(rest[0].text) if rest and re.fullmatch(r"[0-9]{1,4}", rest[0].text) else 1
        if self.state.arguments is None:
            self.state.shifted += count
        else:
            self.state.arguments = self.state.arguments[count:]
        return True

    def _do_set(self, line: int, rest: list[Field]) -> bool:
        texts = [f.text for f in rest]
        if "--" in texts:
            self.state.arguments = rest[texts.index("--") + 1 :]
        return True

    def _do_unset(self, line: int, rest: list[Field]) -> bool:
        for field in rest:
            self.state.variables.pop(field.text, None)
        return True

    def _do_read(self, line: int, rest: list[Field]) -> bool | None:
        for field in rest:
            if field.text.isidentifier():
                mark = self.state.unknowns.mark(f"${{{field.text}}}", (field.text,), line)
                self.state.assign(field.text, mark, line)
        return None

    def _do_source(self, line: int, rest: list[Field]) -> bool:
        name = self.state.unknowns.show(rest[0].text) if rest else ""
        self.state.note(line, f"the file {name!r} is not read; give its variables with --set")
        return True

    def _do_let(self, line: int, rest: list[Field]) -> bool:
        for field in rest:
            Expander(self.state, lenient=True).number(field.text, line)
        return True

    def _do_test(self, line: int, rest: list[Field]) -> bool | None:
        return bracket_test(self.state, [f.text for f in rest])


_BUILTINS = {
    **dict.fromkeys(("echo", "printf", "true", ":", "trap", "cd", "pushd", "popd"), "nothing"),
    **dict.fromkeys(("ulimit", "sleep", "wait", "mkdir", "shopt", "umask", "hash"), "nothing"),
    "false": "false",
    "exit": "exit",
    "return": "return",
    "break": "break",
    "continue": "continue",
    "shift": "shift",
    "set": "set",
    "unset": "unset",
    "read": "read",
    "mapfile": "read",
    "readarray": "read",
    "source": "source",
    ".": "source",
    "let": "let",
    "[": "test",
    "test": "test",
}
