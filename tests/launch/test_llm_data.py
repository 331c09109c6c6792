"""Training on files: the recipe for them, what a run records of its rows and rewards, bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
import pyarrow
import pyarrow.parquet as pq

from polopt.launch.cli import main
from polopt.launch.job import prepare
from polopt.launch.llm_data import check_lengths, describe
from polopt.launch.recipe import RecipeError, load
from polopt.launch.train import find_recipe

WORDS = ["<pad>", "<eos>", "<unk>", "user", "+", "=", "####", *map(str, range(60))]


def save_model(folder, *, template=True, pad=True):
    """Write a very small Qwen3 and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"} if pad else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", **special)
    if template:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }} {% endfor %}"
        )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def rows(count, start=0, source="openai/gsm8k"):
    """Rows as verl prepares them; every fifth prompt is longer than the others."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{i} + 2 =" + " +" * (5 * (i % 5 == 4))}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 2)},
            "extra_info": {"index": i},
        }
        for i in range(start, start + count)
    ]


def parquet(path, found):
    pq.write_table(pyarrow.Table.from_pylist(found), path)
    return str(path)


@pytest.fixture
def words(here):
    """Make the words of a command that trains on small files for two steps."""

    def make(*overrides, **settings):
        model = save_model(here / "model", **settings)
        train, test = rows(20), rows(6, 30)
        return [
            "train", "gsm8k-grpo", "--json",
            f"task.train_files=[{parquet(here / 'train.parquet', train)}]",
            f"task.eval_files=[{parquet(here / 'test.parquet', test)}]",
            f"task.tokenizer={model}", "task.max_prompt_length=6", f"model.path={model}",
            "trainer.per_device_train_batch_size=8", "trainer.gradient_accumulation_steps=1",
            "trainer.num_generations=4", "trainer.max_completion_length=6",
            "trainer.max_steps=2", "trainer.logging_steps=1", "algorithm.kl_coef=0",
            "evaluation.every=null", "task.reward_workers=1", *overrides,
        ]  # fmt: skip

    return make


def reward_file(folder, body):
    lines = "".join(f"    {line}\n" for line in body)
    (folder / "reward.py").write_text(
        "import os, time\n\n\ndef compute_score(data_source, solution_str, ground_truth, "
        f"extra_info=None):\n    words = solution_str.split()\n{lines}"
    )
    return "task.rewards=[{use: FromFile, path: reward.py}]"


def test_a_run_on_files(words, here, only_run, capsys, caplog):
    """Some samples crash or hang their reward: the run goes on without them, and says so."""
    custom = reward_file(
        here,
        [
            "if words[:1] == ['1']: os._exit(3)",
            "if words[:1] == ['2']: time.sleep(60)",
            "if len(words) % 2: raise ValueError('an odd answer')",
            "return {'score': len(set(words)) / 6}",
        ],
    )
    seeds = ("trainer.num_generations=8", "trainer.per_device_train_batch_size=32")
    assert main(words(custom, "task.reward_timeout=0.4", *seeds)) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["steps"] == 2
    found = "data: 16 of 20 rows to train on, 20.0 % dropped (4 too long, 0 without a prompt"
    assert found in err
    kept = json.loads((only_run() / "data.json").read_text())
    assert kept["train"]["too_long"] == 4
    assert kept["evaluation"]["kept"] == 5
    assert summary["data"] == {k: v for k, v in kept.items() if k != "format"}
    counts = summary["rewards"]["score"]
    assert counts["raised"] > 0
    assert counts["scored"] > 0
    asked = 2 * 32 + 2 * 2 * 5  # training, and evaluation before and after
    assert sum(counts.values()) == asked
    told = r"'score' raised on a sample.*ValueError: an odd answer \(reward.py, line"
    assert re.search(told, caplog.text)
    lines = (only_run() / "metrics.jsonl").read_text().splitlines()
    failed = [line["rewards/score/failed"] for line in map(json.loads, lines) if "reward" in line]
    assert len(failed) == 2
    assert all(0 < share < 1 for share in failed)
    assert main(["eval", str(only_run()), "--samples", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["sources"]["openai/gsm8k"]["problems"] == content["problems"] == 5
    (here / "test.parquet").unlink()
    assert main(["eval", str(only_run()), "--json"]) == 2
    assert "task: there is no file" in json.loads(capsys.readouterr().out)["error"]


def test_a_dry_run_prints_all_and_says_which_file_is_missing(here, capsys):
    file = str(here / "none.parquet")
    words = ["train", "gsm8k-grpo", f"task.train_files=[{file}]", "--dry-run"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "# launch line" in out
    assert err == f"polopt: task: there is no file {file!r}: bring it here or change the path\n"
    assert main([*words, "--json"]) == 2
    content = json.loads(capsys.readouterr().out)
    assert content["error"] == err.removeprefix("polopt: ").rstrip()
    assert content["arithmetic"]["training_problems"] == 0
    assert content["arithmetic"]["problems_per_generation"] == 8
    task = content["recipe"]["task"]
    assert (task["overlong_prompts"], task["reward_timeout"]) == ("drop", 30.0)
    # What it resolves to is a recipe again, with rewards written out, too.
    custom = [
        "task.rewards=[{use: TextFormat, tags: [a, b]}, {use: isolated, reward: {use: Gsm8k}}]"
    ]
    tree = prepare(load(find_recipe("gsm8k-grpo"), custom), name="x").tree
    assert tree["task"]["rewards"][1]["timeout"] == 10.0
    assert prepare(tree, name="x").tree == tree


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        (["task.train_files=[/no.parquet]"], {}, "task: there is no file '/no.parquet': bring it"),
        (["task.prompt_key=question"], {},
         "task: .*train.parquet has no column 'question', it has data_source, extra_info, prompt"),
        (["task.source_key=kind"], {}, "task: the rows have no column 'kind', by which a reward"),
        (["task.max_prompt_length=2"], {}, "task: no row of .* is left of 20: 0 .*, 20 longer"),
        (["task.overlong_prompts=refuse"], {}, "task: 4 of 20 prompts of .* are longer than max"),
        (["task.overlong_prompts=trim"], {}, "'task.overlong_prompts': input should be 'drop', "),
        (["task.tokenizer=null"], {}, "task: max_prompt_length is in tokens: name the folder"),
        (["trainer.per_device_train_batch_size=72"], {}, "task: the training data has 16 rows"),
        ([], {"template": False}, "task: the tokenizer .* has no chat template"),
        (["task.rewards=[{use: Gsm8]"], {}, "override 'task.rewards"),
        (["task.rewards=[{use: Gsm8}]"], {}, "unknown name 'Gsm8', did you mean 'Gsm8k'"),
        (["task.rewards=[{use: TextFormat}]"], {}, "task.rewards.0: give TextFormat either a pat"),
        (["task.rewards=[no_module:f]"], {}, "task: cannot import the reward 'no_module:f'"),
        (["trainer.reward_weights=[1, 2]"], {}, "one finite number for each of the task's 1 rew"),
        (["task.rewards=[{use: FromFile, path: no.py}]"], {},
         "task: the reward's path: there is no Python file 'no.py'"),
        (["model={use: tiny_qwen3}"], {}, "model: tiny_qwen3 has no chat template, and the pr"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_a_run(words, here, capsys, overrides, settings, message):
    assert main(words(*overrides, **settings)) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert re.search(message, error)
    assert not (here / "runs").exists()


def test_a_file_cut_short_is_a_fault_of_the_task(words, here, capsys):
    arguments = words("task.train_files=[half.parquet]")
    whole = (here / "train.parquet").read_bytes()
    (here / "half.parquet").write_bytes(whole[: len(whole) // 2])
    assert main(arguments) == 2
    assert json.loads(capsys.readouterr().out)["error"].startswith("task: cannot read half.parq")


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        (["task.max_prompt_length=null"], {"template": False},
         "prompts are conversations, and the tokenizer has no chat template"),
        ([], {"pad": False}, "the tokenizer has no pad token, and no end-of-sequence token"),
    ],
)  # fmt: skip
def test_tokenizers_that_lack_something(words, capsys, overrides, settings, message):
    assert main(words(*overrides, **settings)) == 2
    assert re.search(message, json.loads(capsys.readouterr().out)["error"])


def test_prompts_that_the_model_cannot_read_are_refused(words, here, capsys):
    arguments = words("task.max_prompt_length=null", "task.train_files=[long.parquet]")
    long = rows(20)
    long[7]["prompt"][0]["content"] += " +" * 80
    parquet(here / "long.parquet", long)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == (
        "task: 1 of 26 prompts are longer than the 64 tokens that the model can read, the longest "
        "has 85: set task.max_prompt_length (and task.tokenizer), or take another model"
    )
    assert "Traceback" not in err


def test_a_model_that_reads_further_than_it_was_trained(tmp_path):
    from transformers import AutoTokenizer, Qwen3Config

    tokenizer = AutoTokenizer.from_pretrained(save_model(tmp_path / "model"))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config = Qwen3Config(max_position_embeddings=64, rope_theta=1e4, rope_scaling=yarn)
    check_lengths(["+ " * 128], tokenizer, config)
    with pytest.raises(RecipeError, match="1 of 2 prompts are longer than the 128 tokens"):
        check_lengths(["+ " * 129, "+"], tokenizer, config)


def test_an_evaluation_loads_the_model_as_the_recipe_does(words, here, capsys, monkeypatch):
    """Code that comes with a model runs where the recipe, or the command, trusts this model."""
    from polopt.ext.trl import evaluate

    settings = words("model.dtype=bfloat16")[3:]
    folder = here / "model"
    (folder / "custom.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\n"
        "class Config(Qwen3Config):\n    model_type = 'mine'\n\n\n"
        "class Model(Qwen3ForCausalLM):\n    config_class = Config\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "mine"
    config["auto_map"] = {
        "AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    seen, judge = [], evaluate.judge

    def spy(model, *rest, **named):
        seen.append((type(model).__name__, str(model.dtype)))
        return judge(model, *rest, **named)

    monkeypatch.setattr(evaluate, "judge", spy)
    command = ["eval", str(folder), "--recipe", "gsm8k-grpo", "--samples", "1", "--json", *settings]
    assert main(command) == 2
    assert "cannot load a model" in json.loads(capsys.readouterr().out)["error"]
    assert main([*command, "model.trust_remote_code=true"]) == 0
    assert seen == [("Model", "torch.bfloat16")]
    # The recipe's own model is trusted by it, and another is not.
    (here / "mine.yaml").write_text("base: gsm8k-grpo\nmodel: {trust_remote_code: true}\n")
    command[3] = "mine.yaml"
    assert main(command) == 0
    assert main([*command, "model.path=another"]) == 2
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("body", "timeout", "message"),
    [
        (["return 1 / 0"], "30",
         r"'score' scored none of the last \d+ completions \(\d+ raised\).*division by zero"),
        (["return 'good'"], "30", r"'score' gave 'good' \(str\) to completion 0, expected a"),
        (["return 1 / 0"], "null", r"'score' raised ZeroDivisionError.*: mend it, or wrap it in"),
    ],
)  # fmt: skip
def test_rewards_that_never_work_end_the_run_with_a_sentence(
    words, here, capsys, body, timeout, message
):
    custom = reward_file(here, body)
    assert main(words(custom, f"task.reward_timeout={timeout}", "trainer.max_steps=9")) == 2
    out, err = capsys.readouterr()
    assert re.search(message, json.loads(out)["error"])
    assert "Traceback" not in err
    assert "Warning" not in err


@pytest.mark.slow
def test_two_ranks(words, here):
    """Failures of both are counted, and ranks that read different files are refused."""
    custom = reward_file(
        here, ["if len(words) % 2: raise ValueError('odd')", "return len(set(words)) / 6"]
    )
    arguments = words(custom, "launch.processes=2")
    (here / "rank-0.parquet").write_bytes((here / "train.parquet").read_bytes())
    parquet(here / "rank-1.parquet", rows(20, 7))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    start += ["2", "-m", "polopt", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        start, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["world_size"] == 2
    # Two steps of eight on each rank; twice five problems, filled up to three on each, in two ways.
    assert sum(summary["rewards"]["score"].values()) == 2 * 2 * 8 + 2 * 2 * 6
    assert done.stderr.count("data: 16 of 20 rows to train on") == 1
    # A reward that is wrong on one rank ends both with its own words.
    wrong = "return 'good' if os.environ['RANK'] == '1' else len(set(words)) / 6"
    reward_file(here, [wrong])
    failing = [*start, "evaluation.problems=1", "--runs", "failing"]
    done = subprocess.run(
        failing, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode != 0
    assert "'score' gave 'good' (str) to completion 0" in json.loads(done.stdout)["error"]
    # `$RANK` makes the ranks read different files, as a wrong copy on one machine would.
    different = [*start, "task.train_files=[rank-$RANK.parquet]", "--runs", "others"]
    done = subprocess.run(
        different, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode != 0
    error = json.loads(done.stdout)["error"]
    assert re.search(r"the ranks have different training data \(rank 0: 16 rows", error)


def test_counts_as_a_sentence():
    train = {"rows": 100, "empty": 1, "too_long": 2, "cut": 3, "kept": 97, "share_dropped": 0.03,
             "held_out": 10}  # fmt: skip
    report = {"train": train, "evaluation": {"kept": 10}, "evaluated_and_trained": 4}
    assert describe(report) == (
        "data: 87 of 100 rows to train on, 3.0 % dropped (2 too long, 1 without a prompt or an "
        "answer), 3 prompts cut, 10 held out, 4 of these are also trained on"
    )


def test_a_reward_model_in_a_recipe(words, here, capsys):
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    arguments = words("task.rewards=[{use: RewardModel, path: judge}]", "task.correct_at=0")
    config = AutoConfig.from_pretrained(here / "model")
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(here / "judge")
    AutoTokenizer.from_pretrained(here / "model").save_pretrained(here / "judge")
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert Path("runs").is_dir()
