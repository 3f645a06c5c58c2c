"""Models of known shapes with random weights, loaded and served on this machine: start, memory beside the fp16 size, and speed beside the limit that
reading the weights sets.

Each is written, served, measured and deleted again; the 7B one needs 6 GB of disk and of memory. A decode step reads all packed weights but the
embedding, so measured bandwidth / those bytes is the most steps per second at one stream.

    python benchmarks/big_models.py FOLDER [--models llama-3.2-1b:bf16 llama-3.2-1b:gptq qwen2.5-7b:gptq] [--keep] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import make_random
from local_server import MB, NO_DRAFTS, LocalServer, Memory, id_requests, started

from octavo.bench.load import closed_loop, model_of
from octavo.bench.report import Summary, summarise
from octavo.config import EngineArgs
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import open_checkpoint
from octavo.loader.resolve import resolve_model
from octavo.models import build_model
from octavo.ops.cpu.measure import measure_peaks
from octavo.ops.cpu.threads import available_cpus, set_num_threads

MODELS = ("llama-3.2-1b:bf16", "llama-3.2-1b:gptq", "qwen2.5-7b:gptq")
STREAMS = (1, 8, 32)
PREFILL = 128
VOCAB = 4096
LARGE = 2e9  # packed bytes above which fewer tokens are asked for


def bandwidth() -> float:
    """Bytes per second that all cores read together."""
    set_num_threads(available_cpus())
    return measure_peaks().memory


def breakdown(folder: Path) -> dict[str, dict[str, float]]:
    """Of linears, embedding and head: bytes that they would take in fp16, and that they take as the loader keeps them. Of the layers, which are all
    alike, the first is loaded; norms and biases are left out: they are thousandths."""
    source = resolve_model(str(folder))
    hf = load_hf_config(source)
    decoder = build_model(hf)
    checkpoint = open_checkpoint(source, hf, rounds_embeddings=EngineArgs().quantize_embeddings)
    fp16: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    seen: set[str] = set()
    for linear in decoder.linears():
        kind = "embedding" if linear is decoder.embed.table else "head" if linear is decoder.head else "linears"
        for name, n in zip(linear.names, linear.n_each, strict=True):
            if name not in seen and (kind != "linears" or ".layers.0." in name):
                times = len(decoder.blocks) if kind == "linears" else 1
                fp16[kind] += 2 * n * linear.k * times
                kept[kind] += checkpoint.packed(name, n, linear.k).nbytes * times
            seen.add(name)
    return {kind: {"fp16": fp16[kind], "kept": kept[kind], "share": kept[kind] / fp16[kind]} for kind in fp16}


async def speeds(server: LocalServer, is_large: bool) -> dict[str, Any]:
    name, few = await model_of(server.target), 8 if is_large else 32
    await closed_loop(server.target, name, id_requests(1, 8, 3, VOCAB, seed=99), 1, gauges=False)
    figures: dict[str, Any] = {"decode_tokens_per_second": {}}
    for streams in STREAMS:
        run = await closed_loop(server.target, name, id_requests(streams, 8, few, VOCAB, seed=streams), streams, gauges=False)
        figures["decode_tokens_per_second"][streams] = streams / (_checked(summarise("", run)).itl_ms.p50 or 0.0) * 1e3
    run = await closed_loop(server.target, name, id_requests(2, PREFILL, 2, VOCAB, seed=77), 1, gauges=False)
    figures["prefill_tokens_per_second"] = PREFILL / (_checked(summarise("", run)).ttft_ms.p50 or 0.0) * 1e3
    return figures


def _checked(summary: Summary) -> Summary:
    assert not summary.num_failed, summary.errors
    return summary


def measure(folder: Path, shape: str, quantised: bool) -> dict[str, Any]:
    config = make_random.SHAPES[shape]
    parts = breakdown(folder)
    read = sum(part["kept"] for kind, part in parts.items() if kind != "embedding" or config["tie_word_embeddings"])
    with started(str(folder), "--kv-cache-memory", "256M", "--max-model-len", "2048", *NO_DRAFTS) as server:
        print(f"{shape}: ready in {server.start_seconds:.1f} s", file=sys.stderr, flush=True)
        memory = server.engine_memory
        api = Memory.of(server.api_pid)
        figures = asyncio.run(speeds(server, read > LARGE))
        packed_mb, fp16_mb = server.weights_mb
        greeting = server.greeting
        loaded = server.engine_memory
        gb_s = bandwidth() / 1e9
    return figures | {
        "shape": shape, "quantised": quantised, "start_seconds": server.start_seconds, "packed_mb": packed_mb, "fp16_mb": fp16_mb, "parts": parts,
        "engine_mb": memory.without_pool / MB, "engine_loaded_mb": loaded.without_pool / MB, "of_files_mb": loaded.of_files / MB, "peak_mb": loaded.peak / MB,
        "api_mb": api.proportional / MB, "read_mb": read / MB, "gb_s": gb_s, "limit": gb_s * 1e9 / read, "greeting": greeting,
    }  # fmt: skip


def report(figures: dict[str, Any]) -> None:
    kind = "4 bits" if figures["quantised"] else "bf16"
    share = figures["packed_mb"] / figures["fp16_mb"]
    print(f"### {figures['shape']}, {kind}\n")
    print(f"ready in {figures['start_seconds']:.1f} s; weights {figures['packed_mb']:,.0f} MB, in fp16 {figures['fp16_mb']:,.0f} MB ({share:.1%})")
    print(
        f"resident: engine {figures['engine_mb']:,.0f} MB when ready, {figures['engine_loaded_mb']:,.0f} MB after the load without KV "
        f"({figures['of_files_mb']:,.0f} MB of it mapped files), at most {figures['peak_mb']:,.0f} MB; API process {figures['api_mb']:.0f} MB\n"
    )
    print("| part | fp16 MB | kept MB | share |\n|---|--:|--:|--:|")
    total = [sum(part[key] for part in figures["parts"].values()) for key in ("fp16", "kept")]
    for name, part in [*figures["parts"].items(), ("all", {"fp16": total[0], "kept": total[1], "share": total[1] / total[0]})]:
        print(f"| {name} | {part['fp16'] / MB:,.1f} | {part['kept'] / MB:,.1f} | {part['share']:.1%} |")
    limit = figures["limit"]
    print(f"\nread in a step: {figures['read_mb']:,.0f} MB; memory reads {figures['gb_s']:.1f} GB/s: at most {limit:.1f} steps/s\n")
    print("| streams | decode tokens/s | steps/s of the limit |\n|--:|--:|--:|")
    for streams, rate in figures["decode_tokens_per_second"].items():
        print(f"| {streams} | {rate:.1f} | {rate / streams / limit:.0%} |")
    print(f"\nprefill of {PREFILL} tokens: {figures['prefill_tokens_per_second']:.1f} tokens/s\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models are written, each in a folder of its own")
    parser.add_argument("--models", nargs="+", default=MODELS, help="SHAPE:FORMAT")
    parser.add_argument("--keep", action="store_true", help="do not delete them, and use those that are there")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measured = []
    for model in args.models:
        shape, form = model.split(":")
        folder = args.folder / f"{shape}-{form}"
        if not (args.keep and folder.exists()):
            began = time.perf_counter()
            make_random.write_model(folder, shape, form == "gptq")
            print(f"{model}: written in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        try:
            measured.append(measure(folder, shape, form == "gptq"))
        finally:
            if not args.keep:
                shutil.rmtree(folder)
        report(measured[-1])
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
