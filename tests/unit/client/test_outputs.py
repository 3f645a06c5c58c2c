"""OutputProcessor: text, stop strings, families, log-probabilities, errors, and what is resumed after a crash."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from octavo.client.outputs import Logprob, OutputProcessor, RequestOutput
from octavo.errors import ContextLengthError, InvalidRequestError, OctavoError, OverloadedError, RequestFailedError
from octavo.loader.resolve import resolve_model
from octavo.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    OutputError,
    StepStats,
    TokenLogprobs,
)
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenizer.gguf_vocab import build_vocabulary
from octavo.tokenizer.tokenizer import Tokenizer

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
EOS_TEXT = "<e>"
STATS = StepStats(*[0] * 14)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, some pieces of the alphabet, and an end of sequence."""
    merges = ["A B", "AB C", "D E", "DE F", "H I", "J K", "o k", "Ã ©"]
    tokens = [*sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges), EOS_TEXT]
    return Tokenizer(
        build_vocabulary(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
                "tokenizer.ggml.merges": merges,
                "tokenizer.ggml.eos_token_id": len(tokens) - 1,
            },
            "x",
        )
    )


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    try:
        return Tokenizer.load(resolve_model("smollm2-135m").path)
    except OctavoError as e:
        pytest.skip(f"the built-in model is not at hand: {e}")


class Client:
    """Drives a processor as the client does, with one request family at a time or several."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_ids[0]
        self.processor = OutputProcessor(tokenizer)

    def add(self, family="r", n=1, prompt=(1, 2, 3), **params) -> SamplingParams:
        params = SamplingParams(**{"max_tokens": 1000, "output_kind": DELTA, **params})
        for index in range(n):
            request = EngineCoreRequest(
                f"{family}-{index}", list(prompt), params, [self.eos], [self.eos], 5.0, parent_id=family
            )
            self.processor.add(request, family=family, index=index, n=n, prompt="p", params=params)
        return params

    def step(self, *outputs: EngineCoreOutput):
        return self.processor.process(EngineCoreOutputs(list(outputs), STATS, 0.0))

    def one(self, ids, request_id="r-0", **fields) -> RequestOutput | None:
        outputs = self.step(EngineCoreOutput(request_id, ids, **fields)).outputs
        return outputs[0][1] if outputs else None

    def ids(self, *pieces: str) -> list[int]:
        """Ids of the pieces, each a token of the vocabulary."""
        found = [self.tokenizer.encode(piece) for piece in pieces]
        assert all(len(ids) == 1 for ids in found)
        return [ids[0] for ids in found]


@pytest.fixture
def client(tokenizer) -> Client:
    return Client(tokenizer)


def texts(outputs) -> str:
    return "".join(o.outputs[0].text for o in outputs if o is not None)


class TestText:
    def test_deltas_and_an_end_of_sequence(self, client):
        client.add()
        ids = client.ids("ABC", "D")
        a = client.one(ids[:1])
        b = client.one(ids[1:])
        c = client.one([client.eos], finish_reason=FinishReason.STOP)
        assert [o.outputs[0].text for o in (a, b, c)] == ["ABC", "D", ""]
        assert [o.outputs[0].token_ids for o in (a, b, c)] == [[ids[0]], [ids[1]], [client.eos]]
        assert [o.finished for o in (a, b, c)] == [False, False, True]
        assert [o.outputs[0].num_tokens for o in (a, b, c)] == [1, 2, 3]
        assert (c.outputs[0].finish_reason, c.outputs[0].stop_reason) == ("stop", None)
        assert c.outputs[0].finished()
        assert (a.request_id, a.prompt, a.prompt_token_ids) == ("r", "p", [1, 2, 3])
        assert not client.processor.has_requests()

    def test_cumulative_outputs_keep_what_they_said(self, client):
        client.add(output_kind=CUMULATIVE)
        seen = [client.one(client.ids(piece)) for piece in ("ABC", "D", "é")]
        assert [o.outputs[0].text for o in seen] == ["ABC", "ABCD", "ABCDé"]
        assert [len(o.outputs[0].token_ids) for o in seen] == [1, 2, 3]

    def test_final_only_speaks_once(self, client):
        client.add(output_kind=FINAL_ONLY)
        assert client.one(client.ids("ABC")) is None
        final = client.one(client.ids("D"), finish_reason=FinishReason.LENGTH)
        assert final.outputs[0].text == "ABCD"
        assert final.outputs[0].token_ids == client.ids("ABC", "D")
        assert final.outputs[0].finish_reason == "length"

    def test_the_stop_token_is_no_text(self, client):
        for include, text in ((False, "ABC"), (True, "ABCD")):
            client.add(stop_token_ids=client.ids("D"), include_stop_str_in_output=include)
            a = client.one(client.ids("ABC"))
            b = client.one(client.ids("D"), finish_reason=FinishReason.STOP, stop_reason=client.ids("D")[0])
            assert texts([a, b]) == text
            assert b.outputs[0].stop_reason == client.ids("D")[0]
            assert b.outputs[0].token_ids == client.ids("D")

    def test_special_tokens_as_asked(self, client):
        for skip, text in ((True, "ABC"), (False, EOS_TEXT + "ABC")):
            client.add(skip_special_tokens=skip, ignore_eos=True)
            output = client.one([client.eos, *client.ids("ABC")], finish_reason=FinishReason.LENGTH)
            assert output.outputs[0].text == text

    def test_without_detokenizing(self, client):
        client.add(detokenize=False)
        output = client.one(client.ids("ABC"), finish_reason=FinishReason.LENGTH)
        assert output.outputs[0].text == ""
        assert output.outputs[0].token_ids == client.ids("ABC")

    def test_a_cut_character_ends_as_one_replacement(self, client):
        client.add()
        smile = client.tokenizer.encode("😀")
        a, b = client.one(smile[:2]), client.one(smile[2:3], finish_reason=FinishReason.LENGTH)
        assert texts([a, b]) == "\ufffd"
        assert a.outputs[0].text == ""

    def test_outputs_without_news_are_none(self, client):
        client.add()
        assert client.one([]) is None
        assert client.one(client.ids("ABC"), request_id="nobody") is None
        assert client.one([], finish_reason=FinishReason.ABORT).outputs[0].finish_reason == "abort"


class TestStopStrings:
    def test_over_several_tokens_nothing_leaks(self, client):
        """The alphabet, the stop string split over four tokens."""
        client.add(stop=["DEFGHIJ"], max_tokens=100)
        seen, aborts = [], []
        for piece in ("ABC", "DEF", "G", "HI", "JK"):
            step = client.step(EngineCoreOutput("r-0", client.ids(piece)))
            seen += [o for _, o in step.outputs]
            aborts += step.aborts
        assert texts(seen) == "ABC"
        assert (seen[-1].outputs[0].finish_reason, seen[-1].outputs[0].stop_reason) == ("stop", "DEFGHIJ")
        assert seen[-1].finished
        assert aborts == ["r-0"]
        assert seen[-1].outputs[0].num_tokens == 5
        assert client.one(client.ids("ABC")) is None  # a step that was already on its way
        assert not client.processor.has_requests()

    def test_included_when_asked(self, client):
        client.add(stop=["DEFGHIJ"], include_stop_str_in_output=True)
        assert texts(client.one(client.ids(piece)) for piece in ("ABC", "DEF", "G", "HI", "JK")) == "ABCDEFGHIJ"

    def test_held_text_is_flushed_at_the_end(self, client):
        client.add(stop=["DEFGHIJ"])
        a, b = client.one(client.ids("ABC")), client.one(client.ids("DEF"))
        c = client.one([client.eos], finish_reason=FinishReason.STOP)
        assert [o.outputs[0].text for o in (a, b, c)] == ["ABC", "", "DEF"]
        assert (c.outputs[0].finish_reason, c.outputs[0].stop_reason) == ("stop", None)

    def test_no_abort_when_the_engine_ended_it_too(self, client):
        client.add(stop=["C"])
        step = client.step(EngineCoreOutput("r-0", client.ids("ABC"), finish_reason=FinishReason.LENGTH))
        assert step.aborts == []
        output = step.outputs[0][1].outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("AB", "stop", "C")

    def test_min_tokens_holds_for_stop_strings(self, client):
        client.add(stop=["\n"], min_tokens=4)
        newline = client.ids("\n")
        seen = [client.one(newline) for _ in range(3)]
        assert [o.outputs[0].text for o in seen] == ["\n"] * 3
        last = client.one(newline)
        assert (last.outputs[0].text, last.outputs[0].stop_reason, last.outputs[0].num_tokens) == ("", "\n", 4)

    def test_tokens_behind_the_stop_are_not_delivered(self, client):
        """A step that brings several tokens ends where single tokens would."""
        client.add(stop=["D"], logprobs=0)
        ids = client.ids("ABC", "D", "ok", "ok")
        rows = [TokenLogprobs([i], [-1.0], 1) for i in ids]
        output = client.one(ids, logprobs=rows)
        assert output.outputs[0].token_ids == ids[:2]
        assert len(output.outputs[0].logprobs) == 2
        assert output.outputs[0].cumulative_logprob == -2.0

    def test_stop_string_of_bytes_that_come_one_by_one(self, client):
        client.add(stop=["é"])
        parts = client.tokenizer.encode("x")[:1] + [client.tokenizer.token_id(c) for c in "Ã©"]
        outputs = [client.one([i]) for i in parts]
        assert texts(outputs) == "x"
        assert outputs[-1].outputs[0].stop_reason == "é"


class TestRealVocabulary:
    """The built-in model's own tokens, as a stream of the server would bring them."""

    def test_alphabet_up_to_the_stop_string(self, real):
        client = Client(real)
        client.add(stop=["DEFGHIJ"], max_tokens=100)
        ids = real.encode("ABC DEFGHI ABCDEFGHIJKLMNOP", add_special_tokens=False)
        seen = [client.one([i]) for i in ids]
        shown = [o for o in seen if o is not None]
        assert texts(shown) == "ABC DEFGHI ABC"
        assert shown[-1].outputs[0].stop_reason == "DEFGHIJ"
        for i in range(len(shown)):  # no moment at which a client had seen more than it may
            assert "ABC DEFGHI ABC".startswith(texts(shown[: i + 1]))

    def test_characters_of_several_tokens_with_log_probabilities(self, real):
        client = Client(real)
        client.add(logprobs=0, max_tokens=100)
        text = "😀👍🏽 漢字 T\u0301"
        ids = real.encode(text, add_special_tokens=False)
        seen = [client.one([i], logprobs=[TokenLogprobs([i], [-1.0], 1)]) for i in ids]
        assert texts(seen) == text
        assert all("\ufffd" not in o.outputs[0].text for o in seen)
        data = b"".join(real.token_bytes(next(iter(o.outputs[0].logprobs[0]))) for o in seen)
        assert data == text.encode()


class TestFamilies:
    def test_deltas_of_a_step_come_together(self, client):
        client.add(n=3, seed=1)
        a, d = client.ids("ABC", "D")
        step = client.step(EngineCoreOutput("r-2", [a]), EngineCoreOutput("r-0", [d]))
        assert [family for family, _ in step.outputs] == ["r"]
        assert [(o.index, o.text) for o in step.outputs[0][1].outputs] == [(0, "D"), (2, "ABC")]
        assert not step.outputs[0][1].finished

    def test_each_ends_once_and_the_family_with_the_last(self, client):
        client.add(n=3, seed=1)
        ids = client.ids("ABC")
        ends = []
        for request_id in ("r-1", "r-0", "r-2"):
            output = client.one(ids, request_id=request_id, finish_reason=FinishReason.LENGTH)
            ends.append((output.outputs[0].index, output.outputs[0].finish_reason, output.finished))
        assert ends == [(1, "length", False), (0, "length", False), (2, "length", True)]

    @pytest.mark.parametrize("kind", [CUMULATIVE, FINAL_ONLY])
    def test_the_last_output_holds_all(self, client, kind):
        client.add(n=3, seed=1, output_kind=kind)
        for request_id in ("r-2", "r-0"):
            client.one(client.ids("D"), request_id=request_id, finish_reason=FinishReason.LENGTH)
        output = client.one(client.ids("ABC"), request_id="r-1", finish_reason=FinishReason.LENGTH)
        assert output.finished
        assert [(o.index, o.text) for o in output.outputs] == [(0, "D"), (1, "ABC"), (2, "D")]

    def test_families_do_not_mix(self, client):
        client.add("a", n=2, seed=1)
        client.add("b")
        step = client.step(*[EngineCoreOutput(i, client.ids("D")) for i in ("a-1", "b-0", "a-0")])
        assert [(family, len(output.outputs)) for family, output in step.outputs] == [("a", 2), ("b", 1)]

    def test_abort_names_those_that_go_on(self, client):
        client.add(n=3, seed=1)
        client.one(client.ids("D"), request_id="r-1", finish_reason=FinishReason.LENGTH)
        assert client.processor.abort("r") == ["r-0", "r-2"]
        assert client.processor.abort("r") == []
        assert client.one(client.ids("D")) is None
        assert not client.processor.has_requests()

    def test_ids_are_unique(self, client):
        client.add()
        with pytest.raises(ValueError, match="r-0"):
            client.add()


class TestErrors:
    @pytest.mark.parametrize(
        ("kind", "exception"),
        [
            (ErrorKind.CONTEXT_LENGTH, ContextLengthError),
            (ErrorKind.OVERLOADED, OverloadedError),
            (ErrorKind.INVALID, InvalidRequestError),
            (ErrorKind.INTERNAL, RequestFailedError),
        ],
    )
    def test_become_exceptions_and_abort_the_siblings(self, client, kind, exception):
        client.add(n=3, seed=1)
        client.add("other")
        fault = EngineCoreOutput("r-1", [], finish_reason=FinishReason.ERROR, error=OutputError(kind, "why it failed"))
        step = client.step(EngineCoreOutput("r-0", client.ids("D")), fault, EngineCoreOutput("r-2", client.ids("D")))
        assert [family for family, _ in step.outputs] == ["r"]
        error = step.outputs[0][1]
        assert type(error) is exception
        assert str(error) == "why it failed"
        assert sorted(step.aborts) == ["r-0", "r-2"]
        assert [r.request_id for r in client.processor.resume_requests()] == ["other-0"]

    def test_an_error_without_words(self, client):
        client.add()
        step = client.step(EngineCoreOutput("r-0", [], finish_reason=FinishReason.ERROR))
        assert isinstance(step.outputs[0][1], RequestFailedError)


class TestLogprobs:
    def test_of_the_output(self, client):
        client.add(logprobs=2)
        a, d, k = client.ids("ABC", "D", "ok")
        first = client.one([a], logprobs=[TokenLogprobs([a, d, k], [-2.5, -0.5, -1.0], 7)])
        second = client.one([d], logprobs=[TokenLogprobs([d, d, k], [-0.5, -0.5, -1.0], 1)])
        assert first.outputs[0].logprobs == [
            {a: Logprob(-2.5, 7, "ABC"), d: Logprob(-0.5, 1, "D"), k: Logprob(-1.0, 2, "ok")}
        ]
        assert list(second.outputs[0].logprobs[0]) == [d, k]
        assert second.outputs[0].logprobs[0][d] == Logprob(-0.5, 1, "D")
        assert second.outputs[0].cumulative_logprob == -3.0

    def test_none_unless_asked(self, client):
        client.add()
        output = client.one(client.ids("D"))
        assert output.outputs[0].logprobs is None
        assert output.outputs[0].cumulative_logprob is None

    def test_cumulative_kind_keeps_all(self, client):
        client.add(logprobs=0, output_kind=CUMULATIVE)
        a, d = client.ids("ABC", "D")
        first = client.one([a], logprobs=[TokenLogprobs([a], [-1.0], 1)])
        second = client.one([d], logprobs=[TokenLogprobs([d], [-1.0], 2)])
        assert [list(row) for row in first.outputs[0].logprobs] == [[a]]
        assert [list(row) for row in second.outputs[0].logprobs] == [[a], [d]]

    @pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
    def test_of_the_prompt_chunk_by_chunk(self, client, kind):
        a, d, k = client.ids("ABC", "D", "ok")
        client.add(prompt=(a, d, k), prompt_logprobs=0, output_kind=kind)
        assert client.one([], prompt_logprobs=[TokenLogprobs([d], [-1.0], 3)]) is None
        output = client.one([a], prompt_logprobs=[TokenLogprobs([k], [-2.0], 4)])
        if kind is not FINAL_ONLY:
            assert output.prompt_logprobs == [None, {d: Logprob(-1.0, 3, "D")}, {k: Logprob(-2.0, 4, "ok")}]
        last = client.one([a], finish_reason=FinishReason.LENGTH)
        assert last.prompt_logprobs == (
            None if kind is DELTA else [None, {d: Logprob(-1.0, 3, "D")}, {k: Logprob(-2.0, 4, "ok")}]
        )

    def test_of_the_prompt_once_for_a_family(self, client):
        a, d = client.ids("ABC", "D")
        client.add(n=2, seed=1, prompt=(a, d), prompt_logprobs=0, output_kind=CUMULATIVE)
        row = [TokenLogprobs([d], [-1.0], 3)]
        step = client.step(
            EngineCoreOutput("r-0", [a], prompt_logprobs=row), EngineCoreOutput("r-1", [a], prompt_logprobs=row)
        )
        assert len(step.outputs[0][1].prompt_logprobs) == 2

    def test_parts_of_characters(self, client):
        client.add(logprobs=0)
        smile = client.tokenizer.encode("😀")
        rows = [TokenLogprobs([i], [-1.0], 1) for i in smile]
        output = client.one(smile, logprobs=rows)
        assert output.outputs[0].text == "😀"
        assert all(row[i].decoded_token == "\ufffd" for i, row in zip(smile, output.outputs[0].logprobs, strict=True))


class TestNumbers:
    def test_times_are_in_order(self, client):
        before = time.monotonic()
        client.add()
        a = client.one(client.ids("D"), scheduled_time=before, num_cached_tokens=2)
        assert a.num_cached_tokens == 2
        assert a.metrics.finished_time is None
        assert a.metrics.arrival_time == 5.0
        assert a.metrics.time_in_queue == max(0.0, before - 5.0)
        b = client.one(client.ids("D"), finish_reason=FinishReason.LENGTH)
        metrics = b.metrics
        assert metrics.first_scheduled_time == before <= metrics.first_token_time
        assert metrics.first_token_time <= metrics.last_token_time == metrics.finished_time
        assert b.num_cached_tokens == 2


class TestResume:
    def test_goes_on_behind_what_was_delivered(self, client):
        client.add("a", stop=["DEF"])
        client.add("b", n=2, seed=3)
        client.add("done")
        ids = client.ids("ABC", "D")
        seen = [client.one([i], request_id="a-0") for i in ids]
        client.one(ids[:1], request_id="b-1")
        client.one(ids, request_id="done-0", finish_reason=FinishReason.LENGTH)
        requests = client.processor.resume_requests()
        assert [(r.request_id, r.output_token_ids) for r in requests] == [("a-0", ids), ("b-0", []), ("b-1", ids[:1])]
        assert requests[0].prompt_token_ids == [1, 2, 3]
        assert requests[0].sampling_params.stop_strings == ["DEF"]
        assert requests[1].parent_id == "b"
        # text held over the crash is still held, and comes out once
        seen.append(client.one(client.ids("ok"), request_id="a-0"))
        assert texts(seen) == "ABCDok"

    def test_matched_stop_strings_are_not_resumed(self, client):
        client.add(stop=["C"])
        client.one(client.ids("ABC"))
        assert client.processor.resume_requests() == []

    def test_the_record_is_the_processors_own(self, client):
        """An engine in the same process that writes to its message must not reach what will be resumed."""
        client.add()
        client.one(client.ids("D"))
        first = client.processor.resume_requests()[0]
        first.output_token_ids.append(9)
        assert client.processor.resume_requests()[0].output_token_ids == client.ids("D")

    def test_prompt_logprobs_are_taken_once(self, client):
        a, d = client.ids("ABC", "D")
        row = [TokenLogprobs([d], [-1.0], 3)]
        client.add("partial", prompt=(a, d, d), prompt_logprobs=0, output_kind=CUMULATIVE)
        client.add("done", prompt=(a, d), prompt_logprobs=0, output_kind=CUMULATIVE)
        client.one([], request_id="partial-0", prompt_logprobs=row)
        client.one([a], request_id="done-0", prompt_logprobs=row)
        resumed = {r.request_id: r for r in client.processor.resume_requests()}
        assert resumed["partial-0"].sampling_params.prompt_logprobs == 0
        assert resumed["done-0"].sampling_params.prompt_logprobs is None
        partial = client.one([a], request_id="partial-0", prompt_logprobs=row * 2)
        assert len(partial.prompt_logprobs) == 3
        assert len(client.one([a], request_id="done-0").prompt_logprobs) == 2


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_streams_equal_the_whole(tokenizer, data):
    """Any tokens, any step sizes, stop strings, a crash at any time: joined deltas, delivered ids and the final text agree."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(data.draw(st.integers(1, 30)))]
    stops = data.draw(st.lists(st.sampled_from(["D", "AB", "ok", "\ufffd", "CDE", "é"]), max_size=3))
    include = data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, 6))
    results = []
    for kind, most in ((FINAL_ONLY, 1), (DELTA, 4), (CUMULATIVE, 2)):
        client = Client(tokenizer)
        client.add(stop=stops, output_kind=kind, include_stop_str_in_output=include, min_tokens=min_tokens)
        sent, text, delivered, last = 0, "", [], None
        while client.processor.has_requests():
            if rng.random() < 0.2:  # the engine comes back and must find exactly what was sent
                assert client.processor.resume_requests()[0].output_token_ids == ids[:sent]
            count = rng.randrange(1, most + 1)
            end = sent + count >= len(ids)
            output = client.one(ids[sent : sent + count], finish_reason=FinishReason.LENGTH if end else None)
            sent += count
            if output is not None:
                last = output.outputs[0]
                text = text + last.text if kind is DELTA else last.text
                delivered = delivered + last.token_ids if kind is DELTA else last.token_ids
        results.append((text, delivered, last.finish_reason, last.stop_reason))
    assert results[0] == results[1] == results[2]
    text, delivered, finish_reason, stop_reason = results[0]
    assert delivered == ids[: len(delivered)]
    whole = tokenizer.decode(delivered)
    if finish_reason == "length":
        assert text == whole
        assert stop_reason is None
    else:
        assert whole.startswith(text)
        assert stop_reason in stops
        assert len(delivered) >= min(min_tokens, len(ids))
        assert text.endswith(stop_reason) if include else whole.startswith(text + stop_reason)
