"""Writes a checkpoint with the shape of a known model and random weights, to measure load, memory and speed where no real one is at hand.

Tensor by tensor from a small pool of random numbers, so that the size of the model is never in memory. Of weights as large as a trained model's;
the text that comes out has no meaning. The tokenizer is that of `--tokenizer`, or one made up: bytes, and words of letters for all other ids.

    python benchmarks/make_random.py llama-3.2-1b FOLDER [--format bf16|gptq] [--layers N] [--tokenizer FOLDER]

gptq: 4 bits, symmetric, groups of 128 (of 64 or 32 where 128 does not divide all inputs); embedding, head and norms are bf16, as in published checkpoints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

POOL_NUMBERS = 1 << 22
BITS = 4
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja")

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False,
    "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    # So little work that what surrounds the model is what is measured.
    "tiny": LLAMA | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "vocab_size": 4096, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
    "smollm2-135m": LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": 49152, "max_position_embeddings": 16384, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "qwen2.5-7b": LLAMA | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written: its dtype in safetensors' words, and `numbers(count)`, which gives its next so many in that dtype's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    numbers: Callable[[int], NDArray[Any]]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.count * {"BF16": 2, "F16": 2, "I32": 4}[self.dtype]


class Pool:
    """Random numbers that repeat after a few million, from another place for each tensor."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._normal = self._rng.standard_normal(POOL_NUMBERS, np.float32)
        self._words = self._rng.integers(-(2**31), 2**31, POOL_NUMBERS, np.int32)
        self._scaled: dict[float, NDArray[Any]] = {}

    def normal(self, deviation: float) -> Callable[[int], NDArray[Any]]:
        """bf16 with a mean of 0."""
        if deviation not in self._scaled:
            self._scaled[deviation] = ((self._normal * np.float32(deviation)).view(np.uint32) >> 16).astype(np.uint16)
        return self._from(self._scaled[deviation])

    def near(self, mean: float, dtype: str) -> Callable[[int], NDArray[Any]]:
        """fp16 or bf16 within a fifth of a mean."""
        values = (mean * (1 + 0.1 * np.clip(self._normal[: 1 << 16], -2, 2))).astype(np.float32)
        return self._from(values.astype(np.float16) if dtype == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16))

    def words(self) -> Callable[[int], NDArray[Any]]:
        return self._from(self._words)

    def _from(self, pool: NDArray[Any]) -> Callable[[int], NDArray[Any]]:
        start = int(self._rng.integers(len(pool)))

        def numbers(count: int) -> NDArray[Any]:
            nonlocal start
            first = pool[start : start + count]
            start = (start + count) % len(pool)
            return first if len(first) == count else np.resize(np.concatenate([first, pool]), count)

        return numbers


def constant(value: int) -> Callable[[int], NDArray[Any]]:
    return lambda count: np.full(count, value, np.int32)


def matrix(pool: Pool, name: str, n: int, k: int, group: int | None) -> Iterator[Tensor]:
    """n output channels of k inputs, with products about as large as their inputs; group None: not quantised."""
    if group is None:
        yield Tensor(f"{name}.weight", "BF16", (n, k), pool.normal(k**-0.5))
        return
    deviation_of_codes = ((1 << 2 * BITS) - 1) ** 0.5 / 12**0.5
    yield Tensor(f"{name}.qweight", "I32", (k * BITS // 32, n), pool.words())
    yield Tensor(f"{name}.qzeros", "I32", (k // group, n * BITS // 32), constant(0x77777777))  # stored one less than the middle
    yield Tensor(f"{name}.scales", "F16", (k // group, n), pool.near(k**-0.5 / deviation_of_codes, "F16"))
    at = itertools.count()

    def groups(count: int) -> NDArray[Any]:
        return np.array([next(at) // group for _ in range(count)], np.int32)

    yield Tensor(f"{name}.g_idx", "I32", (k,), groups)


def tensors(config: dict[str, Any], quantised: bool) -> Iterator[Tensor]:
    """All tensors of a model of this configuration, in Hugging Face's order."""
    pool = Pool()
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    group = group_size(config) if quantised else None
    norm = pool.near(1.0, "BF16")
    yield Tensor("model.embed_tokens.weight", "BF16", (vocab, width), pool.normal(1.0))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, n, k in (
            ("self_attn.q_proj", queries, width), ("self_attn.k_proj", keys, width), ("self_attn.v_proj", keys, width),
            ("self_attn.o_proj", width, queries),
            ("mlp.gate_proj", inner, width), ("mlp.up_proj", inner, width), ("mlp.down_proj", width, inner),
        ):  # fmt: skip
            yield from matrix(pool, f"{at}.{name}", n, k, group)
            if config["model_type"] == "qwen2" and name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                yield Tensor(f"{at}.{name}.bias", "BF16", (n,), pool.normal(0.1))
        yield Tensor(f"{at}.input_layernorm.weight", "BF16", (width,), norm)
        yield Tensor(f"{at}.post_attention_layernorm.weight", "BF16", (width,), norm)
    yield Tensor("model.norm.weight", "BF16", (width,), norm)
    if not config["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", "BF16", (vocab, width), pool.normal(width**-0.5))


def write_tensors(path: Path, listed: list[Tensor]) -> int:
    """One safetensors file; its bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in listed:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in listed:
            write_numbers(file, tensor)
    return 8 + len(text) + end


def write_numbers(file: BinaryIO, tensor: Tensor) -> None:
    left = tensor.count
    while left:
        count = min(left, POOL_NUMBERS)
        file.write(np.ascontiguousarray(tensor.numbers(count)).data)
        left -= count


def write_config(folder: Path, config: dict[str, Any], quantised: bool) -> None:
    """config.json; the file's own type is bf16."""
    method = {"quant_method": "gptq", "bits": BITS, "group_size": group_size(config), "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
    more = {"torch_dtype": "bfloat16", "transformers_version": "4.45.0"} | ({"quantization_config": method} if quantised else {})
    (folder / "config.json").write_text(json.dumps(config | more, indent=2) + "\n")


def group_size(config: dict[str, Any]) -> int:
    """The largest usual one that divides the inputs of all matrices."""
    return next(size for size in (128, 64, 32) if config["hidden_size"] % size == 0 == config["intermediate_size"] % size)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer without merges: encoding gives bytes, and all ids above them decode to words."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(0x100 + index) for index in range(len(others))]
    special = ["<|begin|>", "<|end|>"]
    space = chr(0x100 + others.index(0x20))
    words = (space + "".join(letters) for size in (3, 4) for letters in itertools.product(string.ascii_lowercase, repeat=size))
    vocabulary = {token: index for index, token in enumerate(itertools.islice(itertools.chain(special, alphabet, words), vocab_size))}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": index, "content": token, **added} for index, token in enumerate(special)],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": [],
        },
    }))  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_model(folder: Path, shape: str, quantised: bool, layers: int | None = None, tokenizer: Path | None = None) -> int:
    """The whole checkpoint; bytes of its weights."""
    config = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config, quantised)
    if tokenizer is None:
        write_tokenizer(folder, config["vocab_size"])
    else:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).exists():
                shutil.copy(tokenizer / name, folder / name)
    return write_tensors(folder / "model.safetensors", list(tensors(config, quantised)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=("bf16", "gptq"), default="bf16")
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer is copied")
    args = parser.parse_args()
    nbytes = write_model(args.folder, args.shape, args.format == "gptq", args.layers, args.tokenizer)
    print(f"{args.folder}: {nbytes / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
