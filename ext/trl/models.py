"""Small language models made in place: nothing is downloaded.

`TinyQwen3` builds a Qwen3-shaped model and a tokenizer for one task and gives it supervised
steps on the training problems, with some labels made wrong on purpose: such a model knows the
answers but samples them rarely, which leaves reinforcement learning something to gain. The
result is cached under everything it depends on.
"""

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from polopt.envs.text import TextTask
from polopt.ext.trl.stored import GGUF, converted, locate, made_once, save

__all__ = ["Pretrained", "TinyQwen3", "cache_folder"]

_Dtype = Literal["float32", "bfloat16", "float16", "auto"]

Progress = Callable[[float, float, str], None]

_SPECIAL = ["<pad>", "<eos>", "<unk>"]


@dataclass(frozen=True, kw_only=True)
class TinyQwen3:
    """Maker of a small Qwen3 with tied embeddings, and of its tokenizer.

    Attributes:
        hidden_size: Width of the model.
        layers: Number of layers.
        heads: Attention heads; half as many for keys and values.
        warmup_steps: Supervised steps (AdamW) on training problems; 0 leaves random weights.
        warmup_batch_size: Problems per supervised step.
        warmup_lr: Learning rate of the supervised steps.
        label_accuracy: Share of the labels that are right; the others are answers to other
            problems.
        seed: Seed of the weights and of the supervised steps.

    Raises:
        ValueError: If a number is out of its range.
    """

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    warmup_steps: int = 300
    warmup_batch_size: int = 64
    warmup_lr: float = 3e-3
    label_accuracy: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "warmup_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "warmup_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")
        if self.heads % 2 or self.hidden_size % self.heads:
            raise ValueError(
                f"heads must be even and divide hidden_size={self.hidden_size}, got {self.heads}"
            )
        if not 0.0 < self.label_accuracy <= 1.0:
            raise ValueError(f"label_accuracy must be in (0, 1], got {self.label_accuracy}")

    def check(self, task: TextTask) -> None:
        """Refuse a task whose rows are not texts that can be learnt by heart.

        Raises:
            ValueError: With what the first row has.
        """
        row = task.train[0]
        if not isinstance(row["prompt"], str):
            raise ValueError(
                "tiny_qwen3 has no chat template, and the prompts are conversations: use texts as "
                "prompts, or a model that was trained on conversations (use: pretrained)"
            )
        if not isinstance(row.get("answer"), str):
            raise ValueError(
                f"tiny_qwen3 is warmed up on texts in the column 'answer', which holds "
                f"{row.get('answer')!r:.60}: set answer_key to a column of texts, or take a model "
                "that needs no warm-up (use: pretrained)"
            )

    def make(self, task: TextTask, progress: Progress | None = None) -> Path:
        """Return the folder of the model and tokenizer for `task`, made on first use.

        Args:
            task: Its training rows need an `"answer"`; the evaluation rows are not looked at.
            progress: Told of each supervised step: how many are done, of how many, and a text.
        """
        key = {
            "maker": asdict(self),
            "train": [[row["prompt"], row["answer"]] for row in task.train],
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
            "format": 1,
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        folder = cache_folder() / f"tiny-qwen3-{digest}"

        def write(made: Path) -> None:
            tokenizer = _tokenizer(task)
            model = self._model(len(tokenizer))
            _supervise(model, tokenizer, task, self, progress)
            save(model, made)
            tokenizer.save_pretrained(made)

        return made_once(folder, write)

    def _model(self, vocabulary: int) -> Any:  # noqa: ANN401
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(self.seed)
        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=max(16, self.hidden_size // self.heads),
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=_SPECIAL.index("<pad>"),
            eos_token_id=_SPECIAL.index("<eos>"),
            bos_token_id=None,
        )
        return Qwen3ForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model and tokenizer that exist already.

    Attributes:
        path: A folder, a name on the Hugging Face hub, a GGUF file, or `package:NAME/PATH` for a
            folder or GGUF file inside an installed Python package.
        dtype: Of the weights that are trained. TRL computes in bfloat16 where its `bf16` says so,
            on weights in float32.
        lora: Arguments of `peft.LoraConfig`: adapters are trained, and the reference model is
            the model without them. None trains all weights.
        trust_remote_code: Run the Python files that come with the model.

    Raises:
        ValueError: If `peft.LoraConfig` does not take the arguments.
        ModuleNotFoundError: If LoRA is asked for, and peft is not installed.
    """

    path: str
    dtype: _Dtype = "float32"
    lora: Mapping[str, Any] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in get_args(_Dtype):
            raise ValueError(f"dtype must be one of {get_args(_Dtype)}, got {self.dtype!r}")
        if self.lora is not None:
            self.adapter()

    @property
    def loading(self) -> dict[str, Any]:
        """Keyword arguments for `from_pretrained` of the model."""
        return {"dtype": self.dtype, "trust_remote_code": self.trust_remote_code}

    def adapter(self) -> Any:  # noqa: ANN401
        """Return the `peft.LoraConfig`, or None."""
        if self.lora is None:
            return None
        try:
            from peft import LoraConfig
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "LoRA needs peft, which is not installed: pip install peft", name=error.name
            ) from None
        known = {field.name for field in fields(LoraConfig)}
        unknown = sorted(set(self.lora) - known)
        if unknown:
            raise ValueError(f"lora: peft.LoraConfig has no {unknown[0]!r}")
        return LoraConfig(**{"task_type": "CAUSAL_LM", **self.lora})

    def check(self) -> None:
        """Refuse a model that this machine lacks; whether the hub has a name is not asked.

        Raises:
            ValueError: With what is missing.
        """
        locate(self.path)

    def make(self, task: TextTask, progress: Progress | None = None) -> str:
        """Return the folder or hub name; a GGUF file is converted on first use.

        Raises:
            ValueError: As `check`, and if transformers cannot read the file.
        """
        place = locate(self.path)
        return str(converted(Path(place), cache_folder())) if place.endswith(GGUF) else place


def cache_folder() -> Path:
    """Return the folder of things made once: `$POLOPT_CACHE`, or `polopt` in the user's cache."""
    if "POLOPT_CACHE" in os.environ:
        return Path(os.environ["POLOPT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polopt"


def _tokenizer(task: TextTask) -> Any:  # noqa: ANN401
    """Return a tokenizer of words, digits and signs, with the training rows' vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"\d|[^\W\d]+|[^\w\s]"), "isolated"),
        ]
    )
    words = {
        word
        for row in task.train
        for word, _ in split.pre_tokenize_str(f"{row['prompt']} {row['answer']}")
    }
    words |= set("0123456789")
    vocabulary = {word: i for i, word in enumerate([*_SPECIAL, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()  # digits of a number are not separated by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def _supervise(
    model: nn.Module,
    tokenizer: Any,  # noqa: ANN401
    task: TextTask,
    maker: TinyQwen3,
    progress: Progress | None,
) -> None:
    """Train on the training rows with partly wrong labels."""
    rng = random.Random(maker.seed)
    prompts = tokenizer([row["prompt"] for row in task.train])["input_ids"]
    answers = tokenizer([row["answer"] for row in task.train])["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=maker.warmup_lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20))
    model.train()
    for step in range(maker.warmup_steps):
        rows, labels = [], []
        for i in rng.choices(range(len(prompts)), k=maker.warmup_batch_size):
            right = rng.random() < maker.label_accuracy
            answer = answers[i] if right else rng.choice(answers)
            rows.append([*prompts[i], *answer, tokenizer.eos_token_id])
            labels.append([-100] * len(prompts[i]) + rows[-1][len(prompts[i]) :])
        width = max(map(len, rows))
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        target = torch.tensor([[*row, *[-100] * (width - len(row))] for row in labels])
        model(input_ids=ids, attention_mask=mask, labels=target).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if progress is not None:
            progress(step + 1, maker.warmup_steps, "warming up the model, once")
    model.eval()
