"""Decisions in words: the one place where a `Decision` becomes a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from engine.record import Action, Decision, Reason, StepRecord
from engine.world import World


def explain_step(record: StepRecord, world: World) -> Iterator[tuple[str, str]]:
    """`(request_id, sentence)` for every request that was live in a step.

    `world` is the state after it. First those that the record names one by one, in its order, then
    the rest of the queue.
    """
    named = set()
    for decision in record.decisions:
        named.add(decision.request_id)
        yield decision.request_id, sentence(decision)
    if record.rest is not None:
        for request_id in world.waiting:
            if request_id not in named:
                yield request_id, sentence(record.rest)


def sentence(decision: Decision) -> str:
    """What happened to a request in a step, and why, as an engineer would say it.

    The text holds request ids as they are: whoever prints it makes them safe for a terminal.
    """
    match decision.reason:
        case Reason.SCHEDULED:
            return _scheduled(decision)
        case Reason.BUDGET_SPENT:
            return (
                f"budget spent: {decision.have} of {decision.limit} left, "
                f"{_tokens(decision.left)} to compute"
            )
        case Reason.MAX_NUM_SEQS:
            return f"max sequences: {decision.have} of {decision.limit} running"
        case Reason.NO_FREE_BLOCKS:
            return f"no free blocks: needs {decision.need}, {decision.have} free"
        case Reason.BEHIND:
            return f"behind {decision.other}"
        case Reason.HELD_BY_PREEMPTION:
            return f"held back: memory ran out for {decision.other} in this step"
        case Reason.PREEMPTED:
            return f"preempted by {decision.other}: {_tokens(decision.left)} to recompute"


def _scheduled(decision: Decision) -> str:
    if decision.action is Action.DECODE:
        return "decode: 1 token"
    if decision.tokens == decision.left:
        return f"prefill: the last {_tokens(decision.tokens)}"
    return f"prefill chunk: {_tokens(decision.tokens)}, {decision.left - decision.tokens} to go"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
