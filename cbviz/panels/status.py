"""The line at the top, and the list of what loading is doing before there is anything else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from cbviz.palette import Palette
from cbviz.sanitize import fit, one_line, sanitize, width_of
from cbviz.session import Phase, Session
from engine.protocol import Stage
from engine.record import RunHeader

STAGES = ("import", "download", "weights", "memory plan")
BAR = 24


@dataclass(frozen=True)
class Part:
    """Some words of the status line. The least important ones go first when it is narrow."""

    text: str
    style: Style
    rank: int


@dataclass(frozen=True)
class StatusView:
    """What the status line needs to know besides the session."""

    title: str
    """What is being opened."""
    can_drive: bool
    playing: bool
    """A replay is moving on by itself."""
    speed: float
    """Steps per second; 0 = unlimited."""


class StatusLine(Widget):
    """One line: model, how it runs, where in time one is, budget, and counts."""

    def __init__(self, palette: Palette, session: Session, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.palette = palette
        self.session = session
        self.status = StatusView("", True, False, 0.0)
        self.counts = (0, 0, 0)
        self.budget = 0

    def show(
        self, session: Session, status: StatusView, counts: tuple[int, int, int], budget: int
    ) -> None:
        """Draw this from now on. `counts`: running, waiting, finished."""
        self.session, self.status, self.counts, self.budget = session, status, counts, budget
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """The line, as wide as the widget."""
        width = self.size.width
        if y or width < 1:
            return Strip.blank(width, self.rich_style)
        left, right = _fitting(self._left(), self._right(), width - 2)
        line, tail = _join(left, self.palette), _join(right, self.palette)
        gap = width - 2 - _length(line) - _length(tail)
        line = [Segment(" "), *line, Segment(" " * max(0, gap)), *tail, Segment(" ")]
        strip = Strip(line).adjust_cell_length(width, self.rich_style)
        return strip.apply_style(self.rich_style)

    def _left(self) -> list[Part]:
        """What is looked at; or, more pressing, what went wrong or what one waits for."""
        palette, session = self.palette, self.session
        if session.phase is Phase.ENDED:
            hint = "press r to start it again" if self.status.can_drive else "q quits"
            cross = palette.glyphs.cross
            fault = one_line(f"{cross} {session.fault}", limit=400, ascii=palette.ascii)
            return [Part(fault, palette.error, 0), Part(hint, palette.warn, 0)]
        if session.phase is Phase.LOADING:
            words = one_line(self.status.title, limit=80, ascii=palette.ascii)
            stage = session.stages[-1] if session.stages else None
            detail = f"{stage.name} {progress_words(stage)}".strip() if stage else "starting"
            return [
                Part(f"loading {words}", palette.title, 1),
                Part(one_line(detail, limit=80, ascii=palette.ascii), palette.muted, 2),
            ]
        if self._stands_at_breakpoint() and session.broke is not None:
            words = f"paused: {session.broke.hits[0].words} (step {session.broke.step})"
            more = len(session.broke.hits) - 1
            also = [Part(f"and {more} more", palette.warn, 1)] if more else []
            return [Part(one_line(words, limit=400, ascii=palette.ascii), palette.warn, 0), *also]
        header = session.header
        return self._model(header) if header else []

    def _stands_at_breakpoint(self) -> bool:
        """The run stands still, and what for is looked at."""
        session, broke = self.session, self.session.broke
        return (
            broke is not None
            and session.step == broke.step
            and not session.running
            and not self.status.playing
        )

    def _model(self, header: RunHeader) -> list[Part]:
        palette = self.palette
        name = one_line(header.model.name, limit=60, ascii=palette.ascii)
        size = f"{header.model.num_parameters / 1e6:.3g}M" if header.model.num_parameters else ""
        return [
            Part(f"{name.rsplit('/', 1)[-1]} {size}".strip(), palette.title, 3),
            Part(one_line(f"{header.device} {header.dtype}", limit=40), palette.muted, 4),
            Part(header.attention, palette.muted, 5),
        ]

    def _right(self) -> list[Part]:
        """Where one is in time, the budget, the counts."""
        if self.session.header is None:
            return []
        palette = self.palette
        running, waiting, finished = self.counts
        return [
            *self._time(),
            Part(f"m = {self.budget}", palette.accent, 2),
            Part(f"run {running}", palette.decode, 6),
            Part(f"wait {waiting}", palette.waiting, 6),
            Part(f"done {finished}", palette.finished, 6),
        ]

    def _idle(self) -> bool:
        """It would run, but there is nothing left to do."""
        running, waiting, _ = self.counts
        return self.session.step >= 0 and running == 0 and waiting == 0

    def _time(self) -> list[Part]:
        session, palette = self.session, self.palette
        play, pause, back = (">", "||", "<") if palette.ascii else ("▶", "⏸", "◀")
        speed = f"{self.status.speed:g}/s" if self.status.speed else "max speed"
        step = f"step {session.step}" if session.step >= 0 else "no step yet"
        if self.status.can_drive and session.live:
            if session.phase is not Phase.READY:
                return [Part(step, palette.text, 0)]
            if session.running and self._idle():
                return [Part(f"{step} idle: i injects a prompt", palette.muted, 0)]
            if session.running:
                return [Part(f"{step} {play} live, {speed}", palette.ok, 0)]
            return [Part(f"{step} {pause} paused", palette.warn, 0)]
        where = f"{step} of {session.newest}"
        if self.status.can_drive:
            engine = f", engine {play}" if session.running else ""
            return [Part(f"{back} history, {where}{engine}", palette.accent, 0)]
        if self.status.playing:
            return [Part(f"replay {play} {where}, {speed}", palette.ok, 0)]
        return [Part(f"replay {pause} {where}", palette.accent, 0)]


class LoadingPanel(Widget):
    """What loading has done and is doing; or why it failed. Shown while there is no run at all."""

    can_focus = False

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.palette = palette
        self.border_title = "Loading"
        self._lines: list[list[Segment]] = []

    def show(self, session: Session, title: str, can_drive: bool) -> None:
        """Draw how far loading is."""
        palette = self.palette
        failed = session.phase is Phase.ENDED
        name = one_line(title, limit=60, ascii=palette.ascii)
        lines = [[Segment(f" {'could not load' if failed else 'loading'} {name}", palette.title)]]
        if failed:
            hint = "r tries again, q quits" if can_drive else "q quits"
            lines[0].append(Segment(f" {palette.glyphs.middot} {hint}", palette.warn))
        current = session.stages[-1].name if session.stages else STAGES[0]
        if failed:
            lines += self._fault(session.fault)
        elif can_drive:
            lines += [self._stage(name, current, session) for name in STAGES]
        self._lines = lines
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line."""
        line = self._lines[y] if y < len(self._lines) else []
        strip = Strip(line).adjust_cell_length(self.content_size.width, self.rich_style)
        return strip.apply_style(self.rich_style)

    def _stage(self, name: str, current: str, session: Session) -> list[Segment]:
        palette = self.palette
        stage = next((stage for stage in session.stages if stage.name == name), None)
        glyphs = palette.glyphs
        if STAGES.index(name) > STAGES.index(current):
            glyph, style = glyphs.middot, palette.faint
        elif name != current:
            # A stage that was passed without a word was not needed (a model that is here already).
            glyph, style = (glyphs.check if stage else glyphs.middot), palette.muted
        else:
            glyph, style = glyphs.cursor, palette.text
        line = [Segment(f"  {glyph} {name:13}", style)]
        if stage is None:
            return line
        if name == current and stage.total > 0:
            filled = min(BAR, BAR * stage.done // stage.total)
            line.append(Segment(glyphs.bar * filled, palette.accent))
            line.append(Segment(glyphs.bar_rest * (BAR - filled) + " ", palette.rest))
        words = one_line(progress_words(stage), limit=120, ascii=palette.ascii)
        return [*line, Segment(words, palette.muted)]

    def _fault(self, fault: str) -> list[list[Segment]]:
        """The message, broken into lines: a path in it may be long."""
        width = max(10, self.content_size.width - 2)
        lines = _wrap(one_line(fault, limit=2000, ascii=self.palette.ascii), width)
        return [[Segment(f" {line}", self.palette.error)] for line in lines]


def progress_words(stage: Stage) -> str:
    """Detail and share of one stage of loading."""
    share = f"{100 * stage.done // stage.total} %" if stage.total > 0 else ""
    return " ".join(filter(None, [share, stage.detail]))


def _fitting(left: list[Part], right: list[Part], width: int) -> tuple[list[Part], list[Part]]:
    """Those of the parts that find room, the most important ones; the first is cut if need be."""
    while (over := _needed(left) + _needed(right) - 3 - width) > 0:
        least = max(part.rank for part in [*left, *right])
        if least == 0 or not left:
            if left:
                first = left[0]
                room = max(8, width_of(first.text) - over)
                left = [replace(first, text=fit(first.text, room, pad=False)), *left[1:]]
            return left, right
        left = [part for part in left if part.rank < least]
        right = [part for part in right if part.rank < least]
    return left, right


def _needed(parts: list[Part]) -> int:
    return sum(width_of(part.text) + 3 for part in parts)


def _join(parts: list[Part], palette: Palette) -> list[Segment]:
    line: list[Segment] = []
    for part in parts:
        if line:
            line.append(Segment(f" {palette.glyphs.middot} ", palette.faint))
        # Whatever a part was made of, what leaves here is safe.
        line.append(Segment(sanitize(part.text, ascii=palette.ascii), part.style))
    return line


def _length(line: list[Segment]) -> int:
    return sum(segment.cell_length for segment in line)


def _wrap(safe: str, width: int) -> list[str]:
    """Break safe text at spaces, and inside words that are longer than a line."""
    lines = [""]
    for word in safe.split(" "):
        if width_of(lines[-1]) + 1 + width_of(word) <= width:
            lines[-1] = f"{lines[-1]} {word}".lstrip()
            continue
        lines.append("")
        for char in word:
            if width_of(lines[-1] + char) > width:
                lines.append("")
            lines[-1] += char
    return [line for line in lines if line]
