import json

import pytest

from polopt.launch.cli import main

SCRIPT = """\
MODEL=${MODEL:-/models/Qwen2.5-7B-Instruct}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=/data/train.parquet \\
    data.train_batch_size=256 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=3072 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=3 \\
"""
MICRO = "    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4\n"
RECIPE = """\
task: {use: arithmetic, train_size: 100, evaluation_size: 10}
model: {use: pretrained, path: Qwen/Qwen2.5-1.5B-Instruct}
algorithm: {use: grpo, kl_coef: 0.01}
trainer:
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  steps_per_generation: 8
  num_generations: 8
  max_completion_length: 512
  use_vllm: true
launch: {processes: 4}
"""


@pytest.fixture
def run(capsys):
    def call(*words):
        try:
            code = main(["plan", *map(str, words)])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def planned(run):
    """Run with --json and return the object, after checking that its sums are right."""

    def call(*words, code=0):
        found, out, err = run(*words, "--json")
        assert (found, err) == (code, "")
        content = json.loads(out)
        for phase in content["phases"]:
            assert sum(phase["parts_gib"].values()) == pytest.approx(phase["total_gib"])
            free = content["gpu"]["memory_gib"] - phase["total_gib"]
            assert phase["margin_gib"] == pytest.approx(free)
        return content

    return call


def test_a_known_model(planned):
    content = planned("qwen3-8b", "--gpu", "H100-80", "--gpus", 8)
    assert content["verdict"] == "fits"
    assert content["model"]["parameters"] == 8_190_735_360
    assert content["settings"]["sharding"] == "fsdp"
    assert {p["name"] for p in content["phases"]} == {"generation", "sync", "log_probs", "update"}
    assert content["assumed"]["CUDA context and NCCL, GiB"] == 2.5


def test_a_plan_that_does_not_fit(run):
    code, out, err = run("qwen3-32b", "--gpu", "A100-80")
    assert (code, err) == (1, "")
    assert out.startswith("## qwen3-32b on 1 × A100-80: does not fit\n")
    assert "Cannot help" in out


def test_markdown_has_every_section(run):
    _, out, _ = run("qwen3-8b", "--gpu", "H100-80", "--gpus", 8, "rows=1000")
    heads = ["### Memory: what to turn", "### Parallelism", "### Batches", "### How far to trust"]
    places = [out.index(head) for head in heads]
    assert places == sorted(places)
    assert "The guide's order, 10.6: micro_batch" in out
    assert "| optimizer steps | 15 |" in out
    for line in out.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_a_folder_with_a_config(planned, tmp_path):
    config = {
        "model_type": "mine",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = planned("--model", tmp_path, "--gpu", "16GiB", "micro_batch=2", "vllm=none")
    assert content["settings"]["micro_batch"] == 2
    assert not content["model"]["activations_checked"]


def test_a_recipe(planned, tmp_path):
    pytest.importorskip("trl")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    content = planned(tmp_path / "mine.yaml", "--gpu", "H100-80", "vllm_memory=0.4")
    s, batch = content["settings"], content["batch"]
    assert (s["gpus"], s["sharding"], s["attention"]) == (4, "none", "sdpa")
    assert (s["reference"], s["critic"], s["vllm"], s["vllm_memory"]) == (
        True,
        "none",
        "colocate",
        0.4,
    )
    assert batch["completions_per_rollout"] == 4 * 8 * 4
    assert batch["completions_per_optimizer_step"] == 4 * 2 * 4
    assert any("DDP is assumed" in note for note in content["notes"])


def test_overrides_reach_the_recipe_and_its_accelerate_config(planned, tmp_path):
    pytest.importorskip("trl")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: true}\n"
    )
    words = ["trainer.per_device_train_batch_size=1", "algorithm.kl_coef=0"]
    content = planned(tmp_path / "mine.yaml", "--gpu", "H100-80", "--gpus", 8, *words)
    s = content["settings"]
    assert (s["gpus"], s["sharding"], s["micro_batch"]) == (8, "fsdp", 1)
    assert (s["reference"], s["gradient_sync"], s["checkpointing"]) == (False, "last", True)
    assert s["completions_per_step"] == 1 * 2 * 8


@pytest.mark.parametrize(
    ("text", "sharding", "offload"),
    [
        ("{zero_stage: 3, offload_optimizer_device: cpu}", "zero3", True),
        ("{zero_stage: 2, offload_optimizer_device: none}", "zero2", False),
    ],
)
def test_deepspeed_is_read(planned, tmp_path, text, sharding, offload):
    pytest.importorskip("trl")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "accelerate.yaml").write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config: {text}\n"
    )
    s = planned(tmp_path / "mine.yaml", "--gpu", "H100-80")["settings"]
    assert (s["sharding"], s["optimizer_offload"]) == (sharding, offload)


WRONG = ["x", "-1", "0", "1.5", "true", "null", "[1]", "{a: 1}", "1e400", ".nan"]
KEYS = [
    "trainer", "model", "task", "algorithm", "launch", "launch.processes", "task.max_prompt_length",
    "trainer.per_device_train_batch_size", "trainer.num_generations", "trainer.use_vllm",
    "trainer.steps_per_generation", "trainer.generation_batch_size", "trainer.vllm_mode",
    "trainer.vllm_gpu_memory_utilization", "trainer.vllm_tensor_parallel_size", "trainer.bf16",
    "trainer.num_train_epochs", "trainer.accelerator_config", "model.path", "model.use",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_no_value_in_a_recipe_is_a_traceback(run, tmp_path, key):
    pytest.importorskip("trl")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    for value in WRONG:
        code, out, err = run(tmp_path / "mine.yaml", "--gpu", "H100-80", f"{key}={value}")
        assert code in (0, 1, 2)
        if code == 2:
            assert out == ""
            assert err.startswith("polopt: ")
            assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["engine", "gpus", "shards", "vllm_memory", "streaming", "rows"])
def test_no_value_of_a_setting_is_a_traceback(run, name):
    for value in WRONG:
        code, _, err = run("qwen3-8b", "--gpu", "H100-80", f"{name}={value}")
        assert code in (0, 1, 2)
        assert err.count("\n") == (code == 2)


def test_an_imported_script_can_be_planned(planned, tmp_path, monkeypatch, capsys):
    """What an import writes is planned as a run of TRL: SDPA, no sequence parallel."""
    pytest.importorskip("hydra")
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT + MICRO)
    main(["import-verl", "run.sh", "--set", "data.rows=1000", "--out", "imported"])
    capsys.readouterr()
    s = planned("imported/recipe.yaml", "--gpu", "H100-80")["settings"]
    assert (s["engine"], s["gpus"], s["sharding"], s["gradient_sync"]) == ("trl", 8, "fsdp", "each")
    assert s["prompts_per_rollout"] * s["num_generations"] == 256 * 8
    assert s["completions_per_step"] == 64 * 8


def test_the_shipped_text_recipe(planned):
    pytest.importorskip("trl")
    assert planned("arithmetic-dapo", "--gpu", "T4")["verdict"] == "fits"


def test_a_script(planned, tmp_path):
    pytest.importorskip("hydra")
    (tmp_path / "run.sh").write_text(SCRIPT + MICRO)
    content = planned(tmp_path / "run.sh", "--gpu", "H100-80", "--set", "data.rows=1000")
    s, batch = content["settings"], content["batch"]
    assert content["model"]["name"] == "qwen2.5-7b"
    assert (s["engine"], s["gpus"], s["tensor_parallel"]) == ("verl", 8, 2)
    assert (s["head"], s["reference"], s["optimizer_offload"]) == ("full", True, True)
    assert batch["completions_per_rollout"] == 256 * 8
    assert batch["optimizer_steps_per_rollout"] == 4
    assert batch["micro_batches_per_optimizer_step"] == 64 * 8 // (4 * 8)
    assert batch["optimizer_steps"] == 3 * 3 * 4


def test_dynamic_batches_of_a_script_become_completions(planned, tmp_path):
    pytest.importorskip("hydra")
    dynamic = (
        "    actor_rollout_ref.actor.use_dynamic_bsz=True \\\n"
        "    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \\\n"
        "    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192\n"
    )
    (tmp_path / "run.sh").write_text(SCRIPT + dynamic)
    content = planned(tmp_path / "run.sh", "--gpu", "H100-80")
    assert content["settings"]["micro_batch"] == 8192 * 2 // 4096
    assert content["batch"]["tokens_per_micro_batch_per_gpu"] == 8192


def test_settings_change_a_script(planned, tmp_path):
    pytest.importorskip("hydra")
    (tmp_path / "run.sh").write_text(SCRIPT + MICRO)
    words = ["trainer.nnodes=2", "vllm_memory=0.5"]
    s = planned(tmp_path / "run.sh", "--gpu", "H100-80", *words)["settings"]
    assert (s["gpus"], s["vllm_memory"]) == (16, 0.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--gpu is missing"),
        (["qwen3-8b", "--gpu", "H100-8"], "unknown card 'H100-8'"),
        (["qwen3-9b", "--gpu", "L4"], "did you mean 'qwen3-8b'"),
        (["--gpu", "L4"], "name what to plan"),
        (["qwen3-8b", "--gpu", "L4", "micro_batch=two"], "micro_batch: must be a whole number"),
        (["qwen3-8b", "--gpu", "L4", "micro_bach=2"], "did you mean 'micro_batch'"),
        (
            ["qwen3-8b", "--gpu", "L4", "tensor_parallel=3"],
            "does not divide the 32 attention heads",
        ),
        (["qwen3-8b", "--gpu", "L4", "trainer.seed=3"], "belongs to a recipe or script"),
        (["qwen3-8b", "qwen3-4b", "--gpu", "L4"], "'qwen3-4b' is not of the form key=value"),
        (["qwen3-8b", "--gpu", "L4", "--gpus", "0"], "gpus: must be a whole number from 1"),
        (["cartpole-ppo", "--gpu", "L4"], "trains no language model"),
        (["nowhere.yaml", "--gpu", "L4"], "there is no recipe file 'nowhere.yaml'"),
    ],
)
def test_wrong_input_is_one_sentence(run, words, said):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("polopt: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SCRIPT + "\n", "ppo_micro_batch_size_per_gpu is not set"),
        (
            SCRIPT + "    actor_rollout_ref.actor.strategy=megatron \\\n" + MICRO,
            "strategy=megatron is not planned",
        ),
        ("echo hello\n", "run.sh: "),
        (SCRIPT.replace("Qwen2.5-7B-Instruct", "Unheard-3B") + MICRO, "--model DIR"),
    ],
)
def test_scripts_that_cannot_be_planned(run, tmp_path, text, said):
    pytest.importorskip("hydra")
    (tmp_path / "run.sh").write_text(text)
    code, out, err = run(tmp_path / "run.sh", "--gpu", "H100-80")
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_text(run, tmp_path):
    (tmp_path / "run.sh").write_bytes(b"\xff\xfe\x00")
    code, _, err = run(tmp_path / "run.sh", "--gpu", "H100-80")
    assert code == 2
    assert "it is not a text file" in err
