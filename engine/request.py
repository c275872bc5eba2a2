"""A request: its prompt, its parameters, and how far the engine has come with it."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from engine.errors import InvalidInput

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1


class RequestStatus(StrEnum):
    """Where a request stands. A preempted request waits with tokens to recompute."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended: `stop` (an end token), `length` (its limit or the context), `abort`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn for one request.

    Args:
        max_tokens: tokens generated at most.
        temperature: 0 takes the likeliest token (greedy); otherwise logits are divided by it.
        top_k: draw among the k likeliest tokens; 0 = all.
        top_p: draw among the likeliest tokens that together have this probability; 1 = all.
        seed: same seed, same text, whatever shares the batch; None = derived from the engine's.
        ignore_eos: go on after an end token.

    Raises:
        InvalidInput: a value out of its range, with the range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= MAX_COUNT:
            raise InvalidInput(
                f"max_tokens must be at least 1 and at most {MAX_COUNT}, not {self.max_tokens}"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidInput(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 <= self.top_k <= MAX_COUNT:
            raise InvalidInput(
                f"top_k must be 0 (all) or more, at most {MAX_COUNT}, not {self.top_k}"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidInput(f"seed must lie between 0 and {MAX_SEED}, not {self.seed}")

    @property
    def greedy(self) -> bool:
        """No randomness: the likeliest token is taken."""
        return self.temperature == 0.0


class Request:
    """One request inside the engine; the scheduler alone changes it.

    `token_ids` holds prompt and output together, `num_computed` counts those whose keys and
    values are cached, `prefill_end` those that were known when it was last admitted: up to there
    it is in prefill, from there on it decodes.
    """

    __slots__ = (
        "block_table", "last_scheduled", "num_computed", "num_prompt_tokens", "params",
        "prefill_end", "prompt", "request_id", "seed", "status", "token_ids",
    )  # fmt: skip

    def __init__(
        self, request_id: str, prompt: str, token_ids: list[int], params: SamplingParams, seed: int
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_computed = 0
        self.prefill_end = len(token_ids)
        self.block_table: list[int] = []
        self.status = RequestStatus.WAITING
        self.last_scheduled = -1

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Known tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def decoding(self) -> bool:
        """Its known tokens are cached but for the newest, which is computed next."""
        return self.num_computed >= self.prefill_end
