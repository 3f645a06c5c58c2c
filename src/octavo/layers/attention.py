"""Attention with rotary positions, grouped queries and the paged KV cache; it knows of the cache only through `batch`."""

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers.module import HeadNorm, Linear, Module
from octavo.layers.rope import Rope
from octavo.ops.batch import AttentionSpec, Batch


class Attention(Module):
    """q, k, v as one product; rope; paged attention; output product.

    `layer_id` is set by the decoder. qk_norm: RMS norm on each head of q and k (Qwen3). qkv_bias: biases on q, k, v (Qwen2).
    """

    def __init__(self, name: str, hf: HFConfig, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False) -> None:
        width, num_heads = hf.size("hidden_size"), hf.size("num_attention_heads")
        num_kv_heads, head_dim = hf.size("num_key_value_heads", num_heads), hf.head_dim
        if num_heads % num_kv_heads:
            raise ConfigError(f"{hf.source}: num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {num_kv_heads}")
        if head_dim % 8 or head_dim > 256:
            raise ConfigError(f"{hf.source}: head_dim = {head_dim}: must be a multiple of 8 up to 256")
        self.widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.qkv = Linear([f"{name}.{p}_proj" for p in "qkv"], width, self.widths, qkv_bias)
        self.out = Linear(f"{name}.o_proj", self.widths[0], width, out_bias)
        self.rope = Rope.read(hf)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer_id = 0
        eps = hf.read("rms_norm_eps", float, 1e-6)
        self.q_norm = HeadNorm(f"{name}.q_norm", head_dim, eps) if qk_norm else None
        self.k_norm = HeadNorm(f"{name}.k_norm", head_dim, eps) if qk_norm else None

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        q, k, v = ops.split(self.qkv(x_TD), self.widths)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        table = self.rope.table(batch.max_positions)
        q = ops.rope(q, batch.positions_T, table, self.head_dim)
        k = ops.rope(k, batch.positions_T, table, self.head_dim)
        spec = AttentionSpec(self.layer_id, self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)
        return self.out(ops.attention(q, k, v, batch, spec))
