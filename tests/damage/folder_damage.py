"""Damage of folders: files that are missing, elsewhere, no files, or do not belong together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
from cases import Case, Must
from file_writers import llama_tensors, safetensors_bytes, safetensors_parts, split_gguf
from healthy import (
    INDEX,
    SHARDS,
    Content,
    Files,
    Folder,
    Link,
    Locked,
    Pipe,
    Sparse,
    as_json,
    folder_files,
    gguf_files,
    gguf_model,
    part_files,
    shard_files,
    shard_parts,
    weight_map,
)

PARTS = tuple(part_files())


def cases() -> Iterator[Case]:
    yield from no_files()
    yield from linked()
    yield from parts()
    yield from shards()
    yield from wrong_tensors()


def no_files() -> Iterator[Case]:
    """Each file replaced by what cannot be read."""
    can_lock = os.geteuid() != 0
    things: dict[str, Content] = {"a folder": Folder(), "a pipe": Pipe(), "a link to itself": Link("self"), "a link to nothing": Link("nothing"),
                                  "empty": b"", "a terabyte of nothing": Sparse(1 << 40)}  # fmt: skip
    for form, files, start, names in (
        ("gguf", gguf_files(), "m.gguf", ("m.gguf",)),
        ("parts", part_files(), PARTS[0], PARTS[1:]),
        ("folder", folder_files(), "", tuple(folder_files())),
        ("shards", shard_files(), "", (SHARDS[1], INDEX)),
    ):
        for name in names:
            optional = name in ("generation_config.json", "tokenizer_config.json")
            for label, thing in things.items():
                here = Link(name) if label == "a link to itself" else thing
                yield Case(f"{form}: {name} is {label}", form, files | {name: here}, start, Must.REFUSE, (name,))
            if not optional:
                yield Case(f"{form}: {name} is missing", form, without(files, name), start, Must.REFUSE, (name if name != "model.safetensors" else "",))
            data = files[name]
            if can_lock and isinstance(data, bytes):
                yield Case(f"{form}: {name} may not be read", form, files | {name: Locked(data)}, start, Must.REFUSE, (name,))
    yield Case("gguf: no such file", "gguf", gguf_files(), "other.gguf", Must.REFUSE, ("other.gguf",))
    yield Case("gguf: a name of 5,000 letters", "gguf", gguf_files(), "x" * 5000 + ".gguf", Must.REFUSE, ("x" * 50,))
    yield Case("gguf: a file in a file", "gguf", gguf_files(), "m.gguf/m.gguf", Must.REFUSE, ("m.gguf",))
    yield Case("folder: a file called otherwise", "folder", folder_files(), "config.json", Must.REFUSE, ("config.json",))
    yield Case("folder: pickled weights", "folder", without(folder_files(), "model.safetensors") | {"pytorch_model.bin": b"\x80\x02}q\x00."}, "", Must.REFUSE, ("pytorch_model.bin",))
    yield Case("folder: two models", "folder", without(folder_files(), "model.safetensors") | {"a.safetensors": b"x", "b.safetensors": b"x"}, "", Must.REFUSE)
    yield Case("gguf: two models", "gguf", {"a.gguf": b"x", "b.gguf": b"x"}, "", Must.REFUSE, ("a.gguf", "b.gguf"))
    yield Case("folder: only a configuration", "folder", {"config.json": folder_files()["config.json"]}, "")
    yield Case("folder: nothing", "folder", {"x/keep": b""}, "x")


def without(files: Files, *names: str) -> dict[str, Content]:
    return {name: content for name, content in files.items() if name not in names}


def linked() -> Iterator[Case]:
    """Links as the hub's client makes them are no damage; a circle of them is."""
    for form, files, start in (("gguf", gguf_files(), "m.gguf"), ("folder", folder_files(), ""), ("shards", shard_files(), ""), ("parts", part_files(), PARTS[0])):
        stored: dict[str, Content] = {f"blobs/{i}": content for i, content in enumerate(files.values())}
        links: dict[str, Content] = {f"snapshot/{name}": Link(f"../blobs/{i}") for i, name in enumerate(files)}
        yield Case(f"{form}: all files behind links", form, stored | links, f"snapshot/{start}".rstrip("/"), Must.LOAD)
    yield Case("gguf: links in a circle", "gguf", {"m.gguf": Link("n.gguf"), "n.gguf": Link("m.gguf")}, "m.gguf", Must.REFUSE, ("m.gguf",))
    yield Case("folder: a folder in a circle", "folder", {"a": Link("b"), "b": Link("a")}, "a")
    yield Case("folder: files that nobody reads", "folder", folder_files() | {"x.bin": b"junk", "README.md": b"\xff", "odd": Link("odd")}, "", Must.LOAD)


def parts() -> Iterator[Case]:
    """A split GGUF model."""

    def case(name: str, files: dict[str, Content], *words: str, start: str = PARTS[0]) -> Case:
        return Case(f"parts: {name}", "parts", files, start, Must.REFUSE, words)

    files = part_files()
    second = files[PARTS[1]]
    assert isinstance(second, bytes)
    yield case("the first is missing", without(files, PARTS[0]), PARTS[0], start=PARTS[1])
    yield case("the first is missing from the folder", without(files, PARTS[0]), PARTS[0], start="")
    for cut in (1, 3, 4, 8, 20, 24, 30, 100, len(second) - 200):
        yield case(f"the second is cut at {cut}", files | {PARTS[1]: second[:cut]}, PARTS[1])
    yield case("the second is the first again", files | {PARTS[1]: files[PARTS[0]]}, PARTS[1], "split.no")
    yield case("two have changed places", files | {PARTS[1]: files[PARTS[2]], PARTS[2]: second}, PARTS[1], "split.no")
    yield case("the second is a model of its own", files | {PARTS[1]: gguf_files()["m.gguf"]}, PARTS[1], "split.no")
    yield case("the first is a link to the second", files | {PARTS[0]: Link(PARTS[1])}, PARTS[0])
    changes: dict[str, dict[str, dict[int, object]]] = {
        "no": {"2 of 1": {1: 2}, "none": {1: None}, "a text": {1: "1"}, "1 of 0": {0: 1}, "65535": {1: 65535}},
        "count": {"2 of 3": {0: 2}, "4 of 3": {0: 4}, "65535": {0: 65535}, "0 in the second": {1: 0}, "none in the second": {1: None}, "a text": {0: "3"}},
        "tensors": {"one more": {0: 12}, "one less": {0: 10}, "-1": {0: -1}, "2^31 - 1": {0: 2**31 - 1}, "at odds": {2: 3}, "a text": {0: "11"}},
    }
    for key, values in changes.items():
        for label, value in values.items():
            yield case(f"split.{key}: {label}", part_files(split_gguf(gguf_model(), 4, 8, **{key: value})), "split.")
    doubled = split_gguf(gguf_model(), 4, 8)
    doubled[2].tensors.append(doubled[0].tensors[1])
    yield case("a tensor twice", part_files(doubled), PARTS[2], doubled[0].tensors[1][0])
    lost = split_gguf(gguf_model(), 4, 8)
    lost[1].tensors.pop()
    yield case("a tensor lost", part_files(lost), "split.tensors.count")
    yield case("fewer parts than the name says", part_files(split_gguf(gguf_model(), 4)[:2], 3), "split.count")
    yield case("renamed", {"model.gguf": files[PARTS[0]], **without(files, PARTS[0])}, "model.gguf", "split.count", start="model.gguf")
    yield Case("parts: a folder with one model", "parts", files, "", Must.LOAD)
    yield Case("parts: the last one given", "parts", files, PARTS[2], Must.LOAD)
    yield Case("parts: others beside them", "parts", files | {"m-00004-of-00004.gguf": b"x"}, PARTS[0], Must.LOAD)


def shards() -> Iterator[Case]:
    """Sharded safetensors that do not fit their index."""

    def case(name: str, files: dict[str, Content], *words: str) -> Case:
        return Case(f"shards: {name}", "shards", files, "", Must.REFUSE, words)

    files = shard_files()
    for i, shard in enumerate(SHARDS):
        whole = files[shard]
        assert isinstance(whole, bytes)
        header = 8 + int.from_bytes(whole[:8], "little")
        for cut in (1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1):
            yield case(f"shard {i + 1} is cut at {cut}", files | {shard: whole[:cut]}, shard)
    yield case("two have changed places", files | {SHARDS[0]: files[SHARDS[1]], SHARDS[1]: files[SHARDS[0]]}, SHARDS[0])
    yield case("one is another", files | {SHARDS[0]: files[SHARDS[2]]}, SHARDS[0])
    yield case("one is a link to another", files | {SHARDS[0]: Link(SHARDS[2])}, SHARDS[0])
    extra = ("F32", np.ones(64, np.float32))
    tensors = llama_tensors()
    names = [name for name in shard_parts()[1][0] if name != "__metadata__"]
    second = {name: tensors[name] for name in names}
    yield case("a tensor that the index does not know", files | {SHARDS[1]: safetensors_bytes(*safetensors_parts(second | {"extra": extra}))}, "extra")
    first = next(iter(weight_map()))
    twice = second | {first: tensors[first]}
    yield case("a tensor in two shards", files | {SHARDS[1]: safetensors_bytes(*safetensors_parts(twice))}, first)
    renamed = {(name + "x" if name == names[0] else name): tensors[name] for name in names}
    yield case("a tensor under another name", files | {SHARDS[1]: safetensors_bytes(*safetensors_parts(renamed))}, names[0])


def wrong_tensors() -> Iterator[Case]:
    """Sound files whose tensors are not the configuration's."""

    def case(name: str, tensors: dict[str, tuple[str, np.ndarray]], word: str) -> Case:
        files = folder_files() | {"model.safetensors": safetensors_bytes(*safetensors_parts(tensors))}
        return Case(f"tensors: {name}", "folder", files, "", Must.REFUSE, ("model.safetensors" if word != "missing" else "", word))

    tensors = llama_tensors()
    for name, (dtype, array) in tensors.items():
        yield case(f"{name} is missing", {k: v for k, v in tensors.items() if k != name}, name)
        yield case(f"{name} has a row more", tensors | {name: (dtype, np.concatenate([array, array[:1]]))}, name)
        wrong = ("I64", np.zeros(array.shape, np.int64))
        yield case(f"{name} is I64", tensors | {name: wrong}, name)
    name = "model.layers.0.self_attn.k_proj.weight"
    dtype, array = tensors[name]
    yield case("turned by a quarter", tensors | {name: (dtype, np.ascontiguousarray(array.T))}, name)
    yield case("flat", tensors | {name: (dtype, array.reshape(-1))}, name)
    yield case("one dimension more", tensors | {name: (dtype, array[None])}, name)
    for kind, numpy_type in {"F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "U8": np.uint8, "BOOL": np.bool_, "C64": np.complex64, "U32": np.uint32}.items():
        yield case(f"of {kind}", tensors | {name: (kind, np.zeros(array.shape, numpy_type))}, name)
    yield case("a bias that nobody asked for", tensors | {name.replace("weight", "bias"): ("F32", np.ones(32, np.float32))}, "k_proj.bias")
    yield case("a layer too many", tensors | {"model.layers.1.input_layernorm.weight": ("F32", np.ones(64, np.float32))}, "model.layers.1")
    for shape in ([2**40, 0, 64], [2**47, 0, 0], [4097, 1, 0]):
        info = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        header, data = safetensors_parts(tensors)
        damaged = safetensors_bytes(header | {"model.layers.0.mlp.experts.gate_up_proj": info}, data)
        yield Case(f"tensors: experts of shape {shape}", "folder", folder_files() | {"model.safetensors": damaged}, "", Must.REFUSE, ("experts.gate_up_proj",))
    big = json.dumps({"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]})
    head = f'{{"a": {big}}}'.encode()
    files = folder_files() | {"model.safetensors": Sparse((1 << 40) + 8 + len(head), len(head).to_bytes(8, "little") + head)}
    yield Case("tensors: a terabyte in one", "folder", files, "", Must.REFUSE, ("model.safetensors",))
    yield Case("tensors: an index beside one file", "folder", folder_files() | {INDEX: as_json({"weight_map": {"a": "../../x"}})}, "", Must.LOAD)
