"""verl's files as a task, and a copy of the guide's script that trains."""

import json
from pathlib import Path

import pytest

from polopt.launch.cli import main
from polopt.launch.job import task_names
from polopt.launch.recipe import build

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


def test_rewards_of_an_import(tmp_path):
    """A recipe as an import writes it: the answer by a file, and the overlong buffer."""
    (tmp_path / "r.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'other': 1}\n"
    )
    files = {"train_files": [table(tmp_path / "t.parquet", 9)],
             "eval_files": [table(tmp_path / "v.parquet", 2, 50)]}  # fmt: skip
    score = {"use": "FromFile", "path": str(tmp_path / "r.py"), "name": "score"}
    rewards = [score, {"use": "Length", "limit": 8, "cache": 4}]
    task = build({"use": "dataset", **files, "rewards": rewards}, task_names())
    rows = list(task.evaluation)
    assert task.correct(rows, ["52", "#### 53"]) == [True, False]
    assert task.rewards[1](completion_ids=[[0] * n for n in (2, 6, 99)]) == [0.0, -0.5, -1.0]
    task.rewards[0].close()


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
    assert summary["data"]["train"]["kept"] == 16
    assert summary["rewards"]["score"]["scored"] >= 16
