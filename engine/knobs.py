"""What may be changed while the engine runs: the limits and options of the scheduler. No torch.

Names follow vLLM where it has one. 0 means "no limit" where a limit is optional.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.errors import InvalidInput

MAX_TOKEN_BUDGET = 1_048_576
MAX_BLOCKS = 4_194_304
MAX_SKIP = 64
"""So many waiting requests, besides those admitted, are looked at in a step at most."""

SchedulingPolicy = Literal["fcfs", "prefill-first", "priority"]
Knob = bool | int | str
"""The value of a knob."""


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    """Raise InvalidInput unless `low <= value <= high` or it is None."""
    if value is not None and not low <= value <= high:
        raise InvalidInput(f"{name} must lie between {low} and {high}, not {value}")


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one step; a change holds from the next step on.

    Args:
        token_budget: m, tokens computed in one step at most (vLLM: max_num_batched_tokens).
        max_num_seqs: requests running at the same time at most.
        scheduling_policy: who goes first (`engine.policies`).
        long_prefill_token_threshold: prefill tokens of one request in a step at most; 0 = no cap.
        max_num_partial_prefills: requests with a prompt begun but not finished at most; 0 = any.
        watermark: blocks that an admission must leave free, while others run.
        chunked_prefill: split prompts to fit the budget; off: a prompt runs whole or waits.
        skip_blocked_head: how many requests may pass one that cannot be admitted, ever, and past
            how many of those a step looks for others; 0 = none.
        prefix_caching: keep full blocks for requests that begin with the same tokens.

    Raises:
        InvalidInput: a value out of its range, with the range.
    """

    token_budget: int
    max_num_seqs: int
    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    watermark: int = 0
    chunked_prefill: bool = True
    skip_blocked_head: int = 0
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_range("token budget", self.token_budget, 1, MAX_TOKEN_BUDGET)
        check_range("max num seqs", self.max_num_seqs, 1, MAX_TOKEN_BUDGET)
        check_range("skip blocked head", self.skip_blocked_head, 0, MAX_SKIP)
        for name in ("long_prefill_token_threshold", "max_num_partial_prefills"):
            check_range(name.replace("_", " "), getattr(self, name), 0, MAX_TOKEN_BUDGET)
        check_range("watermark", self.watermark, 0, MAX_BLOCKS)
        if self.scheduling_policy not in POLICY_NAMES:
            raise InvalidInput(
                f"the scheduling policy is one of {', '.join(POLICY_NAMES)}, "
                f"not {self.scheduling_policy!r}"
            )

    def changed(self, name: str, value: Knob) -> Knobs:
        """The same with another value of one knob.

        Raises:
            InvalidInput: there is no such knob, or the value is not for it.
        """
        kind = KINDS.get(name)
        if kind is None:
            raise InvalidInput(f"there is no knob {name!r}; there are {', '.join(KINDS)}")
        if type(value) is not kind:
            raise InvalidInput(f"{name} takes {_A_KIND[kind]}, not {value!r}")
        return msgspec.structs.replace(self, **{name: value})


POLICY_NAMES: tuple[str, ...] = ("fcfs", "prefill-first", "priority")
KINDS: dict[str, type[Any]] = {
    field.name: field.type if field.type in (int, bool) else str
    for field in msgspec.structs.fields(Knobs)
}
"""The type of each knob's value, by its name."""
_A_KIND: dict[type[Any], str] = {int: "a whole number", bool: "true or false", str: "a name"}
