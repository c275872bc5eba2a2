"""Untrusted text: what reaches the terminal is printable, visible and as wide as it says."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cbviz.sanitize import fit, one_line, sanitize, width_of

ANY_TEXT = st.text(
    st.one_of(
        st.characters(),
        st.characters(categories=("Cc", "Cf", "Cs", "Mn", "Me", "Zs", "Zl", "Zp", "Co")),
        st.sampled_from("\x1b\x9b\u202e\u200b\u200d\ufe0f\U0001f1e9👍🏽中é\u0301"),
    ),
    max_size=40,
)


def unsafe(text: str) -> list[str]:
    """The characters of a text that must not reach a terminal."""
    bad = ("Cc", "Cf", "Cs", "Zl", "Zp", "Cn", "Co")
    return [repr(char) for char in text if unicodedata.category(char) in bad]


@given(ANY_TEXT, st.booleans())
def test_nothing_unsafe_is_left(text: str, ascii: bool) -> None:
    safe = sanitize(text, ascii=ascii)
    assert not unsafe(safe)
    assert sanitize(safe, ascii=ascii) == safe
    assert safe.isascii() or not ascii


@given(st.characters(), st.characters())
def test_no_character_disappears(first: str, second: str) -> None:
    """Only marks may take no room, and those only on a letter before them."""
    marks = [unicodedata.category(char) in ("Mn", "Me") for char in (first, second)]
    composed = len(unicodedata.normalize("NFC", first + second)) < 2
    seen = 1 if marks[1] or composed else 2
    assert width_of(sanitize(first + second)) >= seen


@given(ANY_TEXT, st.integers(0, 30), st.booleans())
def test_fit_is_exactly_as_wide_as_asked(text: str, width: int, ascii: bool) -> None:
    assert cell_len(fit(text, width, ascii=ascii)) == width
    assert cell_len(fit(text, width, pad=False, ascii=ascii)) <= width


@given(ANY_TEXT, ANY_TEXT)
def test_widths_add_up(left: str, right: str) -> None:
    left, right = sanitize(left), sanitize(right)
    assert cell_len(left + right) == cell_len(left) + cell_len(right)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain words", "plain words"),
        ("\x1b[31mred", "␛[31mred"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x9b31m", "�31m"),
        ("a\tb\nc\r", "a→b⏎c␍"),
        ("\u202eabc", "⇄abc"),
        ("a\u200bb\ufeff", "a◌b◌"),
        ("\ud83d", "�"),
        ("\u0301", "◌"),
        ("e\u0301", "é"),
        ("x" + "\u0302" * 9, "x\u0302\u0302" + "◌" * 7),
        ("👩\u200d🚀", "👩◌🚀"),
        ("🇩🇪", "ⒹⒺ"),
        ("❤\ufe0f", "❤"),
        ("中文", "中文"),
        ("[bold]not markup[/]", "[bold]not markup[/]"),
    ],
)
def test_known_cases(text: str, safe: str) -> None:
    assert sanitize(text) == safe


def test_ascii_keeps_the_width() -> None:
    assert sanitize("中 é ⏎…", ascii=True) == "?? ? $."


def test_cut_marks_where_something_is_missing() -> None:
    assert fit("little fox", 7) == "little…"
    assert fit("中文字", 4) == "中… "
    assert fit("little fox", 7, ascii=True) == "little~"


def test_one_line_keeps_prose_readable() -> None:
    assert one_line("  Once  upon\n\n a\ttime. ") == "Once upon ⏎ a time."
    assert one_line("abcdef", limit=3) == "abc…"
