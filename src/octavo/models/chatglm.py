"""ChatGLM2, ChatGLM3 and GLM-4 as first published (model_type `chatglm`, Zeng et al. 2022, GLM team 2024), under the names of their files.

Llama's blocks with one product for q, k and v and one for gate and up; neighbouring columns of the first half of each head turn.
"""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Attention, Decoder, GatedMLP, Module, Names, Projections, RMSNorm, Rope
from octavo.ops.batch import Batch

ARCHITECTURES = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
BODY = "transformer.encoder"
NAMES = Names("transformer.embedding.word_embeddings", f"{BODY}.layers", f"{BODY}.final_layernorm", "transformer.output_layer")
# Keys of this family -> those of most.
KEYS = {
    "num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size", "kv_channels": "head_dim", "padded_vocab_size": "vocab_size",
    "multi_query_group_num": "num_key_value_heads", "layernorm_epsilon": "rms_norm_eps", "seq_length": "max_position_embeddings",
}  # fmt: skip
# What a variant that we do not serve says of itself, and what ours say.
EXPECTED: dict[str, object] = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False, "multi_query_attention": True}
EXPECTED |= {"interleaved_qkv": False, "pre_seq_len": None, "quantization_bit": 0}
FIRST = ("position_encoding_2d", "inner_hidden_size", "gmask_token_id")  # keys of the first ChatGLM-6B only


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps, bias = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-5), hf.read("add_bias_linear", bool, False)
        stored = Projections(("query_key_value",), "dense", qkv_bias=bias or hf.read("add_qkv_bias", bool, False), out_bias=bias)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(f"{name}.self_attention", hf, rope=Rope.read(hf, part=0.5, pairs=True), stored=stored)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf, names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias, act="silu")

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    refuse_variants(hf)
    raw = dict(hf.raw)
    if "multi_query_group_num" not in hf and "num_key_value_heads" not in hf:
        raise ConfigError(f"{hf.source}: key 'multi_query_group_num' is missing; chatglm without multi_query_attention is not supported")
    for theirs, ours in KEYS.items():
        if raw.get(theirs) is not None:
            raw[ours] = raw[theirs]
    if raw.get("rope_theta") is None:
        raw["rope_theta"] = 1e4 * hf.read("rope_ratio", float, 1.0)
    return Decoder(HFConfig(raw, hf.source), Block, names=NAMES)


def refuse_variants(hf: HFConfig) -> None:
    for key in FIRST:
        if key in hf:
            raise ConfigError(f"{hf.source}: key {key!r}: the first ChatGLM-6B is not supported; ChatGLM2-6B and later are")
    for key, expected in EXPECTED.items():
        if (found := hf.raw.get(key)) not in (None, expected):
            shown = repr(found)[:50]
            raise ConfigError(f"{hf.source}: {key} = {shown} is not supported for chatglm, only {expected!r} is")
