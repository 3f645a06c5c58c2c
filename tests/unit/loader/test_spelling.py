"""Needs Python only. Tensors under the names that models ask for, whatever the writer called or stacked them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from octavo.errors import ModelFileError
from octavo.loader.spelling import Spelled
from octavo.quantization import StoredTensor


class Stored:
    """Tensors in memory; Q8_0 blocks are 34 bytes for 32 numbers."""

    kind = "safetensors"

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> None:
        self.dtype, self.shapes = dtype, shapes
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self.data = {name: np.arange(n // 32 * 34 if dtype == "Q8_0" else 4 * n, dtype=np.uint16).astype(np.uint8) for name, n in sizes.items()}

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self.data.values())

    def names(self) -> Iterable[str]:
        return self.shapes.keys()

    def has(self, name: str) -> bool:
        return name in self.shapes

    def get(self, name: str) -> StoredTensor:
        if name not in self.shapes:
            raise self.error(f"tensor {name!r} is missing")
        return StoredTensor("m", name, self.dtype, self.shapes[name], self.data[name])

    def error(self, text: str) -> ModelFileError:
        return ModelFileError(f"m: {text}")


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.3.block_sparse_moe.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("model.layers.3.block_sparse_moe.experts.11.w1.weight", "model.layers.3.mlp.experts.11.gate_proj.weight"),
        ("model.layers.3.block_sparse_moe.experts.11.w2.weight", "model.layers.3.mlp.experts.11.down_proj.weight"),
        ("model.layers.3.block_sparse_moe.experts.11.w3.qweight", "model.layers.3.mlp.experts.11.up_proj.qweight"),
        ("transformer.h.0.mlp.w1.weight", "transformer.h.0.mlp.w1.weight"),
        ("vision_tower.x.weight", "vision_tower.x.weight"),
    ],
)
def test_names(stored: str, name: str) -> None:
    spelled = Spelled(Stored({stored: (4, 8)}))
    assert list(spelled.names()) == [name]
    assert spelled.has(name)
    assert spelled.get(name).name == stored
    assert spelled.nbytes == 128


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_stacks(dtype: str) -> None:
    whole = Stored({"l.mlp.experts.gate_up_proj": (3, 4, 32), "l.mlp.experts.down_proj.weight": (3, 2, 32)}, dtype)
    spelled = Spelled(whole)
    assert set(spelled.names()) == {f"l.mlp.experts.{i}.{part}_proj.weight" for i in range(3) for part in ("gate", "up", "down")}
    both = whole.data["l.mlp.experts.gate_up_proj"].reshape(3, 2, -1)
    for i in range(3):
        for j, part in enumerate(("gate", "up")):
            tensor = spelled.get(f"l.mlp.experts.{i}.{part}_proj.weight")
            assert tensor.shape == (2, 32)
            assert np.array_equal(tensor.data, both[i, j])
            assert np.shares_memory(tensor.data, both)
    assert spelled.get("l.mlp.experts.2.down_proj.weight").data.nbytes * 3 == whole.data["l.mlp.experts.down_proj.weight"].nbytes


def test_what_is_no_stack_keeps_its_name() -> None:
    shapes = {"l.experts.gate_up_proj": (4, 32), "k.experts.down_proj": (0, 4, 32)}
    assert set(Spelled(Stored(shapes)).names()) == set(shapes)


def test_two_spellings_of_one_part_are_refused() -> None:
    with pytest.raises(ModelFileError, match="are the same part of the model"):
        Spelled(Stored({"model.norm.weight": (4,), "language_model.model.norm.weight": (4,)}))


def test_missing_and_uneven() -> None:
    spelled = Spelled(Stored({"l.experts.gate_up_proj": (2, 3, 32)}))
    with pytest.raises(ModelFileError, match=r"\[2, 3, 32\]: its rows are no 4 equal matrices"):
        spelled.get("l.experts.0.up_proj.weight")
    with pytest.raises(ModelFileError, match="'other.weight' is missing"):
        spelled.get("other.weight")
