"""The line one types in: a prompt to inject, or the number of a step."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from rich.segment import Segment
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Paste
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from cbviz.palette import Palette
from cbviz.sanitize import one_line, sanitize


class Asks(StrEnum):
    """What the line asks for."""

    PROMPT = "prompt"
    STEP = "step"


_PLACEHOLDERS = {
    Asks.PROMPT: "press i, type a prompt, Enter injects it",
    Asks.STEP: "number of a step, Enter goes there, Esc leaves",
}


class SafeInput(Input):
    """An input whose text is safe to draw, whatever was typed or pasted: what is seen is sent."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "leave the line", id="prompt.leave",
                tooltip="Leave the line; what was typed stays"),
    ]  # fmt: skip

    class Left(Message):
        """The user does not want to type any more."""

    def replace(self, text: str, start: int, end: int) -> None:
        """Put text in place of a part; all typing and pasting comes through here."""
        low, high = sorted((max(0, start), min(end, len(self.value))))
        before = sanitize(self.value[:low] + text)
        self.value = before + sanitize(self.value[high:])
        self.cursor_position = len(before)

    def action_leave(self) -> None:
        """Back to the panels."""
        self.post_message(self.Left())

    def _on_paste(self, event: Paste) -> None:
        """Several lines become one."""
        self.replace(one_line(event.text, limit=100_000).replace(" ⏎ ", " "), *self.selection)
        event.prevent_default()
        event.stop()


class Mark(Widget):
    """The sign before the line."""

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self.palette = palette

    def render_line(self, y: int) -> Strip:
        """One sign."""
        sign = ">" if self.palette.ascii else "❯"
        return Strip([Segment(f" {sign} ", self.palette.accent + self.rich_style)])


class PromptLine(Horizontal):
    """A sign and an input; says what was entered, and for what."""

    class Entered(Message):
        """Enter was pressed."""

        def __init__(self, asks: Asks, text: str) -> None:
            super().__init__()
            self.asks = asks
            self.text = text

        @property
        def is_step(self) -> bool:
            """The number of a step was asked for, and not a prompt."""
            return self.asks is Asks.STEP

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.palette = palette
        self.asks = Asks.PROMPT

    @property
    def input(self) -> Input:
        """Where one types."""
        return self.query_one(SafeInput)

    def compose(self) -> ComposeResult:
        """The sign and the input."""
        yield Mark(self.palette)
        yield SafeInput(placeholder=_PLACEHOLDERS[Asks.PROMPT], compact=True, select_on_focus=False)

    def ask_prompt(self) -> None:
        """Take the focus and ask for a prompt."""
        self._take_keys(Asks.PROMPT)

    def ask_step(self) -> None:
        """Take the focus and ask for the number of a step."""
        self._take_keys(Asks.STEP)

    def _take_keys(self, asks: Asks) -> None:
        self._change(asks)
        # Not `focus()`, which takes effect later: keys right behind this one are meant for us.
        self.screen.set_focus(self.input)

    def leave(self) -> None:
        """Back to a prompt line nobody types in."""
        self._change(Asks.PROMPT)
        if self.input.has_focus:
            self.screen.set_focus(None)

    def clear(self) -> None:
        """Forget what was typed."""
        self.input.value = ""

    def _change(self, asks: Asks) -> None:
        if asks is not self.asks:
            self.asks = asks
            self.input.value = ""
            self.input.placeholder = _PLACEHOLDERS[asks]

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter."""
        event.stop()
        self.post_message(self.Entered(self.asks, event.value))

    def on_safe_input_left(self, event: SafeInput.Left) -> None:
        """Escape."""
        event.stop()
        self.leave()
