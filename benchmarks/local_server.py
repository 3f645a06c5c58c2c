"""A server of this machine as a measured object: `octavo serve` in processes of its own, their CPU time, memory and writes. Needs Linux's /proc."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.bench.datasets import BenchRequest
from octavo.bench.http import Target

ADDRESS = re.compile(r"is served on (http://\S+)")
FIRST_ID = 400  # of random prompts: behind bytes and special tokens
MB = 1e6
NO_DRAFTS = ("--num-speculative-tokens", "0")  # for what is to depend on the machine and not on how much the generated text repeats itself


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process since its start: seconds of CPU over all threads, and calls that write."""

    cpu_seconds: float
    num_writes: int

    @staticmethod
    def of(pid: int) -> Usage:
        nanoseconds = sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        writes = re.search(r"^syscw: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
        return Usage(nanoseconds * 1e-9, int(writes[1]) if writes else 0)

    def since(self, earlier: Usage) -> Usage:
        return Usage(self.cpu_seconds - earlier.cpu_seconds, self.num_writes - earlier.num_writes)


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes. proportional: pages shared with others divided among them (PSS). of_files: the part of it that the system can drop and read again.
    peak: the most that was resident. pool: what of the KV pool is resident."""

    proportional: int
    of_files: int
    peak: int
    pool: int = 0

    @property
    def without_pool(self) -> int:
        return self.proportional - self.pool

    @staticmethod
    def of(pid: int, pool_start: str = "") -> Memory:
        rollup = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        pool = next((each.resident for each in _anonymous(pid) if each.start == pool_start), 0)
        return Memory(int(rollup["Pss"]) * 1024, int(rollup["Pss_File"]) * 1024, int(peak[1]) * 1024 if peak else 0, pool)


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: str
    size: int
    resident: int


def _anonymous(pid: int) -> list[_Mapping]:
    mapped = re.compile(r"^([0-9a-f]+)-\S+ \S+ \S+ \S+ 0 *\nSize: +(\d+) kB\n(?:.*\n)*?Rss: +(\d+) kB", re.MULTILINE)
    return [_Mapping(start, int(size) * 1024, int(rss) * 1024) for start, size, rss in mapped.findall(Path(f"/proc/{pid}/smaps").read_text())]


def _pool_start(pid: int, size: int) -> str:
    """Where the KV pool of an engine begins that has not used it yet: of the mappings that could hold it, it is the least resident one."""
    fitting = [each for each in _anonymous(pid) if each.size >= size - (1 << 20)]
    return min(fitting, key=lambda each: each.resident).start if fitting else ""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """`greeting` is what it printed; the engine is the API process's child."""

    url: str
    api_pid: int
    engine_pid: int
    greeting: str
    start_seconds: float
    pool_start: str

    @property
    def engine_memory(self) -> Memory:
        return Memory.of(self.engine_pid, self.pool_start)

    @property
    def target(self) -> Target:
        return Target.parse(self.url)

    @property
    def kv_bytes(self) -> int:
        return int(float(self._told(r"KV cache ([\d,]+) MiB")) * 2**20)

    @property
    def weights_mb(self) -> tuple[float, float]:
        """As packed, and in fp16."""
        return self._told(r"weights +([\d,]+) MB"), self._told(r"MB, ([\d,]+) MB in fp16")

    def _told(self, pattern: str) -> float:
        found = re.search(pattern, self.greeting)
        assert found is not None, self.greeting
        return float(found[1].replace(",", ""))


@contextmanager
def started(model: str, *options: str) -> Iterator[LocalServer]:
    """A server with these options on a free port, ended afterwards. RuntimeError if it does not start."""
    command = [sys.executable, "-m", "octavo.cli", "serve", model, "--port", "0", "--log-level", "warning", *options]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        greeting, url = _greeted(process)
        seconds = time.perf_counter() - began
        server = LocalServer(url, process.pid, _child(process.pid), greeting, seconds, "")
        yield replace(server, pool_start=_pool_start(server.engine_pid, server.kv_bytes))
    finally:
        end(process, 10)


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes], seconds: float) -> None:
    """Asks a process to end, and ends it if it has not after so long."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _greeted(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(("  docs", "           engine process")):  # the last lines that say something of the start
            break
    found = ADDRESS.search("".join(lines))
    if found is None:
        raise RuntimeError(f"the server did not start: {''.join(lines)}")
    return "".join(lines), found[1]


def _child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])


def id_requests(count: int, num_prompt: int, num_output: int, vocab: int, seed: int = 0) -> list[BenchRequest]:
    """Prompts of exactly so many random tokens; no two begin alike."""
    rng = random.Random(seed)
    return [BenchRequest([rng.randrange(FIRST_ID, vocab) for _ in range(num_prompt)], num_output) for _ in range(count)]
