"""Servers beside each other on the same requests, in turn: A B C, A B C. Medians over the turns, and ratios to the first.

Each turn starts a server, waits until it is ready, loads it with `octavo bench serve`, and ends it. What it prints is Markdown.

    python benchmarks/peers.py --server octavo 'octavo serve --port {port}' \\
        --server llama.cpp 'llama-server -m MODEL.gguf --parallel 32 -t 2 -c 65536 -fa on --port {port}' \\
        [--turns 2] [--json FILE] [-- options of octavo bench serve]
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from local_server import MB, Memory, end

START_SECONDS = 300.0
END_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def served(command: str) -> Iterator[tuple[str, float, int]]:
    """A running server: its address, the seconds until it was ready, and its pid. RuntimeError if it ends before or takes too long."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    process = subprocess.Popen(shlex.split(command.format(port=port)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise RuntimeError(f"not ready: {command} (exit code {process.poll()}, after {time.monotonic() - began:.0f} s)")
            time.sleep(0.02)
        yield url, time.monotonic() - began, process.pid
    finally:
        end(process, END_SECONDS)


def is_ready(url: str) -> bool:
    """By /ready, or /health where there is no such route: with some servers that only says that they are alive."""
    status = status_of(f"{url}/ready")
    return (status_of(f"{url}/health") if status in (404, 405) else status) == 200


def status_of(url: str) -> int:
    """0: no answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return 0


def resident_mb(pid: int) -> float:
    """Of a process and all below it, shared pages divided among those that share them."""
    resident, below = 0, [pid]
    while below:
        pid = below.pop()
        try:
            resident += Memory.of(pid).proportional
            below += [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
        except OSError:
            continue  # it ended
    return resident / MB


def turn(name: str, command: str, options: Sequence[str]) -> dict[str, Any]:
    """One server, one time. Its first answer is not measured."""
    with served(command) as (url, ready, pid):
        bench = [sys.executable, "-m", "octavo.cli", "bench", "serve", "--url", url, "--json"]
        subprocess.run([*bench, "-c", "1", "--num-prompts", "1", "--input-len", "16", "--output-len", "8"], check=True, stdout=subprocess.DEVNULL)
        done = subprocess.run([*bench, *options], check=True, stdout=subprocess.PIPE, text=True)
        return {"name": name, "ready_s": ready, "resident_mb": resident_mb(pid), "levels": json.loads(done.stdout)}


def table(turns: Sequence[dict[str, Any]]) -> str:
    """A row for each load and server: medians over its turns."""
    lines = [
        "| load | server | output tokens/s | of the first | requests/s | TTFT mean / p99 ms | ITL p50 / p99 ms | TPOT ms | failed | ready s | resident MB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    names = list(dict.fromkeys(each["name"] for each in turns))
    for level in range(len(turns[0]["levels"])):
        first = None
        for name in names:
            own = [each for each in turns if each["name"] == name]
            runs = [each["levels"][level] for each in own]

            def mid(*keys: str, runs: Sequence[dict[str, Any]] = runs) -> float:
                return median(float(run[keys[0]][keys[1]] if len(keys) > 1 else run[keys[0]]) for run in runs)

            speed = mid("output_tokens_per_second")
            first = first or speed
            lines.append(
                f"| {runs[0]['label']} | {name} | {speed:,.1f} | {speed / first:.2f} | {mid('requests_per_second'):.2f} "
                f"| {mid('ttft_ms', 'mean'):,.0f} / {mid('ttft_ms', 'p99'):,.0f} | {mid('itl_ms', 'p50'):,.1f} / {mid('itl_ms', 'p99'):,.1f} "
                f"| {mid('tpot_ms', 'mean'):,.1f} | {sum(run['num_failed'] for run in runs)} "
                f"| {median(each['ready_s'] for each in own):.1f} | {median(each['resident_mb'] for each in own):,.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", nargs=2, action="append", required=True, metavar=("NAME", "COMMAND"))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of octavo bench serve, behind --")
    args = parser.parse_args()
    turns = []
    for _ in range(args.turns):
        for name, command in args.server:
            turns.append(turn(name, command, args.options))
            print(f"{name}: ready after {turns[-1]['ready_s']:.1f} s", file=sys.stderr)
            if args.json:
                args.json.write_text(json.dumps(turns, indent=1) + "\n")
    print(table(turns))


if __name__ == "__main__":
    main()
