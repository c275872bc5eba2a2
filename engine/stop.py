"""Stop strings: where streamed text ends, and how much of it may be shown before. No torch.

Each stop string is followed through the text by the automaton of Knuth, Morris and Pratt, which
knows after every character how much of the string the text ends with. So a text of n characters
costs n steps a stop string, however it comes in pieces.
"""

from __future__ import annotations

from functools import lru_cache


class StopStrings:
    """Watches the output text of one request for its stop strings.

    The stop string that is complete first wins; of several that the same character completes, the
    one that begins first. So what is given out never contains a stop string, and does not depend
    on where tokens cut the text.

    Args:
        stop: the stop strings, none of them empty; without any, text passes through.
    """

    __slots__ = ("_first", "_held", "_hit", "_watches")

    def __init__(self, stop: tuple[str, ...]) -> None:
        # The longest first: of those that end together, it begins first.
        self._watches = [_Watch(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._first = {text[0] for text in stop}
        self._held = ""
        self._hit: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that was found; the text before it has been given out."""
        return self._hit

    def push(self, text: str) -> str:
        """The text that can be shown now that this one follows; may be empty.

        The longest tail that could still become a stop string is held back. After a hit, nothing
        is given out.
        """
        if self._hit is not None:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        for end, char in enumerate(text, 1):
            for watch in self._watches:
                if watch.advance(char):
                    shown = (self._held + text[:end])[: -len(watch.text)]
                    self._held, self._hit = "", watch.text
                    return shown
        return self._hold(self._held + text)

    def flush(self) -> str:
        """What was held back, when the output ends without a stop string."""
        rest, self._held = self._held, ""
        for watch in self._watches:
            watch.matched = 0
        return rest

    def _hold(self, text: str) -> str:
        """Hold back what stop strings have in common with the end of a text; the rest of it."""
        edge = len(text) - max(watch.matched for watch in self._watches)
        self._held = text[edge:]
        return text[:edge]


class _Watch:
    """One stop string, and how many of its first characters the text so far ends with."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = _borders(text)

    def advance(self, char: str) -> bool:
        """Take in a character that follows; whether it completes the stop string."""
        text, matched = self.text, self.matched
        while matched and text[matched] != char:
            matched = self._borders[matched - 1]
        self.matched = matched = matched + (text[matched] == char)
        return matched == len(text)


@lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """For each prefix of a text the length of its longest border: a proper prefix that ends it."""
    borders = [0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length - 1]
        borders.append(length + (text[length] == char))
    return tuple(borders)
