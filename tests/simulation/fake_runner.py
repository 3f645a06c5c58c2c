"""A runner without a model: its next token is a hash of all tokens before it, and its KV memory is a table of what was written.

Each slot of each block remembers which token was written there, for which group of layers, at which position, and the hash of the
whole prefix up to it (with the salt). So a step can be checked exactly: what a request reads through its block tables must be its own
prefix, slot by slot, in each group as far back as the step's first token sees. Any mix-up of blocks or groups, a missing copy, a block
given back or reused too early or a stale hit shows at the first read.

Knows the plan and the result only; it never looks into the engine.
"""

from __future__ import annotations

import random
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b

from octavo.protocol import (
    ModelRunnerOutput,
    NewRequest,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)


class Violation(AssertionError):
    """The engine broke a rule of the simulation."""


def require(condition: object, *message: object) -> None:
    """The parts of the message are put together only if they are needed: most of a run is spent in checks."""
    if not condition:
        raise Violation(" ".join(map(str, message)))


class StepFailed(Exception):
    """The whole step raised, as a device out of memory would."""


def extend_prefix(prefix: int, token_id: int) -> int:
    """The hash of a prefix that is one token longer."""
    data = prefix.to_bytes(8, "little") + token_id.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def empty_prefix(salt: str | None) -> int:
    return int.from_bytes(blake2b(repr(salt).encode(), digest_size=8).digest(), "little")


def next_token(prompt_and_output: list[int], seed: int, vocab_size: int) -> int:
    """What the model says after these tokens. The seed tells siblings apart; the salt changes nothing, as in a real model."""
    data = repr((seed, prompt_and_output)).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") % vocab_size


def first_seen(position: int, window: int) -> int:
    """The first position that the token at `position` sees."""
    return max(0, position - window + 1) if window else 0


@dataclass(frozen=True, slots=True)
class Slot:
    """What one slot of a block holds."""

    token_id: int
    group: int
    position: int
    prefix: int
    is_garbage: bool = False  # written by a step that failed, or by a request whose numbers went wrong


class Known:
    """What the runner keeps of a request between its steps."""

    def __init__(self, new: NewRequest, salt: str | None) -> None:
        self.num_prompt_tokens = len(new.prompt_token_ids)
        self.token_ids = new.prompt_token_ids + new.output_token_ids
        self.seed = new.sampling_params.seed or 0
        self.prefixes = [empty_prefix(salt)]  # [i]: of the first i tokens

    def prefix(self, num_tokens: int) -> int:
        while len(self.prefixes) <= num_tokens:
            self.prefixes.append(extend_prefix(self.prefixes[-1], self.token_ids[len(self.prefixes) - 1]))
        return self.prefixes[num_tokens]

    def assuming(self, drafts: list[int]) -> Known:
        """What would be known if these tokens were."""
        assumed = copy(self)
        assumed.token_ids, assumed.prefixes = self.token_ids + drafts, list(self.prefixes)
        return assumed


@dataclass
class Faults:
    """What goes wrong in one step."""

    step_fails: bool = False
    failing_ids: frozenset[str] = frozenset()  # their numbers go wrong: NaN
    senseless_ids: frozenset[str] = frozenset()  # their token is None or outside the vocabulary
    result_is_mangled: bool = False


class FakeRunner:
    """`salts` maps request ids to their salt: the runner need not know salts, but the check of its memory does."""

    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int, rng: random.Random, windows: tuple[int, ...]
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.vocab_size = vocab_size
        self.rng = rng
        self.blocks: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.known: dict[str, Known] = {}
        self.may_release_twice: set[str] = set()  # after a failed step
        self.last_step = 0

    def execute(self, plan: SchedulerOutput, salts: dict[str, str | None], faults: Faults) -> ModelRunnerOutput:
        """One step, checked. Raises StepFailed if it is to fail, Violation if the plan is wrong."""
        self._check_form(plan)
        if faults.step_fails and self.rng.random() < 0.5:
            self._fail(plan)
        self._learn(plan, salts)
        self._copy(plan)
        for scheduled in plan.scheduled:
            self._write(scheduled, is_garbage=scheduled.request_id in faults.failing_ids)
        if faults.step_fails:
            self._fail(plan)
        for scheduled in plan.scheduled:
            if scheduled.request_id not in faults.failing_ids:
                self._check_read(scheduled)
        sampled = [self._sample(scheduled, faults) for scheduled in plan.scheduled]
        if faults.result_is_mangled:
            self._expect_rerelease(plan)
            return self._mangle(ModelRunnerOutput(plan.step, sampled))
        return ModelRunnerOutput(plan.step, sampled)

    def _check_form(self, plan: SchedulerOutput) -> None:
        require(plan.step > self.last_step, f"step {plan.step} comes after step {self.last_step}")
        self.last_step = plan.step
        ids = [s.request_id for s in plan.scheduled]
        require(ids and len(set(ids)) == len(ids), f"step {plan.step} schedules {ids}")
        require(
            plan.num_tokens == sum(len(s.token_ids) for s in plan.scheduled), "num_tokens is not the sum of the shares"
        )
        require({n.request_id for n in plan.new_requests} <= set(ids), "a new request is not scheduled")
        targets = [c.target for c in plan.block_copies]
        require(len(set(targets)) == len(targets), f"two copies into one block: {plan.block_copies}")

    def _learn(self, plan: SchedulerOutput, salts: dict[str, str | None]) -> None:
        for request_id in plan.released_request_ids:
            known = self.known.pop(request_id, None)
            require(known or request_id in self.may_release_twice, f"{request_id} is released, but not known")
        self.may_release_twice.clear()
        for new in plan.new_requests:
            require(new.request_id not in self.known, f"{new.request_id} is new, but already known")
            self.known[new.request_id] = Known(new, salts[new.request_id])
        for scheduled in plan.scheduled:
            require(scheduled.request_id in self.known, f"{scheduled.request_id} is scheduled, but not known")

    def _copy(self, plan: SchedulerOutput) -> None:
        """In order, or all sources first: a runner may do either."""
        if self.rng.random() < 0.5:
            for block_copy in plan.block_copies:
                self.blocks[block_copy.target] = list(self.blocks[block_copy.source])
        else:
            contents = [list(self.blocks[c.source]) for c in plan.block_copies]
            for c, content in zip(plan.block_copies, contents, strict=True):
                self.blocks[c.target] = content

    def _write(self, scheduled: ScheduledRequest, is_garbage: bool) -> None:
        known = self.known[scheduled.request_id].assuming(scheduled.draft_token_ids)
        start, end = scheduled.num_computed_tokens, scheduled.num_computed_tokens + len(scheduled.token_ids)
        name = f"{scheduled.request_id} at {start}..{end - 1}"
        require(start < end - scheduled.num_drafts, f"{name}: nothing but drafts")
        require(start < end <= len(known.token_ids), f"{name}: {len(known.token_ids)} tokens are known")
        require(scheduled.token_ids == known.token_ids[start:end], f"{name}: other tokens than the known ones")
        require(scheduled.samples == (end == len(known.token_ids)), f"{name}: samples = {scheduled.samples}")
        require(scheduled.samples or not scheduled.num_drafts, f"{name}: drafts, but nothing is sampled")
        require(len(scheduled.block_ids) == len(self.windows), f"{name}: {len(scheduled.block_ids)} tables")
        seen = self.seen_blocks(scheduled)
        require(len(set(seen)) == len(seen), f"{name}: a block twice")
        for group, table in enumerate(scheduled.block_ids):
            require(len(table) * self.block_size >= end, f"{name}: only {len(table)} blocks")
            unseen = first_seen(max(0, start - 1), self.windows[group]) // self.block_size
            require(not any(table[:unseen]), f"{name}: keeps blocks that nobody sees: {table}")
            for position in range(start, end):
                block = self.blocks[table[position // self.block_size]]
                slot = Slot(known.token_ids[position], group, position, known.prefix(position + 1), is_garbage)
                block[position % self.block_size] = slot

    def seen_blocks(self, scheduled: ScheduledRequest) -> list[int]:
        """All that the step's tokens of this request see or write."""
        tables = zip(scheduled.block_ids, self.windows, strict=True)
        start, size = scheduled.num_computed_tokens, self.block_size
        return [block for table, window in tables for block in table[first_seen(start, window) // size :]]

    def _check_read(self, scheduled: ScheduledRequest) -> None:
        """After all of the step's writes: in each group the request sees exactly its own prefix, as far as its window reaches."""
        known, start = self.known[scheduled.request_id].assuming(scheduled.draft_token_ids), scheduled.num_computed_tokens
        for group, table in enumerate(scheduled.block_ids):
            for position in range(first_seen(start, self.windows[group]), start + len(scheduled.token_ids)):
                block_id = table[position // self.block_size]
                found = self.blocks[block_id][position % self.block_size]
                wanted = Slot(known.token_ids[position], group, position, known.prefix(position + 1))
                require(found == wanted, scheduled.request_id, "reads in block", block_id, found, "and not", wanted)

    def _sample(self, scheduled: ScheduledRequest, faults: Faults) -> SampledTokens:
        request_id = scheduled.request_id
        known = self.known[request_id]
        if request_id in faults.failing_ids:
            return SampledTokens(request_id, error="logits are NaN")
        result = SampledTokens(request_id)
        if scheduled.prompt_logprobs is not None:
            start = scheduled.num_computed_tokens
            targets = known.token_ids[start + 1 : min(start + len(scheduled.token_ids) + 1, known.num_prompt_tokens)]
            require(targets, f"{request_id}: prompt_logprobs in a step without rows of the prompt")
            result.prompt_logprobs = [TokenLogprobs([target], [-1.0], 1) for target in targets]
        if scheduled.samples:
            result.token_ids = self._sample_tokens(known, scheduled.draft_token_ids)
            if request_id in faults.senseless_ids:
                self._make_senseless(result.token_ids)
        return result

    def _sample_tokens(self, known: Known, drafts: list[int]) -> list[int]:
        """A token, and one more for each draft that is the token before."""
        tokens: list[int] = []
        for draft in [*drafts, None]:
            tokens.append(next_token(known.token_ids, known.seed, self.vocab_size))
            known.token_ids.append(tokens[-1])
            if tokens[-1] != draft:
                break
        return tokens

    def _make_senseless(self, tokens: list[int]) -> None:
        way = self.rng.randrange(5)
        if way < 3:
            tokens[-1] = (None, -1, self.vocab_size)[way]  # type: ignore[call-overload]
        elif way == 3:
            tokens.clear()
        else:
            tokens += [0, 1] * 10

    def _fail(self, plan: SchedulerOutput) -> None:
        """Nobody knows how far the step came: whatever it was to write may hold anything."""
        for scheduled in plan.scheduled:
            start = scheduled.num_computed_tokens
            for group, table in enumerate(scheduled.block_ids):
                for position in range(start, start + len(scheduled.token_ids)):
                    block = self.blocks[table[position // self.block_size]]
                    block[position % self.block_size] = Slot(-1, group, position, 0, is_garbage=True)
        self._expect_rerelease(plan)
        raise StepFailed("the device fell over")

    def _mangle(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """A result that does not answer the plan."""
        way = self.rng.randrange(3)
        if way == 0:
            return ModelRunnerOutput(result.step - 1, result.sampled)
        if way == 1:
            return ModelRunnerOutput(result.step, result.sampled[:-1])
        return ModelRunnerOutput(result.step, [SampledTokens("nobody", [1]), *result.sampled[1:]])

    def _expect_rerelease(self, plan: SchedulerOutput) -> None:
        self.may_release_twice = set(plan.released_request_ids) | {s.request_id for s in plan.scheduled}
