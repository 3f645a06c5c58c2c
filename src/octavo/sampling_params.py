"""SamplingParams: what one request asks of sampling, under vLLM's names, checked on construction.

Follows vLLM's `SamplingParams` (fields, defaults, meaning). Knows nothing of tokenizers, engines or HTTP.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1

# Temperatures below this are greedy: the division would only add rounding noise.
GREEDY_TEMPERATURE = 1e-5


class RequestOutputKind(IntEnum):
    """What each output of a stream carries: all so far, the news, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, dict=False):
    """How to sample one request.

    Raises InvalidRequestError (a ValueError) that names the field, the value and the allowed range.

    Attributes:
        n: sequences to generate for the prompt, 1..128; more than 1 needs a temperature above 0.
        presence_penalty, frequency_penalty: -2..2, on tokens generated so far.
        repetition_penalty: above 0; above 1 discourages tokens of the prompt and the output.
        temperature: 0..2; 0 is greedy.
        top_p: (0, 1]. top_k: 0 or -1 off, else at least 1. min_p: 0..1.
        seed: 64-bit; the same request with the same seed gives the same tokens. None: a fresh one.
        stop: strings that end the output and are cut from it. stop_token_ids: ids that do.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: at most so many new tokens; None: up to the context's end.
        min_tokens: no stop before so many new tokens.
        logprobs, prompt_logprobs: this many best tokens with log-probabilities per position, 0..20; None: none.
        detokenize: False leaves `text` empty. skip_special_tokens, spaces_between_special_tokens: of the text.
        logit_bias: token id -> -100..100, added to the logits. allowed_token_ids: nothing else is sampled.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_reals()
        self._check_stops()
        self._check_token_maps()
        if self.temperature < GREEDY_TEMPERATURE:
            # The other filters cannot change an argmax; normalised so that equal requests compare equal.
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
            if self.n > 1:
                _refuse("n", self.n, "must be 1 when temperature is 0: greedy sequences would be equal")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, empty if none."""
        return self.stop if isinstance(self.stop, list) else []

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses token ids at or beyond the model's vocabulary, before they can reach a kernel."""
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, field) or ():
                if not 0 <= token_id < vocab_size:
                    _refuse(field, token_id, f"token ids must be in 0..{vocab_size - 1}")

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)

    def _check_counts(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_N)
        self.top_k = _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.top_k == -1:
            self.top_k = 0
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})")
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is True:
                value = 1
            if value is not None:
                setattr(self, field, _integer(field, value, 0, MAX_LOGPROBS))
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, SEED_MIN, SEED_MAX)
            if self.seed == -1:  # vLLM's way to say "none"
                self.seed = None

    def _check_reals(self) -> None:
        self.temperature = _real("temperature", self.temperature, 0.0, 2.0)
        self.top_p = _real("top_p", self.top_p, 0.0, 1.0, above=True)
        self.min_p = _real("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _real("repetition_penalty", self.repetition_penalty, 0.0, 1e4, above=True)

    def _check_stops(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if not isinstance(self.stop, (list, tuple)):
            _refuse("stop", self.stop, "must be a string or a list of strings", "invalid_type")
        self.stop = list(self.stop)
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(self.stop)} items", f"at most {MAX_STOP_STRINGS} stop strings", "array_above_max_length")
        for text in self.stop:
            if not isinstance(text, str):
                _refuse("stop", text, "must be a string or a list of strings", "invalid_type")
            if not text:
                _refuse("stop", text, "must not hold an empty string", "string_below_min_length")
            if len(text) > MAX_STOP_LENGTH:
                _refuse("stop", f"{len(text)} characters", f"at most {MAX_STOP_LENGTH} characters each", "string_above_max_length")
        if self.stop and not self.detokenize:
            _refuse("stop", self.stop[0], "needs detokenize=True")

    def _check_token_maps(self) -> None:
        for field in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, field)
            if ids is None:
                continue
            if not isinstance(ids, (list, tuple)):
                _refuse(field, ids, "must be a list of token ids", "invalid_type")
            setattr(self, field, sorted({_integer(field, token_id, 0, 2**31 - 1) for token_id in ids}))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids", [], "must not be empty", "empty_array")
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            _refuse("logit_bias", self.logit_bias, "must map token ids to numbers", "invalid_type")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS} entries", "array_above_max_length")
        self.logit_bias = {
            _integer("logit_bias", token_id, 0, 2**31 - 1): _real("logit_bias", bias, -100.0, 100.0)
            for token_id, bias in self.logit_bias.items()
        }


def _refuse(field: str, value: object, why: str, code: str = "invalid_value") -> None:
    shown = repr(value)
    raise InvalidRequestError(f"{field} = {shown if len(shown) <= 100 else shown[:100] + '...'}: {why}", field, code)


def _integer(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(field, value, "must be an integer", "invalid_type")
    assert isinstance(value, int)
    if value < low:
        _refuse(field, value, f"must be at least {low}", "integer_below_min_value")
    if value > high:
        _refuse(field, value, f"must be at most {high}", "integer_above_max_value")
    return value


def _real(field: str, value: object, low: float, high: float, above: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(field, value, "must be a number", "invalid_type")
    assert isinstance(value, (int, float))
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(field, value, "must be finite")
    if value < low or (above and value == low):
        _refuse(field, value, f"must be {'above' if above else 'at least'} {low:g}", "decimal_below_min_value")
    if value > high:
        _refuse(field, value, f"must be at most {high:g}", "decimal_above_max_value")
    return float(value)
