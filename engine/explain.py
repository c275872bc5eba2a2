"""Decisions and events in words: the one place where they become sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from engine.knobs import Knob
from engine.record import (
    Action,
    Added,
    Admitted,
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksUncached,
    CacheReset,
    Cancelled,
    Decision,
    Event,
    Failed,
    Finished,
    Forked,
    KnobChanged,
    Preempted,
    PrefixHit,
    Reason,
    Refused,
    SegmentKind,
    StepRecord,
    decode_decision,
)
from engine.request import FinishReason
from engine.world import World

LISTED_BLOCKS = 4
"""Numbers of blocks that a sentence lists; of more it gives the first ones."""
LISTED_PROMPT = 120
"""Characters of a prompt that a sentence repeats."""


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
            kept = f", {_count(need, 'place')} kept for samples" if need else ""
            return f"max sequences: {have} of {limit} running{kept}"
        case Reason.NO_FREE_BLOCKS:
            besides = f" besides {limit} cached" if limit else ""
            return f"no free blocks: needs {need}{besides}, {have} available"
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


def event_words(event: Event) -> str:
    """What happened, in plain words that begin with a verb or a noun.

    The request that it happened to is left out: it stands beside the sentence. The text holds
    other ids, prompts and messages as they are: whoever prints it makes them safe for a terminal.
    """
    match event:
        case Added():
            sample = f", another sample of {event.fork_of}" if event.fork_of else ""
            prompt = f": {_start(event.prompt)}" if event.prompt else ""
            return f"added, {_tokens(len(event.token_ids))}{sample}{prompt}"
        case Refused():
            return f"refused: {event.message}"
        case Admitted():
            passed = f", past {_count(len(event.passed), 'request')}" if event.passed else ""
            looked = f", {_tokens(event.queried)} looked up in the prefix cache"
            return f"admitted{looked if event.queried else ''}{passed}"
        case PrefixHit():
            what = "resumed with its own blocks" if event.resumed else "prefix cache hit"
            return f"{what}: {_tokens(event.tokens)} in {_blocks(event.block_ids)}"
        case Forked():
            return (
                f"shares the prompt of {event.parent}: {_tokens(event.tokens)} in "
                f"{_blocks(event.block_ids)}"
            )
        case BlocksAllocated():
            return f"got {_blocks(event.block_ids)}"
        case BlocksFreed():
            return f"gave up {_blocks(event.block_ids)}"
        case BlocksCached():
            which = f"from the {_ordinal(event.first + 1)} of its table on"
            return f"put {_blocks(event.block_ids)} in the prefix cache, {which}"
        case BlockMerged():
            return (
                f"its {_ordinal(event.index + 1)} block was a duplicate: block {event.kept} "
                f"instead of {event.freed}"
            )
        case BlocksEvicted():
            return f"evicted {_blocks(event.block_ids)} from the prefix cache"
        case BlocksUncached():
            return f"{_blocks(event.block_ids)} taken out of the prefix cache: not to be trusted"
        case CacheReset():
            return f"prefix cache reset: {_count(event.blocks, 'block')} forgotten"
        case BlockCopied():
            return f"copied block {event.source} to block {event.target}"
        case Preempted():
            return f"preempted by {event.by}: {_tokens(event.recompute)} to recompute"
        case Finished():
            return f"finished: {_FINISHES[event.reason]}"
        case Cancelled():
            return "cancelled"
        case Failed():
            return f"failed: {event.message}"
        case KnobChanged():
            return f"{event.name.replace('_', ' ')}: {_knob(event.old)} to {_knob(event.new)}"
        case _:
            assert_never(event)


_FINISHES = {
    FinishReason.STOP: "an end token or a stop string",
    FinishReason.LENGTH: "its limit of tokens",
    FinishReason.ABORT: "by command",
    FinishReason.ERROR: "it could not be computed",
}


def _scheduled(decision: Decision) -> str:
    """A request that runs: how much, and why not more."""
    if decision.action is Action.DECODE:
        return "decode: 1 token"
    tokens, to_go = decision.tokens, decision.left - decision.tokens
    whose = f"shared with {decision.other}" if decision.other else "cached"
    behind = f" after {decision.have} {whose}" if decision.have else ""
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
            why = "longer than a step" if decision.chunk == 1 else "under way"
            return f"{what} (chunked prefill is off, but it is {why})"
        case _:
            return what


def _tokens(count: int) -> str:
    return _count(count, "token")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _blocks(block_ids: list[int]) -> str:
    """`block 3`, `2 blocks (3, 4)`, `9 blocks (3, 4, 5, 6, …)`."""
    if len(block_ids) == 1:
        return f"block {block_ids[0]}"
    listed = [str(block_id) for block_id in block_ids[:LISTED_BLOCKS]]
    more = ["…"] if len(block_ids) > LISTED_BLOCKS else []
    numbers = f" ({', '.join(listed + more)})" if listed else ""
    return f"{len(block_ids)} blocks{numbers}"


def _start(prompt: str) -> str:
    return prompt if len(prompt) <= LISTED_PROMPT else f"{prompt[:LISTED_PROMPT]}…"


def _ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _knob(value: Knob) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
