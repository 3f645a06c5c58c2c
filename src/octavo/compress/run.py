"""A run of the quantiser: model in, folder out, layer by layer."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import ops
from octavo.compress.block import BlockCompressor, Compressed
from octavo.compress.settings import Settings
from octavo.compress.source import Plan, SourceModel
from octavo.compress.stored import floats, write_json, write_model
from octavo.compress.texts import read_texts, sequences
from octavo.compress.work import Work, check_output, writing
from octavo.errors import ModelFileError
from octavo.layers import Decoder, Module
from octavo.loader.resolve import ModelSource
from octavo.quantization import StoredTensor
from octavo.tokenizer.tokenizer import Tokenizer

F32 = NDArray[np.float32]
VERSION = 1  # of the algorithms: a run of another one is not gone on with
Progress = Callable[[int, int], None]  # finished layers, of how many


@dataclass(frozen=True, slots=True)
class Result:
    """What was written. nbytes, source_bytes: of all tensors."""

    folder: Path
    format: str
    method: str
    group: int
    layers: int
    matrices: int
    nbytes: int
    source_bytes: int


def quantize(
    source: ModelSource, out: Path, settings: Settings, calibration: Path | None = None, progress: Progress = lambda done, total: None
) -> Result:
    """Writes a quantised copy of a model's folder to `out`, which must not exist or be empty.

    An interrupted run is taken up by the same call, and gives the same bytes. Raises ConfigError or ModelFileError with one line.
    """
    settings, out = settings.checked(), out.absolute()
    check_output(out)
    model = SourceModel.open(source)
    plan = model.plan(settings)
    ids = token_ids(model, calibration, settings) if calibration is not None else []
    asked = {
        "version": VERSION, "settings": asdict(settings), "model": model.fingerprint(),
        "texts": hashlib.sha256(repr(ids).encode()).hexdigest(),
    }  # fmt: skip
    with Work.open(out, asked) as work:
        compress_layers(model, plan, settings, ids, work, progress)
        return assemble(model, plan, settings, work)


def token_ids(model: SourceModel, calibration: Path, settings: Settings) -> list[list[int]]:
    tokenizer = Tokenizer.load(model.source.path)
    found = sequences(read_texts(calibration), tokenizer.encode, settings.samples, min(settings.sample_len, model.model.context_length))
    if max(map(max, found)) >= model.model.vocab_size:
        raise ModelFileError(f"{model.folder}: the tokenizer has token {max(map(max, found))}, the model only {model.model.vocab_size}")
    return found


def compress_layers(model: SourceModel, plan: Plan, settings: Settings, ids: list[list[int]], work: Work, progress: Progress) -> None:
    width = model.hf.size("hidden_size")
    longest = max(map(len, ids), default=0)
    compressor = BlockCompressor(settings, plan.grid, width, longest, model.round_vector)
    blocks = model.model.blocks
    progress(work.done, len(blocks))
    hidden: list[F32] = []
    if ids and work.done < len(blocks):
        hidden = work.hidden([len(one) for one in ids], width) if work.done else [embedded(model.model, one) for one in ids]
    while work.done < len(blocks):
        block = blocks[work.done]
        try:
            result = compressor.compress(block, hidden)
        except ValueError as e:
            raise ModelFileError(f"{model.folder}: {e}") from None
        hidden = result.hidden
        work.finish_layer(layer_tensors(model, plan, result), hidden)
        release(block)
        progress(work.done, len(blocks))


def embedded(decoder: Decoder, ids: list[int]) -> F32:
    """What goes into the first block."""
    x_TD: F32 = decoder.embed(np.array(ids, np.int32))
    if decoder.positions:
        x_TD = ops.add(x_TD, decoder.positions(np.arange(len(ids), dtype=np.int32)))
    return x_TD


def layer_tensors(model: SourceModel, plan: Plan, result: Compressed) -> list[StoredTensor]:
    tensors = []
    for name, matrix in result.matrices.items():
        tensors += plan.writer.tensors(model.stored_module(name), matrix)
    for name, values in result.vectors.items():
        tensors.append(floats(model.stored_vector(name), values, model.tensors.get(name).dtype))
    return tensors


def release(block: Module) -> None:
    """A finished block's weights are not needed again."""
    for linear in block.linears():
        linear.weights = ()


def assemble(model: SourceModel, plan: Plan, settings: Settings, work: Work) -> Result:
    """The output's folder, from the finished layers and what of the source stays as it is."""
    finished = work.finished()
    tensors = [*model.untouched({one.name for one in finished}, plan.rounded), *finished]
    folder = work.final()
    config: dict[str, Any] = {**model.config(), "quantization_config": plan.writer.config(plan.group, plan.plain)}
    with writing(work.out):
        write_model(folder, tensors)
        for path in model.companions():
            shutil.copyfile(path, folder / path.name)
        write_json(folder / "config.json", config)
        for name, value in plan.writer.companions(plan.group, plan.plain).items():
            write_json(folder / name, value)
    result = Result(
        work.out, plan.writer.name, settings.method, plan.group, work.done, len(plan.rounded), sum(one.data.nbytes for one in tensors),
        model.tensors.nbytes,
    )  # fmt: skip
    work.deliver()
    return result
