"""From the threads that read to the one that draws: order kept, never more than one wake-up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition

from engine.protocol import Message

FULL = 4096
"""Messages that may wait; a reader that is faster than the window waits in turn."""


class Inbox:
    """A bounded queue that calls `wake` once, from the writing thread, when it stops being empty.

    `wake` is called again only after a `take` that emptied the queue.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._messages: deque[Message] = deque()
        self._changed = Condition()
        self._awake = False
        self._closed = False

    def put(self, message: Message) -> None:
        """Add a message, from any thread; waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._messages) < FULL)
            if self._closed:
                return
            self._messages.append(message)
            if self._awake:
                return
            self._awake = True
        self._wake()

    def take(self, handle: Callable[[Message], None], budget_s: float) -> bool:
        """Hand over messages until the queue is empty or the time is spent; whether it is empty."""
        deadline = time.perf_counter() + budget_s
        while True:
            with self._changed:
                if not self._messages:
                    self._awake = False
                    return True
                message = self._messages.popleft()
                self._changed.notify()
            handle(message)
            if time.perf_counter() > deadline:
                return False

    def close(self) -> None:
        """Forget what is here, refuse what comes, and let waiting writers go."""
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._changed.notify_all()
