"""The simulation is worth what it catches: each bug below is planted in the real engine, and some seed must fail on it.

A planted bug is a change of a few characters in one function of the engine, made on its source text. If the text to be changed is
not there any more, the test fails and asks for a new one. Needs Python only.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from simulator import run_seeds

from octavo import config
from octavo.engine import block_pool, policy, scheduler
from octavo.engine.block_pool import BlockPool
from octavo.engine.core import EngineCore
from octavo.engine.kv_groups import KvGroups
from octavo.engine.pace import Pace
from octavo.engine.policy import WaitingQueue
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_time import StepTimeModel

MOST_SEEDS = 150


@dataclass(frozen=True)
class Bug:
    name: str
    owner: Any  # a class or a module
    function: str
    old: str
    new: str


PUBLISH_NOW = """self.in_flight.append(request)
    for i in range(end // self.block_size):
        hashes = request.hashes_of_full_blocks(i + 1, self.block_size)
        for table in request.block_tables:
            self.pool.publish(table[i], hashes[i])"""

FREE_FIRST = """self.scheduler.free_unseen(request)
    self._publish(request)"""

BUGS = [
    # blocks
    Bug("one block too few", Scheduler, "_take_blocks", "start + num_tokens, self.block", "start + num_tokens - 1, self.block"),
    Bug("no holder added when shared", Scheduler, "_join", "self.pool.share(held_blocks(start.block_tables, start.num_freed_blocks))", "pass"),
    Bug("freed while somebody holds it", BlockPool, "release", "-= 1\n        if self._num_holders[block_id] == 0", "-= 1\n        if self._num_holders[block_id] <= 1"),
    Bug("freed twice after an abort", Scheduler, "finish", "if request.num_in_flight_tokens == 0:\n        self._release_blocks(request)", "self.pool.release(held_blocks(request.block_tables, request.num_freed_blocks))"),
    Bug("never freed after an abort in flight", Scheduler, "settle", "if request.is_finished:", "if False:"),
    Bug("hit taken without leaving the cached list", BlockPool, "share", "del self._cached[block_id]", "pass"),
    Bug("no copy on write", Scheduler, "_take_blocks", "if not pool.is_writable(table[i])", "if False"),
    Bug("copied the wrong way round", Scheduler, "_take_blocks", "BlockCopy(source, target)", "BlockCopy(target, source)"),
    Bug("copied, but the old block kept", Scheduler, "_take_blocks", "tables[group][i] = target", "pass"),
    # the prefix cache
    Bug("published before it is computed", Scheduler, "_put", "self.in_flight.append(request)", PUBLISH_NOW),
    Bug("published one block too many", EngineCore, "_publish", "num_full = request.num_computed_tokens // self.block_size", "num_full = -(-request.num_computed_tokens // self.block_size)"),
    Bug("parent left out of the hash", Request, "hashes_of_full_blocks", "hashes[-1] if hashes else ", ""),
    Bug("tokens left out of the hash", block_pool, "hash_block", "parent + array(\"i\", token_ids).tobytes()", "parent"),
    Bug("salt left out of the hash", Request, "hashes_of_full_blocks", "self.message.cache_salt", "None"),
    Bug("evicted, but can still be found", BlockPool, "_allocate_one", "self._unpublish(block_id)", "self._hash_of[block_id] = None"),
    Bug("all tokens taken from the cache", Scheduler, "_find_start", "most = request.num_tokens - 1", "most = request.num_tokens"),
    Bug("garbage can be found", Scheduler, "finish", "if is_doubtful:", "if False:"),
    Bug("cache read although scores are owed", Scheduler, "_find_start", "if request.owes_prompt_logprobs:", "if False:"),
    # groups of layers
    Bug("freed one block too early", Scheduler, "free_unseen", "(request.num_computed_tokens - window) // self.block_size", "(request.num_computed_tokens - window) // self.block_size + 1"),
    Bug("freed by another group's window", Scheduler, "free_unseen", "(request.num_computed_tokens - window)", "(request.num_computed_tokens - self.groups.sliding[-1][1])"),
    Bug("freed in every group", Scheduler, "free_unseen", "in self.groups.sliding:", "in [(g, w or 8) for g, w in enumerate(self.groups.windows)]:"),
    Bug("never freed while it runs", Scheduler, "free_unseen", "if behind > freed:", "if False:"),
    Bug("freed blocks left in the table", Scheduler, "free_unseen", "table[freed:behind] = [0] * (behind - freed)", "pass"),
    Bug("freed blocks not counted", Scheduler, "free_unseen", "request.num_freed_blocks[group] = behind", "pass"),
    Bug("freed blocks not returned", Scheduler, "free_unseen", "self.pool.release(table[freed:behind])", "pass"),
    Bug("freed entries published", EngineCore, "_advance", "self._publish(request)", FREE_FIRST),
    Bug("hit with a block of the window missing", BlockPool, "_shorten", "count - reach", "count - reach + 1"),
    Bug("hit with only the last block of the window", BlockPool, "_shorten", "i > max(0, count - reach)", "i > max(0, count - 1)"),
    Bug("hit shortened for one group and not asked again of another", BlockPool, "_shorten", "count, is_right = i, False", "count = i"),
    Bug("hit that the groups that see all do not share", BlockPool, "match", "if hashes[i] not in index), count)", "if hashes[i] not in index), len(hashes))"),
    Bug("one group's block given to another", BlockPool, "match", "zip(self._block_of, firsts, strict=True)", "zip([self._block_of[-1]] * len(firsts), firsts, strict=True)"),
    Bug("a group's new blocks taken for another", Scheduler, "_take_blocks", "table.extend(pool.allocate(num_new, group))", "table.extend(pool.allocate(num_new))"),
    Bug("a group's copies taken for another", Scheduler, "_take_blocks", "pool.allocate(1, group)", "pool.allocate(1)"),
    Bug("only one group's blocks shared by a fork", Scheduler, "_join", "held_blocks(start.block_tables, start.num_freed_blocks)", "start.block_tables[0][start.num_freed_blocks[0] :]"),
    Bug("only one group's blocks copied on write", Scheduler, "_take_blocks", "for group, table in enumerate(tables):\n        for i", "for group, table in enumerate(tables[:1]):\n        for i"),
    Bug("forked from a window that has moved on", Scheduler, "_fork", "if any(own > freed", "if False and any(own > freed"),
    Bug("only one group's blocks released", Scheduler, "_release_blocks", "held_blocks(request.block_tables, request.num_freed_blocks)", "request.block_tables[0][request.num_freed_blocks[0] :]"),
    Bug("freed count kept after a preemption", Scheduler, "_release_blocks", "request.num_freed_blocks = [0] * len(self.groups)", "pass"),
    Bug("only one group's new blocks counted", Scheduler, "_take_blocks", "num_new * len(tables)", "num_new"),
    Bug("windows not counted on admission", KvGroups, "owed", "sure += soon_here - num_blocks", "pass"),
    Bug("a window's blocks counted without the step's tokens", config, "window_blocks", "(window + chunk - 2)", "(window - 1)"),
    Bug("a window counted as if it saw all", KvGroups, "owed", "soon if soon < cap else cap", "soon"),
    Bug("what can never fit is taken", config.CacheConfig, "most_blocks", "return sum(", "return max("),
    Bug("shared windows counted as saved for ever", Scheduler, "_finds_room", "if is_guarded:", "if False:"),
    # families
    Bug("forked from another prompt", scheduler, "_equal_prompts", " and a.message.prompt_token_ids == b.message.prompt_token_ids", ""),
    Bug("forked across salts", scheduler, "_equal_prompts", "a.message.cache_salt == b.message.cache_salt and ", ""),
    Bug("forked before the prompt is computed", Scheduler, "_find_start", "if member.num_computed_tokens >= most:", "if True:"),
    Bug("forked from one that has left", Scheduler, "_leave", "family.remove(request)", "pass"),
    # order, budget, progress
    Bug("last come, first served", policy, "_key", "return request.key", "return (0, -request.key[1], -request.key[2])"),
    Bug("priorities ignored", policy, "order_key", "message.priority if policy", "0 if policy"),
    Bug("the earliest is preempted", Scheduler, "_make_room", "self._preempt(self.running[-1])", "self._preempt(self.running[0])"),
    Bug("preempted without end", Scheduler, "_admit", "is_guarded = is_guarded or", "is_guarded = False and"),
    Bug("budget ignored on admission", Scheduler, "_start", "self.allowance.offer(request.num_pending_tokens, request.num_computed_tokens)", "request.num_pending_tokens"),
    Bug("decodes not counted in the budget", Pace, "allowance", "self.max_num_tokens - decodes.num_decodes", "self.max_num_tokens"),
    Bug("one seat too many", Scheduler, "_admit", "while self.waiting and len(self.running) < self.max_num_seqs", "while self.waiting and len(self.running) <= self.max_num_seqs"),
    Bug("decodes stop while a prompt is computed", Scheduler, "_deal_budget", "if prompts:", "pending = [p if p > 1 or not prompts else 0 for p in pending]\n    if prompts:"),
    Bug("prompts stop while a newcomer is shorter", Pace, "share_out", "shares[0] = allowance.part(FIRST_SHARE).take(pending, computed)", "shares[0] = 0"),
    Bug("a prompt's first part not counted", Pace, "share_out", "allowance.use(shares[0], computed)", "pass"),
    Bug("more for prompts than the target leaves", Pace, "allowance", "self.target - alone", "self.target"),
    Bug("time used on admission not counted", Scheduler, "_start", "self.allowance.use(num_tokens, start.num_computed_tokens)", "pass"),
    Bug("passed without end", WaitingQueue, "take", "earlier.num_passed_tokens += request.num_tokens", "pass"),
    Bug("only the front's patience asked", policy, "shortest_that_may_pass", "min(slack, earlier.patience)", "slack"),
    Bug("passed after a preemption", Request, "patience.fget", "0 if self.num_preemptions else ", ""),
    Bug("passed by another priority", policy, "shortest_that_may_pass", "request.num_preemptions or request.key[0] != best.key[0]", "request.num_preemptions"),
    Bug("a wild time believed", StepTimeModel, "observe", "if not 0 < seconds < 1e6:", "if False:"),
    Bug("admission stops for ever", Scheduler, "_admit", "if not self.waiting or", "if self.running or not self.waiting or"),
    Bug("the queue forgets an abort", WaitingQueue, "note_finished", "self._num_finished += 1", "pass"),
    Bug("the queue limit is one too high", EngineCore, "_check", "len(self.requests) >= limit", "len(self.requests) > limit"),
    # the runner
    Bug("the runner is not told who left", Scheduler, "_leave", "self.released_ids.append(request.request_id)", "pass"),
    Bug("the runner is not told who came back", Scheduler, "_leave", "request.is_known_to_runner = False", "pass"),
    Bug("the runner is told once, although the step failed", EngineCore, "fail_step", "self.scheduler.released_ids.extend(plan.released_request_ids)", "pass"),
    Bug("output left out when it comes back", Request, "to_new_request", "self.token_ids[self.num_prompt_tokens :]", "message.output_token_ids"),
    Bug("preempted, but counted as computed", Scheduler, "_release_blocks", "request.num_computed_tokens = 0", "pass"),
    # the client
    Bug("output after an abort", EngineCore, "update", "if request.is_finished:", "if False:"),
    Bug("output of an abort that waits to be told", EngineCore, "abort", "if self._pending:", "if False:"),
    Bug("stopped before min_tokens", Request, "end_reason", " and num_output_tokens >= self.min_tokens", ""),
    Bug("one token too many", Request, "end_reason", ">= self.max_num_tokens", "> self.max_num_tokens"),
    Bug("end of sequence told as a stop token", Request, "end_reason", "None if last in self.eos_token_ids else last", "last"),
    Bug("scores sent twice", Request, "take_new_prompt_logprobs", "scores[max(0, self.num_prompt_logprobs_sent - start) :]", "scores"),
    Bug("a failure dropped", EngineCore, "_advance", "return self._fail(request, sampled.error)", "return None"),
    Bug("a failure in schedule not reported", Scheduler, "_break", "self.broken.append", "list().append"),
    Bug("a token that is none passed on", EngineCore, "_what_is_wrong", "or (self.vocab_size and not 0 <= token_id < self.vocab_size)", ""),
    Bug("an answer to no draft taken", EngineCore, "_what_is_wrong", "not token_ids or token_ids[:-1] != drafts[: len(token_ids) - 1] or len(token_ids) > len(drafts) + 1", "False"),
    Bug("drafts that failed are computed", EngineCore, "_take_tokens", "request.num_computed_tokens += num_held", "request.num_computed_tokens += scheduled.num_drafts"),
    Bug("a draft held, and one row more", EngineCore, "_take_tokens", "request.num_computed_tokens += num_held", "request.num_computed_tokens += num_held and num_held + 1"),
    Bug("drafts go on behind a stop token", EngineCore, "_take_tokens", "if finish_reason is not None:", "if False:"),
    Bug("blocks of drafts kept", EngineCore, "_advance", "self.scheduler.take_back_drafts(request)", "pass"),
    Bug("blocks of drafts lost", Scheduler, "take_back_drafts", "self.pool.release(table[length:])", "pass"),
    Bug("drafts without blocks", Scheduler, "_make_room_for_draft", "if num_new > 0:", "if False:"),
    Bug("drafts beyond the available blocks", Scheduler, "_make_room_for_draft", "min(num_new, pool.num_available // len(tables))", "num_new"),
    Bug("drafts beyond the budget", Scheduler, "_add_drafts", "self.max_num_batched_tokens - plan.num_tokens", "self.max_num_batched_tokens"),
    Bug("drafts beyond the step's time", Pace, "num_drafts_within", "self.target is None or self.is_strict", "True"),
    Bug("drafts in an old table", Scheduler, "_add_draft", "share.block_ids = [table.copy() for table in request.block_tables]", "pass"),
    Bug("drafts of a prompt's chunk", Scheduler, "_add_drafts", "if share.samples and len(share.token_ids) == 1:", "if True:"),
    Bug("a duplicate taken", EngineCore, "_check", "if message.request_id in self.requests:", "if False:"),
    Bug("a result for another step taken", EngineCore, "update", "result.step != plan.step or", ""),
    Bug("shared tokens counted twice", BlockPool, "num_used.fget", "self.num_blocks - len(self._free) - len(self._cached)", "sum(self._num_holders)"),
]  # fmt: skip


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The engine with the bug in it."""
    is_property = bug.function.endswith(".fget")
    name = bug.function.removesuffix(".fget")
    original = inspect.getattr_static(bug.owner, name)
    source = textwrap.dedent(inspect.getsource(original.fget if is_property else original))
    assert source.count(bug.old) == 1, f"{bug.name}: {bug.old!r} is {source.count(bug.old)} times in {name}"
    module = bug.owner if inspect.ismodule(bug.owner) else sys.modules[bug.owner.__module__]
    namespace: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(bug.old, bug.new)
    exec(compile(code, f"<{bug.name}>", "exec"), vars(module), namespace)
    # A function of a module may have been imported by name elsewhere: it is changed wherever it is known.
    owners = [bug.owner]
    if inspect.ismodule(bug.owner):
        owners = [
            m
            for n, m in list(sys.modules.items())
            if n.startswith("octavo.") and getattr(m, name, None) is original
        ]
    patches = [mock.patch.object(owner, name, namespace[name]) for owner in owners]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def seeds_until_caught(most_seeds: int = MOST_SEEDS) -> int | None:
    for seed in range(most_seeds):
        try:
            run_seeds(range(seed, seed + 1), report=lambda text: None)
        except AssertionError:  # a Violation, which also wraps whatever the engine raised
            return seed + 1
    return None


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_planted_bug_is_caught(bug: Bug) -> None:
    with planted(bug):
        seeds = seeds_until_caught()
    assert seeds is not None, f"{MOST_SEEDS} seeds do not notice this bug: {bug.name}"


def test_nothing_is_caught_without_a_bug() -> None:
    """The other half of the proof: planting as such breaks nothing. (The engine as it is passes all these seeds in `test_seeds`.)"""
    bug = Bug("no bug", Scheduler, "add", "self.waiting.push(request)", "self.waiting.push(request)  # as it was")
    with planted(bug):
        assert seeds_until_caught(10) is None
