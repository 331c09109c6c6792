"""Dynamic sampling around TRL's tool loop: groups are replaced after their tools were called."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from polopt import losses
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

MARKS = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


def speaker():
    """Return a tiny model and a tokenizer of bytes that speak Qwen3's template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*MARKS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"], padding_side="left",
    )  # fmt: skip
    folder = Path(trl.__file__).parent / "chat_templates"
    fast.chat_template = (folder / "qwen3.jinja").read_text()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=2048,
        pad_token_id=2, eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), fast


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.

    Returns:
        Twice as much.
    """
    return 2 * number


class Scripted(PolicyTrainer):
    """Asks for the tool, then answers what the tool said; some answers to some prompts are off."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.turns = [], 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        out = []
        for ids in prompt_ids:
            text = self._tokenizer.decode(ids)
            number = int(text.split("double ")[-1].split("<")[0])
            if "<tool_response>" in text:
                self.turns += 1
                # Even numbers are always answered well, odd ones every second time.
                good = number % 2 == 0 or self.turns % 2 == 0
                said = f"{2 * number if good else 0}"
            else:
                call = f'{{"name": "double", "arguments": {{"number": {number}}}}}'
                said = f"<tool_call>\n{call}\n</tool_call>"
            out.append(self._tokenizer(said + "<|im_end|>")["input_ids"])
        return out, None

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.batches.append((output, self._rewards[:, 0].view(-1, 4)))
        return output


def test_groups_are_replaced_after_their_tools(tmp_path):
    def reward(completions, prompts, **_):
        assert all(
            [m["role"] for m in c] == ["assistant", "tool", "assistant"] for c in completions
        )
        numbers = [int(p[-1]["content"].split()[-1]) for p in prompts]
        assert [int(c[1]["content"]) for c in completions] == [2 * n for n in numbers]
        return [float(c[-1]["content"] == c[1]["content"]) for c in completions]

    model, tokenizer = speaker()
    rows = [{"prompt": [{"role": "user", "content": f"double {n}"}]} for n in range(10, 26)]
    trainer = setup.build(
        Scripted, tmp_path, algorithm=losses.dapo(), reward=reward, rows=rows, model=model,
        tokenizer=tokenizer, tools=[double],
        config={"per_device_train_batch_size": 16, "max_completion_length": 300, "max_steps": 2},
    )  # fmt: skip
    trainer.train()
    assert trainer.refilled["all_correct"] > 0  # even numbers
    assert trainer.refilled["rounds"] > 0
    assert trainer.turns == trainer.generated  # nothing was asked or scored twice
    for output, rewards in trainer.batches:
        assert ((rewards.amax(1) - rewards.amin(1)) > 0).all()
        written, tool = output["loss_mask"], output["tool_mask"].bool()
        kept = output["completion_mask"].bool()
        assert torch.equal(written, kept & tool)
        # What the tool said is in each answer, and is not trained on.
        assert ((kept & ~tool).sum(1) > 10).all()
        texts = [tokenizer.decode(ids[~m & k]) for ids, m, k in
                 zip(output["completion_ids"], tool, kept, strict=True)]  # fmt: skip
        numbers = [int(t.split("<tool_response>\n")[1].split("\n")[0]) for t in texts]
        assert all(n % 4 == 2 for n in numbers)  # twice an odd number
        assert output["advantages"].abs().max() > 0.5


class Doubling:
    """An environment with the tool, which appends its number to the prompt and pays for answers."""

    def __init__(self):
        self.number, self.resets, self.asked = None, 0, []

    def reset(self, number, **_):
        self.number, self.asked = number, []
        self.resets += 1
        return f" {number}"

    def double(self, number: int) -> int:
        """Doubles a number.

        Args:
            number: The number.

        Returns:
            Twice as much.
        """
        self.asked.append(number)
        return 2 * number


def answers(completions, environments, number, prompts, **_):
    """Reward right answers; each environment is the one in which its answer was given."""
    for e, n, p in zip(environments, number, prompts, strict=True):
        assert (e.number, e.asked) == (n, [n])
        assert p[-1]["content"] == f"double {n}"
    return [float(c[-1]["content"] == str(2 * e.number))
            for c, e in zip(completions, environments, strict=True)]  # fmt: skip


def in_environment(folder, rule, **settings):
    model, tokenizer = speaker()
    rows = [{"prompt": [{"role": "user", "content": "double"}], "number": n} for n in range(10, 26)]
    trainer = setup.build(
        Scripted, folder, algorithm=rule, reward=answers, rows=rows, model=model,
        tokenizer=tokenizer, environment_factory=Doubling,
        config={"per_device_train_batch_size": 16, "max_completion_length": 300, "max_steps": 2},
        **settings,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_groups_are_replaced_within_environments(tmp_path):
    trainer = in_environment(tmp_path, losses.dapo())
    assert trainer.refilled["all_correct"] > 0
    assert trainer.refilled["rounds"] > 0
    assert trainer.turns == trainer.generated
    for output, rewards in trainer.batches:
        assert ((rewards.amax(1) - rewards.amin(1)) > 0).all()
        numbers = [int(trainer._tokenizer.decode(ids).split("double ")[1].split("<")[0])
                   for ids in output["prompt_ids"]]  # fmt: skip
        assert all(n % 2 for n in numbers)
        for ids, tool, kept in zip(
            output["completion_ids"], output["tool_mask"].bool(),
            output["completion_mask"].bool(), strict=True,
        ):  # fmt: skip
            assert "tool_response" in trainer._tokenizer.decode(ids[~tool & kept])
    # Environments are made once for the largest batch, and made ready for each answer.
    pool = trainer._environment_pool[None]
    assert len(pool) == 16
    assert sum(e.resets for e in pool) == trainer.generated


def test_greedy_answers_within_environments(tmp_path):
    trainer = in_environment(tmp_path, losses.remax())
    assert trainer.turns == trainer.generated == 2 * (16 + 4)
    assert all("reward_greedy" in h for h in trainer.state.log_history if "loss" in h)


def test_groups_of_an_environment_that_owns_its_data_are_replaced(tmp_path):
    class Owner(Doubling):
        drawn = 0

        def reset(self, **_):
            number = 10 + Owner.drawn // 4
            Owner.drawn += 1
            return super().reset(number)[1:].join(("double ", ""))

    def reward(completions, environments, **_):
        return [float(c[-1]["content"] == str(2 * e.number))
                for c, e in zip(completions, environments, strict=True)]  # fmt: skip

    model, tokenizer = speaker()
    trainer = setup.build(
        Scripted, tmp_path, algorithm=losses.dapo(), reward=reward, rows=None, model=model,
        tokenizer=tokenizer, environment_factory=Owner, data=None,
        config={"per_device_train_batch_size": 16, "max_completion_length": 300, "max_steps": 2},
    )  # fmt: skip
    trainer.train()
    assert trainer.refilled["all_correct"] > 0
    assert all(((r.amax(1) - r.amin(1)) > 0).all() for _, r in trainer.batches)


def test_groups_of_a_rollout_function_are_replaced(tmp_path):
    """With what it tells of each answer beside it, and tokens of others left out of the loss."""
    asked = []

    def rollout(prompts, trainer):
        asked.append(len(prompts))
        out = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "told": []}
        for i, prompt in enumerate(prompts):
            words = torch.randint(3, 16, (3 + i % 3,)).tolist()
            out["prompt_ids"].append(trainer._tokenizer(prompt)["input_ids"])
            out["completion_ids"].append([*words, 1])
            out["logprobs"].append([-2.0] * (len(words) + 1))
            out["env_mask"].append([0] + [1] * len(words))
            out["told"].append(f"{prompt}: {words}")
        return {**out, "version": 3}

    def reward(completions, completion_ids, prompts, told, version, easy, **_):
        assert set(version) == {3}
        for text, prompt, ids in zip(told, prompts, completion_ids, strict=True):
            assert text == f"{prompt}: {ids[:-1]}"
        firsts = [ids[0] % 2 for ids in completion_ids]
        return [1.0 if e else float(odd) for e, odd in zip(easy, firsts, strict=True)]

    class Seen(PolicyTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            for row, ids in zip(self._rows, output["completion_ids"], strict=True):
                kept = [x for x in ids.tolist() if x][:-1]
                assert row["told"] == f"{row['prompt']}: {kept}"
            rewards = self._rewards[:, 0].view(-1, 4)
            assert ((rewards.amax(1) - rewards.amin(1)) > 0).all()
            assert not output["loss_mask"][:, 0].any()
            return output

    rows = [{"prompt": f"w{i % 13} w{i * 5 % 13}", "easy": i % 2 == 0} for i in range(40)]
    trainer = setup.build(
        Seen, tmp_path, algorithm=losses.dapo(), reward=reward, rows=rows, rollout_func=rollout,
        config={"per_device_train_batch_size": 16, "max_steps": 3},
    )  # fmt: skip
    trainer.train()
    assert trainer.refilled["rounds"] > 0
    assert sum(asked) == trainer.generated
