"""A GGUF file's metadata as a configuration under Hugging Face's keys. Knows no architecture beyond its name, and reads no weights."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Any

from octavo.errors import ModelFileError
from octavo.gguf_file import GGMLType, shown
from octavo.loader.gguf_names import ARCHITECTURES, FAMILIES, UNSUPPORTED, Key
from octavo.loader.gguf_parts import GGUFModel

# More than any model has; a list with one entry for each must not fill the memory.
MOST_LAYERS = 4096
# Architecture and number of layers of the sizes whose scores are scaled otherwise.
LARGEST_GEMMA = (("gemma2", 46), ("gemma3", 62))
# What Llama 3.1 and later were trained with; only the factor varies.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Translator:
    """GGUF metadata to Hugging Face's keys, each value checked for its type."""

    def __init__(self, file: GGUFModel) -> None:
        self.file = file
        self.arch = self.full("general.architecture", str)
        if self.arch not in ARCHITECTURES:
            raise self.error("general.architecture", f"{shown(self.arch)} is not supported; supported: {', '.join(ARCHITECTURES)}")

    def config(self) -> dict[str, Any]:
        file, model_type = self.file, self.model_type()
        family = FAMILIES[model_type]
        self.refuse_unsupported({key.name for key in family.keys.values()})
        hidden, heads, head_dim, turned = self.shape()
        return {
            "model_type": model_type,
            "hidden_size": hidden,
            "num_hidden_layers": self.layers(),
            "num_attention_heads": heads,
            "num_key_value_heads": self.read("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "intermediate_size": self.read("feed_forward_length", int),
            "rope_theta": self.theta(),
            "partial_rotary_factor": turned / head_dim if turned != head_dim else None,
            "rope_scaling": self.scaling(turned),
            "vocab_size": self.vocab_size(),
            "max_position_embeddings": self.read("context_length", int),
            "sliding_window": self.read("attention.sliding_window", int, 0) or None,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": self.token("bos"),
            "eos_token_id": list(self.end_tokens()) or None,
            "torch_dtype": self.plain_dtype(),
            **{ours: self.setting(key) for ours, key in family.keys.items()},
            **{ours: f"blk.0.{part}.bias" in file.tensors for ours, part in family.biases.items()},
            **family.fixed,
            **self.experts(),
            **(self.gemma(hidden, heads, head_dim) if model_type.startswith("gemma") else {}),
        }

    def model_type(self) -> str:
        """Some architectures hold several families, which only their parts tell apart."""
        if self.arch == "llama" and self.read("expert_count", int, 0):
            return "mixtral"
        if self.arch == "llama" and self.read("attention.sliding_window", int, 0):
            return "mistral"
        if self.arch == "chatglm" and "blk.0.attn_qkv.weight" not in self.file.tensors:
            return "glm"
        if self.arch == "olmo2" and self.read("attention.sliding_window", int, 0):
            raise self.error("olmo2.attention.sliding_window", "OLMo 3, OLMo 2 with windows, is not supported")
        return ARCHITECTURES[self.arch]

    def layers(self) -> int:
        count = int(self.read("block_count", int))
        if not 1 <= count <= MOST_LAYERS:
            raise self.error(f"{self.arch}.block_count", f"{count} is not in 1..{MOST_LAYERS}")
        return count

    def refuse_unsupported(self, known: set[str]) -> None:
        for name, harmless in UNSUPPORTED.items():
            key = f"{self.arch}.{name}"
            if name not in known and self.file.metadata.get(key, harmless) != harmless:
                raise self.error(key, f"{str(self.file.metadata[key])[:50]} is not supported")

    def shape(self) -> tuple[int, int, int, int]:
        """Hidden size, heads, their width, and the columns of a head that turn."""
        hidden, heads = self.read("embedding_length", int), self.read("attention.head_count", int)
        if heads < 1 or hidden < 1:
            raise self.error(f"{self.arch}.attention.head_count", f"{heads} heads of a width of {hidden} cannot be")
        head_dim = self.read("attention.key_length", int, hidden // heads)
        if self.read("attention.value_length", int, head_dim) != head_dim:
            raise self.error(f"{self.arch}.attention.value_length", f"must equal the length of keys, {head_dim}")
        turned = self.read("rope.dimension_count", int, head_dim)
        if not 1 <= turned <= head_dim:
            raise self.error(f"{self.arch}.rope.dimension_count", f"{turned} is not in 1..{head_dim}, the width of a head")
        return hidden, heads, head_dim, turned

    def setting(self, key: Key) -> Any:
        if key.default is None and not key.required and f"{self.arch}.{key.name}" not in self.file.metadata:
            return None
        return self.read(key.name, key.kind, key.default)

    def experts(self) -> dict[str, Any]:
        """Inner widths of experts, which old files tell by the tensors' shapes only."""
        sizes = {}
        for ours, part in (("moe_intermediate_size", "ffn_up_exps"), ("shared_expert_intermediate_size", "ffn_up_shexp")):
            tensor = next((t for name, t in self.file.tensors.items() if name.endswith(f".{part}.weight")), None)
            if tensor is not None and len(tensor.shape) >= 2:
                sizes[ours] = tensor.shape[-2]
        return sizes

    def gemma(self, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
        """What the family's files leave to the reader: the scale of scores, which only the largest sizes take from the width, and the windows."""
        layers = self.layers()
        largest = (self.arch, layers) in LARGEST_GEMMA
        window = self.read("attention.sliding_window", int, 4096 if self.arch == "gemma2" else 0)
        return {
            "embedding_scale": math.sqrt(hidden),
            "query_pre_attn_scalar": hidden // heads if largest else head_dim,
            "sliding_window": window or None,
            **self.windowed(layers, window),
        }

    def windowed(self, layers: int, window: int) -> dict[str, Any]:
        """Which layers have the window: a list of them, each but the n-th, or as the family has it."""
        if not window:
            return {"layer_types": ["full_attention"] * layers}
        key = f"{self.arch}.attention.sliding_window_pattern"
        pattern = self.file.metadata.get(key)
        if pattern is None:
            return {}
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            return {"layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]}
        if isinstance(pattern, (array, list)) and len(pattern) == layers:
            return {"layer_types": ["sliding_attention" if one else "full_attention" for one in pattern]}
        raise self.error(key, f"must be a number or {layers} flags")

    def error(self, key: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: key {key!r}: {text}")

    def full(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """The value under a full key; `default` None means that it must be there."""
        value = self.file.metadata.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"must be {kind.__name__}, not {type(value).__name__}")
        return value

    def read(self, key: str, kind: type[Any], default: Any = None) -> Any:
        return self.full(f"{self.arch}.{key}", kind, default)

    def theta(self) -> float:
        theta = float(self.read("rope.freq_base", float, 10000.0))
        if not 0 < theta < math.inf:
            raise self.error(f"{self.arch}.rope.freq_base", f"{theta} is not a number above 0")
        return theta

    def vocab_size(self) -> int:
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        count = self.file.skipped.get("tokenizer.ggml.tokens", len(tokens) if isinstance(tokens, list) else None)
        return int(self.read("vocab_size", int, count))

    def token(self, which: str) -> int | None:
        """The id of a special token; a writer's "none" is the largest number that its type holds."""
        value = self.full(f"tokenizer.ggml.{which}_token_id", int, -1)
        return value if 0 <= value < 2**31 else None

    def end_tokens(self) -> Iterator[int]:
        """Tokens that end a generation: of the sequence, of the turn, of the message."""
        seen = set()
        for which in ("eos", "eot", "eom"):
            token_id = self.token(which)
            if token_id is not None and token_id not in seen:
                seen.add(token_id)
                yield token_id

    def plain_dtype(self) -> str:
        """What unquantised matrices are stored as; a quantised file's own arithmetic is bfloat16."""
        names = {GGMLType.F32: "float32", GGMLType.F16: "float16"}
        embedding = self.file.tensors.get("token_embd.weight")
        return names.get(embedding.type, "bfloat16") if embedding else "bfloat16"

    def scaling(self, turned: int) -> dict[str, Any] | None:
        kind = self.read("rope.scaling.type", str, "none")
        if "rope_factors_long.weight" in self.file.tensors:
            kind = "longrope"  # the key was added to the format later than the tensors
        if "rope_freqs.weight" in self.file.tensors:
            return self.frequency_factors(turned)
        if kind in ("none", "default"):
            linear = self.read("rope.scale_linear", float, 1.0)
            return None if linear == 1.0 else {"rope_type": "linear", "factor": linear}
        original = self.read("rope.scaling.original_context_length", int, 0)
        known = {"original_max_position_embeddings": original} if original else {}
        if kind == "longrope":
            return self.longrope(turned) | known
        for name in ("attn_factor", "yarn_ext_factor"):
            if self.read(f"rope.scaling.{name}", float, 1.0) != 1.0:
                raise self.error(f"{self.arch}.rope.scaling.{name}", f"a value other than 1 is not supported for {kind}")
        scaling = {"rope_type": kind, "factor": self.read("rope.scaling.factor", float), **known}
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"), ("attention_factor", "yarn_attn_factor")):
            value = self.read(f"rope.scaling.{theirs}", float, 0.0)
            scaling |= {ours: value} if value and kind == "yarn" else {}
        return scaling

    def longrope(self, turned: int) -> dict[str, Any]:
        """Phi-3's scaling: two lists of divisors, in tensors."""
        factors = {f"{which}_factor": list(self.divisors(f"rope_factors_{which}.weight", turned)) for which in ("short", "long")}
        amplitude = self.read("rope.scaling.attn_factor", float, 0.0)
        return {"rope_type": "longrope", **factors, **({"attention_factor": amplitude} if amplitude else {})}

    def frequency_factors(self, turned: int) -> dict[str, Any]:
        """Llama 3's scaling, which the file keeps as one divisor for each frequency. It is computed again from the largest and the family's
        constants; divisors that come out otherwise are passed on as they are, for the architecture to take or refuse."""
        stored = self.divisors("rope_freqs.weight", turned)
        factor = max(stored)
        computed = [llama3_divisor(self.theta() ** (-2 * i / turned), factor) for i in range(len(stored))]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, computed, strict=True)):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
        return {"rope_type": "frequency_factors", "factors": list(stored)}


    def divisors(self, name: str, turned: int) -> array[float]:
        """A tensor with a divisor for each frequency."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.file.path}: tensor {name!r} is missing")
        if tensor.type is not GGMLType.F32 or tensor.shape != (turned // 2,):
            raise ModelFileError(f"{self.file.path}: tensor {name!r}: must be F32 of {turned // 2} elements")
        stored = array("f", self.file.data(tensor.name).tobytes())
        if not all(math.isfinite(divisor) and divisor > 0 for divisor in stored):
            raise ModelFileError(f"{self.file.path}: tensor {name!r}: holds numbers that are not above 0")
        return stored


def llama3_divisor(frequency: float, factor: float) -> float:
    """What Llama 3 divides a frequency (radians per token) by: 1 for short waves, `factor` for long ones, a blend between."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    mix = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - mix) / factor + mix)
