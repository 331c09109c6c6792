"""Whole scripts in the styles that are in use, and what must come out of them."""

import shutil
from pathlib import Path

import pytest
import yaml

from polopt.launch.cli import main
from polopt.launch.verl.importer import import_script

SCRIPTS = Path(__file__).parent / "scripts"
SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "optimizer steps per rollout",
)
# name: sizes as in SIZES, exit status (None: 0 or 1, by what the trainer can do yet), values for
# --set
CASES = {
    "async.sh": ((4, 32, 32, 1), 3, {}),
    "branches.sh": ((16, 2, 8, 4), 0, {}),
    "broken_continuation.sh": ((8, 8, 8, 1), 0, {}),
    "cispo_correction.sh": ((8, 2, 8, 8), 0, {}),
    "dapo_variables.sh": ((1, 16, 128, 8), 0, {}),
    "dr_grpo.sh": ((4, 32, 32, 1), 0, {}),
    "grpo_plain.sh": ((8, 16, 64, 4), 0, {}),
    "gspo_arrays.sh": ((2, 16, 64, 4), 0, {}),
    "guide.sh": ((2, 4, 64, 16), 0, {}),
    "kl_cov.sh": ((8, 8, 8, 1), None, {}),
    "lora.sh": ((4, 8, 8, 1), 3, {}),
    "megatron_moe.sh": ((1, 8, 32, 4), 3, {}),
    "old_keys.sh": ((8, 8, 8, 1), 0, {}),
    "overrides.txt": ((8, 8, 8, 1), 0, {}),
    "ppo_critic.sh": ((16, 1, 4, 4), 1, {}),
    "ray_multi_node.sh": ((4, 32, 128, 4), 0, {"NNODES": "2"}),
    "reinforce_pp.sh": ((8, 16, 32, 2), 0, {}),
    "reinforce_pp_reward_kl.sh": ((8, 16, 16, 1), None, {}),
    "rloo_small.sh": ((16, 5, 5, 1), 0, {}),
    "sft.sh": ((None, None, None, None), 3, {}),
    "sglang_tools.sh": ((4, 16, 16, 1), 3, {}),
    "sweep.sh": ((8, 16, 16, 1), 0, {}),
    "uneven.sh": ((5, 4, 12, 3), 3, {}),
    "unknown_keys.sh": ((8, 8, 128, 16), 3, {}),
}


def read(name, **given):
    return import_script((SCRIPTS / name).read_text(), {**CASES[name][2], **given})


def rows(imported):
    return {r.override.name: r for r in imported.plan.rows.values()}


def facts(imported):
    return {name: value for name, value, _ in imported.plan.facts}


def test_every_script_has_a_case():
    assert {p.name for p in SCRIPTS.iterdir()} == set(CASES)
    assert len(CASES) >= 20


@pytest.mark.parametrize("name", CASES)
def test_sizes(name):
    imported = read(name)
    assert tuple(facts(imported).get(s) for s in SIZES) == CASES[name][0]


@pytest.mark.parametrize("name", CASES)
def test_every_override_has_one_row(name):
    imported = read(name)
    items = [*imported.plan.launch.overrides, *imported.plan.launch.lost]
    assert set(map(id, items)) == set(imported.plan.rows)
    assert len(items) == len(imported.plan.rows)
    for row in imported.plan.rows.values():
        if row.verdict not in ("exact", "converted", "ours"):
            assert row.how, row.override.key


@pytest.mark.parametrize("name", [n for n, (_, code, _) in CASES.items() if code in (0, 1)])
def test_batches_multiply_out(name):
    imported = read(name)
    values, trainer = facts(imported), imported.recipe["trainer"]
    per_step = trainer["per_device_train_batch_size"] * values["processes"]
    assert (
        per_step * trainer["gradient_accumulation_steps"]
        == (values["completions per optimizer step"])
    )
    assert per_step * trainer["steps_per_generation"] == values["completions per rollout"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_command(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [w for k, v in CASES[name][2].items() for w in ("--set", f"{k}={v}")]
    code = main(["import-verl", str(SCRIPTS / name), "--out", "out", *given])
    report = capsys.readouterr().out
    unable = "- polopt train --dry-run" in report
    assert code == (int(unable) if CASES[name][1] is None else CASES[name][1]), report
    written = {p.name for p in Path("out").glob("*")}
    assert written == (
        set() if code == 3 else {"recipe.yaml", "accelerate.yaml", "vllm.txt", "report.md"}
    )
    if code in (0, 1):  # the report says beforehand what `train` says, but for files
        ended = main(["train", "out/recipe.yaml", "--dry-run"])
        lacking = "polopt: task: there is no file" in capsys.readouterr().err
        assert (ended, unable and lacking) == (2 if unable or lacking else 0, False)


# --- the guide's own script ---------------------------------------------------


def test_guide_arithmetic():
    values = facts(read("guide.sh"))
    expected = {
        "processes": 32,
        "completions per rollout": 4096,
        "completions per optimizer step": 256,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 64,
        "optimizer steps per rollout": 16,
        "rollouts per epoch": 7473 // 1024,
        "rollouts in all": 350,
        "optimizer steps in all": 5600,
        "save_steps": 8000,
        "eval_steps": 800,
        "evaluations": 8,
    }
    assert values == expected


def test_guide_recipe():
    imported = read("guide.sh")
    trainer = imported.recipe["trainer"]
    assert trainer["num_generations"] == 4
    assert trainer["save_steps"] == 8000
    assert trainer["num_train_epochs"] == 50
    assert imported.recipe["evaluation"] == {"every": 800}
    assert imported.recipe["algorithm"]["objective"]["kl_coef"] == 0.001
    assert imported.recipe["algorithm"]["surrogate"]["dual"] == 3.0
    assert imported.plan.accelerate["num_processes"] == 32
    assert imported.plan.vllm["--max-num-batched-tokens"] == 32768


def test_guide_traps():
    text = "\n".join(read("guide.sh").plan.traps)
    assert "only the final checkpoint" in text
    assert "resume_from_path=checkpoints/ does nothing" in text
    assert text.count("Hydra accepts it only as +") == 3
    assert "the last 305 rows" in text


def test_guide_says_what_every_key_does():
    from polopt.launch.verl.report import as_json

    keys = as_json(read("guide.sh"))["keys"]
    assert len(keys) == 48
    assert all(k["meaning"] for k in keys)


# --- single points of the other scripts ---------------------------------------


def test_dapo():
    imported = read("dapo_variables.sh")
    recipe = imported.recipe
    assert recipe["algorithm"]["surrogate"] == {
        "use": "Clip",
        "low": 0.2,
        "high": 0.28,
        "dual": 10.0,
    }
    assert recipe["algorithm"]["sampling"]["refill"] == "correct"
    assert recipe["algorithm"]["sampling"]["overlong_cache"] == 2048
    assert recipe["trainer"]["max_completion_length"] == 8192
    assert recipe["task"]["rewards"] == [{"use": "BySource"}]
    assert "reward_weights" not in recipe["trainer"]
    assert recipe["trainer"]["warmup_steps"] == 10 * 8
    assert recipe["trainer"]["max_steps"] == 200 * 8
    assert recipe["trainer"]["lr_scheduler_type"] == "constant_with_warmup"
    assert rows(imported)["algorithm.filter_groups.enable"].verdict == "ours"


def test_gspo_and_its_lines():
    imported = read("gspo_arrays.sh")
    objective = imported.recipe["algorithm"]["objective"]
    assert (objective["ratio"], objective["aggregation"]) == ("sequence", "sequence_mean")
    found = rows(imported)["actor_rollout_ref.actor.policy_loss.loss_mode"]
    assert found.override.line == 19  # where it is written, not where the array is used


def test_dr_grpo():
    algorithm = read("dr_grpo.sh").recipe["algorithm"]
    assert algorithm["objective"]["aggregation"] == "constant"
    assert algorithm["objective"]["horizon"] == 3000
    assert algorithm["advantage"] == {"scale": "none"}


def test_corrections_and_schedule():
    imported = read("cispo_correction.sh")
    algorithm, trainer = imported.recipe["algorithm"], imported.recipe["trainer"]
    assert algorithm["corrections"] == [{"use": "Reweight", "level": "token", "high": 2.0}]
    assert algorithm["surrogate"] == {"use": "Cispo", "low": 1.0, "high": 4.0}
    assert trainer["num_iterations"] == 2
    assert trainer["lr_scheduler_type"] == "cosine_with_min_lr"
    assert trainer["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    assert trainer["warmup_steps"] == 0.05
    assert trainer["save_steps"] == 5 * 8
    assert trainer["chat_template_kwargs"] == {"enable_thinking": False}
    assert "--enforce-eager" in imported.plan.vllm


def test_silent_changes_are_reported():
    imported = read("old_keys.sh")
    text = "\n".join(imported.plan.traps)
    assert "clip_ratio=0.1 does nothing" in text
    assert "actor.grad_clip=0.5 does nothing" in text
    assert imported.recipe["algorithm"]["surrogate"]["low"] == 0.2
    assert imported.recipe["trainer"]["max_grad_norm"] == 1.0
    assert imported.recipe["task"]["rewards"][0]["path"] == "./my_reward.py"


def test_lost_overrides():
    imported = read("broken_continuation.sh")
    assert [o.key for o in imported.plan.launch.lost] == [
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
    ]
    assert facts(imported)["processes"] == 8  # verl's default, not the lost 4


def test_branches_follow_what_is_given():
    large = read("branches.sh", **{"1": "large", "WANDB_API_KEY": "x"})
    assert large.recipe["model"]["path"] == "/m/32b"
    assert large.recipe["trainer"]["report_to"] == ["wandb"]
    assert large.recipe["trainer"]["vllm_tensor_parallel_size"] == 4


def test_shards():
    file = read("ray_multi_node.sh").plan.accelerate
    assert file["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 8,
    }


def test_ppo_says_what_is_missing():
    imported = read("ppo_critic.sh")
    assert imported.recipe["algorithm"]["base"] == {
        "use": "ppo",
        "gamma": 1.0,
        "lam": 0.95,
        "value_clip": 0.5,
        "whiten": True,
    }
    assert rows(imported)["critic.optim.lr"].verdict == "unsupported"
    assert any("PPO's critic" in trap for trap in imported.plan.traps)


def test_defaults_that_differ_are_written_out():
    imported = read("overrides.txt")
    trainer, algorithm = imported.recipe["trainer"], imported.recipe["algorithm"]
    assert trainer["weight_decay"] == 0.01
    assert trainer["lr_scheduler_type"] == "constant"
    assert trainer["top_k"] == 0
    assert algorithm["surrogate"] == {"use": "Clip", "low": 0.2, "high": 0.2, "dual": 3.0}
    assert algorithm["corrections"] == []
    assert algorithm["objective"]["kl_reweighted"] is False
    named = {key for key, _, _ in imported.plan.defaults}
    assert {
        "actor_rollout_ref.actor.clip_ratio_c",
        "algorithm.rollout_correction.rollout_is",
        "actor_rollout_ref.actor.optim.weight_decay",
        "actor_rollout_ref.actor.optim.lr_scheduler_type",
    } <= named


def test_allow_writes_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(SCRIPTS / "megatron_moe.sh", "run.sh")
    assert main(["import-verl", "run.sh", "--allow"]) == 0
    assert yaml.safe_load(Path("run/accelerate.yaml").read_text())["distributed_type"] == "FSDP"
    assert main(["import-verl", "run.sh", "--allow"]) == 2  # never overwritten
    assert "exists" in capsys.readouterr().err
