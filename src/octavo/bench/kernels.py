"""Each instruction of a model's step beside what this machine could do at best; and single products of any shape.

Knows the native program and its shapes, no requests, no queues, no engine: whoever asks brings the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from octavo.bench.costs import Cut, Limit, Work, cost_of, limit_of, memory_bytes, product_cost, sampling_cost
from octavo.bench.kernel_report import Figure, StepFigures
from octavo.bench.weights import random_weight
from octavo.errors import ConfigError
from octavo.ops.batch import I32, Batch
from octavo.ops.cpu.measure import Products
from octavo.ops.cpu.peaks import Peaks
from octavo.ops.cpu.program import CpuProgram
from octavo.ops.cpu.sampling import SampleInputs, sample
from octavo.ops.cpu.shapes import Shape

MOST_DECODED = 64  # more rows than that are a chunk of a prompt
LEAST_REPEATS, MOST_REPEATS = 3, 50
CACHES = 8  # copies of a weight are so many times what the last cache holds: of fewer, it keeps a part from turn to turn
LEAST_BYTES, MOST_COPIES = 256 << 20, 4096
F32 = NDArray[np.float32]
SOME_IDS = 200  # of the vocabulary, which has more; which tokens are computed has no say


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of one step with a clock around each instruction: of those, of sampling, and of all between and around them."""

    instructions: list[float]
    sampling: float
    rest: float


class StepBench:
    """Measures steps of a program whose KV pool holds `blocks_for(rows, context)` blocks at least, and nothing of value."""

    def __init__(self, program: CpuProgram, peaks: Peaks, seconds: float = 1.0) -> None:
        self._program = program
        self._peaks = peaks
        self._seconds = seconds
        self._groups = len(program.kv_layout.windows)
        self._fill()

    def measure(self, work: Work) -> StepFigures:
        """Once to warm, then about `seconds` of whole steps, and as many with a clock around each instruction."""
        batch, picked = self.batch(work), last_rows(work)

        def step() -> None:
            self._program.forward(batch)
            if work.picked:
                _greedy(self._program.logits(picked), self._program.isa)

        whole = _timed(step, self._seconds)
        profile = self._profile(batch, picked, len(whole))
        rest = median(run.rest for run in profile)
        return StepFigures(_step_name(work), work.tokens, work.cuts[0].length, median(whole), rest, self._figures(work, profile))

    def batch(self, work: Work) -> Batch:
        """As batch_of. Raises ConfigError where the pool is too small for it."""
        batch = batch_of(work, self._program.block_size, self._groups)
        if batch.block_table_GSB.size > self._program.num_blocks:
            raise ConfigError(f"{_step_name(work)}: needs {batch.block_table_GSB.size} KV blocks, the pool has {self._program.num_blocks}")
        return batch

    def _fill(self) -> None:
        """Computes one block and copies it to all others: memory that was never written is one page, and lies in the caches."""
        size, blocks = self._program.block_size, self._program.num_blocks
        self._program.forward(self.batch(Work((Cut(size, size),), 0)))
        for first in range(self._groups, blocks, 4096):
            target = range(first, min(first + 4096, blocks))
            self._program.copy_blocks([0] * len(target), target)

    def _profile(self, batch: Batch, picked: I32, repeats: int) -> list[Run]:
        program = self._program
        runs: list[Run] = []
        program.profile(True)
        for _ in range(repeats):
            began, sampling = time.perf_counter(), 0.0
            program.forward(batch)
            if len(picked):
                logits, before = program.logits(picked), time.perf_counter()
                _greedy(logits, program.isa)
                sampling = time.perf_counter() - before
            whole = time.perf_counter() - began
            spent = [seconds for _, seconds in program.take_profile()]
            runs.append(Run(spent, sampling, max(0.0, whole - sampling - sum(spent))))
        program.profile(False)
        return runs

    def _figures(self, work: Work, profile: Sequence[Run]) -> tuple[Figure, ...]:
        shapes = self._program.shapes
        step_bytes = memory_bytes(shapes, work)
        named: dict[str, list[tuple[Shape, float]]] = {}
        for shape, times in zip(shapes, zip(*(run.instructions for run in profile), strict=True), strict=True):
            if work.picked or not shape.picked:
                apart = shape.picked and work.picked != work.tokens  # the same product does other work on other rows
                named.setdefault(shape.name + (", picked rows" if apart else ""), []).append((shape, median(times)))
        figures = [self._figure(name, members, work, step_bytes) for name, members in named.items()]
        if work.picked:
            cost, seconds = sampling_cost(work.picked, self._program.vocab_size), median(run.sampling for run in profile)
            figures.append(Figure("sample greedily", work.picked, 1, seconds, cost, limit_of(cost, self._peaks, step_bytes)))
        return tuple(sorted(figures, key=lambda figure: -figure.seconds))

    def _figure(self, name: str, members: Sequence[tuple[Shape, float]], work: Work, step_bytes: float) -> Figure:
        costs = [cost_of(shape, work) for shape, _ in members]
        limits = [limit_of(cost, self._peaks, step_bytes) for cost in costs]
        total = sum(costs[1:], costs[0])
        first = members[0][0]
        limit = Limit(sum(each.seconds for each in limits), limits[0].bound)
        return Figure(name, work.picked if first.picked else work.tokens, len(members), sum(s for _, s in members), total, limit)


def batch_of(work: Work, block_size: int, groups: int = 1) -> Batch:
    """Every sequence and group of layers in blocks of its own, from block 0 on; positions are the last ones of each sequence."""
    columns = -(-max(cut.length for cut in work.cuts) // block_size)
    table = np.arange(groups * len(work.cuts) * columns, dtype=np.int32).reshape(groups, len(work.cuts), columns)
    positions = np.concatenate([np.arange(cut.length - cut.rows, cut.length, dtype=np.int32) for cut in work.cuts])
    owner = np.repeat(np.arange(len(work.cuts)), [cut.rows for cut in work.cuts])
    slots = table[:, owner, positions // block_size] * block_size + positions % block_size
    start = np.cumsum([0, *(cut.rows for cut in work.cuts)]).astype(np.int32)
    lengths = np.array([cut.length for cut in work.cuts], np.int32)
    return Batch(positions % SOME_IDS, positions, slots.astype(np.int32), start, lengths, table)


def works_of(rows: Sequence[int], context: int) -> list[Work]:
    """Few rows are sequences with one token each, `context` long with it; many are a prompt's first chunk, and one that ends at `context`."""
    works = []
    for count in rows:
        if count <= MOST_DECODED:
            works.append(Work((Cut(1, context),) * count, count))
            continue
        works += [Work((Cut(count, length),), 0) for length in sorted({count, max(count, context)})]
    return works


def blocks_for(works: Sequence[Work], block_size: int, groups: int) -> int:
    """KV blocks that the largest of the steps takes."""
    return max(groups * len(work.cuts) * -(-max(cut.length for cut in work.cuts) // block_size) for work in works)


def measure_products(
    kinds: Sequence[str], shapes: Sequence[tuple[int, int]], rows: Sequence[int], peaks: Peaks, isa: str = "", seconds: float = 0.1
) -> Iterator[Figure]:
    """Products with random weights (see random_weight) of each kind and shape (N, K), the quantisation of activations included.

    Weights are copied until they exceed the caches, as in a model, whose layers follow each other.
    """
    for kind in kinds:
        for n, k in shapes:
            weight = random_weight(kind, n, k)
            copies = -(-max(CACHES * peaks.cache_bytes, LEAST_BYTES) // weight.nbytes)
            products = Products(weight, min(copies, MOST_COPIES), isa)
            shape = Shape("linear", kind=weight.kind, n=n, k=k, weight_bytes=products.weight_bytes)
            for count in rows:
                x = np.random.default_rng(1).standard_normal((count, k), np.float32)
                cost = product_cost(shape, count, float(4 * count * (n + k)))
                limit = limit_of(cost, peaks, float(products.all_bytes))
                yield Figure(f"{kind} {n}x{k}", count, 1, products.seconds(x, seconds), cost, limit)


def _timed(run: Callable[[], object], seconds: float) -> list[float]:
    run()
    times: list[float] = []
    while len(times) < LEAST_REPEATS or (sum(times) < seconds and len(times) < MOST_REPEATS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times


def _step_name(work: Work) -> str:
    cut = work.cuts[0]
    if cut.rows == 1:
        return f"decode of {len(work.cuts)}, {cut.length} tokens each"
    return f"prefill of {cut.rows}" + (f" behind {cut.length - cut.rows}" if cut.length > cut.rows else "")


def last_rows(work: Work) -> I32:
    """Of each sequence its last one, where logits are wanted."""
    ends = np.cumsum([cut.rows for cut in work.cuts]) - 1
    return ends[: work.picked].astype(np.int32)


def _greedy(logits_RV: F32, isa: str) -> None:
    """As a step of greedy requests samples; the logits stay as they are."""
    count = len(logits_RV)
    zeros, ones, ids = np.zeros(count, np.float32), np.ones(count, np.float32), np.arange(count, dtype=np.uint64)
    off = np.zeros(count, np.int32)
    sample(logits_RV, SampleInputs(zeros, off, ones, zeros, zeros, zeros, ones, ids, ids, off - 1), isa)
