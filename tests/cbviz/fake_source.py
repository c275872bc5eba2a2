"""A source in memory that answers commands like the engine's process does."""

from __future__ import annotations

import msgspec

from cbviz.sources.base import OnMessage
from engine.breakpoints import Watch
from engine.protocol import (
    Add,
    Broke,
    Cancel,
    Command,
    Fatal,
    Message,
    Notice,
    Pause,
    Pending,
    Ready,
    Run,
    RunState,
    SetBreakpoints,
    SetKnob,
    SetSpeed,
    Step,
    Stepped,
)
from engine.record import Cancelled, KnobChanged, RunHeader, StepRecord
from tests.cbviz.synthetic import FakeEngine, header, words


class FakeSource:
    """Holds a `FakeEngine`. A run goes on only when the test calls `advance`: no clock."""

    can_drive = True
    title = "synthetic"

    def __init__(self, *, ready: bool = True, **knobs: int) -> None:
        self.sent: list[Command] = []
        self.starts = 0
        self.closes = 0
        self.running = False
        self.engine: FakeEngine
        self._knobs = knobs
        self._ready = ready
        self._watch = Watch()
        self._deliver: OnMessage | None = None

    # What the explorer calls.

    def start(self, on_message: OnMessage) -> None:
        self.starts += 1
        self._deliver = on_message
        if self._ready:
            self.get_ready()

    def send(self, command: Command) -> None:
        self.sent.append(command)
        match command:
            case Add(prompt=prompt, request_id=request_id):
                self.add(prompt, request_id)
            case Cancel(request_id=request_id):
                self.cancel(request_id)
            case Step(count=count):
                self._set_running(False)
                self.advance(count)
            case Run():
                self._set_running(True)
            case Pause():
                self._set_running(False)
            case SetSpeed():
                self._set_running(self.running)
            case SetKnob(name="token_budget", value=int(value)):
                self.set_budget(value)
            case SetBreakpoints(texts=texts):
                self._watch.set(texts)

    def close(self) -> None:
        self.closes += 1
        self._deliver = None

    # What the test does.

    def say(self, message: Message) -> None:
        """Deliver anything."""
        if self._deliver is not None:
            self._deliver(message)

    def get_ready(self) -> None:
        """The model is loaded."""
        self.engine = FakeEngine(header(**self._knobs))
        self.say(Ready(self.engine.header, 0.1))

    def add(self, prompt: str, request_id: str | None = None, max_tokens: int = 12) -> str:
        """Queue a prompt; its first word is the text, then words of a story."""
        name = request_id or f"r{self.engine.world.num_added + self._num_pending_added()}"
        self.engine.add(name, [prompt, *words(max(2, len(prompt.split())))], max_tokens)
        self._tell_pending()
        return name

    def cancel(self, request_id: str) -> None:
        """Take a request out, between steps."""
        for queue in (self.engine.waiting, self.engine.running):
            for job in [job for job in queue if job.request_id == request_id]:
                queue.remove(job)
                if job.table:
                    self.engine._release(job)
                self.engine._events.append(Cancelled(request_id, "", 0.0))
        self._tell_pending()

    def set_budget(self, value: int) -> None:
        """A token budget for the next step."""
        old = self.engine.header.knobs.token_budget
        self.engine.header = msgspec.structs.replace(
            self.engine.header, knobs=self.engine.header.knobs.changed("token_budget", value)
        )
        self.engine._events.append(KnobChanged("token_budget", old, value))
        self._tell_pending()

    def advance(self, steps: int = 1) -> None:
        """Run steps; fewer of them, when it is running and one meets a breakpoint."""
        for _ in range(steps):
            record, paused = self.engine.step(), self.running
            self.say(Stepped(record))
            if hits := self._watch.step(record):
                self.say(Broke(record.step, hits, paused))
                if paused:
                    self._set_running(False)
                    return

    def die(self, message: str = "the engine's process was ended by SIGKILL") -> None:
        """End without having been asked."""
        self.say(Fatal(message))

    def complain(self, message: str) -> None:
        """Say something to the user."""
        self.say(Notice(message, "error"))

    @property
    def records(self) -> list[StepRecord]:
        """All steps so far."""
        return self.engine.records

    def sent_of(self, kind: type[Command]) -> list[Command]:
        """Commands of one kind, in order."""
        return [command for command in self.sent if isinstance(command, kind)]

    def _num_pending_added(self) -> int:
        return len(self.engine.waiting)

    def _tell_pending(self) -> None:
        self.say(Pending(list(self.engine._events)))

    def _set_running(self, running: bool) -> None:
        self.running = running
        self.say(RunState(running=running, steps_per_s=0.0))


class ReplayFake(FakeSource):
    """The same as a replay: it delivers its steps and takes no commands."""

    can_drive = False

    def __init__(self, records: list[StepRecord], run: RunHeader) -> None:
        super().__init__(ready=False)
        self._records, self._run = records, run

    def start(self, on_message: OnMessage) -> None:
        self._deliver = on_message
        on_message(Ready(self._run, 0.0))
        for record in self._records:
            on_message(Stepped(record))

    def send(self, command: Command) -> None:
        raise AssertionError(f"a replay was told to {command}")
