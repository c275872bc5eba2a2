"""Who goes first: the orders in which a step's budget is given out. No torch.

`fcfs` is the algorithm of "Continuous batching from first principles" (Hugging Face, 2025): every
decode, then prefills in progress, then waiting requests as they came. `prefill-first` is what
vLLM did before chunked prefill; it fills the batch soonest and stalls decodes. `priority` is
vLLM's: lower numbers first, arrival breaks ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.knobs import SchedulingPolicy
from engine.request import Request


class Policy(Protocol):
    """One order."""

    prefills_first: bool
    """Prefills take from the budget before decodes do."""

    def level(self, priority: int) -> int:
        """Which level of the waiting queue a request of this priority stands in; lower first."""
        ...

    def order(self, running: list[Request]) -> list[Request]:
        """Running requests, given in order of admission, in the order in which they are served."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Whom to preempt when memory has run out; `running` in order of admission, not empty."""
        ...


class Fcfs:
    """First come, first served; the one admitted last is preempted first."""

    prefills_first = False

    def level(self, priority: int) -> int:
        """All requests are equal."""
        return 0

    def order(self, running: list[Request]) -> list[Request]:
        """As admitted."""
        return running

    def victim(self, running: Sequence[Request]) -> Request:
        """The one admitted last."""
        return running[-1]


class PrefillFirst(Fcfs):
    """First come, first served, with prompts before decodes."""

    prefills_first = True


class Priority:
    """Lower numbers first, arrival breaks ties; the last in this order is preempted first."""

    prefills_first = False

    def level(self, priority: int) -> int:
        """A level for each priority."""
        return priority

    def order(self, running: list[Request]) -> list[Request]:
        """By priority, then arrival."""
        return sorted(running, key=_rank)

    def victim(self, running: Sequence[Request]) -> Request:
        """The least urgent one; of several the one that came last."""
        return max(running, key=_rank)


def _rank(request: Request) -> tuple[int, int]:
    return request.params.priority, request.arrival


POLICIES: dict[SchedulingPolicy, Policy] = {
    "fcfs": Fcfs(),
    "prefill-first": PrefillFirst(),
    "priority": Priority(),
}
