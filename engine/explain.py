"""Decisions in words: the one place where a `Decision` becomes a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from engine.record import Action, Decision, Reason, SegmentKind, StepRecord, decode_decision
from engine.world import World


def explain_step(record: StepRecord, world: World) -> Iterator[tuple[str, str]]:
    """`(request_id, sentence)` for every request that was live in a step.

    `world` is the state after it. First those that decode, then the others that the record names
    one by one, then the rest of the queue.
    """
    named = set()
    decodes = [s.request_id for s in record.segments if s.kind is SegmentKind.DECODE]
    for decision in (*map(decode_decision, decodes), *record.decisions):
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
    left, need, have, limit = decision.left, decision.need, decision.have, decision.limit
    match decision.reason:
        case _ if decision.action in (Action.DECODE, Action.PREFILL):
            return _scheduled(decision)
        case Reason.BUDGET_SPENT:
            return f"budget spent: {have} of {limit} left, {_tokens(left)} to compute"
        case Reason.MAX_NUM_SEQS:
            return f"max sequences: {have} of {limit} running"
        case Reason.NO_FREE_BLOCKS:
            return f"no free blocks: needs {need}, {have} available"
        case Reason.WATERMARK:
            return f"watermark: needs {need} of {have} blocks, and {limit} must stay free"
        case Reason.PARTIAL_PREFILLS:
            return f"partial-prefill cap: {_count(have, 'prompt')} of {limit} begun and unfinished"
        case Reason.CHUNKING_OFF:
            return (
                f"chunked prefill is off: {_tokens(need)} in one step, "
                f"{have} of the budget of {limit} left"
            )
        case Reason.FORK:
            return f"waits for the prompt of {decision.other}: {have} of {limit} computed"
        case Reason.BEHIND:
            return f"behind {decision.other}"
        case Reason.HELD_BY_PREEMPTION:
            return f"held back: memory ran out for {decision.other} in this step"
        case Reason.PREEMPTED:
            kept = f", {have} of them still cached" if have else ""
            return f"preempted by {decision.other}: {_tokens(left)} to recompute{kept}"
        case _:
            return str(decision.reason)


def _scheduled(decision: Decision) -> str:
    """A request that runs: how much, and why not more."""
    if decision.action is Action.DECODE:
        return "decode: 1 token"
    tokens, to_go = decision.tokens, decision.left - decision.tokens
    behind = f" after {decision.have} cached" if decision.have else ""
    if to_go == 0:
        whole = tokens > 1 and not behind
        which = "the last " if decision.chunk > 1 else "all " if whole else ""
        return f"prefill: {which}{_tokens(tokens)}{behind}"
    what = f"prefill chunk {decision.chunk}: {_tokens(tokens)}{behind}, {to_go} to go"
    match decision.reason:
        case Reason.BUDGET_SPENT:
            return f"{what} (the budget of {decision.limit} is spent)"
        case Reason.LONG_PREFILL:
            return f"{what} (long-prefill cap: {decision.limit})"
        case Reason.NO_FREE_BLOCKS:
            return f"{what} (no free blocks for more)"
        case Reason.CHUNKING_OFF:
            return f"{what} (chunked prefill is off, but it is longer than a step)"
        case _:
            return what


def _tokens(count: int) -> str:
    return _count(count, "token")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
