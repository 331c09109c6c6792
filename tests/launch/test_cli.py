import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import polopt
from polopt.launch.cli import main
from polopt.launch.train import recipe_names

HERE = Path(__file__).parent
needs_safetensors = pytest.mark.skipif(
    not any((Path(p) / "safetensors").is_dir() for p in sys.path), reason="no safetensors"
)


# --- wrong input ---

WRONG = [
    ("train", "name the recipe first"),
    ("train seed=1", "'seed=1' is a setting, name the recipe first"),
    ("train fake", "there is no recipe 'fake'"),
    ("train none.yaml", "there is no recipe file 'none.yaml': check the path$"),
    ("train cartpole-ppo.yaml", "file 'cartpole-ppo.yaml', did you mean the recipe 'cartpole-ppo'"),
    ("train a/b", "there is no recipe file 'a/b': check the path$"),
    ("train fake.yaml other.yaml", "'other.yaml' is not of the form key=value"),
    (
        "train fake.yaml task={use: fake:task, scale: 2}",
        "'fake:task,' is not of the form key=value: put the whole setting that begins with "
        "task={use: in quotes, ",
    ),
    ("train fake.yaml .x=1", "override '.x=1' is not of the form"),
    ("train fake.yaml seed.x=1", "'seed' must be a whole number from 0 .*, got {'x': 1}"),
    ("train fake.yaml colector.x=1", "unknown section 'colector', did you mean 'collector'?"),
    ("train fake.yaml collector.totl_frames=1", "did you mean 'total_frames'?"),
    ("train fake.yaml collector.total_frames=many", "valid integer.*got 'many'"),
    ("train fake.yaml collector.total_frames=0", "'collector.total_frames' must be positive"),
    ("train fake.yaml collector=5", "collector must be a mapping of settings, got 5"),
    ("train fake.yaml task.scale=-1", "task: scale must be positive, got -1.0"),
    ("train fake.yaml task.scale=true", "'task.scale' must be a number, got True"),
    ("train fake.yaml task.fault=true", "'task.fault' must be a text or null, got True"),
    (
        "train fake.yaml 'task={use: fake:task, scale:2}'",
        "unknown key 'task.scale:2', write a space after the colon: scale: 2$",
    ),
    ("train fake.yaml task.level=med", "'task.level': input should be 'easy' or 'hard', got 'med'"),
    ("train fake.yaml task=5", "'task' must be a mapping with the entry 'use', got 5"),
    ("train fake.yaml task=null", "'task' must be a mapping with the entry 'use', got None"),
    ("train fake.yaml task.use=fake:nothing", "'task.use': cannot import 'fake:nothing'"),
    ("train fake.yaml task.use=trl.nothing:x", "'task.use': cannot import 'trl.nothing:x'"),
    ("train fake.yaml 'task={use: builtins:dict}'", "'task' builds a dict, expected a ControlTask"),
    (
        "train fake.yaml 'task={use: fake:needs_library}'",
        r"trl is not installed: pip install 'polopt\[trl\]'",
    ),
    (
        "train fake.yaml 'task={use: fake:Unready}'",
        "prepare of Unready must return a polopt.launch.job.Job, got None",
    ),
    ("train fake.yaml algorithm.use=fake:nothing", "'algorithm.use': cannot import"),
    ("train fake.yaml algorithm=ppo", "'algorithm' must be a mapping with the entry 'use'"),
    ("train fake.yaml seed=x", "'seed' must be a whole number from 0 .*, got 'x'"),
    ("train fake.yaml seed=-1", "'seed' must be a whole number from 0 .*, got -1"),
    ("train fake.yaml seed=true", "'seed' must be a whole number from 0 .*, got True"),
    ("train fake.yaml name=a/b", "'name' must be a word"),
    ("train fake.yaml name=..", "'name' must be a word"),
    ("train fake.yaml project=", "'project' must be a word.*, got None"),
    ("train fake.yaml launch.processes=0", "'launch.processes' must be a whole number from 1"),
    ("train fake.yaml launch.processes=1.5", "'launch.processes' must be a whole number from 1"),
    ("train fake.yaml launch=2", "launch must be a mapping of settings, got 2"),
    ("train fake.yaml launch.procs=2", "unknown key 'launch.procs', did you mean 'processes'?"),
    ("train fake.yaml --runs fake.yaml", "cannot write runs to fake.yaml: .*is not a folder"),
    ("train fake.yaml --runs /proc/none", "cannot (write|make)"),
    (f"train fake.yaml --runs {'x' * 300}", "cannot write runs to x+: File name too long, use"),
    ("train --resume none", "none is not a run folder"),
    ("train --resume ''", "is not a run folder"),
    ("train fake.yaml --resume ''", "is not a run folder"),
    (f"train --resume {'x' * 300}", "File name too long"),
    ("train --resume .", "is not a run folder: it has no config.yaml"),
    ("show", "name a recipe or an algorithm"),
    ("show fake.yaml sed=1", "unknown section 'sed', did you mean 'seed'?"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_input_is_one_sentence_and_leaves_nothing(here, capfd, line, message):
    before = set(here.rglob("*"))
    assert main(shlex.split(line)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(rf"polopt: .*(?:{message}).*\n", err)
    assert set(here.rglob("*")) == before


def test_a_wrong_shipped_name_gets_the_nearest(here, capfd):
    for name in recipe_names():
        assert main(["train", name.replace("-", "_").upper()]) == 2
        assert f"did you mean {name!r}?" in capfd.readouterr().err
    assert main(["show", "dappo"]) == 2
    assert "there is no recipe or algorithm 'dappo', did you mean 'dapo'?" in capfd.readouterr().err
    assert main(["show", "dapo", "hihg=1"]) == 2
    assert "unknown key 'dapo.hihg', did you mean 'high'?" in capfd.readouterr().err


def test_wrong_input_as_json(here, capfd):
    assert main(["train", "fake.yaml", "seed=x", "--json"]) == 2
    out, err = capfd.readouterr()
    assert json.loads(out) == {"error": err.removeprefix("polopt: ").rstrip("\n")}


@pytest.mark.parametrize(
    "line", ["", "trian x", "train x --dryrun", "train x --resume", "list x", "train x -j", "--foo"]
)
def test_argparse_errors(here, capfd, line):
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert "usage: polopt" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("train x --seed 3", "seed=3"),
        ("train x --collector.total-frames=5", "collector.total_frames=5"),
        ("show x --seed 3 a=1", "seed=3"),
        ("train x --dryrun", None),
        ("train x --dryrun --resum y", "resum=y"),
        ("list --seed 3", None),
    ],
)
def test_an_option_that_is_a_setting_is_said(here, capfd, line, setting):
    with pytest.raises(SystemExit):
        main(line.split())
    hint = f"; if a setting of the recipe is meant, write {setting}\n"
    assert capfd.readouterr().err.endswith(hint if setting else f"{line.split()[-1]}\n")


def test_wrong_input_is_said_before_heavy_imports(here, start):
    code = (
        "import sys; from polopt.launch.cli import main\n"
        "for line in ('train none', 'train fake.yaml seed=x', 'train fake.yaml a=1', "
        "'train fake.yaml --runs fake.yaml', 'train fake.yaml --dry-run', 'show fake.yaml'):\n"
        "    main(line.split())\n"
        "print(sorted({'torch', 'torchrl', 'trl', 'numpy'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    out = subprocess.check_output([sys.executable, "-c", code], text=True, env=env, cwd=here)
    assert out.splitlines()[-1] == "[]"


# --- what is printed ---


def test_help_has_examples(capsys):
    for line in (["--help"], ["train", "--help"], ["show", "--help"], ["list", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(line)
        assert caught.value.code == 0
        assert f"usage: polopt{' ' + line[0] if line[0] != '--help' else ''}" in (
            out := capsys.readouterr().out
        )
        assert "polopt show cartpole-ppo" in out or line[0] == "list"


def test_version_in_both_forms(start):
    for command in ([Path(sys.executable).with_name("polopt")], [sys.executable, "-m", "polopt"]):
        line = subprocess.check_output([*command, "--version"], text=True, cwd="/")
        assert line.split() == ["polopt", polopt.__version__]


def test_dry_run_says_all_and_writes_nothing(here, start):
    home = here / "home"
    home.mkdir()
    words = ["fake.yaml", "seed=4", "launch.processes=2", "task.level=hard", "--runs", "elsewhere"]
    process = start("train", *words, "--dry-run", HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
    before = set(here.rglob("*"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err == ""
    assert "seed: 4" in out
    assert "save_every: 2" in out  # a default
    assert "ranks: 2" in out
    line = out.splitlines()[-1]
    assert line == (
        "torchrun --nproc-per-node 2 --standalone -m polopt train "
        "fake.yaml seed=4 launch.processes=2 task.level=hard --runs elsewhere"
    )
    assert set(here.rglob("*")) == before


def test_dry_run_as_json(here, capfd):
    assert main(["train", "fake.yaml", "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["recipe"]["collector"] == {"total_frames": 6, "sleep": 0.0, "save_every": 2}
    assert plan["arithmetic"] == {"frames": 6, "ranks": 1}
    assert plan["launch"] == "polopt train fake.yaml --json"


def test_dry_run_needs_no_writable_folder(here, capfd):
    assert main(["train", "fake.yaml", "--dry-run", "--runs", "fake.yaml"]) == 0


def test_show_says_where_each_value_came_from(here, capfd):
    assert main(["show", "fake.yaml", "task.level=hard", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["description"] == "Counting, to test the command line"
    assert shown["values"]["task.level"] == {"value": "hard", "source": "override"}
    assert shown["values"]["task.scale"] == {"value": 1.0, "source": "recipe"}
    assert shown["values"]["task.flag"] == {"value": False, "source": "default"}
    assert shown["values"]["seed"] == {"value": 0, "source": "default"}
    assert main(["show", "fake.yaml", "task.level=hard"]) == 0
    assert re.search(r"^task.level +hard +override$", capfd.readouterr().out, re.MULTILINE)


def test_list_and_show_know_what_ships(capfd):
    assert main(["list", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert set(listed["recipes"]) == set(recipe_names())
    assert {"ppo", "grpo", "dapo", "gspo"} <= set(listed["algorithms"])
    assert all(listed["recipes"].values())
    assert all(listed["algorithms"].values())
    assert main(["list"]) == 0
    assert "\n  dapo " in capfd.readouterr().out
    for name in listed["algorithms"]:
        assert main(["show", name, "--json"]) == 0
        shown = json.loads(capfd.readouterr().out)
        assert shown["paper"] in shown["doc"]
        assert shown["formula"]
        assert shown["others"]
        missing = [k for k, v in shown["settings"].items() if v == "required"]
        assert missing or {"objective.aggregation", "value_loss"} & shown["axes"].keys()
    assert main(["show", "dapo", "high=0.3"]) == 0
    assert re.search(r"^objective.surrogate.high +0.3", capfd.readouterr().out, re.MULTILINE)


def test_a_closed_pipe_is_no_traceback(here):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "polopt", "show", "fake.yaml"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    os.close(writer)
    assert (done.stderr, done.returncode) == (b"", 0)


def test_show_takes_a_schedule(capfd):
    assert main(["show", "dapo", "high={use: Linear, start: 0.3, end: 0.2, steps: 9}"]) == 0
    assert "objective.surrogate.high.use" in capfd.readouterr().out
