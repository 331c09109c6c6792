"""Recipes of text tasks: what is refused, and what is resolved."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

from polopt.launch.job import prepare
from polopt.launch.llm import LlmJob
from polopt.launch.recipe import RecipeError, override

spec = importlib.util.spec_from_file_location("llm_setup", Path(__file__).with_name("llm_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)
SMALL, tree, job = setup.SMALL, setup.tree, setup.job


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.num_generations=1", "must be at least 2, got 1: a group of one"),
        ("trainer.num_generations=7", "generation batch of 128 answers .* not divisible by .* 7"),
        ("trainer.loss_type=grpo", r"trainer\.loss_type='grpo' .* set algorithm instead"),
        ("trainer.beta=0.1", r"trainer\.beta=0.1 .* set objective.kl_coef instead"),
        ("trainer.max_step=3", "unknown key 'trainer.max_step', did you mean 'max_steps'"),
        ("trainer.max_steps=many", "'trainer.max_steps': .* got 'many'"),
        ("trainer.seed=3", "'trainer.seed' cannot be set here: set the recipe's 'seed'"),
        ("trainer.hub_token=x", "cannot be set here: the run folder would keep it"),
        ("trainer.output_dir=x", "'trainer.output_dir' cannot be set here"),
        ("trainer.eval_on_start=true", "cannot be set here: the run evaluates before training"),
        ("trainer.steps_per_generation=0", "must be a whole number from 1, got 0"),
        ("trainer.generation_batch_size=100", "must be a multiple of per_device"),
        ("launch.processes=3 ", "generation batch of 384|multiple"),
        ("trainer.trim_padding=3", "'trainer.trim_padding' must be true or false, got 3"),
        ("trainer.learning_rate=.nan", "'trainer.learning_rate' must be finite .*, got nan"),
        ("trainer.temperature=0", "'trainer.temperature' must be finite and positive, got 0"),
        ("trainer.top_p=2", r"'trainer.top_p' must be in \(0, 1\], got 2"),
        ("trainer.max_steps=0", "'trainer.max_steps' must be at least 1, got 0"),
        ("trainer.reward_weights=[1,2]", r"one finite number for each of the task's 1 rewards"),
        ("trainer.reward_weights=1", "one finite number for each of the task's 1 rewards, got 1"),
        ("trainer.reward_weights=[.nan]", r"one finite number for each .*, got \[nan\]"),
        ("trainer.use_vllm='no'", "'trainer.use_vllm' must be true or false, got 'no'"),
        ("model.warmup_steps=-1", "warmup_steps must be finite and at least 0, got -1"),
        (
            "task.train_size=1",
            "^task: the training data has 1 rows, and one generation takes 16 prompts",
        ),
        ("evaluation.every=0", "every must be at least 1 or none, got 0"),
        ("evaluation.evry=5", "unknown key 'evaluation.evry', did you mean 'every'"),
        ("task.train_size=90000", "train_size=90000, but arithmetic"),
        ("model.heads=3", "heads must be even"),
        ("model.use=tiny_qwen", "unknown name 'tiny_qwen', did you mean 'tiny_qwen3'"),
        ("algorithm.high=-1", "high must be a number of at least 0"),
        ("model=null", "needs the section 'model'"),
        ("trainr.max_steps=3", "unknown section 'trainr', did you mean 'trainer'"),
    ],
)
def test_wrong_recipes_are_one_sentence(setting, message):
    if setting.startswith("launch"):
        overrides = (setting.strip(), "trainer.num_generations=7")
    else:
        overrides = (setting,)
    with pytest.raises(RecipeError, match=message) as caught:
        job(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.use_vllm=true"], r"'trainer.use_vllm' needs vLLM: pip install 'polopt\[vllm\]'"),
        (
            ["trainer.report_to=clearml"],
            "'trainer.report_to' names 'clearml', which is not installed",
        ),
        (["model={use: pretrained, path: /none}"], "'model.path' '/none' is not a folder"),
    ],
)
def test_what_the_machine_lacks_is_said_before_a_run_but_not_in_a_plan(
    monkeypatch, settings, message
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    planned = job(*settings)
    assert planned.arithmetic()
    with pytest.raises(RecipeError, match=message):
        planned.check_here()


def test_a_cache_that_cannot_be_written_is_found_before_the_warm_up(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RecipeError, match=r"cannot be made .*: set POLOPT_CACHE to a folder"):
        job().check_here()


def test_algorithms_with_a_critic_are_refused():
    recipe = {**tree(), "algorithm": {"use": "ppo"}}
    with pytest.raises(RecipeError, match=r"algorithm: .* trains a critic"):
        prepare(recipe, name="test")


def test_selections_need_steps_within_a_generation():
    steps = ("trainer.gradient_accumulation_steps=4", "trainer.steps_per_generation=2")
    job("algorithm={use: kl_cov}", *steps, "trainer.num_iterations=2")
    with pytest.raises(RecipeError, match="algorithm: with a choice among the tokens of a step"):
        job("algorithm={use: kl_cov}", *steps)


def test_whole_distributions_need_whole_models():
    rule = "algorithm={use: adjusted, base: {use: grpo}, objective: {kl: full}}"
    two = ("launch.processes=2", "trainer.per_device_train_batch_size=64")
    assert job(rule, *two, "launch.strategy=ddp").algorithm.objective.kl == "full"
    with pytest.raises(RecipeError, match=r"algorithm: kl='full' .* FSDP shard: use 'k3'"):
        job(rule, *two, "launch.strategy=fsdp2")


def test_batches_are_checked_for_all_processes():
    """Half a group a process makes whole groups on two, but refilling needs them in one."""
    small = ("trainer.per_device_train_batch_size=4", "trainer.num_generations=8")
    two = (*small, "launch.processes=2")
    with pytest.raises(RecipeError, match="generation batch of 4 answers"):
        job(*small)
    with pytest.raises(RecipeError, match="must be a multiple of num_generations=8"):
        job(*two)
    assert isinstance(job(*two, "algorithm.refill=null"), LlmJob)


def test_arithmetic():
    content = job(
        "launch.processes=2",
        "trainer.gradient_accumulation_steps=2",
        "trainer.steps_per_generation=4",
    ).arithmetic()
    assert content["answers_per_optimizer_step"] == 128 * 2 * 2
    assert content["answers_per_generation"] == 128 * 4 * 2
    assert content["problems_per_generation"] == 128
    assert content["optimizer_steps_per_generation"] == 2
    json.dumps(content)


def test_resolved_recipe_resolves_to_itself():
    once = job().tree
    assert prepare(once, name="test").tree == once
    assert once["model"]["hidden_size"] == 64
    assert once["trainer"]["save_steps"] == 100
    # Checkpoints fall between generations.
    assert (
        job("trainer.steps_per_generation=8", "trainer.num_iterations=3").tree["trainer"][
            "save_steps"
        ]
        == 120
    )


def test_padding_is_trimmed_unless_told_otherwise():
    assert job().ours == {"trim_padding": True, "accept_changed_data": False}
    assert not job("trainer.trim_padding=false").ours["trim_padding"]
    assert "trim_padding" not in vars(job().config())


def test_preparing_writes_nothing(tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    job(*SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{use: pretrained, path: x, dtype: float8}", "'model.dtype': input should be 'float32'"),
        ("{use: pretrained, path: x, lora: {rank: 4}}", "lora: peft.LoraConfig has no 'rank'"),
        ("{use: pretrained, path: x, lora: {r: a}}", r"'model.lora.r': .* integer.*, got 'a'"),
        ("{use: pretrained, path: x, lora: {bias: x}}", "'model.lora.bias': .*'none'.* got 'x'"),
        ("{use: pretrained, path: x, lora: {target_modules: 3}}", "'model.lora.target_modules': "),
    ],
)
def test_wrong_settings_of_a_model(model, message):
    pytest.importorskip("peft")
    recipe = tree()
    override(recipe, f"model={model}")
    with pytest.raises(RecipeError, match=message):
        prepare(recipe, name="test")


def test_right_settings_of_adapters():
    pytest.importorskip("peft")
    recipe = tree()
    lora = "{r: 4, target_modules: [q_proj], bias: none, init_lora_weights: pissa_niter_4}"
    override(recipe, f"model={{use: pretrained, path: x, lora: {lora}}}")
    assert prepare(recipe, name="test").model.adapter().init_lora_weights == "pissa_niter_4"


def test_answers_that_are_too_long():
    knobs = ("algorithm.overlong_cache=2", "algorithm.drop_truncated=true")
    sampling = job(*knobs).algorithm.sampling
    assert (sampling.overlong_cache, sampling.drop_truncated) == (2, True)
    with pytest.raises(RecipeError, match=r"overlong_cache=5 must be at most .*length=4"):
        job("algorithm.overlong_cache=5")
