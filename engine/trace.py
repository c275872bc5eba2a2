"""Trace files: the records of a run on disk, readable up to any damage.

Layout: the line `cbviz-trace 2`, then frames of `[length u32][crc32 u32][msgpack]`, little-endian.
The first frame is a `RunHeader` (with `SCHEMA` beside it, for readers outside Python), each next
one a `StepRecord`, the last one an end mark. A frame is handed to the operating system as soon as
its step has ended, so that a killed process loses at most the frame it was writing.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.errors import InvalidInput
from engine.record import SCHEMA, RunHeader, StepRecord

MAGIC = b"cbviz-trace 2\n"
MAX_FRAME = 256 * 1024 * 1024
_HEAD = struct.Struct("<II")


class TraceHeader(msgspec.Struct, frozen=True, tag_field="type", tag="header"):
    """First frame."""

    header: RunHeader
    schema: dict[str, list[str]]


class TraceStep(msgspec.Struct, frozen=True, tag_field="type", tag="step"):
    """One step."""

    record: StepRecord


class TraceEnd(msgspec.Struct, frozen=True, tag_field="type", tag="end"):
    """The run ended in order after so many steps."""

    steps: int


_Frame = TraceHeader | TraceStep | TraceEnd
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Frame] = msgspec.msgpack.Decoder(_Frame)


class TraceWriter:
    """Writes one trace. `write` raises OSError when the disk is full; the file stays readable.

    Raises:
        InvalidInput: the file cannot be created, or not even its header be written.
    """

    def __init__(self, path: Path, header: RunHeader) -> None:
        self.path = path
        self.steps = 0
        try:
            self._file = path.open("wb", buffering=0)
            self._put(MAGIC)
            self._frame(TraceHeader(header=header, schema=SCHEMA))
        except OSError as error:
            raise InvalidInput(f"cannot write the trace {path}: {error.strerror}") from error

    def write(self, record: StepRecord) -> None:
        """Append one step."""
        self._frame(TraceStep(record=record))
        self.steps += 1

    def close(self) -> None:
        """Write the end mark and close. A trace without it was interrupted."""
        if not self._file.closed:
            try:
                self._frame(TraceEnd(steps=self.steps))
            finally:
                self._file.close()

    def abandon(self) -> None:
        """Close without the end mark, after a failed write."""
        self._file.close()

    def _frame(self, value: _Frame) -> None:
        body = _encoder.encode(value)
        self._put(_HEAD.pack(len(body), zlib.crc32(body)) + body)

    def _put(self, data: bytes) -> None:
        """All of it, or OSError: a raw file may take less than it is given."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


class Recording:
    """The trace of a run that must not end with its disk: a failed write ends the recording alone.

    Args:
        path: where to record; None = nowhere.
        header: what the trace begins with.
        say: told in one line when the recording ends early.

    Raises:
        InvalidInput: the file cannot be created.
    """

    def __init__(self, path: Path | None, header: RunHeader, say: Callable[[str], None]) -> None:
        self.lost = False
        """The recording ended early."""
        self._say = say
        self._writer = TraceWriter(path, header) if path else None

    def write(self, record: StepRecord) -> None:
        """Record one step, if anything is recorded (still)."""
        if self._writer is not None:
            try:
                self._writer.write(record)
            except OSError as error:
                self._lose(self._writer, error)

    def finish(self, rest: StepRecord | None) -> None:
        """Record what has happened since the last step, if anything has, and close."""
        if rest is not None:
            self.write(rest)
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._lose(self._writer, error)

    def _lose(self, writer: TraceWriter, error: OSError) -> None:
        self._say(
            f"recording stopped after {writer.steps} steps, the run goes on: cannot write "
            f"{writer.path}: {error.strerror}"
        )
        writer.abandon()
        self._writer = None
        self.lost = True


class TraceReader:
    """Reads one trace, step by step, and stops at the first damage.

    After the iteration `damage` says in one line what was wrong, or is empty for a whole trace.

    Raises:
        InvalidInput: the file cannot be opened, is no trace, or is damaged before its first step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self._steps = 0
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise InvalidInput(f"cannot read the trace {path}: {error.strerror}") from error
        self._size = os.fstat(self._file.fileno()).st_size
        if self._file.read(len(MAGIC)) != MAGIC:
            self._file.close()
            raise InvalidInput(f"{path} is not a cbviz trace (or one of another version)")
        first = self._next()
        if not isinstance(first, TraceHeader):
            self._file.close()
            raise InvalidInput(f"the trace {path} is damaged at its beginning: nothing to show")
        self.header = first.header

    def __iter__(self) -> Iterator[StepRecord]:
        while True:
            frame = self._next()
            if isinstance(frame, TraceStep):
                self._steps += 1
                yield frame.record
                continue
            if frame is not None and not isinstance(frame, TraceEnd):
                self.damage = f"the trace is damaged after {self._count()}"
            self._file.close()
            return

    def close(self) -> None:
        """Read no further."""
        self._file.close()

    def _next(self) -> _Frame | None:
        """The next frame; None at the end or at damage, which is then described."""
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            self.damage = f"the trace breaks off after {self._count()}"
            return None
        size, checksum = _HEAD.unpack(head)
        if size > min(MAX_FRAME, self._size - self._file.tell()):
            self.damage = f"the trace breaks off after {self._count()}"
            return None
        body = self._file.read(size)
        if zlib.crc32(body) != checksum:
            self.damage = f"the trace is damaged after {self._count()}"
            return None
        try:
            return _decoder.decode(body)
        except (msgspec.MsgspecError, ValueError):
            self.damage = f"the trace is damaged after {self._count()}"
            return None

    def _count(self) -> str:
        return "1 step" if self._steps == 1 else f"{self._steps} steps"
