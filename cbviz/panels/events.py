"""The event log: what changed, one line an event, newest last."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.strip import Strip

from cbviz.cells import IntArray, Line, grounded, note, titled
from cbviz.event_log import NOBODY, Entry, EventLog, Filter, renamed
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.selection import StepPicked, TokenSelected
from cbviz.sanitize import fit, one_line, width_of
from engine.explain import event_words
from engine.record import (
    Cancelled,
    Failed,
    Finished,
    KnobChanged,
    Preempted,
    PrefixHit,
    Refused,
)

NOWHERE: IntArray = np.zeros(0, dtype=np.int64)


class EventsPanel(Panel):
    """All events of the steps kept; those of the step looked at are marked, later ones dim.

    Only the lines in view are made. It follows the step that is looked at until it is moved.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "filter", "kinds", id="events.filter",
                tooltip="Event log: the next kinds of events (all but blocks, all, …)"),
        Binding("o", "only", "only selected", id="events.only",
                tooltip="Event log: only the selected request, or every one"),
        Binding("j", "move(1)", "event ↓", id="events.down", show=False,
                tooltip="Move the cursor to the event below"),
        Binding("k", "move(-1)", "event ↑", id="events.up", show=False,
                tooltip="Move the cursor to the event above"),
        Binding("pageup", "page(-1)", "page ↑", id="events.page_up", show=False,
                tooltip="A page of events up"),
        Binding("pagedown", "page(1)", "page ↓", id="events.page_down", show=False,
                tooltip="A page of events down"),
        Binding("enter", "go", "go to step", id="events.go", show=False,
                tooltip="Look at the step of the event under the cursor"),
        Binding("escape", "clear", "no cursor", id="events.clear", show=False,
                tooltip="Put the cursor away, and follow the step that is looked at"),
    ]  # fmt: skip

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(palette, id=id)
        self.kinds = Filter.MAIN
        self.only_selected = False
        self.cursor: int | None = None
        """The number of the event under the cursor."""
        self.numbers = NOWHERE
        """Of all events that pass the filter, in order."""
        self._selected = ""
        self._top = 0
        self._top_at: int | None = None
        """The number of the event at the top, if it was scrolled to."""
        self._last = (-1, -1)
        self._drawn: EventLog | None = None

    # Which lines.

    @property
    def event_log(self) -> EventLog | None:
        """Where the events are."""
        return self.frame.log if self.frame is not None else None

    @property
    def viewed(self) -> int:
        """The step that is looked at."""
        return self.frame.world.step if self.frame is not None else -1

    @property
    def room(self) -> int:
        """Lines that hold events."""
        return max(0, self.size.height - self._filter_lines)

    @property
    def _filter_lines(self) -> int:
        return 1 if self.size.height >= 4 else 0

    def update_frame(self) -> None:
        """Find the events that are to be shown, and move with the step looked at."""
        log = self.event_log
        if log is not self._drawn:
            self._drawn = log
            self.cursor = self._top_at = None
            self._selected, self.only_selected = "", False
        newest = self.frame.timeline.newest if self.frame and self.frame.timeline else self.viewed
        step, (last_step, last_newest) = self.viewed, self._last
        travelled = step != last_step if step < newest else last_step < last_newest
        if travelled and self.cursor is None:
            self._top_at = None
        self._last = (step, newest)
        self._arrange()

    def on_resize(self) -> None:
        """Another size has other lines."""
        self._arrange()

    def _arrange(self) -> None:
        log = self.event_log
        if log is None:
            self.numbers = NOWHERE
            self.border_title = titled("Events", "", self.palette)
            return
        self.numbers = log.numbers(
            self.kinds, (self._selected or None) if self.only_selected else None
        )
        room = self.room
        if self._top_at is not None:
            top = int(np.searchsorted(self.numbers, self._top_at))
        else:
            now = int(np.searchsorted(self.numbers, log.upto(self.viewed)))
            at_end = now == len(self.numbers)
            top = now - (room if at_end else room * 2 // 3)
        self._top = max(0, min(top, len(self.numbers) - room))
        self._entitle(log)

    def _entitle(self, log: EventLog) -> None:
        count, total = len(self.numbers), len(log)
        self.border_title = titled("Events", f"{count} of {total}: {self.kinds.value}",
                                   self.palette)  # fmt: skip

    # Drawing.

    def render_line(self, y: int) -> Strip:
        """One line of the panel."""
        return grounded(self._line(y), self.rich_style)

    def _line(self, y: int) -> Strip:
        width, log, muted = self.size.width, self.event_log, self.palette.muted
        if log is None:
            return note("no step yet" if y == 0 else "", width, muted, ascii=self.palette.ascii)
        if self._filter_lines and y == self.size.height - 1:
            return self._status()
        index = self._top + y
        if index < len(self.numbers):
            return self._event(log.entry(int(self.numbers[index])))
        words = "no such event yet" if y == 0 and not len(self.numbers) else ""
        return note(words, width, muted, ascii=self.palette.ascii)

    def _event(self, entry: Entry) -> Strip:
        palette, line = self.palette, Line(self.size.width)
        here = entry.step == self.viewed
        chosen = entry.number == self.cursor
        line.add(palette.glyphs.cursor if here else " ", palette.accent)
        number = palette.text if here else palette.muted
        line.add(f"{entry.step:>{self._digits}} ", number)
        if entry.ordinal == NOBODY:
            line.add("  ", palette.muted)
        else:
            line.add(palette.letter(entry.ordinal), palette.tint(entry.ordinal).name)
            line.add(" ", palette.text)
        style = _style_of(entry, palette)
        line.fit(one_line(self._words(entry)), style, ascii=palette.ascii)
        strip = line.strip()
        if entry.step > self.viewed:
            strip = strip.apply_style(Style(dim=True))
        return strip.apply_style(palette.cursor) if chosen else strip

    @property
    def _digits(self) -> int:
        return max(4, len(str(self._last[1])))

    def _words(self, entry: Entry) -> str:
        """Plain words, with letters for the requests that are known by them."""
        event = entry.event
        if entry.other != NOBODY:
            event = renamed(event, self.palette.letter(entry.other))
        words = event_words(event)
        if isinstance(event, Refused):
            return f"{event.request_id} {words}"
        if self.palette.ascii:
            words = words.replace("…", self.palette.glyphs.ellipsis)
        return words

    def _status(self) -> Strip:
        """What is shown, and the keys that change it."""
        palette, line = self.palette, Line(self.size.width)
        who = "every request"
        if self.only_selected:
            who = f"only {self._letter()}" if self._selected else "every request: none is selected"
        groups = [
            [("f ", palette.accent), (f"{self.kinds.value}  ", palette.muted)],
            [("o ", palette.accent), (f"{who}  ", palette.muted)],
            [("j k enter ", palette.accent), ("go to its step", palette.muted)],
        ]
        for group in groups:
            if sum(width_of(text) for text, _ in group) <= line.left:
                line.extend(group)
        return line.strip()

    def _letter(self) -> str:
        timeline = self.frame.timeline if self.frame is not None else None
        lane = timeline.lane_of(self._selected) if timeline is not None else None
        if lane is None:
            return fit(self._selected, 12, pad=False, ascii=self.palette.ascii)
        return self.palette.letter(lane.ordinal)

    # What the keys do.

    def action_filter(self) -> None:
        """The next kinds."""
        self.kinds = self.kinds.next
        self._refilter()

    def action_only(self) -> None:
        """One request, or every one."""
        self.only_selected = not self.only_selected
        self._refilter()

    def action_move(self, lines: int) -> None:
        """Move the cursor."""
        if not len(self.numbers):
            return
        if self.cursor is None:
            log = self.event_log
            end = log.upto(self.viewed) if log is not None else 0
            index = int(np.searchsorted(self.numbers, end)) - 1
        else:
            at = int(np.searchsorted(self.numbers, self.cursor))
            there = at < len(self.numbers) and self.numbers[at] == self.cursor
            index = at + lines if there else at
        self._put_cursor(index)

    def action_page(self, direction: int) -> None:
        """A page up or down."""
        self._scroll(direction * max(1, self.room - 1))

    def action_go(self) -> None:
        """Look at the step of the event under the cursor."""
        log = self.event_log
        if log is not None and self.cursor is not None and self.cursor >= log.dropped:
            self._go(log.entry(self.cursor))

    def action_clear(self) -> None:
        """Put the cursor away, and follow."""
        self.cursor = self._top_at = None
        self._selected = ""
        self.post_message(TokenSelected("", None, self))
        self._refilter()

    def show_selection(self, request_id: str, position: int | None) -> None:
        """The request whose events are shown, where only those of one are."""
        changed = request_id != self._selected
        self._selected = request_id
        if changed and self.only_selected:
            self._refilter()
        self.refresh()

    def _refilter(self) -> None:
        if self.cursor is None:
            self._top_at = None
        self._arrange()
        if self.cursor is not None:
            self._reveal(int(np.searchsorted(self.numbers, self.cursor)))
        self.refresh()

    def _put_cursor(self, index: int) -> None:
        index = max(0, min(index, len(self.numbers) - 1))
        self.cursor = int(self.numbers[index])
        self._reveal(index)
        self.refresh()

    def _reveal(self, index: int) -> None:
        """Scroll so that a line is in view, and stay there."""
        room = max(1, self.room)
        if not len(self.numbers):
            return
        top = max(index - room + 1, min(self._top, index))
        self._top_at = int(self.numbers[max(0, min(top, len(self.numbers) - 1))])
        self._arrange()

    def _scroll(self, lines: int) -> None:
        if len(self.numbers) <= self.room:
            return
        top = max(0, min(self._top + lines, len(self.numbers) - self.room))
        # At the end it follows again.
        at_end = top == len(self.numbers) - self.room and self._last[0] >= self._last[1]
        self._top_at = None if at_end else int(self.numbers[top])
        self._arrange()
        self.refresh()

    def _go(self, entry: Entry) -> None:
        self.post_message(StepPicked(entry.step))
        request_id = getattr(entry.event, "request_id", "")
        if request_id and entry.ordinal != NOBODY and request_id != self._selected:
            self._selected = request_id
            self.post_message(TokenSelected(request_id, None, self))

    # The mouse.

    def on_click(self, event: events.Click) -> None:
        """Go to the step of the event under the mouse, and select its request."""
        offset, log = event.get_content_offset(self), self.event_log
        if offset is None or log is None or offset.y >= self.room:
            return
        index = self._top + offset.y
        if index < len(self.numbers):
            self._put_cursor(index)
            self._go(log.entry(int(self.numbers[index])))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Later events."""
        event.stop()
        self._scroll(2)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Earlier events."""
        event.stop()
        self._scroll(-2)


def _style_of(entry: Entry, palette: Palette) -> Style:
    """Colours only repeat what the words say."""
    match entry.event:
        case Failed() | Refused():
            return palette.error
        case Cancelled():
            return palette.warn
        case Preempted():
            return palette.preempted
        case Finished():
            return palette.ok
        case PrefixHit():
            return palette.prefill
        case KnobChanged():
            return palette.accent
        case _:
            return palette.text
