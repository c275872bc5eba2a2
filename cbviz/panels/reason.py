"""Why a request is where it is, in a few words: the scheduler's own decision."""

from __future__ import annotations

import msgspec

from cbviz.palette import Palette
from engine.explain import sentence
from engine.world import RequestView, World


def why(world: World, view: RequestView, palette: Palette) -> str:
    """What the last step decided about a live request. Untrusted: it may hold request ids."""
    decision = world.decision(view.request_id)
    if decision is None:
        return "new: the next step looks at it"
    other = world.view(decision.other)
    if other is not None:
        # On the screen requests are known by their letters.
        decision = msgspec.structs.replace(decision, other=palette.letter(other.ordinal))
    return sentence(decision)
