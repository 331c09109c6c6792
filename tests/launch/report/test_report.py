"""The report: what it says about runs, and that no content of a run can do harm."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import HOSTILE, Page, page_of, polopt, write_run, write_text_run

from polopt.ext.metrics import PHASES
from polopt.launch.report.compare import curve, sections
from polopt.launch.report.gather import gather
from polopt.launch.report.page import MARK
from polopt.launch.report.samples import clean, read_samples
from polopt.launch.tensorboard import EventWriter


def test_seeds_are_put_together_and_configurations_compared(tmp_path, capsys):
    for seed, last in enumerate((160.0, 170.0, 180.0)):
        write_run(tmp_path / f"a{seed}", seed=seed, values=[10.0, last])
    write_run(tmp_path / "b", seed=0, lr=1e-4, values=[5.0, 50.0])
    code, found = polopt(capsys, tmp_path, "-o", tmp_path / "out.html")
    assert (code, found["runs"]) == (0, 4)
    first, second = found["configurations"]
    assert first["configuration"] == "cartpole-ppo · lr 0.001"
    assert second["configuration"] == "cartpole-ppo · lr 0.0001"
    assert first["results"]["evaluation"] == {"mean": 170.0, "deviation": 10.0, "runs": 3}
    assert first["results"]["solved"]["mean"] == 1.0
    assert second["results"]["evaluation"] == {"mean": 50.0, "deviation": None, "runs": 1}
    assert first["results"]["CPU-seconds"]["mean"] == 2.5
    page = Page((tmp_path / "out.html").read_text())
    assert "170 ± 10" in page.text
    assert "3 of 3" in page.text
    assert "0 of 1" in page.text
    assert "optimizer.lr 0.001 0.0001" in page.text  # what differs


def test_labels_tell_what_differs_and_bookkeeping_does_not_split(tmp_path):
    ours = {
        "no": "replay: {prioritised: null}\ncheckpoints: {every: 10}\n",
        "too": "replay: {prioritised: null}\ncheckpoints: {every: 20}\n",
        "six": "replay: {prioritised: {alpha: 0.6, beta: 0.4, eps: 0.001}}\n",
        "seven": "replay: {prioritised: {alpha: 0.7, beta: 0.4, eps: 0.001}}\n",
    }
    for seed, (name, text) in enumerate(ours.items()):
        with (write_run(tmp_path / name, seed=seed) / "config.yaml").open("a") as file:
            file.write(f"{text}algorithm: {{alpha: 1.0}}\n")

    def labels(*names):
        (section,) = sections(gather([tmp_path / n for n in names])[0], 7)
        return [group.label.removeprefix("cartpole-ppo · ") for group in section.groups]

    assert labels("no", "too") == ["cartpole-ppo"]
    assert labels("no", "six") == ["no replay.prioritised", "replay.prioritised"]
    assert labels("six", "seven") == ["prioritised.alpha 0.6", "prioritised.alpha 0.7"]
    assert labels("no", "six", "seven") == [
        "no replay.prioritised",
        "replay.prioritised, prioritised.alpha 0.6",
        "replay.prioritised, prioritised.alpha 0.7",
    ]


def test_the_reward_of_a_batch_that_was_refilled_says_so(tmp_path):
    plain, filled = (write_text_run(tmp_path / name) for name in ("plain", "filled"))
    with (filled / "config.yaml").open("a") as file:
        file.write("algorithm: {use: dapo, refill: correct}\n")
    assert "after refilling" not in page_of(plain)[1]
    assert "reward, after refilling" in page_of(filled)[1]


def test_what_a_chart_is_about_stands_above_it(tmp_path):
    page, text = page_of(write_run(tmp_path / "a", extra={"memory_host": 0.5}))
    assert "greedy_return · dotted: bar 150" in page.text
    assert ">bar 150</text>" not in text
    assert "memory_host, GiB" in page.text


def test_nothing_is_cut_by_less_than_it_takes_to_say_so():
    assert clean("x" * 70, 60) == "x" * 70
    assert clean("x" * 100, 60) == "x" * 60 + " … (40 more characters)"


def test_an_evaluation_of_the_beginning_alone_is_no_result(tmp_path):
    run = write_run(tmp_path / "a", values=[10.0, 20.0])
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[1], lines[0], lines[2]]))
    ((found,), _) = gather([run])
    assert "evaluation" not in found.facts
    assert found.facts["training reward"] == 20.0


def test_tasks_stand_apart(tmp_path):
    runs = [write_run(tmp_path / n, task=n) for n in ("cartpole", "pendulum")]
    found = sections(gather(runs)[0], 7)
    assert [len(s.groups) for s in found] == [1, 1]
    page, _ = page_of(*runs)
    assert "2 runs · 2 configurations" in page.text


def test_means_over_seeds(tmp_path):
    long = write_run(tmp_path / "a", seed=0, values=[0.0, 10.0, 20.0, 30.0])
    short = write_run(tmp_path / "b", seed=1, values=[10.0, 20.0])
    (section,) = sections(gather([long, short])[0], 7)
    (group,) = section.groups
    held = curve(group, "reward", points=100, hold=True)
    assert list(held.mean) == [(1000.0, 5.0), (2000.0, 15.0), (3000.0, 20.0), (4000.0, 25.0)]
    deviation = math.sqrt(50.0)  # of 20 and 30, where the short one counts with its last
    assert held.band[-1] == pytest.approx((4000.0, 25.0 - deviation / 1, 25.0 + deviation / 1))
    assert list(held.ends) == [(2000.0, 20.0)]
    shared = curve(group, "reward", points=100, hold=False)
    assert [x for x, _ in shared.mean] == [1000.0, 2000.0]
    # A run that did not complete counts no longer than it was logged.
    (short / "summary.json").unlink()
    (section,) = sections(gather([long, short])[0], 7)
    assert [x for x, _ in curve(section.groups[0], "reward", points=100, hold=True).mean] == [
        1000.0,
        2000.0,
    ]


def test_a_seed_that_was_run_twice_is_not_two_seeds(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_run(tmp_path / name, seed=seed)
    page, text = page_of(tmp_path)
    assert "mean over 3 runs" in page.text
    assert "seeds" not in page.text
    assert "3 seeds" not in text
    page, _ = page_of(tmp_path / "a", tmp_path / "c")
    assert "mean over 2 seeds" in page.text


def test_many_points_are_averaged_and_their_range_kept(tmp_path):
    run = write_run(tmp_path / "a", values=[float(i % 2) for i in range(1, 401)])
    (section,) = sections(gather([run])[0], 7)
    line = curve(section.groups[0], "reward", points=40, hold=True)
    assert len(line.mean) == 40
    assert line.mean[0] == (10_000.0, 0.5)
    assert line.band[0] == (10_000.0, 0.0, 1.0)


def test_phases_name_what_binds_and_its_knob(tmp_path):
    page, _ = page_of(write_run(tmp_path / "a"))
    assert "collecting binds: 50% of the measured time." in page.text
    assert "collector.num_envs" in page.text
    stack = [a for tag, a in page.tags if tag == "i"]
    assert [a["title"] for a in stack] == [
        "collecting: 50.0 %, 6 s", "backward: 25.0 %, 3 s", "optimizer: 25.0 %, 3 s",
    ]  # fmt: skip


def test_findings_of_the_doctor(tmp_path):
    run = write_run(tmp_path / "a", values=[10.0] * 20, extra={"grad_norm": "NaN"})
    page, _ = page_of(run)
    assert "not finite" in page.text
    assert any(tag == "details" and "open" in a for tag, a in page.tags)  # it is fatal


def test_a_chart_tells_what_it_cannot_draw(tmp_path):
    run = write_run(tmp_path / "a", values=[1.0, math.nan, 3.0, math.inf])
    page, _ = page_of(run)
    assert "2 values NaN or infinite, the first at 2000" in page.text


@pytest.fixture
def hostile(tmp_path):
    bad = HOSTILE.replace("\x00", "").replace("\ud800", "").replace("\x1b", "")  # YAML takes none
    extra = {"loss_objective": "NaN", "clip_fraction": 1e308, "explained_variance": -1e308}
    runs = [
        write_run(tmp_path / "a</title><script>x", name=bad, task=bad, extra=extra),
        write_run(tmp_path / "one\x1b[31m\u202e\udcff", name="", values=[1.0]),
        tmp_path / "none",
        write_run(tmp_path / "on", ended=False),
        write_text_run(tmp_path / "text", text=HOSTILE, name=HOSTILE.replace("\ud800", "")),
    ]
    write_run(runs[2], ended=False)
    (runs[2] / "metrics.jsonl").write_text("")
    with (runs[3] / "metrics.jsonl").open("a") as file:
        file.write('{"format": 1, "step": 4000, "ti')
    return runs


def test_hostile_content_stays_text(hostile):
    page, text = page_of(*hostile)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "link", "iframe", "object", "a", "base", "form"}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert not {"src", "href", "srcset", "action"} & attributes.keys()
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\ud800-\udfff]", text)
    assert text.startswith(MARK)
    policy = next(a["content"] for _, a in page.tags if "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "<script>document.title='owned'</script>" in page.text  # shown as it was written
    assert "{{ 7*7 }}" in page.text
    assert not any(ord(c) < 32 and c not in "\n\t" for c in text)
    assert "y" * 1500 + " … (48500 more characters)" in page.text
    assert "x" * 1000 not in page.text
    assert "nothing was logged yet" in page.text
    assert "unfinished" not in page.text


def test_samples_of_the_beginning_the_middle_and_the_end(tmp_path):
    run = write_text_run(tmp_path / "a")
    found = read_samples(run)
    assert [s.step for s in found if s.kind == "training"] == [10, 20, 30]
    held = [s for s in found if s.kind == "greedy"]
    assert [s.marks for s in held] == [{"correct": "no"}, {"correct": "yes"}]
    assert found[-1].marks == {"4 + 4 = 8": "1", "b": "none", "advantage": "−0.5"}
    assert read_samples(tmp_path) == []


def test_samples_from_the_tables_of_trl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "completions").mkdir()
    for step in (1, 2, 3, 4, 5):
        rows = [
            {"step": step, "prompt": [{"role": "user", "content": HOSTILE[:40]}],
             "completion": f"answer {step}.{i}", "right": 0.5, "advantage": -1.0}
            for i in range(9)
        ]  # fmt: skip
        path = tmp_path / "completions" / f"completions_{step:05d}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (tmp_path / "completions" / "completions_00006.parquet").write_bytes(b"PAR1 no")
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    history = [{"step": s, "reward": s / 5, "completions/mean_length": 3.0} for s in range(1, 6)]
    state = {"global_step": 5, "log_history": history}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    ((run,), errors) = gather([checkpoint])
    assert not errors
    # The last of the six is damaged.
    assert [s.completion for s in run.samples] == [
        f"answer {step}.{i}" for step in (1, 3) for i in range(4)
    ]
    assert run.samples[0].marks == {"right": "0.5", "advantage": "−1"}
    page, _ = page_of(checkpoint)
    assert "answer 3.2" in page.text


@given(st.text(st.characters(), max_size=40))
def test_clean_text_can_be_encoded(text):
    shown = clean(text).encode().decode()
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert not any("\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069" for c in shown)


def test_seeds_in_the_names_of_foreign_logs(tmp_path):
    rows = "time/total_timesteps,rollout/ep_rew_mean,train/loss\n"
    for name in ("ppo-seed1", "ppo-seed2", "a2c"):
        (tmp_path / name).mkdir()
        text = rows + "".join(f"{100 * i},{i},0.5\n" for i in range(1, 9))
        (tmp_path / name / "progress.csv").write_text(text)
    (section,) = sections(gather([tmp_path])[0], 7)
    assert sorted(len(g.runs) for g in section.groups) == [1, 2]
    assert section.title == "stable-baselines3"
    page_of(tmp_path)


def test_names_of_foreign_logs(tmp_path):
    (tmp_path / "ppo").mkdir()
    writer = EventWriter(tmp_path / "ppo")
    for step in (1, 2, 3):
        writer.scalars(step, {"rollout/ep_rew_mean": float(step)})
    writer.close()
    ((run,), _) = gather([next((tmp_path / "ppo").iterdir())])
    assert run.name == f"{tmp_path.name}/ppo"
    text = "".join(
        f"(TaskRunner pid=1) step:{s} - actor/pg_loss:0.1 - critic/score/mean:0.{s}"
        " - timing_s/gen:9.0 - timing_s/update_actor:1.0\n"
        for s in range(1, 9)
    )
    (tmp_path / "train.log").write_text(text)
    page, _ = page_of(tmp_path / "train.log")
    assert "generation binds: 90% of the measured time." in page.text
    assert "data.max_response_length" in page.text


def test_every_phase_is_in_the_documents():
    text = Path(__file__).parents[3].joinpath("docs", "report.md").read_text()
    for phase in PHASES:
        assert f"| `time_{phase}` |" in text


def test_fifty_configurations(tmp_path):
    runs = [write_run(tmp_path / str(i), lr=1e-3 * (i + 1)) for i in range(50)]
    page, text = page_of(*runs)
    assert "29 others" in page.text
    assert len(text) < 3_000_000
