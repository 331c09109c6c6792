"""Surrogates that choose tokens over the whole optimizer step: Clip-Cov and KL-Cov."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
from trl import GRPOConfig

from polopt import losses
from polopt.ext.trl.config import check_windows
from polopt.ext.trl.trainer import PolicyTrainer
from polopt.losses.covariance import covariance

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


def logs(trainer, key):
    return [h[key] for h in trainer.state.log_history if key in h]


@pytest.mark.parametrize(
    ("accumulate", "generate", "iterations"), [(1, 1, 2), (2, 4, 2), (2, 2, 3)]
)
def test_gradient_is_that_of_a_selection_over_one_batch(tmp_path, accumulate, generate, iterations):
    rule = losses.kl_cov(coef=5.0, share=0.2)
    done = setup.compare(
        tmp_path, rule, per_device_train_batch_size=4, max_steps=4,
        gradient_accumulation_steps=accumulate, steps_per_generation=generate,
        num_iterations=iterations, max_completion_length=16,
    )  # fmt: skip
    # In the first step of a generation log-ratios are zero up to rounding, whose sign is what
    # the gradient of their absolute value shows.
    first = [step * accumulate % (generate * iterations) == 0 for step in range(4)]
    errors = [e for e, skip in zip(done.errors[::2], first, strict=True) if not skip]
    assert max([*errors, *done.errors[1::2]]) < 1e-4
    assert len(errors) == 4 - sum(first)
    assert min(done.selected) > 3
    assert 0.1 < logs(done, "selected_fraction")[0] <= 0.2
    assert not logs(done, "clip_ratio/region_mean")
    assert len(logs(done, "clip_fraction")) == 4


def test_the_penalty_reaches_the_gradient(tmp_path):
    """Off policy the selected tokens pay: other weights than without them."""

    def weights(coef):
        done = setup.compare(
            tmp_path, losses.kl_cov(coef=coef, share=0.5), num_iterations=3, max_steps=3
        )
        return torch.nn.utils.parameters_to_vector(done.model.parameters()).detach()

    assert (weights(20.0) - weights(0.0)).abs().max() > 1e-4


class Watched(PolicyTrainer):
    """Keeps the micro-batches and the selections of each optimizer step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.windows = []

    def _open(self, batches):
        super()._open(batches)
        self.windows.append((batches, self._window.selections))


def watch(folder, rule):
    trainer = setup.build(
        Watched, folder, algorithm=rule, reward=setup.unequal,
        config={"gradient_accumulation_steps": 2, "steps_per_generation": 4,
                "max_completion_length": 16, "max_steps": 4},
    )  # fmt: skip
    trainer.train()
    return trainer


def test_clip_cov_draws_among_the_candidates_of_the_whole_step(tmp_path):
    rule = losses.clip_cov(share=0.1, cov_low=0.0, cov_high=5.0)
    trainer = watch(tmp_path, rule)
    assert len(trainer.windows) == 4
    for batches, selections in trainer.windows:
        assert len(batches) == len(selections) == 2
        chosen = [s[b["loss_mask"]] for b, s in zip(batches, selections, strict=True)]
        width = max(b["loss_mask"].size(1) for b in batches)

        def joined(key, width=width, batches=batches):
            return torch.cat([
                torch.nn.functional.pad(b[key], (0, width - b[key].size(1))) for b in batches
            ])  # fmt: skip

        mask = joined("loss_mask")
        total = torch.cat(chosen)
        assert sum(int(s.sum()) for s in selections) == int(total.sum())  # none outside
        assert int(total.sum()) == int(0.1 * mask.sum())
        old = joined(
            "old_per_token_logps" if "old_per_token_logps" in batches[0] else "select_from"
        )
        credit = torch.cat([b["advantages"] for b in batches])[:, None].expand(mask.shape)
        cov = covariance(old, credit, mask)
        parts = cov.split([len(b["loss_mask"]) for b in batches])
        for part, b, s in zip(parts, batches, selections, strict=True):
            values = part[:, : b["loss_mask"].size(1)][s]
            assert ((values > 0) & (values < 5)).all()
    assert all(0.05 < share <= 0.1 for share in logs(trainer, "selected_fraction"))
    again = watch(tmp_path, rule)
    for (_, a), (_, b) in zip(trainer.windows, again.windows, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_evaluation_selects_as_well(tmp_path):
    trainer = setup.build(
        PolicyTrainer, tmp_path, algorithm=losses.kl_cov(share=0.5),
        config={"per_device_eval_batch_size": 8},
    )  # fmt: skip
    found = trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert 0.3 < found["eval_selected_fraction"] <= 0.5


def test_a_step_over_two_generations_is_refused():
    args = GRPOConfig("out", use_cpu=True, bf16=False, report_to="none",
                      gradient_accumulation_steps=4, steps_per_generation=2)  # fmt: skip
    check_windows(args, deepspeed=False)
    with pytest.raises(ValueError, match=r"with a choice among the tokens .*= 2 must be a multi"):
        check_windows(args, deepspeed=False, selects=True)
