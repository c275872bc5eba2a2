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

from engine.config import MAX_BLOCK_SIZE
from engine.knobs import MAX_BLOCKS, Knob, Knobs, check_range
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
    """Why the scheduler did it; which numbers of a `Decision` speak is said here.

    `tokens` run now of `left` that were left to compute; `chunk` counts the prefill chunks since
    the request was admitted, from 1. With `Action.PREFILL` the reason says why the chunk is not
    longer, and `have` how many tokens the first one begins behind, because they were cached (or are
    shared with `other`, another sample); with `Action.WAIT`, why nothing runs.
    """

    SCHEDULED = "scheduled"
    """All that was left runs."""
    BUDGET_SPENT = "budget spent"
    """No token of the budget of `limit` is left (`have` 0)."""
    LONG_PREFILL = "long prefill cap"
    """A request's prefill takes `limit` tokens of a step at most."""
    MAX_NUM_SEQS = "max num seqs"
    """`have` requests run already, `limit` may; `need` places are kept for samples whose prompt is
    being computed."""
    NO_FREE_BLOCKS = "no free blocks"
    """It needs `need` blocks, besides `limit` evictable ones that it would share; `have` can be
    taken, other evictable ones counted."""
    WATERMARK = "watermark"
    """It needs `need` blocks of `have`, and `limit` must stay free at an admission."""
    PARTIAL_PREFILLS = "partial prefill cap"
    """`have` prompts are begun and unfinished, `limit` may be."""
    CHUNKING_OFF = "chunking off"
    """Chunked prefill is off; waiting: its `need` tokens do not fit in the `have` left of the
    budget of `limit`. Running in chunks all the same: it is under way, or longer than a step."""
    FORK = "fork"
    """It shares the prompt of `other`, of which `have` of `limit` tokens are computed."""
    BEHIND = "behind"
    """Requests are admitted in order, and `other` before it was not."""
    HELD_BY_PREEMPTION = "held by preemption"
    """Memory ran out in this step, for `other`, so nobody new is admitted."""
    PREEMPTED = "preempted"
    """Its blocks went to `other`: `left` computed tokens are lost, but for `have` of them that
    stay in the prefix cache until their blocks are taken."""


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
    chunk: int = 0


def decode_decision(request_id: str) -> Decision:
    """That of a request that decodes: records leave it out."""
    return Decision(request_id, Action.DECODE, Reason.SCHEDULED, tokens=1, left=1)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One token drawn in a step.

    `text`: what it adds to the streamed output, which may be empty until a character is whole,
    so that the texts of a request joined are exactly its output. `piece`: the token by itself, as
    it is shown in a grid. `logprob`: natural log of its probability, before penalties and
    temperature. `top`: the likeliest tokens (id, piece, logprob), as many as were asked for.
    """

    request_id: str
    token_id: int
    text: str
    piece: str
    logprob: float
    top: list[tuple[int, str, float]] = []


class Added(msgspec.Struct, frozen=True, array_like=True, tag="added"):
    """A request joined the waiting queue. `prompt` is its text, `pieces` one text a token.

    `fork_of`: the request whose prompt it shares (another sample of the same), or empty.
    """

    request_id: str
    prompt: str
    token_ids: list[int]
    pieces: list[str]
    params: SamplingParams
    at: float
    fork_of: str = ""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A request can never run, for the reason in `message`; it was not queued."""

    request_id: str
    prompt: str
    message: str
    at: float


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag="admitted"):
    """A waiting request became a running one.

    `queried`: tokens that were looked up in the prefix cache; 0 for one that was preempted
    before, whose tokens are no new query. `passed`: waiting requests before it that could not be
    admitted.
    """

    request_id: str
    at: float
    queried: int = 0
    passed: list[str] = []


class PrefixHit(msgspec.Struct, frozen=True, array_like=True, tag="prefix_hit"):
    """An admitted request begins with cached blocks, `tokens` in all.

    `resumed`: it had computed them itself before it was preempted, and they were still there.
    """

    request_id: str
    block_ids: list[int]
    tokens: int
    resumed: bool = False


class Forked(msgspec.Struct, frozen=True, array_like=True, tag="forked"):
    """An admitted request shares the full blocks of another one's prompt, `tokens` in all.

    If these end inside a block, a `BlockCopied` follows.
    """

    request_id: str
    parent: str
    block_ids: list[int]
    tokens: int


class BlocksAllocated(msgspec.Struct, frozen=True, array_like=True, tag="blocks_allocated"):
    """Free blocks were appended, in this order, to the block table of a request."""

    request_id: str
    block_ids: list[int]


class BlocksFreed(msgspec.Struct, frozen=True, array_like=True, tag="blocks_freed"):
    """A request gave up its whole block table; the blocks are listed in the order given up."""

    request_id: str
    block_ids: list[int]


class BlocksCached(msgspec.Struct, frozen=True, array_like=True, tag="blocks_cached"):
    """Full blocks of a request, from the `first`-th of its table on, can be shared from now on."""

    request_id: str
    first: int
    block_ids: list[int]


class BlockMerged(msgspec.Struct, frozen=True, array_like=True, tag="block_merged"):
    """The `index`-th block of a request was a duplicate: its table names `kept` instead of it."""

    request_id: str
    index: int
    freed: int
    kept: int


class BlocksEvicted(msgspec.Struct, frozen=True, array_like=True, tag="blocks_evicted"):
    """The prefix cache lost these evictable blocks, because a request needs them."""

    request_id: str
    block_ids: list[int]


class BlocksUncached(msgspec.Struct, frozen=True, array_like=True, tag="blocks_uncached"):
    """The prefix cache forgot these blocks, because what they hold is not to be trusted."""

    block_ids: list[int]


class CacheReset(msgspec.Struct, frozen=True, array_like=True, tag="cache_reset"):
    """The prefix cache forgot everything, `blocks` in all."""

    blocks: int


class BlockCopied(msgspec.Struct, frozen=True, array_like=True, tag="block_copied"):
    """Keys and values of a block were copied into a new one of the request."""

    request_id: str
    source: int
    target: int


class Preempted(msgspec.Struct, frozen=True, array_like=True, tag="preempted"):
    """A running request lost its blocks to `by` and went to the head of the waiting queue.

    `recompute`: computed tokens it lost, to be computed again unless they are still cached when
    it comes back.
    """

    request_id: str
    by: str
    recompute: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """A request ended by itself, with the step: its last token, or what was wrong with it."""

    request_id: str
    reason: FinishReason
    at: float


class Cancelled(msgspec.Struct, frozen=True, array_like=True, tag="cancelled"):
    """A request was taken out by command. `text` completes its output (a cut-off character)."""

    request_id: str
    text: str
    at: float


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Something could not be computed.

    With a `request_id`: that request, which ends with it; `text` completes its output. Without: a
    whole step, of which nothing happened.
    """

    request_id: str
    message: str
    at: float
    text: str = ""


class KnobChanged(msgspec.Struct, frozen=True, array_like=True, tag="knob_changed"):
    """A setting took effect at this step boundary."""

    name: str
    old: Knob
    new: Knob


Event = (
    Added
    | Refused
    | Admitted
    | PrefixHit
    | Forked
    | BlocksAllocated
    | BlocksFreed
    | BlocksCached
    | BlockMerged
    | BlocksEvicted
    | BlocksUncached
    | CacheReset
    | BlockCopied
    | Preempted
    | Finished
    | Cancelled
    | Failed
    | KnobChanged
)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step did.

    `events` stand in the order in which they happened, those from between the last step and this
    one (added, refused, cancelled, knob changed) first. `decisions` name each running request but
    those that decode, whose segment says it all, and each waiting one that was looked at; `rest`
    holds for every other waiting request (its `request_id` is empty), so that a record stays
    small however long the queue is (`World.decision` finds that of any request). `sampled` stands
    in the order of `segments`. `num_*` and `blocks_*` count the state after the step;
    `blocks_used` were held while it ran.
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
    blocks_evictable: int
    blocks_held: int
    blocks_used: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step: `n_Q` of its packed batch."""
        return len(self.token_ids)

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

    `knobs` may change later, by `KnobChanged` events.
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
    knobs: Knobs
    max_model_len: int
    block_size: int
    num_blocks: int
    seed: int

    def __post_init__(self) -> None:
        check_range("block size", self.block_size, 1, MAX_BLOCK_SIZE)
        check_range("number of blocks", self.num_blocks, 1, MAX_BLOCKS)


ARRAY_STRUCTS: tuple[type[msgspec.Struct], ...] = (
    Phases, Segment, Decision, Sample, SamplingParams, Added, Refused, Admitted, PrefixHit, Forked,
    BlocksAllocated, BlocksFreed, BlocksCached, BlockMerged, BlocksEvicted, BlocksUncached,
    CacheReset, BlockCopied, Preempted, Finished, Cancelled, Failed, KnobChanged,
)  # fmt: skip

SCHEMA: dict[str, list[str]] = {
    kind.__name__: [field.encode_name for field in msgspec.structs.fields(kind)]
    for kind in ARRAY_STRUCTS
}
"""Field names of the structs that are encoded as arrays; events have their tag before them."""
