"""A model's native program, with a KV pool for the steps that are to be measured. Builds as the engine does; runs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from octavo.bench.kernels import blocks_for, works_of
from octavo.config import EngineArgs, free_memory
from octavo.errors import ConfigError
from octavo.host.build import build_engine
from octavo.loader.hf_config import load_hf_config
from octavo.loader.resolve import resolve_model
from octavo.models import build_model
from octavo.ops.cpu.program import CpuProgram


def build_program(args: EngineArgs, rows: Sequence[int], context: int) -> tuple[CpuProgram, int]:
    """The program, and the length of its longest sequence: `context`, or the model's own if that is less.

    Sets the process's kernel threads. Raises ConfigError or ModelFileError.
    """
    source = resolve_model(args.model, revision=args.revision, download_dir=args.download_dir, load_format=args.load_format)
    model = build_model(load_hf_config(source))
    longest = min(context, model.context_length)
    works = works_of(rows, longest)
    most = max(work.tokens for work in works)
    if most > model.context_length and any(len(work.cuts) == 1 and work.tokens == most for work in works):
        raise ConfigError(f"rows = {most}: the model's context is {model.context_length} tokens")
    blocks = blocks_for(works, args.block_size, len(model.kv_layout.windows))
    # Of four bytes a number, which is the most: what is not written takes no memory.
    needed = blocks * args.block_size * model.kv_layout.bytes_per_token("float32")
    if needed / 2 > free_memory():
        raise ConfigError(f"context = {longest}: steps of {most} rows need {needed >> 21} MiB of KV blocks, more than is free; lower rows or context")
    sized = dataclasses.replace(
        args,
        max_model_len=max(longest, *(cut.length for work in works for cut in work.cuts)),
        kv_cache_memory=str(needed),
        max_num_batched_tokens=max(most, args.block_size),
        max_num_seqs=max(1, *(work.picked for work in works)),
    )
    program = build_engine(sized, str(source.path)).program
    if not isinstance(program, CpuProgram):
        raise ConfigError(f"backend = {args.backend!r}: only native kernels are measured")
    return program, longest
