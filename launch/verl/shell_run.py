"""Walks over a script and finds the commands it would start. Nothing is executed.

Assignments, functions, loops and tests of known text are evaluated as bash would. A test
that needs the machine (`-f file`, the status of a command) is followed both ways: what both
agree on is kept, the rest becomes unknown. Commands that are not launches are passed over.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polopt.launch.verl.shell_builtins import Break, Builtins, all_arguments
from polopt.launch.verl.shell_expand import Expander
from polopt.launch.verl.shell_state import Array, Field, State
from polopt.launch.verl.shell_syntax import parse
from polopt.launch.verl.shell_test import double_test
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
from polopt.launch.verl.shell_words import ShellError, Word

__all__ = ["Invocation", "Script", "read_script"]

_MAX_SOURCE, _MAX_STEPS, _MAX_CALLS, _MAX_ROUNDS = 1_000_000, 20_000, 25, 200


@dataclass(frozen=True)
class Invocation:
    """A command that the script would start.

    Attributes:
        words: The words, expanded.
        line: Where it stands.
        variables: Assignments before the command (`A=1 python …`).
        inside: What it depends on, such as "the test on line 4"; empty at top level.
    """

    words: list[Field]
    line: int
    variables: dict[str, str]
    inside: tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """What a script does, as far as it can be known without running it."""

    invocations: list[Invocation]
    state: State


def read_script(
    source: str, given: Mapping[str, str] | None = None, *, reads_empty: bool = True
) -> Script:
    """Evaluate a script symbolically.

    Args:
        source: The text of the script.
        given: Values of the environment, of substitutions such as `$(hostname)`, of
            arguments (`1`, `2`) and of tests (`line12` = `true`).
        reads_empty: Whether tests read variables and arguments that are not set as empty.
            Otherwise such a test is followed both ways.

    Raises:
        ShellError: If it is not a shell script, or does more than can be followed.
    """
    if len(source) > _MAX_SOURCE:
        raise ShellError(
            1, f"the file has {len(source)} characters, at most {_MAX_SOURCE} are read"
        )
    source = source.removeprefix("\ufeff")
    for number, text in enumerate(source.split("\n"), 1):
        for c in text:
            if c == "\0" or "\ue000" <= c <= "\uf8ff":
                raise ShellError(number, f"not a shell script: it contains the character {c!r}")
    state = State(dict(given or {}), reads_empty=reads_empty)
    if "\r\n" in source:
        state.note(1, "lines end in CR LF: bash itself would fail, read as LF")
        source = source.replace("\r\n", "\n")
    runner = _Runner(state)
    try:
        runner.run(parse(source))
    except RecursionError:
        raise ShellError(1, "the script is nested too deeply") from None
    return Script(runner.invocations, state)


class _Runner(Builtins):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.invocations: list[Invocation] = []
        self._inside: tuple[str, ...] = ()
        self._steps = 0
        self._calls = 0

    def run(self, commands: Sequence[AndOr]) -> bool | None:
        """Run a list; returns whether its last command succeeded, None if unknown."""
        status: bool | None = True
        for command in commands:
            if self.state.ended:
                break
            status = self._and_or(command)
        return status

    def _and_or(self, command: AndOr) -> bool | None:
        status = self._pipeline(command.items[0])
        for link, item in zip(command.links, command.items[1:], strict=True):
            if self.state.ended:
                return status
            wanted = link == "&&"
            if status is None:
                line = item.line
                forced = self._forced(line)
                if forced is not None:
                    status = forced
                else:
                    self._both(line, [lambda item=item: self._pipeline(item), lambda: None])
                    continue
            if status is wanted:
                status = self._pipeline(item)
        return status

    def _forced(self, line: int) -> bool | None:
        """What the user said about the test on this line."""
        given = self.state.supplied(f"line{line}")
        if given is None:
            return None
        if given not in ("true", "false"):
            raise ShellError(line, f"--set line{line}={given} must be true or false")
        return given == "true"

    def _both(self, line: int, branches: Sequence[Callable[[], object]]) -> None:
        """Follow two branches and merge what they leave."""
        outside, self._inside = self._inside, (*self._inside, f"the test on line {line}")
        start, results, left = self.state, [], False
        why = start.unknowns.why
        for branch in branches:
            self.state = start.fork()
            try:
                branch()
            except Break as signal:
                left = left or signal.args[0] == "break"
            results.append(self.state)
        self.state, self._inside = start, outside
        self.state.unknowns.why = why
        self.state.merge(results[0], results[1], line)
        if left:  # a loop that waits for something: assume that it comes
            raise Break("break")

    def _pipeline(self, pipeline: Pipeline) -> bool | None:
        status: bool | None = True
        if len(pipeline.commands) == 1:
            status = self._command(pipeline.commands[0])
        else:  # the parts run in subshells
            outside = self.state
            for command in pipeline.commands:
                self.state = outside.fork()
                self._command(command)
            self.state, status = outside, None
        return status if not pipeline.negated or status is None else not status

    def _command(self, command: Command) -> bool | None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise ShellError(command.line, f"the script takes more than {_MAX_STEPS} steps")
        match command:
            case Simple():
                return self._simple(command)
            case If():
                return self._if(command.clauses, command)
            case Loop():
                return self._loop(command)
            case Case():
                return self._case(command)
            case Function():
                self.state.functions[command.name] = command.body
                return True
            case Group():
                if not command.subshell:
                    return self.run(command.body)
                outside, self.state = self.state, self.state.fork()
                status = self.run(command.body)
                self.state = outside
                return status
            case Arith():
                value = Expander(self.state, lenient=True).number(command.text, command.line)
                return None if value is None else value != 0
            case Test():
                return self._asked(command.line, double_test(self.state, command.words))

    def _asked(self, line: int, status: bool | None) -> bool | None:
        return self._forced(line) if status is None else status

    def _if(self, clauses: Sequence[tuple[list[AndOr], list[AndOr]]], command: If) -> bool | None:
        if not clauses:
            return self.run(command.orelse)
        test, body = clauses[0]
        line = test[0].items[0].line if test else command.line
        status = self._asked(line, self.run(test))
        if status is None:
            self._both(line, [lambda: self.run(body), lambda: self._if(clauses[1:], command)])
            return None
        return self.run(body) if status else self._if(clauses[1:], command)

    def _loop(self, loop: Loop) -> bool | None:
        if loop.kind == "for" and not loop.header:
            self._for(loop)
            return True
        expander = Expander(self.state, lenient=True)
        first, test, step = [*loop.header.split(";"), "", ""][:3]
        if first.strip():
            expander.number(first, loop.line)
        for _ in range(_MAX_ROUNDS):
            if loop.header:
                value = Expander(self.state, lenient=True).number(test or "1", loop.line)
                status = None if value is None else value != 0
            else:
                status = self._asked(loop.line, self.run(loop.test or []))
            if status is None:
                text = "the loop depends on the machine: followed once and not at all"
                self.state.note(loop.line, text)
                self._both(loop.line, [lambda: self._round(loop), lambda: None])
                return None
            if status is (loop.kind == "until") or not self._round(loop) or self.state.ended:
                return True
            if step.strip():
                Expander(self.state, lenient=True).number(step, loop.line)
        raise ShellError(loop.line, f"the loop takes more than {_MAX_ROUNDS} rounds")

    def _round(self, loop: Loop) -> bool:
        self.loops += 1
        try:
            self.run(loop.body)
        except Break as signal:
            return signal.args[0] == "continue"
        finally:
            self.loops -= 1
        return True

    def _for(self, loop: Loop) -> None:
        expander = Expander(self.state)
        if loop.words is None:
            values = [f.text for f in expander.fields(all_arguments(loop.line))]
        else:
            values = [f.text for word in loop.words for f in expander.fields(word)]
        if len(values) > _MAX_ROUNDS:
            raise ShellError(loop.line, f"the loop takes more than {_MAX_ROUNDS} rounds")
        outside = self._inside
        for number, value in enumerate(values):
            self.state.assign(loop.name, value, loop.line)
            shown = self.state.unknowns.show(value)
            self._inside = (
                *outside,
                f"round {number + 1} of {len(values)} of the loop on line {loop.line} "
                f"({loop.name}={shown})",
            )
            if not self._round(loop) or self.state.ended:
                break
        self._inside = outside

    def _case(self, case: Case) -> bool | None:
        expander = Expander(self.state, lenient=True)
        subject = expander.text(case.subject)
        if not self.state.unknowns.within(subject):
            for patterns, body in case.arms:
                if any(expander.glob(p).fullmatch(subject) for p in patterns):
                    return self.run(body)
            return True
        self.state.unknowns.why = self.state.unknowns.asks(subject)
        remaining = [body for _, body in case.arms]

        def arm(index: int) -> None:
            if index < len(remaining):
                self._both(case.line, [lambda: self.run(remaining[index]), lambda: arm(index + 1)])

        arm(0)
        return None

    def _simple(self, command: Simple) -> bool | None:
        first = command.words[0] if command.words else None
        tests = first is not None and isinstance(first, Word) and first.literal in ("[", "test")
        expander = Expander(self.state, lenient=tests)
        fields: list[Field] = []
        declared: list[Assign] = []
        for word in command.words:
            if isinstance(word, Assign):
                declared.append(word)
                if fields and fields[0].text == "env":
                    value = self._value(word)
                    fields.append(Field(f"{word.name}={value}", word.line, word.name))
            else:
                fields.extend(expander.fields(word))
        if not fields:
            for assign in command.assigns:
                self._assign(assign)
            return True
        name, rest = fields[0].text, fields[1:]
        if name in ("export", "declare", "typeset", "local", "readonly"):
            for assign in [*command.assigns, *declared]:
                self._assign(assign)
            return True
        if name in self.state.functions:
            return self._call(name, command, fields)
        if self.is_builtin(name):
            return self.builtin(name, command.line, rest)
        variables = {
            a.name: expander.text(a.value) for a in command.assigns if isinstance(a.value, Word)
        }
        text = self._script_of(fields)
        if text is not None:
            return self._nested(text, command.line)
        self.invocations.append(Invocation(fields, command.line, variables, self._inside))
        self.state.unknowns.why = ()
        return None

    def _value(self, assign: Assign) -> str:
        return Expander(self.state).text(assign.value) if isinstance(assign.value, Word) else ""

    def _assign(self, assign: Assign) -> None:
        expander, name, line = Expander(self.state), assign.name, assign.line
        old = self.state.variables.get(name)
        if isinstance(assign.value, list):
            array = Array(old) if assign.append and isinstance(old, Array) else Array()
            if assign.append and isinstance(old, str) and old:
                array.append(Field(old, line, old))
            elif assign.append and not isinstance(old, Array | str | None):
                self.state.lookup(name, line)  # says which test it depends on
            for word in assign.value:
                literal = word.parts[0].text if word.parts else ""
                key, found, _ = literal.partition("]=")
                if found and key.startswith("[") and not word.parts[0].quoted:
                    value = expander.text(word).partition("]=")[2]
                    array[key[1:].strip("\"'")] = Field(value, word.line, word.raw)
                else:
                    for field in expander.fields(word):
                        array.append(field)
            self.state.assign(name, array, line)
            return
        value = expander.text(assign.value)
        if assign.index is not None:
            array = Array(old) if isinstance(old, Array) else Array()
            associative = any(not k.isdecimal() for k in array)
            plain = re.fullmatch(r"[0-9]{1,9}|\$.*|[A-Za-z_]\w*", assign.index)
            number = expander.number(assign.index, line) if plain and not associative else None
            key = str(number) if number is not None else assign.index.strip("\"'")
            before = array[key].text if assign.append and key in array else ""
            array[key] = Field(before + value, line, assign.value.raw)
            self.state.assign(name, array, line)
        elif assign.append and isinstance(old, Array):
            array = Array(old)
            first = array.get("0", Field("", line, ""))
            array["0"] = Field(first.text + value, line, first.raw)
            self.state.assign(name, array, line)
        else:
            self.state.assign(
                name, (old if assign.append and isinstance(old, str) else "") + value, line
            )

    def _call(self, name: str, command: Simple, fields: list[Field]) -> bool | None:
        self._calls += 1
        if self._calls > _MAX_CALLS:
            raise ShellError(command.line, f"the function {name} calls itself without end")
        outside = self.state.arguments
        self.state.arguments = fields[1:]
        status = self._command(self.state.functions[name])
        self.state.arguments = outside
        if self.state.ended == "return":
            self.state.ended = ""
        self._calls -= 1
        return status

    def _script_of(self, fields: list[Field]) -> str | None:
        """The script that `bash -c script` or `eval script` would run."""
        texts = [f.text for f in fields]
        if texts[0] == "eval":
            return " ".join(texts[1:])
        for shell, text in enumerate(texts):
            if text.rsplit("/", 1)[-1] not in ("bash", "sh", "zsh"):
                continue
            for i in range(shell + 1, len(texts) - 1):
                if re.fullmatch(r"-[a-z]*c", texts[i]):
                    return texts[i + 1]
                if not texts[i].startswith("-"):
                    break
        return None

    def _nested(self, text: str, line: int) -> bool | None:
        self._calls += 1
        if self._calls > _MAX_CALLS:
            raise ShellError(line, "scripts inside of scripts are nested too deeply")
        status = self.run(parse(text, line, self._calls))
        self._calls -= 1
        return status
