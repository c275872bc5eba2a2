"""A plan: what one step would do. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.record import BlockCopied, Decision, Event, Segment


@dataclass(frozen=True)
class Plan:
    """What one step would do. Nothing has happened yet.

    `tables[i]` is the block table that `segments[i]` runs with. `events` are the changes, in
    order, that come before the forward pass.
    """

    segments: list[Segment] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    rest: Decision | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """`n_Q` of the packed batch."""
        return len(self.token_ids)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Blocks to be copied before anything is written, `(source, target)`."""
        return [(e.source, e.target) for e in self.events if isinstance(e, BlockCopied)]
