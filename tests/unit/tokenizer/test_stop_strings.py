"""Stop strings: nothing of one leaks, nothing is held without need, and the cut of the stream does not matter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.tokenizer.stop_strings import StopStrings


def run(stops, deltas, include=False, active_from=0):
    """Text that left, the stop string, and how many deltas were taken in."""
    stream = StopStrings(stops, include)
    out = ""
    for i, delta in enumerate(deltas):
        text, matched = stream.push(delta, active=i + 1 >= active_from)
        out += text
        if matched is not None:
            return out, matched, i + 1
    return out + stream.flush(), None, len(deltas)


def defined(stops, text, include=False):
    """The definition: the first place at which some stop string is complete; of those complete there the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_over_several_deltas():
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "JK", "LM"]) == ("ABC", "DEFGHIJ", 5)


def test_held_text_comes_out_when_no_match_comes():
    stream = StopStrings(["DEFGHIJ"])
    assert stream.push("ABCDEF") == ("ABC", None)
    assert stream.push("G") == ("", None)
    assert stream.push("X") == ("DEFGX", None)
    assert run(["DEFGHIJ"], ["ABCDE"]) == ("ABCDE", None, 1)


def test_no_more_is_held_than_could_match():
    stream = StopStrings(["</think>", "\n\n"])
    assert stream.push("a < b") == ("a < b", None)
    assert stream.push("<") == ("", None)
    assert stream.push("/t") == ("", None)
    assert stream.push("d\n") == ("</td", None)
    assert stream.push("\t") == ("\n\t", None)


def test_include_in_output():
    assert run(["END"], ["xE", "ND and more"], include=True) == ("xEND", "END", 2)


def test_inactive_matches_are_text():
    assert run(["\n"], ["a\n", "b\n", "c\n"], active_from=3) == ("a\nb\nc", "\n", 3)
    # begun before, complete after: it stops, and no part of it has left
    assert run(["xyz"], ["xy", "z!"], active_from=2) == ("", "xyz", 2)
    # what was complete before does not stop later
    assert run(["b", "abc"], ["ab", "d"], active_from=2) == ("abd", None, 2)
    assert run(["aa"], ["aa", "a"], active_from=2) == ("a", "aa", 2)


TEXTS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


@given(text=TEXTS, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 4), max_size=30))
@settings(max_examples=1500, deadline=None)
def test_equals_the_definition_however_it_is_cut(text, stops, include, cuts):
    deltas, at = [], 0
    for size in cuts:
        deltas.append(text[at : at + size])
        at += size
    deltas.append(text[at:])
    out, matched, _ = run(stops, deltas, include)
    assert (out, matched) == defined(stops, text, include)


@given(text=TEXTS, stops=STOPS)
@settings(max_examples=500, deadline=None)
def test_hold_back_is_exact(text, stops):
    """After each character: what is held is the longest end of the text that begins a stop string, never longer than needed."""
    stream = StopStrings(stops)
    out = ""
    for i, c in enumerate(text):
        delta, matched = stream.push(c)
        out += delta
        if matched:
            return
        seen = text[: i + 1]
        longest = max(
            (n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops)), default=0
        )
        assert seen[len(out) :] == seen[len(seen) - longest :]
        assert longest < max(map(len, stops))


@pytest.mark.parametrize("char", ["^", "]", "\\", "-", ".", "[", "\ufffd", "\x00"])
def test_characters_that_mean_something_in_expressions(char):
    assert run([char, "z" + char], ["ab", "c" + char + "d"]) == ("abc", char, 2)
    assert run(["q"], ["a" + char + "b"]) == ("a" + char + "b", None, 1)
