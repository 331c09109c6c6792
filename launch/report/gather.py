"""From paths to runs: what the doctor reads, and what our run folders hold beside it."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polopt.launch.doctor.diagnose import Finding, diagnose
from polopt.launch.doctor.lines import number
from polopt.launch.doctor.log import Log
from polopt.launch.doctor.readers import NotALogError, read
from polopt.launch.files import read_json
from polopt.launch.recipe import load
from polopt.launch.report.samples import Sample, read_samples, read_tables

__all__ = ["ReportRun", "aside", "gather"]

_ASIDE = re.compile(
    r"seed|name|format|project|(checkpoints|doctor)(\..*)?"
    r"|trainer\.(save_|logging_|report_to|output_dir|vllm_server_|vllm_group_port|ddp_timeout).*"
    r"|vllm\.(host|port|trainer_host|start_seconds|transfer_seconds)"
)


def aside(path: str) -> bool:
    """Whether a setting may differ between the seeds of a configuration: it changes no result."""
    return _ASIDE.fullmatch(path) is not None


_SEED = re.compile(r"(?i)\bseed[-_=]?(\d+)")


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """One run, whoever logged it.

    Attributes:
        source: Its file or folder.
        name: Its recipe, or the source.
        task: What it learns, as its recipe says; empty where the log does not say.
        title: What the task is called; may be empty.
        seed: Its seed, if known.
        log: Metrics and settings under canonical names.
        config: Settings by dotted path: of a run of ours all of them.
        facts: What came of it, by name: see `_FACTS`.
        status: `completed`, `stopped`, `failed`, …; empty where the log does not say.
        error: What a failed run said.
        machine: Versions and hardware, one line; empty if unknown.
        findings: Of the doctor.
        samples: Some answers of a language model.
        key: Runs with the same key differ in their seeds alone.
    """

    source: str
    name: str
    task: str
    title: str
    seed: int | None
    log: Log
    config: dict[str, str]
    facts: dict[str, float]
    status: str
    error: str
    machine: str
    findings: list[Finding]
    samples: list[Sample]
    key: tuple[Any, ...]


def gather(paths: Sequence[Path]) -> tuple[list[ReportRun], list[str]]:
    """Read the runs that paths name, each once.

    Returns:
        Runs, and what could not be read, one sentence each.
    """
    runs: dict[str, ReportRun] = {}
    errors: list[str] = []
    for path in paths:
        try:
            logs = read(path)
        except NotALogError as error:
            logs = []
            if not _holds(path, "config.yaml"):
                errors.append(str(error))
        known = {Path(log.source) for log in logs}
        # Runs that have logged nothing yet.
        logs += [
            Log(source=str(folder), framework="polopt", kind="", notes=[_why(folder)])
            for folder in ([path, *_folders(path)] if path not in known else [])
            if folder not in known and _holds(folder, "environment.json", "config.yaml")
        ]
        for log in logs:
            runs.setdefault(_identity(log.source), _run(log))
    return list(runs.values()), errors


def _folders(path: Path) -> list[Path]:
    try:
        return list(path.glob("*/"))
    except OSError:  # no permission to look, or no name for a file
        return []


def _holds(folder: Path, *names: str) -> bool:
    try:
        return all((folder / name).is_file() for name in names)
    except OSError:  # no permission, or no name for a file
        return False


def _why(folder: Path) -> str:
    """Return why a run has no metrics."""
    try:
        if (folder / "metrics.jsonl").stat().st_size:
            read(folder)
    except FileNotFoundError:
        pass
    except (NotALogError, OSError) as error:
        return str(error)
    return "nothing was logged yet"


def _identity(source: str) -> str:
    try:
        return str(Path(source).resolve())
    except OSError:
        return source


def _run(log: Log) -> ReportRun:
    folder = Path(log.source)
    ours = (folder / "config.yaml").is_file() and log.framework == "polopt"
    return _of_folder(log, folder) if ours else _of_log(log)


def _of_folder(log: Log, folder: Path) -> ReportRun:
    tree, summary, sessions = {}, {}, []
    try:
        tree = load(folder / "config.yaml")
        if (folder / "summary.json").is_file():
            summary = read_json(folder / "summary.json")
        sessions = read_json(folder / "environment.json").get("sessions")
    except ValueError as error:
        log.notes.append(str(error))
    log.kind = log.kind or ("llm" if "trainer" in tree else "control")
    config = {k: _word(v) for k, v in _leaves(tree).items()}
    seed = tree.get("seed")
    if not summary:
        log.notes.append("there is no summary: the run goes on, or was killed")
    return ReportRun(
        source=log.source,
        name=str(tree.get("name") or folder.name),
        task=_used(tree.get("task")) or str(tree.get("name", "")),
        title=str(summary.get("task", "")),
        seed=seed if isinstance(seed, int) else None,
        log=log,
        config=config,
        facts=_facts(log, summary),
        status=str(summary.get("status", "")) if summary else "no summary",
        error=str(summary.get("error", "")),
        machine=_machine(_part(sessions[-1])) if isinstance(sessions, list) and sessions else "",
        findings=diagnose(log),
        samples=read_samples(folder),
        key=("polopt", tuple((k, v) for k, v in config.items() if not aside(k))),
    )


def _of_log(log: Log) -> ReportRun:
    found = _SEED.search(log.source)
    config = {log.paths.get(k, k): _word(v) for k, v in log.settings.items()}
    # What others do not tell of their settings may differ, unless the name says it is the seed.
    same = _SEED.sub("seed", log.source) if found else log.source
    path = Path(log.source)
    return ReportRun(
        source=log.source,
        name=_short(log.source),
        task="",
        title="",
        seed=int(found[1]) if found else None,
        log=log,
        config=config,
        facts=_facts(log, {}),
        status="",
        error="",
        machine="",
        findings=diagnose(log),
        samples=read_tables(path if path.is_dir() else path.parent) if log.kind == "llm" else [],
        key=(log.framework, same, tuple(sorted(log.columns)), tuple(config.items())),
    )


def _facts(log: Log, summary: Mapping[str, Any]) -> dict[str, float]:
    """Return what came of a run: of ours as its summary says, else from the curves."""
    found: dict[str, Any] = {}
    if log.kind == "llm":
        after, before = (_part(summary.get(f"accuracy_{when}")) for when in ("after", "before"))
        found["accuracy, sampled"] = after.get("sampled")
        found["before training"] = before.get("sampled")
        found["accuracy, greedy"] = after.get("greedy")
    found["solved"] = solved if isinstance(solved := summary.get("solved"), bool) else None
    for name, metric in (("evaluation", "eval_reward"), ("training reward", "reward")):
        if (column := log.columns.get(metric)) and column.points:
            values = column.values
            found[name] = (
                values[-1] if metric == "eval_reward"
                else statistics.fmean(values[-max(1, len(values) // 10) :])
            )  # fmt: skip
    if "final_return" in summary:
        found["evaluation"] = summary["final_return"]
    judged = log.columns.get("eval_reward")
    if judged and len(judged) == 1 and judged.steps[0] < log.steps()[1]:
        found.pop("evaluation", None)  # only what it began with was evaluated
    if log.kind == "llm" and found.get("accuracy, greedy") is not None:
        found.pop("evaluation", None)
    unit = "frames" if log.kind == "control" and log.framework == "polopt" else "steps"
    found[unit] = summary.get(unit, log.steps()[1] if log.rows else None)
    found["answers"] = summary.get("samples")
    found["CPU-seconds"] = summary.get("train_cpu_seconds", summary.get("cpu_seconds"))
    found["frames per CPU-second"] = summary.get("frames_per_cpu_second")
    found["answers per second"] = summary.get("samples_per_second")
    return {
        name: size
        for name, value in found.items()
        if isinstance(value, int | float) and (size := number(+value)) is not None
    }


def _part(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _used(value: object) -> str:
    return str(value.get("use", "")) if isinstance(value, Mapping) else str(value or "")


def _machine(session: Mapping[str, Any]) -> str:
    versions = _part(session.get("versions"))
    git = _part(session.get("git"))
    parts = [f"{k} {versions[k]}" for k in ("polopt", "python", "torch", "torchrl", "trl")
             if k in versions]  # fmt: skip
    accelerator, cpus = session.get("accelerator"), session.get("cpus")
    parts.append(str(accelerator) if accelerator else f"{cpus} CPUs" if cpus else "")
    if git:
        parts.append(f"git {str(git.get('revision'))[:10]}{', changed' * bool(git.get('changed'))}")
    return " · ".join(p for p in parts if p)


def _leaves(tree: object, path: str = "") -> dict[str, Any]:
    """Return the settings by dotted path; short lists are one setting."""
    if isinstance(tree, Mapping) and tree:
        return {
            p: v
            for k, sub in tree.items()
            for p, v in _leaves(sub, f"{path}.{k}".strip(".")).items()
        }
    return {path: tree} if path else {}


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if (
        value is None or isinstance(value, bool)
    ) else str(value)  # fmt: skip


def _short(source: str) -> str:
    """Return the end of a path; a file whose name is always the same goes by its folder."""
    *folders, last = Path(source).parts
    fixed = last in ("progress.csv", "progress.json", "trainer_state.json")
    if folders and (fixed or ".tfevents." in last):
        return "/".join(folders[-2:])
    return "/".join([*folders[-2:], last])
