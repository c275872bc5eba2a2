"""Every request in one line: where it stands, how far it is, what it says or why it waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from cbviz.frame import Frame
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.reason import why
from cbviz.panels.rows import finish_words, hits, letter_of, ratio, seconds, tail
from cbviz.sanitize import fit, one_line
from engine.record import SegmentKind
from engine.request import RequestStatus
from engine.world import RequestView, World

ID_FROM_WIDTH = 110
"""Narrower panels name a request by its letter alone."""
BAR_FROM_WIDTH = 90
BAR = 7


class RequestsPanel(Panel, ScrollView, inherit_bindings=False):
    """Live requests in the order in which they are scheduled, then finished ones, newest first.

    Only the lines in view are made. The first line names the columns and stays.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "page_up", "Page up", show=False),
        Binding("pagedown", "page_down", "Page down", show=False),
    ]

    class Selected(Message):
        """The user chose a request."""

        def __init__(self, request_id: str) -> None:
            super().__init__()
            self.request_id = request_id

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(palette, id=id)
        self.border_title = "Requests"
        self.selected: str | None = None
        """Stays with the request, wherever its line moves."""
        self._order: Sequence[str] = ()
        self._kinds: dict[str, SegmentKind] = {}
        self._named = False
        """Whether the letters alone do not say which request is which."""

    @property
    def order(self) -> Sequence[str]:
        """Ids from the first line to the last."""
        return self._order

    def update_frame(self) -> None:
        """Order the requests; their lines are made when they are drawn."""
        frame = self.frame
        self._order = ordered(frame.world) if frame else ()
        self._kinds = _kinds(frame)
        self._named = frame is not None and any(
            view.request_id != self.palette.letter(view.ordinal)
            for view in frame.world.requests.values()
        )
        self.border_title = title(frame)
        size = Size(0, len(self._order) + 1)
        if size != self.virtual_size:
            self.virtual_size = size

    def select(self, request_id: str | None) -> None:
        """Mark a request, and scroll so that it is in view."""
        self.selected = request_id
        if request_id in self._order:
            self._scroll_into_view(self._order.index(request_id))
        self.refresh()

    def move_selection(self, lines: int) -> str | None:
        """Mark the request some lines further down; the id of it, None if there is none."""
        if not self._order:
            return None
        if self.selected in self._order:
            index = self._order.index(self.selected) + lines
        else:
            index = 0 if lines > 0 else len(self._order) - 1
        self._choose(max(0, min(index, len(self._order) - 1)))
        return self.selected

    def on_click(self, event: Click) -> None:
        """Select the request of the line under the mouse."""
        offset = event.get_content_offset(self)
        index = -1 if offset is None or offset.y == 0 else self._index_of_line(offset.y)
        if 0 <= index < len(self._order):
            self._choose(index)

    def _choose(self, index: int) -> None:
        self.select(self._order[index])
        self.post_message(self.Selected(self._order[index]))

    def render_line(self, y: int) -> Strip:
        """The head, or the request of this line."""
        width = self.scrollable_content_region.width
        index = self._index_of_line(y)
        if y == 0:
            line = self._head(width)
        elif self.frame is not None and 0 <= index < len(self._order):
            line = self._row(self.frame.world, self._order[index], width)
        else:
            line = []
        return Strip(line).adjust_cell_length(width, self.rich_style).apply_style(self.rich_style)

    def _index_of_line(self, y: int) -> int:
        return self.scroll_offset.y + y - 1

    def _scroll_into_view(self, index: int) -> None:
        visible = self.scrollable_content_region.height - 1
        top = self.scroll_offset.y
        if index < top:
            self.scroll_to(y=index, animate=False)
        elif visible > 0 and index >= top + visible:
            self.scroll_to(y=index - visible + 1, animate=False)

    def _id_width(self, width: int) -> int:
        return 10 if self._named and width >= ID_FROM_WIDTH else 0

    def _head(self, width: int) -> list[Segment]:
        id_width = self._id_width(width)
        text = f"   {'id':{id_width}}" if id_width else "   "
        prompt_width = 8 + _bar_width(width)
        text += (
            f"{'state':10}{'prompt':{prompt_width}}{'out':>7}{'ttft':>8}   text, or why it waits"
        )
        return [Segment(fit(text, width, ascii=self.palette.ascii), self.palette.muted)]

    def _row(self, world: World, request_id: str, width: int) -> list[Segment]:
        view = world.requests[request_id]
        palette = self.palette
        chosen = request_id == self.selected
        tint = palette.tint(view.ordinal)
        name = tint.name if view.live else palette.finished
        cursor = palette.glyphs.cursor if chosen else " "
        line = [Segment(f"{cursor}", palette.accent), Segment(letter_of(view, palette), name)]
        line.append(Segment(" "))
        if id_width := self._id_width(width):
            line.append(self._cell(view.request_id, id_width - 1, palette.muted))
        line.append(self._cell(*self._state(view, request_id)))
        line += self._progress(view, _bar_width(width))
        out = ratio(view.num_output_tokens, view.params.max_tokens)
        line.append(Segment(f"{out:>7} ", palette.text if view.live else palette.finished))
        line.append(Segment(f"{self._ttft(view):>7}  ", palette.muted))
        line += self._words(world, view, width - sum(segment.cell_length for segment in line))
        if chosen:
            line = [Segment(s.text, (s.style or Style()) + Style(bold=True)) for s in line]
        return line

    def _cell(self, text: str, width: int, style: Style) -> Segment:
        return Segment(fit(text, width, ascii=self.palette.ascii) + " ", style)

    def _state(self, view: RequestView, request_id: str) -> tuple[str, int, Style]:
        """The word for what happened to it in this step, and its style."""
        palette, width = self.palette, 9
        if view.status is RequestStatus.FINISHED:
            word, good = finish_words(view)
            glyph = palette.glyphs.check if good else palette.glyphs.cross
            return f"{glyph} {word}", width, palette.finished
        if view.status is RequestStatus.PREEMPTED:
            return "preempted", width, palette.preempted
        if view.status is RequestStatus.WAITING:
            return "waiting", width, palette.waiting
        kind = self._kinds.get(request_id)
        if kind is SegmentKind.PREFILL:
            return "prefill", width, palette.prefill
        if kind is SegmentKind.DECODE:
            return "decode", width, palette.decode
        return "idle", width, palette.waiting

    def _progress(self, view: RequestView, width: int) -> list[Segment]:
        """Prompt tokens computed, a bar while there are some left, then what the cache had."""
        palette, total = self.palette, view.num_prompt_tokens
        done = min(view.num_computed, total) if view.live else total
        numbers = ratio(done, total)
        style = palette.text if view.live else palette.finished
        line = [Segment(f"{numbers:<8}", style)]
        if not width:
            return line
        if not view.live or done in (0, total):
            return [*line, Segment(f"{hits(view):<{width}}", palette.muted)]
        filled = max(1, BAR * done // total)
        cached = min(filled, BAR * view.hit_tokens // total)
        return [
            *line,
            Segment(palette.glyphs.bar_alt * cached, palette.muted),
            Segment(palette.glyphs.bar * (filled - cached), palette.prefill),
            Segment(palette.glyphs.bar_rest * (BAR - filled) + " ", palette.rest),
        ]

    def _ttft(self, view: RequestView) -> str:
        return self.palette.glyphs.dash if view.ttft_s is None else seconds(view.ttft_s)

    def _words(self, world: World, view: RequestView, width: int) -> list[Segment]:
        """The newest text, or why there is none to come in this step."""
        palette = self.palette
        if width <= 0:
            return []
        if view.error:
            return [Segment(fit(one_line(view.error), width, ascii=palette.ascii), palette.error)]
        running = self._kinds.get(view.request_id) is SegmentKind.DECODE
        if view.live and not running:
            reason = why(world, view, palette)
            if self._kinds.get(view.request_id) is SegmentKind.PREFILL and view.hit_tokens:
                total = view.num_prompt_tokens
                reason += f"; {view.hit_tokens} of {total} prompt tokens from the cache"
            return [Segment(fit(one_line(reason), width, ascii=palette.ascii), palette.muted)]
        prompt, text = tail(view.prompt, view.text, width, ascii=palette.ascii)
        style = palette.text if view.live else palette.finished
        return [Segment(prompt, palette.muted), Segment(text, style)]


def ordered(world: World) -> list[str]:
    """Ids of all requests that are known, in the order of the lines."""
    finished = [view for view in world.requests.values() if not view.live]
    finished.sort(key=lambda view: (view.finished_at or 0.0, view.ordinal), reverse=True)
    return [*world.running, *world.waiting, *(view.request_id for view in finished)]


def title(frame: Frame | None) -> str:
    """The panel's own figures."""
    if frame is None:
        return "Requests"
    world = frame.world
    parts = [
        f"{len(world.running)} of {world.knobs.max_num_seqs} running",
        f"{len(world.waiting)} waiting",
    ]
    parts.append(f"{world.num_finished} finished")
    if world.num_preemptions:
        parts.append(f"{world.num_preemptions} preempted")
    if world.num_refused:
        parts.append(f"{world.num_refused} refused")
    return "Requests  " + ", ".join(parts)


def _kinds(frame: Frame | None) -> dict[str, SegmentKind]:
    if frame is None or frame.record is None:
        return {}
    return {segment.request_id: segment.kind for segment in frame.record.segments}


def _bar_width(width: int) -> int:
    return BAR + 1 if width >= BAR_FROM_WIDTH else 0
