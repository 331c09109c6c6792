"""Text logs: JSON lines, console output, comma-separated tables, transformers' `log_history`.

Every reader yields rows, and never holds more than one. Nothing is evaluated: numbers are parsed,
the rest is skipped.
"""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from polopt.launch.doctor.log import Mention

__all__ = [
    "Reading", "Row", "history_rows", "json_rows", "mention", "row_of_trl", "table_rows",
    "text_rows",
]  # fmt: skip

LINE = 1 << 20
"""Characters of the longest line that is read."""


@dataclass
class Row:
    """Numbers that were logged together.

    Attributes:
        step: None where the log does not tell.
        values: By the name that the log has.
        resumed: The run went on from this step, and what was logged after it no longer counts.
    """

    step: float | None
    values: dict[str, float]
    resumed: float | None = None


@dataclass
class Reading:
    """What happened while reading a file.

    Attributes:
        damaged: Lines that could not be read.
        cut: The last line is not whole.
        config: The configuration, where the log itself has it.
        framework: Who wrote the file, where its form tells.
    """

    damaged: int = 0
    cut: bool = False
    config: dict[str, Any] | None = None
    framework: str | None = None


def lines(file: TextIO, reading: Reading) -> Iterator[tuple[int, str]]:
    """Yield numbered lines; those that are too long are counted as damaged and skipped."""
    number = 0
    while text := file.readline(LINE):
        number += 1
        if len(text) == LINE and not text.endswith("\n"):
            reading.damaged += 1
            while (rest := file.readline(LINE)) and not rest.endswith("\n"):
                pass
            continue
        yield number, text


_STEPS = (
    "step", "global_step", "_step", "trainer/global_step", "training/global_step",
    "time/total_timesteps", "total_timesteps", "global/steps", "frames", "iteration",
)  # fmt: skip


def row_of(found: Mapping[str, Any]) -> Row:
    """Return the numbers of one logged mapping."""
    inner = found.get("data")
    flat = {**found, **inner} if isinstance(inner, Mapping) else found
    values = {str(k): v for k, x in flat.items() if (v := number(x)) is not None}
    step = next((values[k] for k in _STEPS if math.isfinite(values.get(k, math.nan))), None)
    return Row(step, values, values.get("resumed_from"))


_NULLS = ("reward", "reward_std", "entropy", "kl")


def row_of_trl(found: Mapping[str, Any]) -> Row:
    """Return the numbers of a line of TRL, where the mean of nothing but NaN is None.

    Of a single reward None is nothing odd: that function has no say in these answers.
    """
    return row_of({k: math.nan if v is None and k in _NULLS else v for k, v in found.items()})


def number(value: Any) -> float | None:  # noqa: ANN401
    """Return a value as a float if it is a number, or text that is one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and 0 < len(value) <= 32:
        try:
            return float(value)
        except ValueError:
            return None
    return None


def json_rows(file: TextIO, reading: Reading) -> Iterator[Row | Mention]:
    """Yield the rows of JSON lines: ours, verl's file logger, SB3's, or any with a step."""
    last_bad = 0
    number_of_line = 0
    for number_of_line, text in lines(file, reading):
        if not text.strip():
            continue
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            reading.damaged += 1
            last_bad = number_of_line
            if (line := mention(text, number_of_line, "")) is not None:
                yield line
            continue
        if isinstance(found, dict):
            yield row_of(found)
    if last_bad and last_bad == number_of_line:
        reading.cut, reading.damaged = True, reading.damaged - 1


def table_rows(file: TextIO, reading: Reading) -> Iterator[Row]:
    """Yield the rows of a comma-separated file with a header, as SB3's progress.csv."""
    numbered = lines(file, reading)
    header: list[str] = []
    for _, text in numbered:
        if text.strip():
            header = next(csv.reader([text]))
            break
    short = False
    for _, text in numbered:
        if not text.strip():
            continue
        try:
            cells = next(csv.reader([text]))
        except csv.Error:
            reading.damaged += 1
            continue
        if cells == header:  # a second run was appended
            continue
        short = len(cells) < len(header) and not text.endswith("\n")
        if len(cells) != len(header):
            reading.damaged += 1
            continue
        yield row_of({k: v for k, v in zip(header, cells, strict=True) if v != ""})
    if short:
        reading.cut, reading.damaged = True, max(0, reading.damaged - 1)


# Lines may be long and made to be slow: each of these takes time linear in a line's length.
_VERL = re.compile(r"(?:^|[\s|])step:(\d{1,18}) - (.*)")
_PAIR = re.compile(r"(?:.*\s)?([\w@./\-()*]+):\s?(-?[\w.+\-]+)\s*")
_DICT = re.compile(r"\{'[\w/ ]+': ")
_ITEM = re.compile(r"'([\w./@ \-]+)': '?(-?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf|None))'?(?=[,}])")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def text_rows(file: TextIO, reading: Reading) -> Iterator[Row | Mention]:
    """Yield the rows of console output: verl's `step:1 - a:0.5 - …`, transformers' dicts, JSON.

    Lines that tell what went wrong come as mentions, with the phase that the lines before tell.
    """
    phase = ""
    for number_of_line, raw in lines(file, reading):
        text = _ANSI.sub("", raw) if "\x1b" in raw else raw
        if (match := _VERL.search(text)) is not None:
            pairs = [p for part in match[2].split(" - ") if (p := _PAIR.fullmatch(part))]
            values = {p[1]: v for p in pairs if (v := number(p[2])) is not None}
            phase, reading.framework = "", "verl"
            yield Row(float(match[1]), values)
        elif (match := _DICT.search(text)) is not None and text.rfind("}") > match.end():
            inner = text[match.start() : text.rfind("}") + 1]
            pairs = _ITEM.findall(inner)
            row = row_of_trl({k: None if x == "None" else number(x) for k, x in pairs})
            if row.values:
                phase, reading.framework = "", "trl"
                yield row
        # An object without a step is a sample, or a message of a logger in JSON.
        elif text.startswith('{"') and (row := row_of(_mapping(text) or {})).step is not None:
            phase = ""
            yield row
        else:
            phase = phase_of(text) or phase
            if (line := mention(text, number_of_line, phase)) is not None:
                yield line


def _mapping(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


_MENTIONS = (
    ("start", re.compile(r"Free memory on device.{0,80}less than desired", re.I)),
    ("oom", re.compile(
        r"(?:CUDA|HIP|NPU|XPU) out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")),
    ("host_oom", re.compile(
        r"oom[-_ ]kill|Out of memory: Killed process|DefaultCPUAllocator: can't allocate", re.I)),
    ("preempted", re.compile(r"Sequence group .{0,60}preempted|is preempted by", re.I)),
    ("no_spread", re.compile(r"no group had spread")),
    # Not what a library tells of its bounds: max_grad_norm=inf, Box(-inf, inf).
    ("nonfinite", re.compile(
        r"(?<!max_)(?:loss\w*|grad\w*|log[_ ]?prob\w*|logits|rewards?|observations?)\b.{0,40}?"
        r"(?:(?:[:=]|\b(?:is|are|was|became|has|contains?|returned))\W{1,3}(?:nan|inf)\b"
        r"|\bnot finite\b)|Backward\d*'? returned nan|numbers that are not finite"
        r"|probability tensor contains either|tensor\(\[+nan", re.I)),
)  # fmt: skip

# What every line that is mentioned has, in small letters: most lines need no more than this look.
_HINT = re.compile(r"memory|alloc|oom|preempted|spread|nan|finite|probability|\binf\b")

# Of a text in small letters.
_PHASES = (
    ("generation", re.compile(r"generate_sequences|vllm|sglang|_generate\b|wake_up")),
    ("log_probs", re.compile(r"compute_log_prob|_get_per_token_logps|compute_ref_log_prob")),
    ("update", re.compile(
        r"update_actor|update_critic|update_policy|backward\(|optimizer\.step|training_step")),
)  # fmt: skip


def phase_of(text: str) -> str:
    """Return the phase of a run that a line of a traceback names, or nothing."""
    small = text[:2000].lower()
    return next((name for name, pattern in _PHASES if pattern.search(small)), "")


def mention(text: str, number_of_line: int, phase: str) -> Mention | None:
    """Return a line as a mention if it says what went wrong."""
    head = text[:2000]
    if not _HINT.search(head.lower()):
        return None
    for kind, pattern in _MENTIONS:
        if pattern.search(head):
            short, phase = " ".join(head.split())[:200], phase or phase_of(head)
            return Mention(kind=kind, phase=phase, line=number_of_line, text=short)
    return None


def history_rows(file: TextIO, reading: Reading) -> Iterator[Row]:
    """Yield `log_history` of a trainer_state.json, object by object, in bounded memory."""
    decoder = json.JSONDecoder()
    buffer, started = "", False
    while True:
        chunk = file.read(1 << 16)
        buffer += chunk
        if not started:
            where = buffer.find('"log_history"')
            where = buffer.find("[", where) if where >= 0 else -1
            if where < 0:
                if not chunk:
                    return
                buffer = buffer[-64:] if '"log_history"' not in buffer else buffer
                continue
            buffer, started, reading.framework = buffer[where + 1 :], True, "trl"
        while True:
            buffer = buffer.lstrip(" \t\r\n,")
            if buffer.startswith("]"):
                tail = buffer[1:] + file.read(1 << 16)
                reading.config = _numbers_after(tail)
                return
            try:
                found, end = decoder.raw_decode(buffer)
            except (ValueError, RecursionError):
                break
            if isinstance(found, dict):
                yield row_of_trl(found)
            buffer = buffer[end:]
        if not chunk or len(buffer) > LINE:
            reading.cut = True
            return


def _numbers_after(text: str) -> dict[str, Any]:
    pairs = re.findall(r'"(\w+)": (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\b', text)
    return {k: float(v) if "." in v or "e" in v else int(v) for k, v in pairs}
