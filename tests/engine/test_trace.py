"""Trace files: what is written is read, and damage costs only what lies behind it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from engine.errors import InvalidInput
from engine.record import SCHEMA, StepRecord
from engine.trace import MAGIC, TraceReader, TraceWriter

from .fakes import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(token_budget=4, num_blocks=8)
    engine.add("A", 9, max_tokens=5, ignore_eos=True)
    engine.add("B", 6, max_tokens=5, ignore_eos=True)
    engine.run()
    return engine


@pytest.fixture
def trace(engine: FakeEngine, tmp_path: Path) -> Path:
    path = tmp_path / "run.trace"
    writer = TraceWriter(path, engine.header)
    for record in engine.records:
        writer.write(record)
    writer.close()
    return path


def read(path: Path) -> tuple[list[StepRecord], str]:
    reader = TraceReader(path)
    return list(reader), reader.damage


def test_a_whole_trace_comes_back_as_it_was(engine, trace):
    reader = TraceReader(trace)
    assert reader.header == engine.header
    assert list(reader) == engine.records
    assert reader.damage == ""


def test_a_trace_names_the_fields_of_its_arrays(trace):
    data = trace.read_bytes()
    assert all(field.encode() in data for field in SCHEMA["Decision"])
    assert SCHEMA["Segment"] == ["request_id", "kind", "start", "length", "context", "samples"]


def test_a_trace_cut_off_anywhere_opens_up_to_there(engine, trace):
    data = trace.read_bytes()
    (header_size,) = struct.unpack_from("<I", data, len(MAGIC))
    end_of_header = len(MAGIC) + 8 + header_size
    steps_seen = set()
    for size in range(len(data) - 1, 0, -37):
        trace.write_bytes(data[:size])
        try:
            records, damage = read(trace)
        except InvalidInput:
            assert size < end_of_header, "only a trace without its header is refused"
            continue
        assert records == engine.records[: len(records)]
        assert damage in (
            f"the trace breaks off after {len(records)} steps",
            "the trace breaks off after 1 step",
        )
        steps_seen.add(len(records))
    assert len(steps_seen) > 4


def test_a_flipped_byte_costs_only_what_lies_behind_it(engine, trace):
    data = bytearray(trace.read_bytes())
    (header_size,) = struct.unpack_from("<I", data, len(MAGIC))
    steps = len(MAGIC) + 8 + header_size
    middle = steps + (len(data) - steps) * 2 // 3
    data[middle] ^= 0xFF
    trace.write_bytes(data)
    records, damage = read(trace)
    assert 0 < len(records) < len(engine.records)
    assert records == engine.records[: len(records)]
    assert damage


def test_no_trace_is_told_from_a_damaged_one(tmp_path):
    with pytest.raises(InvalidInput, match="No such file"):
        TraceReader(tmp_path / "none")
    other = tmp_path / "other"
    other.write_text("hello, world, this is a text")
    with pytest.raises(InvalidInput, match="is not a cbviz trace"):
        TraceReader(other)
    other.write_bytes(b"")
    with pytest.raises(InvalidInput, match="is not a cbviz trace"):
        TraceReader(other)
    with pytest.raises(InvalidInput, match="cannot read the trace"):
        TraceReader(tmp_path)


def test_a_full_disk_is_told_when_the_trace_is_created(engine):
    with pytest.raises(InvalidInput, match="cannot write the trace /dev/full: No space left"):
        TraceWriter(Path("/dev/full"), engine.header)


def test_an_interrupted_trace_is_told_from_a_finished_one(engine, tmp_path):
    path = tmp_path / "run.trace"
    writer = TraceWriter(path, engine.header)
    for record in engine.records:
        writer.write(record)
    writer.abandon()
    records, damage = read(path)
    assert records == engine.records
    assert damage == f"the trace breaks off after {len(records)} steps"
