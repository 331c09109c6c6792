"""What the readers take, and what they say about the rest."""

import gzip
import json
import math
import os
import struct
import threading
import time
from itertools import pairwise

import pytest

from polopt.launch.doctor import log as log_module
from polopt.launch.doctor import readers
from polopt.launch.doctor.diagnose import diagnose
from polopt.launch.doctor.log import Series
from polopt.launch.doctor.readers import NotALogError, read
from polopt.launch.tensorboard import EventWriter, checksum


def one(path):
    (found,) = read(path)
    return found


def write(path, text):
    path.write_text(text)
    return path


def rows(count=20, **columns):
    return "".join(
        json.dumps({"step": i, **{k: f(i) for k, f in columns.items()}}) + "\n"
        for i in range(1, count + 1)
    )


def test_our_run_folder_with_a_resumed_part(tmp_path):
    lines = [
        {"format": 1, "step": s, "time": 1.0, "cpu": 1.0, "return_mean": float(s)}
        for s in (1, 2, 3)
    ]
    lines.insert(3, {"format": 1, "step": 1, "time": 1.0, "cpu": 1.0, "resumed_from": 1})
    lines.append({"format": 1, "step": 2, "time": 1.0, "cpu": 1.0, "return_mean": "NaN"})
    lines.append({"format": 1, "step": 4, "time": 1.0, "cpu": 1.0, "return_mean": 9.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "config.yaml").write_text(
        "task: {use: cartpole}\ncollector: {num_envs: 4, total_frames: 9}\n"
        "optimizer: {lr: {use: Warmup, steps: 9, then: {use: Cosine, start: 2e-3, end: 1e-4}}}\n"
    )
    found = one(tmp_path)
    assert (found.framework, found.kind) == ("polopt", "control")
    assert found.columns["reward"].steps == [1, 4]
    assert found.columns["reward"].nonfinite == 1
    assert found.columns["reward"].first_nonfinite == 2
    assert found.settings["lr"] == 2e-3
    assert found.paths["num_envs"] == "collector.num_envs"


def test_trainer_state_and_its_prefixless_names(tmp_path):
    state = {
        "global_step": 3,
        "log_history": [
            {"step": s, "reward": s / 10, "kl": 0.1, "entropy": 1.0} for s in (1, 2, 3)
        ],
        "max_steps": 3,
        "save_steps": 500,
    }
    write(tmp_path / "trainer_state.json", json.dumps(state, indent=2))
    found = one(tmp_path)
    assert (found.framework, found.kind) == ("trl", "llm")
    assert found.columns["reward"].values == [0.1, 0.2, 0.3]
    assert found.settings["save_every"] == 500
    assert found.settings["total"] == 3


def test_rewards_that_trl_could_not_average(tmp_path):
    lines = [
        {"step": i, "reward": 0.5 if i < 4 else None, "rewards/a/mean": None, "grad_norm": 1.0}
        for i in range(1, 9)
    ]
    state = {"log_history": lines}
    for name, text in (
        ("trainer_state.json", json.dumps(state)), ("a.log", "\n".join(map(str, lines)))
    ):  # fmt: skip
        found = one(write(tmp_path / name, text))
        assert (found.framework, found.columns["reward"].nonfinite) == ("trl", 5)
        assert found.columns["reward"].first_nonfinite == 4
        assert "reward_part" not in found.columns
        assert [f.id for f in diagnose(found)] == ["reward-nonfinite"]


def test_a_trainer_state_that_was_cut_off(tmp_path):
    text = json.dumps({"log_history": [{"step": s, "reward": 0.5} for s in range(9)]})
    found = one(write(tmp_path / "trainer_state.json", text[:150]))
    assert 0 < found.rows < 9
    assert "cut off" in found.notes[0]


def test_the_newest_checkpoint_of_an_output_folder(tmp_path):
    for step in (9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"step": s, "reward": 0.5} for s in range(step)]
        write(folder / "trainer_state.json", json.dumps({"log_history": history}))
    assert one(tmp_path).rows == 10


def test_sb3_table_with_entropy_turned_round_and_settings_inferred(tmp_path):
    head = (
        "time/iterations,rollout/ep_rew_mean,train/entropy_loss,train/approx_kl,train/clip_range,"
    )
    text = head + "train/n_updates,time/total_timesteps\n"
    for i in range(1, 6):
        text += f"{i},{i}.5,-0.6,0.01,0.2,{(i - 1) * 10},{i * 256}\n"
    found = one(write(tmp_path / "progress.csv", text + "6,7.5,-0"))
    assert (found.framework, found.kind) == ("sb3", "control")
    assert found.columns["entropy"].values == [0.6] * 5
    assert found.settings["epochs"] == 10
    assert found.settings["batch"] == 256
    assert found.notes == ["the end of the file is cut off, what is whole was read"]


def test_tensorboard_files_of_ours(tmp_path):
    writer = EventWriter(tmp_path)
    for step in range(1, 6):
        writer.scalars(step, {"return_mean": step, "kl_approx": math.nan, "other": 1.0})
    writer.close()
    writer = EventWriter(tmp_path, purge=4)
    writer.scalars(4, {"return_mean": 40.0})
    writer.close()
    found = one(tmp_path)
    assert found.columns["reward"].values == [1, 2, 3, 40]
    assert found.columns["kl_update"].nonfinite == 5
    assert "other" not in found.columns


def test_tensorboard_files_of_torch(tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard")
    with board.SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 6):
            writer.add_scalar("train/reward", step / 8, step)
            writer.add_scalar("train/frac_reward_zero_std", 0.25, step, new_style=True)
            writer.add_text("note", "text", step)
    found = one(tmp_path)
    assert found.framework == "trl"
    assert found.columns["reward"].values == [s / 8 for s in range(1, 6)]
    assert found.columns["zero_std_groups"].values == [0.25] * 5


def test_a_damaged_event_file_is_read_as_far_as_it_is_whole(tmp_path):
    writer = EventWriter(tmp_path)
    for step in range(1, 6):
        writer.scalars(step, {"return_mean": step})
    writer.close()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    found = one(tmp_path)
    assert found.columns["reward"].values == [1, 2, 3, 4]
    assert found.notes == ["the end of the file is cut off, what is whole was read"]
    length = struct.pack("<Q", 2**60)  # a record that claims to be an exabyte
    file.write_bytes(whole + length + checksum(length))
    found = one(tmp_path)
    assert found.columns["reward"].values == [1, 2, 3, 4, 5]
    assert found.notes == ["a line that cannot be read was left out"]


def test_scalars_of_torchrl(tmp_path):
    folder = tmp_path / "run" / "scalars"
    (folder / "train").mkdir(parents=True)
    text = "".join(f"{i * 100},{i / 10}\n" for i in range(1, 13))
    write(folder / "r_training.csv", text)
    write(folder / "train" / "entropy.csv", text + "1300,na")
    write(folder / "grad_norm_0.csv", text + "1300,nan\n")
    found = one(tmp_path / "run")
    assert (found.framework, found.kind, found.rows) == ("torchrl", "control", 12)
    assert found.columns["reward"].values[-1] == 1.2
    assert found.names["entropy"] == "train/entropy"
    assert found.columns["grad_norm"].first_nonfinite == 1300
    assert found.notes == ["a line that cannot be read was left out"]
    write(folder / "r_training.csv", "")
    assert one(tmp_path).rows == 12


def test_verl_console_with_colours_prefixes_and_an_oom(tmp_path):
    text = "\x1b[36m(TaskRunner pid=7)\x1b[0m starting\n"
    for step in range(1, 4):
        text += (
            f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - actor/entropy:0.{step} - "
            "critic/score/mean:0.5 - actor/grad_norm:nan - val-core/gsm8k/reward/mean@1:0.25\n"
        )
    text += '  File "x.py", line 3, in update_actor\ntorch.OutOfMemoryError: CUDA out of memory.\n'
    found = one(write(tmp_path / "train.log", text))
    assert (found.framework, found.kind) == ("verl", "llm")
    assert found.columns["entropy"].values == [0.1, 0.2, 0.3]
    assert found.columns["grad_norm"].nonfinite == 3
    assert found.columns["eval_reward"].values == [0.25] * 3
    assert [(m.kind, m.phase, m.line) for m in found.mentions] == [("oom", "update", 6)]


def test_verl_json_lines_and_console_dicts_of_transformers(tmp_path):
    text = "".join(
        json.dumps({"step": s, "data": {"actor/entropy": 0.5, "critic/score/mean": 0.1}}) + "\n"
        for s in range(5)
    )
    assert one(write(tmp_path / "a.jsonl", text)).columns["entropy"].values == [0.5] * 5
    text = "  0%|  | 0/9\n" + "{'loss': '0.1', 'reward': 0.5, 'grad_norm': nan, 'epoch': 1}\n" * 5
    found = one(write(tmp_path / "b.log", text))
    assert found.framework == "trl"
    assert found.columns["reward"].values == [0.5] * 5
    assert found.columns["grad_norm"].nonfinite == 5
    assert "counted" in found.notes[0]


def test_the_share_of_peak_arithmetic_is_no_utilisation(tmp_path):
    lines = [
        {"step": i, "data": {"perf/mfu/actor": 0.12, "critic/score/mean": 0.02 * i}}
        for i in range(1, 40)
    ]
    found = one(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines))))
    assert found.framework == "verl"
    assert diagnose(found) == []  # 12 % is what a busy GPU may reach


def test_gzip_is_looked_through(tmp_path):
    path = tmp_path / "metrics.jsonl.gz"
    path.write_bytes(gzip.compress(rows(return_mean=float).encode()))
    assert one(path).rows == 20


def test_several_runs_in_one_file(tmp_path):
    path = write(
        tmp_path / "a.jsonl", rows(return_mean=float) + rows(12, return_mean=lambda i: 2.0 * i)
    )
    first, second = read(path)
    assert (first.rows, second.rows) == (20, 12)
    assert second.columns["reward"].values[-1] == 24.0
    assert "run 2 of 2" in second.source


def test_steps_out_of_order_are_sorted(tmp_path):
    lines = rows(return_mean=float).splitlines(keepends=True)
    mixed = [lines[(7 * i) % 20] for i in range(20)]
    found = one(write(tmp_path / "a.jsonl", "".join(mixed)))
    assert found.columns["reward"].values == [float(i) for i in range(1, 21)]
    assert "out of order" in found.notes[0]


def test_a_cut_and_a_damaged_line(tmp_path):
    text = (
        rows(5, return_mean=float)
        + "garbage {\n"
        + rows(9, return_mean=float)[-40:]
        + '{"step": 10, "ret'
    )
    found = one(write(tmp_path / "a.jsonl", text))
    assert "cut off" in found.notes[0]
    assert found.notes[1] == "2 lines that cannot be read were left out"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "is empty"),
        ("model.pt", b"PK\x03\x04\x00\x00\x00data", "is a binary file"),
        ("notes.txt", b"to do: buy milk\n", "no metric that is known"),
        ("foreign.jsonl", b'{"step": 1, "foo/bar": 2}\n', "it has foo/bar"),
        ("deep.jsonl", b"[" * 100_000 + b"\n", "no metric that is known"),
        ("bad.gz", b"\x1f\x8b\x08\x00rubbish-rubbish", "cannot read"),
        ("table.csv", b"step,colour\n1,2\n", "no metric that is known"),
    ],
)
def test_what_is_not_a_log_is_one_sentence(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(NotALogError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_nothing_there_and_an_empty_folder(tmp_path):
    with pytest.raises(NotALogError, match="there is no file"):
        read(tmp_path / "none")
    with pytest.raises(NotALogError, match="has no log that is read"):
        read(tmp_path)


def test_what_cannot_be_read_does_not_hide_the_rest(tmp_path):
    row = '{"step": 1, "loss": 2.0}\n'
    for name, content in (("a", row), ("b", "\0"), ("c", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(content)
    (tmp_path / "d.log").mkdir()  # a folder of that name
    (log,) = read(tmp_path)
    assert log.source == str(tmp_path / "a")
    assert [note.split(" is ")[1] for note in log.notes if note.startswith("left out: ")] == [
        "a binary file, and not a TensorBoard file", "empty",
    ]  # fmt: skip


def test_what_may_not_be_opened_does_not_hide_the_rest(tmp_path, monkeypatch):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"step": 1, "loss": 2.0}\n')
    opened = readers._open

    def forbidding(path):
        if path.name == "a.jsonl":
            raise PermissionError(13, "Permission denied")
        return opened(path)

    monkeypatch.setattr(readers, "_open", forbidding)
    (log,) = read(tmp_path)
    assert log.source == str(tmp_path / "b.jsonl")
    assert log.notes == [f"left out: cannot read {tmp_path / 'a.jsonl'}: Permission denied"]
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(NotALogError, match=r"cannot read .*a\.jsonl: Permission denied"):
        read(tmp_path)


def test_a_damaged_text_beside_a_table(tmp_path):
    (tmp_path / "progress.csv").write_text("time/total_timesteps,rollout/ep_rew_mean\n1,2\n2,3\n")
    (tmp_path / "a.log").mkdir()
    (tmp_path / "b.log").write_bytes(gzip.compress(b"x" * 9999)[:20])
    assert read(tmp_path)[0].columns["reward"].values == [2.0, 3.0]


@pytest.mark.parametrize(
    "line", ["{'a': " * 150_000, "step:1 - " + "a" * 900_000, "step:1 - " + "a:1 " * 200_000]
)
def test_no_line_takes_long(tmp_path, line):
    path = tmp_path / "verl.log"
    path.write_text(f"{line}\nstep:2 - actor/entropy:0.5 - critic/score/mean:-1e-3\n")
    begin = time.process_time()
    (log,) = read(path)
    assert time.process_time() - begin < 5.0  # what is quadratic takes minutes
    assert log.columns["entropy"].values == [0.5]
    assert log.columns["reward"].values == [-1e-3]


def test_values_and_settings_beyond_all_sums(tmp_path):
    huge = "1" + "0" * 400
    (tmp_path / "config.yaml").write_text(f"collector: {{total_frames: {huge}}}")
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {i}, "return_mean": {v}}}\n' for i, v in enumerate(("1.7e308", 1, huge))
        )
    )
    (log,) = read(tmp_path)
    assert log.settings["total"] == math.inf
    assert log.columns["reward"].nonfinite == 2
    assert "reward-nonfinite" in [f.id for f in diagnose(log)]


def test_a_step_beyond_all_numbers(tmp_path):
    path = tmp_path / "verl.log"
    path.write_text(f"step:{'9' * 400} - actor/entropy:0.5\nstep:2 - actor/entropy:0.5\n")
    assert read(path)[0].columns["entropy"].steps == [2.0]


def test_marks_of_the_byte_order_and_spaces(tmp_path):
    (tmp_path / "a.csv").write_text("\ufeffstep,loss\r\n5,2\r\n7,3\r\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{ "step": 5, "loss": 2 }\n{ "step": 7, "loss": 3 }\n')
    for path in tmp_path.iterdir():
        (log,) = read(path)
        assert log.columns["loss"].steps == [5.0, 7.0]
        assert log.notes == []


def test_text_of_powershell(tmp_path):
    text = "step:5 - actor/entropy:0.5\r\nstep:7 - actor/entropy:0.25\r\n"
    for name in ("utf-16-le", "utf-16-be"):
        (tmp_path / name).write_bytes(("\ufeff" + text).encode(name))
        assert one(tmp_path / name).columns["entropy"].values == [0.5, 0.25]


def test_json_lines_amid_other_text(tmp_path):
    text = "a warning\n" + rows(4, return_mean=float) + "CUDA out of memory\n{}\n"
    found = one(write(tmp_path / "a.log", text))
    assert found.columns["reward"].values == [1.0, 2.0, 3.0, 4.0]
    assert [m.kind for m in found.mentions] == ["oom"]


def test_json_lines_without_a_step_are_no_rows(tmp_path):
    sample = '{"prompt": "1+1", "reward": 0.5}\n{"level": "error", "msg": "CUDA out of memory"}\n'
    lines = [f"step:{i} - critic/score/mean:{i}.0\n" for i in (1, 2, 3)]
    found = one(write(tmp_path / "a.log", sample.join(lines)))
    assert found.columns["reward"].values == [1.0, 2.0, 3.0]
    assert {m.kind for m in found.mentions} == {"oom"}


def test_a_pipe(tmp_path):
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    text = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 3.0}\n'
    writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
    writer.start()
    assert one(pipe).columns["loss"].values == [2.0, 3.0]
    writer.join()


def test_a_pickle_is_not_opened(tmp_path):
    path = tmp_path / "training_args.bin"
    path.write_bytes(
        b"\x80\x04cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR."
    )
    with pytest.raises(NotALogError):
        read(path)
    assert not (tmp_path / "owned").exists()


def test_a_series_keeps_extremes_in_bounded_memory():
    series = Series()
    for step in range(100_000):
        series.add(step, 1e6 if step == 54_321 else 1.0)
    assert len(series) <= 2 * log_module.LIMIT
    assert max(p[3] for p in series.points) == 1e6
    assert series.steps == sorted(series.steps)
    assert sum(p[4] for p in series.points) == 100_000
    gaps = [b - a for a, b in pairwise(series.steps)]
    assert max(gaps) == min(gaps) == series.width  # early and late parts weigh the same


@pytest.mark.slow
def test_a_huge_log_in_bounded_memory(tmp_path):
    """1 GB, sparse: lines at both ends, and one line of a gigabyte between them."""
    import resource

    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.write(rows(500, return_mean=float).encode())
        file.write(b'{"step": 501, "junk": "')
        file.seek(1 << 30, 1)  # a hole, which takes no room on the disk
        file.write(b'"}\n')
        text = "".join(
            json.dumps({"step": i, "return_mean": 1.0}) + "\n" for i in range(502, 200_000)
        )
        file.write(text.encode())
    assert path.stat().st_size > 1 << 30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = one(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 * 1024  # KB
    assert found.rows == 199_998
    assert found.notes == ["a line that cannot be read was left out"]
