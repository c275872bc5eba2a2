"""Stop strings: found whatever the pieces, cut whole, nothing held back needlessly."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stop import StopStrings

LETTERS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first (of those, begins first)."""
    found = [(text.find(each) + len(each), text.find(each), each) for each in stop if each in text]
    if not found:
        return text, None
    _, start, each = min(found)
    return text[:start], each


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(edges)] or [""]


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=20))
def test_any_split_gives_what_find_gives_on_the_whole_text(text, stop, cuts):
    subject = StopStrings(tuple(stop))
    expected, hit = reference(text, stop)
    shown, seen = "", ""
    for piece in pieces(text, cuts):
        before = subject.hit
        shown += subject.push(piece)
        seen += piece
        # At any time: everything but the longest tail that could still become a stop string.
        assert (shown, subject.hit) == as_far_as_known(seen, stop)
        assert before is None or subject.hit == before
    assert subject.hit == hit
    assert shown + subject.flush() == expected
    assert subject.flush() == ""


def as_far_as_known(seen: str, stop: list[str]) -> tuple[str, str | None]:
    shown, hit = reference(seen, stop)
    if hit is None:
        begun = [size for each in stop for size in range(len(each)) if seen.endswith(each[:size])]
        shown = seen[: len(seen) - max(begun, default=0)]
    return shown, hit


@pytest.mark.parametrize(
    ("stop", "text", "shown", "hit"),
    [
        (["END"], "the END of", "the ", "END"),
        (["b", "abc"], "xabc", "xa", "b"),
        (["abc", "c"], "xabc", "x", "abc"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["né"], "née", "", "né"),
    ],
)
def test_which_stop_string_wins(stop, text, shown, hit):
    for subject, parts in ((StopStrings(tuple(stop)), [text]), (StopStrings(tuple(stop)), text)):
        assert "".join(map(subject.push, parts)) == shown
        assert subject.hit == hit
        assert subject.push("more") == subject.flush() == ""


def test_what_was_held_back_comes_at_the_end_and_only_once():
    subject = StopStrings(("aab",))
    assert subject.push("now aa") == "now "
    assert subject.push("c") == "aac"
    assert subject.push("aa") == ""
    assert subject.flush() == "aa"
    # What was flushed is over: it cannot be part of a stop string any more.
    assert subject.push("ab") == "ab"
    assert subject.hit is None


def test_without_stop_strings_text_passes_through_as_it_is():
    subject = StopStrings(())
    text = "any text"
    assert subject.push(text) is text
    assert subject.flush() == ""
    assert subject.hit is None


def test_a_long_text_of_near_misses_takes_time_in_proportion():
    def seconds(length: int) -> float:
        subject = StopStrings(("a" * 1000 + "b",))
        started = time.perf_counter()
        for _ in range(length):
            subject.push("a")
        return time.perf_counter() - started

    seconds(1000)
    assert min(seconds(8000) for _ in range(3)) < 30 * min(seconds(1000) for _ in range(3))
