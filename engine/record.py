"""What one engine step did, as one immutable value: the contract between engine and explorer.

A `StepRecord` is a *difference*: what was planned and why, what ran, what came out, what changed.
`engine.world.World` folds records into the state after any step. Everything here is plain data
(msgspec structs), free of torch, and serialises to msgpack or JSON. The small structs that fill a
record are encoded as arrays, for size; `SCHEMA` names their fields for readers outside Python.

Units: times are seconds since the engine started, sizes are tokens or blocks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from engine.config import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_TOKEN_BUDGET, check_range
from engine.request import FinishReason, SamplingParams


class SegmentKind(StrEnum):
    """What a run of packed tokens is for."""

    DECODE = "decode"
    PREFILL = "prefill"
    PAD = "pad"


class Action(StrEnum):
    """What the scheduler did with a live request in a step."""

    DECODE = "decode"
    PREFILL = "prefill"
    WAIT = "wait"
    PREEMPT = "preempt"


class Reason(StrEnum):
    """Why the scheduler did it; which numbers of a `Decision` speak is said here."""

    SCHEDULED = "scheduled"
    """It runs: `tokens` now, of `left` that were left to compute."""
    BUDGET_SPENT = "budget spent"
    """No token of the budget is left: `have` 0 of `limit` m."""
    MAX_NUM_SEQS = "max num seqs"
    """`have` requests run already, `limit` may."""
    NO_FREE_BLOCKS = "no free blocks"
    """It needs `need` blocks, `have` are free."""
    BEHIND = "behind"
    """Requests are admitted in order, and `other` before it was not."""
    HELD_BY_PREEMPTION = "held by preemption"
    """Memory ran out in this step (`other` was preempted), so nobody new is admitted."""
    PREEMPTED = "preempted"
    """Its blocks went to `other`; `left` tokens will be computed again."""


class Phases(msgspec.Struct, frozen=True, array_like=True):
    """Measured wall time of the parts of one step, s."""

    schedule: float = 0.0
    build: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """The whole step, s."""
        return self.schedule + self.build + self.forward + self.sample + self.commit


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """The consecutive tokens of one request in the packed batch of a step.

    `start`: position of the first token in its request. `length`: tokens computed now.
    `context`: keys of the request that were cached before. `samples`: its last token yields a
    logit, from which the next token is drawn.
    """

    request_id: str
    kind: SegmentKind
    start: int
    length: int
    context: int
    samples: bool


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """What happened to one live request in a step, why, and the numbers of it (see `Reason`)."""

    request_id: str
    action: Action
    reason: Reason
    tokens: int = 0
    left: int = 0
    need: int = 0
    have: int = 0
    limit: int = 0
    other: str = ""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One token drawn in a step.

    `text`: what it adds to the streamed output, which may be empty until a character is whole,
    so that the texts of a request joined are exactly its output. `piece`: the token by itself, as
    it is shown in a grid. `logprob`: natural log of its probability, before temperature.
    """

    request_id: str
    token_id: int
    text: str
    piece: str
    logprob: float


class Added(msgspec.Struct, frozen=True, array_like=True, tag="added"):
    """A request joined the waiting queue. `prompt` is its text, `pieces` one text a token."""

    request_id: str
    prompt: str
    token_ids: list[int]
    pieces: list[str]
    params: SamplingParams
    at: float


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A request can never run, for the reason in `message`; it was not queued."""

    request_id: str
    prompt: str
    message: str
    at: float


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag="admitted"):
    """A waiting request became a running one."""

    request_id: str
    at: float


class BlocksAllocated(msgspec.Struct, frozen=True, array_like=True, tag="blocks_allocated"):
    """Free blocks were appended, in this order, to the block table of a request."""

    request_id: str
    block_ids: list[int]


class BlocksFreed(msgspec.Struct, frozen=True, array_like=True, tag="blocks_freed"):
    """A request gave up its whole block table; the blocks are listed in the order given up."""

    request_id: str
    block_ids: list[int]


class Preempted(msgspec.Struct, frozen=True, array_like=True, tag="preempted"):
    """A running request lost its blocks to `by` and went to the head of the waiting queue.

    `recompute`: cached tokens it lost, to be computed again.
    """

    request_id: str
    by: str
    recompute: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """A request ended by itself, with the token sampled in the same step."""

    request_id: str
    reason: FinishReason
    at: float


class Cancelled(msgspec.Struct, frozen=True, array_like=True, tag="cancelled"):
    """A request was taken out by command. `text` completes its output (a cut-off character)."""

    request_id: str
    text: str
    at: float


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A step could not be executed; nothing of it happened. `request_id` may be empty."""

    request_id: str
    message: str
    at: float


class KnobChanged(msgspec.Struct, frozen=True, array_like=True, tag="knob_changed"):
    """A setting took effect at this step boundary."""

    name: str
    old: int
    new: int


Event = (
    Added
    | Refused
    | Admitted
    | BlocksAllocated
    | BlocksFreed
    | Preempted
    | Finished
    | Cancelled
    | Failed
    | KnobChanged
)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step did.

    `events` stand in the order in which they happened, those from between the last step and this
    one (added, refused, cancelled, knob changed) first. `decisions` name
    each running request and each waiting one that was looked at; `rest` holds for every other
    waiting request (its `request_id` is empty), so that a record stays small however long the
    queue is. `sampled` stands in the order of `segments`. `num_*` count the state after the step.
    A step in which nothing ran (only events between steps) has no segments.
    """

    step: int
    started_at: float
    phases: Phases
    policy: str
    token_budget: int
    max_num_seqs: int
    segments: list[Segment]
    token_ids: list[int]
    decisions: list[Decision]
    rest: Decision | None
    events: list[Event]
    sampled: list[Sample]
    num_running: int
    num_waiting: int
    num_finished: int
    blocks_free: int
    blocks_held: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step: `n_Q` of its packed batch."""
        return len(self.token_ids)

    @property
    def blocks_used(self) -> int:
        """Blocks held while the step ran: those of requests that ended with it, too."""
        ended = {event.request_id for event in self.events if isinstance(event, Finished)}
        freed = (
            len(event.block_ids)
            for event in self.events
            if isinstance(event, BlocksFreed) and event.request_id in ended
        )
        return self.blocks_held + sum(freed)

    def tokens_of(self, kind: SegmentKind) -> int:
        """Tokens computed in the step in segments of one kind."""
        return sum(segment.length for segment in self.segments if segment.kind is kind)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is worth knowing of the loaded model. Sizes in bytes, lengths in tokens."""

    name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    bytes_per_token: int
    windows: list[int] = []
    """Sliding window of each layer in tokens, the query among them; 0 = the layer sees all.
    Empty: no layer has one."""


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What was true before the first step: the start of every fold.

    Raises:
        InvalidInput: a size that no engine has (a damaged or foreign trace).

    `token_budget` and `max_num_seqs` may change later, by `KnobChanged` events.
    """

    version: str
    started: str
    """Date and time of day, ISO 8601, UTC."""
    model: ModelFacts
    device: str
    device_name: str
    dtype: str
    attention: Literal["dense", "paged", "triton"]
    policy: str
    token_budget: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    seed: int

    def __post_init__(self) -> None:
        check_range("block size", self.block_size, 1, MAX_BLOCK_SIZE)
        check_range("number of blocks", self.num_blocks, 1, MAX_BLOCKS)
        check_range("token budget", self.token_budget, 1, MAX_TOKEN_BUDGET)
        check_range("max num seqs", self.max_num_seqs, 1, MAX_TOKEN_BUDGET)


ARRAY_STRUCTS: tuple[type[msgspec.Struct], ...] = (
    Phases, Segment, Decision, Sample, SamplingParams, Added, Refused, Admitted, BlocksAllocated,
    BlocksFreed, Preempted, Finished, Cancelled, Failed, KnobChanged,
)  # fmt: skip

SCHEMA: dict[str, list[str]] = {
    kind.__name__: [field.encode_name for field in msgspec.structs.fields(kind)]
    for kind in ARRAY_STRUCTS
}
"""Field names of the structs that are encoded as arrays; events have their tag before them."""
