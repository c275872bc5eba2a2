"""What every request did in every step: a lane a request, a column a step."""

from __future__ import annotations

from bisect import bisect_left
from typing import ClassVar

import numpy as np
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.strip import Strip

from cbviz.cells import Cell, Line, grounded, note, run_cells, titled
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.selection import StepPicked, TokenSelected
from cbviz.sanitize import fit, width_of
from cbviz.timeline import LEVELS, Lane, Mark, Timeline, lane_words

MAX_PER = 4096
"""Steps a column at most."""
GUTTER = 3
ID_WIDTH = 9
ID_FROM_WIDTH = 110
"""Narrower panels name a request by its letter alone."""
TICK = 10
"""Columns from one number of the axis to the next, or twice as many where numbers are long."""
_PAST, _FUTURE, _HERE, _CURSOR = range(4)
"""How a column is drawn: before the step looked at, after it, that step, under the cursor."""


class TimelinePanel(Panel):
    """Who waited, ran, was preempted and ended, step by step.

    Only the window in view is drawn, from lanes that grew with the records. It follows the step
    that is looked at until it is moved. Zoomed out, a column of several steps shows the most
    notable thing that happened to the request in them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h", "move(-1,0)", "step ←", id="timeline.left", show=False,
                tooltip="Move the cursor one column to the left; the window follows"),
        Binding("j", "move(0,1)", "request ↓", id="timeline.down", show=False,
                tooltip="Move the cursor to the request below, and select it"),
        Binding("k", "move(0,-1)", "request ↑", id="timeline.up", show=False,
                tooltip="Move the cursor to the request above, and select it"),
        Binding("l", "move(1,0)", "step →", id="timeline.right", show=False,
                tooltip="Move the cursor one column to the right; the window follows"),
        Binding("H", "pan(-1)", "page ←", id="timeline.page_left", show=False,
                tooltip="Half a window of steps to the left"),
        Binding("L", "pan(1)", "page →", id="timeline.page_right", show=False,
                tooltip="Half a window of steps to the right"),
        Binding("pageup", "scroll_lanes(-1)", "page ↑", id="timeline.page_up", show=False,
                tooltip="A window of requests up"),
        Binding("pagedown", "scroll_lanes(1)", "page ↓", id="timeline.page_down", show=False,
                tooltip="A window of requests down"),
        Binding("less_than_sign,comma", "zoom(1)", "zoom out", id="timeline.zoom_out",
                key_display="<", tooltip="Zoom the timeline out: twice as many steps a column"),
        Binding("greater_than_sign,full_stop", "zoom(-1)", "zoom in", id="timeline.zoom_in",
                key_display=">", tooltip="Zoom the timeline in: half as many steps a column"),
        Binding("enter", "go", "go to step", id="timeline.go", show=False,
                tooltip="Look at the step under the cursor"),
        Binding("escape", "clear", "no cursor", id="timeline.clear", show=False,
                tooltip="Put the cursor away, and follow the step that is looked at"),
    ]  # fmt: skip

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(palette, id=id)
        self.per = 1
        """Steps a column."""
        self.first = 0
        """The first step in view, a multiple of `per`."""
        self.rows: list[Lane] = []
        """The lanes in view."""
        self.cursor: tuple[int, int] | None = None
        """The request (by its ordinal) and the step under the cursor."""
        self._selected: int | None = None
        self._pinned = False
        """The window was moved: it stays where it is while new steps come."""
        self._top_at: int | None = None
        """The ordinal of the first lane in view, if it was scrolled to."""
        self._seen: list[int] = []
        """Indices of all lanes that have something in the window."""
        self._top = 0
        self._id_width = 0
        self._last = (-1, -1)
        self._drawn: Timeline | None = None

    # The window.

    @property
    def timeline(self) -> Timeline | None:
        """The lanes, if any step has run."""
        timeline = self.frame.timeline if self.frame is not None else None
        return timeline if timeline is not None and timeline.newest >= 0 else None

    @property
    def viewed(self) -> int:
        """The step that is looked at."""
        return self.frame.world.step if self.frame is not None else -1

    @property
    def lead(self) -> int:
        """Cells left of the first column."""
        return GUTTER + self._id_width

    @property
    def columns(self) -> int:
        """Columns in view."""
        return max(0, self.size.width - self.lead)

    @property
    def lane_lines(self) -> int:
        """Lines that hold lanes."""
        return max(0, self.size.height - self._axis_lines - self._legend_lines)

    @property
    def _axis_lines(self) -> int:
        return 1 if self.size.height >= 3 else 0

    @property
    def _legend_lines(self) -> int:
        return 1 if self.size.height >= 4 else 0

    def update_frame(self) -> None:
        """Take in where the world stands, and move the window with it unless it was moved."""
        timeline = self.timeline
        if timeline is None:
            self.border_title = titled("Timeline", "", self.palette)
            return
        if timeline is not self._drawn:
            self._drawn = timeline
            self.cursor = self._selected = self._top_at = None
            self._pinned = False
        step, (last_step, last_newest) = self.viewed, self._last
        travelled = step != last_step if step < timeline.newest else last_step < last_newest
        if travelled:
            self._pinned = False
        self._last = (step, timeline.newest)
        self._arrange()

    def on_resize(self) -> None:
        """Another size has another window."""
        self._arrange()

    def _arrange(self) -> None:
        """Decide which steps and which lanes are in view."""
        timeline = self.timeline
        if timeline is None or self.size.width <= 0:
            return
        self._id_width = ID_WIDTH if self.size.width >= ID_FROM_WIDTH and self._named() else 0
        columns, per = max(1, self.columns), self.per
        if not self._pinned:
            self._follow(timeline, columns)
        low = timeline.oldest // per * per
        high = max(low, (timeline.newest // per - columns + 1) * per)
        self.first = max(low, min(self.first // per * per, high))
        self._seen = timeline.seen(self.first, self.first + columns * per)
        room = self.lane_lines
        self._top = max(0, min(self._wanted_top(timeline, room), len(self._seen) - room))
        self.rows = [timeline.lanes[index] for index in self._seen[self._top : self._top + room]]
        self._entitle(timeline)

    def _follow(self, timeline: Timeline, columns: int) -> None:
        step, per = self.viewed, self.per
        if step >= timeline.newest:
            self.first = (step // per - columns + 1) * per
        elif not self.first <= step < self.first + columns * per:
            self.first = (step // per - columns // 2) * per

    def _wanted_top(self, timeline: Timeline, room: int) -> int:
        """The lane scrolled to; else so that the first that is still live is in view."""
        if len(self._seen) <= room:
            return 0
        lanes = timeline.lanes
        if self._top_at is not None:
            return bisect_left(self._seen, self._top_at, key=lambda index: lanes[index].ordinal)
        step = self.viewed
        live = (at for at, index in enumerate(self._seen) if lanes[index].ended >= step)
        return next(live, len(self._seen)) - room // 3

    def _named(self) -> bool:
        """Whether the letters alone do not say which request is which."""
        return self.frame is not None and any(
            view.request_id != self.palette.letter(view.ordinal)
            for view in self.frame.world.requests.values()
        )

    def _entitle(self, timeline: Timeline) -> None:
        dash, dot = self.palette.glyphs.dash, f" {self.palette.glyphs.middot} "
        last = min(timeline.newest, self.first + self.columns * self.per - 1)
        first = max(self.first, timeline.oldest)
        scale = "1 step a column" if self.per == 1 else f"{self.per} steps a column"
        count = len(self._seen)
        lanes = f"{count} request" + "s" * (count != 1)
        if count > len(self.rows) > 0:
            until = self._top + len(self.rows)
            lanes = f"requests {self._top + 1}{dash}{until} of {count}"
        figures = f"steps {first}{dash}{last}"
        for more in (scale, lanes):
            if width_of(figures + dot + more) + 12 <= self.size.width:
                figures += dot + more
        self.border_title = titled("Timeline", figures, self.palette)

    # Drawing.

    def render_line(self, y: int) -> Strip:
        """One line of the panel."""
        return grounded(self._line(y), self.rich_style)

    def _line(self, y: int) -> Strip:
        width, timeline = self.size.width, self.timeline
        if timeline is None:
            return note(
                "no step yet" if y == 0 else "", width, self.palette.muted, ascii=self.palette.ascii
            )
        if y < self._axis_lines:
            return self._axis(timeline)
        if self._legend_lines and y == self.size.height - 1:
            return self._status(timeline)
        index = y - self._axis_lines
        if index < len(self.rows):
            return self._lane(timeline, self.rows[index])
        return self._nobody(y == self._axis_lines)

    def _nobody(self, first: bool) -> Strip:
        width = self.size.width
        if first and not self.rows:
            return note(
                "no request in these steps", width, self.palette.muted, ascii=self.palette.ascii
            )
        column = self._column_of(self.viewed)
        line = Line(width)
        if column is not None:
            line.pad_to(self.lead + column, self.palette.faint)
            line.add(self.palette.glyphs.here, self.palette.muted)
        return line.strip()

    def _column_of(self, step: int) -> int | None:
        column = (step - self.first) // self.per
        return column if 0 <= column < self.columns and step >= 0 else None

    def _axis(self, timeline: Timeline) -> Strip:
        """Numbers of steps over their columns, and a mark over the one that is looked at."""
        columns, per = self.columns, self.per
        row = [" "] * columns
        tick = TICK if len(str(timeline.newest)) < TICK - 2 else 2 * TICK
        for column in range(-(self.first // per) % tick, columns, tick):
            step = self.first + column * per
            text = str(step)
            if step <= timeline.newest and column + len(text) <= columns:
                row[column : column + len(text)] = text
        line = Line(self.size.width).add(" " * self.lead, self.palette.muted)
        here = self._column_of(self.viewed)
        if here is None:
            return line.add("".join(row), self.palette.muted).strip()
        number, down = str(self.viewed), self.palette.glyphs.down
        right = here + 1 + len(number) <= columns
        label = down + number if right else number + down
        start = here if right else here - len(number)
        if start < 0:
            start, label = here, down
        before = "".join(row[:start])
        cut = len(before) - len(before.rstrip("0123456789"))
        if cut and start < columns and row[start] != " ":
            # A number that the label covers in part would read as another number.
            before = before[: len(before) - cut] + " " * cut
        after = "".join(row[start + len(label) :])
        if row[min(columns, start + len(label)) - 1] != " ":
            rest = after.lstrip("0123456789")
            after = " " * (len(after) - len(rest)) + rest
        line.add(before, self.palette.muted).add(label, self.palette.accent)
        return line.add(after, self.palette.muted).strip()

    def _lane(self, timeline: Timeline, lane: Lane) -> Strip:
        palette, per = self.palette, self.per
        marks = lane.marks(self.first, self.columns, per, timeline.newest)
        variants = np.zeros(len(marks), dtype=np.int64)
        here = self._column_of(self.viewed)
        after = max(0, (self.viewed - self.first) // per + 1)
        variants[after:] = _FUTURE
        if here is not None:
            variants[here] = _HERE
        if self.cursor is not None and self.cursor[0] == lane.ordinal:
            under = self._column_of(self.cursor[1])
            if under is not None:
                variants[under] = _CURSOR
        line = Line(self.size.width)
        chosen = lane.ordinal == self._selected
        line.add(palette.glyphs.cursor if chosen else " ", palette.accent)
        tint = palette.tint(lane.ordinal)
        live = lane.added <= self.viewed <= lane.ended
        name = tint.on + Style(bold=True) if chosen else tint.name if live else palette.finished
        line.add(palette.letter(lane.ordinal), name).add(" ", palette.text)
        if self._id_width:
            safe = fit(lane.request_id, self._id_width - 1, ascii=palette.ascii)
            line.add(safe + " ", palette.text if chosen else palette.muted)
        codes = marks + variants * len(_ORDER)
        return line.extend(run_cells(codes, self._table(lane.ordinal))).strip()

    def _table(self, ordinal: int) -> list[Cell]:
        """The cell of each mark, in each way that a column is drawn."""
        palette = self.palette
        past = mark_cells(palette, ordinal)
        empty = (palette.glyphs.here, palette.muted)
        here = [(text, style + _UNDER) for text, style in past]
        here[Mark.NONE] = empty
        future = [(text, palette.dim(style)) for text, style in past]
        cursor = [(text, style + palette.cursor) for text, style in past]
        return [*past, *future, *here, *cursor]

    # The last line.

    def _status(self, timeline: Timeline) -> Strip:
        line = Line(self.size.width)
        if self.cursor is not None:
            line.add(self.palette.glyphs.cursor + " ", self.palette.accent)
            words = self._explain(timeline, *self.cursor)
            return line.fit(words, self.palette.text, ascii=self.palette.ascii).strip()
        for group in self._legend():
            if sum(width_of(text) for text, _ in group) <= line.left:
                line.extend(group)
        return line.strip()

    def _explain(self, timeline: Timeline, ordinal: int, step: int) -> str:
        lane = self._lane_at(ordinal)
        first = step // self.per * self.per
        last = min(first + self.per - 1, timeline.newest)
        dash = self.palette.glyphs.dash
        steps = f"step {first}" if first == last else f"steps {first}{dash}{last}"
        if lane is None:
            return steps
        letter = self.palette.letter(ordinal)
        return f"{letter}, {steps}: {lane_words(lane, first, last + 1, timeline.newest)}"

    def _legend(self) -> list[list[Cell]]:
        """Groups of glyph and word, those that matter most first."""
        cells, muted = mark_cells(self.palette, 0), self.palette.muted
        fills = self.palette.glyphs.fills
        told = [
            (fills[2] + fills[LEVELS // 2 + 1] + fills[LEVELS], Mark.PREFILL,
             "prefill, by share of m"),
            (None, Mark.DECODE, "decode"), (None, Mark.WAITING, "waiting"),
            (None, Mark.PREEMPTED, "preempted"), (None, Mark.FINISHED, "finished"),
            (None, Mark.HIT, "prefix hit"), (None, Mark.WAITING_AGAIN, "waits again"),
            (None, Mark.CANCELLED, "cancelled"), (None, Mark.FAILED, "failed"),
            (None, Mark.IDLE, "idle"),
        ]  # fmt: skip
        return [
            [(glyphs or cells[mark][0], cells[mark][1]), (f" {word}  ", muted)]
            for glyphs, mark, word in told
        ]

    # The cursor.

    def action_move(self, columns: int, lanes: int) -> None:
        """Move the cursor; the window follows it."""
        timeline = self.timeline
        if timeline is None or not self._seen:
            return
        if self.cursor is None:
            at = self._index_of(self._selected)
            if at is None:
                at = self._top + self._first_live()
            step = self.viewed if self._column_of(self.viewed) is not None else self.first
        else:
            at = self._index_of(self.cursor[0])
            at = self._top if at is None else max(0, min(at + lanes, len(self._seen) - 1))
            step = (self.cursor[1] // self.per + columns) * self.per
        step = max(timeline.oldest, min(step, timeline.newest))
        lane = timeline.lanes[self._seen[at]]
        self.cursor = (lane.ordinal, step)
        self._pinned = True
        if step < self.first:
            self.first = step
        elif step >= self.first + self.columns * self.per:
            self.first = (step // self.per - self.columns + 1) * self.per
        self._choose(lane)
        self._arrange()
        self._reveal(lane.ordinal)

    def action_pan(self, direction: int) -> None:
        """Half a window of steps to one side."""
        self._pan(direction * max(1, self.columns // 2))

    def action_scroll_lanes(self, direction: int) -> None:
        """A window of requests up or down."""
        self._scroll(direction * max(1, self.lane_lines - 1))

    def action_zoom(self, direction: int) -> None:
        """Twice (1) or half (-1) as many steps a column, about the cursor or the step."""
        per = max(1, min(self.per * 2 if direction > 0 else self.per // 2, MAX_PER))
        timeline = self.timeline
        if per == self.per or timeline is None:
            return
        if direction > 0 and self.per * self.columns >= timeline.newest - timeline.oldest + 1:
            return  # All of it is in view.
        anchor = self.cursor[1] if self.cursor is not None else self.viewed
        column = self._column_of(anchor)
        self.per = per
        self.first = (anchor // per - (self.columns // 2 if column is None else column)) * per
        self._arrange()
        self.refresh()

    def action_go(self) -> None:
        """Look at the step under the cursor."""
        if self.cursor is not None:
            self._go(*self.cursor)

    def action_clear(self) -> None:
        """Put the cursor away, and follow."""
        self.cursor = self._selected = self._top_at = None
        self._pinned = False
        self.post_message(TokenSelected("", None, self))
        self._arrange()
        self.refresh()

    def show_selection(self, request_id: str, position: int | None) -> None:
        """Light the lane of what was picked elsewhere, and have it in view."""
        timeline = self.timeline
        lane = timeline.lane_of(request_id) if timeline is not None and request_id else None
        self._selected = None if lane is None else lane.ordinal
        self.cursor = None
        if lane is not None:
            self._reveal(lane.ordinal)
        self.refresh()

    def _choose(self, lane: Lane) -> None:
        """Select a request everywhere."""
        if lane.ordinal != self._selected:
            self._selected = lane.ordinal
            self.post_message(TokenSelected(lane.request_id, None, self))
        self.refresh()

    def _reveal(self, ordinal: int) -> None:
        """Scroll so that a lane that has something in the window is in view."""
        at, room = self._index_of(ordinal), self.lane_lines
        timeline = self.timeline
        if at is None or timeline is None or self._top <= at < self._top + room or room <= 0:
            return
        top = at if at < self._top else at - room + 1
        self._top_at = timeline.lanes[self._seen[top]].ordinal
        self._arrange()

    def _first_live(self) -> int:
        """The first line whose request is there at the step looked at, or the first line."""
        step = self.viewed
        live = (at for at, lane in enumerate(self.rows) if lane.added <= step <= lane.ended)
        return next(live, 0)

    def _index_of(self, ordinal: int | None) -> int | None:
        """Where a request stands among the lanes of the window."""
        timeline = self.timeline
        if ordinal is None or timeline is None:
            return None
        lanes = timeline.lanes
        at = bisect_left(self._seen, ordinal, key=lambda index: lanes[index].ordinal)
        found = at < len(self._seen) and lanes[self._seen[at]].ordinal == ordinal
        return at if found else None

    def _lane_at(self, ordinal: int) -> Lane | None:
        timeline = self.timeline
        if timeline is None:
            return None
        at = bisect_left(timeline.lanes, ordinal, key=lambda lane: lane.ordinal)
        found = at < len(timeline.lanes) and timeline.lanes[at].ordinal == ordinal
        return timeline.lanes[at] if found else None

    def _go(self, ordinal: int | None, step: int) -> None:
        """Look at the step of a column in which what it shows happened."""
        timeline = self.timeline
        if timeline is None:
            return
        first = step // self.per * self.per
        lane = None if ordinal is None else self._lane_at(ordinal)
        last = min(first + self.per - 1, timeline.newest)
        target = last
        if lane is not None:
            target = lane.notable(first, last + 1, timeline.newest)
        self.post_message(StepPicked(max(target, timeline.oldest)))

    def _pan(self, columns: int) -> None:
        self._pinned = True
        self.first += columns * self.per
        self._arrange()
        self.refresh()

    def _scroll(self, lanes: int) -> None:
        timeline = self.timeline
        if timeline is None or len(self._seen) <= self.lane_lines:
            return
        top = max(0, min(self._top + lanes, len(self._seen) - self.lane_lines))
        self._top_at = timeline.lanes[self._seen[top]].ordinal
        self._arrange()
        self.refresh()

    # The mouse.

    def on_click(self, event: events.Click) -> None:
        """Go to the step under the mouse, and select the request."""
        offset, timeline = event.get_content_offset(self), self.timeline
        if offset is None or timeline is None:
            return
        index = offset.y - self._axis_lines
        if self._legend_lines and offset.y == self.size.height - 1:
            return
        lane = self.rows[index] if 0 <= index < len(self.rows) else None
        step = self.first + (offset.x - self.lead) * self.per
        if offset.x >= self.lead and step <= timeline.newest:
            self._go(None if lane is None else lane.ordinal, step)
        if lane is not None:
            self._choose(lane)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll the lanes; with shift, the steps."""
        event.stop()
        if event.shift:
            self._pan(4)
        else:
            self._scroll(2)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll the lanes; with shift, the steps."""
        event.stop()
        if event.shift:
            self._pan(-4)
        else:
            self._scroll(-2)

    def on_mouse_scroll_left(self, event: events.MouseScrollLeft) -> None:
        """Earlier steps."""
        event.stop()
        self._pan(-4)

    def on_mouse_scroll_right(self, event: events.MouseScrollRight) -> None:
        """Later steps."""
        event.stop()
        self._pan(4)


_UNDER = Style(underline=True, bold=True)
_ORDER = range(Mark.FINISHED + 1)


def mark_cells(palette: Palette, ordinal: int) -> list[Cell]:
    """The glyph and the style of each mark, `[Mark.FINISHED + 1]`, in the lane of a request."""
    glyphs, tint = palette.glyphs, palette.tint(ordinal)
    return [
        (" ", palette.text),
        (glyphs.waiting, palette.waiting),
        (glyphs.waiting_again, palette.preempted),
        (glyphs.idle, palette.muted),
        (glyphs.decode, tint.bright),
        *((glyphs.fills[level], tint.bright) for level in range(1, LEVELS + 1)),
        (glyphs.hit, tint.name),
        (glyphs.preempted, palette.preempted + Style(bold=True)),
        (glyphs.cancelled, palette.warn),
        (glyphs.cross, palette.error),
        (glyphs.check, palette.ok),
    ]
