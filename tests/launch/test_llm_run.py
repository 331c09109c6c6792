"""Runs of text tasks: what they leave, how they go on, and that the model learns."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

from polopt.launch.job import prepare
from polopt.launch.recipe import RecipeError, override
from polopt.launch.record import read_metrics, read_run
from polopt.launch.run import Run
from polopt.launch.train import recipe_names

spec = importlib.util.spec_from_file_location("llm_setup", Path(__file__).with_name("llm_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)
SMALL, tree, job, execute = setup.SMALL, setup.tree, setup.job, setup.execute


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_run_folder(tmp_path, cache, capfd):
    first = job(*SMALL)
    summary = execute(first, tmp_path / "run")
    shown = capfd.readouterr().err
    assert "100 % · warming up the model, once" in shown
    assert "100 % · step 4/4" in shown
    assert summary["steps"] == 4
    assert summary["world_size"] == 1
    assert summary["samples"] >= 4 * 16
    assert summary["warmup_cpu_seconds"] > 0
    assert 0 <= summary["accuracy_after"]["sampled"] <= 1
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/accuracy_greedy" in line] == [0, 2, 4]
    assert {"reward", "entropy", "grad_norm", "clip_ratio/region_mean"} <= set().union(*lines)
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    sample = json.loads(samples[0])
    assert len(samples) == 3 * 2 * 16
    assert {"step", "kind", "prompt", "answer", "completion", "correct"} == set(sample)
    rows = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    assert len(rows) == 4 * 16
    row = json.loads(rows[-1])
    assert {"step", "prompt", "completion", "rewards", "advantage"} == set(row)
    assert row["step"] == 4
    assert set(row["rewards"]) == {"score_answer"}
    best = summary["best"]
    points = {p["step"]: p["eval/accuracy_sampled"] for p in lines if "eval/accuracy_sampled" in p}
    assert best["value"] == max(points.values()) == points[best["step"]]
    assert (best["folder"] is None) == (best["step"] == 0)
    assert (tmp_path / "run" / "learning_curve.svg").read_text().startswith("<svg")
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-4" / "model.safetensors").exists()
    assert read_run(tmp_path / "run").checkpoints == [4]
    # The model is warmed up once.
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    again = execute(job(*SMALL, "seed=1", "trainer.max_steps=1"), tmp_path / "again")
    assert again["warmup_cpu_seconds"] < summary["warmup_cpu_seconds"] / 2
    assert made.stat().st_mtime_ns == before
    assert again["accuracy_before"]["greedy"] == summary["accuracy_before"]["greedy"]


def test_resumed_run_is_the_uninterrupted_one(tmp_path, cache):
    every = ("trainer.save_steps=2",)
    whole = execute(job(*SMALL, *every), tmp_path / "whole")
    path = tmp_path / "cut"
    cut = execute(job(*SMALL, *every, "trainer.max_steps=2"), path)
    assert cut["steps"] == 2
    run = Run(path)
    resumed = run.finish(job(*SMALL, *every).train(run))
    assert resumed["steps"] == 4
    for key in ("accuracy_before", "accuracy_after", "samples", "groups"):
        assert resumed[key] == whole[key]
    weights = "checkpoints/checkpoint-4/model.safetensors"
    assert (path / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    # Other rows under the same names are noticed.
    with pytest.raises(RecipeError, match=r"data has changed since .*-4: 200 rows .* 200 rows"):
        job(*SMALL, *every, "task.seed=1").train(other := Run(path))
    other._lock.close()
    # A checkpoint that was not written to its end does not count.
    (path / "checkpoints" / "checkpoint-9").mkdir()
    run = Run(path)
    again = run.finish(job(*SMALL, *every).train(run))
    for key in ("steps", "accuracy_before", "accuracy_after", "samples", "groups"):
        assert again[key] == whole[key]


def test_other_algorithms_and_the_reference_model(tmp_path, cache):
    """GRPO's divergence needs the start of the run as reference: TRL loads it from the cache."""
    recipe = {**tree(*SMALL[:-1]), "algorithm": {"use": "grpo", "kl_coef": 0.1}}
    execute(prepare(recipe, name="test"), tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    kl = [line["kl"] for line in lines if "kl" in line]
    assert len(kl) == 4
    assert abs(kl[0]) < 1e-6 < kl[-1]


def test_any_point_on_the_axes(tmp_path, cache):
    """The exact divergence from the reference, and training on the tokens of highest entropy."""
    words = [w for w in SMALL if not w.startswith("algorithm")]
    recipe = tree(*words, "trainer.max_steps=2", "evaluation.every=null")
    recipe["algorithm"] = {
        "use": "adjusted",
        "base": {"use": "dapo", "refill": "reward", "max_rounds": 1},
        "objective": {"kl": "full", "kl_coef": 0.1},
        "sampling": {"top_entropy": 0.3},
    }
    made = prepare(recipe, name="test")
    assert prepare(made.tree, name="test").algorithm == made.algorithm
    execute(made, tmp_path / "run")
    lines = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in m]
    assert len(lines) == 2
    assert all(0 < m["sampling/entropy_threshold"] < m["entropy"] for m in lines)
    assert abs(lines[0]["kl"]) < 1e-6 < lines[1]["kl"]


def test_other_world_size_is_refused(tmp_path, cache):
    """`accelerate launch --cpu --num_processes 2` runs one process and says nothing."""
    two = job(*SMALL, "launch.processes=2", "trainer.per_device_train_batch_size=8")
    (tmp_path / "run").mkdir()
    with pytest.raises(RecipeError, match=r"'launch.processes' is 2, but 1 runs: .*--procs 2"):
        two.train(Run(tmp_path / "run", two.tree))
    assert not cache.exists()


def test_a_request_to_stop_saves_and_ends(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(Run, "should_stop", lambda self: True)
    summary = execute(job(*SMALL), tmp_path / "run")
    assert summary["steps"] == 1
    assert summary["accuracy_before"]["greedy"] is not None
    assert summary["accuracy_after"] == {"greedy": None, "sampled": None}
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-1" / "polopt.json").exists()


def test_the_best_model_is_kept(tmp_path, cache, monkeypatch, capsys):
    """The first of the best by sampled accuracy on held-out problems, as a model to load."""
    from polopt.ext.trl.evaluate import Problem
    from polopt.launch import llm_watch
    from polopt.launch.cli import main

    real, values, weights = llm_watch.judge, iter([0.25, 0.5, 0.75, 0.75, 0.5, 0.5]), []

    def judge(model, tokenizer, task, rows, **settings):
        value = next(values)
        weights.append(model.get_input_embeddings().weight.detach().clone())
        _, greedy, drawn = real(model, tokenizer, task, rows, **settings)
        return [Problem(None, False, [i < value * 32], ["1"]) for i in range(32)], greedy, drawn

    monkeypatch.setattr(llm_watch, "judge", judge)
    path = tmp_path / "run"
    summary = execute(job(*SMALL, "evaluation.every=1"), path)
    folder = str(path / "best")
    metric = "eval/accuracy_sampled"
    assert summary["best"] == {"step": 2, "metric": metric, "value": 0.75, "folder": folder}
    from transformers import AutoModelForCausalLM

    kept = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert (kept == weights[2]).all()
    assert not (kept == weights[3]).all()
    assert not (path / ".best").exists()
    # A resumed run knows it.
    run = Run(path)
    assert run.finish(job(*SMALL, "evaluation.every=1").train(run))["best"]["step"] == 2
    assert main(["eval", str(path), "--checkpoint", "best", "--samples", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == folder


def test_a_resumed_run_knows_that_it_began_with_its_best_model(tmp_path, cache, monkeypatch):
    accuracy = iter([0.75, 0.5, 0.5, 0.5])
    monkeypatch.setattr(
        "polopt.launch.llm_watch.report", lambda _: {"greedy": 0.0, "mean@1": next(accuracy)}
    )
    path, short = tmp_path / "run", [*SMALL, "evaluation.every=null", "trainer.max_steps=1"]
    first = execute(job(*short), path)["best"]
    assert (first["step"], first["value"], first["folder"]) == (0, 0.75, None)
    run = Run(path)
    assert run.finish(job(*short, "trainer.max_steps=2").train(run))["best"] == first
    assert not (path / "best").exists()


@pytest.mark.parametrize(("every", "what"), [("1", "best model to"), ("null", "checkpoint")])
def test_a_full_disk_is_one_sentence(here, cache, monkeypatch, capsys, every, what):
    """Whichever is written first, the best model or a checkpoint."""
    from safetensors import SafetensorError

    from polopt.ext.trl.trainer import PolicyTrainer
    from polopt.launch.cli import main

    def full(self, *args, **kwargs):
        raise SafetensorError("No space left on device")

    accuracy = iter([0.0, 0.5, 0.6, 0.7, 0.8])
    monkeypatch.setattr(PolicyTrainer, "save_model", full)
    monkeypatch.setattr(
        "polopt.launch.llm_watch.report", lambda _: {"greedy": 0.0, "mean@1": next(accuracy)}
    )
    words = ["train", "arithmetic-dapo", *SMALL, f"evaluation.every={every}", "--json"]
    assert main([*words, "trainer.save_steps=1"]) == 1
    out, err = capsys.readouterr()
    assert f"cannot write the {what}" in json.loads(out)["error"]
    assert "Traceback" not in err


def test_a_folder_without_a_model_is_one_sentence(here, cache, capsys):
    from polopt.launch.cli import main

    (here / "empty").mkdir()
    model = "model={use: pretrained, path: ./empty}"
    assert main(["train", "arithmetic-dapo", *SMALL, model]) == 2
    err = capsys.readouterr().err
    assert "polopt: cannot load the model 'empty': " in err
    assert "Traceback" not in err


def test_several_samples_and_completions_of_bounded_size(tmp_path, cache, monkeypatch):
    from polopt.launch import llm_watch

    monkeypatch.setattr(llm_watch, "_MOST", 3000)
    execute(job(*SMALL, "evaluation.samples=4", "evaluation.every=null"), tmp_path / "run")
    size = (tmp_path / "run" / "completions.jsonl").stat().st_size
    assert 3000 < size < 6000
    first, *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for line in (first, last):
        assert {"eval/pass@2", "eval/pass@4", "eval/majority@4"} <= set(line)
        assert line["eval/accuracy_sampled"] <= line["eval/pass@2"] <= line["eval/pass@4"]


@pytest.mark.slow
def test_adapters_are_trained_on_a_model_that_stays(tmp_path, cache, capsys):
    """LoRA: the reference is the model without adapters, and an evaluation loads both."""
    pytest.importorskip("peft")
    from polopt.launch.cli import main

    base = job(*SMALL).model.make(job(*SMALL).task, None)
    before = (base / "model.safetensors").read_bytes()
    model = f"model={{use: pretrained, path: {base}, lora: {{r: 4, target_modules: all-linear}}}}"
    knobs = [w for w in SMALL if "model." not in w and "refill" not in w]
    recipe = tree(*knobs, "trainer.learning_rate=0.05")
    recipe["algorithm"] = {"use": "grpo", "kl_coef": 0.1}
    override(recipe, model)
    path = tmp_path / "run"
    summary = execute(prepare(recipe, name="test"), path)
    lines = read_metrics(path / "metrics.jsonl")
    kl = [line["kl"] for line in lines if "kl" in line]
    assert abs(kl[0]) < 1e-6
    assert kl[-1] > 1e-4
    last = path / "checkpoints" / "checkpoint-4"
    assert (last / "adapter_model.safetensors").exists()
    assert not (last / "model.safetensors").exists()
    assert (base / "model.safetensors").read_bytes() == before
    assert main(["eval", str(path), "--samples", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["greedy"] == summary["accuracy_after"]["greedy"]
    # A run that has ended is not trained on, and evaluates its last adapters.
    run = Run(path)
    (path / "metrics.jsonl").write_text("")
    again = run.finish(prepare(recipe, name="test").train(run))
    assert again["accuracy_after"]["greedy"] == summary["accuracy_after"]["greedy"]


@pytest.mark.slow
def test_it_learns_held_out_problems(tmp_path, cache):
    summary = execute(
        job("model.warmup_steps=1000", "trainer.max_steps=150", "evaluation.every=null"),
        tmp_path / "run",
    )
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    assert after["sampled"] - before["sampled"] >= 0.15
    assert after["greedy"] > before["greedy"]


@pytest.mark.slow
def test_two_processes(start, only_run, here, cache):
    words = [w for w in SMALL if "batch_size" not in w]
    process = start(
        "train", "arithmetic-dapo", *words, "launch.processes=2",
        "trainer.per_device_train_batch_size=8", "--json", POLOPT_CACHE=str(cache),
    )  # fmt: skip
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    summary = json.loads(out)
    assert summary["world_size"] == 2
    assert summary["steps"] == 4
    assert summary["samples"] >= 4 * 16
    assert len(list(cache.iterdir())) == 1
    saved = only_run() / "checkpoints" / "checkpoint-4"
    assert {"rng_state_0.pth", "rng_state_1.pth", "polopt.json"} <= {
        p.name for p in saved.iterdir()
    }
    assert not (only_run() / "checkpoints" / "_saving").exists()
    lines = read_metrics(only_run() / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/accuracy_greedy" in line] == [0, 2, 4]


@pytest.mark.slow
def test_sigterm_saves_and_the_run_can_go_on(start, only_run, wait_for_lines, cache):
    words = [
        "train",
        "arithmetic-dapo",
        *SMALL,
        "trainer.max_steps=100000",
        "evaluation.every=null",
    ]
    process = start(*words, POLOPT_CACHE=str(cache))
    wait_for_lines(6)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err[-3000:]
    assert "SIGTERM: ending after this update" in err
    summary = json.loads((only_run() / "summary.json").read_text())
    assert (summary["status"], summary["signal"]) == ("stopped", "SIGTERM")
    steps = summary["steps"]
    assert steps >= 5
    assert read_run(only_run()).checkpoints == [steps]
    resume = ["train", "--resume", str(only_run()), f"trainer.max_steps={steps + 2}", "--json"]
    process = start(*resume, POLOPT_CACHE=str(cache))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    assert json.loads(out)["steps"] == steps + 2
    steps_logged = [m["step"] for m in read_metrics(only_run() / "metrics.jsonl") if "reward" in m]
    assert steps_logged == list(range(1, steps + 3))


@pytest.mark.slow
def test_other_algorithms_train_on_two_ranks(tmp_path, cache):
    script = Path(__file__).with_name("llm_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trained = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" trained")]
    assert set(trained) == {name for name in recipe_names() if name.startswith("arithmetic-")}
    assert done.stdout.count("told: the reward 'mine' gave 'x' (str) to completion 0") == 2
