"""StarCoder2: pre-norm blocks with layer norms, biases everywhere, a plain MLP, and perhaps a window (Lozhkov et al. 2024)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, LayerNorm, Module, PlainMLP, Projections, Rope, Scores
from octavo.layers.layer_types import read_window
from octavo.ops.batch import Batch

ARCHITECTURES = ("Starcoder2ForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("layer_norm_eps", float, 1e-5)
        bias = hf.read("use_bias", bool, True)
        self.attn_norm = LayerNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf), stored=Projections(qkv_bias=bias, out_bias=bias), scores=Scores(read_window(hf))
        )
        self.mlp_norm = LayerNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = PlainMLP(f"{name}.mlp", hf, names=("c_fc", "c_proj"), act=hf.read("hidden_act", str, "gelu_pytorch_tanh"), bias=bias)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    eps = hf.read("layer_norm_eps", float, 1e-5)
    return Decoder(hf, Block, norm=lambda name, width: LayerNorm(name, width, eps), tied=True)
