"""Needs Python only. GGUF headers: every type of value, agreement with the gguf package, what is skipped, what messages say."""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from file_writers import ARRAY, FORMS, STRING, Array, Gguf, joined, random_tensor, tiny_llama

from octavo.errors import ModelFileError
from octavo.gguf_file import BLOCKS, GGMLType, GGUFFile


def opened(folder: Path, model: Gguf, skip: tuple[str, ...] = ()) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(joined(model.fields()))
    return GGUFFile.open(path, skip=skip)


SCALARS = {0: 255, 1: -128, 2: 65535, 3: -32768, 4: 2**32 - 1, 5: -(2**31), 6: 0.5, 7: True, 10: 2**64 - 1, 11: -(2**63), 12: 0.1}


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_value(tmp_path: Path, version: int) -> None:
    entries = [(f"one.{kind}", kind, value) for kind, value in SCALARS.items()]
    entries += [(f"many.{kind}", ARRAY, Array(kind, [value, value])) for kind, value in SCALARS.items()]
    file = opened(tmp_path, Gguf(entries, version=version))
    assert file.version == version
    for kind, value in SCALARS.items():
        assert file.metadata[f"one.{kind}"] == value
        assert type(file.metadata[f"one.{kind}"]) is type(value)
        assert list(file.metadata[f"many.{kind}"]) == [value, value]
        assert isinstance(file.metadata[f"many.{kind}"], array)


@pytest.mark.parametrize(
    "texts",
    [[], [""], ["", ""], ["a"], ["a", "", "ß", "日本語", "\n", "🙂"], ["a\0b", "c"], ["\0"], ["\0", ""], ["x" * 5000, "y"]],
    ids=lambda texts: repr(texts)[:20],
)
def test_arrays_of_text(tmp_path: Path, texts: list[str]) -> None:
    file = opened(tmp_path, Gguf([("texts", ARRAY, Array(STRING, texts)), ("after", STRING, "here")]))
    assert file.metadata["texts"] == texts
    assert file.metadata["after"] == "here"


def test_nested_arrays(tmp_path: Path) -> None:
    nested = Array(ARRAY, [Array(STRING, ["a", "b"]), Array(5, [1, 2, 3]), Array(ARRAY, [Array(4, [])])])
    file = opened(tmp_path, Gguf([("nested", ARRAY, nested), ("after", 4, 7)]))
    texts, numbers, deeper = file.metadata["nested"]
    assert (texts, list(numbers), [list(inner) for inner in deeper]) == (["a", "b"], [1, 2, 3], [[]])
    assert file.metadata["after"] == 7


def test_skipped_arrays_are_counted_not_built(tmp_path: Path) -> None:
    model = tiny_llama(tokenizer__nested=(ARRAY, Array(ARRAY, [Array(STRING, ["a", "bc"]), Array(5, [1])])))
    whole, partial = opened(tmp_path, model), opened(tmp_path, model, skip=("tokenizer.",))
    assert dict(partial.skipped) == {"tokenizer.ggml.tokens": 40, "tokenizer.ggml.token_type": 40, "tokenizer.ggml.scores": 40,
                                     "tokenizer.nested": 2}  # fmt: skip
    assert partial.metadata["tokenizer.ggml.model"] == "gpt2"
    assert "tokenizer.ggml.tokens" not in partial.metadata
    assert partial.tensors == whole.tensors


def test_tensors_are_where_they_were_put(tmp_path: Path) -> None:
    model = tiny_llama()
    file = opened(tmp_path, model)
    assert list(file.tensors) == [name for name, *_ in model.tensors]
    for name, dims, kind, data in model.tensors:
        tensor = file.tensors[name]
        assert tensor.shape == dims[::-1]
        assert tensor.type == kind
        assert tensor.offset % file.alignment == 0
        view = file.data(tensor)
        assert view.readonly
        assert bytes(view) == data


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments(tmp_path: Path, alignment: int) -> None:
    tensors = [random_tensor(np.random.default_rng(0), name, (32, 3), 2) for name in ("a", "b")]
    file = opened(tmp_path, Gguf([("general.alignment", 4, alignment)], tensors, alignment=alignment))
    assert [bytes(file.data(t)) for t in file.tensors.values()] == [data for *_, data in tensors]


def test_a_file_of_vocabulary_only(tmp_path: Path) -> None:
    assert not opened(tmp_path, Gguf(tiny_llama().entries)).tensors


def test_data_outlives_the_file_object(tmp_path: Path) -> None:
    model = tiny_llama()
    view = (lambda file: file.data(file.tensors["output_norm.weight"]))(opened(tmp_path, model))
    assert bytes(view) == model.tensors[-1][3]


def test_blocks_agree_with_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {int(kind): BLOCKS[kind] for kind in GGMLType}
    assert {kind: size for kind, size in ours.items() if kind in theirs} == {kind: size for kind, size in theirs.items() if kind in ours}
    assert len(ours) >= 32


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("eps", 0.25)
    writer.add_token_list(["a", "b\n", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_bool("flag", True)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("one", values)
    writer.add_tensor("two", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile.open(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["eps"] == 0.25
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b\n", "ü"]
    assert list(file.metadata["numbers"]) == [1, 2, 3]
    assert file.metadata["flag"] is True
    assert file.tensors["one"].shape == (3, 4)
    assert np.array_equal(np.frombuffer(file.data(file.tensors["one"]), np.float32).reshape(3, 4), values)
    assert np.array_equal(np.frombuffer(file.data(file.tensors["two"]), np.float16).reshape(3, 4), values)


def test_the_gguf_package_reads_what_the_tests_write(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = tiny_llama()
    (tmp_path / "m.gguf").write_bytes(joined(model.fields()))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert [(t.name, t.data.tobytes()) for t in reader.tensors] == [(name, data) for name, _, _, data in model.tensors]


def test_messages_name_file_and_key_in_one_line(tmp_path: Path) -> None:
    evil = "evil\n\x1b[31m" + "x" * 500
    for model in (Gguf([(evil, ARRAY, Array(STRING, [b"\xff"]))]), Gguf([], [(evil, (32, 0), 2, b"")])):
        with pytest.raises(ModelFileError) as e:
            opened(tmp_path, model)
        text = str(e.value)
        assert str(tmp_path / "model.gguf") in text
        assert "evil" in text
        assert "\n" not in text
        assert "\x1b" not in text
        assert len(text) < 500


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to("loop")
    expected = {"missing": "No such file", "": "regular file", "pipe": "regular file", "empty": "is empty", "loop": "cannot be opened"}
    for name, text in expected.items():
        with pytest.raises(ModelFileError, match=text):
            GGUFFile.open(tmp_path / name)
    with pytest.raises(ModelFileError, match="cannot be opened"):
        GGUFFile.open("a\0b")


def test_needs_no_numpy() -> None:
    code = "import sys, octavo.gguf_file, octavo.loader.hf_config, octavo.loader.resolve; print(sorted({'numpy', 'tqdm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_forms_cover_all_scalars() -> None:
    assert set(FORMS) == set(SCALARS)
