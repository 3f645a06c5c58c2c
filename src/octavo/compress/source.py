"""The checkpoint that is quantised: opened, checked as if it were to be served, and told what of it will be rounded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compress.block import quantisable
from octavo.compress.rounding import STORED_AS, Grid
from octavo.compress.settings import Settings
from octavo.compress.writers import Writer, writer_for
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.json_file import read_json
from octavo.layers import Decoder, Linear
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import ModelSource
from octavo.loader.spelling import Place, Spelled
from octavo.models import build_model
from octavo.quantization import PLAIN, StoredTensor, declared

F32 = NDArray[np.float32]
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
NOT_COPIED = ("config.json", "quantize_config.json", "quant_config.json")
MOST_COPIED_BYTES = 256 << 20  # of one file: the largest tokenizers have 40 MB
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
WEIGHT = ".weight"


@dataclass(slots=True)
class SourceModel:
    """A plain checkpoint with its model. Linears hold views of its files until they are compressed."""

    source: ModelSource
    hf: HFConfig
    model: Decoder
    tensors: Spelled

    @staticmethod
    def open(source: ModelSource) -> SourceModel:
        """Raises ConfigError or ModelFileError for what cannot be quantised."""
        if source.kind != "safetensors":
            raise ConfigError(f"model = {source.name!r}: is a GGUF file, which is quantised in its own way; give a folder of safetensors")
        hf = load_hf_config(source)
        if declared(hf) is not None:
            raise ConfigError(f"model = {source.name!r}: is quantised already ({declared(hf)}); give the checkpoint that it was made of")
        model, checkpoint = build_model(hf), open_checkpoint(source, hf)
        load_weights(model, checkpoint)
        tensors = checkpoint.tensors
        assert isinstance(tensors, Spelled)
        return SourceModel(source, hf, model, tensors)

    @property
    def folder(self) -> Path:
        return self.source.path

    @property
    def dtype(self) -> str:
        """The file's word for the model's own numbers, by the configuration or else by the embedding."""
        stated = DTYPES.get(self.hf.read("torch_dtype", str, ""))
        return stated or self.tensors.get(f"{self.model.embed.table.names[0]}{WEIGHT}").dtype

    def products(self) -> Iterator[tuple[Linear, str, int]]:
        """All matrices to be rounded: their linear layer, name and number of output channels."""
        for block in self.model.blocks:
            for linear in quantisable(block):
                for name, n in zip(linear.names, linear.n_each, strict=True):
                    yield linear, name, n

    def plan(self, settings: Settings) -> Plan:
        """How the model will be stored. Raises ConfigError naming the matrix that does not fit the format."""
        if self.dtype not in PLAIN:
            raise ConfigError(f"{self.hf.source}: numbers of dtype {self.dtype} are not supported")
        writer = writer_for(settings, self.dtype)
        products = list(self.products())
        group = settings.group_for({linear.k for linear, _, _ in products})
        for linear, name, n in products:
            writer.check(name, n, linear.k)
            if linear.transposed and not writer.reads_transposed:
                raise ConfigError(f"{name}: is stored turned, for which {writer.name} with scheme {settings.scheme} has no form")
        rounded = {name for _, name, _ in products}
        plain = [
            self.stored_module(name) for block in self.model.blocks for linear in block.linears() for name in linear.names
            if name not in rounded
        ]  # fmt: skip
        return Plan(writer, writer.grid(group), group, plain, rounded)

    # Names: what the files call a module, where that is one tensor; stacks of experts are taken apart under our names.

    def stored_module(self, name: str) -> str:
        place = self.tensors.places[f"{name}{WEIGHT}"]
        return name if place.pieces else place.stored.removesuffix(WEIGHT)

    def stored_vector(self, name: str) -> str:
        return self.tensors.places.get(name, Place(name)).stored

    def round_vector(self, name: str, values: F32) -> F32:
        """As its file's dtype holds them."""
        return STORED_AS[self.tensors.get(name).dtype](values)

    def untouched(self, written: set[str], rounded: set[str]) -> Iterator[StoredTensor]:
        """Stored tensors that go into the new files as they are. written: stored names; rounded: modules that are stored otherwise now."""
        gone = {self.tensors.places[f"{name}{WEIGHT}"].stored for name in rounded}
        for name in self.tensors.tensors.names():
            if name not in gone and name not in written:
                yield self.tensors.tensors.get(name)

    # Files beside the weights

    def companions(self) -> Iterator[Path]:
        """Tokenizer, templates, generation defaults, licence; never code."""
        for path in sorted(self.folder.iterdir()):
            kept = path.suffix in COPIED or path.name.startswith(("LICENSE", "NOTICE"))
            if kept and path.name not in NOT_COPIED and not path.name.endswith(".index.json") and path.is_file():
                if path.stat().st_size > MOST_COPIED_BYTES:
                    raise ConfigError(f"{path}: has more than {MOST_COPIED_BYTES} bytes; it is not what it is called")
                yield path

    def config(self) -> dict[str, Any]:
        return read_json(self.folder / "config.json")

    def fingerprint(self) -> str:
        """Changes with the configuration and with any file of weights."""
        digest = hashlib.sha256(json.dumps(self.config(), sort_keys=True).encode())
        for path in sorted(self.folder.glob("*.safetensors")):
            state = path.stat()
            digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model will be stored. plain: stored names of the blocks' matrices that are not rounded; rounded: ours of those that are."""

    writer: Writer
    grid: Grid
    group: int
    plain: list[str]
    rounded: set[str]
