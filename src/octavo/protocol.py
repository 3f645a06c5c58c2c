"""Every message between the API process and the engine process, and between the engine room and the runner.

All of it is msgspec structs: encoded as MessagePack arrays with a tag, never pickled. A message that does not decode by
this schema is refused. On a stream each is a frame: its length in four bytes, little-endian, then the MessagePack bytes.
Knows nothing of sockets, devices or HTTP.

The wire:   API -> engine   Start, then EngineCoreRequest, Abort, ResetPrefixCache, Shutdown
            engine -> API   EngineReady, EngineCoreOutputs, EngineFailed
The step:   Scheduler -> SchedulerOutput -> runner -> ModelRunnerOutput -> EngineCore.update
"""

from __future__ import annotations

from enum import Enum

import msgspec

from octavo.config import EngineArgs
from octavo.sampling_params import SamplingParams

# The longest frame that either end accepts. A prompt of a million tokens takes 5 MB.
MAX_FRAME_BYTES = 64 << 20


class FinishReason(str, Enum):
    """Why a sequence ended, in OpenAI's words; ERROR when the engine failed on it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorKind(str, Enum):
    """Which kind of refusal or failure an output carries; the client turns it back into an exception."""

    CONTEXT_LENGTH = "context_length"
    OVERLOADED = "overloaded"
    INVALID = "invalid"
    INTERNAL = "internal"


class _Message(msgspec.Struct, tag=True, array_like=True, kw_only=False):
    """Base of what crosses the socket."""


# --- API -> engine ---


class Start(_Message):
    """The first frame: what to build. The model is a path on this machine, found and fetched by the API process."""

    args: EngineArgs
    model_path: str


class EngineCoreRequest(_Message):
    """One sequence to generate.

    Of a request with n > 1 there are n of these, with the same `parent_id` and prompt: the engine computes the prompt once and
    forks. After a restart of the engine `output_token_ids` holds what the client already has; generation goes on behind it.
    """

    request_id: str  # made by the client, unique in its lifetime; never what a user sent
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # n is 1 here, seed and max_tokens are set
    stop_token_ids: list[int]  # the parameters' own and, unless ignore_eos, the model's end-of-sequence ids
    eos_token_ids: list[int]  # of them, those whose stop_reason is None
    arrival_time: float  # seconds, the client's monotonic clock: only orders and measures
    output_token_ids: list[int] = []
    parent_id: str | None = None
    cache_salt: str | None = None
    priority: int = 0


class Abort(_Message):
    request_ids: list[str]


class ResetPrefixCache(_Message):
    """Forget all cached prefixes that no running request holds."""


class Shutdown(_Message):
    """End the engine process after the step at hand."""


# --- engine -> API ---


class Phase(msgspec.Struct, array_like=True):
    """One phase of the start and its seconds."""

    name: str
    seconds: float


class EngineReady(_Message):
    """Sent once, when the engine can take requests."""

    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    kv_cache_tokens: int  # that fit, in sequences of max_model_len
    weights_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    backend: str  # for people: "cpu avx2, 2 threads"
    phases: list[Phase]
    pid: int
    weights_fp16_bytes: int = 0  # what they would take in fp16


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: entry 0 is the token itself, then the best ones, descending.

    `rank` is the token's own, from 1. All values are finite.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class OutputError(msgspec.Struct, array_like=True):
    kind: ErrorKind
    message: str


class EngineCoreOutput(msgspec.Struct, array_like=True):
    """What one step brought one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token's id, None for end-of-sequence
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens 1.. in order, as far as this step computed
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; set with the first output
    scheduled_time: float = 0.0  # the engine's monotonic clock when it was first scheduled; set with the first output
    error: OutputError | None = None


class StepStats(msgspec.Struct, array_like=True):
    """The engine's books after a step. Counters are totals since the engine started."""

    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int  # held by running requests
    num_cached_blocks: int  # held by nobody, reusable by a matching prefix
    num_kv_tokens: int  # tokens in used blocks, once for each group of layers
    prefix_queries: int  # tokens
    prefix_hits: int  # tokens
    num_preemptions: int
    prompt_tokens: int  # prompt tokens computed
    generation_tokens: int
    batch_tokens: int  # of this step
    step_seconds: float  # of this step
    itl_target: float = 0.0  # seconds that the last step in which streams decode was to take at most; 0: none
    step_model: list[float] = []  # coefficients of engine/step_time, in seconds; empty before the first step
    num_drafts: int = 0  # of a request in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # draft tokens that held


class EngineCoreOutputs(_Message):
    """All outputs of a step in one message; also the heartbeat when idle, with no outputs."""

    outputs: list[EngineCoreOutput]
    stats: StepStats
    time: float  # the engine's monotonic clock


class EngineFailed(_Message):
    """The engine cannot start or go on; sent as its last word where it can."""

    message: str
    user_error: bool  # True: the user's files or options, exit code 2


ToEngine = Start | EngineCoreRequest | Abort | ResetPrefixCache | Shutdown
ToClient = EngineReady | EngineCoreOutputs | EngineFailed


# --- frames ---


class FrameError(ValueError):
    """The bytes of a stream are not frames of this protocol: the connection is of no further use."""


def encode_frame(encoder: msgspec.msgpack.Encoder, message: ToEngine | ToClient) -> bytes:
    """A message as one frame."""
    body = encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class FrameSplitter:
    """Cuts the bytes of a stream, as they come, into the bodies of frames. Holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes. Raises FrameError when a frame claims more than MAX_FRAME_BYTES."""
        buffer = self._buffer
        if not buffer:  # the usual case: what comes are whole frames
            bodies, used = _cut(data)
            buffer += data[used:]
            return bodies
        buffer += data
        bodies, used = _cut(buffer)
        del buffer[:used]
        return bodies


def _cut(data: bytes | bytearray) -> tuple[list[bytes], int]:
    """The bodies of the whole frames that `data` begins with, and how many bytes those frames take."""
    bodies = []
    at, size = 0, len(data)
    while size - at >= 4:
        length = int.from_bytes(data[at : at + 4], "little")
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes: the limit is {MAX_FRAME_BYTES}")
        if size - at - 4 < length:
            break
        bodies.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return bodies, at


# --- engine room <-> runner; never crosses a process on one device ---


class NewRequest(msgspec.Struct, array_like=True):
    """What the runner keeps for a request from its first step to its release."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    stop_token_ids: list[int]


class ScheduledRequest(msgspec.Struct, array_like=True):
    """One request's share of a step: compute `token_ids`, which sit at num_computed_tokens.. in the sequence.

    `samples`: the last known token is among them, so the step ends by sampling the next one.
    `num_drafts`: so many of them, the last ones, are not known but guessed. The step samples behind the last known token and behind each
    draft, as far as the drafts say what was sampled.
    `block_ids`: for each group of layers the whole block table as it is for this step. Blocks that the group's window has left behind
    stand in it as 0 and are not to be read.
    `num_prompt_logprobs`: rows of this step whose target is a prompt token and must be scored, or None.
    """

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[list[int]]
    samples: bool
    prompt_logprobs: int | None = None
    num_drafts: int = 0

    @property
    def draft_token_ids(self) -> list[int]:
        """Those of its tokens that are only guessed."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


class BlockCopy(msgspec.Struct, array_like=True):
    """Copy one block's K and V, all its layers, before the step computes anything (copy on write)."""

    source: int
    target: int


class SchedulerOutput(msgspec.Struct, array_like=True):
    """The plan of one step. Order of `scheduled` is the order of the batch's rows."""

    step: int
    new_requests: list[NewRequest]
    scheduled: list[ScheduledRequest]
    block_copies: list[BlockCopy]
    released_request_ids: list[str]  # finished, aborted or preempted since the last plan: the runner forgets them
    num_tokens: int


class SampledTokens(msgspec.Struct, array_like=True):
    """What the runner brings back for one scheduled request.

    `token_ids` is empty where the request did not sample (a chunk of a prompt), else one token, and one more for each draft that held: all
    but the last are the first drafts. `logprobs`: one entry per token where wanted. `error` ends that request only.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """Answers a SchedulerOutput: one entry per scheduled request, in the same order."""

    step: int
    sampled: list[SampledTokens]
