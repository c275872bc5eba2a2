"""Breakpoints: the list of them, how often each was met, and a line to add one."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.suggester import SuggestFromList
from textual.widget import Widget
from textual.widgets import Input

from cbviz.breaks import Entry
from cbviz.driver import Driver
from cbviz.frame import Frame
from cbviz.palette import Palette
from cbviz.panels.prompt import Mark, SafeInput
from cbviz.sanitize import fit
from cbviz.screens.base import LiveScreen
from engine.breakpoints import EXAMPLES, Breakpoint

NAME_WIDTH = 18


class BreakpointsScreen(LiveScreen):
    """The list has the keys first; in an empty one there is nothing to do but to type."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,b,q", "leave", "close", show=False),
        Binding("up", "move(-1)", "up", show=False),
        Binding("down", "move(1)", "down", show=False),
        Binding("space,enter", "switch", "on/off", show=False),
        Binding("delete,x,backspace", "remove", "remove", show=False),
        Binding("a,i", "add", "add", show=False),
        Binding("c", "go_on", "continue", show=False),
    ]

    def __init__(self, palette: Palette, driver: Driver) -> None:
        super().__init__()
        self._palette = palette
        self._driver = driver

    def compose(self) -> ComposeResult:
        """The list, the line, and what can be typed into it."""
        with Vertical(id="breakpoints") as box:
            box.border_title = "Breakpoints"
            box.border_subtitle = "space on/off, x removes, a adds, c continues, esc closes"
            yield EntryList(self._palette, self._driver.breaks.entries)
            with Horizontal(id="break-line"):
                yield Mark(self._palette)
                yield SafeInput(
                    placeholder="a adds one: type it, Enter",
                    compact=True,
                    select_on_focus=False,
                    suggester=SuggestFromList(EXAMPLES),
                )
            yield Choices(self._palette)

    def on_mount(self) -> None:
        """Where the keys go."""
        if not self._driver.breaks.entries:
            self.action_add()
        else:
            self.set_focus(self.list)
        self._changed()

    @property
    def list(self) -> EntryList:
        """The breakpoints there are."""
        return self.query_one(EntryList)

    @property
    def input(self) -> Input:
        """Where one types."""
        return self.query_one(SafeInput)

    def show(self, frame: Frame | None) -> None:
        """The counts may have changed."""
        self.list.refresh()

    def action_leave(self) -> None:
        """Back to the panels."""
        self.dismiss()

    def action_move(self, lines: int) -> None:
        """Another line."""
        self.set_focus(self.list)
        self.list.move(lines)

    def action_switch(self) -> None:
        """Off, or on again."""
        if (entry := self.list.chosen) is not None:
            self._driver.toggle_break(entry)
            self._changed()

    def action_remove(self) -> None:
        """Out of the list."""
        if (entry := self.list.chosen) is not None:
            self._driver.remove_break(entry)
            self._changed()

    def action_add(self) -> None:
        """Type one."""
        self.set_focus(self.input)

    def action_go_on(self) -> None:
        """Close, and go on."""
        self.dismiss()
        self.app.call_later(self.app.run_action, "go_on")

    def on_input_changed(self, event: Input.Changed) -> None:
        """What is typed narrows what there is to choose."""
        self.query_one(Choices).narrow(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter: take it in, or say why not."""
        event.stop()
        if event.value.strip() and self._driver.add_break(event.value):
            self.input.value = ""
            self._changed()
            self.list.move(len(self._driver.breaks.entries))

    def on_safe_input_left(self, event: SafeInput.Left) -> None:
        """Escape in the line: back to the list; where there is none, back to the panels."""
        event.stop()
        if self._driver.breaks.entries:
            self.set_focus(self.list)
        else:
            self.dismiss()

    def _changed(self) -> None:
        self.list.update()


class EntryList(ScrollView):
    """One line a breakpoint; only those in view are made."""

    can_focus = True

    def __init__(self, palette: Palette, entries: list[Entry]) -> None:
        super().__init__()
        self.palette = palette
        self._entries = entries
        self._cursor = 0

    @property
    def chosen(self) -> Entry | None:
        """The breakpoint under the cursor."""
        return self._entries[self._cursor] if self._entries else None

    def move(self, lines: int) -> None:
        """Move the cursor, and scroll so that it is in view."""
        self._cursor = max(0, min(self._cursor + lines, len(self._entries) - 1))
        self.scroll_to_region(_line(self._cursor), animate=False, force=True)
        self.refresh()

    def update(self) -> None:
        """There are more or fewer."""
        self._cursor = max(0, min(self._cursor, len(self._entries) - 1))
        self.virtual_size = Size(0, max(1, len(self._entries)))
        self.styles.height = min(12, max(1, len(self._entries)))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One breakpoint: whether it is on, how it is written, how often it was met, its meaning.

        Without any, a word of that.
        """
        width, palette = self.scrollable_content_region.width, self.palette
        index = y + self.scroll_offset.y
        line: list[Segment] = []
        if not self._entries and y == 0:
            line = [Segment(fit(" none yet: a run goes on until it is paused", width),
                            palette.muted)]  # fmt: skip
        elif index < len(self._entries):
            line = self._row(self._entries[index], index == self._cursor, width)
        return Strip(line).adjust_cell_length(width, self.rich_style).apply_style(self.rich_style)

    def _row(self, entry: Entry, chosen: bool, width: int) -> list[Segment]:
        palette, ascii = self.palette, self.palette.ascii
        cursor = palette.glyphs.cursor if chosen else " "
        line = [
            Segment(f"{cursor} ", palette.accent),
            Segment("[x] " if entry.enabled else "[ ] ", palette.text),
            Segment(fit(entry.point.text, NAME_WIDTH, ascii=ascii) + " ",
                    palette.title if entry.enabled else palette.muted),
            Segment(f"{_times(entry.hits):>8}  ", palette.warn if entry.hits else palette.muted),
        ]  # fmt: skip
        rest = width - sum(segment.cell_length for segment in line)
        return [*line, Segment(fit(entry.point.meaning, rest, ascii=ascii), palette.muted)]


class Choices(Widget):
    """What can be typed, and what it waits for: those that begin with what was typed so far."""

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self.palette = palette
        self._found = list(EXAMPLES)

    def narrow(self, typed: str) -> None:
        """Only those that go on from here; when none does, all of them."""
        start = typed.strip().lower()
        self._found = [text for text in EXAMPLES if text.lower().startswith(start)] or list(
            EXAMPLES
        )
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One choice; in the last line, how many more there are."""
        width, height, palette = self.size.width, self.size.height, self.palette
        line: list[Segment] = []
        if y == height - 1 and len(self._found) > height:
            line = [Segment(f"   and {len(self._found) - height + 1} more", palette.muted)]
        elif y < len(self._found):
            text = self._found[y]
            line = [
                Segment("   " + fit(text, NAME_WIDTH, ascii=palette.ascii) + " ", palette.accent),
                Segment(Breakpoint.parse(text).meaning, palette.muted),
            ]
        return Strip(line).adjust_cell_length(width, self.rich_style).apply_style(self.rich_style)


def _times(hits: int) -> str:
    return "not met" if hits == 0 else f"{hits} hit{'' if hits == 1 else 's'}"


def _line(index: int) -> Region:
    return Region(0, index, 1, 1)
