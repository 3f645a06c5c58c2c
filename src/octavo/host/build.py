"""The composition root: from options and a path to an engine. The only place that knows every room."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.layers import Decoder
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import ModelSource, source_at
from octavo.models import build_model
from octavo.ops.cpu.program import CpuProgram
from octavo.ops.cpu.threads import available_cpus, set_num_threads
from octavo.ops.packed import WeightKind
from octavo.protocol import EngineReady, Phase
from octavo.quantization import ON_LOAD
from octavo.runner.reference import ReferenceProgram
from octavo.runner.runner import ModelRunner


@dataclass(slots=True)
class Built:
    """An engine's two halves, and what its client is told."""

    core: EngineCore
    runner: ModelRunner
    ready: EngineReady
    program: CpuProgram | ReferenceProgram


class Stopwatch:
    """Phases of the start, in order."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.phases: list[Phase] = []

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.phases.append(Phase(name, now - self._last))
        self._last = now


def build_engine(args: EngineArgs, model_path: str) -> Built:
    """Loads the model at `model_path` (a folder or a .gguf file) and makes its engine.

    Raises ConfigError or ModelFileError, naming option, file, key or tensor.
    """
    watch = Stopwatch()
    source: ModelSource = source_at(Path(model_path), args.model, args.load_format)
    hf = load_hf_config(source)
    model = build_model(hf)
    watch.lap("read configuration")
    checkpoint = open_checkpoint(source, hf, args.dtype, args.quantization, args.quantize_embeddings)
    report = load_weights(model, checkpoint, args.num_threads or available_cpus())
    if report.left_out:
        print(f"{args.model}: {len(report.left_out)} tensors are left out ({report.left_out[0]}, ...): only text is served", file=sys.stderr)
    watch.lap(f"round weights to {checkpoint.format_name}" if checkpoint.format_name in ON_LOAD else "map weights")

    kv_dtype = args.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = "float32" if all(w.kind is WeightKind.F32 for m in model.linears() for w in m.weights) else "bfloat16"
    config = EngineConfig.resolve(
        args,
        context_length=model.context_length,
        kv_bytes_per_token=model.kv_layout.bytes_per_token(kv_dtype),
        kv_dtype=kv_dtype,
        num_cpus=available_cpus(),
        windows=model.kv_layout.windows,
    )
    set_num_threads(config.device.num_threads, config.device.pin_threads)
    program = _program(model, config)
    watch.lap("pack weights")

    core = EngineCore(config.scheduler, config.cache, model.vocab_size)
    runner = ModelRunner(program, config.cache.block_size, config.scheduler.max_num_seqs, config.device.isa)
    backend = f"cpu {program.isa}" if isinstance(program, CpuProgram) else "numpy reference"
    block_bytes = model.kv_layout.bytes_per_token(kv_dtype) * config.cache.block_size
    ready = EngineReady(
        max_model_len=config.scheduler.max_model_len,
        vocab_size=model.vocab_size,
        block_size=config.cache.block_size,
        num_blocks=config.cache.num_blocks,
        kv_cache_bytes=config.cache.num_blocks * block_bytes,
        kv_cache_tokens=config.cache.num_kv_tokens(config.scheduler.max_model_len, config.scheduler.max_num_batched_tokens),
        weights_bytes=report.weights_bytes,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        num_threads=config.device.num_threads,
        backend=f"{backend}, {config.device.num_threads} threads",
        phases=watch.phases,
        pid=os.getpid(),
        weights_fp16_bytes=report.fp16_bytes,
    )
    return Built(core, runner, ready, program)


def _program(model: Decoder, config: EngineConfig) -> CpuProgram | ReferenceProgram:
    limits = config.scheduler
    max_positions = limits.max_model_len
    if config.device.backend == "reference":
        return ReferenceProgram(
            model, num_blocks=config.cache.num_blocks, block_size=config.cache.block_size, kv_dtype=config.kv_dtype,
            max_rows=limits.max_num_rows, max_positions=max_positions,
        )  # fmt: skip
    return CpuProgram(
        model, num_blocks=config.cache.num_blocks, block_size=config.cache.block_size, kv_dtype=config.kv_dtype,
        max_tokens=limits.max_num_batched_tokens, max_rows=limits.max_num_rows, max_positions=max_positions, isa=config.device.isa,
        takes_weights=True,
    )  # fmt: skip
