"""GPT-2: pre-norm blocks with layer norms, learned positions and a plain MLP; matrices stored [inputs, outputs] (Radford et al. 2019)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Attention, Decoder, LayerNorm, Module, Names, PlainMLP, Projections, Scores
from octavo.ops.batch import Batch

ARCHITECTURES = ("GPT2LMHeadModel",)
STORED = Projections(qkv=("c_attn",), out="c_proj", qkv_bias=True, out_bias=True, transposed=True)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("layer_norm_eps", float, 1e-5)
        scale = hf.head_dim**-0.5 if hf.read("scale_attn_weights", bool, True) else 1.0
        if hf.read("scale_attn_by_inverse_layer_idx", bool, False):
            scale /= index + 1
        self.attn_norm = LayerNorm(f"{name}.ln_1", width, eps)
        self.attn = Attention(f"{name}.attn", hf, rope=None, stored=STORED, scores=Scores(scale=scale))
        self.mlp_norm = LayerNorm(f"{name}.ln_2", width, eps)
        self.mlp = PlainMLP(
            f"{name}.mlp", hf, names=("c_fc", "c_proj"), act=hf.read("hidden_act", str, "gelu_new"), transposed=True
        )

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    if hf.read("add_cross_attention", bool, False):
        raise ConfigError(f"{hf.source}: add_cross_attention is not supported: there is nothing to attend to")
    if "intermediate_size" not in hf:
        hf = HFConfig({**hf.raw, "intermediate_size": 4 * hf.size("hidden_size")}, hf.source)
    eps = hf.read("layer_norm_eps", float, 1e-5)
    names = Names("transformer.wte", "transformer.h", "transformer.ln_f", positions="transformer.wpe")
    return Decoder(hf, Block, names=names, norm=lambda name, width: LayerNorm(name, width, eps), tied=True)
