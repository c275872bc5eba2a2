"""Where records come from. The explorer never knows which kind it has, only what it can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.protocol import Command, Message

OnMessage = Callable[[Message], None]


class Source(Protocol):
    """A running engine, a trace, or whatever else tells of steps."""

    @property
    def can_drive(self) -> bool:
        """Whether commands change anything; a replay is only looked at."""

    @property
    def title(self) -> str:
        """What is being opened, in a few words: a model, a file. Untrusted text."""

    def start(self, on_message: OnMessage) -> None:
        """Begin to deliver messages, from any thread. After `close` it may be started again.

        Never raises: what goes wrong is delivered as a `Fatal`.
        """

    def send(self, command: Command) -> None:
        """Hand over a command; never blocks, never raises. Ignored when nobody listens."""

    def close(self) -> None:
        """End everything that was started, and wait for it. May take a second."""
