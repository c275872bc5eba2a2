"""The errors that the engine raises for things a user can mend: one line says what and how."""

from __future__ import annotations


def first_line(error: BaseException, limit: int = 300) -> str:
    """A foreign error, which may be pages long, in one line: its first, or the name of its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:limit]


class InvalidInput(ValueError):
    """A value, flag or prompt that cannot be accepted."""


class RequestRefused(InvalidInput):
    """A request that can never run: the message holds the arithmetic."""


class ModelUnavailable(RuntimeError):
    """The model cannot be found, read, downloaded or run by this engine."""


class StepFailed(RuntimeError):
    """The forward pass of a step raised; nothing of the step happened."""


class RequestFailed(RuntimeError):
    """One request cannot be computed and has to be ended, so that the others can go on."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id
