"""From a path to runs: which format a file has, and what lies beside it."""

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from polopt.launch.doctor.beside import hydra_settings, lost_overrides, sb3_settings
from polopt.launch.doctor.events import event_rows, is_event_file
from polopt.launch.doctor.lines import (
    Reading,
    Row,
    history_rows,
    json_rows,
    mention,
    table_rows,
    text_rows,
)
from polopt.launch.doctor.log import Log, Mention
from polopt.launch.doctor.names import framework_of, settings_from
from polopt.launch.doctor.scalars import read_scalars
from polopt.launch.doctor.split import MENTIONS, Split, build_log, infer
from polopt.launch.files import read_json
from polopt.launch.recipe import load

__all__ = ["NotALogError", "read"]

_UNREADABLE = (OSError, EOFError, zlib.error)
_JSON = re.compile(r'\{[ \t]*["}]')


class NotALogError(ValueError):
    """A path is not a log that the doctor reads; the message says what it is instead."""


class _NoLogError(NotALogError):
    """A folder that has none."""


def read(path: Path) -> list[Log]:
    """Read the runs in a file or folder.

    Folders: a run folder of ours, an output folder or checkpoint of transformers, a folder with
    SB3's progress.csv, with TensorBoard files, with the `scalars` of TorchRL's CSVLogger, with
    verl's `.jsonl`, or a folder of such folders.

    Raises:
        NotALogError: In one sentence.
    """
    try:
        if path.is_dir():
            return _folder(path, depth=2)
        if not path.exists():
            raise NotALogError(f"there is no file or folder {str(path)!r}")
        return _files([path])
    except _UNREADABLE as error:
        raise NotALogError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    return f"cannot read {path}: {getattr(error, 'strerror', None) or error}"


def _folder(path: Path, depth: int) -> list[Log]:
    for name in ("metrics.jsonl", "trainer_state.json", "progress.csv", "progress.json"):
        for file in (path / name, path / f"{name}.gz"):
            if file.is_file():
                return _ours(file) if name == "metrics.jsonl" else _with_text(file)
    checkpoints = [p for p in path.glob("checkpoint-*/trainer_state.json")]
    if checkpoints:
        return _files([max(checkpoints, key=lambda p: (len(p.parent.name), p.parent.name))])
    events = sorted(path.glob("*.tfevents.*"))
    if events:
        return _files(events, name=path)
    if (path / "scalars").is_dir() and (log := _torchrl(path)):
        return [log]
    logs: list[Log] = []
    left: list[str] = []  # one that cannot be read does not keep the others from being read
    singles = [p for s in ("*.jsonl", "*.jsonl.gz", "*.log", "*.log.gz") for p in path.glob(s)]
    for file in sorted(p for p in singles if p.is_file()):
        try:
            logs += _files([file])
        except NotALogError:
            continue
        except _UNREADABLE as error:
            left.append(_unreadable(file, error))
    if depth and not logs:
        for child in sorted(p for p in path.iterdir() if p.is_dir()):
            try:
                logs += _folder(child, depth - 1)
            except _NoLogError:
                continue
            except NotALogError as error:
                left.append(str(error))
            except _UNREADABLE as error:
                left.append(_unreadable(child, error))
    if logs:
        logs[-1].notes += [f"left out: {reason}" for reason in left]
    elif left:
        raise NotALogError("; ".join(left))
    else:
        raise _NoLogError(
            f"{path} has no log that is read: metrics.jsonl, trainer_state.json, progress.csv, "
            "TensorBoard files, scalars of TorchRL, .jsonl or .log"
        )
    return logs


def _torchrl(path: Path) -> Log | None:
    """Read a run of TorchRL's CSVLogger; None where no metric of it is known."""
    reading = Reading()
    series = read_scalars(path / "scalars", reading)
    log = build_log(series, str(path), framework="torchrl")
    if not log.columns:
        return None
    log.rows = max(len(s) for s in log.columns.values())
    infer(log)
    if reading.damaged:
        log.notes.append(_left_out(reading.damaged))
    return log


def _with_text(file: Path) -> list[Log]:
    """Read a table of metrics, and what the console output beside it says went wrong."""
    logs = _files([file])
    for text in sorted(file.parent.glob("*.log")):
        with contextlib.suppress(NotALogError, *_UNREADABLE), _open(text) as opened:
            for item in _rows(opened, text, Reading()):
                if isinstance(item, Mention) and len(logs[-1].mentions) < MENTIONS:
                    logs[-1].mentions.append(item)
    return logs


def _ours(file: Path) -> list[Log]:
    """Read one of our run folders, also while it runs, or after it was killed."""
    path = file.parent
    logs = _files([file], name=path, framework="polopt")
    try:
        tree = load(path / "config.yaml") if (path / "config.yaml").is_file() else {}
        summary = read_json(path / "summary.json") if (path / "summary.json").is_file() else {}
        logs[-1].mentions += _command(path / "environment.json")
    except ValueError as error:
        logs[-1].notes.append(f"the settings are not known: {error}")
        return logs
    for log in logs:
        if tree:
            log.kind = "control" if "collector" in tree else "llm"
            log.settings, log.paths = settings_from(tree, log.framework, log.kind)
            infer(log)
    error = str(summary.get("error", ""))
    if error:
        found = mention(error, 0, "") or Mention(kind="failed", phase="", line=0, text=error[:200])
        logs[-1].mentions.append(found)
    return logs


def _command(path: Path) -> list[Mention]:
    """Return the settings of our command line that had no effect."""
    sessions = read_json(path).get("sessions") if path.is_file() else None
    first = sessions[0] if isinstance(sessions, list) and sessions else None
    words = first.get("command") if isinstance(first, dict) else None
    return lost_overrides([str(w) for w in words]) if isinstance(words, list) else []


def _files(paths: list[Path], name: Path | None = None, framework: str | None = None) -> list[Log]:
    """Read one file, or the TensorBoard files of one run."""
    split, reading = Split(), Reading(framework=framework)
    for path in paths:
        try:
            with _open(path) as file:
                for item in _rows(file, path, reading):
                    split.add(item)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # cut off, or not compressed
            if not split.segments[0].rows:
                raise NotALogError(f"cannot read {path}: {error}") from error
            reading.cut = True
    source = name or paths[0]
    logs = split.logs(str(source), reading.framework)
    if not logs:
        seen = ", ".join(" ".join(name.split())[:40] for name in sorted(split.unknown)[:4])
        raise NotALogError(
            f"{source} has no metric that is known"
            + (f": it has {seen}" if seen else ", and nothing in it looks like a line of a log")
        )
    config = reading.config
    if config is None and logs[0].framework == "sb3":
        config = sb3_settings(Path(source))
    elif config is None:
        config, lost = hydra_settings(Path(source))
        logs[-1].mentions += lost
    for log in logs:
        if config:
            log.settings, log.paths = settings_from(config, log.framework, log.kind)
        infer(log)
    if reading.cut:
        logs[-1].notes.append("the end of the file is cut off, what is whole was read")
    if reading.damaged:
        logs[-1].notes.append(_left_out(reading.damaged))
    return logs


def _left_out(lines: int) -> str:
    if lines == 1:
        return "a line that cannot be read was left out"
    return f"{lines} lines that cannot be read were left out"


def _open(path: Path) -> BinaryIO:
    file = path.open("rb")
    if file.peek(2)[:2] == b"\x1f\x8b":  # not read: a pipe cannot go back
        file.close()
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return file


def _rows(file: BinaryIO, path: Path, reading: Reading) -> Iterator[Row | Mention]:
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[arg-type]
    head = buffered.peek(4096)[:4096]
    if not head:
        raise NotALogError(f"{path} is empty")
    if is_event_file(head):
        yield from event_rows(buffered, reading)
        return
    # What PowerShell's > writes is UTF-16.
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    start = head.decode(encoding, "replace").lstrip("\ufeff \t\r\n")
    if "\x00" in start:
        raise NotALogError(f"{path} is a binary file, and not a TensorBoard file")
    text = io.TextIOWrapper(buffered, encoding=encoding, errors="replace", newline="\n")
    reader: Callable[..., Iterable[Row | Mention]] = text_rows
    if start.startswith("{") and '"log_history"' in start:
        reader = history_rows
    elif _JSON.match(start):
        reader = json_rows
    elif _is_table(start):
        reader = table_rows
    yield from reader(text, reading)


def _is_table(start: str) -> bool:
    cells = [c.strip() for c in start.split("\n", 1)[0].split(",")]
    return len(cells) > 1 and (framework_of(cells) is not None or "step" in cells)
