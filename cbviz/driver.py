"""What the keys do: commands to the engine, and moves through what has happened. No terminal.

The driver never shows what it hopes for: a command is sent, and the screen changes when the engine
says that something changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cbviz.breaks import Breaks, Entry
from cbviz.session import Phase, Session
from cbviz.sources.base import Source
from engine.breakpoints import Standing, Watch
from engine.errors import InvalidInput
from engine.knobs import MAX_TOKEN_BUDGET
from engine.protocol import (
    Add,
    Broke,
    Cancel,
    Command,
    Message,
    Notice,
    Pause,
    Pending,
    Ready,
    Run,
    SetBreakpoints,
    SetKnob,
    SetSpeed,
    Step,
    Stepped,
)
from engine.request import SamplingParams

SPEEDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 0.0)
"""Steps per second; 0 = as fast as it goes."""
REPLAY_AT_MOST = 240.0
"""Steps per second that an unlimited replay moves on by."""
BUDGET_FACTOR = 1.25

Say = Callable[[str, str], None]
"""Shows one line to the user: text (untrusted), and `information`, `warning` or `error`."""


class Driver:
    """Turns intentions into commands, for a live engine and for a replay.

    Args:
        source: where the records come from, and the commands go.
        session: what is known.
        say: shows a short message.
        speed: steps per second to begin with; 0 = unlimited.
        demo: requests to queue whenever an engine is ready.
        start_paused: do not run by itself.
        params: how tokens are drawn for prompts that are typed in.
        break_on: breakpoints to begin with.
    """

    def __init__(
        self,
        source: Source,
        session: Session,
        say: Say,
        *,
        speed: float = 8.0,
        demo: Sequence[Add] = (),
        start_paused: bool = False,
        params: SamplingParams | None = None,
        break_on: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.session = session
        self.speed = speed
        self.playing = False
        """A replay moves on by itself."""
        self.breaks = Breaks(break_on)
        self._watch = Watch()
        self._watched_to: int | None = None
        self._say = say
        self._demo = tuple(demo)
        self._start_paused = start_paused
        self._params = params or SamplingParams()
        self._budget_asked: int | None = None
        self._clock: float | None = None
        self._due = 0.0

    def on_message(self, message: Message) -> None:
        """Take in what the source says, and answer it where that is called for."""
        self.session.ingest(message)
        match message:
            case Ready():
                self.breaks.begin()
                self._watched_to = None
                if self.source.can_drive:
                    self._greet()
            case Broke(hits=hits):
                self.breaks.count(hits)
                if message.paused and self.session.step != message.step:
                    # The status line tells of the step that is looked at, and of no other.
                    self._say(f"paused: {hits[0].words} (step {message.step})", "information")
            case Notice():
                self._budget_asked = None
            case Pending() | Stepped() if self._budget_asked is not None:
                world = self.session.live_world()
                if world is None or world.knobs.token_budget == self._budget_asked:
                    self._budget_asked = None

    def run_or_pause(self) -> None:
        """Go on, or stand still: the engine, or the replay."""
        if not self.source.can_drive:
            self._play(not self.playing)
        elif self._ready():
            self._send(Pause() if self.session.running else Run())

    def go_on(self) -> None:
        """Go on after a pause, from where the run stands; nothing when it runs already."""
        if not self.source.can_drive:
            self._play(True)
        elif self._ready():
            self.session.go_live()
            if not self.session.running:
                self._send(Run())

    def add_break(self, text: str) -> bool:
        """Stop runs at something from now on; whether it could be read."""
        try:
            self.breaks.add(text)
        except InvalidInput as error:
            self._say(str(error), "warning")
            return False
        self._set_breaks()
        return True

    def toggle_break(self, entry: Entry) -> None:
        """Turn a breakpoint off, or on again."""
        entry.enabled = not entry.enabled
        self._set_breaks()

    def remove_break(self, entry: Entry) -> None:
        """Forget a breakpoint."""
        self.breaks.entries.remove(entry)
        self._set_breaks()

    def forward(self, steps: int = 1) -> None:
        """Through history; at the live end, let the engine run so many steps and stand still."""
        self._play(False)
        session = self.session
        if not session.live and session.step < session.newest:
            self._move(steps)
        elif not self.source.can_drive:
            self._say("this is the last step of the trace", "information")
        elif self._ready():
            session.go_live()
            self._send(Step(steps))

    def back(self, steps: int = 1) -> None:
        """Look at an earlier step."""
        self._play(False)
        if self.session.step <= self.session.oldest and self.session.newest >= 0:
            self._say(self._why_no_earlier(), "information")
        self.session.move(-steps)

    def to_start(self) -> None:
        """Look at the oldest step."""
        self._play(False)
        self.session.go_to(self.session.oldest)

    def to_end(self) -> None:
        """Live again; in a replay, the last step."""
        self._play(False)
        if self.source.can_drive:
            self.session.go_live()
        else:
            self.session.go_to(self.session.newest)

    def go_to(self, text: str) -> None:
        """Look at the step whose number was typed."""
        self._play(False)
        try:
            step = int(text.strip())
        except ValueError:
            self._say("a step is a number", "warning")
            return
        oldest, newest = self.session.oldest, self.session.newest
        if newest < 0:
            self._say("there is no step yet", "warning")
            return
        if not oldest <= step <= newest:
            self._say(f"there are steps {oldest} to {newest}", "warning")
        self.session.go_to(step)

    def look_at(self, step: int) -> None:
        """Look at a step that was picked; the newest one of an engine is followed on."""
        self._play(False)
        if self.source.can_drive and step >= self.session.newest:
            self.session.go_live()
        else:
            self.session.go_to(step)

    def change_speed(self, direction: int) -> None:
        """The next faster (1) or slower (-1) speed."""
        places = [speed or math.inf for speed in SPEEDS]
        now = self.speed or math.inf
        if direction > 0:
            wanted = next((place for place in places if place > now), math.inf)
        else:
            wanted = next((place for place in reversed(places) if place < now), places[0])
        self.speed = 0.0 if math.isinf(wanted) else wanted
        if self.source.can_drive and self.session.phase is Phase.READY:
            self._send(SetSpeed(self.speed))

    def change_budget(self, direction: int) -> None:
        """A larger (1) or smaller (-1) token budget, from the next step on."""
        world = self.session.live_world() if self.may_change("the token budget") else None
        if world is None:
            return
        now = self._budget_asked if self._budget_asked is not None else world.knobs.token_budget
        wanted = next_budget(now, direction)
        if wanted != now:
            self._budget_asked = wanted
            self._send(SetKnob("token_budget", wanted))

    def inject(self, prompt: str) -> bool:
        """Queue a prompt; whether it was sent."""
        if not prompt.strip():
            self._say("the prompt is empty: type some words first", "warning")
            return False
        if not self.may_change("a prompt"):
            return False
        self.session.go_live()
        self._send(Add(prompt, self._params))
        return True

    def cancel(self, request_id: str | None) -> None:
        """Take out a request."""
        if not self.may_change("a request"):
            return
        if request_id is None:
            self._say("select a request first (up, down or a click)", "information")
            return
        world = self.session.live_world()
        view = world.view(request_id) if world else None
        if view is None or not view.live:
            self._say("this request has ended already", "information")
            return
        self._send(Cancel(request_id))

    def tick(self, now_s: float) -> None:
        """A replay that plays: move on by as many steps as the time since the last tick holds."""
        if not self.playing:
            return
        elapsed = 0.0 if self._clock is None else now_s - self._clock
        self._clock = now_s
        self._due += elapsed * (self.speed or REPLAY_AT_MOST)
        whole = int(self._due)
        self._due -= whole
        session = self.session
        if whole and session.step < session.newest:
            session.go_to(self._next_stop(session.step + whole))
        if session.step >= session.newest:
            self._play(False)

    def _greet(self) -> None:
        """An engine is ready: give it its work and start it."""
        self._budget_asked = None
        self._send(SetSpeed(self.speed))
        if self.breaks.watched:
            self._set_breaks()
        for add in self._demo:
            self._send(add)
        if not self._start_paused:
            self._send(Run())

    def _set_breaks(self) -> None:
        """Tell whoever watches for them what to watch for."""
        self._watch.set(self.breaks.watched)
        if self.source.can_drive and self.session.phase is Phase.READY:
            self._send(SetBreakpoints(self.breaks.watched))

    def _next_stop(self, target: int) -> int:
        """Where a replay that plays on to a step comes to: a breakpoint may be in its way."""
        session = self.session
        if not self.breaks.watched or session.history is None:
            return target
        if self._watched_to != session.step:
            world = session.history.world_at(session.step)
            self._watch = Watch(Standing.of(world))
            self._watch.set(self.breaks.watched)
        for step in range(session.step + 1, min(target, session.newest) + 1):
            self._watched_to = step
            record = session.history.record_at(step)
            hits = self._watch.step(record) if record is not None else []
            if hits:
                session.go_to(step)
                self.on_message(Broke(step, hits, paused=True))
                self._play(False)
                return step
        return target

    def _move(self, steps: int) -> None:
        self.session.move(steps)
        # At the newest step of an engine that stands still, history and live are the same.
        at_end = self.session.step >= self.session.newest
        if self.source.can_drive and at_end:
            self.session.go_live()
        elif self.session.live:
            self.session.go_to(self.session.newest)

    def _play(self, playing: bool) -> None:
        if self.source.can_drive or playing == self.playing:
            return
        if playing and self.session.step >= self.session.newest:
            self.session.go_to(self.session.oldest)
        self.playing = playing and self.session.newest >= 0
        if self.playing:
            self.session.broke = None
        self._clock, self._due = None, 0.0

    def _ready(self) -> bool:
        """Whether the engine takes commands; says why if not."""
        if self.session.phase is Phase.LOADING:
            self._say("the engine is still loading", "information")
        elif self.session.phase is Phase.ENDED:
            self._say("the engine has ended: r starts it again", "warning")
        return self.session.phase is Phase.READY

    def may_change(self, what: str) -> bool:
        """Whether the source takes commands now; says why if not."""
        if not self.source.can_drive:
            self._say(f"a replay cannot be changed: {what} needs a live engine", "information")
            return False
        return self._ready()

    def _why_no_earlier(self) -> str:
        if self.session.oldest > 0:
            return f"step {self.session.oldest} is the oldest one kept"
        return "this is the first step"

    def _send(self, command: Command) -> None:
        self.source.send(command)


def next_budget(now: int, direction: int) -> int:
    """The budget multiplied or divided by 1.25, at least one token further."""
    if direction > 0:
        return min(MAX_TOKEN_BUDGET, max(now + 1, math.ceil(now * BUDGET_FACTOR)))
    return max(1, min(now - 1, math.floor(now / BUDGET_FACTOR)))
