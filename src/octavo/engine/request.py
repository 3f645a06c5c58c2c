"""One sequence in the engine: which tokens are known, which are computed, which blocks hold them, and when it ends.

There is no prefill phase and no decode phase. A request has *known* tokens (prompt and output) and *computed* tokens (those
whose K and V are in its blocks). Each step computes some of the difference; when computed has caught up with known, the step
samples one more known token:

    token_ids     [ prompt ............................ | output ...... ]
                  [ computed ............... | pending ................. ] [ drafts ]
    block_tables  [ b0    | b1    | b2      ]    of each group of layers ceil(computed / block_size) entries, the last perhaps part-filled

Drafts are guesses of what is sampled next, computed in the same step; those that hold become known and computed at once, the others leave
nothing behind but slots that are written again.

Invariant between steps: each table has `ceil(num_computed_tokens / block_size)` entries, of which the first `num_freed_blocks` of its
group are freed (see kv_groups), and `num_computed_tokens < num_tokens`.

Knows nothing of other requests, of the pool that its blocks come from, or of the order in which requests are served.
"""

from __future__ import annotations

from enum import Enum, auto

from octavo.engine.block_pool import hash_block, hash_root
from octavo.engine.drafts import PromptLookup
from octavo.protocol import EngineCoreRequest, FinishReason, NewRequest, TokenLogprobs


class RequestStatus(Enum):
    WAITING = auto()  # in the queue, holds no block
    RUNNING = auto()  # holds blocks and takes part in steps
    PREEMPTED = auto()  # in the queue again: lost its blocks to an older request, keeps its tokens
    FINISHED = auto()  # ended, in whatever way; never leaves this state


class Request:
    """State of one sequence, from its arrival to its end.

    `key` is its place in the order of service, smaller is earlier; keys are unique.
    """

    __slots__ = (
        "block_hashes",
        "block_tables",
        "drafts",
        "eos_token_ids",
        "is_known_to_runner",
        "is_reported",
        "key",
        "max_num_tokens",
        "message",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_freed_blocks",
        "num_in_flight_tokens",
        "num_passed_tokens",
        "num_preemptions",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "num_published_blocks",
        "request_id",
        "scheduled_time",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self, message: EngineCoreRequest, key: tuple[int, float, int], max_model_len: int, num_groups: int = 1
    ) -> None:
        params = message.sampling_params
        self.message = message
        self.key = key
        self.request_id = message.request_id
        self.status = RequestStatus.WAITING

        self.token_ids = message.prompt_token_ids + message.output_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.stop_token_ids = frozenset(message.stop_token_ids)
        self.eos_token_ids = frozenset(message.eos_token_ids)
        self.min_tokens = params.min_tokens
        wanted = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self.max_num_tokens = min(wanted, max_model_len)

        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0  # of the step that is being computed, drafts included
        self.num_draft_tokens = 0  # of these, the drafts
        self.drafts: PromptLookup | None = None  # once it decodes, if drafts are made at all
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_freed_blocks = [0] * num_groups  # leading entries of each table that its group's window has left behind
        self.num_published_blocks = 0  # leading blocks of the tables that need no publishing any more
        self.block_hashes: list[bytes] = []

        self.num_preemptions = 0
        self.num_passed_tokens = 0  # of later requests, which were admitted before it
        self.num_cached_tokens = 0
        self.scheduled_time: float | None = None
        self.is_known_to_runner = False
        self.is_reported = False  # its first output has gone out
        # A request that comes back with output after a restart has delivered all scores of its prompt before the first of it.
        self.num_prompt_logprobs_sent = self.num_prompt_tokens - 1 if message.output_token_ids else 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_num_computed_tokens(self) -> int:
        """Tokens that will have K and V at most: the very last token is sampled, but nothing is computed from it."""
        return self.max_num_tokens - 1

    @property
    def patience(self) -> int:
        """How many tokens of later requests may still be admitted before it: in all, as many as it has itself. After a preemption, none."""
        return 0 if self.num_preemptions else len(self.token_ids) - self.num_passed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def end_reason(self) -> tuple[FinishReason | None, int | None]:
        """Whether the sequence as it is known now has ended, by which rule, and the stop token's id where that is to be told.

        A stop token counts once there are `min_tokens` new tokens; the two length limits always do.
        """
        num_output_tokens = self.num_output_tokens
        if num_output_tokens == 0:
            return None, None
        last = self.token_ids[-1]
        if last in self.stop_token_ids and num_output_tokens >= self.min_tokens:
            return FinishReason.STOP, None if last in self.eos_token_ids else last
        if len(self.token_ids) >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def hashes_of_full_blocks(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks, which must be full of known tokens. Each is computed once in a lifetime."""
        hashes = self.block_hashes
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else hash_root(self.message.cache_salt)
            hashes.append(hash_block(parent, self.token_ids[i * block_size : (i + 1) * block_size]))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]

    def to_new_request(self) -> NewRequest:
        """What the runner must be told before the first step. The output is copied: the original grows."""
        message = self.message
        output = self.token_ids[self.num_prompt_tokens :]
        return NewRequest(
            self.request_id, message.prompt_token_ids, output, message.sampling_params, message.stop_token_ids
        )

    # The row of prompt token i scores prompt token i + 1, so a prompt of P tokens has P - 1 scores. They are sent in order and
    # once, although a preempted request computes its rows again.

    @property
    def owes_prompt_logprobs(self) -> bool:
        wanted = self.message.sampling_params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1

    def num_prompt_logprobs_before(self, end: int) -> int | None:
        """How many best tokens to score in a step whose rows end before row `end`; None if they owe nothing."""
        if not self.owes_prompt_logprobs or min(end, self.num_prompt_tokens - 1) <= self.num_prompt_logprobs_sent:
            return None
        return self.message.sampling_params.prompt_logprobs

    def take_new_prompt_logprobs(self, start: int, scores: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
        """Of the scores of a step that began at row `start`, those that were not sent before; counts them as sent."""
        if not scores:
            return None
        news = scores[max(0, self.num_prompt_logprobs_sent - start) :]
        self.num_prompt_logprobs_sent += len(news)
        return news or None
