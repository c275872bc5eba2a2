"""A request: its prompt, its parameters, and how far the engine has come with it."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Any, TypeGuard

import msgspec

from engine.errors import InvalidInput

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MIN_PENALTY = 0.01
MAX_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024


class RequestStatus(StrEnum):
    """Where a request stands. A preempted request waits with tokens to recompute."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended: `stop` (an end token or a stop string), `length` (its limit or the
    context), `abort` (by command), `error` (it could not be computed)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn for one request, under the names that people know.

    Args:
        max_tokens: tokens generated at most.
        min_tokens: no end token, stop token or stop string counts before so many tokens.
        temperature: 0 takes the likeliest token (greedy); otherwise logits are divided by it.
        top_p: draw among the likeliest tokens that together have this probability; 1 = all.
        top_k: draw among the k likeliest tokens; 0 = all.
        min_p: draw among tokens at least this fraction as likely as the likeliest; 0 = all.
        repetition_penalty: above 1, tokens of prompt and output become less likely (positive
            logits are divided by it, negative ones multiplied); None = the model's own, else 1.
        presence_penalty: subtracted from the logits of tokens in prompt or output.
        frequency_penalty: the same, times how often they occur there.
        seed: same seed, same text, whatever shares the batch; None = derived from the engine's.
        stop: strings that end the output where they begin; they are cut from it.
        stop_token_ids: tokens that end the output, as the model's end tokens do.
        ignore_eos: go on after an end token of the model.
        logprobs: also report so many likeliest tokens with each one drawn.
        n: samples of the prompt, each a request that shares the prompt's blocks.
        logit_bias: added to the logits of these token ids.
        priority: lower goes first, under the scheduling policy `priority`.
        cache_salt: only requests with the same salt share blocks of the prefix cache.

    Raises:
        InvalidInput: a value out of its range, with the range.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    logit_bias: dict[int, float] = {}
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        # One string is a list of one, and a list is as good as a tuple.
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        msgspec.structs.force_setattr(self, "stop", stop)
        ids = _tuple("stop_token_ids", self.stop_token_ids)
        msgspec.structs.force_setattr(self, "stop_token_ids", ids)
        self._check_length()
        self._check_truncation()
        self._check_penalties()
        self._check_stops()
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _whole("n", self.n, 1, MAX_SAMPLES)
        _whole("priority", self.priority, -MAX_COUNT, MAX_COUNT)
        if self.cache_salt is not None and not _is_text(self.cache_salt):
            raise InvalidInput(f"cache_salt must be text, not {self.cache_salt!a}")

    def _check_length(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, MAX_COUNT)
        _whole("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.min_tokens > self.max_tokens:
            raise InvalidInput(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})"
            )

    def _check_truncation(self) -> None:
        if not (_is_number(self.temperature) and self.temperature >= 0):
            raise InvalidInput(f"temperature must be 0 or more, not {self.temperature!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise InvalidInput(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        _whole("top_k (0 = all)", self.top_k, 0, MAX_COUNT)
        _between("min_p", self.min_p, 0, 1)

    def _check_penalties(self) -> None:
        if self.repetition_penalty is not None:
            _between(
                "repetition_penalty (1 = none)", self.repetition_penalty, MIN_PENALTY, MAX_PENALTY
            )
        _between("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _between("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if not isinstance(self.logit_bias, dict):
            raise InvalidInput(f"logit_bias maps token ids to numbers, not {self.logit_bias!r}")
        for token_id, bias in self.logit_bias.items():
            _whole("a token id of logit_bias", token_id, 0, MAX_COUNT)
            _between("logit_bias", bias, -MAX_BIAS, MAX_BIAS)

    def _check_stops(self) -> None:
        if not all(text and _is_text(text) for text in self.stop):
            raise InvalidInput("a stop string must be text and not empty")
        if len(self.stop) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in self.stop):
            raise InvalidInput(
                f"at most {MAX_STOPS} stop strings of at most {MAX_STOP_LENGTH} characters"
            )
        for token_id in self.stop_token_ids:
            _whole("a stop token id", token_id, 0, MAX_COUNT)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInput(f"ignore_eos must be true or false, not {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        """No randomness: the likeliest token is taken."""
        return self.temperature == 0.0


def _whole(name: str, value: object, low: int, high: int) -> None:
    """Raise InvalidInput unless it is a whole number in its range."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(f"{name} must be a whole number from {low} to {high}, not {value!r}")


def _between(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidInput unless it is a number in its range."""
    if not (_is_number(value) and low <= value <= high):
        raise InvalidInput(f"{name} must lie between {low} and {high}, not {value!r}")


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _is_text(value: object) -> bool:
    """A string that can be written down: without halves of surrogate pairs."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidInput(f"{name} must be a list, not {value!r}")
    return tuple(value)


class Request:
    """One request inside the engine; the scheduler alone changes it.

    `token_ids` holds prompt and output together, `num_computed` counts those whose keys and
    values are cached, `prefill_end` those that were known when it was last admitted: up to there
    it is in prefill, from there on it decodes. `fork_of` is the request whose prompt it shares
    (another of the `n` samples), if any.
    """

    __slots__ = (
        "arrival", "block_hashes", "block_table", "cache_epoch", "fork_of", "high_water",
        "last_scheduled", "num_cached_blocks", "num_chunks", "num_computed", "num_prompt_tokens",
        "params", "passed", "prefill_end", "prompt", "request_id", "seed", "status", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt: str,
        token_ids: list[int],
        params: SamplingParams,
        seed: int,
        fork_of: Request | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.fork_of = fork_of
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_computed = 0
        self.prefill_end = len(token_ids)
        self.block_table: list[int] = []
        self.status = RequestStatus.WAITING
        self.arrival = -1
        """How many requests were queued before it."""
        self.last_scheduled = -1
        """The last step that computed a token of it."""
        self.num_chunks = 0
        """Prefill chunks since it was last admitted."""
        self.high_water = 0
        """Tokens that were computed before it was last preempted."""
        self.passed = 0
        """How many requests behind it were admitted before it."""
        self.block_hashes: list[int] = []
        """The hash chain over its full blocks, as far as it was needed (`engine.prefix_cache`)."""
        self.num_cached_blocks = 0
        """Leading blocks of its table that the prefix cache knows."""
        self.cache_epoch = 0
        """The content of the prefix cache that its blocks may join; -1 = none."""

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
