"""A trace whose frames are whole but whose values are not: never a crash, never a raw escape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cbviz.app import CbvizApp
from cbviz.palette import Palette
from cbviz.sources.replay import ReplaySource
from engine.record import (
    Added,
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksUncached,
    Forked,
    KnobChanged,
    Phases,
    PrefixHit,
    RunHeader,
    StepRecord,
)
from engine.trace import TraceHeader, TraceWriter
from tests.cbviz.synthetic import story
from tests.cbviz.test_app import running, screen_text, settle

EVIL = "\x1b]0;owned\x07\x9b2J\u202e[/]"
Change = Callable[[StepRecord], StepRecord]


def write(path: Path, header: RunHeader, records: list[StepRecord]) -> Path:
    writer = TraceWriter(path, header)
    for record in records:
        writer.write(record)
    writer.close()
    return path


async def opened(path: Path, steps: int) -> tuple[str, str]:
    """The screen after all steps were read, and what was said."""
    app = CbvizApp(ReplaySource(path), palette=Palette.make())
    said: list[str] = []
    app.say = lambda message, level="": said.append(message)  # type: ignore[method-assign]
    async with running(app) as pilot:
        while app.session.newest < steps - 1 and not said:
            await pilot.pause()
        for key in ("end", "2", "z", "v", "v", "l", "j", "z", "3", "v", "1", "5", "down", "home"):
            await pilot.press(key)
        await pilot.press("end")
        await settle(app, pilot)
        text = screen_text(app)
    return text, " ".join(said)


def with_segment(**changes: Any) -> Change:
    def change(record: StepRecord) -> StepRecord:
        first, *rest = record.segments
        return msgspec.structs.replace(
            record, segments=[msgspec.structs.replace(first, **changes), *rest]
        )

    return change


def with_event(kind: type, **changes: Any) -> Change:
    def change(record: StepRecord) -> StepRecord:
        events = [
            msgspec.structs.replace(event, **changes) if isinstance(event, kind) else event
            for event in record.events
        ]
        return msgspec.structs.replace(record, events=events)

    return change


def with_more(event: Any) -> Change:
    return lambda record: msgspec.structs.replace(record, events=[*record.events, event])


def with_field(**changes: Any) -> Change:
    return lambda record: msgspec.structs.replace(record, **changes)


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (3, with_segment(length=-3)),
        (3, with_segment(length=10**12)),
        (3, with_segment(context=-7)),
        (3, with_segment(context=10**12)),
        (3, with_segment(start=2**62)),
        (3, with_segment(request_id="nobody")),
        (3, with_field(token_budget=0)),
        (3, with_field(token_ids=[])),
        (3, with_field(phases=Phases(-1.0))),
        (3, with_field(started_at=float("1e999"))),
        (0, with_event(Added, pieces=["a"])),
        (0, with_event(BlocksAllocated, block_ids=[-1])),
        (0, with_event(BlocksAllocated, block_ids=[10**9])),
        (0, with_event(BlocksAllocated, request_id="nobody")),
        (1, with_more(PrefixHit("a", [10**9], 16))),
        (1, with_more(PrefixHit("nobody", [0], 16))),
        (1, with_more(Forked("a", "b", [0], 16))),
        (1, with_more(BlocksCached("a", 0, [-1]))),
        (1, with_more(BlockMerged("a", 10**9, 0, 1))),
        (1, with_more(BlocksEvicted("a", [10**9]))),
        (1, with_more(BlocksUncached([-1]))),
        (1, with_more(BlockCopied("a", 0, 10**9))),
        (1, with_more(KnobChanged("no such knob", 1, 2))),
        (1, with_more(KnobChanged("token_budget", 1, "many"))),
    ],
)
async def test_a_step_that_cannot_be_ends_the_history_before_it(tmp_path, step, change):
    engine = story(11)
    records = list(engine.records)
    records[step] = change(records[step])
    path = write(tmp_path / "x.trace", engine.header, records)
    _text, said = await opened(path, len(records))
    assert "the rest is not shown" in said


async def test_tiny_times_are_drawn(tmp_path):
    engine = story(6)
    records = [with_field(phases=Phases(5e-324, 0, 0, 0, 0))(record) for record in engine.records]
    text, said = await opened(write(tmp_path / "x.trace", engine.header, records), 6)
    assert not said
    assert "Throughput" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0}, {"num_blocks": -1}, {"num_blocks": 2**40}, {"block_size": 0},
        {"knobs": {"token_budget": 0, "max_num_seqs": 1}},
        {"knobs": {"token_budget": 1, "max_num_seqs": -5}},
        {"knobs": {"token_budget": 1, "max_num_seqs": 1, "scheduling_policy": "lottery"}},
    ],
)  # fmt: skip
async def test_a_header_that_cannot_be_is_refused(tmp_path, changes):
    engine = story(3)
    body = msgspec.to_builtins(TraceHeader(header=engine.header, schema={}))
    body["header"].update(changes)
    good = write(tmp_path / "good.trace", engine.header, engine.records).read_bytes()
    path = tmp_path / "x.trace"
    path.write_bytes(_with_first_frame(good, msgspec.msgpack.encode(body)))
    app = CbvizApp(ReplaySource(path), palette=Palette.make())
    async with running(app) as pilot:
        while not app.session.fault:
            await pilot.pause()
        await settle(app, pilot)
        assert "damaged at its beginning" in app.session.fault
        assert "is damaged" in screen_text(app)


async def test_no_string_of_a_trace_reaches_the_terminal_raw(tmp_path):
    """Every string field of the header and of the records holds escapes."""
    engine = story(11)
    header = _poisoned(engine.header, keep=("attention", "knobs"))
    records = [_poisoned(record, keep=()) for record in engine.records]
    text, _said = await opened(write(tmp_path / f"evil{EVIL[1:5]}.trace", header, records), 11)
    assert [char for char in text if not char.isprintable() and char != "\n"] == []
    assert "owned" in text


def _poisoned(value: Any, keep: tuple[str, ...]) -> Any:
    """The same struct with escapes behind every free string in it."""
    if isinstance(value, msgspec.Struct):
        changed = {
            name: _poisoned(getattr(value, name), keep)
            for name in value.__struct_fields__
            if name not in keep
        }
        return msgspec.structs.replace(value, **changed)
    if isinstance(value, list):
        return [_poisoned(item, keep) for item in value]
    return value + EVIL if type(value) is str else value


def _with_first_frame(trace: bytes, body: bytes) -> bytes:
    import struct
    import zlib

    from engine.trace import MAGIC

    (size,) = struct.unpack_from("<I", trace, len(MAGIC))
    rest = trace[len(MAGIC) + 8 + size :]
    return MAGIC + struct.pack("<II", len(body), zlib.crc32(body)) + body + rest
