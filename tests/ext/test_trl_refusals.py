"""What PolicyTrainer refuses, before any work."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl")
from trl import GRPOConfig

from polopt import losses
from polopt.ext.trl.config import (
    LOSS_FIELDS,
    check_algorithm,
    check_config,
    check_turns,
    check_windows,
)
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

OTHER = {
    "loss_type": "grpo",
    "epsilon": 0.1,
    "epsilon_high": 0.28,
    "delta": 3.0,
    "beta": 0.1,
    "use_bias_correction_kl": False,
    "importance_sampling_level": "sequence",
    "sapo_temperature_neg": 2.0,
    "sapo_temperature_pos": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "multi_objective_aggregation": "normalize_then_sum",
    "scale_rewards": False,
    "mask_truncated_completions": True,
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "entropy_coef_min": 0.1,
    "entropy_coef_max": 2.0,
    "entropy_coef_delta": 0.1,
    "entropy_target": 1.0,
    "off_policy_mask_threshold": 0.5,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5,
    "router_aux_loss_coef": 0.1,
}


def config(**fields):
    return GRPOConfig("out", use_cpu=True, bf16=False, report_to="none", **fields)


def test_defaults_pass():
    check_config(config())
    check_config(config(learning_rate=1e-3, reward_weights=[1.0, 0.5], temperature=0.7))


@pytest.mark.parametrize("name", [n for n in OTHER if n in GRPOConfig.__dataclass_fields__])
def test_loss_fields_are_refused_with_the_mend(name):
    with pytest.raises(ValueError, match=f"trainer.{name}=.*TRL's own loss.*leave it at"):
        check_config(config(**{name: OTHER[name]}))


def test_the_rewards_keep_their_columns():
    with pytest.raises(ValueError, match="remove_unused_columns=True takes the columns away"):
        check_config(config(remove_unused_columns=True))


def test_a_loss_field_that_has_no_other_place_says_why():
    args = config()
    args.use_liger_kernel = True  # TRL itself asks for the library first
    with pytest.raises(ValueError, match=r"leave it at False \(Liger's kernel computes TRL's loss"):
        check_config(args)


def test_every_loss_field_of_this_trl_is_tested():
    known = set(GRPOConfig.__dataclass_fields__) & set(LOSS_FIELDS)
    assert known <= {*OTHER, "vllm_importance_sampling_cap", "use_liger_kernel"}


def test_trainer_checks_its_config(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.loss_type='grpo'"):
        setup.build(PolicyTrainer, tmp_path, algorithm=losses.dapo(), config={"loss_type": "grpo"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (losses.ppo(), "trains a critic"),
        (
            replace(losses.grpo(), advantage=losses.ppo().advantage),
            r"advantage needs \['value', 'next_value', 'terminated', 'done'\]",
        ),
        (
            losses.adjusted(
                base=losses.dapo(),
                objective={"aggregation": "group_token_mean"},
                sampling={"top_entropy": 0.2},
            ),
            "top_entropy chooses tokens for each optimizer step, and aggregation",
        ),
    ],
)
def test_algorithms_that_need_more(algorithm, message):
    with pytest.raises(ValueError, match=message):
        check_algorithm(algorithm)


def test_images(tmp_path):
    rows = [{"prompt": "w1", "image": "a.png"}] * 8
    with pytest.raises(ValueError, match=r"column 'image'.*does not support images"):
        setup.build(PolicyTrainer, tmp_path, algorithm=setup.algorithm("dapo"), rows=rows)


def test_mixture_of_experts(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=2,
            num_experts_per_tok=1, router_aux_loss_coef=0.01, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="mixture of experts"):
        setup.build(PolicyTrainer, tmp_path, algorithm=setup.algorithm("dapo"), model=model)


def test_refill_needs_groups_within_a_process_and_a_length():
    from datasets import Dataset

    from polopt.ext.trl.config import check_sampling

    args = config(per_device_train_batch_size=4, num_generations=4)
    data = Dataset.from_list([{"prompt": "w1"}])
    check_sampling(args, losses.dapo(), data, 1)
    with pytest.raises(ValueError, match=r"= 2 must be a multiple of num_generations=4"):
        check_sampling(args, losses.dapo(), data, 2)
    check_sampling(args, losses.grpo(), data, 2)
    with pytest.raises(ValueError, match="a dataset with a length"):
        check_sampling(args, losses.dapo(), data.to_iterable_dataset(), 1)
    with pytest.raises(ValueError, match="a dataset with a length"):
        check_sampling(args, losses.dapo(), None, 1)
    check_sampling(args, losses.dapo(), None, 1, environment=True)


def test_the_greedy_baseline_needs_whole_groups_and_generation_of_ours(tmp_path):
    from datasets import Dataset

    from polopt.ext.trl.config import check_sampling

    args = config(per_device_train_batch_size=4, num_generations=4)
    data = Dataset.from_list([{"prompt": "w1"}])
    check_sampling(args, losses.remax(), data, 1)
    with pytest.raises(ValueError, match=r"greedy baseline needs whole groups .* = 2 must be"):
        check_sampling(args, losses.remax(), data, 2)
    args.use_vllm = True
    with pytest.raises(ValueError, match="does not ask vLLM for yet: leave use_vllm out"):
        check_sampling(args, losses.remax(), data, 1)
    with pytest.raises(ValueError, match="cannot ask rollout_func for: use another"):
        setup.build(PolicyTrainer, tmp_path, algorithm=losses.remax(), rollout_func=len)


def test_conversations_need_a_template(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"w{i}"}]} for i in range(8)]
    with pytest.raises(ValueError, match=r"no chat template: set tokenizer\.chat_template"):
        setup.build(PolicyTrainer, tmp_path, algorithm=setup.algorithm("dapo"), rows=rows)


def test_ranks_with_different_data(monkeypatch):
    from types import SimpleNamespace

    from datasets import Dataset

    from polopt.ext.trl import rows as module

    def ranks(*rows):
        """Let two ranks with these rows compare them."""
        two = SimpleNamespace(num_processes=2)
        sets = [Dataset.from_list([{"prompt": text} for text in texts]) for texts in rows]
        shown = [module.fingerprint(data) for data in sets]
        monkeypatch.setattr(module, "gather_object", lambda _: shown)
        for text in shown:
            module.check_same_data(text, two)

    ranks(["w1", "w2"], ["w1", "w2"])
    many = [f"w{i}" for i in range(2000)]
    with pytest.raises(ValueError, match=r"rank 0: 2000 rows \(.*rank 1: 2000 rows"):
        ranks(many, [*many[:1234], "other", *many[1235:]])
    with pytest.raises(ValueError, match=r"rank 0: 2 rows \(.*rank 1: 2 rows"):
        ranks(["w1", "w2"], ["w1", "w3"])
    with pytest.raises(ValueError, match=r"rank 0: 2 rows \(.*rank 1: 1 rows"):
        ranks(["w1", "w2"], ["w1"])


def test_deepspeed_cannot_mend_a_step_over_two_generations():
    check_windows(config(gradient_accumulation_steps=4, steps_per_generation=2), deepspeed=False)
    check_windows(config(gradient_accumulation_steps=2, steps_per_generation=4), deepspeed=True)
    with pytest.raises(ValueError, match=r"= 2 must be a multiple .* = 4"):
        check_windows(config(gradient_accumulation_steps=4, steps_per_generation=2), deepspeed=True)


def test_public_name_and_missing_extra(monkeypatch):
    import sys

    import polopt.ext.trl

    assert polopt.ext.trl.PolicyTrainer is PolicyTrainer
    assert not hasattr(polopt.ext.trl, "Policy")
    monkeypatch.delitem(sys.modules, "polopt.ext.trl.trainer")
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"pip install 'polopt\[trl\]'"):
        polopt.ext.trl.PolicyTrainer  # noqa: B018


@pytest.mark.parametrize(
    ("config", "gathered", "told"),
    [
        ({}, True, "tools: each of the 2 ranks .* share shards of the model"),
        ({"vllm_mode": "server"}, False, "they share the calls of a vLLM server"),
        ({"vllm_tensor_parallel_size": 2}, False, r"they share vLLM \(vllm_tensor_par"),
        ({"vllm_mode": "colocate"}, True, None),
        ({}, False, None),
    ],
)
def test_ranks_that_generate_together_have_no_tools(config, gathered, told):
    """TRL's loop of tools runs as often as a rank's own answers ask, with collectives in it."""
    args = GRPOConfig("unused", use_cpu=True, bf16=False, use_vllm=bool(config), **config)
    for processes, given in ((1, {"tools": [print]}), (2, {}), (2, {"tools": []})):
        check_turns(args, given, processes, gathered=gathered)
    if told is None:
        check_turns(args, {"tools": [print]}, 2, gathered=gathered)
        return
    for given in ({"tools": [print]}, {"environment_factory": object}):
        with pytest.raises(ValueError, match=told.replace("tools", next(iter(given)))):
            check_turns(args, given, 2, gathered=gathered)


def test_the_trainer_asks_for_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "polopt.ext.trl.trainer.check_turns", lambda *a, **k: asked.append((a[1:], k))
    )
    setup.build(PolicyTrainer, tmp_path, algorithm=losses.dapo(refill=None))
    (((given, processes), gathered),) = asked
    assert (processes, gathered) == (1, {"gathered": False})
    assert "train_dataset" in given
