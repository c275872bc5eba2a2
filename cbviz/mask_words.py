"""One pair of the mask in a sentence: who sees whom, or why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbviz.sanitize import sanitize, width_of
from engine.mask import PackedAxes
from engine.record import Segment, SegmentKind
from engine.world import World


def piece_of(world: World, segment: Segment, position: int) -> str:
    """The (untrusted) text of a token; its position when its request is no longer known."""
    if segment.kind is SegmentKind.PAD:
        return "pad"
    view = world.view(segment.request_id)
    if view is None or not 0 <= position < view.num_tokens:
        return f"#{position}"
    return view.piece(position)


def slot_of(world: World, request_id: str, position: int) -> tuple[int, int] | None:
    """Physical slot and block of a token; None when its request has given its blocks up."""
    view = world.view(request_id)
    size = world.header.block_size
    if view is None or position // size >= len(view.block_table):
        return None
    block = view.block_table[position // size]
    return block * size + position % size, block


def explain(
    world: World,
    segments: Sequence[Segment],
    axes: PackedAxes,
    query: int,
    key: int,
    *,
    width: int,
    letter: Callable[[int], str],
    ascii: bool,
) -> str:
    """Why a pair is True or False, in the longest wording that fits `width` cells."""
    row = segments[axes.query_segment[query]]
    column = segments[axes.key_segment[key]]
    at, to = int(axes.query_position[query]), int(axes.key_position[key])

    def word(segment: Segment, position: int) -> str:
        return f"`{sanitize(piece_of(world, segment, position), ascii=ascii)}`"

    def name(segment: Segment) -> str:
        view = world.view(segment.request_id)
        return "pad" if view is None else letter(view.ordinal)

    asks, seen = word(row, at), word(column, to)
    who, whose = name(row), name(column)
    if axes.query_segment[query] != axes.key_segment[key]:
        wordings = [
            f"False: {asks} ({who}, position {at}) and {seen} ({whose}, position {to}) "
            "belong to different requests",
            f"False: {asks} is of {who}, {seen} is of {whose}: another request",
            f"False: {who} and {whose} are different requests",
        ]
    elif to > at:
        wordings = [
            f"False: {seen} (position {to}) lies in the future of {asks} ({who}, position {at})",
            f"False: {seen} {to} is in the future of {asks} {at} ({who})",
            f"False: {who} {to} is in the future of {at}",
        ]
    else:
        slot = slot_of(world, column.request_id, to)
        long = "its blocks were freed since" if slot is None else f"slot {slot[0]}, block {slot[1]}"
        short = "freed" if slot is None else f"block {slot[1]}"
        wordings = [
            f"True: {asks} ({who}, position {at}) sees {seen} (position {to}, {long})",
            f"True: {asks} ({who} {at}) sees {seen} ({to}, {long})",
            f"True: {who} {at} sees {to} ({short})",
        ]
    return next((text for text in wordings if width_of(text) <= width), wordings[-1])
