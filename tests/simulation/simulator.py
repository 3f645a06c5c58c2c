"""The engine room under a seed: everything that a client, a device and bad luck can do to it, with its books checked at each step.

    Simulator(seed).run()    raises Violation, InvariantError or whatever the engine raised; the same seed gives the same run

A run has two phases. In the first, all faults are on: arrivals of every kind, aborts in any state, failing steps, failing requests,
code that raises inside the engine, resets of the prefix cache, crashes of the engine. In the second, nothing new comes and nothing
fails: all that is left must end within a bound, and nothing may be left over.

The two calls `schedule` and `update` are driven as the host does it; time is a counter.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fake_client import FakeClient, Stream, expect
from fake_runner import FakeRunner, Faults, StepFailed, Violation, first_seen, require

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.drafts import worth
from octavo.engine.pace import LEAST_SHARE
from octavo.engine.request import Request
from octavo.engine.scheduler import CAUTION_RISE, MAX_PREEMPTIONS
from octavo.engine.step_time import StepShape
from octavo.protocol import EngineCoreOutputs, EngineCoreRequest, ErrorKind, ModelRunnerOutput, SchedulerOutput
from octavo.sampling_params import SamplingParams

# Where a bomb may go off: these are called while one request is handled, in schedule and in update.
BOMB_SITES = (
    "hashes_of_full_blocks",
    "to_new_request",
    "num_prompt_logprobs_before",
    "take_new_prompt_logprobs",
    "end_reason",
)


class Bomb(Exception):
    """Raised inside the engine while it handles one request."""


class World:
    """The sizes and the rates of one run, drawn from its seed: most runs are small and crowded, some are roomy or calm."""

    def __init__(self, rng: random.Random, drafts_rng: random.Random) -> None:
        self.block_size = rng.choice((1, 2, 3, 4, 4, 8))
        self.max_model_len = rng.choice((2, 8, 24, 40, 60))
        self.max_num_batched_tokens = rng.choice((1, 4, 6, 8, 16, 64))
        self.windows = self._draw_windows(rng) if rng.random() < 0.6 else (0,)
        fits = self.most_blocks(self.max_model_len)  # one request of full length
        self.num_blocks = rng.choice((max(1, fits - 1), fits, fits + 1, fits + fits // 4, 2 * fits, 2 * fits, 5 * fits))
        self.max_num_seqs = rng.choice((1, 3, 8, 8, 16))
        self.seats = min(self.max_num_seqs, self.max_num_batched_tokens)
        self.max_num_queued_requests = rng.choice((1, 3, 30, 100))
        self.policy = rng.choice(("fcfs", "fcfs", "priority"))
        self.caching = rng.random() < 0.8
        self.vocab_size = rng.choice((2, 5, 50))
        self.num_steps = rng.choice((40, 80, 150))
        self.arrivals = rng.choice((0.1, 0.3, 0.6))
        self.longest_prompt = rng.choice((3, 12, 40))
        self.longest_output = rng.choice((3, 30, 60))
        self.stops = rng.choice(((0,), (0, 0, 0, 1), (0, 1, 2)))  # stop tokens of a request
        # Without caution the pool is overrun again and again: only the last bound on preemptions holds then.
        self.caution_rise = rng.choice((CAUTION_RISE, 0.0))
        self.max_preemptions = rng.choice((MAX_PREEMPTIONS, MAX_PREEMPTIONS, 2, 1, 0))
        self.scores = rng.choice((0.0, 0.2, 0.8))
        self.faults = rng.choice((0.0, 0.02, 0.1))
        self.aborts = rng.choice((0.0, 0.05, 0.2))
        self.families = rng.choice((0.0, 0.2, 0.6))
        self.disorder = rng.random() < 0.2  # requests that arrive late, before their elders
        self.itl_target_ms = rng.choice((0.0, 0.0, None, None, None, 1.0, 10.0, 100.0))
        self.timing = rng.choice(("modelled", "constant", "wild"))
        self.step_ms = [rng.choice((0.0, 1.0, rng.random())) for _ in range(5)]  # coefficients of the true step time
        # Of their own generator, so that other runs are what they were before there were drafts.
        self.num_speculative_tokens = drafts_rng.choice((0, 0, 1, 3, 8))
        self.guess = drafts_rng.choice((0.0, 0.5, 1.0))  # how often a draft is made whether it pays or not
        if rng.random() < 0.35:
            self._overrun(rng)
        elif rng.random() < 0.08:
            self._crowd_windows(rng)

    def _overrun(self, rng: random.Random) -> None:
        """Many want much at once, and the pool holds little more than one of them."""
        self.max_model_len = rng.choice((24, 40, 60))
        # With a small budget prompts take many steps, in which the requests before them grow.
        self.max_num_batched_tokens = rng.choice((2, 3, 4, 8, 64))
        fits = self.most_blocks(self.max_model_len)
        self.num_blocks = rng.choice((fits, fits + 1, fits + fits // 4, 2 * fits))
        self.max_num_seqs = self.seats = min(self.max_num_batched_tokens, rng.choice((3, 4)))
        self.longest_prompt = rng.choice((3, max(1, self.max_model_len // 2)))
        self.longest_output = self.max_model_len
        self.stops = (0, 0, 0, 0, 1)
        self.scores = rng.choice((0.0, 0.8))
        self.arrivals = 0.3
        self.aborts = rng.choice((0.0, 0.05))
        self.faults = rng.choice((0.0, 0.02))
        self.max_num_queued_requests = 30

    def _crowd_windows(self, rng: random.Random) -> None:
        """Siblings share the blocks of a window, move on, and then share nothing any more: the pool must have room for that."""
        self.block_size = rng.choice((1, 2))
        self.windows = rng.choice(((11,), (7,), (7, 11)))
        self.max_model_len = 60
        self.max_num_batched_tokens = rng.choice((3, 4))
        self.max_num_seqs = self.seats = 3
        self.num_blocks = self.most_blocks(self.max_model_len) + rng.choice((0, 2, 5, 9))
        self.longest_prompt, self.longest_output = 30, 60
        self.stops = (0,)
        self.scores = self.faults = 0.0
        self.families = 0.9
        self.max_preemptions = rng.choice((0, 1))

    def _draw_windows(self, rng: random.Random) -> tuple[int, ...]:
        """Groups as models have them: one window for all, some layers with one, two kinds of windows; of all lengths that may matter."""
        size = self.block_size
        lengths = (1, 2, size, size + 1, 2 * size, 2 * size + 1, 2 * size + 3, 5, 7, 11, self.max_model_len, 1000)
        one, other = rng.choice(lengths), rng.choice(lengths)
        return rng.choice(((one,), (one,), (0, one), (one, 0), (0, one, one), (one, other), (0, 0), (0, one, other, 0)))

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most, for all groups; of a window as if it lay across as many as it can."""
        size, step = self.block_size, min(self.max_num_batched_tokens, num_tokens)
        whole = -(-num_tokens // size)
        return sum(min(whole, -(-(window + step - 1) // size) + 1) if window else whole for window in self.windows)

    def build(self) -> EngineCore:
        scheduler = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_num_queued_requests=self.max_num_queued_requests,
            policy=self.policy,
            itl_target_ms=self.itl_target_ms,
            num_speculative_tokens=self.num_speculative_tokens,
        )
        cache = CacheConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            enable_prefix_caching=self.caching,
            windows=self.windows,
        )
        return EngineCore(scheduler, cache, self.vocab_size)


class Simulator:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.world = World(self.rng, random.Random(-1 - seed))
        self.now = 1.0
        self.num_added = 0
        self.sequence = 0  # of adds, to order those of one arrival time
        self.num_steps = 0
        self.is_calm = False
        self.has_aborted = False  # in the step at hand
        self.client = FakeClient(self.world.block_size)
        self.bombs: dict[str, str] = {}
        self.salts: dict[str, str | None] = {}
        self.seen_hashes: dict[tuple[int, bytes], tuple[int, int]] = {}
        self.happened: Counter[str] = Counter()
        self.trace: list[Any] = []
        self.prefixes = [self._tokens(self.rng.randint(1, max(1, self.world.max_model_len))) for _ in range(4)]
        self._start_engine()

    def run(self) -> None:
        constants: dict[str, Any] = {"CAUTION_RISE": self.world.caution_rise, "MAX_PREEMPTIONS": self.world.max_preemptions}
        constants["worth"] = self._worth
        with self._bombs_in_place(), mock.patch.multiple("octavo.engine.scheduler", **constants):
            for _ in range(self.rng.choice((0, 0, 10))):
                self._arrive()
            for _ in range(self.world.num_steps):
                self._live_a_little()
                self._step()
            self._calm_down()

    def _worth(self, chance: float, row_seconds: float, token_seconds: float, most: int) -> int:
        """As it is, or any number."""
        require(most >= 0 and 0 < chance < 1, f"a draft of up to {most} tokens, which hold with {chance}")
        if self.rng.random() < self.world.guess:
            return self.rng.randint(0, most)
        return worth(chance, row_seconds, token_seconds, most)

    # --- phases ---

    def _calm_down(self) -> None:
        """Liveness: with nothing new and no faults, all ends within a bound; then nothing is held and nothing is lost."""
        self.is_calm = True
        self.bombs.clear()
        bound = 2 + (MAX_PREEMPTIONS + 1) * sum(s.max_num_tokens for s in self.client.streams.values())
        for _ in range(bound):
            if not self.core.has_work():
                break
            self._step()
        require(not self.core.has_work(), f"work is left after {bound} steps: {list(self.client.streams)}")
        require(not self.client.streams, f"never ended: {list(self.client.streams)}")
        require(not self.client.refusals, f"never answered: {self.client.refusals}")
        pool = self.core.scheduler.pool
        require(pool.num_used == 0, f"{pool.num_used} blocks are still in use")
        self.core.check()
        self.core.reset_prefix_cache()
        self.core.check()
        require(pool.num_cached == 0 and pool.num_available == pool.num_blocks, "blocks are lost")
        scheduler = self.core.scheduler
        left = (self.core.requests, scheduler.running, scheduler.families, scheduler.in_flight, scheduler.broken)
        require(not any(left), f"left over: {left}")
        forgotten = set(self.runner.known) - set(scheduler.released_ids)
        require(not forgotten, f"the runner was never told to forget {forgotten}")

    def _start_engine(self) -> None:
        world = self.world
        self.core = world.build()
        self.runner = FakeRunner(world.num_blocks, world.block_size, world.vocab_size, self.rng, world.windows)

    def _live_a_little(self) -> None:
        """What may happen between two steps."""
        rng, world = self.rng, self.world
        while rng.random() < world.arrivals:
            self._arrive()
        if rng.random() < world.aborts:
            self._abort_some()
        if rng.random() < 0.03:
            self.core.reset_prefix_cache()
            self.happened["reset"] += 1
        if rng.random() < world.faults and self.client.streams:
            victim = rng.choice(list(self.client.streams))
            self.bombs[victim] = rng.choice(BOMB_SITES)
            self.client.streams[victim].may_fail = True
        if rng.random() < world.faults / 2:
            self._crash()

    # --- arrivals ---

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.world.vocab_size) for _ in range(count)]

    def _arrive(self) -> None:
        rng = self.rng
        kind = rng.random()
        if kind < 0.06 and self.core.requests:
            self._add_duplicate()
        elif kind < 0.12:
            self._add_senseless()
        elif rng.random() < self.world.families:
            first = self._request()
            parent_id = f"family {self.num_added}"
            for i in range(rng.randint(2, 5)):
                # Members are told apart by their seed; now and then one claims a family that it does not belong to.
                other = self._request()
                prompt = first.prompt_token_ids if rng.random() < 0.9 else other.prompt_token_ids
                salt = first.cache_salt if rng.random() < 0.9 else other.cache_salt
                other.sampling_params = first.sampling_params.clone(seed=i)
                self._add(_changed(other, parent_id=parent_id, prompt_token_ids=prompt, cache_salt=salt))
        else:
            self._add(self._request())

    def _request(self) -> EngineCoreRequest:
        rng, world = self.rng, self.world
        prefix = rng.choice(self.prefixes)
        prompt = prefix[: rng.randint(0, len(prefix))] + self._tokens(rng.choice((0, 1, rng.randint(0, 12))))
        prompt = (prompt or self._tokens(1))[
            : min(world.longest_prompt, max(1, world.max_model_len - rng.randint(1, 12)))
        ]
        if rng.random() < 0.3:  # as long as they get here: several chunks
            prompt += self._tokens(max(0, min(world.longest_prompt, world.max_model_len - 2) - len(prompt)))
        if rng.random() < 0.02:
            prompt = self._tokens(world.max_model_len + rng.randint(0, 3))
        max_tokens = rng.choice((1, rng.randint(1, world.longest_output), world.longest_output))
        stops = sorted(set(self._tokens(rng.choice(world.stops))))
        params = SamplingParams(
            seed=rng.randrange(3),
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
            prompt_logprobs=rng.choice((0, 1)) if rng.random() < world.scores else None,
        )
        # An id may come again once its first owner is gone, even while the step that used it is still being computed.
        self.num_added += 1
        arrival = float(self.num_added) - (rng.randint(0, 20) if world.disorder else 0)
        return EngineCoreRequest(
            f"r{self.num_added}" if rng.random() < 0.9 else f"again{rng.randrange(3)}",
            prompt,
            params,
            stop_token_ids=stops,
            eos_token_ids=stops[:1],
            arrival_time=arrival,
            cache_salt=rng.choice((None, None, "", "a")),
            priority=rng.randint(-1, 1),
        )

    def _add(self, request: EngineCoreRequest) -> None:
        """Add it, and note what must come of it."""
        client, world = self.client, self.world
        if request.request_id in client.streams or any(request.request_id == r for r, _ in client.refusals):
            return
        refusal = self._refusal(request)
        if refusal is not None:
            client.refusals.append((request.request_id, refusal))
            self.happened[f"refused: {refusal.value}"] += 1
        else:
            expected = expect(request, world.vocab_size, world.max_model_len)
            priority = request.priority if world.policy == "priority" else 0
            order = (priority, request.arrival_time, self.sequence)
            self.sequence += 1
            stream = Stream(request, expected, order, self.num_steps, None)
            client.streams[request.request_id] = stream
            self.bombs.pop(request.request_id, None)  # it was meant for an earlier owner of the id
            self.salts[request.request_id] = request.cache_salt
            if not world.disorder and world.policy == "fcfs":
                stream.wait_bound = sum(s.max_num_tokens for s in client.streams.values())
        self.core.add(request, self.now)

    def _refusal(self, request: EngineCoreRequest) -> ErrorKind | None:
        world = self.world
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling_params.max_tokens
        assert max_tokens is not None
        if num_prompt >= world.max_model_len:
            return ErrorKind.CONTEXT_LENGTH
        if world.most_blocks(min(world.max_model_len, num_prompt + max_tokens) - 1) > world.num_blocks:
            return ErrorKind.CONTEXT_LENGTH
        # Counted by the engine: what has just broken there is still live to its client. `_check_stats` compares the two counts.
        if len(self.core.requests) >= world.seats + world.max_num_queued_requests:
            return ErrorKind.OVERLOADED
        return None

    def _add_duplicate(self) -> None:
        """The same id once more: refused, and the one that has it goes on."""
        request_id = self.rng.choice(list(self.core.requests))
        request = _changed(self._request(), request_id=request_id)
        self.client.refusals.append((request_id, ErrorKind.INVALID))
        self.core.add(request, self.now)
        self.happened["duplicate"] += 1

    def _add_senseless(self) -> None:
        request, vocab_size = self._request(), self.world.vocab_size
        changes: tuple[dict[str, Any], ...] = (
            {"prompt_token_ids": []},
            {"prompt_token_ids": [0, vocab_size]},
            {"prompt_token_ids": [-1]},
            {"prompt_token_ids": [1.5]},
            {"output_token_ids": [2**40]},
            {"stop_token_ids": [vocab_size]},
            {"arrival_time": float("nan")},
            {"sampling_params": request.sampling_params.clone(logit_bias={vocab_size: 1.0})},
        )
        request = _changed(request, request_id=f"bad{self.num_added}", **self.rng.choice(changes))
        self.client.refusals.append((request.request_id, ErrorKind.INVALID))
        self.core.add(request, self.now)
        self.happened["senseless"] += 1

    # --- mishaps ---

    def _abort_some(self) -> None:
        """Live ones in any state, ended ones, unknown ones, and one twice."""
        rng, streams = self.rng, self.client.streams
        ids = rng.sample(list(streams), min(len(streams), rng.choice((1, 1, 2, 100))))
        ids += [f"r{rng.randint(0, self.num_added + 5)}", *ids[:1]]
        for request_id in ids:
            self.client.streams.pop(request_id, None)
            self.bombs.pop(request_id, None)
        self.client.refusals = [r for r in self.client.refusals if r[0] not in ids]
        self.core.abort(ids)
        self.happened["abort"] += 1

    def _crash(self) -> None:
        """The engine process is gone with all its memory. The client sends what is live again, with the tokens that it has."""
        self.bombs.clear()
        self.client.refusals.clear()
        self._start_engine()
        for request_id, stream in self.client.streams.items():
            if not stream.delivered:
                stream.prompt_scores.clear()
            stream.has_output = False
            stream.num_passed_tokens = 0
            stream.request = _changed(stream.request, output_token_ids=list(stream.delivered))
            self.core.add(stream.request, self.now)
            if stream.wait_bound is not None:
                stream.wait_bound += sum(s.max_num_tokens for s in self.client.streams.values())
            self.salts[request_id] = stream.request.cache_salt
        self.core.check()
        self.happened["crash"] += 1

    @contextmanager
    def _bombs_in_place(self) -> Iterator[None]:
        """Let the methods at BOMB_SITES raise for the requests in `bombs`, once each."""

        def armed(site: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def method(request: Request, *args: Any) -> Any:
                if self.bombs.get(request.request_id) == site:
                    del self.bombs[request.request_id]
                    self.happened[f"bomb in {site}"] += 1
                    raise Bomb(site)
                return original(request, *args)

            return method

        patches = [mock.patch.object(Request, site, armed(site, getattr(Request, site))) for site in BOMB_SITES]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    def _draw_faults(self, plan: SchedulerOutput) -> Faults:
        # A step that fails has told the runner something, or not: failures at that moment are worth more.
        rng, rate = self.rng, self.world.faults * (3 if plan.released_request_ids else 1)
        faults = Faults()
        if self.is_calm or rng.random() >= rate:
            return faults
        ids = [s.request_id for s in plan.scheduled]
        kind = rng.choice(("step", "mangled", "failing", "senseless"))
        victims = frozenset(rng.sample(ids, rng.randint(1, len(ids))))
        self.happened[kind] += 1
        if kind == "step":
            faults.step_fails = True
        elif kind == "mangled":
            faults.result_is_mangled = True
        elif kind == "failing":
            faults.failing_ids = victims
        else:
            faults.senseless_ids = victims = frozenset(
                s.request_id for s in plan.scheduled if s.samples and s.request_id in victims
            )
        for request_id in ids if kind in ("step", "mangled") else victims:
            if request_id in self.client.streams:
                self.client.streams[request_id].may_fail = True
        return faults

    # --- a step ---

    def _step(self) -> None:
        self.now += 1.0
        self.num_steps += 1
        self.has_aborted = False
        before = _Before(self)
        if self.client.streams or self.client.refusals:
            require(self.core.has_work(), "the engine believes that it is idle")
        plan = self.core.schedule(self.now)
        if plan is None:
            self._receive(self.core.report(self.now))
            require(not self.client.streams or before.may_break, f"nothing is planned for {list(self.client.streams)}")
            return
        self._check_plan(plan, before)
        faults = self._draw_faults(plan)
        salts = {s.request_id: self._salt_of(s.request_id) for s in plan.scheduled}
        try:
            result: ModelRunnerOutput | None = self.runner.execute(plan, salts, faults)
        except StepFailed:
            result = None
        if not self.is_calm:
            self._meanwhile()
            self.core.check()
        if result is None:
            outputs = self.core.fail_step(plan, "the device fell over", self.now)
        else:
            outputs = self.core.update(plan, result, self.now, self._seconds())
            totals = self.core.totals
            self.happened["draft token"], self.happened["draft token that held"] = totals.num_draft_tokens, totals.num_accepted_tokens
        self._check_failures(plan, faults)
        self._receive(outputs)
        self.core.check()
        self._check_published()
        self._check_held()
        self._check_waits()
        self.trace.append(
            (plan.step, [(s.request_id, s.num_computed_tokens, tuple(map(tuple, s.block_ids))) for s in plan.scheduled])
        )

    def _seconds(self) -> float:
        """What the clock says that the step took; in a wild world it may say anything."""
        if self.world.timing == "constant":
            return 0.5
        if self.world.timing == "modelled":
            features = self.core.scheduler.shape.features()
            return sum(ms * size for ms, size in zip(self.world.step_ms, features, strict=True)) / 1e3
        return self.rng.choice((0.0, -1.0, math.nan, math.inf, 1e-9, 1e9, self.rng.random(), self.rng.expovariate(100.0)))

    def _meanwhile(self) -> None:
        """What comes in while the device computes."""
        if self.rng.random() < self.world.aborts:
            self._abort_some()
            self.has_aborted = True
        if self.rng.random() < self.world.arrivals / 2:
            self._arrive()
        if self.rng.random() < 0.02:
            self.core.reset_prefix_cache()

    def _salt_of(self, request_id: str) -> str | None:
        return self.core.requests[request_id].message.cache_salt

    def _receive(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self.client.receive(output)
        require(outputs.time == self.now, "outputs of another time")
        self._check_stats(outputs)

    # --- what must hold ---

    def _check_plan(self, plan: SchedulerOutput, before: _Before) -> None:
        world, scheduler = self.world, self.core.scheduler
        require(plan.num_tokens <= world.max_num_batched_tokens, f"{plan.num_tokens} tokens in a step")
        require(len(scheduler.running) <= world.seats, f"{len(scheduler.running)} requests run")
        ids = {s.request_id for s in plan.scheduled}

        order = {request_id: stream.order for request_id, stream in self.client.streams.items()}
        survivors = [r for r in before.running if r in order and r in self.core.requests]
        if survivors and not before.may_break:
            earliest = min(survivors, key=order.__getitem__)
            require(earliest in ids, f"the earliest running request, {earliest}, does not advance")
        if before.num_waiting and not before.running:
            require(ids, "nothing runs and the queue's front is not admitted")

        running = {r.request_id for r in scheduler.running}
        waiting = [r for r in self.core.requests if r not in running]
        admitted = [r for r in ids if r not in before.running]
        for request_id in admitted:
            for other_id in waiting:
                if order[other_id] < order[request_id]:
                    self._check_passing(request_id, other_id)
        for request in self.core.requests.values():
            require(
                request.num_preemptions <= world.max_preemptions,
                f"{request.request_id}: {request.num_preemptions} preemptions",
            )
            if request.request_id in before.running and request.request_id not in running:
                self.happened[f"preemption no. {request.num_preemptions}"] += 1
        self.happened["copy"] += len(plan.block_copies)
        for scheduled in plan.scheduled:
            if scheduled.request_id in admitted and scheduled.num_computed_tokens:
                is_fork = self.core.requests[scheduled.request_id].message.parent_id in scheduler.families
                self.happened["fork" if is_fork else "hit"] += 1
                if any(self.core.requests[scheduled.request_id].num_freed_blocks):
                    self.happened["fork behind a window" if is_fork else "hit behind a window"] += 1
        for scheduled in plan.scheduled:
            require(scheduled.num_drafts <= world.num_speculative_tokens, f"{scheduled.num_drafts} drafts in {scheduled}")
        self._check_writes(plan)
        self._check_decodes(plan, before)
        self._check_pace(plan, before)
        if before.running <= running:  # nobody was preempted: then there are no admissions
            self._check_conservation(plan, waiting, before)

    def _check_passing(self, request_id: str, passed_id: str) -> None:
        """A shorter request was admitted before an earlier one: only so many tokens of others, never for want of blocks, never by rank."""
        passing, passed = self.core.requests[request_id], self.core.requests[passed_id]
        name = f"{request_id} passes {passed_id}"
        require(self.world.itl_target_ms != 0, f"{name}, although order is strict")
        require(passing.num_preemptions == passed.num_preemptions == 0, f"{name}: one of them was preempted")
        require(passing.num_tokens < passed.num_tokens, f"{name}, which is no longer")
        stream = self.client.streams[passed_id]
        if self.world.policy == "priority":
            require(passing.message.priority == passed.message.priority, f"{name}, which is of another priority")
        stream.num_passed_tokens += passing.num_tokens
        require(stream.num_passed_tokens <= passed.num_tokens, f"{name}: {stream.num_passed_tokens} tokens have passed it")
        if stream.wait_bound is not None:
            stream.wait_bound += self.client.streams[request_id].max_num_tokens
        self.happened["passed"] += 1

    def _check_pace(self, plan: SchedulerOutput, before: _Before) -> None:
        """By what the engine believes of step times, a step in which streams decode ends in time, but for one token."""
        pace, nothing = self.core.scheduler.pace, StepShape(0, 0, 0, 0)
        decodes = prompts = nothing
        longest = num_prompts = 0
        for s in plan.scheduled:
            if s.request_id in before.running and len(s.token_ids) - s.num_drafts == 1 and s.samples:
                decodes = decodes.with_decode(s.num_computed_tokens)
            else:
                num_tokens = len(s.token_ids) - s.num_drafts
                prompts = prompts.with_prompt(num_tokens, s.num_computed_tokens)
                longest = max(longest, s.num_computed_tokens + num_tokens)
                num_prompts += 1
        self._check_pace_of_drafts(plan)
        if decodes == nothing or prompts == nothing or pace.itl_target_ms == 0 or before.decodes != decodes.num_decodes:
            return
        if pace.target is None:
            require(not pace.model.is_measured, "no target, although steps were measured")
            return
        whole = decodes._replace(num_prompt_tokens=prompts.num_prompt_tokens, prompt_reach=prompts.prompt_reach)
        alone, whole = pace.model.predict(decodes), pace.model.predict(whole)
        bound = max(pace.target, (1 + LEAST_SHARE) * alone) + pace.model.prompt_seconds(1, longest + num_prompts)
        require(whole <= bound * (1 + 1e-9), f"a step of {whole} s where {bound} s are allowed")
        self.happened["paced"] += 1

    def _check_pace_of_drafts(self, plan: SchedulerOutput) -> None:
        """With drafts a step takes no longer than its target, as the scheduler reckons: for that a newcomer's single token is a decode's."""
        scheduler = self.core.scheduler
        if scheduler.pace.target is not None and any(s.num_drafts for s in plan.scheduled):
            whole, target = scheduler.pace.model.predict(scheduler.shape), scheduler.pace.target
            require(whole <= target * (1 + 1e-9), f"a step with drafts of {whole} s where {target} s are allowed")
            self.happened["paced drafts"] += 1

    def _check_writes(self, plan: SchedulerOutput) -> None:
        """A block that is written has one holder, counted in the block tables, and is not published."""
        scheduler, size = self.core.scheduler, self.world.block_size
        holders = Counter(block_id for request in scheduler.running for block_id, _ in _held(request))
        published = self._published()
        for scheduled in plan.scheduled:
            start = scheduled.num_computed_tokens
            last = start + len(scheduled.token_ids) - 1
            lost = [block_id for block_id in self.runner.seen_blocks(scheduled) if not holders[block_id]]
            require(not lost, f"{scheduled.request_id} sees blocks {lost}, which nobody holds")
            written = [block_id for table in scheduled.block_ids for block_id in table[start // size : last // size + 1]]
            for block_id in written:
                require(
                    holders[block_id] == 1,
                    f"{scheduled.request_id} writes block {block_id} of {holders[block_id]} holders",
                )
                require(block_id not in published, f"{scheduled.request_id} writes the published block {block_id}")

    def _check_decodes(self, plan: SchedulerOutput, before: _Before) -> None:
        """A decode that runs gets its token, unless there is no block for it."""
        ids = {s.request_id for s in plan.scheduled}
        for request in self.core.scheduler.running:
            if request.num_pending_tokens == 1 and request.request_id not in ids:
                require(
                    self.core.scheduler.pool.num_available < len(self.world.windows),
                    f"the decode of {request.request_id} waits for a prompt",
                )

    def _check_conservation(self, plan: SchedulerOutput, waiting: list[str], before: _Before) -> None:
        """Where the pace, budget and seats are left and even the worst case of all would fit, nobody waits but for a leader's prompt."""
        world, scheduler = self.world, self.core.scheduler
        if not waiting or plan.num_tokens == world.max_num_batched_tokens or len(scheduler.running) == world.seats:
            return
        if world.itl_target_ms != 0 and before.decodes and not scheduler.allowance.has_room:
            return
        front = scheduler.waiting.peek()
        if front.message.parent_id in scheduler.families:
            return
        worst = sum(world.most_blocks(r.max_num_computed_tokens) for r in [*scheduler.running, front])
        require(worst > world.num_blocks, f"{front.request_id} waits, although it fits")

    def _check_failures(self, plan: SchedulerOutput, faults: Faults) -> None:
        """What failed has ended, and nobody can find what it may have spoilt."""
        whole_step = faults.step_fails or faults.result_is_mangled
        published = self._published()
        for scheduled in plan.scheduled:
            request_id = scheduled.request_id
            if whole_step or request_id in faults.failing_ids | faults.senseless_ids:
                # An abort in the same step makes its id free for another, and spares its blocks.
                require(self.has_aborted or request_id not in self.core.requests, f"{request_id} survived its failure")
                require(
                    self.has_aborted or published.isdisjoint(self.runner.seen_blocks(scheduled)),
                    f"{request_id}: its blocks can be found",
                )

    def _published(self) -> set[int]:
        return {block_id for index in self.core.scheduler.pool._block_of for block_id in index.values()}

    def _check_held(self) -> None:
        """However long a request is, it holds no more than its windows need."""
        for request in self.core.scheduler.running:
            num_held, most = len(_held(request)), self.world.most_blocks(request.max_num_computed_tokens)
            require(num_held <= most, f"{request.request_id} holds {num_held} blocks, the bound is {most}")
            for group, window in enumerate(self.world.windows):
                unseen = first_seen(max(0, request.num_computed_tokens - 1), window) // self.world.block_size
                self.happened["freed"] += unseen > 0
                require(
                    request.num_freed_blocks[group] >= unseen, f"{request.request_id} keeps what group {group} cannot see"
                )

    def _check_published(self) -> None:
        """What can be found is whole, was computed by a step that succeeded, and has a hash of its own."""
        size = self.world.block_size
        indexes = enumerate(self.core.scheduler.pool._block_of)
        for group, block_hash, block_id in ((g, h, b) for g, index in indexes for h, b in index.items()):
            slots = self.runner.blocks[block_id]
            last = slots[-1]
            require(last is not None and last.position % size == size - 1, "block", block_id, "is not full:", slots)
            assert last is not None
            first_position = last.position + 1 - size
            for i, slot in enumerate(slots):
                is_right = slot is not None and slot.position == first_position + i and not slot.is_garbage
                require(slot is None or slot.group == group, "block", block_id, "is published for group", group, slots)
                require(is_right, "block", block_id, "is published and holds", slots)
            seen = self.seen_hashes.setdefault((group, block_hash), (last.position, last.prefix))
            require(
                seen == (last.position, last.prefix), "block", block_id, "has a hash that was seen with another prefix"
            )

    def _check_waits(self) -> None:
        for request_id, stream in self.client.streams.items():
            if stream.wait_bound is not None:
                age = self.num_steps - stream.step_added
                require(
                    age <= stream.wait_bound, f"{request_id} has waited {age} steps, the bound is {stream.wait_bound}"
                )

    def _check_stats(self, outputs: EngineCoreOutputs) -> None:
        """The gauges are what a recount says."""
        stats, scheduler, world = outputs.stats, self.core.scheduler, self.world
        require(
            stats.num_running + stats.num_waiting == len(self.client.streams),
            stats,
            "but live are",
            len(self.client.streams),
        )
        require(stats.num_running == len(scheduler.running), stats)
        slots: dict[tuple[int, int], None] = {}
        for request in scheduler.running:
            for block_id, place in _held(request):
                begin = place * world.block_size
                for offset in range(min(world.block_size, request.num_computed_tokens - begin)):
                    slots[block_id, offset] = None
        require(stats.num_kv_tokens == len(slots), stats, "but tokens are", len(slots))
        require(stats.num_used_blocks == len({b for r in scheduler.running for b, _ in _held(r)}), stats)
        require(stats.prefix_hits <= stats.prefix_queries, stats)


def _held(request: Request) -> list[tuple[int, int]]:
    """The blocks that a request holds, in all groups, each with its place in its table."""
    tables = zip(request.block_tables, request.num_freed_blocks, strict=True)
    return [(block_id, place) for table, freed in tables for place, block_id in enumerate(table) if place >= freed]


class _Before:
    """What was running before `schedule` was called."""

    def __init__(self, simulator: Simulator) -> None:
        self.running = {r.request_id for r in simulator.core.scheduler.running}
        self.num_waiting = len(simulator.core.scheduler.waiting)
        self.decodes = sum(r.num_pending_tokens == 1 for r in simulator.core.scheduler.running)
        self.may_break = bool(simulator.bombs)


def _changed(request: EngineCoreRequest, **changes: Any) -> EngineCoreRequest:
    values = {name: getattr(request, name) for name in request.__struct_fields__}
    return EngineCoreRequest(**{**values, **changes})


def run_seeds(seeds: range, report: Callable[[str], None] = print) -> Counter[str]:
    """Run many; returns what happened in all of them. Raises on the first failure and names its seed."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        simulator = Simulator(seed)
        try:
            simulator.run()
        except Exception as error:
            report(f"simulation seed {seed} failed in step {simulator.num_steps}: {error!r}")
            raise Violation(f"seed {seed}, step {simulator.num_steps}: {error!r}") from error
        happened += simulator.happened
        happened["steps"] += simulator.num_steps
        happened["finished"] += simulator.client.num_finished
        happened["tokens"] += simulator.client.num_tokens
    return happened
