"""Conversations and tools: PolicyTrainer trains on what the policy wrote, and on nothing else."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("trl")
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import chat_template_utils

from polopt import losses

SETUP = Path(__file__).with_name("trl_setup.py")
spec = importlib.util.spec_from_file_location("trl_setup", SETUP)
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def qwen3():
    """Return a random model and a tokenizer of bytes with the template of Qwen3."""
    vocabulary = {sign: i for i, sign in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=SPECIAL[0], eos_token=SPECIAL[2], padding_side="left",
        additional_special_tokens=SPECIAL[1:2], model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


class Scripted(setup.Recorder):
    """Says what a policy that knows the tool might say, instead of what the random model says."""

    def __init__(self, *args, **kwargs):
        self.random = random.Random(1)
        super().__init__(*args, **kwargs)
        self.batches = []

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        answers = []
        for ids in prompt_ids:
            a, b = self.random.randrange(9), self.random.randrange(9)
            asked = self._tokenizer.decode(ids)
            easy = "easy" in asked
            text = f"It is {7 if easy else self.random.choice((7, 12, 123))}."
            if (
                "<tool_response>" not in asked
                and "easy" not in asked
                and self.random.random() < 0.6
            ):
                call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
                text = f"<tool_call>\n{call}\n</tool_call>"
            answers.append(self._tokenizer(text + "<|im_end|>")["input_ids"])
        return answers, None

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.batches.append({**output, "rewards": self._rewards, "kept": self._kept})
        return output


def used_tool(completions, **_):
    """Reward answers that come from the tool, and short ones a little."""
    scores = []
    for messages in completions:
        tool = [m for m in messages if m["role"] == "tool"]
        last = messages[-1].get("content") or ""
        scores.append(float(bool(tool)) + 0.01 * (len(last) < 9))
    return scores


def build(folder, algorithm, prompts=("hard",), **settings):
    model, tokenizer = qwen3()
    rows = [{"prompt": [{"role": "user", "content": f"a {prompts[i % len(prompts)]} sum: {i}"}]}
            for i in range(16)]  # fmt: skip
    config = {"max_completion_length": 400, "learning_rate": 1e-3, "max_steps": 1,
              **settings.pop("config", {})}  # fmt: skip
    return setup.build(
        Scripted, folder, model=model, tokenizer=tokenizer, rows=rows, algorithm=algorithm,
        reward=used_tool, config=config, **settings,
    )  # fmt: skip


def test_conversations(tmp_path):
    trainer = build(tmp_path, setup.algorithm("dapo"))
    trainer.train()
    assert max(trainer.errors) < 1e-5
    batch = trainer.batches[0]
    prompt = trainer._tokenizer.decode(batch["prompt_ids"][0][batch["prompt_mask"][0].bool()])
    assert prompt.startswith("<|im_start|>user\na hard sum: ")
    assert prompt.endswith("<|im_start|>assistant\n")


def test_what_a_tool_says_is_not_trained_on(tmp_path):
    trainer = build(tmp_path, setup.algorithm("dapo"), tools=[add])
    trainer.train()
    assert max(trainer.errors) < 1e-5
    batch = trainer.batches[0]
    answers = {"with": 0, "without": 0}
    for ids, kept, trained in zip(
        batch["completion_ids"], batch["completion_mask"].bool(), batch["loss_mask"], strict=True
    ):
        whole, ours = trainer._tokenizer.decode(ids[kept]), trainer._tokenizer.decode(ids[trained])
        used = "<tool_response>" in whole
        answers["with" if used else "without"] += 1
        assert "<tool_response>" not in ours
        assert ("<tool_call>" in ours) == used
        assert "It is" in ours
        assert used or whole == ours
    assert min(answers.values()) > 0
    logged = trainer.state.log_history[0]
    assert logged["tools/call_frequency"] > 0
    assert logged["tools/failure_frequency"] == 0


def test_groups_are_refilled_with_their_tool_calls(tmp_path):
    """Nobody asks the tool for easy sums: such groups are replaced, masks and all."""
    trainer = build(
        tmp_path, losses.dapo(refill="reward", max_rounds=20), ("hard", "easy"), tools=[add]
    )
    trainer.train()
    assert max(trainer.errors) < 1e-5
    assert trainer.refilled["rounds"] > 0
    for batch in trainer.batches:
        assert batch["kept"].all()
        assert (batch["rewards"].view(-1, 4).std(1) > 0).all()
        for prompt, ids, trained in zip(
            batch["prompt_ids"], batch["completion_ids"], batch["loss_mask"], strict=True
        ):
            ours = trainer._tokenizer.decode(ids[trained])
            assert "<tool_response>" not in ours
            assert "It is" in ours
            assert "sum: " in trainer._tokenizer.decode(prompt)


def test_a_template_that_cannot_call_tools_is_refused(tmp_path):
    model, tokenizer = qwen3()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="chat template does not support tool calling"):
        setup.build(
            Scripted, tmp_path, model=model, tokenizer=tokenizer, tools=[add],
            algorithm=setup.algorithm("dapo"),
        )  # fmt: skip
