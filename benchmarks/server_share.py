"""What the API process takes beside the engine: CPU time and writes per token, delay of the first token, memory.

Starts a server, streams completions from it, and compares the books of its two processes before and after. Targets: at 32 streams below 15 % of a core
per 1,000 tokens/s, one write per stream and step, the first token of a lone request within 5 ms of the prefill's own time, and below 300 MB beside the KV
pool. The prefill's own time is that of the same requests as the engine's books have it: from its first step to the first token.

    python benchmarks/server_share.py [MODEL] [--streams 1 32] [--tokens 256] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from local_server import MB, NO_DRAFTS, LocalServer, Memory, Usage, id_requests, started

from octavo.bench.http import Target, get
from octavo.bench.load import Run, closed_loop, model_of
from octavo.bench.report import summarise

VOCAB = 4096  # ids that every model has
PREFILL = re.compile(r"^vllm:request_prefill_time_seconds_(sum|count)\{[^}]*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Share:
    """One run at a number of streams. Writes are the API process's, per token."""

    streams: int
    tokens_per_second: float
    api_us_per_token: float
    engine_us_per_token: float
    writes_per_token: float
    ttft_ms: float | None

    @property
    def api_percent(self) -> float:
        """Of a core, per 1,000 tokens/s."""
        return self.api_us_per_token / 10


async def measure(server: LocalServer, model: str, streams: int, tokens: int, seed: int) -> Share:
    requests = id_requests(2 * streams if streams > 1 else 4, 16, tokens, VOCAB, seed)
    before = Usage.of(server.api_pid), Usage.of(server.engine_pid)
    run: Run = await closed_loop(server.target, model, requests, streams, gauges=False)
    api, engine = Usage.of(server.api_pid).since(before[0]), Usage.of(server.engine_pid).since(before[1])
    summary = summarise("", run)
    assert not summary.num_failed, summary.errors
    made = summary.num_output_tokens
    return Share(
        streams, summary.output_tokens_per_second, api.cpu_seconds / made * 1e6, engine.cpu_seconds / made * 1e6, api.num_writes / made,
        summary.ttft_ms.p50,
    )  # fmt: skip


async def prefill_books(target: Target) -> tuple[float, float]:
    """Seconds and number of the prefills that the server has counted."""
    _, page = await get(target, "/metrics")
    found = dict(PREFILL.findall(page.decode()))
    return float(found.get("sum", 0)), float(found.get("count", 0))


async def first_token(server: LocalServer, model: str, num_prompt: int, count: int, seed: int) -> dict[str, float]:
    """Of lone requests for one token: what their client waits, and the prefill's own part of it. Milliseconds, means."""
    sum_before, count_before = await prefill_books(server.target)
    run = await closed_loop(server.target, model, id_requests(count, num_prompt, 2, VOCAB, seed), 1, gauges=False)
    sum_after, count_after = await prefill_books(server.target)
    waited = sum(record.stamps[0] - record.began for record in run.records) / len(run.records)
    own = (sum_after - sum_before) / (count_after - count_before)
    return {"prompt": num_prompt, "ttft_ms": waited * 1e3, "prefill_ms": own * 1e3, "difference_ms": (waited - own) * 1e3}


async def measure_all(server: LocalServer, args: argparse.Namespace) -> dict[str, Any]:
    model = await model_of(server.target)
    await closed_loop(server.target, model, id_requests(4, 16, 16, VOCAB, 99), 2, gauges=False)
    shares = []
    for streams in args.streams:
        runs = [await measure(server, model, streams, args.tokens, 1000 * streams + repeat) for repeat in range(args.repeats)]
        shares.append(sorted(runs, key=lambda run: run.api_us_per_token)[len(runs) // 2])
    first = [await first_token(server, model, n, 12, n) for n in (16, 128, 448)]
    return {"shares": [asdict(share) for share in shares], "first_token": first}


def memory_of(server: LocalServer) -> dict[str, Memory]:
    return {"API": Memory.of(server.api_pid), "engine": server.engine_memory}


def report(figures: dict[str, Any], before: dict[str, Memory], after: dict[str, Memory]) -> None:
    print("| streams | tokens/s | API: us/token | % of a core per 1,000 tokens/s | writes/token | engine: us/token |\n|--:|--:|--:|--:|--:|--:|")
    for share in figures["shares"]:
        print(
            f"| {share['streams']} | {share['tokens_per_second']:,.0f} | {share['api_us_per_token']:.0f} | {share['api_us_per_token'] / 10:.1f} "
            f"| {share['writes_per_token']:.2f} | {share['engine_us_per_token']:.0f} |"
        )
    print("\n| prompt | TTFT ms | prefill's own ms | difference ms |\n|--:|--:|--:|--:|")
    for row in figures["first_token"]:
        print(f"| {row['prompt']} | {row['ttft_ms']:.1f} | {row['prefill_ms']:.1f} | {row['difference_ms']:.1f} |")
    print("\n| process | MB when ready | MB after the load, without KV | of them mapped files | KV resident | most resident |\n|---|--:|--:|--:|--:|--:|")
    for name, then in before.items():
        now = after[name]
        print(
            f"| {name} | {then.without_pool / MB:.0f} | {now.without_pool / MB:.0f} | {now.of_files / MB:.0f} | {now.pool / MB:.0f} | {now.peak / MB:.0f} |"
        )
    print(f"| both | {sum(m.without_pool for m in before.values()) / MB:.0f} | {sum(m.without_pool for m in after.values()) / MB:.0f} | | | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the middle one counts")
    parser.add_argument("--kv-cache-memory", default="512M")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with started(args.model, "--kv-cache-memory", args.kv_cache_memory, *NO_DRAFTS) as server:
        before = memory_of(server)
        figures = asyncio.run(measure_all(server, args))
        after = memory_of(server)
    report(figures, before, after)
    if args.json:
        memory = {name: {"ready": asdict(before[name]), "loaded": asdict(after[name])} for name in before}
        args.json.write_text(json.dumps({"model": args.model, **figures, "memory": memory}, indent=2) + "\n")


if __name__ == "__main__":
    main()
