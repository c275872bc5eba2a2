"""Files of prompts: a line each, or a `.jsonl` object with any sampling parameter."""

from __future__ import annotations

import io
import json
import sys

import pytest

from cbviz.prompts import OWN_PARAMS, read_prompts
from engine.errors import InvalidInput
from engine.request import SamplingParams

SHARED = {"max_tokens": 9, "logprobs": 2, "stop": ("END",)}
EVERY = {
    "max_tokens": 3, "min_tokens": 1, "temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.1,
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.4, "seed": 5,
    "stop": ["x", "y"], "stop_token_ids": [6], "ignore_eos": True, "logprobs": 7, "n": 2,
    "logit_bias": {"8": -1.5}, "priority": -3, "cache_salt": "s",
}  # fmt: skip


def params(own: dict) -> SamplingParams:
    return SamplingParams(**{**SHARED, **own})


@pytest.fixture
def read(tmp_path):
    def from_lines(*lines: str, name: str = "p.jsonl") -> list[tuple[str, SamplingParams]]:
        path = tmp_path / name
        path.write_bytes("\n".join(lines).encode())
        return read_prompts(str(path), params)

    return from_lines


def test_a_line_may_hold_every_parameter(read):
    assert set(EVERY) == set(OWN_PARAMS) == set(SamplingParams.__struct_fields__)
    ((prompt, found),) = read(json.dumps({"prompt": "a", **EVERY}))
    assert prompt == "a"
    assert found == SamplingParams(**{**EVERY, "logit_bias": {8: -1.5}})
    default = SamplingParams()
    assert all(getattr(found, name) != getattr(default, name) for name in OWN_PARAMS)


def test_what_a_line_leaves_out_is_what_the_command_line_says(read):
    lines = read('{"prompt": "a", "max_tokens": 3}', "", '{"prompt": "b", "stop": "x"}')
    assert lines == [
        ("a", SamplingParams(max_tokens=3, logprobs=2, stop="END")),
        ("b", SamplingParams(max_tokens=9, logprobs=2, stop="x")),
    ]
    # null takes an optional parameter back.
    assert read('{"prompt": "a", "logprobs": null}')[0][1].logprobs is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "max_token": 1}', "there is no field 'max_token'; there are prompt, max"),
        ('{"max_tokens": 1}', "Object missing required field `prompt`"),
        ('{"prompt": 3}', "Expected `str`, got `int` - at `$.prompt`"),
        ('{"prompt": "a", "max_tokens": "3"}', "Expected `int`, got `str` - at `$.max_tokens`"),
        ('{"prompt": "a", "max_tokens": 3.0}', "Expected `int`, got `float` - at `$.max_tokens`"),
        ('{"prompt": "a", "n": true}', "Expected `int`, got `bool` - at `$.n`"),
        ('{"prompt": "a", "top_k": null}', "Expected `int`, got `null` - at `$.top_k`"),
        ('{"prompt": "a", "ignore_eos": 1}', "Expected `bool`, got `int` - at `$.ignore_eos`"),
        ('{"prompt": "a", "stop": [3]}', "Expected `str`, got `int` - at `$.stop[0]`"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "Expected `int`, got `str` - at `key` in"),
        ('{"prompt": "a", "temperature": -3}', "temperature must be 0 or more, not -3"),
        ('{"prompt": "a", "min_tokens": 10}', "min_tokens (10) must not be above max_tokens (9)"),
        ('["a"]', "Expected `object`, got `array`"),
        ('{"prompt": "a"', "Input data was truncated"),
        ('{"prompt": ' + "[" * 100_000, "it is nested too deeply"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(read, line, message):
    with pytest.raises(InvalidInput) as refusal:
        read('{"prompt": "good"}', "", line)
    found = str(refusal.value)
    assert "p.jsonl, line 3: " + message in found
    assert "\n" not in found


def test_other_files_hold_a_prompt_a_line(read):
    text = "one\u2028line\x0cstill\r", "", '{"prompt": "x"}', ""
    assert [prompt for prompt, _ in read(*text, name="p.txt")] == [
        "one\u2028line\x0cstill", '{"prompt": "x"}',
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match=r"p\.txt holds no prompt"):
        read("", "  ", name="p.txt")


def test_standard_input_holds_a_prompt_a_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\ntwo")))
    assert read_prompts("-", params) == [("one", params({})), ("two", params({}))]
