"""Text from models, prompts, traces and errors, made safe to draw in a terminal.

Untrusted text can carry escape sequences, direction overrides, invisible characters and halves of
characters, all of which would reach the terminal as they are. `sanitize` turns each of them into
one visible glyph; what it returns holds only printable characters whose widths add up, so that
grids stay aligned. It is idempotent.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from rich.cells import cell_len, get_character_cell_size

ELLIPSIS = "…"
REPLACEMENT = "�"
"""Stands for a character that has no agreed shape: a surrogate, a C1 control, an unassigned one."""
INVISIBLE = "◌"
"""Stands for a character without a width of its own: zero-width ones, a mark without a letter."""
DIRECTION = "⇄"
"""Stands for a control that would turn the direction of the text around."""

MAX_MARKS = 2
"""Combining marks drawn on one letter; a longer pile spills over the rows around it."""

_NAMED = {"\t": "→", "\n": "⏎", "\r": "␍", "\x7f": "␡", "\u2028": "⏎", "\u2029": "⏎"}
_DIRECTION_CONTROLS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
_VARIATION_SELECTORS = frozenset(map(chr, range(0xFE00, 0xFE10)))
_SKIN_TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))
_ASCII_FOR = {ELLIPSIS: ".", "⏎": "$", "→": ">", "␍": "$"}
_SPACES = re.compile(r"[^\S\r\n]+")
_LINE_ENDS = re.compile(r"[^\S\r\n]*(?:\r\n|\r|\n)\s*")


def sanitize(text: str, *, ascii: bool = False) -> str:
    """The text with every character that is unsafe or invisible replaced by a visible glyph.

    Tabs, line ends and escapes become `→`, `⏎`, `␛`; other controls their pictures; lone marks and
    zero-width characters `◌`. With `ascii`, everything outside ASCII becomes `?`, one a cell.
    """
    if text.isascii() and text.isprintable():
        return text
    if len(text) > 256:
        return _sanitize(text, ascii)
    return _sanitize_cached(text, ascii)


def one_line(text: str, *, limit: int = 2000, ascii: bool = False) -> str:
    """Prose on one line: runs of white space become one space, line ends ` ⏎ `; made safe.

    Only the first `limit` characters are looked at, so that a very long prompt costs little.
    """
    cut = text[: limit + 1]
    joined = _LINE_ENDS.sub("\n", cut[:limit].strip())
    spaced = _SPACES.sub(" ", joined)
    safe = sanitize(spaced.replace("\n", " \n "), ascii=ascii)
    return safe + (_ellipsis(ascii) if len(cut) > limit else "")


def fit(text: str, width: int, *, pad: bool = True, ascii: bool = False) -> str:
    """Safe text cut to `width` cells, with `…` where something was cut, padded with spaces.

    With `pad` the result is exactly `width` cells wide, whatever characters it holds.
    """
    if width <= 0:
        return ""
    safe = sanitize(text, ascii=ascii)
    size = len(safe) if safe.isascii() else cell_len(safe)
    if size > width:
        safe = _head(safe, width - 1) + _ellipsis(ascii)
        size = cell_len(safe)
    return safe + " " * (width - size) if pad else safe


def width_of(text: str) -> int:
    """Cells that safe text takes."""
    return len(text) if text.isascii() else cell_len(text)


def _ellipsis(ascii: bool) -> str:
    return "~" if ascii else ELLIPSIS


def _head(safe: str, width: int) -> str:
    used = 0
    for index, char in enumerate(safe):
        used += get_character_cell_size(char)
        if used > width:
            return safe[:index]
    return safe


@lru_cache(maxsize=16384)
def _sanitize_cached(text: str, ascii: bool) -> str:
    return _sanitize(text, ascii)


def _sanitize(text: str, ascii: bool) -> str:
    out: list[str] = []
    marks = MAX_MARKS
    for char in _normalized(text):
        if _is_mark(char):
            marks += 1
            # The first variation selector only asks for a style of the character before it.
            if out and marks <= MAX_MARKS:
                out.append("" if char in _VARIATION_SELECTORS else char)
                continue
            out.append(INVISIBLE)
            continue
        out.append(_visible(char))
        # A wide character with marks is measured differently from terminal to terminal.
        marks = 0 if get_character_cell_size(out[-1]) == 1 else MAX_MARKS
    safe = "".join(out)
    return _to_ascii(safe) if ascii else safe


def _normalized(text: str) -> str:
    try:
        return unicodedata.normalize("NFC", text)
    except UnicodeError:
        return text


def _is_mark(char: str) -> bool:
    return unicodedata.category(char) in ("Mn", "Me")


@lru_cache(maxsize=8192)
def _visible(char: str) -> str:
    """One glyph for one character, never empty and never without a width."""
    code = ord(char)
    if char in _NAMED:
        return _NAMED[char]
    if code < 0x20:
        return chr(0x2400 + code)
    if char in _DIRECTION_CONTROLS:
        return DIRECTION
    category = unicodedata.category(char)
    if category in ("Cc", "Cs", "Cn", "Co"):
        return REPLACEMENT
    if category == "Cf" or char in _SKIN_TONES or get_character_cell_size(char) == 0:
        return INVISIBLE
    if 0x1F1E6 <= code <= 0x1F1FF:
        # Two regional indicators join into a flag of another width; circled letters never do.
        return chr(0x24B6 + code - 0x1F1E6)
    if category == "Zs" and char != " ":
        return " " * get_character_cell_size(char)
    return char


def _to_ascii(safe: str) -> str:
    return "".join(
        char if char.isascii() else _ASCII_FOR.get(char, "?") * get_character_cell_size(char)
        for char in safe
    )
