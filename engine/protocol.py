"""What an explorer and the engine's process say to each other, and how it is framed.

Both directions carry frames: a 4-byte little-endian length, then a msgpack map with a `type`.
Commands go to the worker's standard input, messages come from its standard output. The worker
answers every command by what it does next: records, a `Pending`, a `RunState` or a `Notice`.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Literal

import msgspec

from engine.breakpoints import Hit
from engine.config import EngineConfig
from engine.knobs import Knob
from engine.record import Event, RunHeader, StepRecord
from engine.request import SamplingParams

MAX_FRAME = 256 * 1024 * 1024
LENGTH = struct.Struct("<I")


class Load(msgspec.Struct, frozen=True, tag_field="type", tag="load"):
    """First command, once: build the engine. `trace`: also record every step in this file."""

    config: EngineConfig
    trace: str | None = None


class Add(msgspec.Struct, frozen=True, tag_field="type", tag="add"):
    """Queue a prompt, now or (a workload laid out beforehand) not before a step.

    When the engine runs out of work earlier, the next such request is queued at once.
    """

    prompt: str
    params: SamplingParams
    request_id: str | None = None
    at_step: int = 0


class Cancel(msgspec.Struct, frozen=True, tag_field="type", tag="cancel"):
    """Take a request out, whatever its state."""

    request_id: str


class Step(msgspec.Struct, frozen=True, tag_field="type", tag="step"):
    """Run steps, then stand still."""

    count: int = 1


class Run(msgspec.Struct, frozen=True, tag_field="type", tag="run"):
    """Go on stepping."""


class Pause(msgspec.Struct, frozen=True, tag_field="type", tag="pause"):
    """Stop stepping after the step that is running."""


class SetSpeed(msgspec.Struct, frozen=True, tag_field="type", tag="set_speed"):
    """Run at most so many steps a second; 0 = as fast as it goes."""

    steps_per_s: float


class SetKnob(msgspec.Struct, frozen=True, tag_field="type", tag="set_knob"):
    """Change a setting (`engine.knobs.Knobs`) from the next step on."""

    name: str
    value: Knob


class ResetPrefixCache(msgspec.Struct, frozen=True, tag_field="type", tag="reset_prefix_cache"):
    """Forget every cached block; with `force` also those that running requests hold."""

    force: bool = False


class SetBreakpoints(msgspec.Struct, frozen=True, tag_field="type", tag="set_breakpoints"):
    """Watch for these (`engine.breakpoints`) from the next step on, and for no others.

    A run pauses after a step that meets one; single steps go on. A `Broke` tells of both.
    """

    texts: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag_field="type", tag="shutdown"):
    """Leave in order."""


Command = (
    Load
    | Add
    | Cancel
    | Step
    | Run
    | Pause
    | SetSpeed
    | SetKnob
    | ResetPrefixCache
    | SetBreakpoints
    | Shutdown
)


class Stage(msgspec.Struct, frozen=True, tag_field="type", tag="stage"):
    """A part of loading has begun or moved on. `done` of `total`, when known (else 0 of 0)."""

    name: Literal["import", "download", "weights", "memory plan"]
    detail: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag_field="type", tag="ready"):
    """The model is loaded; records follow. `load_s`: seconds since the process started."""

    header: RunHeader
    load_s: float


class Stepped(msgspec.Struct, frozen=True, tag_field="type", tag="stepped"):
    """One step was run."""

    record: StepRecord


class Pending(msgspec.Struct, frozen=True, tag_field="type", tag="pending"):
    """Events since the last step, from the `first`-th on: the next record will hold them all.

    What was reported of them before stays, up to `first`; a `Stepped` makes an end of all.
    """

    events: list[Event]
    first: int = 0


class Broke(msgspec.Struct, frozen=True, tag_field="type", tag="broke"):
    """The step that was told of last met breakpoints. `paused`: the run stands still for it."""

    step: int
    hits: list[Hit]
    paused: bool


class RunState(msgspec.Struct, frozen=True, tag_field="type", tag="run_state"):
    """Running or paused, and at which speed (steps/s; 0 = unlimited)."""

    running: bool
    steps_per_s: float


class Notice(msgspec.Struct, frozen=True, tag_field="type", tag="notice"):
    """Something a person should read: one line."""

    message: str
    level: Literal["info", "warning", "error"] = "info"


class Fatal(msgspec.Struct, frozen=True, tag_field="type", tag="fatal"):
    """The process cannot go on and ends: one line that says why and what to do."""

    message: str


Message = Stage | Ready | Stepped | Pending | Broke | RunState | Notice | Fatal

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(value: Command | Message) -> bytes:
    """One whole frame."""
    body = _encoder.encode(value)
    return LENGTH.pack(len(body)) + body


def read_command(stream: BinaryIO) -> Command | None:
    """The next command; None when the other side is gone."""
    body = _read_frame(stream)
    return None if body is None else _commands.decode(body)


def read_message(stream: BinaryIO) -> Message | None:
    """The next message; None when the engine's process is gone."""
    body = _read_frame(stream)
    return None if body is None else _messages.decode(body)


def _read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes is not ours")
    body = stream.read(size)
    return body if len(body) == size else None
