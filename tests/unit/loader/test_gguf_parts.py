"""Needs Python only. GGUF models in several files: the same model, and one line for each way in which the parts may not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_writers import ARRAY, Array, joined, split_gguf, tiny_llama, write_parts

from octavo.errors import ConfigError, ModelFileError
from octavo.loader.gguf_parts import GGUFModel
from octavo.loader.hf_config import load_generation_config, load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import ModelSource, part_names, resolve_model, source_at
from octavo.models import build_model

CUTS = [(4,), (1, 2, 9), (0, 6), (6, 6, 11)]  # some parts without a tensor


def weights(source: ModelSource) -> tuple[dict[str, Any], list[bytes]]:
    hf = load_hf_config(source)
    model = build_model(hf)
    load_weights(model, open_checkpoint(source, hf))
    arrays = [w.dequantize() for linear in model.linears() for w in linear.weights] + [v.value for v in model.vectors()]
    return hf.raw, [np.ascontiguousarray(a).tobytes() for a in arrays]


@pytest.mark.parametrize("cuts", CUTS)
def test_parts_are_the_model(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(joined(tiny_llama().fields()))
    folder = tmp_path / "parts"
    folder.mkdir()
    paths = write_parts(folder, split_gguf(tiny_llama(), *cuts))
    expected = weights(source_at(whole, "whole", "auto"))
    for given in (paths[0], paths[-1], folder):
        source = source_at(given, "parts", "auto")
        assert source == ModelSource(paths[0], "gguf", "parts")
        assert weights(source) == expected
    assert load_generation_config(source).eos_token_ids == (2,)


def test_a_folder_of_two_models_is_ambiguous(tmp_path: Path) -> None:
    write_parts(tmp_path, split_gguf(tiny_llama(), 4))
    write_parts(tmp_path, split_gguf(tiny_llama(), 4), "other")
    with pytest.raises(ConfigError, match=r"holds 2 .gguf models; give one of them: m-00001-of-00002.gguf, other-00001"):
        resolve_model(str(tmp_path))


def test_names() -> None:
    assert part_names("a-00002-of-00003.gguf") == [f"a-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in ("a.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-1-of-3.gguf", "a-00001-of-00003.gguf.part"):
        assert part_names(name) == [name]


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    paths = write_parts(tmp_path, split_gguf(tiny_llama(), 4, 8))
    paths[missing].unlink()
    with pytest.raises(ModelFileError, match=rf"m-0000{missing + 1}-of-00003.gguf: is missing: part {missing + 1} of 3"):
        load_hf_config(source_at(paths[0], "x", "auto"))


def test_the_first_part_must_be_there(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, split_gguf(tiny_llama(), 4, 8))
    paths[0].unlink()
    for given in (paths[1], tmp_path):
        with pytest.raises(ConfigError, match="m-00001-of-00003.gguf, the first part of the model, is not beside it"):
            source_at(given, "x", "auto")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no": {1: 2}}, "00002-of-00003.gguf: key 'split.no': 2, but 1 was expected"),
        ({"no": {1: None}}, "00002-of-00003.gguf: key 'split.no': is missing"),
        ({"no": {1: "1"}}, "00002-of-00003.gguf: key 'split.no': must be int"),
        ({"no": {0: 1}}, "00001-of-00003.gguf: key 'split.no': 1: not the first part"),
        ({"count": {2: 4}}, "00003-of-00003.gguf: key 'split.count': 4, but 3 was expected"),
        ({"count": {2: None}}, "00003-of-00003.gguf: key 'split.count': is missing"),
        ({"count": {0: 2}}, "00001-of-00003.gguf: key 'split.count': 2: .* end in -00001-of-00002.gguf"),
        ({"count": {0: 65535}}, "00001-of-00003.gguf: key 'split.count': 65535: .* end in -00001-of-65535.gguf"),
        ({"count": {0: "3"}}, "00001-of-00003.gguf: key 'split.count': must be int"),
        ({"tensors": {0: 12}}, "00001-of-00003.gguf: key 'split.tensors.count': 12, but the parts hold 11"),
        ({"tensors": {2: 4}}, "00003-of-00003.gguf: key 'split.tensors.count': 4, but the parts hold 11"),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path: Path, changes: dict[str, dict[int, object]], message: str) -> None:
    paths = write_parts(tmp_path, split_gguf(tiny_llama(), 4, 8, **changes))
    with pytest.raises(ModelFileError, match=message):
        GGUFModel.open(paths[0])


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    parts = split_gguf(tiny_llama(), 4)
    parts[1].tensors.append(parts[0].tensors[2])
    paths = write_parts(tmp_path, parts)
    with pytest.raises(ModelFileError, match=r"00002-of-00002.gguf: tensor 'blk.0.attn_q.weight': is in m-00001-of-00002.gguf too"):
        GGUFModel.open(paths[0])


def test_a_renamed_first_part(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, split_gguf(tiny_llama(), 4))
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"model.gguf: key 'split.count': 2: the file's name must end in -00001-of-00002.gguf"):
        GGUFModel.open(renamed)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, split_gguf(tiny_llama(), 4))
    paths[1].write_bytes(paths[1].read_bytes()[:-200])
    with pytest.raises(ModelFileError, match=r"00002-of-00002.gguf: .*"):
        GGUFModel.open(paths[0])


def test_messages_name_the_part_of_a_tensor(tmp_path: Path) -> None:
    model = tiny_llama(**{"llama.feed_forward_length": (4, 64)})
    paths = write_parts(tmp_path, split_gguf(model, 4))
    source = source_at(paths[0], "x", "auto")
    hf = load_hf_config(source)
    with pytest.raises(ModelFileError, match=r"00002-of-00002.gguf: tensor 'blk.0.ffn_gate.weight': has shape"):
        load_weights(build_model(hf), open_checkpoint(source, hf))


def test_split_count_as_an_array(tmp_path: Path) -> None:
    model = tiny_llama(**{"split.count": (ARRAY, Array(4, [2]))})
    path = tmp_path / "m.gguf"
    path.write_bytes(joined(model.fields()))
    with pytest.raises(ModelFileError, match=r"m.gguf: key 'split.count': must be int"):
        GGUFModel.open(path)


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama", split_max_tensors=2)
    arrays = {f"t{i}": np.arange(64, dtype=np.float32) + i for i in range(5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = GGUFModel.open(tmp_path / "w-00001-of-00003.gguf")
    assert {name: np.frombuffer(model.data(name), np.float32).tolist() for name in model.tensors} == {n: a.tolist() for n, a in arrays.items()}
    assert model.file_of("t4").name == "w-00003-of-00003.gguf"
