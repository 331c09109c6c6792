"""Run folders that look like ours, written by hand, and the page of a report, read back."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from polopt.launch.cli import main
from polopt.launch.files import encode
from polopt.launch.report.gather import gather
from polopt.launch.report.page import render

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> "
    "{{ 7*7 }} `code` שלום \u202egnp.exe 雪 \x00\x1b[31m\ud800 </pre></details></body>"
)


def write_run(
    folder: Path,
    *,
    seed: int = 0,
    lr: float = 1e-3,
    values: list[float] | None = None,
    task: str = "cartpole",
    name: str = "cartpole-ppo",
    ended: bool = True,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write a control run with one line of metrics, and one evaluation, for each value."""
    folder.mkdir(parents=True)
    values = [10.0, 100.0, 200.0] if values is None else values
    tree = (
        f"format: 1\nname: {json.dumps(name)}\nproject: polopt\nseed: {seed}\n"
        f"task: {{use: {json.dumps(task)}}}\ncollector: {{num_envs: 4, total_frames: 4000}}\n"
        f"optimizer: {{lr: {lr}}}\nevaluation: {{stop_at: 150}}\n"
    )
    (folder / "config.yaml").write_text(tree)
    sessions = [{"versions": {"polopt": "0.1.0"}, "cpus": 2, "git": None}]
    write_json(folder / "environment.json", {"format": 1, "sessions": sessions})
    lines = []
    for i, value in enumerate(values, 1):
        head = {"format": 1, "step": 1000 * i, "time": float(i), "cpu": float(i)}
        phases = {"time_collect": 2.0, "time_backward": 1.0, "time_optimizer": 1.0}
        lines.append({**head, "return_mean": value, "entropy": 0.5, **phases, **(extra or {})})
        lines.append({**head, "greedy_return": value})
    text = "".join(encode(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    if ended:
        summary = {
            "status": "completed", "task": "CartPole-v1", "solved": values[-1] >= 150,
            "final_return": values[-1], "frames": 1000 * len(values), "train_cpu_seconds": 2.5,
        }  # fmt: skip
        write_json(folder / "summary.json", {"format": 1, **summary})
    return folder


def write_text_run(folder: Path, *, text: str = "4 + 4 = 8", name: str = "sums") -> Path:
    """Write a run of a language model with answers."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"format: 1\nname: {json.dumps(name, ensure_ascii=True)}\nseed: 0\n"
        "task: {use: arithmetic}\ntrainer: {num_generations: 8, max_steps: 30}\n"
    )
    write_json(folder / "environment.json", {"format": 1, "sessions": [{}]})
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 31):
            line = {"format": 1, "step": step, "time": 1.0, "cpu": 1.0, "reward": step / 30}
            line |= {"entropy": 1.0, "eval/accuracy_greedy": step / 60}
            file.write(json.dumps(line) + "\n")
    with (folder / "completions.jsonl").open("w") as file:
        for step in (10, 20, 30):
            row = {"step": step, "prompt": [{"role": "user", "content": text}]}
            row |= {"completion": text, "rewards": {text: 1.0, "b": None}, "advantage": -0.5}
            file.write(json.dumps(row) + "\n" + "not json\n[1]\n")
        file.write(json.dumps({"step": 30, "completion": "unfinished"})[:-3])
    with (folder / "samples.jsonl").open("w") as file:
        row = {"step": 30, "kind": "greedy", "prompt": text, "answer": "8", "completion": text}
        file.write(json.dumps({**row, "correct": False}) + "\n")
        file.write(json.dumps({"step": 30, "completion": "x" * (1 << 21)}) + "\n")
        file.write(json.dumps({**row, "completion": "y" * 50_000, "correct": True}) + "\n")
    return folder


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON."""
    path.write_text(encode(content))


class Page(HTMLParser):
    """The elements of a page, and its text."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words, self.faults = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(*folders):
    text = render(*gather(folders))
    page = Page(text)
    assert not page.faults, page.faults
    assert not page.open
    return page, text


def polopt(capsys, *arguments):
    code = main(["report", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)
