"""What the TRL tests share: a tiny model made in place, a short run, a reference gradient.

Run as a script it compares gradients, on as many ranks as torchrun starts.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

from polopt import losses
from polopt.ext.trl.trainer import PolicyTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(13))]


def tiny():
    """Return a random two-layer model and a word tokenizer."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), fast


def variety(completions, **_):
    """Reward the share of different words, which leaves few groups equal."""
    return [len(set(c.split())) / (1 + len(c.split())) for c in completions]


def build(kind, folder, *, reward=variety, rows=None, **settings):
    """Return a trainer of `kind` on the tiny model."""
    config = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
        **settings.pop("config", {}),
    }
    rows = rows or [{"prompt": f"w{i % 13} w{i * 5 % 13} w{i * 3 % 11}"} for i in range(48)]
    model, tokenizer = tiny()
    trainer = kind(
        settings.pop("model", model),
        [reward] if callable(reward) else reward,
        GRPOConfig(**config),
        train_dataset=settings.pop("data", Dataset.from_list(rows)),
        processing_class=settings.pop("tokenizer", tokenizer),
        **settings,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def algorithm(name, **settings):
    """Return a named algorithm without refilling."""
    knobs = {"dr_grpo": {"horizon": 8}, "dapo": {"refill": None}, "grpo": {"kl_coef": 0.0},
             "reinforce_pp": {"kl_coef": 0.0}}  # fmt: skip
    return getattr(losses, name)(**{**knobs.get(name, {}), **settings})


class Recorder(PolicyTrainer):
    """Compares each optimizer step's gradient with that of its samples as one batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.selected = []
        self.parts, self.errors, self.lengths, self.widths = [], [], set(), set()

    def _compute_loss(self, model, inputs):
        self.parts.append({k: v.clone() for k, v in inputs.items()})
        self.widths.add(inputs["completion_ids"].size(1))
        return super()._compute_loss(model, inputs)

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        if self.accelerator.sync_gradients:
            self.compare()
            self.parts.clear()
        return loss

    def compare(self):
        from accelerate.utils import gather_object

        model = self.accelerator.unwrap_model(self.model)
        samples = []
        for part in gather_object(self.parts):
            for i in range(len(part["advantages"])):
                prompt = part["prompt_ids"][i][part["prompt_mask"][i].bool()]
                kept = part["completion_mask"][i].bool()
                completion = part["completion_ids"][i][kept]
                old = part.get("old_per_token_logps")
                credit = part["advantages"][i]
                samples.append((prompt, completion,
                                credit[kept] if credit.ndim else credit.expand(len(completion)),
                                part["loss_mask"][i][kept],
                                None if old is None else old[i][kept],
                                part["group_tokens"][i] if "group_tokens" in part else None,
                                part["policy_entropy"][i][kept] if "policy_entropy" in part
                                else None,
                                ))  # fmt: skip
        reference = type(model)(model.config).train()
        reference.load_state_dict(model.state_dict())
        width = max(len(s[1]) for s in samples)
        share, exact = self.algorithm.sampling.top_entropy, self.algorithm.objective.kl == "full"
        least = 0.0
        if share is not None:  # one quantile over the whole step
            least = torch.quantile(torch.cat([s[6][s[3]] for s in samples]), 1 - share)
        new, old, mask, advantage, kl = [], [], [], [], []
        for prompt, completion, a, trained, before, _, entropy in samples:  # no padding at all
            trained = trained if entropy is None else trained & (entropy >= least)
            logits = reference(input_ids=torch.cat([prompt, completion])[None]).logits[0]
            scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
            taken = scores.gather(-1, completion[:, None])[:, 0]
            space = (0, width - len(taken))
            new.append(torch.nn.functional.pad(taken, space))
            before = taken.detach() if before is None else before
            old.append(torch.nn.functional.pad(before, space))
            mask.append(torch.nn.functional.pad(trained, space))
            advantage.append(torch.nn.functional.pad(a, space))
            if exact:
                with torch.no_grad():
                    other = self.ref_model(input_ids=torch.cat([prompt, completion])[None]).logits
                other = other[0, len(prompt) - 1 : -1].log_softmax(-1)
                whole = torch.nn.functional.kl_div(other, scores, log_target=True, reduction="none")
                kl.append(torch.nn.functional.pad(whole.sum(-1), space))
            self.lengths.add(len(completion))
        rest = torch.stack(old), torch.stack(advantage), torch.stack(mask)
        rule, selection = self.algorithm.objective, None
        if rule.selects:
            selection = losses.select_steps(rest[0], *rest, objective=rule)
            self.selected.append(int(selection.sum()))
        totals = [s[5] for s in samples]
        out = losses.policy_loss(
            torch.stack(new), *rest, objective=rule, selection=selection,
            group_tokens=None if totals[0] is None else torch.stack(totals),
            kl=torch.stack(kl) if kl else None,
        )  # fmt: skip
        sum(value for name, value in out.items() if name.startswith("loss_")).backward()
        trained = torch.stack(advantage)[torch.stack(mask)]
        self.spread = trained.mean().item(), trained.std().item()
        worst = 0.0
        for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert q.grad is not None, name
            scale = p.grad.abs().max().clamp(min=1e-4)
            worst = max(worst, float((p.grad - q.grad).abs().max() / scale))
        self.errors.append(worst)
        names = [name for name in ("loss_objective", "loss_kl") if name in out]
        metrics = [self._metrics["train"][name][-1] for name in names]
        self.errors.append(max(abs(m - out[n].item()) for m, n in zip(metrics, names, strict=True)))


def unequal(completions, **_):
    """Like `variety`, and some samples have no reward."""
    return [None if "w7" in c.split()[:2] else r
            for c, r in zip(completions, variety(completions), strict=True)]  # fmt: skip


def compare(folder, name, **config):
    """Train a few steps and return the recorder."""
    rule = algorithm(name) if isinstance(name, str) else name
    model = saved(folder) if rule.objective.uses_reference else tiny()[0]
    trainer = build(Recorder, folder, reward=unequal, algorithm=rule, config=config, model=model)
    trainer.train()
    return trainer


def saved(folder):
    """Return the tiny model as loaded from a folder, where TRL finds the reference."""
    path = Path(folder) / "tiny"
    if not path.exists():
        tiny()[0].save_pretrained(path)
    return Qwen3ForCausalLM.from_pretrained(path)


def known(completions, easy, **_):
    """Reward the answers to easy prompts equally, the others by their first word."""
    firsts = [c.split()[:1] for c in completions]
    return [1.0 if e else float(bool(f) and WORDS.index(f[0]) % 2)
            for e, f in zip(easy, firsts, strict=True)]  # fmt: skip


def refill(folder, *, share=0.5, max_rounds=8, kind=Recorder, sampling=None, **config):
    """Train on prompts of which a share never carries a signal."""
    rows = [{"prompt": f"w{i % 13} w{i * 5 % 13}", "easy": (i * 7 % 20) < 20 * share}
            for i in range(40)]  # fmt: skip
    scored = []

    def reward(completions, **kwargs):
        scored.append(len(completions))
        return known(completions, **kwargs)

    trainer = build(kind, folder, reward=reward, rows=rows, config=config,
                    algorithm=losses.dapo(max_rounds=max_rounds, **(sampling or {})))  # fmt: skip
    trainer.scored = scored
    trainer.train()
    return trainer


if __name__ == "__main__":
    import tempfile

    from polopt.launch.peers import leave_group

    world = int(sys.argv[1])
    start = tempfile.mkdtemp()
    saved(start)  # later only the first rank would write
    grid = {name: [(2, 4, 1), (2, 2, 2), (4, 2, 1)] for name in ("dapo", "grpo", "dr_grpo")}
    grid["dapo"] += [(1, 1, 1), (1, 3, 2), (2, 3, 1), (4, 3, 2)]
    for name, products in grid.items():
        widths = set()
        for accumulate, generate, iterations in products:
            done = compare(
                tempfile.mkdtemp(),
                name,
                per_device_train_batch_size=4,
                max_steps=3,
                gradient_accumulation_steps=accumulate,
                steps_per_generation=generate,
                num_iterations=iterations,
                max_completion_length=16,
            )
            assert done.accelerator.num_processes == world
            assert len(done.lengths) > 2
            widths |= done.widths
            assert len(done.errors) == 6
            assert max(done.errors) < 1e-4, (name, accumulate, generate, done.errors)
        assert len(widths) > 2, (name, widths)
    done = compare(
        tempfile.mkdtemp(), "reinforce_pp", per_device_train_batch_size=4, max_steps=2,
        gradient_accumulation_steps=2, steps_per_generation=2, max_completion_length=16,
    )  # fmt: skip
    assert max(done.errors) < 1e-4, done.errors
    mean, std = done.spread  # whitened over the tokens of all ranks
    assert abs(mean) < 1e-5, done.spread
    assert abs(std - 1) < 1e-4, done.spread
    rule = algorithm("dapo")
    rule = replace(rule, objective=replace(rule.objective, aggregation="group_token_mean"))
    done = compare(
        tempfile.mkdtemp(), rule, per_device_train_batch_size=2, max_steps=3,
        gradient_accumulation_steps=2, steps_per_generation=4, max_completion_length=16,
    )  # fmt: skip
    assert max(done.errors) < 1e-4, done.errors
    rule = losses.kl_cov(coef=5.0, share=0.2)
    done = compare(
        tempfile.mkdtemp(), rule, per_device_train_batch_size=4, max_steps=4, num_iterations=2,
        gradient_accumulation_steps=2, steps_per_generation=4, max_completion_length=16,
    )  # fmt: skip
    # In the first step of a generation log-ratios are zero up to rounding: no gradient to compare.
    assert max(done.errors[1:]) < 1e-4, done.errors
    assert min(done.selected) > 5, done.selected
    rule = losses.adjusted(base=losses.dapo(refill=None), sampling={"top_entropy": 0.3},
                           objective={"kl": "full", "kl_coef": 0.5})  # fmt: skip
    done = compare(
        start, rule, per_device_train_batch_size=4, max_steps=4, num_iterations=2,
        gradient_accumulation_steps=2, steps_per_generation=4, max_completion_length=16,
    )  # fmt: skip
    assert max(done.errors) < 1e-4, done.errors
    for rounds in (8, 1):
        done = refill(tempfile.mkdtemp(), max_rounds=rounds, share=0.7, max_steps=3)
        assert max(done.errors) < 1e-4, (rounds, done.errors)
        assert sum(done.scored) == done.generated
        short = [h["sampling/groups_short"] for h in done.state.log_history if "loss" in h]
        assert (sum(short) == 0) == (rounds == 8), (rounds, short)
        assert all(h["frac_reward_zero_std"] == h["sampling/groups_short"] / (2 * world)
                   for h in done.state.log_history if "loss" in h)  # fmt: skip
    print(f"compared on {world} ranks", flush=True)
    del done
    leave_group()
