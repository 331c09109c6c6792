"""Reward models: the score of a model of transformers as a reward."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polopt.envs.contract import RewardError, checked, text_of
from polopt.envs.rows import first_line

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["RewardModel", "checked_rewards"]


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """The score that a sequence classifier with one label gives to prompt and completion.

    A conversation goes through the chat template of the model's tokenizer. What is longer than the
    model reads loses its beginning. The model is loaded on first use, on this rank's device.

    Attributes:
        path: A folder, or a name on the Hugging Face hub.
        samples: Passes with dropout that a score is the mean of (https://arxiv.org/abs/1506.02142),
            which smooths a noisy model; 1 is one pass without dropout. The draws are the same each
            time, and leave the random state alone.
        batch_size: Completions at a time.
        dtype: Of the weights, for example `bfloat16`; by default as they are stored.

    Raises:
        ValueError: If a number is out of its range.
    """

    path: str
    samples: int = 1
    batch_size: int = 16
    dtype: str = "auto"
    in_trainer = True  # it needs the device
    __name__ = "reward_model"

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **_: object
    ) -> list[float]:
        """Score completions."""
        import torch

        model, tokenizer = _load(self.path, self.dtype)
        texts = [_whole(p, c, tokenizer) for p, c in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        device = next(model.parameters()).device
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                for start in range(0, len(texts), self.batch_size):
                    part = texts[start : start + self.batch_size]
                    inputs = tokenizer(
                        part, return_tensors="pt", padding=True, truncation=True,
                        add_special_tokens=isinstance(prompts[0], str),
                    ).to(device)  # fmt: skip
                    scores += self._score(model, inputs).tolist()
        finally:
            model.eval()
        return scores

    def _score(self, model: "nn.Module", inputs: Any) -> "Tensor":  # noqa: ANN401
        import torch

        if self.samples == 1:
            return model(**inputs).logits[:, 0].float()
        model.train()
        passes = []
        for seed in range(self.samples):
            torch.manual_seed(seed)
            passes.append(model(**inputs).logits[:, 0].float())
        found = torch.stack(passes)
        if (found == found[0]).all():
            raise RewardError(
                f"the reward model {self.path!r} has no dropout, so {self.samples} passes are "
                "one: set samples to 1"
            )
        return found.mean(0)


def _whole(prompt: Any, completion: Any, tokenizer: Any) -> str:  # noqa: ANN401
    """Return prompt and completion as the model reads them."""
    if isinstance(prompt, str):
        return prompt + text_of(completion)
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)


@functools.lru_cache(maxsize=4)
def _load(path: str, dtype: str) -> tuple["nn.Module", Any]:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(path)
        if config.num_labels != 1:
            raise RewardError(
                f"the reward model {path!r} has {config.num_labels} labels, expected one score: "
                "take a model that was trained as a reward model"
            )
        tokenizer = AutoTokenizer.from_pretrained(
            path, padding_side="right", truncation_side="left"
        )
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
    except RewardError:
        raise
    except (OSError, ValueError) as error:
        raise RewardError(f"cannot load the reward model {path!r}: {first_line(error)}") from error
    if found["missing_keys"]:
        raise RewardError(
            f"the reward model {path!r} lacks the weights {sorted(found['missing_keys'])[0]!r}, "
            "which would be drawn at random: take a model that was trained as a reward model"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise RewardError(f"the tokenizer of the reward model {path!r} has no pad token")
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    tokenizer.model_max_length = min(tokenizer.model_max_length, longest or 10**9)
    if torch.cuda.is_available():
        model = model.cuda()
    return model.eval(), tokenizer


def checked_rewards(rewards: Any, faults: list[RewardError]) -> Any:  # noqa: ANN401
    """Return rewards as TRL takes them, functions with their results checked.

    Args:
        rewards: One or a list of functions, names of reward models, or reward models; or None.
        faults: Where functions put what is wrong with them.
    """
    if isinstance(rewards, list):
        return [checked_rewards(reward, faults) for reward in rewards]
    # Modules are called by TRL in another way.
    plain = callable(rewards) and not hasattr(rewards, "forward")
    return checked(rewards, faults) if plain else rewards
