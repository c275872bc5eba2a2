"""What is on the screen at one moment: the one thing that panels draw from."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbviz.event_log import EventLog
from cbviz.timeline import Timeline
from engine.record import StepRecord
from engine.world import World


@dataclass(frozen=True, eq=False)
class Frame:
    """All that is on the screen at one moment. Panels draw from it and from nothing else.

    `world` is the state after the step looked at (live: with the events pending since applied);
    `record` is that step's own record, None before the first step. `recent` holds the records up
    to and including it, oldest first, as many as rates and plots need (about 240).
    """

    world: World
    record: StepRecord | None
    recent: list[StepRecord] = field(default_factory=list)
    timeline: Timeline | None = None
    log: EventLog | None = None
