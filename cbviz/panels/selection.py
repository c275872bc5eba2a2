"""The one selection that runs through all panels: a token of a request."""

from __future__ import annotations

from textual.message import Message
from textual.widget import Widget


class TokenSelected(Message):
    """A token was picked in a panel, to be lit in the others.

    `position` is the token's place in its request; None picks the request as a whole. With an
    empty `request_id` nothing is selected any more.
    """

    def __init__(self, request_id: str, position: int | None, picked_in: Widget) -> None:
        super().__init__()
        self.picked_in = picked_in
        self.request_id = request_id
        self.position = position


class StepPicked(Message):
    """A step was picked in a panel, to be looked at."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
