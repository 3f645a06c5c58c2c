"""What GGUF files call the families, their tensors and their settings, beside what Hugging Face's do. A table; knows no file.

Facts about the format's converter, for each family: names, which q and k it reordered, what its norms hold, and what it leaves unsaid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# Parts of a layer, below blk.N in GGUF; a family replaces what it calls otherwise.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH = {**AFTER, "ffn_norm": "pre_feedforward_layernorm"}
TRANSFORMER = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f", "output": "lm_head"}
ONE_QKV = {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_down": "mlp.c_proj"}
CHATGLM = {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}
CHATGLM |= {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
GLM4 = {"ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}


@dataclass(frozen=True, slots=True)
class Key:
    """A setting: its key below the architecture's name, its type, and its value where the file has none. `required`: it must have one."""

    name: str
    kind: type[Any]
    default: Any = None
    required: bool = False


RMS = {"rms_norm_eps": Key("attention.layer_norm_rms_epsilon", float, required=True)}
LAYER_NORM = {"layer_norm_eps": Key("attention.layer_norm_epsilon", float, required=True)}
EXPERTS = {"num_experts": Key("expert_count", int, 0), "num_experts_per_tok": Key("expert_used_count", int, 0)}
CAPS = {"attn_logit_softcapping": Key("attn_logit_softcapping", float, 50.0), "final_logit_softcapping": Key("final_logit_softcapping", float, 30.0)}
MULTIPLIERS = {
    "attention_multiplier": Key("attention.scale", float), "embedding_multiplier": Key("embedding_scale", float, 1.0),
    "residual_multiplier": Key("residual_scale", float, 1.0), "logits_scaling": Key("logit_scale", float, 1.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type in GGUF.

    layer, outer: what is called otherwise than in LAYER and OUTER. prefix: of a layer in Hugging Face's names. paired: q and k rows were reordered,
    per head, from two halves to pairs. keys: Hugging Face's key -> the setting. biases: Hugging Face's flag -> the part of the first layer that has
    a bias if it is set. fixed: settings that no file states.
    """

    layer: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model.layers"
    paired: bool = False
    keys: Mapping[str, Key] = field(default_factory=lambda: RMS)
    biases: Mapping[str, str] = field(default_factory=lambda: {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"})
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})


GEMMA = {"norm_offset": 0.0, "hidden_activation": "gelu_pytorch_tanh"}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(paired=True),
        "mistral": Family(paired=True),
        "mixtral": Family(paired=True, keys={**RMS, **EXPERTS, "num_local_experts": EXPERTS["num_experts"]}),
        "smollm3": Family(paired=True),
        "granite": Family(paired=True, keys={**RMS, **MULTIPLIERS}),
        "qwen2": Family(),
        "qwen3": Family(),
        "qwen2_moe": Family(keys={**RMS, **EXPERTS, "norm_topk_prob": Key("expert_weights_norm", bool, False)}, biases={"qkv_bias": "attn_q"}),
        "qwen3_moe": Family(keys={**RMS, **EXPERTS, "norm_topk_prob": Key("expert_weights_norm", bool, True)}),
        "phi3": Family({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
        "glm": Family({"ffn_up": "mlp.gate_up_proj"}),
        "glm4": Family(GLM4),
        "olmo2": Family(AFTER),
        "gemma2": Family(SANDWICH, keys={**RMS, **CAPS}, fixed=GEMMA),
        "gemma3": Family(
            SANDWICH, keys={**RMS, "rope_local_base_freq": Key("rope.freq_base_swa", float, 1e4)}
            | {"final_logit_softcapping": Key("final_logit_softcapping", float, 0.0)}, fixed=GEMMA,
        ),
        "starcoder2": Family({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, keys=LAYER_NORM, biases={"use_bias": "attn_q"}, fixed={}),
        "gpt2": Family({**ONE_QKV, "ffn_up": "mlp.c_fc"}, TRANSFORMER, "transformer.h", keys=LAYER_NORM, fixed={}),
        "qwen": Family(
            {**ONE_QKV, "ffn_gate": "mlp.w2", "ffn_up": "mlp.w1"}, TRANSFORMER, "transformer.h",
            keys={"layer_norm_epsilon": Key("attention.layer_norm_rms_epsilon", float, 1e-6)},
        ),
        "chatglm": Family(
            CHATGLM, {"token_embd": "transformer.embedding.word_embeddings", "output_norm": "transformer.encoder.final_layernorm"}
            | {"output": "transformer.output_layer"}, "transformer.encoder.layers",
            biases={"add_qkv_bias": "attn_qkv"},
        ),
    }
)  # fmt: skip

# GGUF's architecture -> Hugging Face's model_type; see `gguf_config` for those that hold several.
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("llama", "smollm3", "granite", "qwen", "qwen2", "qwen3", "phi3", "chatglm", "glm4", "olmo2", "gemma2", "gemma3")}
    | {"starcoder2": "starcoder2", "gpt2": "gpt2", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
)
# Keys that a value other than the given one would change the arithmetic by, unless the family reads them.
UNSUPPORTED: Mapping[str, Any] = MappingProxyType(
    {
        "attention.causal": True, "attention.scale": 0.0, "attention.clamp_kqv": 0.0, "attn_logit_softcapping": 0.0, "embedding_scale": 1.0,
        "expert_gating_func": 1, "expert_weights_scale": 1.0, "final_logit_softcapping": 0.0, "logit_scale": 1.0, "residual_scale": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.0, "use_parallel_residual": False,
    }
)  # fmt: skip
