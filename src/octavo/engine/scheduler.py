"""Continuous batching: which requests compute how many tokens in the next step, and in which blocks.

The batch is decided anew for every step, from one budget of `max_num_batched_tokens`:

 1. Every running request that decodes gets its one token, and running prompts share what `pace` allows beside them, in chunks. The
    budget is at least `max_num_seqs`, so a long prompt cannot stop a decode, and decodes always leave the earliest prompt something.
 2. Blocks for these tokens are found, in each group of layers, earliest request first. Where none are left, the *latest* running
    request is preempted: it loses its blocks and goes back to the queue, to its old place. A request for which nobody later is
    left just waits.
 3. With what the pace leaves, requests are admitted from the front of the queue, in order, until one does not fit. In this order a
    shorter prompt may pass longer ones (see `policy`), if the front of the queue would fit as well. With `itl_target_ms` 0 nobody
    is passed, prompts share in order too, and the budget is the only limit.
 4. What then is left of budget, blocks and the step's time may go to drafts of requests that decode, where they pay (see `drafts`).

Earlier and later are by `Request.key`: by arrival, or by priority and then arrival.

**Progress.** Claim: while anything is running, every step computes at least one token of the earliest running request, E; and
while nothing is running, one is admitted. Proof: by (1) E gets a token: if it is a prompt it is the earliest one, which the pace gives
at least one token whatever its target. By (2) it is never preempted: a victim is the latest running one, and never the one that asks.
If it lacks blocks, all others are preempted in turn, after which every block that E does not hold is available; admission has refused
all that could not fit the empty pool, so E finds its block. With nothing running every block is available, the pace knows no limit but
the budget, and the front of the queue fits for the same reason; so it is admitted, or one that passes it. A request has finitely many
tokens. No earlier one can be added for ever: of one priority keys grow, and the tokens of all that pass a request are no more than its
own. So every request ends.

**Waiting.** Those that pass a request bring together at most as many tokens to compute as it has itself, so for their prompts it waits at
most as long as for its own once more, and for want of blocks nobody is passed. Once it runs it is before them all, and the earliest running
prompt has at least FIRST_SHARE of what prompts get. A request that was preempted is passed by nobody.

**Bounded preemption.** Being preempted costs computing again. Three things bound it:
 - A newcomer must leave free what all running requests surely need next, and a share of what they may need after that. The share
   is `caution`, which rises with each preemption and decays without, times the part of their allowance that requests have lately
   used. So a pool that is too small for its load settles down, and a generous max_tokens that nobody uses keeps nobody out.
 - Blocks of a preempted request stay in the prefix cache until somebody needs them.
 - A request that was preempted MAX_PREEMPTIONS times is *guarded*: it is admitted only when the most that it and all running
   requests can ever need fits, and while it runs, others are admitted by the same rule. So while it runs
   nobody can lack a block, and no request is ever preempted more than MAX_PREEMPTIONS times.

Knows nothing of stop rules, of results, or of who asked.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import NamedTuple

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.block_pool import BlockPool, InvariantError, num_blocks_for
from octavo.engine.drafts import PromptLookup, worth
from octavo.engine.kv_groups import KvGroups, Tables, held_blocks
from octavo.engine.pace import Pace
from octavo.engine.policy import WaitingQueue, shortest_that_may_pass
from octavo.engine.request import Request, RequestStatus
from octavo.engine.stats import Totals
from octavo.engine.step_time import StepShape
from octavo.protocol import BlockCopy, ScheduledRequest, SchedulerOutput

MAX_PREEMPTIONS = 4
CAUTION_RISE = 0.25  # on each preemption
CAUTION_DECAY = 0.998  # in each step
NO_STEP = StepShape(0, 0, 0, 0)
USED_SHARE_WEIGHT = 0.05  # of the latest request in the moving average


class Start(NamedTuple):
    """Where a newcomer begins: tables of others' blocks that hold its first tokens (of each group with so many freed entries), how many
    tokens that are, and whether it asked the cache.
    """

    block_tables: Tables
    num_freed_blocks: list[int]
    num_computed_tokens: int
    is_lookup: bool


class Scheduler:
    """The queue, the running requests and their blocks. `schedule` makes a plan, `settle` takes back its members."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, totals: Totals) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.block_size = cache.block_size
        self.groups = KvGroups(cache, config.max_num_batched_tokens)
        self.pool = BlockPool(cache.num_blocks, cache.enable_prefix_caching, self.groups.reaches)
        self.totals = totals
        self.max_num_drafts = config.num_speculative_tokens
        self.max_num_rows = config.max_num_rows
        self.pace = Pace(config.itl_target_ms, config.max_num_batched_tokens)
        self.allowance = self.pace.allowance(NO_STEP, 0)  # what is left for prompts in the step that is being planned
        self.is_admitting = True  # as far as memory and leaders went in the last step
        self.shape = NO_STEP  # of the plan that is being computed
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by key
        self.families: dict[str, list[Request]] = {}  # running requests by parent_id, in order of admission
        self.in_flight: list[Request] = []  # of the plan that is being computed, in its order
        self.broken: list[tuple[Request, str]] = []  # requests that raised while they were scheduled
        self.released_ids: list[str] = []  # that the runner still knows
        self.caution = 0.0
        self.used_share = 1.0  # of max_tokens, by requests that ended

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    # --- a step ---

    def schedule(self, step: int, now: float) -> SchedulerOutput | None:
        """The plan of the next step, or None if there is nothing to compute. Only after the last plan was settled."""
        if self.in_flight:
            raise InvariantError("a step is in flight")
        plan = SchedulerOutput(step, [], [], [], [], 0)
        self.caution *= CAUTION_DECAY
        self.shape = NO_STEP

        all_placed = self._schedule_running(plan)
        self.is_admitting = all_placed and self._admit(plan, now)

        if not plan.scheduled:
            return None
        plan.released_request_ids, self.released_ids = self.released_ids, []
        if self.max_num_drafts:
            self._add_drafts(plan)
        return plan

    def settle(self) -> list[Request]:
        """The step is over: its members, in the plan's order. Those that ended while it ran give their blocks back now."""
        members, self.in_flight = self.in_flight, []
        for request in members:
            request.num_in_flight_tokens = request.num_draft_tokens = 0
            if request.is_finished:
                self._release_blocks(request)
        return members

    def _schedule_running(self, plan: SchedulerOutput) -> bool:
        """False if blocks ran out. Then nobody is to be admitted."""
        all_placed = True
        for request, num_tokens in self._deal_budget():
            if request.status is not RequestStatus.RUNNING:
                all_placed = False  # it was preempted for an earlier one
            elif num_tokens > 0:
                try:
                    copies = self._make_room(request, num_tokens)
                    if copies is None:
                        all_placed = False
                    else:
                        self._put(request, num_tokens, copies, plan)
                except Exception as error:  # the boundary: one request's data must not end the engine
                    self._break(request, error)
        return all_placed

    def _deal_budget(self) -> list[tuple[Request, int]]:
        """Tokens for each running request: one for each decode, and what the pace allows for prompts."""
        pending = [request.num_pending_tokens for request in self.running]
        prompts = [i for i, num_tokens in enumerate(pending) if num_tokens > 1]
        self.allowance = self.pace.allowance(self._decodes(pending), min(self.max_num_seqs, len(pending) + len(self.waiting)))
        if prompts:
            sizes = [(pending[i], self.running[i].num_computed_tokens) for i in prompts]
            for i, share in zip(prompts, self.pace.share_out(self.allowance, sizes, self._newcomers()), strict=True):
                pending[i] = share
        return list(zip(self.running, pending, strict=True))

    def _decodes(self, pending: list[int]) -> StepShape:
        """The step's part that is no prompt."""
        contexts = [request.num_computed_tokens for request, count in zip(self.running, pending, strict=True) if count == 1]
        return StepShape(len(contexts), sum(contexts), 0, 0)

    def _newcomers(self) -> list[int]:
        """Lengths of the waiting requests that may be admitted in this step, as far as that is known before."""
        num_seats = self.max_num_seqs - len(self.running)
        if num_seats <= 0 or not self.is_admitting or self.pace.is_strict:
            return []
        return [request.num_tokens for request in self.waiting.window()[:num_seats]]

    def _make_room(self, request: Request, num_tokens: int) -> list[BlockCopy] | None:
        """Blocks for a running request, taken from later ones if need be. None: it must wait for earlier ones to end."""
        while (copies := self._take_blocks(request, num_tokens)) is None:
            if self.running[-1] is not request:
                self._preempt(self.running[-1])
            elif len(self.running) > 1:
                return None
            else:
                raise InvariantError(f"request {request.request_id} is alone and does not fit")
        return copies

    def _take_blocks(self, request: Request, num_tokens: int) -> list[BlockCopy] | None:
        """Extend the tables for the next `num_tokens` tokens and make each block that they go to the request's own.

        None, and nothing has changed, if too few blocks are available. Copy on write: a block that others hold, or that can be
        found, is replaced by a copy. The copies returned are made before the step computes anything.
        """
        tables, pool = request.block_tables, self.pool
        start, length = request.num_computed_tokens, len(request.block_tables[0])
        foreign = []
        for group, table in enumerate(tables):
            for i in range(start // self.block_size, length):
                if not pool.is_writable(table[i]):
                    foreign.append((group, i))  # noqa: PERF401  (a comprehension costs a frame, for every request in every step)
        num_new = num_blocks_for(start + num_tokens, self.block_size) - length
        if num_new * len(tables) + len(foreign) > pool.num_available:
            return None

        copies = []
        for group, i in foreign:
            source, (target,) = tables[group][i], pool.allocate(1, group)
            copies.append(BlockCopy(source, target))
            tables[group][i] = target
            pool.release([source])
        if num_new:
            for group, table in enumerate(tables):
                table.extend(pool.allocate(num_new, group))
        return copies

    def _put(self, request: Request, num_tokens: int, copies: list[BlockCopy], plan: SchedulerOutput) -> None:
        """Write the request's share into the plan: all of it, or nothing if this raises."""
        start = request.num_computed_tokens
        end = start + num_tokens
        block_ids = []
        for table in request.block_tables:
            block_ids.append(table.copy())  # noqa: PERF401  (as above)
        share = ScheduledRequest(
            request.request_id,
            request.token_ids[start:end],
            start,
            block_ids,
            end == request.num_tokens,
            request.num_prompt_logprobs_before(end),
        )
        if not request.is_known_to_runner:
            plan.new_requests.append(request.to_new_request())
            request.is_known_to_runner = True
        plan.block_copies.extend(copies)
        plan.scheduled.append(share)
        plan.num_tokens += num_tokens
        is_decode = num_tokens == 1 and share.samples
        self.shape = self.shape.with_decode(start) if is_decode else self.shape.with_prompt(num_tokens, start)
        request.num_in_flight_tokens = num_tokens
        self.in_flight.append(request)

    # --- drafts ---

    def _add_drafts(self, plan: SchedulerOutput) -> None:
        """Let requests that decode compute what may come next as well, where that pays: with room, blocks and time that nobody else has taken.

        Never while a request is guarded, whose blocks are counted without drafts.
        """
        decodes = StepShape(self.shape.num_decodes, self.shape.decode_context, 0, 0)
        if not decodes.num_decodes or any(request.num_preemptions >= MAX_PREEMPTIONS for request in self.running):
            return
        token_seconds = self.pace.model.predict(decodes) / decodes.num_decodes
        num_rows = self.max_num_rows - sum(share.samples for share in plan.scheduled)
        room = min(num_rows, self.max_num_batched_tokens - plan.num_tokens)
        for request, share in zip(self.in_flight.copy(), plan.scheduled, strict=True):
            if share.samples and len(share.token_ids) == 1:
                try:
                    num_tokens = self._add_draft(request, share, room, token_seconds)
                except Exception as error:  # the boundary, as above
                    self._break(request, error)
                else:
                    room -= num_tokens
                    plan.num_tokens += num_tokens

    def _add_draft(self, request: Request, share: ScheduledRequest, room: int, token_seconds: float) -> int:
        """How many tokens were added to a request's share; the books follow. Its matches are followed in any case."""
        if request.drafts is None:
            request.drafts = PromptLookup(request.token_ids)
        # A draft ends before the last token that may come: from that nothing is computed.
        most = min(self.max_num_drafts, room, request.max_num_computed_tokens - request.num_tokens)
        if not request.drafts.follow() or most <= 0:
            return 0
        start, model = request.num_computed_tokens, self.pace.model
        num_tokens = worth(request.drafts.chance, model.draft_seconds(start), token_seconds, most)
        if num_tokens:
            num_tokens = min(num_tokens, self.pace.num_drafts_within(self.shape, start))
        num_tokens = min(num_tokens, self._make_room_for_draft(request, num_tokens))
        if num_tokens > 0:
            share.token_ids += request.drafts.draft(num_tokens)
            share.num_drafts = request.num_draft_tokens = num_tokens
            share.block_ids = [table.copy() for table in request.block_tables]
            request.num_in_flight_tokens += num_tokens
            self.shape = self.shape.with_drafts(num_tokens, start)
        return num_tokens

    def _make_room_for_draft(self, request: Request, num_tokens: int) -> int:
        """Extends the tables for a draft of `num_tokens` behind the known tokens, as far as blocks are available: how many have a place now."""
        tables, pool = request.block_tables, self.pool
        length = len(tables[0])
        num_new = num_blocks_for(request.num_tokens + num_tokens, self.block_size) - length
        num_new = min(num_new, pool.num_available // len(tables))
        if num_new > 0:
            for group, table in enumerate(tables):
                table.extend(pool.allocate(num_new, group))
        return (length + max(num_new, 0)) * self.block_size - request.num_tokens

    def take_back_drafts(self, request: Request) -> None:
        """Release the blocks that were taken for drafts which did not hold."""
        length = num_blocks_for(request.num_computed_tokens, self.block_size)
        for table in request.block_tables:
            if len(table) > length:
                self.pool.release(table[length:])
                del table[length:]

    # --- admission ---

    def _admit(self, plan: SchedulerOutput, now: float) -> bool:
        """Admit from the queue while seats, the pace and blocks last. False if what ended it were blocks, or a leader to wait for."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return True
        sure = possible = 0
        owed = self.groups.owed
        for running in self.running:
            own_sure, own_possible = owed(running, running)
            sure += own_sure
            possible += own_possible
        is_guarded = any(request.num_preemptions >= MAX_PREEMPTIONS for request in self.running)
        while self.waiting and len(self.running) < self.max_num_seqs and self.allowance.has_room:
            request = front = self.waiting.peek()
            is_guarded = is_guarded or request.num_preemptions >= MAX_PREEMPTIONS
            try:
                start = self._find_place(request, sure, possible, is_guarded)
                if start is None:
                    return False
                if not self.pace.is_strict:
                    # Only while the front would fit as well: nobody is passed for want of blocks.
                    request = shortest_that_may_pass(self.waiting.window())
                    place = None if request is front else self._find_place(request, sure, possible, is_guarded)
                    request, start = (front, start) if place is None else (request, place)
                self._start(request, start, plan, now)
                own_sure, own_possible = self.groups.owed(request, request)
                sure, possible = sure + own_sure, possible + own_possible
            except Exception as error:  # the boundary, as above
                self._break(request, error)
        return True

    def _find_place(self, request: Request, sure: int, possible: int, is_guarded: bool) -> Start | None:
        """Where a waiting request may begin now; None if it must wait for its leader or for blocks."""
        start = self._find_start(request)
        return start if start is not None and self._finds_room(request, start, sure, possible, is_guarded) else None

    def _finds_room(self, request: Request, start: Start, sure: int, possible: int, is_guarded: bool) -> bool:
        """Whether a waiting request may begin so, beside running requests that surely need `sure` blocks more and possibly others."""
        own_sure, own_possible = self.groups.owed(request, start)
        share = 1.0 if is_guarded else self.caution * self.used_share
        # Lent blocks need no allocating, but cached ones stop being available, and part-filled ones will be copied.
        num_needed = sure + own_sure + math.ceil(share * (possible + own_possible))
        num_needed += self.pool.count_cached(held_blocks(start.block_tables, start.num_freed_blocks))
        is_part_filled = start.num_computed_tokens % self.block_size > 0
        num_needed += is_part_filled * len(self.groups)
        if is_guarded:
            # Blocks that are shared behind windows will be given back by one and still be held by another: they save nothing in the end.
            num_needed += self.pool.num_sliding_shares
            for group, _ in self.groups.sliding:
                lent = start.block_tables[group][start.num_freed_blocks[group] :]
                num_needed += len(lent) - self.pool.count_cached(lent) - is_part_filled
        return num_needed <= self.pool.num_available

    def _start(self, request: Request, start: Start, plan: SchedulerOutput, now: float) -> None:
        """Admit a request for which there is room, and let it compute."""
        self._join(request, start, now)
        num_tokens = self.allowance.offer(request.num_pending_tokens, request.num_computed_tokens)
        copies = self._take_blocks(request, num_tokens)
        if copies is None:
            raise InvariantError(f"request {request.request_id} was admitted without enough blocks")
        self._put(request, num_tokens, copies, plan)
        self.allowance.use(num_tokens, start.num_computed_tokens)

    def _find_start(self, request: Request) -> Start | None:
        """The computed tokens that others lend a newcomer. None: it must wait for its leader.

        Of the requests of one family (n > 1) the first to run computes the prompt. Its siblings wait for that, which holds up the
        queue only while the leader, which runs, computes its prompt; then they begin with all of the prompt but its last token,
        whose row they need for their own first sample. If no member runs, or if the windows of those that do have left blocks behind
        that a sibling needs, the next one is on its own.
        """
        most = request.num_tokens - 1  # the last known token is always left to compute: the step samples from its row
        from_nothing = Start([[] for _ in self.groups.windows], [0] * len(self.groups), 0, False)
        if request.owes_prompt_logprobs:
            return from_nothing  # every row of its prompt is needed
        if request.num_output_tokens == 0 and request.message.parent_id is not None:
            must_wait = False
            for member in self.families.get(request.message.parent_id, ()):
                if _equal_prompts(member, request):
                    if member.num_computed_tokens >= most:
                        start = self._fork(member, most)
                        if start is not None:
                            return start
                    else:
                        must_wait = True
            if must_wait:
                return None
        if not self.pool.enable_prefix_caching:
            return from_nothing
        found = self.pool.match(request.hashes_of_full_blocks(most // self.block_size, self.block_size))
        num_tokens = len(found[0]) * self.block_size
        return Start(found, self.groups.behind(num_tokens), num_tokens, True)

    def _fork(self, member: Request, num_tokens: int) -> Start | None:
        """A start behind the first tokens of a running request. None if it does not hold any more what that takes."""
        num_freed = self.groups.behind(num_tokens)
        if any(own > freed for own, freed in zip(member.num_freed_blocks, num_freed, strict=True)):
            return None
        length = num_blocks_for(num_tokens, self.block_size)
        tables = [[0] * freed + table[freed:length] for table, freed in zip(member.block_tables, num_freed, strict=True)]
        return Start(tables, num_freed, num_tokens, False)

    def _join(self, request: Request, start: Start, now: float) -> None:
        """A waiting request becomes a running one."""
        self.pool.share(held_blocks(start.block_tables, start.num_freed_blocks))
        request.block_tables, request.num_freed_blocks = start.block_tables, start.num_freed_blocks
        request.num_computed_tokens = start.num_computed_tokens
        request.num_published_blocks = start.num_computed_tokens // self.block_size
        if request.scheduled_time is None:
            request.scheduled_time = now
            if start.is_lookup:
                request.num_cached_tokens = min(start.num_computed_tokens, request.num_prompt_tokens)
                self.totals.prefix_queries += request.num_prompt_tokens
                self.totals.prefix_hits += request.num_cached_tokens

        self.waiting.take(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_key)
        if request.message.parent_id is not None:
            self.families.setdefault(request.message.parent_id, []).append(request)

    # --- leaving ---

    def _preempt(self, request: Request) -> None:
        """Back to the queue without blocks; its tokens will be computed again."""
        self._leave(request)
        self._release_blocks(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.totals.num_preemptions += 1
        self.caution = min(1.0, self.caution + CAUTION_RISE)
        self.waiting.push(request)

    def finish(self, request: Request, is_doubtful: bool = False) -> None:
        """End a request in any state. Its blocks are free at once, or when the step that uses them is settled.

        `is_doubtful`: what its blocks hold may be wrong; let nobody find it.
        """
        if is_doubtful:
            self.pool.forget(held_blocks(request.block_tables, request.num_freed_blocks))
            for group, _ in self.groups.sliding:
                self.pool.forget_content(group, request.block_hashes[: request.num_freed_blocks[group]])
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        if was_running:
            used = request.num_output_tokens / (request.max_num_tokens - request.num_prompt_tokens)
            self.used_share += USED_SHARE_WEIGHT * (used - self.used_share)
            self._leave(request)
        else:
            self.waiting.note_finished()
        if request.num_in_flight_tokens == 0:
            self._release_blocks(request)

    def _leave(self, request: Request) -> None:
        """Out of the running requests; the runner will be told."""
        del self.running[bisect_left(self.running, request.key, key=_key)]
        if request.message.parent_id is not None:
            family = self.families[request.message.parent_id]
            family.remove(request)
            if not family:
                del self.families[request.message.parent_id]
        if request.is_known_to_runner:
            self.released_ids.append(request.request_id)
            request.is_known_to_runner = False

    def free_unseen(self, request: Request) -> None:
        """Give back the blocks that no coming token of this request sees, nor a fork that computes its last token again."""
        for group, window in self.groups.sliding:
            freed, behind = request.num_freed_blocks[group], (request.num_computed_tokens - window) // self.block_size
            if behind > freed:
                table = request.block_tables[group]
                self.pool.release(table[freed:behind])
                table[freed:behind] = [0] * (behind - freed)
                request.num_freed_blocks[group] = behind

    def _release_blocks(self, request: Request) -> None:
        self.pool.release(held_blocks(request.block_tables, request.num_freed_blocks))
        request.block_tables = [[] for _ in self.groups.windows]
        request.num_freed_blocks = [0] * len(self.groups)
        request.num_computed_tokens = 0
        request.num_published_blocks = 0

    def _break(self, request: Request, error: Exception) -> None:
        """A request that raised ends here; the core reports it."""
        self.finish(request, is_doubtful=True)
        self.broken.append((request, f"{type(error).__name__}: {error}"))


def _key(request: Request) -> tuple[int, float, int]:
    return request.key


def _equal_prompts(a: Request, b: Request) -> bool:
    return a.message.cache_salt == b.message.cache_salt and a.message.prompt_token_ids == b.message.prompt_token_ids
