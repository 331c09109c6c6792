"""What looks at more than the sampled tokens: the exact divergence, and the top of the entropy."""

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from polopt import losses
from polopt.ext.trl import full_kl as module
from polopt.ext.trl.full_kl import FullKl
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

PRODUCTS = [(1, 1, 1), (2, 4, 1), (2, 2, 2), (1, 3, 2)]


def exact(kl_coef=0.5, **objective):
    rule = losses.dapo(refill=None)
    return losses.adjusted(
        base=rule, objective={"kl": "full", "kl_coef": kl_coef, **objective}
    )  # fmt: skip


def selecting(share=0.3, **objective):
    base = losses.dapo(refill=None)
    return losses.adjusted(base=base, sampling={"top_entropy": share}, objective=objective)


def logs(trainer, key):
    return [h[key] for h in trainer.state.log_history if key in h]


@pytest.mark.parametrize(("accumulate", "generate", "iterations"), PRODUCTS)
@pytest.mark.parametrize("rule", [exact(), selecting()], ids=["kl", "entropy"])
def test_gradient_is_that_of_one_batch(tmp_path, rule, accumulate, generate, iterations):
    done = setup.compare(
        tmp_path, rule, per_device_train_batch_size=4, max_steps=4,
        gradient_accumulation_steps=accumulate, steps_per_generation=generate,
        num_iterations=iterations, max_completion_length=16,
    )  # fmt: skip
    assert len(done.errors) == 8
    assert max(done.errors) < 1e-4
    assert len(done.lengths) > 2


def test_other_aggregations_and_both_together(tmp_path):
    for rule in (
        exact(aggregation="sequence_mean", kl_reweighted=True),
        selecting(aggregation="sequence_mean", kl="full", kl_coef=0.5),
        losses.adjusted(
            base=losses.kl_cov(coef=5.0, share=0.3), sampling={"top_entropy": 0.5},
            objective={"entropy_coef": 0.0},
        ),
    ):  # fmt: skip
        done = setup.compare(
            tmp_path, rule, per_device_train_batch_size=4, max_steps=4, num_iterations=2,
            gradient_accumulation_steps=2, steps_per_generation=4,
        )  # fmt: skip
        # KL-Cov: log-ratios are zero up to rounding in the first step of a generation.
        assert max(done.errors[2:] if done.algorithm.objective.selects else done.errors) < 1e-4


def test_the_exact_divergence_is_what_the_estimates_estimate(tmp_path):
    """k1 over many samples of the policy; and nothing is scored for TRL's own divergence."""

    class Counted(PolicyTrainer):
        scored = 0

        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            self.scored += model is self.ref_model
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def kl(kind):
        rule = losses.adjusted(base=exact(0.01), objective={"kl": kind})
        trainer = setup.build(
            Counted, tmp_path, algorithm=rule, model=setup.saved(tmp_path),
            config={"max_steps": 6, "per_device_train_batch_size": 64, "learning_rate": 0.5},
        )  # fmt: skip
        trainer.train()
        assert (trainer.scored > 0) == (kind != "full")
        return torch.tensor(logs(trainer, "kl"))

    whole, sampled = kl("full"), kl("k1")
    assert abs(whole[0]) < 1e-6 < whole[-1]
    assert (whole >= -1e-6).all()
    torch.testing.assert_close(whole[-1], sampled[-1], rtol=0.3, atol=0.0)


@pytest.mark.parametrize("adapters", [False, True])
def test_values_and_gradients_in_chunks(tmp_path, monkeypatch, adapters):
    """Against log-softmax over all logits at once, with a temperature, and with LoRA."""
    policy, _ = setup.tiny()
    reference, _ = setup.tiny()
    for p in policy.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    ids = torch.randint(3, 16, (3, 11))
    attention = torch.ones_like(ids)
    attention[0, :3] = 0
    mask = torch.rand(3, 6) < 0.7
    plain = reference
    if adapters:
        peft = pytest.importorskip("peft")
        plain, reference = policy, None
        with torch.no_grad():
            before = plain(input_ids=ids, attention_mask=attention).logits
        knobs = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        policy = peft.get_peft_model(policy, peft.LoraConfig(**knobs, init_lora_weights=False))
    else:
        with torch.no_grad():
            before = plain(input_ids=ids, attention_mask=attention).logits
    monkeypatch.setattr(module, "_LOGITS", 16 * 4)  # four tokens at a time
    measure = FullKl(policy, reference, 0.7, contextlib.nullcontext)
    with measure.watch() as hidden:
        logits = policy(input_ids=ids, attention_mask=attention).logits
    found = measure(hidden[0], ids, attention, mask)
    p, q = ((x[:, -7:-1] / 0.7).log_softmax(-1) for x in (logits, before))
    expected = torch.where(mask, (p.exp() * (p - q)).sum(-1), 0.0)
    assert expected.max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    weights = torch.randn_like(expected)
    leaves = [w for w in policy.parameters() if w.requires_grad]
    ours = torch.autograd.grad(
        (found * weights).sum(), leaves, allow_unused=True, retain_graph=True
    )
    theirs = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b is not None]
    assert len(pairs) > 5
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert all(w.requires_grad for w in leaves)


def test_adapters_with_recomputed_layers(tmp_path):
    """LoRA: the reference is the model below, also while the gradient is computed."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = setup.build(
        PolicyTrainer, tmp_path, algorithm=exact(0.5), model=setup.saved(tmp_path),
        peft_config=adapter,
        config={"gradient_checkpointing": True, "num_iterations": 2, "max_steps": 4,
                "gradient_accumulation_steps": 2, "learning_rate": 0.5},
    )  # fmt: skip
    before = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    kl = logs(trainer, "kl")
    assert abs(kl[0]) < 1e-6 < kl[-1]
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in before.items())
    assert all(p.requires_grad == ("lora_" in n) for n, p in after.items())


def test_a_model_that_caps_its_logits_is_refused():
    model, _ = setup.tiny()
    FullKl(model, model, 1.0, contextlib.nullcontext)
    forward = model.forward

    def capped(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = 0.5 * out.logits
        return out

    model.forward = capped
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM scales or caps the logits .*'k3'"):
        FullKl(model, model, 1.0, contextlib.nullcontext)


def test_entropies_are_those_of_the_policy_that_answered(tmp_path):
    """Whether TRL scores the old policy or not; and the share holds for the tokens of the step."""

    class Seen(PolicyTrainer):
        def _open(self, batches):
            super()._open(batches)
            model = self.accelerator.unwrap_model(self.model)
            assert len(batches) == len(self._window.masks)
            chosen, entropies = 0, []
            for batch, mask in zip(batches, self._window.masks, strict=True):
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
                seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
                with torch.no_grad():
                    logits = model(input_ids=ids, attention_mask=seen).logits
                scores = logits[:, -mask.size(1) - 1 : -1].log_softmax(-1)
                entropy = -(scores.exp() * scores).sum(-1)
                within = batch["loss_mask"]
                if self.state.global_step == 0:
                    torch.testing.assert_close(
                        batch["policy_entropy"][within], entropy[within], rtol=1e-4, atol=1e-5
                    )
                assert not (mask & ~within).any()
                assert not (mask & (batch["policy_entropy"] < self._window.threshold)).any()
                chosen += int(mask.sum())
                entropies.append(batch["policy_entropy"][within])
            whole = torch.cat(entropies)
            assert chosen == (whole >= torch.quantile(whole, 0.75)).sum()
            assert 0.24 < chosen / len(whole) < 0.4  # first tokens of a group tie
            self.checked = getattr(self, "checked", 0) + 1

    for config in ({"gradient_accumulation_steps": 2}, {"num_iterations": 2}):
        trainer = setup.build(
            Seen, tmp_path, algorithm=selecting(0.25),
            config={**config, "max_steps": 2, "per_device_eval_batch_size": 8},
        )  # fmt: skip
        trainer.train()
        assert trainer.checked == 2
        assert len(logs(trainer, "sampling/entropy_threshold")) == 2
        trainer.state.global_step = 9
        assert trainer.evaluate(trainer.train_dataset.select(range(4)))["eval_entropy"] > 0


def test_a_step_without_rewards_has_no_threshold_of_entropy(tmp_path):
    def silent(completions, **_):
        return [None] * len(completions)

    trainer = setup.build(
        PolicyTrainer, tmp_path, algorithm=selecting(0.25), reward=silent, config={"max_steps": 1}
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert len(logs(trainer, "entropy")) == 1
    assert not logs(trainer, "sampling/entropy_threshold")
