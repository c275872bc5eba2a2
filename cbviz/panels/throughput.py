"""How fast: tokens per second, where the time of a step goes, how full the budget is.

Every figure is measured: tokens of some steps over the time these same steps took, with nothing
smoothed. The time between steps (a speed limit, a pause) belongs to no step and is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from rich.segment import Segment
from textual.strip import Strip

from cbviz.frame import Frame
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.rows import seconds
from cbviz.sanitize import fit
from engine.record import SegmentKind, StepRecord
from engine.world import World

WINDOW = 16
"""Steps that the current figures are taken over."""
LABEL = 16
"""Cells left of a plot."""


@dataclass(frozen=True)
class Rates:
    """Tokens per second over some steps that ran something: their tokens over their time."""

    steps: int
    prefill: float
    decode: float

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Rates:
        """The rates of these steps; 0 when nothing ran."""
        time_s = sum(record.phases.total for record in records)
        if time_s <= 0:
            return cls(len(records), 0.0, 0.0)
        prefill = sum(record.tokens_of(SegmentKind.PREFILL) for record in records)
        decode = sum(record.tokens_of(SegmentKind.DECODE) for record in records)
        return cls(len(records), prefill / time_s, decode / time_s)


class ThroughputPanel(Panel):
    """Plots of the recent steps, the newest at the right, one column a step."""

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(palette, id=id)
        self.border_title = "Throughput"
        self._lines: list[list[Segment]] = []

    def update_frame(self) -> None:
        """Make all lines: they are few."""
        width, height = self.content_size
        steps = _worked(self.frame)
        now = Rates.of(steps[-WINDOW:])
        self.border_title = _title(now.steps)
        self._lines = self._make(steps, width, height) if height > 0 and width > 0 else []

    def on_resize(self) -> None:
        """The plots depend on the size."""
        self.update_frame()

    def render_line(self, y: int) -> Strip:
        """One line."""
        line = self._lines[y] if y < len(self._lines) else []
        strip = Strip(line).adjust_cell_length(self.content_size.width, self.rich_style)
        return strip.apply_style(self.rich_style)

    def _make(self, steps: list[StepRecord], width: int, height: int) -> list[list[Segment]]:
        palette = self.palette
        if self.frame is None or not steps:
            words = "no step has run yet" if self.frame else ""
            return [[Segment(fit(words, width, ascii=palette.ascii), palette.muted)]]
        notes = [self._phases(steps[-1], width)]
        if height >= 4:
            notes.append(self._latency(self.frame.world, width))
        use = height >= 5
        rows = max(1, (height - len(notes) - use) // 2)
        now = Rates.of(steps[-WINDOW:])
        plots = self._plot(steps, SegmentKind.PREFILL, now.prefill, width, rows)
        plots += self._plot(steps, SegmentKind.DECODE, now.decode, width, rows)
        if use:
            plots.append(self._budget(steps, width))
        return [*plots, *notes][:height]

    def _plot(
        self, steps: list[StepRecord], kind: SegmentKind, now: float, width: int, rows: int
    ) -> list[list[Segment]]:
        """Tokens per second of one kind, step by step; the label beside it, and the axis."""
        room = max(0, width - LABEL)
        values = [Rates.of([record]) for record in steps[-room:]] if room else []
        heights = [
            value.prefill if kind is SegmentKind.PREFILL else value.decode for value in values
        ]
        top = max(heights, default=0.0)
        style = self.palette.prefill if kind is SegmentKind.PREFILL else self.palette.decode
        labels = [f"{kind:7} {_rate(now):>5}/s ", f"   axis {_rate(top):>5}/s " if top else ""]
        lines = []
        for row, bars in enumerate(columns(heights, top, rows, self.palette.glyphs.spark)):
            label = fit(labels[row] if row < len(labels) else "", min(LABEL, width))
            tone = self.palette.text if row == 0 else self.palette.muted
            lines.append([Segment(label, tone), Segment(bars.rjust(room), style)])
        return lines

    def _budget(self, steps: list[StepRecord], width: int) -> list[Segment]:
        """How much of the token budget each step used; the axis is the budget itself."""
        palette, last = self.palette, steps[-1]
        room = max(0, width - LABEL)
        shares = [record.num_tokens / record.token_budget for record in steps[-room:]]
        (bars,) = columns(shares, 1.0, 1, palette.glyphs.spark)
        used = f"{last.num_tokens}/{last.token_budget}"
        label = f"budget {used:>{LABEL - 8}} "
        return [
            Segment(fit(label, min(LABEL, width), ascii=palette.ascii), palette.text),
            Segment(bars.rjust(room) if room else "", palette.muted),
        ]

    def _phases(self, record: StepRecord, width: int) -> list[Segment]:
        """The newest step's time and the parts of it, ms; as many of them as find room."""
        palette, phases = self.palette, record.phases
        rest = phases.schedule + phases.commit
        named = {
            "forward": phases.forward, "build": phases.build, "sample": phases.sample, "rest": rest,
        }  # fmt: skip
        digits = 0 if phases.total >= 0.02 else 1
        parts = [f"{name} {1000 * value:.{digits}f}" for name, value in named.items()]
        label = f"step {1000 * phases.total:.{digits}f} ms: "
        middot = f" {palette.glyphs.middot} "
        room = width - len(label)
        fitting = (middot.join(parts), " ".join(parts), middot.join(parts[:3]), parts[0])
        words = next((words for words in fitting if len(words) <= room), parts[0])
        return [
            Segment(fit(label, width, pad=False), palette.text),
            Segment(fit(words, room, ascii=palette.ascii), palette.muted),
        ]

    def _latency(self, world: World, width: int) -> list[Segment]:
        """Medians over the requests that are known: first token, and from token to token."""
        first = [ttft for view in world.requests.values() if (ttft := view.ttft_s) is not None]
        between = [itl for view in world.requests.values() if (itl := view.itl_s) is not None]
        dash = self.palette.glyphs.dash
        ttft_words = seconds(median(first)) if first else dash
        itl_words = seconds(median(between)) if between else dash
        words = f"{ttft_words} {self.palette.glyphs.middot} ITL {itl_words}"
        left = "median TTFT "
        return [
            Segment(fit(left, width, pad=False), self.palette.text),
            Segment(fit(words, width - len(left), ascii=self.palette.ascii), self.palette.muted),
        ]


def columns(values: Sequence[float], top: float, rows: int, levels: Sequence[str]) -> list[str]:
    """Vertical bars of one cell each, `rows` cells high, from the top line to the bottom one.

    A value above 0 is at least the lowest level, so that little and nothing look different.
    """
    steps = len(levels)
    heights = [
        max(1, round(min(1.0, value / top) * rows * steps)) if value > 0 and 0 < top < inf else 0
        for value in values
    ]
    lines = []
    for row in reversed(range(rows)):
        filled = [max(0, min(steps, height - row * steps)) for height in heights]
        lines.append("".join(levels[level - 1] if level else " " for level in filled))
    return lines


def _worked(frame: Frame | None) -> list[StepRecord]:
    """The recent steps in which something ran."""
    return [record for record in frame.recent if record.segments] if frame else []


def _rate(value: float) -> str:
    if value >= 99_500:
        return f"{value / 1000:.0f}k"
    return f"{value / 1000:.1f}k" if value >= 9_950 else f"{value:.0f}"


def _title(steps: int) -> str:
    """Over how many steps, and on which clock: pauses and the speed limit do not count."""
    if not steps:
        return "Throughput"
    return f"Throughput  last {'step' if steps == 1 else f'{steps} steps'}, engine time"
