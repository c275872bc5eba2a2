"""Drawing tokens: what is cut off is never drawn, what is left comes with its probability."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from engine.errors import InvalidInput, StepFailed
from engine.request import Request, SamplingParams
from engine.sampler import sample, truncated_probabilities, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])


def request(**params: object) -> Request:
    seed = params.get("seed") or 0
    return Request("A", "", [1, 2], SamplingParams(**params), int(seed))


def test_greedy_takes_the_likeliest_and_gives_its_log_probability():
    tokens, logprobs = sample(LOGITS[None], [request()])
    assert tokens == [0]
    assert logprobs[0] == pytest.approx(float(LOGITS.log_softmax(-1)[0]))


def test_drawn_frequencies_are_the_probabilities():
    drawn = Counter()
    subject = request(temperature=1.0, seed=3)
    for _ in range(4000):
        (token,), _ = sample(LOGITS[None], [subject])
        subject.token_ids.append(token)
        drawn[token] += 1
    for token, probability in enumerate(LOGITS.softmax(-1).tolist()):
        assert drawn[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_top_k_keeps_k_tokens():
    kept = truncated_probabilities(LOGITS, SamplingParams(temperature=1.0, top_k=2)).nonzero()
    assert kept.flatten().tolist() == [0, 1]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    probabilities = LOGITS.softmax(-1)
    just_under = float(probabilities[:2].sum()) - 1e-4
    just_over = float(probabilities[:2].sum()) + 1e-4
    two = truncated_probabilities(LOGITS, SamplingParams(temperature=1.0, top_p=just_under))
    three = truncated_probabilities(LOGITS, SamplingParams(temperature=1.0, top_p=just_over))
    one = truncated_probabilities(LOGITS, SamplingParams(temperature=1.0, top_p=1e-9))
    assert [int((kept > 0).sum()) for kept in (one, two, three)] == [1, 2, 3]


def test_a_low_temperature_comes_close_to_greedy():
    subject = request(temperature=0.01, seed=1)
    assert {sample(LOGITS[None], [subject])[0][0] for _ in range(50)} == {0}


def test_a_draw_depends_on_seed_and_position_alone():
    assert uniform(5, 9) == uniform(5, 9)
    assert len({uniform(5, i) for i in range(100)} | {uniform(6, i) for i in range(100)}) == 200
    assert all(0 <= uniform(i, i) < 1 for i in range(100))


def test_logits_that_are_no_numbers_fail_the_step():
    with pytest.raises(StepFailed, match="not finite"):
        sample(torch.tensor([[1.0, math.nan]]), [request()])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": math.nan}, "temperature must be 0 or more"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"seed": -1}, "seed must lie between"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(params, message):
    with pytest.raises(InvalidInput, match=message):
        SamplingParams(**params)


def test_the_smallest_temperature_is_greedy_and_overflows_nothing():
    subject = request(temperature=1e-308, seed=1)
    assert sample(LOGITS[None], [subject])[0] == [0]
