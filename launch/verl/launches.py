"""Which command of a script launches verl, and what belongs to it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from polopt.launch.verl import schema
from polopt.launch.verl.overrides import LOOKS_LIKE_OVERRIDE, Override, read_overrides
from polopt.launch.verl.shell_run import Invocation, Script, read_script
from polopt.launch.verl.shell_state import Field
from polopt.launch.verl.shell_words import ShellError

__all__ = ["Launch", "read_launch"]

_PYTHON = re.compile(r"python[0-9.]*w?|pypy[0-9.]*")
_LAUNCHERS = frozenset(("torchrun", "accelerate", "deepspeed"))
_VALUE_OPTIONS = frozenset(("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd"))
_RESERVED = re.compile(r"line[0-9]+|[0-9]+")
_SHELL_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Launch:
    """The launch of verl in a script.

    Attributes:
        module: Module or file that is started; empty for a bare list of overrides.
        kind: `ppo`, `sft`, `generation`, `evaluation` or `other` (an entry of one's own).
        line: Where the command starts.
        overrides: In order, those given with `--set` last.
        lost: Overrides that bash would run as commands of their own, with their lines.
        options: Options of Hydra, such as `--config-name`, by name.
        remarks: Things to know about how the script was read.
    """

    module: str
    kind: str
    line: int
    overrides: list[Override]
    lost: list[Override]
    options: dict[str, str]
    remarks: list[str]


@dataclass(frozen=True)
class _Candidate:
    module: str
    words: list[Field]
    options: dict[str, str]
    invocation: Invocation

    @property
    def known(self) -> int:
        return sum(_knows(w.text) for w in self.words)


def read_launch(source: str, given: Mapping[str, str] | None = None) -> Launch:
    """Read a launch script or a list of overrides; nothing is executed.

    Args:
        source: The text.
        given: What `--set` says. A name with a dot or a prefix is a further override,
            everything else a value of the environment (see `read_script`).

    Raises:
        ShellError: If it is not a shell script or launches nothing of verl.
    """
    given = dict(given or {})
    further = {k: v for k, v in given.items() if _is_override_key(k)}
    given = {k: v for k, v in given.items() if k not in further}
    if _is_list(source):
        script = read_script(
            f"overrides=(\n{source}\n)\npython3 -m '' \"${{overrides[@]}}\"", given
        )
        shift = -1
    else:
        script, shift = read_script(source, given), 0
        if script.state.ended and not any(_candidate(i, script) for i in script.invocations):
            # It wants arguments or variables and stops without them: ask for them instead.
            script = read_script(source, given, reads_empty=False)
    candidates = [c for i in script.invocations if (c := _candidate(i, script))]
    candidates = [c for c in candidates if c.known or "verl" in c.module]
    if not candidates:
        raise ShellError(1, _nothing(script))
    chosen = max(candidates, key=lambda c: c.known)
    unknowns = script.state.unknowns
    words = [w._replace(line=w.line + shift) for w in chosen.words]
    words += [Field(f"{k}={v}", 0, f"--set {k}={v}") for k, v in further.items()]
    overrides, remarks = read_overrides(words, unknowns)
    lost, _ = read_overrides(_lost(script, chosen), unknowns)
    remarks = [f"line {n}: {text}" for n, text in script.state.notes if n] + remarks
    if chosen.invocation.inside:
        remarks.append(
            f"line {chosen.invocation.line}: the launch depends on "
            + ", ".join(chosen.invocation.inside)
        )
    for other in candidates:
        if other is not chosen:
            name = unknowns.show(other.module)
            inside = ", ".join(other.invocation.inside)
            where = f" in {inside}" if inside else ""
            remarks.append(
                f"line {other.invocation.line}: another launch, {name}{where}, is left out"
            )
    for name in sorted(set(given) - script.state.used):
        assigned = name in script.state.variables
        reason = "the script assigns it" if assigned else "the script does not read it"
        remarks.append(f"--set {name}={given[name]} has no effect: {reason}")
    return Launch(
        module=unknowns.show(chosen.module),
        kind=_kind(chosen.module, overrides),
        line=max(chosen.invocation.line + shift, 1),
        overrides=overrides,
        lost=lost,
        options={k: unknowns.show(v) for k, v in chosen.options.items()},
        remarks=remarks,
    )


def _is_override_key(name: str) -> bool:
    if name.startswith(("$", "`", "<", ">")) or _RESERVED.fullmatch(name):
        return False
    return "." in name or name.startswith(("+", "~")) or not _SHELL_NAME.fullmatch(name)


def _is_list(source: str) -> bool:
    """Whether every line is an override: then there is no command."""
    lines = [line.strip() for line in source.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    found = [bool(re.match(r"""["']?[+~]{0,2}[\w@/$]+([.@][\w$@{}-]+)+\s*=""", t)) for t in lines]
    return bool(lines) and sum(found) >= 0.9 * len(lines) and found[0]


def _nothing(script: Script) -> str:
    if not script.invocations:
        return "no command is started here: expected a shell script that launches verl"
    names = dict.fromkeys(script.state.unknowns.show(i.words[0].text) for i in script.invocations)
    shown = ", ".join(list(names)[:3])
    return (
        "no launch of verl is found: expected python3 -m verl.trainer.main_ppo key=value …, "
        f"the commands are {shown[:120]!r}"
    )


def _knows(text: str) -> bool:
    key = re.sub(r"^(\+\+|\+|~)", "", text.partition("=")[0])
    if "=" not in text and not text.startswith("~"):
        return schema.prefix_of(text) is not None
    return "." in key and schema.find(schema.canonical(key)) is not None


def _candidate(invocation: Invocation, script: Script) -> _Candidate | None:
    """Split a command into what is started and its arguments."""
    words = invocation.words
    texts = [w.text for w in words]
    start = 0
    if "--" in texts and texts[0].rsplit("/", 1)[-1] == "ray":  # ray job submit … -- command
        start = texts.index("--") + 1
    for i in range(start, len(texts)):
        name = texts[i].rsplit("/", 1)[-1]
        if LOOKS_LIKE_OVERRIDE.match(texts[i]) and "." in texts[i].partition("=")[0]:
            return None
        if _PYTHON.fullmatch(name) or name in _LAUNCHERS:
            return _started(words[i:], invocation)
    return None


def _started(words: list[Field], invocation: Invocation) -> _Candidate | None:
    texts, i = [w.text for w in words], 1
    while i < len(texts):
        text = texts[i]
        if text in ("-m", "--module") and i + 1 < len(texts):
            module = texts[i + 1]
            if module in (
                "torch.distributed.run",
                "torch.distributed.launch",
                "accelerate.commands.launch",
            ):
                i += 2
                continue
            return _arguments(module, words[i + 2 :], invocation)
        if text.startswith("-m") and len(text) > 2 and text[2].isalpha():
            return _arguments(text[2:], words[i + 1 :], invocation)
        if text.endswith(".py"):
            return _arguments(text, words[i + 1 :], invocation)
        if text == "-c":
            return None
        if text.startswith("-") or not LOOKS_LIKE_OVERRIDE.match(text):
            i += 1
            continue
        return None
    return None


def _arguments(module: str, words: list[Field], invocation: Invocation) -> _Candidate:
    options: dict[str, str] = {}
    rest: list[Field] = []
    i = 0
    while i < len(words):
        text = words[i].text
        name, equals, value = text.partition("=")
        if name in _VALUE_OPTIONS:
            if not equals:
                i += 1
                value = words[i].text if i < len(words) else ""
            options[name] = value
        elif text.startswith("-"):
            options[name] = value
        else:
            rest.append(words[i])
        i += 1
    return _Candidate(module, rest, options, invocation)


def _lost(script: Script, chosen: _Candidate) -> list[Field]:
    """Override words that start a command of their own, behind the launch."""
    found: list[Field] = []
    behind = False
    for invocation in script.invocations:
        behind = behind or invocation is chosen.invocation
        if behind and invocation is not chosen.invocation and _knows(invocation.words[0].text):
            found.extend(w for w in invocation.words if _knows(w.text))
    return found


def _kind(module: str, overrides: list[Override]) -> str:
    name = module.rsplit("/", 1)[-1].removesuffix(".py").rsplit(".", 1)[-1]
    groups = {o.name.partition(".")[0] for o in overrides}
    if "sft" in name or ("optim" in groups and "actor_rollout_ref" not in groups):
        return "sft"
    if "generation" in name:
        return "generation"
    if "eval" in name:
        return "evaluation"
    return "ppo" if not module or module.startswith("verl.trainer.main_ppo") else "other"
