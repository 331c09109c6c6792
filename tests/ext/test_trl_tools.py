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
