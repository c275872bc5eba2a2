"""Small pieces of text that lines about requests and steps are made of."""

from __future__ import annotations

from cbviz.palette import Palette
from cbviz.sanitize import one_line, width_of
from engine.request import FinishReason
from engine.world import RequestView

_FINISH_WORDS = {
    FinishReason.STOP: ("stop", True),
    FinishReason.LENGTH: ("length", True),
    FinishReason.ABORT: ("cancel", False),
}


def letter_of(view: RequestView, palette: Palette) -> str:
    """The letter that stands for a request everywhere."""
    return palette.letter(view.ordinal)


def finish_words(view: RequestView) -> tuple[str, bool]:
    """Why it ended, in one short word, and whether it ended by itself."""
    return _FINISH_WORDS.get(view.finish_reason or FinishReason.ABORT, ("cancel", False))


def seconds(value: float) -> str:
    """A time in three significant figures or so: `8.2 ms`, `78 ms`, `0.41 s`, `12 s`."""
    if value < 0.0095:
        return f"{value * 1000:.1f} ms"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 0.995:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 99.5 else f"{value:.0f} s"


RATIO_WIDTH = 7


def ratio(done: int, total: int) -> str:
    """`18/64`, in at most `RATIO_WIDTH` cells, so that columns stay where they are.

    Long ones in thousands (`1.5k/2k`), or else as a share, rounded down: what is not done must not
    look done.
    """
    forms = (
        f"{done}/{total}",
        f"{_thousands(done, 1)}/{_thousands(total, 1)}",
        f"{_thousands(done, 0)}/{_thousands(total, 0)}",
    )
    share = f"{100 * done // total if total else 0} %"
    return next((form for form in forms if len(form) <= RATIO_WIDTH), share)


def hits(view: RequestView) -> str:
    """`24 hit`: prompt tokens that the prefix cache had, in 7 cells at most; empty if none."""
    return f"{_thousands(view.hit_tokens, 0)} hit" if view.hit_tokens else ""


def _thousands(count: int, digits: int) -> str:
    if count < 1000:
        return str(count)
    scale = 10**digits
    return f"{count * scale // 1000 / scale:g}k"


def tail(prompt: str, text: str, width: int, *, ascii: bool = False) -> tuple[str, str]:
    """Prompt and output as one safe line, cut at its beginning, in two parts.

    Together at most `width` cells, an ellipsis where something was left out.
    """
    # Nothing further back than this can be in view; one cell more shows that there is more.
    keep = 2 * width + 16
    safe_text = _flat(text[-keep:], ascii)
    safe_prompt = _flat(prompt[-keep:], ascii) if len(text) < keep else ""
    cut = len(text) > keep or len(prompt) > keep
    total = width_of(safe_prompt) + width_of(safe_text)
    if total <= width and not cut:
        return safe_prompt, safe_text
    mark = "~" if ascii else "…"
    room = max(0, width - 1)
    safe_text = _last(safe_text, room)
    safe_prompt = _last(safe_prompt, room - width_of(safe_text))
    return (mark + safe_prompt, safe_text) if safe_prompt else ("", mark + safe_text)


def _flat(text: str, ascii: bool) -> str:
    """One safe line that keeps the space at its edges: parts are joined to it."""
    if not text:
        return ""
    left = " " if text[0].isspace() else ""
    right = " " if len(text) > 1 and text[-1].isspace() else ""
    return left + one_line(text, limit=len(text), ascii=ascii) + right


def _last(safe: str, width: int) -> str:
    """The longest end of a safe text that fits."""
    if width <= 0:
        return ""
    start = max(0, len(safe) - width)
    while width_of(safe[start:]) > width:
        start += 1
    return safe[start:]
