"""Trace files: the records of a run on disk, readable up to any damage.

Layout: the line `cbviz-trace 2`, then frames of `[length u32][crc32 u32][msgpack]`, little-endian.
The first frame is a `RunHeader` (with `SCHEMA` beside it, for readers outside Python) as it is.
All others lie in one zstd stream behind it: a `StepRecord` each, the last one an end mark. The
stream is flushed and handed to the operating system as soon as a step has ended, so that a killed
process loses at most the step it was writing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from engine.errors import InvalidInput
from engine.record import SCHEMA, RunHeader, StepRecord

MAGIC = b"cbviz-trace 2\n"
MAX_FRAME = 256 * 1024 * 1024
MAX_WINDOW = 2**23
"""Bytes that reading may look back; writing looks back 2 MiB."""
PIECE = 4096
"""Bytes read at once, packed: what they can grow to is bounded by that."""
LEVEL = 3
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


def _framed(value: _Frame) -> bytes:
    body = _encoder.encode(value)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


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
            self._put(MAGIC + _framed(TraceHeader(header=header, schema=SCHEMA)))
        except OSError as error:
            raise InvalidInput(f"cannot write the trace {path}: {error.strerror}") from error
        self._stream = zstandard.ZstdCompressor(level=LEVEL).compressobj()

    def write(self, record: StepRecord) -> None:
        """Append one step."""
        self._put(self._stream.compress(_framed(TraceStep(record=record))))
        self._put(self._stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        self.steps += 1

    def close(self) -> None:
        """Write the end mark and close. A trace without it was interrupted."""
        if not self._file.closed:
            try:
                self._put(self._stream.compress(_framed(TraceEnd(steps=self.steps))))
                self._put(self._stream.flush())
            finally:
                self._file.close()

    def abandon(self) -> None:
        """Close without the end mark, after a failed write."""
        self._file.close()

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


class _Unpacked:
    """The bytes of a zstd stream that may break off anywhere: all that were flushed are given."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unpack = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
        self._bytes = memoryview(b"")

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end.

        Raises:
            zstandard.ZstdError: the stream is damaged.
        """
        while not self._bytes:
            packed = b"" if self._unpack.eof else self._file.read(PIECE)
            if not packed:
                return b""
            self._bytes = memoryview(self._unpack.decompress(packed))
        part, self._bytes = self._bytes[:size], self._bytes[size:]
        return bytes(part)


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
        # Until the header is read, frames lie in the file as they are.
        self._stream: BinaryIO | _Unpacked = self._file
        if self._file.read(len(MAGIC)) != MAGIC:
            self._file.close()
            raise InvalidInput(f"{path} is not a cbviz trace (or one of another version)")
        first = self._next()
        if not isinstance(first, TraceHeader):
            self._file.close()
            raise InvalidInput(f"the trace {path} is damaged at its beginning: nothing to show")
        self.header = first.header
        self._stream = _Unpacked(self._file)

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
        try:
            body = self._body()
            if body is not None:
                return _decoder.decode(body)
            self.damage = f"the trace breaks off after {self._count()}"
        except (msgspec.MsgspecError, ValueError, zstandard.ZstdError):
            self.damage = f"the trace is damaged after {self._count()}"
        return None

    def _body(self) -> bytes | None:
        """What the next frame holds; None when the file ends before its end.

        Raises:
            ValueError, zstandard.ZstdError: it is damaged.
        """
        head = self._read(_HEAD.size)
        if head is None:
            return None
        size, checksum = _HEAD.unpack(head)
        if size > MAX_FRAME:
            raise ValueError("a frame of that size is not ours")
        body = self._read(size)
        if body is not None and zlib.crc32(body) != checksum:
            raise ValueError("the checksum differs")
        return body

    def _read(self, size: int) -> bytes | None:
        """Exactly so many bytes, in pieces: a damaged length must not take memory at once."""
        parts: list[bytes] = []
        while size > 0:
            part = self._stream.read(min(size, 2**20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _count(self) -> str:
        return "1 step" if self._steps == 1 else f"{self._steps} steps"
