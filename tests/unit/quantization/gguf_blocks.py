"""Random blocks of every GGUF type that is read, and what the gguf package says they are."""

from __future__ import annotations

import numpy as np

from octavo.quantization import StoredTensor
from octavo.quantization.gguf import BLOCKS, WIDTH


def random_blocks(name: str, n: int, k: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """Random bits [n, k / width] with finite scales of either sign, some of them zero and some subnormal."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, k // WIDTH[name], BLOCKS[name].itemsize), np.uint8).view(BLOCKS[name])[..., 0]
    for key in ("d", "m", "dmin"):
        if key in BLOCKS[name].names:
            scales = (rng.standard_normal(blocks.shape) * scale).astype(np.float16)
            scales[rng.random(blocks.shape) < 0.05] = 0
            scales[rng.random(blocks.shape) < 0.05] = 6e-8
            blocks[key] = scales
    if name == "MXFP4":
        blocks["e"] = rng.integers(104, 144, blocks.shape)  # powers of two that fp16 holds
    return blocks


def stored(name: str, blocks: np.ndarray, k: int) -> StoredTensor:
    return StoredTensor("f.gguf", "t", name, (blocks.shape[0], k), np.ascontiguousarray(blocks).reshape(-1).view(np.uint8))


def reference(name: str, blocks: np.ndarray) -> np.ndarray:
    import gguf

    raw = np.ascontiguousarray(blocks).view(np.uint8).reshape(blocks.shape[0], -1)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
