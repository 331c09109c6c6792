"""Sizes of the tensors of a training step, in bytes.

Every function here is compared with `torch.distributed._tools.MemTracker` by
`python -m polopt.launch.plan.validate`. Symbols: h hidden, f MLP width, q and k widths of all
query and all key heads, V vocabulary, c and r bytes of two dtypes (`Pass`), s tokens of one
micro-batch on one GPU.
"""

from dataclasses import dataclass

from polopt.launch.plan.architecture import Architecture

__all__ = ["TILE_TOKENS", "TILE_WIDTH", "Pass"]

TILE_TOKENS, TILE_WIDTH = 4096, 32768
"""Tile of logits that TRL's fused head works on."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward and backward of one micro-batch on one GPU.

    Attributes:
        model: Its sizes.
        tokens: Tokens on this GPU, s.
        length: Tokens of one sequence, for the mask.
        compute: Bytes of the dtype that linear layers compute in, c: 2 or 4.
        stored: Bytes of the dtype of weights and residual stream as modules see them, r. Other
            than c only under autocast (float32 weights, bfloat16 arithmetic).
        checkpointing: Whether layers are recomputed in the backward pass.
        attention: `flash` (FlashAttention: no mask, no repeated keys); `sdpa` (PyTorch's, with
            the mask of a padded batch: keys and values are repeated for every query head, and
            every layer keeps a mask); `eager` (the scores of all pairs are kept).
        fused_head: Whether log-probabilities are computed tile by tile (TRL), without the logits.
    """

    model: Architecture
    tokens: float
    length: int
    compute: int = 2
    stored: int = 2
    checkpointing: bool = True
    attention: str = "flash"
    fused_head: bool = True

    @property
    def _norm(self) -> int:
        """Bytes per token that one norm keeps: its input in float32, and normalised."""
        gemma = self.model.model_type.startswith("gemma")
        return (8 if gemma else 4 + self.stored) * self.model.hidden

    @property
    def _inputs(self) -> int:
        """Bytes per token of the inputs of the linear layers behind the two norms.

        Under autocast every linear layer keeps its own cast.
        """
        copies = 2 if self.stored == self.compute or self.model.fused_projections else 5
        return copies * self.compute * self.model.hidden

    @property
    def _attention(self) -> float:
        """Bytes per token that attention keeps: queries, keys, values, output, scores."""
        m, c = self.model, self.compute
        kept = c * (2 * m.q_width + 2 * m.kv_width)
        if m.qk_norm:
            kept += (4 + c) * (m.q_width + m.kv_width)
        repeated = self.attention != "flash" and 1 < m.kv_heads < m.heads
        if repeated:
            kept += c * 2 * (m.q_width - m.kv_width)
        if m.fused_projections:
            kept += c * m.q_width  # the output is copied for its other memory layout
            if not repeated:  # the values are a view that keeps all of q, k, v alive
                kept += c * (m.q_width + m.kv_width)
        if self.attention == "sdpa":
            kept += c * self.length  # every layer turns the mask into numbers of its own
        if self.attention == "eager":
            scores = 4 + c + (c if m.model_type == "gemma2" else 0)  # softmax, its cast, softcap
            return kept + scores * m.heads * self.length
        return kept + 4 * m.heads

    @property
    def layer_kept(self) -> float:
        """Activations that one layer keeps for its backward pass, without checkpointing."""
        m, c = self.model, self.compute
        norms = m.norms * self._norm + self._inputs
        routed = 2 * c * m.hidden * m.experts_per_token
        return self.tokens * (norms + self._attention + 4 * c * m.active_width + routed)

    @property
    def _cast(self) -> float:
        """Weights of one layer that autocast has cast, and keeps until it ends."""
        return self.compute * self.model.layer if self.stored != self.compute else 0.0

    @property
    def kept(self) -> float:
        """Activations that all layers keep between forward and backward, and their mask."""
        m = self.model
        mask = {"flash": 0, "sdpa": 1, "eager": self.compute}[self.attention] * self.length
        if self.checkpointing:
            return self.tokens * (m.layers * self.stored * m.hidden + mask)
        return m.layers * (self.layer_kept + self._cast) + self.tokens * mask

    @property
    def recomputed(self) -> float:
        """The one layer whose activations exist again during backward."""
        return self.layer_kept + self._cast if self.checkpointing else 0.0

    @property
    def layer_backward(self) -> float:
        """Gradients of activations and of one weight while a layer goes backward."""
        m, c = self.model, self.compute
        width = c * m.active_width * self.tokens
        # Gates and ups of all experts are one weight.
        weight = c * m.hidden * m.intermediate * max(1, 2 * m.experts)
        peak = max(width + weight, 2 * width)
        if self.attention == "eager":  # gradients of the scores, when the MLP is done
            peak = max(peak, (4 + c) * m.heads * self.length * self.tokens - 4 * width)
        return self.stored * m.hidden * self.tokens + peak

    @property
    def layer_forward(self) -> float:
        """Peak of one layer when nothing is kept for a backward pass."""
        m, c, r = self.model, self.compute, self.stored
        parts = 4 if m.fused_projections else 3  # where gate and up are one, both stay alive
        mlp = 4 * r * m.hidden + parts * c * m.active_width
        if m.experts:  # every token is copied to each of its experts, and their outputs weighted
            mlp = 4 * r * m.hidden + 3 * c * (m.experts_per_token * m.hidden + m.active_width)
        norm = 3 * r * m.hidden + 8 * m.hidden
        attention = 4 * r * m.hidden + c * (4 * m.q_width + 2 * m.kv_width)
        if self.attention == "sdpa":
            attention += c * self.length
        if self.attention == "eager":
            attention += (8 + c) * m.heads * self.length
        return self.tokens * max(mlp, norm, attention) + m.layers * self._cast

    @property
    def head_kept(self) -> float:
        """The last norm and the input of the head, kept for backward."""
        return self.tokens * (self._norm + self.stored * self.model.hidden)

    @property
    def _tile(self) -> float:
        return self.compute * min(self.tokens, TILE_TOKENS) * TILE_WIDTH

    @property
    def _cast_tile(self) -> float:
        """The rows of the head's weight that autocast casts for one tile."""
        cast = self.stored != self.compute
        return self.compute * self.model.hidden * TILE_WIDTH if cast else 0.0

    @property
    def head_backward(self) -> float:
        """Peak of the head's backward pass, besides what was kept."""
        m, c = self.model, self.compute
        if not self.fused_head:
            # Not compared with the tracker: the logits, their gradient, and that of the weight.
            return 2 * c * m.vocab * self.tokens + c * m.embedding
        rounded = self.stored if self.stored < 4 else 0  # gradients are summed in float32
        work = self._tile + 2 * self._cast_tile
        return (4 + rounded) * (m.hidden * self.tokens + m.embedding) + work

    @property
    def end_backward(self) -> float:
        """Peak at the end of backward, where the embedding gets its gradient.

        If it is also the head, both gradients and their sum exist at once.
        """
        return (3 if self.model.tied else 1) * self.stored * self.model.embedding

    @property
    def head_forward(self) -> float:
        """Peak of the head without a backward pass."""
        m, c = self.model, self.compute
        copies = 3 if self.checkpointing else 2
        hidden = copies * self.stored * m.hidden * self.tokens + m.layers * self._cast
        if not self.fused_head:
            # Not compared: 7 bytes per logit for log-softmax and entropy in pieces.
            return hidden + (c + 7) * m.vocab * self.tokens
        return hidden + self._tile + self._cast_tile
