"""The report on what is damaged, foreign or in the way: one sentence, and nothing is lost."""

import json
import os
from pathlib import Path

import pytest
from report_runs import Page, page_of, polopt, write_run

from polopt.launch.report.gather import gather

HUGE = "1" + "0" * 400  # an integer that no float holds


def test_it_overwrites_nothing_but_reports(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    code, found = polopt(capsys, run)
    assert (code, found["report"]) == (0, str(run / "report.html"))
    assert polopt(capsys, run)[0] == 0  # an older report is written anew
    other = tmp_path / "thesis.html"
    other.write_text("<!doctype html>\n<p>mine")
    code, found = polopt(capsys, run, "-o", other)
    assert code == 2
    assert found["error"] == (
        f"{other} is there and is not a report of polopt: name another file with -o"
    )
    assert other.read_text() == "<!doctype html>\n<p>mine"
    assert "is a folder" in polopt(capsys, run, "-o", tmp_path)[1]["error"]
    assert "there is no folder" in polopt(capsys, run, "-o", tmp_path / "x" / "y")[1]["error"]
    assert sorted(p.name for p in run.iterdir() if p.suffix == ".html") == ["report.html"]


def test_bad_input_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert polopt(capsys)[1]["error"].startswith("name a run")
    code, found = polopt(capsys, tmp_path / "no")
    assert code == 2
    assert found["error"] == f"there is no file or folder {str(tmp_path / 'no')!r}"
    (tmp_path / "bin").write_bytes(os.urandom(64) + b"\x00")
    good = write_run(tmp_path / "a")
    code, found = polopt(capsys, good, tmp_path / "bin")
    assert code == 2
    assert found["runs"] == 1
    assert "bin" in found["errors"][0]
    assert "bin" in Page((tmp_path / "report.html").read_text()).text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "[1]"),
        ("summary.json", "[" * 100_000),
        ("summary.json", f'{{"format": 1, "final_return": {HUGE}, "solved": {HUGE}}}'),
        ("environment.json", '{"format": 1, "sessions": 3}'),
        ("environment.json", '{"format": 1, "sessions": [3]}'),
        ("environment.json", '{"format": 1, "sessions": {"a": 1}}'),
        ("environment.json", '{"format": 1, "sessions": [{"command": [1], "versions": [1]}]}'),
        ("config.yaml", "collector: {}\nevaluation: {stop_at: {a: b}}"),
        ("config.yaml", "collector: {}\nevaluation: {stop_at: [1]}"),
        ("config.yaml", "collector: {}\nevaluation: {stop_at: .inf}"),
        ("config.yaml", f"collector: {{}}\nevaluation: {{stop_at: {HUGE}}}"),
        ("samples.jsonl", f'{{"step": {HUGE}, "completion": "", "rewards": {{"a": {HUGE}}}}}\n'),
    ],
)  # fmt: skip
def test_files_of_a_run_folder_that_hold_anything(tmp_path, name, content):
    run = write_run(tmp_path / "a")
    (run / name).write_text(content)
    page, text = page_of(run)
    assert "Return in evaluation" in page.text
    assert "nan" not in text


@pytest.mark.parametrize("values", [(1.7e308, 1.7e308), ("Infinity", "-Infinity"), ("NaN", 1.0)])
def test_results_that_overflow(tmp_path, values):
    for seed, value in enumerate(values):
        run = write_run(tmp_path / str(seed), seed=seed, values=[1.7e308, -1.7e308, 1.0])
        summary = {"format": 1, "status": "completed", "final_return": value}
        (run / "summary.json").write_text(json.dumps(summary))
    page, text = page_of(tmp_path)
    assert "4 values NaN or infinite" in page.text
    assert "nan" not in text


def test_a_run_without_metrics_says_why(tmp_path):
    write_run(tmp_path / "a")
    for name, content in (("b", b""), ("c", b"\0\1\2"), ("d", None)):
        metrics = write_run(tmp_path / name) / "metrics.jsonl"
        metrics.unlink() if content is None else metrics.write_bytes(content)
    runs, errors = gather([tmp_path])
    notes = {Path(run.source).name: run.log.notes for run in runs}
    assert not errors
    assert "nothing was logged yet" in notes["b"]
    assert "nothing was logged yet" in notes["d"]
    assert "is a binary file" in notes["c"][0]
    left = f"left out: {tmp_path / 'c' / 'metrics.jsonl'} is a binary file"
    assert any(note.startswith(left) for note in notes["a"])


@pytest.mark.parametrize("kind", ["pipe", "link", "loop", "long"])
def test_a_page_goes_only_where_nothing_else_is(tmp_path, capsys, kind):
    out = tmp_path / "r.html"
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "long":
        out = tmp_path / ("r" * 300)
    else:
        out.symlink_to(tmp_path / "no" if kind == "link" else out)
    code, found = polopt(capsys, write_run(tmp_path / "a"), "-o", out)
    assert code == 2
    assert str(out) in found["error"]
    assert out.is_fifo() if kind == "pipe" else kind == "long" or out.is_symlink()


def test_names_that_no_file_can_have(capsys):
    assert polopt(capsys, "")[1]["error"].startswith("name a run")
    assert "too long" in polopt(capsys, "a" * 300)[1]["error"]


def test_damaged_files_of_a_run_folder(tmp_path):
    run = write_run(tmp_path / "a")
    (run / "summary.json").write_text("{")
    (run / "config.yaml").write_text("a: [")
    page, _ = page_of(run)
    assert "config.yaml" in page.text
