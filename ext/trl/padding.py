"""Less padding: micro-batches of answers of similar length, cut to the longest of each.

TRL pads a whole generation to its longest answer. Within one optimizer step the rows of a
process may be dealt to micro-batches in any order, and columns that no trained token sees may
go: the gradient stays the same, because the loss is divided by one count of the whole step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Padding"]

_LEFT = ("prompt_ids", "prompt_mask")
_RIGHT = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "loss_mask",
    "advantages",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "select_from",
    "policy_entropy",
)
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # frequencies do not depend on the length

Batch = dict[str, Any]


@dataclass(frozen=True)
class Padding:
    """What may be cut.

    Attributes:
        prompts: Columns before the longest prompt. It moves the positions of all tokens.
        completions: Columns behind the longest completion.
        multiple: Widths are rounded up to a multiple of this.
    """

    prompts: bool
    completions: bool
    multiple: int = 1

    @classmethod
    def of(cls, model: nn.Module, multiple: int | None = None) -> "Padding":
        """Return what may be cut for a model of transformers without changing its outputs.

        Prompts only where positions are relative, as with rotary embeddings; nothing where
        rotary frequencies depend on the width of the batch.

        Args:
            model: Has a `config`.
            multiple: Of widths, or None.
        """
        config = model.config
        config = getattr(config, "get_text_config", lambda: config)()
        kinds = _rope_types(config)
        fixed = kinds <= _FIXED_ROPE
        # Attention in chunks and scaled attention look at absolute positions.
        absolute = getattr(config, "attention_chunk_size", None) or getattr(
            config, "attn_temperature_tuning", None
        )
        relative = bool(kinds) and not absolute
        return cls(prompts=fixed and relative, completions=fixed, multiple=multiple or 1)

    def order(self, batches: Sequence[Batch], window: int) -> list[Batch]:
        """Deal the rows of micro-batches anew, longest first, and cut each to its longest.

        Args:
            batches: Micro-batches of B rows each, from one generation: entries of TRL, and a
                bool `loss_mask` [B, T]. Tensors have a row per sample, or are scalars.
            window: Rows are exchanged within runs of this many micro-batches.
        """
        if not self.completions:
            return list(batches)
        out = []
        for start in range(0, len(batches), window):
            part = batches[start : start + window]
            rows = {key: _join([batch[key] for batch in part]) for key in part[0]}
            size = len(rows["loss_mask"]) // len(part)
            prompt = _length(rows["prompt_mask"].flip(1))
            out += [
                self._cut({key: _take(value, index) for key, value in rows.items()})
                for index in _split(prompt, _length(rows["loss_mask"]), size)
            ]
        return out

    def score(
        self,
        score: Callable[..., tuple[Tensor, Tensor | None, Any]],
        ids: Tensor,
        mask: Tensor,
        width: int,
        batch_size: int,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return what `score` does for rows in order of length, in chunks without padding.

        Args:
            score: `score(ids, mask, width)` gives log-probabilities and entropies [b, width],
                and a third value, which is dropped.
            ids: int64 [N, P + width].
            mask: [N, P + width], zero at padding.
            width: Columns of completions.
            batch_size: Rows at a time.

        Returns:
            Log-probabilities and entropies, float [N, width], zero at the padding cut off;
            entropies are None where `score` gives none.
        """
        columns = mask.size(1) - width
        prompt = _length(mask[:, :columns].flip(1))
        completion = _length(mask[:, columns:])
        outs: list[Tensor | None] = [None, None]
        for index in _split(prompt, completion, batch_size):
            first = columns - self._width(prompt[index], columns) if self.prompts else 0
            kept = self._width(completion[index], width)
            cut = slice(first, columns + kept)
            for i, part in enumerate(score(ids[index, cut], mask[index, cut], kept)[:2]):
                if part is not None:
                    if outs[i] is None:
                        outs[i] = part.new_zeros(len(ids), width)
                    outs[i][index, :kept] = part
        return outs[0], outs[1], None  # type: ignore[return-value]

    def _cut(self, batch: Mapping[str, Any]) -> Batch:
        out = dict(batch)
        columns, width = batch["prompt_mask"].size(1), batch["loss_mask"].size(1)
        if self.prompts:
            kept = self._width(_length(batch["prompt_mask"].flip(1)), columns)
            out.update({key: batch[key][:, columns - kept :] for key in _LEFT})
        kept = self._width(_length(batch["loss_mask"]), width)
        for key in _RIGHT:
            value = batch.get(key)
            if value is not None and value.ndim == 2:
                out[key] = value[:, :kept]
        return out

    def _width(self, lengths: Tensor, most: int) -> int:
        needed = max(int(lengths.max()), 1)
        return min(-(-needed // self.multiple) * self.multiple, most)


def _rope_types(config: Any) -> set[str]:  # noqa: ANN401
    """Return the kinds of rotary embeddings that a config of transformers names."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return set()
    layers = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    return {layer.get("rope_type", "default") for layer in layers}


def _length(mask: Tensor) -> Tensor:
    """Return the number of columns up to the last one set, int64 [B]."""
    steps = torch.arange(1, mask.size(1) + 1, device=mask.device)
    return torch.where(mask.bool(), steps, 0).amax(1)


def _split(prompt: Tensor, completion: Tensor, size: int) -> list[Tensor]:
    """Return indices of micro-batches, longest first, in the order that pads less."""
    best: tuple[int, list[Tensor]] | None = None
    for key in (completion, prompt + completion):
        parts = list(key.argsort(descending=True, stable=True).split(size))
        columns = sum(int(prompt[i].max() + completion[i].max()) * len(i) for i in parts)
        if best is None or columns < best[0]:
            best = columns, parts
    return best[1]  # type: ignore[index]


def _join(values: Sequence[Any]) -> Any:  # noqa: ANN401
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(values))
    return [x for value in values for x in value] if isinstance(first, list) else first


def _take(value: Any, index: Tensor) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor) and value.ndim:
        return value[index]
    return [value[i] for i in index.tolist()] if isinstance(value, list) else value
