"""How the engine's costs grow: with concurrency, context, the queue, the KV pool and the shared part of a prompt.

Writes of each a JSON file and a picture into a folder and prints a table. All of it takes some ten minutes on two cores; run it on a quiet machine.

    python benchmarks/growth.py [all|concurrency|context|scheduling|pool|prefix ...] [--out FOLDER] [--model MODEL] [--no-plot]

concurrency   output tokens/s of a server with 1 to 256 streams at once: prompts of 32 tokens, outputs of 48
context       one decode step behind 128 to 8,192 tokens, and the prefill of as many, in chunks of 512. The model's own context does not matter here
scheduling    the engine room's part of a step of 32 decodes, with 10 to 10,000 requests waiting and 1,000 to 1,000,000 KV blocks
pool          the pool of blocks itself: its making, and finding a block when all of them hold cached prefixes
prefix        time to the first token of a prompt of 2,000 tokens of which 128 to 1,920 were computed before
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import scheduler
from figures import Curve, Figures
from local_server import MB, NO_DRAFTS, id_requests, started

from octavo import LLM, SamplingParams
from octavo.bench.costs import Cut, Work
from octavo.bench.http import Target
from octavo.bench.kernels import batch_of, last_rows
from octavo.bench.load import closed_loop, model_of
from octavo.bench.report import summarise
from octavo.engine.block_pool import BlockPool, hash_block, hash_root
from octavo.engine.core import EngineCore
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import resolve_model
from octavo.models import build_model
from octavo.ops.batch import Batch
from octavo.ops.cpu.program import CpuProgram
from octavo.ops.cpu.threads import available_cpus, set_num_threads

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 8)
BLOCK = 16  # tokens of a KV block
CHUNK = 512
SHARED = (0, 128, 256, 512, 1024, 1536, 1920)
PROMPT = 2000
POOLS = (1_000, 10_000, 100_000, 1_000_000)  # blocks
VOCAB = 4096  # ids that every model has


# --- concurrency ---


def concurrency(model: str, levels: Sequence[int]) -> list[Figures]:
    with started(model, "--kv-cache-memory", "1G", "--max-num-seqs", "256", *NO_DRAFTS) as server:
        rows = asyncio.run(measure_levels(server.target, levels))
    columns = {
        "streams": ("streams", "d"), "tokens_per_second": ("output tokens/s", ",.0f"), "itl_ms": ("ITL p50 ms", ".1f"), "itl_p99_ms": ("ITL p99 ms", ".1f"),
        "ttft_ms": ("TTFT p50 ms", ",.0f"), "ttft_p99_ms": ("TTFT p99 ms", ",.0f"),
    }  # fmt: skip
    curves = [Curve("tokens_per_second", "output tokens/s")]
    return [Figures("concurrency", "Output tokens/s over concurrency", columns, rows, "streams", curves, "output tokens/s")]


async def measure_levels(target: Target, levels: Sequence[int]) -> list[dict[str, Any]]:
    name = await model_of(target)
    await closed_loop(target, name, id_requests(4, 32, 16, VOCAB, seed=1), 2, gauges=False)
    rows = []
    for level in levels:
        requests = id_requests(max(4, 2 * level), 32, 48, VOCAB, seed=level + 1)
        summary = summarise("", await closed_loop(target, name, requests, level, gauges=False))
        assert not summary.num_failed, summary.errors
        row = {"streams": level, "tokens_per_second": summary.output_tokens_per_second}
        rows.append(row | {"itl_ms": summary.itl_ms.p50, "itl_p99_ms": summary.itl_ms.p99, "ttft_ms": summary.ttft_ms.p50, "ttft_p99_ms": summary.ttft_ms.p99})
    return rows


# --- context ---


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model's program with room for BATCHES[-1] sequences of the longest context, whatever context the model itself has."""

    program: CpuProgram
    weight_bytes: int  # that a decode step reads
    kv_bytes: int  # of a token


def load(model: str) -> Loaded:
    source = resolve_model(model)
    hf = load_hf_config(source)
    decoder = build_model(hf)
    load_weights(decoder, open_checkpoint(source, hf), available_cpus())
    set_num_threads(available_cpus())
    weight_bytes = sum(weight.nbytes for linear in decoder.linears() if linear is not decoder.embed.table for weight in linear.weights)
    blocks = max(BATCHES) * (CONTEXTS[-1] // BLOCK + 1)
    program = CpuProgram(
        decoder, num_blocks=blocks, block_size=BLOCK, kv_dtype="bfloat16", max_tokens=CHUNK, max_rows=max(BATCHES), max_positions=CONTEXTS[-1] + BLOCK
    )
    return Loaded(program, weight_bytes, decoder.kv_layout.bytes_per_token("bfloat16"))


def context(model: str, _: Sequence[int]) -> list[Figures]:
    loaded = load(model)
    rows = [{"context": length, "prefill_s": spent} for length, spent in prefills(loaded.program)]
    fill_pool(loaded.program)
    for row in rows:
        length = int(row["context"])
        row["prefill_tokens_per_second"] = length / row["prefill_s"]
        for size in BATCHES:
            spent = decode_seconds(loaded.program, size, length)
            row[f"decode_{size}_ms"] = spent * 1e3
            row[f"decode_{size}_gb_s"] = (loaded.weight_bytes + size * length * loaded.kv_bytes) / spent / 1e9
    columns = {"context": ("context tokens", ",d"), "prefill_s": ("prefill s", ".3f"), "prefill_tokens_per_second": ("prefill tokens/s", ",.0f")}
    for size in BATCHES:
        columns |= {f"decode_{size}_ms": (f"decode of {size}: ms", ".2f"), f"decode_{size}_gb_s": (f"decode of {size}: GB/s", ".1f")}
    decode = [Curve(f"decode_{size}_ms", f"a decode step of {size}") for size in BATCHES]
    return [
        Figures("context_decode", "A decode step over its context", columns, rows, "context", decode, "milliseconds"),
        Figures("context_prefill", "Prefill over the prompt", columns, rows, "context", [Curve("prefill_s", "the whole prompt")], "seconds", "xy"),
    ]


def chunk_batch(start: int, end: int) -> Batch:
    """The tokens start..end of one sequence, those before being cached."""
    return batch_of(Work((Cut(end - start, end),), 0), BLOCK)


def prefills(program: CpuProgram) -> Iterator[tuple[int, float]]:
    """(tokens, seconds) of prompts as long as each context. One pass over the longest gives all that are multiples of a chunk."""
    program.forward(chunk_batch(0, CHUNK))
    for length in CONTEXTS:
        if length < CHUNK:
            yield length, seconds(lambda length=length: program.forward(chunk_batch(0, length)), 5)
    spent = 0.0
    for start in range(0, CONTEXTS[-1], CHUNK):
        spent += seconds(lambda start=start: program.forward(chunk_batch(start, start + CHUNK)), 3 if start < 2048 else 1)
        if start + CHUNK in CONTEXTS:
            yield start + CHUNK, spent


def fill_pool(program: CpuProgram) -> None:
    """Copies the sequence that lies in the first blocks over all others: memory that was never written costs nothing to read."""
    blocks = CONTEXTS[-1] // BLOCK + 1
    for copy in range(1, max(BATCHES)):
        program.copy_blocks(list(range(blocks)), list(range(copy * blocks, (copy + 1) * blocks)))


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median of so many runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def decode_seconds(program: CpuProgram, size: int, length: int) -> float:
    work = Work((Cut(1, length + 1),) * size, size)
    batch, rows = batch_of(work, BLOCK), last_rows(work)

    def step() -> None:
        program.forward(batch)
        program.logits(rows)

    step()
    return seconds(step, 11)


# --- the engine room ---


def scheduling(*_: object) -> list[Figures]:
    rows: list[dict[str, Any]] = []
    for is_full_of_seats, wait_for in ((True, "a seat"), (False, "memory")):
        for waiting in (10, 100, 1_000, 10_000):
            row: dict[str, Any] = {"wait_for": wait_for, "waiting": waiting}
            for blocks in POOLS:
                core = scheduler.build(32, waiting, blocks, 200, is_full_of_seats, (0,))
                row[f"us_{blocks}"] = sum(scheduler.measure(core, 32, 200))
            row["queue_us"] = queue_us(core, waiting)
            rows.append(row)
            del core
            gc.collect()
    columns = {"wait_for": ("they wait for", ""), "waiting": ("requests waiting", ",d")}
    columns |= {f"us_{blocks}": (f"us of a step, {blocks:,} blocks", ".0f") for blocks in POOLS} | {"queue_us": ("us to leave the queue and to join", ".0f")}
    curves = [Curve(f"us_{blocks}", f"{blocks:,} blocks", {"wait_for": "memory"}) for blocks in POOLS]
    return [Figures("scheduling", "Planning a step of 32 decodes", columns, rows, "waiting", curves, "microseconds")]


def queue_us(core: EngineCore, waiting: int) -> float:
    """Of aborting a waiting request and adding another."""
    spent = []
    for index in range(waiting // 2, waiting // 2 + min(100, waiting // 2)):
        began = time.perf_counter()
        core.abort([f"r{32 + index}"])
        core.add(scheduler.request(f"again{index}", 32 + index, SamplingParams(max_tokens=100)), 0.0)
        spent.append(time.perf_counter() - began)
    return sum(spent) / len(spent) * 1e6


def pool(*_: object) -> list[Figures]:
    rows = []
    for blocks in POOLS:
        gc.collect()
        before, began = resident(), time.perf_counter()
        made = BlockPool(blocks)
        make_ms = (time.perf_counter() - began) * 1e3
        empty = resident() - before
        cache_all(made)
        spent = []
        for _ in range(1000):
            began = time.perf_counter()
            taken = made.allocate(1)
            spent.append(time.perf_counter() - began)
            made.release(taken)
        rows.append({"blocks": blocks, "make_ms": make_ms, "mb": empty / MB, "cached_mb": (resident() - before) / MB, "evict_us": median(spent) * 1e6})
        del made
    columns = {
        "blocks": ("blocks", ",d"), "make_ms": ("made in ms", ".1f"), "mb": ("MB", ".0f"), "cached_mb": ("MB with all of them cached", ".0f"),
        "evict_us": ("a block by eviction, us", ".1f"),
    }  # fmt: skip
    return [Figures("pool", "The pool's books", columns, rows, "blocks", [Curve("evict_us", "a block by eviction")], "microseconds")]


def cache_all(made: BlockPool) -> None:
    block_hash = hash_root(None)
    ids = made.allocate(made.num_blocks)
    for block_id in ids:
        block_hash = hash_block(block_hash, [block_id])
        made.publish(block_id, block_hash)
    made.release(ids)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# --- prefix ---


def prefix(model: str, _: Sequence[int]) -> list[Figures]:
    llm = LLM(model, kv_cache_memory="1G", max_model_len=2048)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def ids(count: int) -> list[int]:
        return [rng.randrange(500, VOCAB) for _ in range(count)]

    def first_token(prompt: list[int]) -> tuple[float, int]:
        began = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - began, output.num_cached_tokens or 0

    first_token(ids(64))
    rows: list[dict[str, Any]] = []
    for length in SHARED:
        shared = ids(length)
        if shared:
            first_token(shared)
        spent, cached = zip(*(first_token(shared + ids(PROMPT - length)) for _ in range(2)), strict=True)
        rows.append({"shared": length, "cached": cached[-1], "ttft_ms": median(spent) * 1e3})
    for row in rows:
        row["share_of_miss"] = row["ttft_ms"] / rows[0]["ttft_ms"]
        row["share_of_tokens"] = 1 - row["cached"] / PROMPT
    columns = {
        "shared": ("shared tokens", ",d"), "cached": ("found", ",d"), "ttft_ms": ("first token ms", ",.0f"), "share_of_miss": ("of a miss", ".0%"),
        "share_of_tokens": ("tokens computed", ".0%"),
    }  # fmt: skip
    title = f"First token of a prompt of {PROMPT:,} tokens"
    return [Figures("prefix", title, columns, rows, "shared", [Curve("ttft_ms", "with a prefix that was computed before")], "milliseconds", "")]


PARTS: dict[str, Callable[[str, Sequence[int]], list[Figures]]] = {
    "concurrency": concurrency, "context": context, "scheduling": scheduling, "pool": pool, "prefix": prefix,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["all", *PARTS], default="all")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--levels", nargs="+", type=int, default=LEVELS, metavar="N", help="streams at once, for the part concurrency")
    parser.add_argument("--out", type=Path, default=Path("growth"))
    parser.add_argument("--no-plot", action="store_true", help="no pictures: they need matplotlib")
    args = parser.parse_args()
    for name, part in PARTS.items():
        if name in args.parts or "all" in args.parts:
            began = time.perf_counter()
            figures = part(args.model, args.levels)
            for each in figures:
                each.save(args.out, not args.no_plot)
            print(f"### {name} ({time.perf_counter() - began:.0f} s)\n\n{figures[0].table()}\n", flush=True)


if __name__ == "__main__":
    main()
