"""The errors that the engine raises for things a user can mend: one line says what and how."""

from __future__ import annotations


class InvalidInput(ValueError):
    """A value, flag or prompt that cannot be accepted."""


class RequestRefused(InvalidInput):
    """A request that can never run: the message holds the arithmetic."""


class ModelUnavailable(RuntimeError):
    """The model cannot be found, read, downloaded or run by this engine."""


class StepFailed(RuntimeError):
    """The forward pass of a step raised; nothing of the step happened."""
