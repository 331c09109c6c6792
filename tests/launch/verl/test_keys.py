"""Every key of verl is known, and something is said about it."""

import gzip
from pathlib import Path

import pytest

from polopt.launch.verl import schema
from polopt.launch.verl.convert_rollout import server_flags, server_version
from polopt.launch.verl.importer import import_script

HERE = Path(__file__).parent
LAUNCH = (
    "python3 -m verl.trainer.main_ppo data.train_files=/t.parquet data.val_files=/v.parquet "
    "trainer.n_gpus_per_node=8 "
)
# The keys that public scripts use most, one a line.
USED = gzip.decompress((HERE / "used_keys.txt.gz").read_bytes()).decode().split()


NEEDS_VALUES = ("$", "pdrop", "dropout", "max-model-len")


def spelled(key):
    """An override that sets the key to verl's default, as a shell word."""
    found = schema.find(key)
    default = found.default if found else None
    if isinstance(default, bool | int | float):
        return f"'++{key}={default}'"
    plain = isinstance(default, str) and default.replace("-", "").replace("_", "").isalnum()
    return f"'++{key}={default}'" if plain else f"'++{key}=null'"


def row_of(word):
    imported = import_script(LAUNCH + word)
    item = imported.plan.launch.overrides[-1]
    return imported.plan.rows[id(item)]


def test_there_are_as_many_as_known():
    assert len(USED) == 526
    assert len(schema.keys()) > 1900


@pytest.mark.parametrize("part", range(10))
def test_used_keys_are_covered(part):
    for key in USED[part::10]:
        if "dropout" in key or "pdrop" in key:
            row = row_of(f"'++{key}=0.0'")
        elif key.endswith("max-model-len"):
            row = row_of(f"'++{key}=4096'")
        else:
            row = row_of(spelled(key) if "$" not in key else f"{key}=1")
        assert row.verdict
        assert row.how or row.target, key
        assert "no rule covers" not in row.how, key
        assert "has no such key" not in row.how or "$" in key, key


def test_every_key_of_the_schema_is_covered_in_one_import():
    keys = [k for k in sorted(schema.keys()) if not any(part in k for part in NEEDS_VALUES)]
    words = " ".join(
        spelled(k)
        for k in keys
        if not k.startswith(("data.train_files", "data.val_files", "actor_rollout_ref.ref.optim"))
    )
    imported = import_script(LAUNCH + words)
    rows = imported.plan.rows.values()
    assert len(rows) == len(imported.plan.launch.overrides)
    assert not [r.override.key for r in rows if "no rule covers" in r.how]
    assert not [r.override.key for r in rows if "has no such key" in r.how]


def test_unknown_keys_name_the_nearest():
    row = row_of("actor_rollout_ref.actor.ppo_mini_batchsize=3")
    assert row.verdict == "refused"
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in row.how


def test_moved_keys_keep_their_meaning():
    assert schema.canonical("custom_reward_function.path") == "reward.custom_reward_function.path"
    assert row_of("reward_model.reward_manager=dapo").verdict == "ours"


@pytest.mark.parametrize(
    ("word", "verdict"),
    [
        ("actor_rollout_ref.actor.use_torch_compile=False", "inert"),
        ("actor_rollout_ref.rollout.mode=async", "inert"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096", "no effect"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "no effect"),
        ("actor_rollout_ref.model.use_remove_padding=True", "unsupported"),
        ("actor_rollout_ref.model.use_remove_padding=False", "no effect"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv", "refused"),
        ("algorithm.adv_estimator=optimal_token_baseline", "refused"),
        ("actor_rollout_ref.rollout.name=sglang", "refused"),
        ("model_engine=megatron", "refused"),
        ("actor@actor_rollout_ref.actor=mine", "refused"),
        ("actor_rollout_ref.actor.optim.lr=3e-7", "exact"),
        ("algorithm.filter_groups.enable=True", "ours"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=3", "approximate"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.no_such_flag=3", "unsupported"),
    ],
)
def test_verdicts(word, verdict):
    base = "algorithm.adv_estimator=grpo " if "adv_estimator" not in word else ""
    assert row_of(base + word).verdict == verdict


def test_written_flags_are_stored_ones():
    imported = import_script(LAUNCH)
    assert set(imported.plan.vllm) <= server_flags()
    assert server_version().count(".") == 2


def test_whitening_is_said_to_differ():
    row = row_of("algorithm.adv_estimator=reinforce_plus_plus_baseline")
    assert row.verdict == "approximate"
    assert "over their tokens" in row.how
    assert row_of("algorithm.adv_estimator=rloo").verdict == "exact"
