"""Attention with grouped queries and the paged KV cache; it knows of the cache only through `batch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers.module import Linear, Module
from octavo.layers.rope import Rope
from octavo.ops.batch import AttentionSpec, Batch


@dataclass(frozen=True, slots=True)
class Projections:
    """How a checkpoint stores the products around attention, below the layer's name.

    qkv: the matrices of q, k and v, or one that holds all three. qkv_bias, out_bias: whether they have a `.bias`. transposed: [inputs, outputs].
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    qkv_bias: bool = False
    out_bias: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """What is done to the scores. window: positions that a token sees, 0 for all. scale: None for 1 / sqrt(head_dim). soft_cap: 0 for none."""

    window: int = 0
    scale: float | None = None
    soft_cap: float = 0.0


class Attention(Module):
    """q, k, v as one product; rope; paged attention; output product.

    rope: None for layers without positions. head_norm(name, head_dim): a norm over each head of q and k. full_norm(name, width): a norm over
    all heads of q, and of k. `layer_id` and `group` are set by the decoder.
    """

    def __init__(
        self,
        name: str,
        hf: HFConfig,
        *,
        rope: Rope | None,
        stored: Projections = Projections(),
        scores: Scores = Scores(),
        head_norm: Callable[[str, int], Module] | None = None,
        full_norm: Callable[[str, int], Module] | None = None,
    ) -> None:
        width, num_heads = hf.size("hidden_size"), hf.size("num_attention_heads")
        num_kv_heads, head_dim = hf.size("num_key_value_heads", num_heads), hf.head_dim
        if num_heads % num_kv_heads:
            raise ConfigError(f"{hf.source}: num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {num_kv_heads}")
        if head_dim % 8 or head_dim > 256:
            raise ConfigError(f"{hf.source}: head_dim = {head_dim}: must be a multiple of 8 up to 256")
        self.widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        n_each = self.widths if len(stored.qkv) == 3 else (sum(self.widths),)
        self.qkv = Linear([f"{name}.{part}" for part in stored.qkv], width, n_each, stored.qkv_bias, stored.transposed)
        self.out = Linear(f"{name}.{stored.out}", self.widths[0], width, stored.out_bias, stored.transposed)
        self.rope = rope
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scores = scores
        self.scale = head_dim**-0.5 if scores.scale is None else scores.scale
        self.layer_id = self.group = 0
        self.q_norm = self.k_norm = None
        if head_norm:
            self.q_norm, self.k_norm = head_norm(f"{name}.q_norm", head_dim), head_norm(f"{name}.k_norm", head_dim)
        elif full_norm:
            self.q_norm, self.k_norm = full_norm(f"{name}.q_norm", self.widths[0]), full_norm(f"{name}.k_norm", self.widths[1])

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        q, k, v = ops.split(self.qkv(x_TD), self.widths)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            pairs, longest = self.rope.pairs, batch.max_positions
            q = ops.rope(q, batch.positions_T, self.rope.query_table(longest), self.head_dim, pairs)
            k = ops.rope(k, batch.positions_T, self.rope.table(longest), self.head_dim, pairs)
        spec = AttentionSpec(
            self.layer_id, self.num_heads, self.num_kv_heads, self.head_dim, self.scale, self.scores.window, self.scores.soft_cap, self.group
        )
        return self.out(ops.attention(q, k, v, batch, spec))
