"""Sampling parameters: a sentence for each that cannot be, the same value from a trace."""

from __future__ import annotations

import math

import msgspec
import pytest

from engine.errors import InvalidInput
from engine.request import MAX_COUNT, MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to 2147483647, not 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number from 1 to 2147483647, not True"),
        ({"max_tokens": 2.0}, "max_tokens must be a whole number from 1 to 2147483647, not 2.0"),
        ({"max_tokens": 2**31}, "max_tokens must be a whole number from 1 to 2147483647"),
        ({"min_tokens": -1}, "min_tokens must be a whole number from 0 to 2147483647, not -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens (9) must not be above max_tokens (8)"),
        ({"temperature": -1.0}, "temperature must be 0 or more, not -1.0"),
        ({"temperature": math.nan}, "temperature must be 0 or more, not nan"),
        ({"temperature": math.inf}, "temperature must be 0 or more, not inf"),
        ({"temperature": "hot"}, "temperature must be 0 or more, not 'hot'"),
        ({"temperature": 10**400}, "temperature must be 0 or more, not 1000"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, not 1.1"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, not nan"),
        ({"top_k": -1}, "top_k (0 = all) must be a whole number from 0 to 2147483647, not -1"),
        ({"min_p": 1.5}, "min_p must lie between 0 and 1, not 1.5"),
        ({"min_p": math.nan}, "min_p must lie between 0 and 1, not nan"),
        ({"min_p": None}, "min_p must lie between 0 and 1, not None"),
        ({"repetition_penalty": 0}, "repetition_penalty (1 = none) must lie between 0.01 and 100"),
        ({"repetition_penalty": 101.0}, "repetition_penalty (1 = none) must lie between 0.01 and"),
        ({"presence_penalty": -101.0}, "presence_penalty must lie between -100.0 and 100.0, not"),
        ({"presence_penalty": "x"}, "presence_penalty must lie between -100.0 and 100.0, not 'x'"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must lie between -100.0 and 100.0"),
        ({"seed": -1}, f"seed must be a whole number from 0 to {MAX_SEED}, not -1"),
        ({"seed": 2**63}, f"seed must be a whole number from 0 to {MAX_SEED}"),
        ({"stop": [""]}, "a stop string must be text and not empty"),
        ({"stop": [3]}, "a stop string must be text and not empty"),
        ({"stop": ["\ud800"]}, "a stop string must be text and not empty"),
        ({"stop": None}, "stop must be a list, not None"),
        ({"stop": ["x"] * 65}, "at most 64 stop strings of at most 1024 characters"),
        ({"stop": "x" * 1025}, "at most 64 stop strings of at most 1024 characters"),
        ({"stop_token_ids": [-1]}, "a stop token id must be a whole number from 0 to 2147483647"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list, not 3"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false, not 'no'"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, not 21"),
        ({"n": 0}, "n must be a whole number from 1 to 1024, not 0"),
        ({"logit_bias": {-1: 1.0}}, "a token id of logit_bias must be a whole number from 0 to"),
        ({"logit_bias": {1: 101.0}}, "logit_bias must lie between -100.0 and 100.0, not 101.0"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must lie between -100.0 and 100.0, not nan"),
        ({"logit_bias": [1]}, "logit_bias maps token ids to numbers, not [1]"),
        ({"priority": -(2**31)}, "priority must be a whole number from -2147483647 to 2147483647"),
        ({"priority": 0.5}, "priority must be a whole number from -2147483647 to 2147483647"),
        ({"cache_salt": 5}, "cache_salt must be text, not 5"),
        ({"cache_salt": "\udcff"}, "cache_salt must be text, not '\\udcff'"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(params, message):
    with pytest.raises(InvalidInput) as refusal:
        SamplingParams(**params)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_the_edges_of_every_range_are_good():
    SamplingParams(
        max_tokens=MAX_COUNT, min_tokens=MAX_COUNT, temperature=1.7e308, top_p=5e-324,
        top_k=MAX_COUNT, min_p=1, repetition_penalty=0.01, presence_penalty=-100,
        frequency_penalty=100.0, seed=MAX_SEED, stop=["x" * 1024] * 64, stop_token_ids=[0, 5],
        logprobs=20, n=1024, logit_bias={0: -100, 5: 100.0}, priority=-MAX_COUNT, cache_salt="",
    )  # fmt: skip
    SamplingParams(min_tokens=0, temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=100,
                   seed=0, logprobs=0, priority=MAX_COUNT)  # fmt: skip


def test_one_stop_string_is_a_list_of_one_and_lists_become_tuples():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]) == SamplingParams(
        stop=("a", "b"), stop_token_ids=(3,)
    )


@pytest.mark.parametrize("coder", [msgspec.msgpack, msgspec.json])
def test_they_survive_being_written_down(coder):
    params = SamplingParams(
        stop="é", stop_token_ids=[1], logit_bias={7: -1.5}, logprobs=0, seed=MAX_SEED, n=3
    )
    assert coder.decode(coder.encode(params), type=SamplingParams) == params
    spoilt = msgspec.to_builtins(params)
    spoilt[0] = 0
    with pytest.raises(msgspec.ValidationError, match="max_tokens must be a whole number"):
        coder.decode(coder.encode(spoilt), type=SamplingParams)
