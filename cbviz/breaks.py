"""The breakpoints of a window: which there are, which are on, and how often each was met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.breakpoints import MAX_BREAKPOINTS, Breakpoint, Hit, parse_all
from engine.errors import InvalidInput


@dataclass
class Entry:
    """One breakpoint of the list."""

    point: Breakpoint
    enabled: bool = True
    hits: int = 0
    """Steps that met it since the run began or the breakpoint was added."""


class Breaks:
    """A list of breakpoints, in the order in which they were added."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.entries = [Entry(point) for point in parse_all(texts)]

    @property
    def watched(self) -> list[str]:
        """Those that are on."""
        return [entry.point.text for entry in self.entries if entry.enabled]

    def add(self, text: str) -> Entry:
        """Add one, or turn on what is there.

        Raises:
            InvalidInput: it cannot be read, or there are too many.
        """
        point = Breakpoint.parse(text)
        for entry in self.entries:
            if entry.point.text == point.text:
                entry.enabled = True
                return entry
        if len(self.entries) >= MAX_BREAKPOINTS:
            raise InvalidInput(f"there are {MAX_BREAKPOINTS} breakpoints: remove one first")
        self.entries.append(Entry(point))
        return self.entries[-1]

    def count(self, hits: Sequence[Hit]) -> None:
        """Some were met."""
        met = {hit.text for hit in hits}
        for entry in self.entries:
            entry.hits += entry.point.text in met

    def begin(self) -> None:
        """A new run: nothing has been met in it."""
        for entry in self.entries:
            entry.hits = 0
