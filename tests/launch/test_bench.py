"""`polopt bench`: statistics, tables, refusals, and real runs as small as they go."""

import importlib
import json

import pytest

pytest.importorskip("torchrl")

from polopt.launch.bench.meter import TASKS
from polopt.launch.bench.report import summarise
from polopt.launch.bench.table import ENTRIES, GOALS, Entry
from polopt.launch.cli import main
from polopt.launch.recipe import load
from polopt.launch.statistics import interquartile_mean, interval
from polopt.launch.train import find_recipe


def test_interquartile_mean_by_hand():
    assert interquartile_mean([7.0]) == 7.0
    assert interquartile_mean([1.0, 2.0, 6.0]) == 3.0
    assert interquartile_mean([100.0, 3.0, 1.0, 2.0]) == 2.5
    assert interquartile_mean([5.0, -100.0, 4.0, 6.0, 100.0]) == 5.0
    with pytest.raises(ValueError, match="must not be empty"):
        interquartile_mean([])


def test_interval_is_that_of_the_bootstrap():
    assert interval([1.0]) is None
    assert interval([2.0, 2.0, 2.0, 2.0]) == (2.0, 2.0)
    # The mean of two values: each end has the probability 1/4, so both ends are in the interval.
    assert interval([1.0, 3.0]) == (1.0, 3.0)
    values = [float(v) for v in range(100)]
    low, high = interval(values)
    # Variance of a trimmed mean: the winsorised variance over the square of what is kept. For
    # numbers uniform in [0, 1]: (1/96 + 1/32) / (1/2)² = 1/6, by the number of values.
    spread = 100 * (1 / 6 / 100) ** 0.5
    assert low == pytest.approx(49.5 - 1.96 * spread, abs=1.5)
    assert high == pytest.approx(49.5 + 1.96 * spread, abs=1.5)


def test_the_mean_is_rliable_s_and_the_interval_scipy_s():
    """Rliable's own intervals need a package that does not import beside today's pandas."""
    metrics = pytest.importorskip("rliable.metrics")
    stats = pytest.importorskip("scipy.stats")
    numpy = pytest.importorskip("numpy")
    for count in (5, 7, 10, 40):
        values = numpy.random.default_rng(count).lognormal(sigma=1.0, size=count)
        # One task: runs by tasks is a column.
        assert interquartile_mean(values.tolist()) == pytest.approx(
            metrics.aggregate_iqm(values[:, None])
        )
        expected = stats.bootstrap(
            (values,), lambda rows, axis: stats.trim_mean(rows, 0.25, axis=axis),
            n_resamples=10_000, method="percentile", rng=numpy.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        low, high = interval(values.tolist(), samples=10_000)
        # Ends of two bootstraps of 10,000 resamples agree to a small part of the width.
        assert (low, high) == pytest.approx(tuple(expected), abs=0.05 * (high - low))


def outcome(library, frames, cpu, value, solved):
    return {
        "library": library, "task": "cartpole", "algorithm": "ppo", "frames": frames,
        "cpu_seconds": cpu, "final_return": value, "solved": solved,
    }  # fmt: skip


def test_rows_count_what_was_solved():
    rows = summarise(
        [outcome("a", 1000, 2.0, 480, True), outcome("a", 3000, 3.0, 90, False),
         outcome("b", 4000, 8.0, 500, True)]
    )  # fmt: skip
    assert [(r["library"], r["seeds"], r["solved"]) for r in rows] == [("a", 2, 1), ("b", 1, 1)]
    assert rows[0]["frames"]["mean"] == 2000
    assert rows[0]["frames_per_cpu_second"]["mean"] == 750
    assert rows[1]["cpu_seconds"] == {"mean": 8.0, "interval": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["control", "--tasks", "cartpol"], "--tasks: there is no 'cartpol', did you mean 'cart"),
        (["control", "--libraries", "sb"], "--libraries: there is no 'sb', did you mean 'sb3'"),
        (["control", "--frames", "100"], "--frames must be at least 2048, got 100"),
        (["control", "--seeds", "-1"], "--seeds must be from 0 to 4294967295, got -1"),
        (["control", "--algorithms", "pp"], "--algorithms: there is no 'pp', did you mean 'ppo'"),
        (["control", "--cpu-seconds", "0"], "--cpu-seconds must be positive, got 0.0"),
        (["control", "--tasks", "acrobot", "--libraries", "polopt-zoo"], "nothing to run"),
    ],
)
def test_wrong_input_is_one_sentence(words, message, tmp_path, capfd):
    assert main(["bench", *words, "--runs", str(tmp_path / "runs")]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"polopt: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_an_unknown_comparison_is_refused(capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "contrl"])
    assert "invalid choice: 'contrl' (choose from" in capfd.readouterr().err


def test_every_entry_names_a_function_and_goals():
    for entry in ENTRIES:
        module, name = entry.function.split(":")
        assert callable(getattr(importlib.import_module(module), name))
        assert {(task, entry.algorithm) for task in entry.tasks} <= set(GOALS)
        for task in entry.tasks if entry.library == "polopt" else ():
            assert find_recipe(f"{task}-{entry.algorithm}").is_file()
    assert {task for task, _ in GOALS} == set(TASKS)


def test_bars_are_those_of_the_tasks():
    for (name, algorithm), goal in GOALS.items():
        if algorithm == "ppo" and name != "lunarlander":  # needs a simulator
            assert goal.bar == TASKS[name]().bar


def test_goals_with_replay_are_the_budgets_of_our_recipes():
    for (task, algorithm), goal in GOALS.items():
        if algorithm != "ppo":
            recipe = load(find_recipe(f"{task}-{algorithm}"))
            assert goal.frames == recipe["collector"]["total_frames"]
            assert goal.bar == recipe["evaluation"]["stop_at"]
            assert goal.every == recipe["evaluation"]["every"]


def test_a_missing_library_is_left_out(tmp_path, capfd, monkeypatch):
    entry = Entry(library="sb3", algorithm="ppo", tasks=("cartpole",), function="nowhere:ppo",
                  package="no_such_package")  # fmt: skip
    monkeypatch.setattr("polopt.launch.bench.runs.ENTRIES", (entry,))
    words = ["--libraries", "sb3", "--runs", str(tmp_path)]
    assert main(["bench", "control", *words]) == 2
    error = capfd.readouterr().err
    assert "sb3 is left out: no-such-package is not installed: pip install no-such-package" in error
    assert "none of the libraries is installed" in error


def test_settings_of_the_zoo_fit_our_recipe():
    from polopt.launch.bench.ours import ZOO
    from polopt.launch.job import prepare

    job = prepare(load(find_recipe("cartpole-ppo"), ZOO), name="zoo")
    assert job.arithmetic()["optimizer_steps_per_batch"] == 20
    assert job.arithmetic()["steps_per_environment_and_batch"] == 32
    assert job.reward_scaling is None


def test_a_run_that_fails_is_named_and_its_output_kept(tmp_path, capfd, monkeypatch):
    entry = Entry(library="sb3", algorithm="ppo", tasks=("cartpole",), function="nowhere:ppo")
    monkeypatch.setattr("polopt.launch.bench.runs.ENTRIES", (entry,))
    words = ["--libraries", "sb3", "--tasks", "cartpole", "--runs", str(tmp_path)]
    assert main(["bench", "control", *words]) == 1
    (folder,) = tmp_path.iterdir()
    failed = f"polopt: cartpole, ppo, sb3, seed 0 failed: see {folder / 'log.txt'}\n"
    assert capfd.readouterr().err == failed
    assert "ModuleNotFoundError: No module named 'nowhere'" in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_every_library_that_needs_nothing_more(tmp_path, capfd):
    libraries = ["polopt", "polopt-zoo", "cleanrl", "torchrl", "torchrl-zoo"]
    words = ["--tasks", "cartpole", "--libraries", *libraries, "--seeds", "3", "--frames", "2048"]
    assert main(["bench", "control", *words, "--runs", str(tmp_path), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert [row["library"] for row in answer["rows"]] == libraries
    (folder,) = tmp_path.iterdir()
    assert answer["folder"] == str(folder)
    table = (folder / "table.md").read_text()
    kept = json.loads((folder / "results.json").read_text())
    for run in kept["runs"]:
        assert run["frames"] == 2048
        assert run["cpu_seconds"] > 0
        assert run["curve"][-1] == [2048, run["final_return"]]
        assert f"| cartpole | ppo | {run['library']} | 0 of 1 | ≥ 2,048 |" in table
        assert f">{run['library']}</text>" in (folder / "cartpole-ppo.svg").read_text()
    speeds = [r["frames_per_cpu_second"]["mean"] for r in kept["rows"]]
    assert speeds[0] > 2 * speeds[3]  # ours and TorchRL's loop
