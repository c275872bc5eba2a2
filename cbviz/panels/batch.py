"""The packed batch of the step: its tokens side by side, and how they fill the token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.style import Style
from textual import events
from textual.strip import Strip

from cbviz.cells import Cell, Line, grounded, note, share, titled
from cbviz.mask_words import piece_of
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.selection import TokenSelected
from cbviz.sanitize import fit, width_of
from engine.record import Segment, SegmentKind, StepRecord
from engine.world import World

TOKEN_WIDTHS = (14, 10, 8, 6, 5, 4, 3)
"""How wide a token's text may be, tried from left to right until all tokens fit."""
TIGHT = 5
"""From this width down a token's leading space gives way to its letters."""
NAMED_CHUNKS = 2
"""Prefill chunks that the title names one by one."""


class BatchPanel(Panel):
    """All tokens that the step computes, in packed order, each in the tint of its request.

    As words where they fit, as one letter a token where they don't, and as a bar in proportion
    when even that is too much. The last line is the budget: decode, prefill, what is left of m.
    """

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(palette, id=id)
        self._lines: list[Strip] = []
        self._drawn_for: object = None
        self._selected: tuple[str, int | None] = ("", None)
        self._spans: list[tuple[int, int, int, str, int]] = []
        """Where tokens are: line, first and end column, request, position."""

    def update_frame(self) -> None:
        """Forget the lines of the step before."""
        self._drawn_for = None
        record = self.frame.record if self.frame else None
        words = ""
        if self.frame is not None and record is not None and record.segments:
            words = figures(self.frame.world, record, self.palette)
        self.border_title = titled("Batch", words, self.palette)

    def render_line(self, y: int) -> Strip:
        """One line of the panel."""
        if self._drawn_for != self.size:
            self._drawn_for = self.size
            self._lines = self._draw(self.size.width, self.size.height)
        strip = self._lines[y] if y < len(self._lines) else Strip.blank(self.size.width)
        return grounded(strip, self.rich_style)

    def _draw(self, width: int, height: int) -> list[Strip]:
        record = self.frame.record if self.frame else None
        if self.frame is None or record is None:
            return [note("no step yet", width, self.palette.muted)]
        if not record.segments:
            empty = note("nothing ran in this step", width, self.palette.muted)
            return [empty, self._budget(record, width)][:height]
        room = max(1, height - 1)
        lines = self._tokens(self.frame.world, record, width, room)
        lines += [Strip.blank(width)] * (room - len(lines))
        return [*lines, self._budget(record, width)][:height]

    def show_selection(self, request_id: str, position: int | None) -> None:
        """Light a token picked elsewhere."""
        self._selected = (request_id, position)
        self._drawn_for = None
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Pick the token under the mouse."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        for line, first, end, request_id, position in self._spans:
            if line == offset.y and first <= offset.x < end:
                self.post_message(TokenSelected(request_id, position, self))
                return

    # The tokens.

    def _tokens(self, world: World, record: StepRecord, width: int, room: int) -> list[Strip]:
        tokens = record.num_tokens
        if tokens * 2 <= width * room:
            for limit in TOKEN_WIDTHS:
                lines = self._words(world, record, width, room, limit)
                if lines is not None:
                    return lines
        if tokens <= width * room:
            return self._letters(world, record, width)
        return [self._proportions(world, record, width)] * min(room, 1)

    def _words(
        self, world: World, record: StepRecord, width: int, room: int, limit: int
    ) -> list[Strip] | None:
        """Tokens as words of at most `limit` cells; None when they need more than `room` lines."""
        lines = [Line(width)]
        self._spans = []
        for segment in record.segments:
            for offset in range(segment.length):
                cells = self._word(world, segment, offset, limit)
                size = sum(width_of(text) for text, _ in cells)
                if size > lines[-1].left:
                    if len(lines) == room or size > width:
                        return None
                    lines.append(Line(width))
                first = lines[-1].used
                lines[-1].extend(cells)
                at = segment.start + offset
                where = (len(lines) - 1, first, lines[-1].used)
                self._spans.append((*where, segment.request_id, at))
        return [line.strip() for line in lines]

    def _word(self, world: World, segment: Segment, offset: int, limit: int) -> list[Cell]:
        """One token: its request's letter (on the first of a segment), text, mark, edge."""
        field, name = self._styles(world, segment)
        piece = piece_of(world, segment, segment.start + offset)
        if limit <= TIGHT:
            piece = piece.strip(" ")
        text = fit(piece, limit, pad=False, ascii=self.palette.ascii) or " "
        if self._selected == (segment.request_id, segment.start + offset):
            field = self.palette.cursor
        cells = [(text, field)]
        if offset == 0:
            gap = "" if text.startswith(" ") else " "
            cells.insert(0, (self._letter(world, segment) + gap, name))
        if segment.samples and offset == segment.length - 1:
            cells.append((self.palette.glyphs.samples, name))
        cells.append((self.palette.glyphs.edge, self.palette.faint))
        return cells

    def _letters(self, world: World, record: StepRecord, width: int) -> list[Strip]:
        cells = [cell for segment in record.segments for cell in self._initials(world, segment)]
        at = [(s.request_id, s.start + i) for s in record.segments for i in range(s.length)]
        self._spans = [
            (index // width, index % width, index % width + 1, *token)
            for index, token in enumerate(at)
        ]
        return [
            Line(width).extend(cells[start : start + width]).strip()
            for start in range(0, len(cells), width)
        ]

    def _initials(self, world: World, segment: Segment) -> Iterator[Cell]:
        field, name = self._styles(world, segment)
        letter = self._letter(world, segment)
        for offset in range(segment.length):
            style = field
            if segment.samples and offset == segment.length - 1:
                style = name + Style(underline=True)
            if self._selected == (segment.request_id, segment.start + offset):
                style = self.palette.cursor
            yield letter, style

    def _proportions(self, world: World, record: StepRecord, width: int) -> Strip:
        line = Line(width)
        self._spans = []
        sizes = share([segment.length for segment in record.segments], width)
        for segment, size in zip(record.segments, sizes, strict=True):
            words = f"{self._letter(world, segment)} {segment.length}"
            letter = self._letter(world, segment)
            text = words if len(words) <= size else letter
            line.add(text[:size].ljust(size), self._styles(world, segment)[0])
        return line.strip()

    def _letter(self, world: World, segment: Segment) -> str:
        view = world.view(segment.request_id)
        return self.palette.glyphs.pad if view is None else self.palette.letter(view.ordinal)

    def _styles(self, world: World, segment: Segment) -> tuple[Style, Style]:
        """Of a token's text, and of the letter and the mark beside it."""
        view = world.view(segment.request_id)
        if segment.kind is SegmentKind.PAD or view is None:
            field = self.palette.pad + Style(reverse=True)
        else:
            field = self.palette.tint(view.ordinal).on
        return field, field + Style(bold=True)

    # The budget.

    def _budget(self, record: StepRecord, width: int) -> Strip:
        marker = f" m = {record.token_budget}"
        room = width - len(marker)
        if room < 4:
            return note(marker.strip(), width, self.palette.muted)
        glyphs = self.palette.glyphs
        amounts = budget_parts(record)
        parts = (
            ("decode", glyphs.bar, self.palette.decode),
            ("prefill", glyphs.bar_alt, self.palette.prefill),
            ("pad", glyphs.pad, self.palette.pad),
            ("free", glyphs.bar_rest, self.palette.rest),
        )
        line = Line(width)
        sizes = _scaled(amounts, room)
        for (name, glyph, style), amount, size in zip(parts, amounts, sizes, strict=True):
            labels = (f"{name} {amount}", str(amount))
            line.extend(_labelled(labels, glyph, size, style, self.palette.text))
        return line.add(marker, self.palette.title).strip()


def budget_parts(record: StepRecord) -> tuple[int, int, int, int]:
    """Tokens of the step in decode, prefill and padding, and what is left of the budget."""
    used = tuple(
        record.tokens_of(kind)
        for kind in (SegmentKind.DECODE, SegmentKind.PREFILL, SegmentKind.PAD)
    )
    return used[0], used[1], used[2], max(0, record.token_budget - sum(used))


def figures(world: World, record: StepRecord, palette: Palette) -> str:
    """`32 of 32 tokens: 3 decode + 29 prefill (D, 29–57 of 75)`."""
    decode, prefill, pad, _ = budget_parts(record)
    named = [(decode, "decode"), (prefill, "prefill"), (pad, "pad")]
    parts = " + ".join(f"{amount} {name}" for amount, name in named if amount)
    chunks = [segment for segment in record.segments if segment.kind is SegmentKind.PREFILL]
    told = [_chunk(world, record, segment, palette) for segment in chunks[:NAMED_CHUNKS]]
    if len(chunks) > NAMED_CHUNKS:
        told.append(f"{len(chunks) - NAMED_CHUNKS} more")
    where = f" ({'; '.join(told)})" if told else ""
    noun = "token" if record.token_budget == 1 else "tokens"
    return f"{record.num_tokens} of {record.token_budget} {noun}: {parts}{where}"


def _chunk(world: World, record: StepRecord, segment: Segment, palette: Palette) -> str:
    """`D, 29–57 of 75`: positions of the prefill, as in the mask."""
    view = world.view(segment.request_id)
    letter = palette.glyphs.pad if view is None else palette.letter(view.ordinal)
    end = segment.start + segment.length
    total = max(_prefill_total(world, record, segment), end)
    return f"{letter}, {segment.start}{palette.glyphs.dash}{end - 1} of {total}"


def _prefill_total(world: World, record: StepRecord, segment: Segment) -> int:
    """Tokens that this prefill covers: the prompt, after a preemption also what was generated."""
    decision = next((d for d in record.decisions if d.request_id == segment.request_id), None)
    if decision is not None and decision.left:
        return segment.start + decision.left
    view = world.view(segment.request_id)
    return 0 if view is None else view.num_prompt_tokens


def _scaled(amounts: tuple[int, ...], cells: int) -> list[int]:
    """Cells of a bar for each amount: all of the bar, and something for whatever is not 0."""
    total = sum(amounts)
    if not total:
        return [0] * len(amounts)
    if total >= cells:
        return share(amounts, cells)
    ends = [round(cells * sum(amounts[: index + 1]) / total) for index in range(len(amounts))]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _labelled(labels: Sequence[str], glyph: str, size: int, style: Style, ink: Style) -> list[Cell]:
    """Part of a bar with the first label that fits set into it, or none where it is narrow."""
    words = next((text for text in labels if len(text) + 4 <= size), "")
    if not words:
        return [(glyph * size, style)]
    inset = f" {words} "
    before = (size - len(inset)) // 2
    after = size - len(inset) - before
    return [(glyph * before, style), (inset, ink), (glyph * after, style)]
