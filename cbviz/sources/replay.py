"""A trace file as a source: the same records, read instead of run."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from cbviz.sources.base import OnMessage
from engine.errors import InvalidInput
from engine.protocol import Command, Fatal, Notice, Ready, RunState, Stepped
from engine.trace import TraceReader


class ReplaySource:
    """Delivers the steps of a trace as fast as they can be read.

    A trace that is damaged is delivered up to the damage, and a notice says so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closed = Event()
        self._thread: Thread | None = None

    @property
    def can_drive(self) -> bool:
        """What has happened cannot be changed."""
        return False

    @property
    def title(self) -> str:
        """The file's name."""
        return self._path.name

    def start(self, on_message: OnMessage) -> None:
        """Read the file in a thread of its own."""
        self.close()
        self._closed = Event()
        self._thread = Thread(
            target=self._read, args=(on_message, self._closed), name="trace-reader", daemon=True
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        """Nobody listens."""

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()

    def _read(self, on_message: OnMessage, closed: Event) -> None:
        try:
            reader = TraceReader(self._path)
        except InvalidInput as error:
            on_message(Fatal(str(error)))
            return
        on_message(Ready(reader.header, 0.0))
        on_message(RunState(running=False, steps_per_s=0.0))
        try:
            for record in reader:
                if closed.is_set():
                    return
                on_message(Stepped(record))
        except OSError as error:
            on_message(Notice(f"the trace cannot be read further: {error.strerror}", "warning"))
        if reader.damage:
            on_message(Notice(reader.damage, "warning"))
