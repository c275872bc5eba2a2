"""Why a request is where it is, in a few words: the scheduler's own decision."""

from __future__ import annotations

from engine.record import Action, Decision, Reason
from engine.world import RequestView, World


def why(world: World, view: RequestView) -> str:
    """What the last step decided about a live request, as a sentence."""
    decision = world.decision(view.request_id)
    if decision is None:
        return "new: no step has looked at it yet"
    return sentence(decision, world)


def sentence(decision: Decision, world: World) -> str:
    """One decision and its numbers."""
    other = world.view(decision.other)
    name = chr(ord("A") + other.ordinal % 26) if other else decision.other
    match decision.reason:
        case Reason.SCHEDULED if decision.action is Action.PREFILL:
            whole = decision.tokens >= decision.left
            return (
                f"prefill: the last {decision.tokens} tokens"
                if whole
                else f"chunk: {decision.tokens} of the {decision.left} left fit into the budget"
            )
        case Reason.SCHEDULED:
            return "decodes one token"
        case Reason.BUDGET_SPENT:
            return f"budget spent: {decision.have} of {decision.limit} left"
        case Reason.MAX_NUM_SEQS:
            return f"{decision.have} of at most {decision.limit} requests run already"
        case Reason.NO_FREE_BLOCKS:
            return f"no free blocks: needs {decision.need}, {decision.have} are free"
        case Reason.BEHIND:
            return f"behind {name}"
        case Reason.HELD_BY_PREEMPTION:
            return f"memory ran out in this step ({name} was preempted)"
        case Reason.PREEMPTED:
            return f"preempted for {name}: {decision.left} tokens to compute again"
