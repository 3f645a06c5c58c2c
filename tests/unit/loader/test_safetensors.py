"""Needs Python only. safetensors files, single and sharded: views of the right numbers, and agreement with the safetensors package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from file_writers import as_bf16, llama_tensors, safetensors_bytes, safetensors_parts

from octavo.errors import ModelFileError
from octavo.loader.resolve import INDEX
from octavo.loader.safetensors import SafetensorsTensors


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    path.write_bytes(safetensors_bytes(*safetensors_parts(tensors)))


def same(checkpoint: SafetensorsTensors, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    assert set(checkpoint.names()) == set(tensors)
    for name, (dtype, array) in tensors.items():
        got = checkpoint.get(name)
        assert (got.dtype, got.shape) == (dtype, array.shape)
        assert got.data.tobytes() == array.tobytes()
        assert not got.data.flags.owndata
        assert not got.data.flags.writeable
    assert checkpoint.nbytes == sum(array.nbytes for _, array in tensors.values())


def test_single_file(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", llama_tensors())
    same(SafetensorsTensors(tmp_path), llama_tensors())


def test_the_only_file_under_another_name(tmp_path: Path) -> None:
    write(tmp_path / "weights.safetensors", llama_tensors())
    same(SafetensorsTensors(tmp_path), llama_tensors())
    write(tmp_path / "more.safetensors", llama_tensors())
    with pytest.raises(ModelFileError, match="2 .safetensors files"):
        SafetensorsTensors(tmp_path)


def test_odd_shapes(tmp_path: Path) -> None:
    tensors = {
        "scalar": ("F32", np.float32(3).reshape(())), "none": ("F16", np.zeros((0, 5), np.float16)),
        "byte": ("I8", np.arange(3, dtype=np.int8)), "unaligned": ("F32", np.arange(5, dtype=np.float32)),
    }  # fmt: skip
    write(tmp_path / "model.safetensors", tensors)
    checkpoint = SafetensorsTensors(tmp_path)
    assert checkpoint.get("none").data.size == 0
    assert checkpoint.get("scalar").shape == ()
    assert np.array_equal(checkpoint.get("unaligned").data.view(np.float32), np.arange(5, dtype=np.float32))


def sharded(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    tensors = llama_tensors()
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[:4], names[4:5], names[5:])):
        shard = f"model-{i + 1:05}-of-00003.safetensors"
        write(folder / shard, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tensors


def test_shards(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    same(SafetensorsTensors(tmp_path), tensors)


def test_shards_behind_links(tmp_path: Path) -> None:
    """The hub client's snapshots are folders of links into a store of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    tensors = sharded(blobs)
    for i, file in enumerate(sorted(blobs.iterdir())):
        name = file.name
        file.rename(blobs / str(i))
        (snapshot / name).symlink_to(f"../blobs/{i}")
    same(SafetensorsTensors(snapshot), tensors)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin", 3, None, ["x.safetensors"], "a\0.safetensors"]
)
def test_shard_names_stay_in_the_folder(tmp_path: Path, shard: object) -> None:
    sharded(tmp_path)
    write(tmp_path.parent / "x.safetensors", {"a": ("F32", np.zeros(1, np.float32))})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelFileError) as e:
        SafetensorsTensors(tmp_path)
    assert "\0" not in str(e.value)
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{", ""])
def test_bad_index(tmp_path: Path, index: str) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelFileError, match=INDEX):
        SafetensorsTensors(tmp_path)


def test_index_at_odds_with_shards(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"extra": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"00001-of-00003.safetensors: tensor 'extra' is missing"):
        SafetensorsTensors(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"00002-of-00003.safetensors: cannot be opened"):
        SafetensorsTensors(tmp_path)
    assert len(tensors) > 4


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", llama_tensors())
    with pytest.raises(ModelFileError, match=r"tensor 'absent' is missing"):
        SafetensorsTensors(tmp_path).get("absent")


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    numpy_side = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((4,), np.float16), "c": np.arange(3)}
    numpy_side.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    same(SafetensorsTensors(tmp_path), {"a": ("F32", arrays["a"]), "b": ("F16", arrays["b"]), "c": ("I64", arrays["c"])})


def test_the_package_reads_what_the_tests_write(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors")
    write(tmp_path / "model.safetensors", {"a": ("F32", np.arange(6, dtype=np.float32)), "b": ("BF16", as_bf16(np.ones((2, 2))))})
    with package.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == {"a", "b"}
        assert np.array_equal(file.get_tensor("a"), np.arange(6, dtype=np.float32))
