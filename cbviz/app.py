"""The window: panels over one session, drawn when something changed and never otherwise."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from cbviz.colourless import Colourless
from cbviz.keys import KEYS
from cbviz.palette import Palette

if TYPE_CHECKING:
    # Imported when the first frame is out (`_furnish`): it need not wait for what it does not show.
    from cbviz.driver import Driver
    from cbviz.inbox import Inbox
    from cbviz.layout import Layout
    from cbviz.panels.base import Panel
    from cbviz.panels.prompt import PromptLine
    from cbviz.panels.requests import RequestsPanel
    from cbviz.panels.selection import StepPicked, TokenSelected
    from cbviz.panels.status import LoadingPanel, StatusLine
    from cbviz.session import Session
    from cbviz.sources.base import Source
    from engine.protocol import Add
    from engine.request import SamplingParams

_ASCII_KEYS = {"←": "<-", "→": "->", "↑": "up", "↓": "down"}
FRAME_S = 1 / 30
"""Time from one drawing to the next at least; what comes between is drawn with the next."""
SIGNAL_GRACE_S = 3.0
INGEST_S = 0.010
"""Time spent on messages before keys get their turn again."""


class CbvizApp(App[int]):
    """The explorer.

    Args:
        source: where the records come from.
        palette: how things look.
        speed: steps per second to begin with; 0 = unlimited.
        demo: requests to queue when the engine is ready.
        start_paused: stand still until told to run.
        params: how tokens are drawn for prompts that are typed in.
        break_on: breakpoints to begin with (`engine.breakpoints`).
    """

    session: Session
    driver: Driver
    inbox: Inbox
    panels: list[Panel]
    requests: RequestsPanel
    prompt: PromptLine
    loading_panel: LoadingPanel
    status: StatusLine
    arrangement: Layout

    CSS_PATH = "app.tcss"
    TITLE = "cbviz"
    AUTO_FOCUS = None
    COMMAND_PALETTE_DISPLAY = "^p"
    BINDINGS: ClassVar[list[BindingType]] = list(KEYS)

    class Spoke(Message):
        """There are messages in the inbox."""

    def __init__(
        self,
        source: Source,
        *,
        palette: Palette,
        speed: float = 8.0,
        demo: Sequence[Add] = (),
        start_paused: bool = False,
        params: SamplingParams | None = None,
        break_on: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.palette = palette
        self.source = source
        self._speed = speed
        self._demo = demo
        self._start_paused = start_paused
        self._params = params
        self._break_on = break_on
        self._drawn_at = 0.0
        self._draw_timer: Timer | None = None
        self._play_timer: Timer | None = None
        self._restarting = False
        self._up = False
        self.theme = "textual-dark" if palette.dark else "textual-light"
        self._colourless = Colourless()

    # The window.

    def compose(self) -> ComposeResult:
        """The first frame: empty boxes where the panels will be."""
        yield Static("", id="status", classes="box")
        yield _box("Batch", "batch")
        with Horizontal(id="middle"):
            yield _box("Mask", "mask")
            with Vertical(id="side"):
                yield _box("KV cache", "kv")
                yield _box("Throughput", "throughput")
        with Horizontal(id="history"):
            yield _box("Timeline", "timeline")
            yield _box("Events", "events")
        yield _box("Loading", "loading")

    def on_mount(self) -> None:
        """The boxes are there: show them, then bring in what goes into them."""
        self.screen.set_class(self.palette.ascii, "-ascii")
        low = self.size.height < 34
        self.screen.set_class(low, "-low")
        self.query_one("#throughput").display = not low
        # As `Layout` will have it, which is not imported yet.
        self.query_one("#history").display = self.size.width >= 160 and self.size.height >= 45
        self.call_after_refresh(self._furnish)

    async def _furnish(self) -> None:
        """Import what the window needs beyond its first frame, and put it in place."""
        from textual.widgets import Footer

        from cbviz.driver import Driver
        from cbviz.inbox import Inbox
        from cbviz.layout import Layout
        from cbviz.panels.base import Panel
        from cbviz.panels.batch import BatchPanel
        from cbviz.panels.events import EventsPanel
        from cbviz.panels.kv import KVPanel
        from cbviz.panels.mask import MaskPanel
        from cbviz.panels.prompt import PromptLine
        from cbviz.panels.requests import RequestsPanel
        from cbviz.panels.status import LoadingPanel, StatusLine
        from cbviz.panels.throughput import ThroughputPanel
        from cbviz.panels.timeline import TimelinePanel
        from cbviz.session import Session

        palette = self.palette
        self.session = Session(follow=self.source.can_drive)
        self.driver = Driver(
            self.source, self.session, self.say, speed=self._speed, demo=self._demo,
            start_paused=self._start_paused, params=self._params, break_on=self._break_on,
        )  # fmt: skip
        self.inbox = Inbox(self._wake)
        self.status = StatusLine(palette, self.session, id="status")
        self.requests = RequestsPanel(palette, id="requests")
        self.prompt = PromptLine(palette, id="prompt")
        self.loading_panel = LoadingPanel(palette, id="loading")
        with self.batch_update():
            await self.query(".box").remove()
            middle, side = self.query_one("#middle"), self.query_one("#side")
            history = self.query_one("#history")
            await self.screen.mount(self.status, BatchPanel(palette, id="batch"), before=middle)
            await middle.mount(MaskPanel(palette, id="mask"), before=side)
            await side.mount(KVPanel(palette, id="kv"), ThroughputPanel(palette, id="throughput"))
            await history.mount(
                TimelinePanel(palette, id="timeline"), EventsPanel(palette, id="events")
            )
            await self.screen.mount(
                self.loading_panel, self.requests, self.prompt, Footer(compact=True)
            )
            self.panels = list(self.query(Panel))
            self.arrangement = Layout(self.screen)
            self.arrangement.apply(self.size)
            self._up = True
            self._draw()
        # The footer was not there when the bindings were made known.
        self.refresh_bindings()
        self.call_after_refresh(self._start)

    @property
    def panels_are_up(self) -> bool:
        """The first frame has given way to the panels."""
        return self._up

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Until the panels are there, the one thing to be done is to leave.

        The keys that open the line come before all others, so that what follows them in the same
        breath is typed into it; in the line, and over the panels, they are letters.
        """
        if action in ("inject", "ask_step") and self._up:
            return not (self.prompt.input.has_focus or len(self.screen_stack) > 1)
        return self._up or action == "quit"

    def _start(self) -> None:
        self.source.start(self.inbox.put)
        # What lives now lives as long as the window; later collections need not look at it.
        gc.collect()
        gc.freeze()

    def on_resize(self, event: Resize) -> None:
        """Lay the panels out anew."""
        if self._up:
            self.arrangement.apply(event.size)
            self.changed()

    def on_load(self) -> None:
        """A closing terminal and a polite kill end the window as `q` does, or by force."""
        if self.is_headless or not hasattr(signal, "SIGHUP"):
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._leave_by_signal, 128 + number)

    def _leave_by_signal(self, code: int) -> None:
        """Leave in order; but writing to a terminal that is gone may block for ever, so that after
        a while the process ends without it. No engine stays behind either way."""

        def end() -> None:
            self.source.close()
            os._exit(code)

        watchdog = threading.Timer(SIGNAL_GRACE_S, end)
        watchdog.daemon = True
        watchdog.start()
        self.exit(return_code=code)

    async def on_unmount(self) -> None:
        """No engine stays behind. With a terminal, `run_async` sees to it after its restoration."""
        if self._up:
            self.inbox.close()
        self._up = False
        if self.is_headless:
            await asyncio.to_thread(self.source.close)

    async def run_async(self, *args: object, **options: object) -> int | None:
        """Run until quit; the terminal is given back first, then the engine is ended."""
        try:
            return await super().run_async(*args, **options)  # type: ignore[arg-type]
        finally:
            await asyncio.to_thread(self.source.close)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's, and without colour one that leaves bold, dim and reverse alone."""
        filters = super().get_line_filters()
        return [*filters, self._colourless] if self.palette.color == "none" else filters

    # From messages to pictures.

    def _wake(self) -> None:
        """Called from the reading thread: `post_message` is safe there."""
        try:
            self.post_message(self.Spoke())
        except RuntimeError:
            self.inbox.close()  # The window is gone.

    def on_cbviz_app_spoke(self) -> None:
        """Take in what has come; after a while let keys have their turn, then go on."""
        if not self.inbox.take(self.driver.on_message, INGEST_S):
            self.post_message(self.Spoke())
        while self.session.notices:
            notice = self.session.notices.popleft()
            level = "information" if notice.level == "info" else notice.level
            self.say(notice.message, level)
        self.changed()

    def changed(self) -> None:
        """Draw soon: at once, or as soon as the last picture is old enough."""
        if self._draw_timer is not None:
            return
        wait = self._drawn_at + FRAME_S - time.perf_counter()
        if wait <= 0:
            self._draw()
        else:
            self._draw_timer = self.set_timer(wait, self._draw)

    def _draw(self) -> None:
        """Draw the newest state."""
        from cbviz.panels.status import StatusView
        from cbviz.screens.base import LiveScreen

        self._draw_timer = None
        if not self._up:
            return
        session = self.session
        frame = session.frame()
        self.arrangement.show_loading(frame is None)
        if frame is None:
            self.loading_panel.show(session, self.source.title, self.source.can_drive)
        for panel in self.panels:
            if self.arrangement.shows(panel):
                panel.show(frame)
        for over in self.screen_stack[1:]:
            if isinstance(over, LiveScreen):
                over.show(frame)
        world = frame.world if frame else None
        counts = (len(world.running), len(world.waiting), world.num_finished) if world else (0,) * 3
        status = StatusView(
            self.source.title, self.source.can_drive, self.driver.playing, self.driver.speed
        )
        budget = world.knobs.token_budget if world else 0
        self.status.show(session, status, counts, budget)
        self._drawn_at = time.perf_counter()

    def say(self, text: str, level: str = "information") -> None:
        """One line over the window for a few seconds. `text` is untrusted."""
        from cbviz.sanitize import one_line

        safe = one_line(text, limit=400, ascii=self.palette.ascii)
        severity = level if level in ("warning", "error") else "information"
        self.notify(safe, severity=severity, markup=False)  # type: ignore[arg-type]

    def _follow_up(self) -> None:
        """After an intention: a replay's clock runs only while it plays."""
        if self.driver.playing and self._play_timer is None:
            self._play_timer = self.set_interval(FRAME_S, self._tick)
        elif not self.driver.playing and self._play_timer is not None:
            self._play_timer.stop()
            self._play_timer = None
        self.changed()

    def _tick(self) -> None:
        step = self.session.step
        self.driver.tick(time.perf_counter())
        if self.session.step != step or not self.driver.playing:
            self._follow_up()

    # What the keys do.

    def action_run_or_pause(self) -> None:
        """Run or pause."""
        self.driver.run_or_pause()
        self._follow_up()

    def action_step_on(self, steps: int) -> None:
        """Through history, or a new step."""
        self.driver.forward(steps)
        self._follow_up()

    def action_step_back(self, steps: int) -> None:
        """Look back."""
        self.driver.back(steps)
        self._follow_up()

    def action_to_start(self) -> None:
        """The oldest step."""
        self.driver.to_start()
        self._follow_up()

    def action_to_end(self) -> None:
        """The newest step."""
        self.driver.to_end()
        self._follow_up()

    def action_speed(self, direction: int) -> None:
        """Faster or slower."""
        self.driver.change_speed(direction)
        self._follow_up()

    def action_budget(self, direction: int) -> None:
        """Another token budget."""
        self.driver.change_budget(direction)

    def action_inject(self) -> None:
        """Type a prompt."""
        if self.driver.may_change("a prompt"):
            self.prompt.ask_prompt()

    def action_ask_step(self) -> None:
        """Type the number of a step."""
        self.prompt.ask_step()

    def action_breakpoints(self) -> None:
        """Where a run stands still."""
        from cbviz.screens.breakpoints import BreakpointsScreen

        self.push_screen(BreakpointsScreen(self.palette, self.driver))

    def action_go_on(self) -> None:
        """Go on after a pause."""
        self.driver.go_on()
        self._follow_up()

    def action_cancel(self) -> None:
        """Cancel the selected request."""
        self.driver.cancel(self.requests.selected)

    def action_select(self, lines: int) -> None:
        """Select a request."""
        self.requests.move_selection(lines)

    def action_panel(self, name: str) -> None:
        """Focus a panel; show it where there was no room for it."""
        panel = self.arrangement.bring(name)
        panel.focus()
        self.changed()

    def action_maximise(self) -> None:
        """The focused panel alone, or all again."""
        self.arrangement.toggle_zoom(self.focused)
        self.changed()

    def action_restart(self) -> None:
        """End the engine and start it again; keys are answered meanwhile."""
        if not self._restarting:
            self._restarting = True
            self.inbox.close()
            self.inbox = type(self.inbox)(self._wake)
            self.session.begin()
            self.changed()
            self.run_worker(self._restart(), group="restart")

    async def _restart(self) -> None:
        try:
            await asyncio.to_thread(self.source.close)
            if self._up:
                self.source.start(self.inbox.put)
        finally:
            self._restarting = False

    def get_key_display(self, binding: Binding) -> str:
        """How a key is written in the footer; with `--ascii` in ASCII."""
        shown = super().get_key_display(binding)
        return _ASCII_KEYS.get(shown, shown) if self.palette.ascii else shown

    def action_help(self) -> None:
        """All keys."""
        from cbviz.screens.help import HelpScreen

        self.push_screen(HelpScreen(self.palette, self._help_groups()))

    def _help_groups(self) -> list[tuple[str, Sequence[Binding]]]:
        groups: list[tuple[str, Sequence[Binding]]] = [("Everywhere", KEYS)]
        for panel in self.panels:
            own = [item for item in type(panel).BINDINGS if isinstance(item, Binding)]
            if own:
                groups.append((f"In the panel {panel.id}", own))
        return groups

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the command palette offers: everything that a key does."""
        for binding in KEYS:
            if binding.id not in ("interrupt", "panel_6"):
                action = binding.action
                yield SystemCommand(
                    binding.tooltip, f"key {self.get_key_display(binding)}",
                    lambda action=action: self._act(action),
                )  # fmt: skip

    def _act(self, action: str) -> None:
        self.call_later(self.run_action, action)

    # What panels and the prompt line say.

    def on_prompt_line_entered(self, event: PromptLine.Entered) -> None:
        """Enter in the line."""
        if event.is_step:
            self.driver.go_to(event.text)
            self.prompt.leave()
        elif self.driver.inject(event.text):
            self.prompt.clear()
            self.prompt.leave()
        self._follow_up()

    def on_token_selected(self, event: TokenSelected) -> None:
        """A token was picked in a panel: all others light what belongs to it."""
        self.requests.select(event.request_id or None)
        for panel in self.panels:
            if panel is not event.picked_in:
                panel.show_selection(event.request_id, event.position)

    def on_step_picked(self, event: StepPicked) -> None:
        """A step was picked in a panel."""
        self.driver.look_at(event.step)
        self._follow_up()

    def on_requests_panel_selected(self, event: RequestsPanel.Selected) -> None:
        """A request was picked from the list."""
        for panel in self.panels:
            panel.show_selection(event.request_id, None)


def _box(title: str, name: str) -> Static:
    """An empty panel, where the real one will be."""
    box = Static("", id=name, classes="box panel")
    box.border_title = title
    return box
