"""Drawing tokens: every parameter does what its plain-Python reference does, and no more."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from engine import sampler as sampler_module
from engine.request import Request, SamplingParams
from engine.sampler import Sampler, derived_seed, sample_seed, truncated_weights, uniform

INF = math.inf
EOS = 0
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
PROMPT = [1, 2]


def request(tokens: tuple[int, ...] = (), prompt: list[int] = PROMPT, **params: object) -> Request:
    made = Request("A", "", prompt, SamplingParams(**params), int(params.get("seed") or 0))
    made.token_ids += tokens
    return made


def sample(logits, *requests, penalty: float = 1.0, eos: int = EOS):
    rows = torch.as_tensor(logits, dtype=torch.float32).reshape(len(requests), -1)
    return Sampler(frozenset({eos}), penalty).sample(rows, requests)


def kept(logits, **params) -> list[int]:
    """Tokens that may be drawn."""
    own = SamplingParams(**{"temperature": 1.0, **params})
    return truncated_weights(torch.as_tensor(logits)[None], [own])[0].nonzero().flatten().tolist()


# -- the reference: slow, float64, one row ---------------------------------------------------


def adjusted(logits: list[float], made: Request, eos: int = EOS) -> list[float]:
    params, scores = made.params, list(logits)
    for token, count in Counter(made.token_ids).items():
        penalty = params.repetition_penalty or 1.0
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if made.num_output_tokens < params.min_tokens:
        for token in [*params.stop_token_ids, *([] if params.ignore_eos else [eos])]:
            scores[token] = -INF
    return scores


def probabilities(scores: list[float], params: SamplingParams) -> list[float]:
    """After temperature, top-k, top-p and min-p, in this order."""
    top = max(scores)
    weights = [math.exp((score - top) / params.temperature) for score in scores]
    if params.top_k:
        kth = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [weight if weight >= kth else 0.0 for weight in weights]
    before, last = 0.0, 0.0
    for weight in sorted(weights, reverse=True):
        if params.top_p == 1.0 or before < params.top_p * sum(weights):
            before, last = before + weight, weight
    weights = [weight if weight >= max(last, params.min_p) else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


def drawn_by_reference(logits: list[float], made: Request) -> tuple[int, bool]:
    """The token, and whether rounding in float32 cannot have made it another."""
    params, scores = made.params, adjusted(logits, made)
    if params.greedy:
        first, second = sorted(scores, reverse=True)[:2]
        return scores.index(first), first - second > 1e-4
    chance, total = uniform(made.seed, made.num_output_tokens), 0.0
    chances = probabilities(scores, params)
    edges = []
    for chance_of in chances:
        total += chance_of
        edges.append(total)
    token = next(i for i, edge in enumerate(edges) if edge > chance and chances[i] > 0)
    return token, all(abs(edge - chance) > 1e-4 for edge in edges)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, 12),
        "top_p": st.sampled_from([1.0, 0.9, 0.53, 0.21]),
        "min_p": st.sampled_from([0.0, 0.037, 0.31, 1.0]),
        "repetition_penalty": st.sampled_from([None, 0.7, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.8, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -0.3]),
        "logit_bias": st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, -1.5, 2.5])),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(st.integers(1, 5), max_size=2),
        "ignore_eos": st.booleans(),
        "logprobs": st.none() | st.integers(0, 12),
    },
)
ROW = st.tuples(
    st.integers(0, 2**30), PARAMS, st.lists(st.integers(0, 9), max_size=6), st.integers(0, 9999)
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(ROW, min_size=1, max_size=5), st.sampled_from([10, 25, 1 << 22]))
def test_a_mixed_batch_draws_what_the_reference_draws(rows, chunk):
    logits, requests = [], []
    for seed, params, output, request_seed in rows:
        logits.append(torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 2)
        requests.append(request(tuple(output), **params, seed=request_seed))
    whole = torch.stack(logits)
    before = whole.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_CHUNK", chunk)
        drawn = Sampler(frozenset({EOS})).sample(whole, requests)
    assert torch.equal(whole, before)
    assert drawn.errors == {}
    for row, made in enumerate(requests):
        own = logits[row].double().log_softmax(-1).tolist()
        token, certain = drawn_by_reference(logits[row].tolist(), made)
        if certain:
            assert drawn.token_ids[row] == token
        assert drawn.logprobs[row] == pytest.approx(own[drawn.token_ids[row]], abs=1e-5)
        likeliest = sorted(enumerate(own), key=lambda pair: -pair[1])[: made.params.logprobs or 0]
        assert [i for i, _ in drawn.top_logprobs[row]] == [i for i, _ in likeliest]
        assert [p for _, p in drawn.top_logprobs[row]] == pytest.approx(
            [p for _, p in likeliest], abs=1e-5
        )


# -- truncation ------------------------------------------------------------------------------


def test_greedy_takes_the_likeliest_and_gives_its_log_probability():
    drawn = sample(LOGITS, request())
    assert drawn.token_ids == [0]
    assert drawn.logprobs[0] == pytest.approx(float(LOGITS.log_softmax(-1)[0]))
    assert drawn.top_logprobs == [[]]


def test_drawn_frequencies_are_the_probabilities():
    counts = Counter()
    subject = request(temperature=1.0, seed=3)
    for _ in range(4000):
        (token,) = sample(LOGITS, subject).token_ids
        subject.token_ids.append(token)
        counts[token] += 1
    for token, probability in enumerate(LOGITS.softmax(-1).tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_top_k_keeps_k_tokens_and_what_ties_with_the_last():
    assert kept(LOGITS, top_k=2) == [0, 1]
    assert kept(LOGITS, top_k=50) == [0, 1, 2, 3, 4]
    assert kept([1.0, 3.0, 1.0, 0.0], top_k=2) == [0, 1, 2]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    reached = float(LOGITS.softmax(-1)[:2].sum())
    assert kept(LOGITS, top_p=1e-9) == [0]
    assert kept(LOGITS, top_p=reached - 1e-4) == [0, 1]
    assert kept(LOGITS, top_p=reached + 1e-4) == [0, 1, 2]


def test_min_p_compares_with_the_likeliest_token():
    assert kept(LOGITS, min_p=math.exp(-1) + 1e-4) == [0]
    assert kept(LOGITS, min_p=math.exp(-1) - 1e-4) == [0, 1]
    assert kept(LOGITS, min_p=1.0) == [0]


def test_top_p_is_a_share_of_what_top_k_left_and_min_p_comes_last():
    first, second = LOGITS.softmax(-1)[:2].tolist()
    # Of all tokens 0.6 needs one; of two only, 0.74 needs one and 0.8 both.
    share = first / (first + second)
    assert first < 0.7 < share < 0.74
    assert kept(LOGITS, top_k=2, top_p=0.7) == [0]
    assert kept(LOGITS, top_p=0.7) == [0, 1]
    assert kept(LOGITS, top_k=2, top_p=0.74) == [0, 1]
    assert kept(LOGITS, top_k=2, top_p=0.74, min_p=0.5) == [0]


def test_the_nucleus_of_a_flat_distribution_is_larger_than_the_first_sort():
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.01
    order = flat.argsort(descending=True)
    count = int((flat.softmax(-1)[order].double().cumsum(0) < 0.9).sum()) + 1
    assert count > sampler_module._NUCLEUS
    assert set(kept(flat, top_p=0.9)) == set(order[:count].tolist())


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30, 0.01])
def test_a_low_temperature_comes_close_to_greedy(temperature):
    for seed in range(50):
        assert sample(LOGITS, request(temperature=temperature, seed=seed)).token_ids == [0]


def test_the_highest_temperature_draws_evenly_but_nothing_impossible():
    logits = torch.tensor([9.0, -INF, -9.0])
    drawn = Counter(
        sample(logits, request(temperature=1.7e308, seed=seed)).token_ids[0] for seed in range(400)
    )
    assert drawn.keys() == {0, 2}
    assert drawn[0] == pytest.approx(200, abs=40)


# -- penalties, bias, mask -------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.7])
@pytest.mark.parametrize("own", [True, False])
def test_the_repetition_penalty_is_that_of_transformers(penalty, own):
    generator = torch.Generator().manual_seed(5)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    changed = 0
    for _ in range(200):
        logits = torch.randn(1, 12, generator=generator) * 3
        ids = torch.randint(12, (7,), generator=generator).tolist()
        expected = processor(torch.tensor([ids]), logits.clone())
        made = request(tuple(ids[3:]), ids[:3], repetition_penalty=penalty if own else None)
        drawn = sample(logits, made, penalty=1.0 if own else penalty)
        assert drawn.token_ids == [int(expected.argmax())]
        changed += int(expected.argmax()) != int(logits.argmax())
    assert changed > 5


def test_a_request_can_refuse_the_models_own_repetition_penalty():
    logits = [1.0, 3.0, 2.0]
    assert sample(logits, request(prompt=[1]), penalty=2.0).token_ids == [2]
    off = request(prompt=[1], repetition_penalty=1.0)
    assert sample(logits, off, penalty=2.0).token_ids == [1]


def test_presence_counts_once_and_frequency_every_time_in_prompt_and_output():
    logits = [0.0, 2.0, 1.0]
    twice = {"tokens": (1,), "prompt": [1]}
    assert sample(logits, request(**twice, presence_penalty=0.9)).token_ids == [1]
    assert sample(logits, request(**twice, presence_penalty=1.1)).token_ids == [2]
    assert sample(logits, request(**twice, frequency_penalty=0.4)).token_ids == [1]
    assert sample(logits, request(**twice, frequency_penalty=0.6)).token_ids == [2]
    assert sample(logits, request(prompt=[1], frequency_penalty=0.6)).token_ids == [1]


def test_bias_is_added_and_a_token_beyond_the_vocabulary_does_not_matter():
    assert sample(LOGITS, request(logit_bias={4: 4.5})).token_ids == [4]
    assert sample(LOGITS, request(logit_bias={4: 3.5, 77: 100.0})).token_ids == [0]


def test_no_end_before_min_tokens():
    wants_to_end = [9.0, 8.0, 7.0, 6.0]
    for made, expected in (
        (request(min_tokens=1), 1),
        (request((3,), min_tokens=1), 0),
        (request(min_tokens=1, stop_token_ids=[1, 77]), 2),
        (request(min_tokens=1, ignore_eos=True), 0),
        (request(min_tokens=1, ignore_eos=True, stop_token_ids=[0]), 1),
        (request(min_tokens=1, logit_bias={0: 100.0}), 1),
        (request(stop_token_ids=[0]), 0),
    ):
        assert sample(wants_to_end, made).token_ids == [expected]


def test_log_probabilities_are_those_of_the_model_whatever_is_asked_of_it():
    made = request(logit_bias={2: 50.0}, temperature=0.3, top_k=1, logprobs=2, presence_penalty=1.0)
    drawn = sample(LOGITS, made)
    own = LOGITS.log_softmax(-1).tolist()
    assert drawn.token_ids == [2]
    assert drawn.logprobs == pytest.approx([own[2]])
    assert [i for i, _ in drawn.top_logprobs[0]] == [0, 1]
    assert [p for _, p in drawn.top_logprobs[0]] == pytest.approx(own[:2])


# -- what cannot be drawn from ---------------------------------------------------------------


def test_a_row_that_is_no_number_fails_alone():
    rows = torch.stack([LOGITS] * 6)
    rows[1, 3], rows[2, 0], rows[3], rows[5, 4] = math.nan, INF, -INF, math.nan
    requests = [request(logprobs=1) for _ in range(5)] + [request(temperature=1.0, top_p=0.9)]
    drawn = sample(rows, *requests)
    assert drawn.errors.keys() == {1, 2, 3, 5}
    for row, words in {1: "(NaN)", 2: "(infinity)", 3: "(every one is -infinity)"}.items():
        assert words in drawn.errors[row]
    assert not any("\n" in line for line in drawn.errors.values())
    assert drawn.token_ids == [0] * 6
    assert [drawn.logprobs[row] for row in (1, 2, 3, 5)] == [0.0] * 4
    assert [len(top) for top in drawn.top_logprobs] == [1, 0, 0, 0, 1, 0]
    assert drawn.logprobs[4] == drawn.logprobs[0] != 0.0


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"presence_penalty": 1.0}])
def test_impossible_tokens_are_allowed_and_never_drawn(params):
    logits = torch.tensor([-INF, 1.0, -INF, 0.5])
    drawn = {sample(logits, request(**params, seed=seed)).token_ids[0] for seed in range(60)}
    assert drawn == ({1, 3} if "temperature" in params else {3} if params else {1})
    likeliest = sample(logits, request(**params, logprobs=4)).top_logprobs[0]
    assert [token for token, _ in likeliest] == [1, 3]
    assert all(math.isfinite(value) for _, value in likeliest)


@pytest.mark.parametrize(("chance", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_smallest_and_the_largest_chance_draw_the_first_and_last_possible_token(
    monkeypatch, chance, token
):
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, index: chance)
    logits = torch.tensor([-INF, 1.0, 0.3, 0.7, -INF])
    for offset in torch.linspace(0, 1, 50):
        assert sample(logits * (1 + offset), request(temperature=1.0)).token_ids == [token]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_leave_no_token_fail_their_row_alone(temperature):
    stuck = request(min_tokens=1, stop_token_ids=[1, 2], temperature=temperature)
    drawn = sample([[1.0, 2.0, 3.0]] * 2, stuck, request())
    assert list(drawn.errors) == [0]
    assert "no token is left to draw" in drawn.errors[0]
    assert drawn.token_ids == [0, 2]
    assert drawn.logprobs[0] == 0.0


def test_no_rows_and_half_precision():
    assert Sampler(frozenset()).sample(torch.empty(0, 5), []).token_ids == []
    exact = sample(LOGITS, request()).logprobs
    half = Sampler(frozenset()).sample(LOGITS[None].bfloat16(), [request()])
    assert half.logprobs == pytest.approx(exact, abs=1e-6)


# -- seeds -----------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_position_alone():
    assert uniform(5, 9) == uniform(5, 9)
    assert len({uniform(5, i) for i in range(100)} | {uniform(6, i) for i in range(100)}) == 200
    assert all(0 <= uniform(i, i) < 1 for i in range(100))


def test_the_samples_of_a_request_have_seeds_of_their_own():
    seeds = [sample_seed(7, index) for index in range(50)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Nor are they those of the engine's other requests.
    assert not set(seeds[1:]) & {derived_seed(7, ordinal) for ordinal in range(50)}


def test_what_shares_the_batch_changes_nothing():
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(2)) * 3
    requests = [
        request(seed=1, temperature=1.0), request(), request(seed=2, temperature=0.8, top_p=0.9),
        request(repetition_penalty=1.2), request(seed=3, temperature=2.0, top_k=40),
        request(seed=1, temperature=1.5, min_p=0.01), request(logprobs=3),
        request(seed=4, temperature=5.0, top_p=0.99),
    ]  # fmt: skip
    together = Sampler(frozenset()).sample(logits, requests).token_ids
    alone = [Sampler(frozenset()).sample(logits[i : i + 1], [r]) for i, r in enumerate(requests)]
    assert together == [drawn.token_ids[0] for drawn in alone]
    back = Sampler(frozenset()).sample(logits.flip(0), requests[::-1]).token_ids
    assert back == together[::-1]


def test_plain_greedy_rows_copy_nothing(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a plain greedy batch needs no more than an argmax")

    monkeypatch.setattr(Sampler, "_draw", refuse)
    assert sample(torch.stack([LOGITS] * 3), *[request(ignore_eos=True)] * 3).token_ids == [0] * 3
    with pytest.raises(AssertionError):
        sample(LOGITS, request(temperature=1.0))
