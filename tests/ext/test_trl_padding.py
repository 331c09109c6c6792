"""Micro-batches in order of length without padding: what moves, what is cut, same gradients."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
import transformers

from polopt import losses
from polopt.ext.trl.padding import Padding
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

ALL = Padding(prompts=True, completions=True)
SMALL = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
         "max_position_embeddings": 8, "initializer_range": 0.5}  # fmt: skip


def batches(count=4, rows=3, seed=0, width=12):
    """Return micro-batches padded as TRL does, and rows that are recognised by their ids."""
    rng = torch.Generator().manual_seed(seed)
    out, number = [], 0
    steps = torch.arange(width)
    for _ in range(count):
        prompt = torch.randint(1, width - 2, (rows, 1), generator=rng)
        length = torch.randint(1, width - 2, (rows, 1), generator=rng)
        name = torch.arange(number, number + rows)
        number += rows
        kept = (steps < length).long()
        out.append({
            "prompt_ids": name[:, None] * 100 + steps,
            "prompt_mask": (steps >= width - prompt).long(),
            "completion_ids": name[:, None] * 100 + steps + 50,
            "completion_mask": kept,
            "loss_mask": kept.bool(),
            "advantages": name.float(),
            "old_per_token_logps": None,
            "num_items_in_batch": torch.tensor(7),
            "texts": [str(i) for i in name.tolist()],
        })  # fmt: skip
    return out


@pytest.mark.parametrize("window", [1, 2, 4])
def test_rows_stay_whole_and_within_their_window(window):
    before = batches()
    after = ALL.order(before, window)
    assert len(after) == len(before)
    for start in range(0, 4, window):
        old = torch.cat([b["advantages"] for b in before[start : start + window]])
        new = torch.cat([b["advantages"] for b in after[start : start + window]])
        assert sorted(new.tolist()) == sorted(old.tolist())
        assert window == 1 or new.tolist() != old.tolist()
    rows = {b["texts"][i]: (b, i) for b in before for i in range(3)}
    for batch in after:
        assert batch["loss_mask"].shape[0] == 3
        assert batch["num_items_in_batch"] == 7
        assert batch["old_per_token_logps"] is None
        for i, text in enumerate(batch["texts"]):
            origin, j = rows[text]
            assert batch["advantages"][i] == origin["advantages"][j]
            for part in ("prompt", "completion"):
                kept, real = batch[f"{part}_mask"][i].bool(), origin[f"{part}_mask"][j].bool()
                got, expected = batch[f"{part}_ids"][i][kept], origin[f"{part}_ids"][j][real]
                assert got.tolist() == expected.tolist()


def test_widths_are_those_of_the_longest():
    after = ALL.order(batches(), 4)
    area = sum(b["prompt_mask"].size(1) + b["completion_mask"].size(1) for b in after)
    assert area < 0.8 * 4 * 24
    for batch in after:
        assert batch["prompt_mask"].sum(1).max() == batch["prompt_mask"].size(1)
        for key in ("completion_mask", "completion_ids", "loss_mask"):
            assert batch["completion_mask"].sum(1).max() == batch[key].size(1)
    for batch in Padding(prompts=False, completions=True).order(batches(), 4):
        assert batch["prompt_ids"].size(1) == 12
    for batch in Padding(prompts=True, completions=True, multiple=4).order(batches(), 4):
        assert batch["prompt_ids"].size(1) % 4 == batch["loss_mask"].size(1) % 4 == 0
    same = batches()
    assert Padding(prompts=False, completions=False).order(same, 4) == same


def test_untrained_tails_are_cut_and_one_column_stays():
    """Nothing looks at tokens behind the last trained one."""
    (before,) = batches(count=1)
    before["loss_mask"][:] = False
    (after,) = ALL.order([before], 1)
    assert after["completion_ids"].shape == (3, 1)
    before["loss_mask"][1, 3] = True
    before["advantages"] = torch.arange(36.0).view(3, 12)  # one for each token
    (after,) = ALL.order([before], 1)
    assert after["completion_ids"].shape == after["advantages"].shape == (3, 4)


def test_scores_go_back_to_their_places():
    (batch,) = batches(count=1, rows=7)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    seen = []

    def score(ids, mask, width):
        seen.append(ids.shape)
        return ids[:, -width:].double(), ids[:, -width:].double() + 0.5, "dropped"

    value, entropy, rest = ALL.score(score, ids, mask, 12, 2)
    kept = batch["completion_mask"].bool()
    assert torch.equal(value[kept], batch["completion_ids"][kept].double())
    assert torch.equal(entropy[kept], value[kept] + 0.5)
    assert rest is None
    assert [rows for rows, _ in seen] == [2, 2, 2, 1]
    assert len({columns for _, columns in seen}) > 2
    _, nothing, _ = ALL.score(lambda *a: (score(*a)[0], None, None), ids, mask, 12, 2)
    assert nothing is None


def llama(**settings):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **settings)).double()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.5
    )
    return transformers.GPT2LMHeadModel(config).double()


@pytest.mark.parametrize(
    ("model", "prompts", "completions"),
    [
        (llama(), True, True),
        (llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
         True, True),
        (llama(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}),
         True, True),
        (llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
         False, False),
        (gpt2(), False, True),
    ],
    ids=["rope", "linear", "yarn", "dynamic", "learned"],
)  # fmt: skip
@torch.no_grad()
def test_cuts_what_does_not_change_the_outputs(model, prompts, completions):
    allowed = Padding.of(model)
    assert (allowed.prompts, allowed.completions) == (prompts, completions)
    (batch,) = batches(count=1, rows=4)
    rng = torch.Generator().manual_seed(1)
    for part in ("prompt", "completion"):
        ids = torch.randint(16, (4, 12), generator=rng)
        batch[f"{part}_ids"] = torch.where(batch[f"{part}_mask"].bool(), ids, 0)
    model.eval()

    def log_prob(batch):
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].size(1)
        # Dynamic frequencies remember the widest batch so far.
        fresh = copy.deepcopy(model)
        scores = fresh(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
        taken = scores.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
        kept = batch["loss_mask"]
        return {n: row[k] for n, row, k in zip(batch["texts"], taken, kept, strict=True)}

    def differ(padding):
        (cut,) = padding.order([batch], 1)
        before, after = log_prob(batch), log_prob(cut)
        return max(float((after[n] - before[n]).abs().max()) for n in before)

    # Rotary tables are float32 in transformers.
    assert differ(allowed) < 1e-5
    if not prompts:
        assert differ(ALL) > 1e-3


def test_models_with_absolute_attention_keep_their_prompts():
    config = transformers.Llama4TextConfig(num_hidden_layers=1, hidden_size=16)
    assert Padding.of(_configured(config)) == Padding(prompts=False, completions=True)
    mixed = transformers.Gemma3TextConfig()
    assert Padding.of(_configured(mixed), 8) == Padding(prompts=True, completions=True, multiple=8)


def _configured(config):
    model = torch.nn.Module()
    model.config = config
    return model


class Watched(PolicyTrainer):
    """Remembers how many columns the model was trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained = []

    def _compute_loss(self, model, inputs):
        self.trained.append(inputs["completion_ids"].numel() + inputs["prompt_ids"].numel())
        return super()._compute_loss(model, inputs)


def train(folder, algorithm, *, trim, model=None, **config):
    rows = [
        {"prompt": " ".join(f"w{(i * j) % 13}" for j in range(1, 2 + i % 6))} for i in range(48)
    ]
    trainer = setup.build(
        Watched, folder, reward=setup.unequal, rows=rows, algorithm=algorithm, trim_padding=trim,
        config={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4,
                "max_completion_length": 24, **config},
        **({"model": model} if model else {}),
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("dapo", {"max_steps": 4}),
        ("grpo", {"max_steps": 4, "num_iterations": 2}),
        ("gspo", {"max_steps": 4, "steps_per_generation": 8}),
        ("rloo", {"max_steps": 4, "num_iterations": 2, "steps_per_generation": 6}),
        ("dr_grpo", {"max_steps": 4, "num_iterations": 3, "steps_per_generation": 2}),
    ],
)
def test_training_is_the_same_without_the_padding(tmp_path, name, config):
    """Over several steps; where generations and steps cross, rows move less, but move."""
    knobs = {"kl_coef": 0.3} if name in ("grpo", "rloo") else {}
    rule = setup.algorithm(name, **knobs)
    setup.tiny()[0].save_pretrained(tmp_path / "model")

    def run(trim):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        done = train(tmp_path / str(trim), rule, trim=trim, model=model, **config)
        return done, torch.nn.utils.parameters_to_vector(model.parameters()).detach(), start

    plain, expected, start = run(False)
    trimmed, got, _ = run(True)
    assert (expected - start).abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    if knobs:
        assert any("kl" in h for h in trimmed.state.log_history)
    same = ("loss_objective", "entropy", "clip_ratio/region_mean", "kl", "reward", "grad_norm")
    for a, b in zip(trimmed.state.log_history, plain.state.log_history, strict=True):
        for key in same:
            assert (key in a) == (key in b)
            if key in a:
                assert a[key] == pytest.approx(b[key], abs=2e-5), key
    assert len(trimmed.trained) == len(plain.trained)
    assert sum(trimmed.trained) < 0.85 * sum(plain.trained)


def test_refilled_batches_are_trimmed_too(tmp_path):
    done = setup.refill(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4,
                        max_completion_length=24)  # fmt: skip
    assert max(done.errors) < 1e-4
    assert len(done.widths) > 1


def test_evaluation_is_the_same(tmp_path):
    def evaluate(trim):
        trainer = setup.build(
            PolicyTrainer, tmp_path / str(trim), algorithm=losses.dapo(refill=None),
            trim_padding=trim, config={"per_device_eval_batch_size": 8},
        )  # fmt: skip
        torch.manual_seed(0)
        return trainer.evaluate(trainer.train_dataset.select(range(4)))

    a, b = evaluate(True), evaluate(False)
    for key in ("eval_loss_objective", "eval_entropy", "eval_reward"):
        assert a[key] == pytest.approx(b[key], abs=1e-5)
