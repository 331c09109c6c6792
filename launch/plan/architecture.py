"""The sizes of a decoder-only transformer, read from a transformers `config.json`."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from polopt.launch.recipe import nearest

__all__ = ["CHECKED", "Architecture", "from_config", "load", "model_names"]

CHECKED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3", "smollm3")
"""Values of `model_type` whose activations were compared with torch's memory tracker."""

OTHERS = {
    "an MLP without a gate": (
        *("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi"),
        *("starcoder2", "nemotron", "persimmon", "codegen"),
    ),
    "layers of another kind": ("mamba", "mamba2", "jamba", "bamba", "rwkv", "gpt_oss"),
}
"""Values of `model_type` that are no relatives of Llama, by the reason."""

_FIELDS = {
    "kv_lora_rank": "compressed keys and values (MLA)",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state-space layers",
}
"""Fields that say the same."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a decoder-only transformer with gated MLPs.

    Attributes:
        name: For messages.
        model_type: As in `config.json`.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP; of one expert in a mixture.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        vocab: Rows of the embedding.
        tied: Whether the head is the embedding.
        norms: Norms per layer around attention and MLP: 2, or 4 where outputs are normed too.
        qk_norm: Whether queries and keys are normed per head.
        bias: Biases per layer, counted in parameters.
        experts: Experts per layer, 0 for a dense MLP.
        experts_per_token: Experts that see a token.

    Source: the modelling files of transformers 5.
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    norms: int = 2
    qk_norm: bool = False
    bias: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads, or of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        attention = 2 * self.hidden * (self.q_width + self.kv_width)
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:
            mlp = mlp * self.experts + self.hidden * self.experts  # and the router
        norms = self.norms * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return attention + mlp + norms + self.bias

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; the head, if not tied, has as many."""
        return self.vocab * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head, last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer + self.root

    @property
    def fused_projections(self) -> bool:
        """Whether queries, keys and values come out of one linear layer."""
        return self.model_type == "phi3"

    @property
    def active_width(self) -> int:
        """MLP width that one token passes through."""
        return self.intermediate * (self.experts_per_token or 1)

    @property
    def checked(self) -> bool:
        """Whether the activations of this kind of model were compared with torch's tracker."""
        return self.model_type in CHECKED


def model_names() -> list[str]:
    """Return the names of the architectures that ship."""
    return sorted(_shipped())


def _shipped() -> dict[str, dict[str, Any]]:
    return json.loads(files("polopt.launch.plan").joinpath("models.json").read_text("utf-8"))


def load(source: str) -> Architecture:
    """Return the architecture of a shipped name, a folder with a `config.json`, or such a file.

    Raises:
        ValueError: If there is nothing, it is not JSON, or fields are missing or absurd.
    """
    shipped = _shipped()
    key = re.sub(r"(\.\w+)?\.gguf$", "", source.rsplit("/", 1)[-1].lower())
    key = key.removesuffix("-instruct").removesuffix("-base")
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        if key in shipped:
            return from_config(shipped[key], name=key)
        raise ValueError(
            f"model: {source!r} is neither a folder with a config.json nor a known name, "
            f"{nearest(key, shipped)}"
        )
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model: cannot read {path} as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model: {path} must hold a JSON object, got {type(config).__name__}")
    return from_config(config, name=path.parent.name if path.name == "config.json" else path.stem)


def from_config(config: Mapping[str, Any], *, name: str) -> Architecture:
    """Read a transformers config.

    Args:
        config: The content of a `config.json`. Of a multimodal one the text model is read.
        name: For messages.

    Returns:
        The architecture. A `model_type` that is not known is read like a Llama; `checked` is
        then false.

    Raises:
        ValueError: If a field is missing, is no positive whole number, or does not fit.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"config of {name}: 'model_type' is missing, is this a model's config?")
    _refuse_others(config, kind, name)
    number = _Reader(config, name)
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = number("head_dim", default=hidden // heads)
    kv_heads = number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"config of {name}: num_attention_heads={heads} must be a multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    experts = number("num_experts", default=0) or number("num_local_experts", default=0)
    width = "moe_intermediate_size" if experts and "moe_intermediate_size" in config else None
    model = Architecture(
        name=name,
        model_type=kind.removesuffix("_text"),
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=number(width or "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        norms=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        qk_norm=kind.startswith(("qwen3", "gemma3")),
        experts=experts,
        experts_per_token=number("num_experts_per_tok") if experts else 0,
    )
    if experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise ValueError(
            f"config of {name}: layers with and without experts are mixed, which is not supported"
        )
    if model.parameters > 10**14 or model.hidden > 10**6 or model.layers > 10**4:
        raise ValueError(
            f"config of {name}: {model.parameters:.3g} parameters cannot be right, "
            f"check hidden_size={hidden}, num_hidden_layers={model.layers}"
        )
    q, kv = model.q_width, model.kv_width
    if kind == "qwen2":
        return replace(model, bias=q + 2 * kv)
    if config.get("attention_bias"):
        return replace(model, bias=q + 2 * kv + hidden)
    return model


def _refuse_others(config: Mapping[str, Any], kind: str, name: str) -> None:
    reasons = [reason for reason, kinds in OTHERS.items() if kind in kinds]
    reasons += [reason for field, reason in _FIELDS.items() if config.get(field)]
    if reasons:
        raise ValueError(
            f"config of {name}: model_type {kind!r} has {reasons[0]}, which is not planned: only "
            "relatives of Llama are"
        )


@dataclass(frozen=True)
class _Reader:
    config: Mapping[str, Any]
    name: str

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"config of {self.name}: the field {key!r} is missing")
            return default
        if type(value) is not int or not (0 if default == 0 else 1) <= value < math.inf:
            raise ValueError(
                f"config of {self.name}: {key!r} must be a positive whole number, got {value!r}"
            )
        return value
