"""verl's files as a task, and a copy of the guide's script that trains."""

import json
from pathlib import Path

import pytest

from polopt.launch.cli import main
from polopt.launch.job import task_names
from polopt.launch.recipe import RecipeError, build
from polopt.launch.verl.task import from_file, rows, score_gsm8k

pytest.importorskip("trl")
pq = pytest.importorskip("pyarrow.parquet")

SCRIPT = Path(__file__).parent / "scripts" / "guide.sh"


def table(path, count, start=0):
    import pyarrow

    found = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i} + 2 ="}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 2)},
            "extra_info": {"index": i},
        }
        for i in range(start, start + count)
    ]
    pq.write_table(pyarrow.Table.from_pylist(found), path)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a very small Qwen3 and a tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = str(tmp_path_factory.mktemp("model"))
    words = ["<pad>", "<eos>", "<unk>", "+", "=", "####", *map(str, range(100))]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_rows(tmp_path, model):
    task = rows(
        train_files=[table(tmp_path / "t.parquet", 20), table(tmp_path / "u.parquet", 5, 20)],
        eval_files=[table(tmp_path / "v.parquet", 4, 50)],
        tokenizer=model,
        max_prompt_length=4,
    )
    assert len(task.train) == 25
    assert task.train[24]["prompt"] == [{"role": "user", "content": "24 + 2 ="}]
    good = "so #### 26"
    scores = task.rewards[0](
        completions=[[{"role": "assistant", "content": good}], "#### 27"],
        **{k: [task.train[24][k]] * 2 for k in ("data_source", "reward_model", "extra_info")},
    )
    assert scores == [1.0, 0.0]
    assert task.correct(task.evaluation[:2], ["#### 52", "#### 52"]) == [True, False]


def test_long_prompts_are_dropped(tmp_path, model):
    task = rows(
        train_files=[table(tmp_path / "t.parquet", 20)],
        eval_files=[table(tmp_path / "v.parquet", 4)],
        tokenizer=model,
        max_prompt_length=3,
    )
    with pytest.raises(RecipeError, match=r"no row of .* is left of 20"):
        task.train[0]


def test_rows_without_evaluation_files(tmp_path, model):
    task = rows(train_files=[table(tmp_path / "t.parquet", 200)], eval_files=[], tokenizer=model)
    assert (len(task.train), len(task.evaluation)) == (198, 2)
    assert [r["extra_info"]["index"] for r in task.evaluation] == [198, 199]


def test_json_rows_and_limits(tmp_path, model):
    lines = [json.dumps({"question": f"{i}", "answer": "x"}) for i in range(9)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    task = rows(
        train_files=[str(tmp_path / "t.jsonl")],
        eval_files=[str(tmp_path / "t.jsonl")],
        tokenizer=model,
        prompt_key="question",
        train_limit=4,
    )
    assert [r["prompt"] for r in task.train] == ["0", "1", "2", "3"]
    assert task.train[0]["answer"] == "x"


def test_missing_files_are_met_late(model):
    task = rows(train_files=["~/no/such.parquet"], eval_files=["/no.parquet"], tokenizer=model)
    assert len(task.train) == 0
    with pytest.raises(RecipeError, match=r"there is no file '~/no/such.parquet'"):
        list(task.train)


def test_unknown_source_asks_for_a_reward(tmp_path, model):
    task = rows(train_files=["/t.parquet"], eval_files=["/v.parquet"], tokenizer=model)
    with pytest.raises(RecipeError, match="no built-in reward for data_source 'mine'"):
        task.rewards[0](completions=["x"], data_source=["mine"])


def test_reward_from_a_file(tmp_path):
    (tmp_path / "r.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'other': 1}\n"
    )
    tree = {"use": "polopt.launch.verl.task:from_file", "path": str(tmp_path / "r.py")}
    task = build(
        {
            "use": "polopt.launch.verl.task:rows",
            "train_files": ["/t.parquet"],
            "eval_files": ["/v.parquet"],
            "tokenizer": "/m",
            "reward": {**tree, "name": "score"},
            "overlong": {"limit": 8, "cache": 4},
        },
        task_names(),
    )
    truth = {"reward_model": [{"ground_truth": "a"}] * 2}
    assert task.rewards[0](completions=["a", "b"], **truth) == [1.0, 0.0]
    lengths = [[0] * n for n in (2, 4, 6, 8, 99)]
    assert task.rewards[1](completion_ids=lengths) == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(RecipeError, match="has no function 'nope'"):
        from_file(path=str(tmp_path / "r.py"), name="nope")(solution_str="x")


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("#### 1,000", "1000", 1.0),
        ("a #### 3 b #### 4.", "4", 1.0),
        ("4", "4", 0.0),
        ("#### -2", "2", 0.0),
        ("", "4", 0.0),
    ],
)
def test_gsm8k(answer, truth, score):
    assert score_gsm8k(answer, truth) == score


@pytest.mark.slow
def test_a_small_copy_of_the_guides_script_trains(tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    train, test = table(tmp_path / "train.parquet", 16), table(tmp_path / "test.parquet", 4, 60)
    small = {
        "MODEL_PATH": model,
        "TRAIN_FILE": train,
        "TEST_FILE": test,
        "data.train_batch_size": "4",
        "data.max_prompt_length": "16",
        "data.max_response_length": "6",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "1",
        "++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
        "trainer.logger": "console",
        "trainer.nnodes": "1",
        "trainer.n_gpus_per_node": "1",
        "trainer.total_training_steps": "1",
    }
    words = [w for k, v in small.items() for w in ("--set", f"{k}={v}")]
    assert main(["import-verl", str(SCRIPT), "--out", "out", *words]) == 0
    report = Path("out/report.md").read_text()
    assert "| optimizer steps in all | 2 |" in report
    capsys.readouterr()
    assert main(["train", "out/recipe.yaml", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 2
    assert summary["samples"] == 16
    assert summary["evaluation_problems"] == 4
