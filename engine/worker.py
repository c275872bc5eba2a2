"""The engine's own process: commands in on standard input, messages out on standard output.

    python -m engine.worker

The other side closes the pipe or sends `Shutdown` to end it. Whatever libraries print goes to
standard error. Torch is imported only after the first message is out.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from engine.breakpoints import Watch
from engine.errors import InvalidInput, ModelUnavailable, RequestRefused, StepFailed
from engine.protocol import (
    Add,
    Broke,
    Cancel,
    Command,
    Fatal,
    Load,
    Message,
    Notice,
    Pause,
    Pending,
    Ready,
    ResetPrefixCache,
    Run,
    RunState,
    SetBreakpoints,
    SetKnob,
    SetSpeed,
    Shutdown,
    Stage,
    Step,
    Stepped,
    encode,
    read_command,
)
from engine.record import StepRecord
from engine.trace import Recording

if TYPE_CHECKING:
    from engine.engine import Engine

LONGEST_WAIT_S = 3600.0
LAST_RESORT_S = 3.0
"""When the other side is gone, a step may take this long to end before the process does."""


def main() -> int:
    """Run until told to stop; 0, or 2 when the model could not be loaded."""
    commands, messages = _private_pipes()
    link = Link(commands, messages)
    first = link.next(block=True)
    if not isinstance(first, Load):
        return 0
    try:
        worker = Worker(link, first)
    except (InvalidInput, ModelUnavailable) as error:
        link.send(Fatal(str(error)))
        return 2
    worker.serve()
    return 0


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Our ends of the pipes, out of reach of anything that reads stdin or prints."""
    commands = os.fdopen(os.dup(0), "rb")
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return commands, messages


class Link:
    """Both directions to the explorer; commands are read ahead by a thread of their own."""

    def __init__(self, commands: BinaryIO, messages: BinaryIO) -> None:
        self._commands = commands
        self._messages = messages
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def send(self, message: Message) -> None:
        """Write one message. When nobody listens any more, the process ends."""
        data = memoryview(encode(message))
        try:
            while data:
                data = data[self._messages.write(data) :]
        except BrokenPipeError:
            os._exit(0)

    def next(self, *, block: bool, timeout: float | None = None) -> Command | None:
        """The next command; None if there is none (in time)."""
        try:
            return self._queue.get(block=block, timeout=timeout)
        except queue.Empty:
            return None

    def _read(self) -> None:
        try:
            while (command := read_command(self._commands)) is not None:
                self._queue.put(command)
        finally:
            # Gone, or speaking what is not ours: either way there is nobody to work for.
            self._queue.put(Shutdown())
            time.sleep(LAST_RESORT_S)
            os._exit(0)


class Worker:
    """Owns the engine: obeys commands between steps, and steps while it is told to run.

    Raises:
        InvalidInput, ModelUnavailable: the engine cannot be built, or the trace not be written.
    """

    def __init__(self, link: Link, load: Load) -> None:
        self.link = link
        self.running = False
        self.steps_per_s = 0.0
        self._steps_owed = 0
        self._next_due = 0.0
        self._later: deque[Add] = deque()
        self._reported_pending = 0
        self._open = True
        self._watch = Watch()
        started = time.perf_counter()
        self.engine = self._load(load)
        path = Path(load.trace) if load.trace else None
        self.recording = Recording(path, self.engine.header, lambda text: self._say(text, "error"))
        link.send(Ready(header=self.engine.header, load_s=time.perf_counter() - started))

    def _load(self, load: Load) -> Engine:
        self.link.send(Stage(name="import", detail="torch and transformers"))
        from engine.engine import Engine

        def report(name: str, detail: str, done: int, total: int) -> None:
            self.link.send(Stage(name=name, detail=detail, done=done, total=total))  # type: ignore[arg-type]

        return Engine(load.config, report=report)

    def serve(self) -> None:
        """Obey and step until shut down."""
        while self._open:
            self._obey()
            if not self._open:
                break
            if self._steps_owed or self.running:
                self._advance()
        pending = self.engine.pending_events
        self.recording.finish(self.engine.flush() if pending else None)

    def _obey(self) -> None:
        """Take commands until a step is due."""
        while self._open:
            command = self._wait_for_command()
            if command is None:
                return
            self._do(command)

    def _wait_for_command(self) -> Command | None:
        """The next command; None when it is time for a step."""
        command = self.link.next(block=False)
        if command is not None:
            return command
        self._report_pending()
        if self._steps_owed:
            return None
        if not (self.running and self._has_work()):
            return self.link.next(block=True)
        wait = self._next_due - time.perf_counter()
        return self.link.next(block=True, timeout=wait) if wait > 0 else None

    def _do(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Cancel(request_id=request_id):
                if not self.engine.cancel(request_id):
                    self._say(f"no live request {request_id}", "warning")
            case Step(count=count):
                if self.running:
                    self._set_running(False)
                self._steps_owed += count
            case Run():
                self._set_running(True)
            case Pause():
                self._set_running(False)
            case SetSpeed(steps_per_s=steps_per_s):
                self.steps_per_s = max(0.0, steps_per_s)
                self._next_due = 0.0
                self._report_state()
            case SetKnob(name=name, value=value):
                self._try(lambda: self.engine.set_knob(name, value))
            case ResetPrefixCache(force=force):
                self._try(lambda: self.engine.reset_prefix_cache(force=force))
            case SetBreakpoints(texts=texts):
                self._try(lambda: self._watch.set(texts))
            case Shutdown():
                self._open = False
            case Load():
                self._say("a model is loaded already", "error")

    def _try(self, change: Callable[[], object]) -> None:
        """Change something, or say why that cannot be."""
        try:
            change()
        except RequestRefused as refusal:
            self._say(f"refused: {refusal}", "error")
        except InvalidInput as error:
            self._say(str(error), "error")

    def _add(self, command: Add) -> None:
        """Queue a request now, or keep it for its step."""
        if command.at_step > self.engine.next_step and self._has_work():
            self._later.append(command)
            self._later = deque(sorted(self._later, key=lambda add: add.at_step))
            return
        self._try(
            lambda: self.engine.add_request(command.prompt, command.params, command.request_id)
        )

    def _advance(self) -> None:
        """One step, with the requests that are due before it."""
        self._steps_owed = max(0, self._steps_owed - 1)
        self._add_due()
        if not self.engine.has_work and not self.engine.pending_events:
            self._steps_owed = 0
            return
        wait = min(LONGEST_WAIT_S, 1 / self.steps_per_s) if self.steps_per_s else 0.0
        self._next_due = time.perf_counter() + wait
        try:
            record = self.engine.step()
        except StepFailed as error:
            self._say(str(error), "error")
            self._steps_owed = 0
            self._set_running(False)
            return
        self._emit(record)

    def _add_due(self) -> None:
        while self._later and (
            self._later[0].at_step <= self.engine.next_step or not self.engine.has_work
        ):
            due = self._later.popleft()
            self._add(Add(due.prompt, due.params, due.request_id))

    def _has_work(self) -> bool:
        return self.engine.has_work or bool(self._later) or bool(self.engine.pending_events)

    def _emit(self, record: StepRecord) -> None:
        self._reported_pending = 0
        self.link.send(Stepped(record))
        self.recording.write(record)
        self._break_at(record)

    def _break_at(self, record: StepRecord) -> None:
        """Tell which breakpoints a step met, and stand still if it was run by itself."""
        hits = self._watch.step(record)
        if not hits:
            return
        paused = self.running
        self.link.send(Broke(record.step, hits, paused))
        if paused:
            self._set_running(False)

    def _report_pending(self) -> None:
        """Tell what happened since the last step, when that has grown."""
        first = self._reported_pending
        events = self.engine.pending_since(first)
        if events:
            self._reported_pending += len(events)
            self.link.send(Pending(events, first))

    def _set_running(self, running: bool) -> None:
        self.running = running
        self._steps_owed = 0
        self._next_due = 0.0
        self._report_state()

    def _report_state(self) -> None:
        self.link.send(RunState(running=self.running, steps_per_s=self.steps_per_s))

    def _say(self, message: str, level: str) -> None:
        self.link.send(Notice(message=message, level=level))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
