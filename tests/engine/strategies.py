"""What random workloads are made of."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from engine.knobs import KINDS, POLICY_NAMES


def knob_changes(budgets: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[str, Any]]:
    """A change of any knob: its name and new value."""
    values: dict[str, st.SearchStrategy[Any]] = {
        "token_budget": budgets,
        "max_num_seqs": st.integers(1, 6),
        "scheduling_policy": st.sampled_from(POLICY_NAMES),
        "long_prefill_token_threshold": st.integers(0, 9),
        "max_num_partial_prefills": st.integers(0, 3),
        "watermark": st.integers(0, 6),
        "chunked_prefill": st.booleans(),
        "skip_blocked_head": st.integers(0, 4),
        "prefix_caching": st.booleans(),
    }
    assert values.keys() == KINDS.keys(), "every knob is turned"
    return st.one_of([st.tuples(st.just(name), value) for name, value in values.items()])
