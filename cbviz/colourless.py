"""A terminal that wants no colour gets none: bold, dim and reverse alone tell things apart."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter


class Colourless(LineFilter):
    """Takes every colour out of a line (Textual's own answer to NO_COLOR is shades of grey)."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same segments without colours."""
        return [
            Segment(text, None if style is None else style.without_color, control)
            for text, style, control in segments
        ]
