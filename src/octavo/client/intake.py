"""From what a user asks to what the engine is sent: prompts parsed, lengths and ids checked, choices given their own seeds.

Shared by the asynchronous client and the class LLM. Knows no engine, no stream and no HTTP.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Callable
from typing import NotRequired, TypedDict

import msgspec

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.protocol import EngineCoreRequest, EngineReady
from octavo.sampling_params import SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer

MAX_CACHE_SALT = 1024


class TextPrompt(TypedDict):
    """A prompt as text. A `cache_salt` keeps its cached prefix apart from others'."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is the text that they stand for, if it is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


class Asked(msgspec.Struct):
    """One call's prompt and settings, not yet checked."""

    token_ids: list[int]
    text: str | None
    params: SamplingParams
    cache_salt: str | None = None
    priority: int = 0
    arrival_time: float = 0.0


class Family(msgspec.Struct):
    """The engine requests of one call: n of them for n choices. `id` is ours, unique; `params` are complete."""

    id: str
    text: str | None
    params: SamplingParams
    requests: list[EngineCoreRequest]


class Intake:
    """Checks what is asked against one engine's limits.

    `max_logprobs`: the most that a request may ask for. `next_seed` gives a seed in 0..2^63-1 to a request that brings none.
    `allow_priority`: whether the engine's queue knows priorities. `clip`: shorten max_tokens to what the context holds instead of refusing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ready: EngineReady,
        *,
        max_logprobs: int,
        allow_priority: bool,
        clip: bool = False,
        next_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = ready.max_model_len
        self._vocab_size = ready.vocab_size
        self._max_logprobs = max_logprobs
        self._allow_priority = allow_priority
        self._clip = clip
        self._next_seed = next_seed
        self._counter = itertools.count(1)

    def parse(self, prompt: PromptType) -> tuple[list[int] | None, str | None, str | None]:
        """A prompt's token ids, text and cache salt; the ids are None where the text is still to be encoded."""
        if isinstance(prompt, str):
            return None, prompt, None
        if isinstance(prompt, (list, tuple)):
            return list(prompt), None, None
        if isinstance(prompt, dict):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown:
                raise InvalidRequestError(f"prompt: Octavo does not know {', '.join(sorted(map(repr, unknown)))}", "prompt")
            ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
            if isinstance(ids, (list, tuple)) or (ids is None and isinstance(text, str)):
                return None if ids is None else list(ids), text, prompt.get("cache_salt")
        raise InvalidRequestError(
            "prompt: must be a string, a list of token ids, {'prompt': ...} or {'prompt_token_ids': ...}", "prompt", "invalid_type"
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt's text, with the special tokens that the model wants in front. Raises InvalidRequestError."""
        return self._tokenizer.encode(text, param="prompt")

    def validate(self, prompt_len: int, params: SamplingParams) -> SamplingParams:
        """The parameters with max_tokens set, for a prompt of so many tokens.

        Raises ContextLengthError, InvalidRequestError.
        """
        longest = self._max_model_len
        if prompt_len == 0:
            raise InvalidRequestError("prompt: must hold at least one token", "prompt", "invalid_prompt")
        if prompt_len >= longest:
            raise ContextLengthError(
                f"prompt: {prompt_len} tokens, but the model's context is {longest} tokens and must have room for one more"
            )
        for field in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, field)
            if wanted is not None and wanted > self._max_logprobs:
                message = f"{field} = {wanted}: must be at most {self._max_logprobs}"
                raise InvalidRequestError(message, field, "integer_above_max_value")
        params.check_vocabulary(self._vocab_size)
        room = longest - prompt_len
        if params.max_tokens is not None and params.max_tokens <= room:
            return params
        if params.max_tokens is not None and not self._clip:
            raise ContextLengthError(
                f"prompt: {prompt_len} tokens and max_tokens = {params.max_tokens} are {prompt_len + params.max_tokens} tokens, "
                f"but the model's context is {longest} tokens; shorten the prompt or lower max_tokens"
            )
        return params.clone(max_tokens=room, min_tokens=min(params.min_tokens, room))

    def admit(self, asked: Asked) -> Family:
        """The engine requests for one call. Raises InvalidRequestError, ContextLengthError."""
        params = self.validate(len(asked.token_ids), asked.params)
        self._check(asked)
        eos = [] if params.ignore_eos else sorted(self._tokenizer.eos_token_ids)
        stops = sorted({*eos, *(params.stop_token_ids or ())})
        seed = self._next_seed() if params.seed is None else params.seed
        family = f"r{next(self._counter)}"
        requests = [
            EngineCoreRequest(
                request_id=family if params.n == 1 else f"{family}.{index}",
                prompt_token_ids=asked.token_ids,
                # Stop strings are found where the text is made, which is not in the engine.
                sampling_params=params.clone(n=1, stop=None, seed=child_seed(seed, index)),
                stop_token_ids=stops,
                eos_token_ids=eos,
                arrival_time=asked.arrival_time,
                parent_id=None if params.n == 1 else family,
                cache_salt=asked.cache_salt,
                priority=asked.priority,
            )
            for index in range(params.n)
        ]
        return Family(family, asked.text, params, requests)

    def _check(self, asked: Asked) -> None:
        ids, salt, priority = asked.token_ids, asked.cache_salt, asked.priority
        if not {type(token_id) for token_id in ids} <= {int}:
            raise InvalidRequestError("prompt: token ids must be integers", "prompt", "invalid_type")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidRequestError(f"prompt: token id {wrong}: must be in 0..{self._vocab_size - 1}", "prompt")
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT):
            raise InvalidRequestError(f"cache_salt: must be a string of 1..{MAX_CACHE_SALT} characters", "cache_salt")
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise InvalidRequestError("priority: must be an integer of 32 bits", "priority", "invalid_type")
        if priority and not self._allow_priority:
            raise InvalidRequestError(f"priority = {priority}: needs scheduling_policy = priority", "priority", "unsupported_value")


def child_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with this seed. The first choice is the one that n = 1 would give."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def family_of(request_id: str) -> str:
    """The family that an engine request belongs to, from its id."""
    return request_id.partition(".")[0]
