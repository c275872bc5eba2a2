"""What a request may ask for, on a real model: samples, stop strings, logprobs; and its failure."""

from __future__ import annotations

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine, sample_ids
from engine.errors import InvalidInput
from engine.record import BlockCopied, Failed, Finished, Forked
from engine.request import FinishReason

from .test_parity import loaded_engine, reference_model, resized

SIZES = {"token_budget": 16, "max_num_seqs": 6}


@pytest.fixture
def engine(model_path) -> Engine:
    return loaded_engine(model_path("tiny-gpt2"), "paged")


def run(engine: Engine) -> list:
    records = []
    while engine.has_work:
        records.append(engine.step())
    return records


def test_samples_of_a_prompt_share_it_differ_and_come_back_the_same(engine):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3, ignore_eos=True)
    with resized(engine, block_size=4, num_blocks=40, **SIZES):
        first = engine.generate(["the cat sat on the mat"], params)
    with resized(engine, block_size=4, num_blocks=40, **SIZES):
        request_id = engine.add_request("the cat sat on the mat", params)
        names = sample_ids(request_id, 3)
        engine.core.want_completions(names)
        events = [event for record in run(engine) for event in record.events]
        again = [engine.core.take_completion(name) for name in names]
    texts = [completion.token_ids for completion in first]
    assert len(texts) == 3
    assert len({tuple(text) for text in texts}) == 3
    assert [completion.token_ids for completion in again if completion] == texts
    assert sum(isinstance(event, Forked) for event in events) == 2
    assert sum(isinstance(event, BlockCopied) for event in events) == 2


def test_the_first_sample_says_what_a_single_one_says(engine):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    (alone,) = engine.generate(["the cat"], params)
    several = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=4, ignore_eos=True)
    assert engine.generate(["the cat"], several)[0].token_ids == alone.token_ids


def test_a_stop_string_ends_the_text_and_is_cut_from_it(engine):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    (whole,) = engine.generate(["the dog sat"], params)
    for start in range(2, len(whole.text) - 4):
        stop = whole.text[start : start + 4]
        if not stop.isprintable() or "\ufffd" in stop:
            continue
        stopping = SamplingParams(max_tokens=30, ignore_eos=True, stop=stop)
        (cut,) = engine.generate(["the dog sat"], stopping)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_no_stop_counts_before_min_tokens(engine):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (whole,) = engine.generate(["on the mat"], params)
    third = whole.token_ids[2]
    (early,) = engine.generate(["on the mat"], SamplingParams(20, stop_token_ids=(third,)))
    assert early.finish_reason is FinishReason.STOP
    assert len(early.token_ids) <= 3
    late = SamplingParams(20, min_tokens=8, ignore_eos=True, stop_token_ids=(third,))
    (longer,) = engine.generate(["on the mat"], late)
    assert len(longer.token_ids) > 8
    assert third not in longer.token_ids[:8]


def test_logprobs_are_those_of_the_model(engine):
    params = SamplingParams(max_tokens=4, logprobs=3, ignore_eos=True)
    (done,) = engine.generate([[5, 6, 7]], params)
    assert done.logprobs is not None
    assert done.top_logprobs is not None
    ids = torch.tensor([[5, 6, 7, *done.token_ids]])
    with torch.inference_mode():
        logits = reference_model(engine.config.model)(ids).logits[0].log_softmax(-1)
    for index, (token_id, logprob, top) in enumerate(
        zip(done.token_ids, done.logprobs, done.top_logprobs, strict=True)
    ):
        row = logits[2 + index]
        assert logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        best = row.topk(3)
        assert [token for token, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_token_outside_the_vocabulary_is_refused(engine):
    for params in (SamplingParams(stop_token_ids=(999_999,)), SamplingParams(logit_bias={280: 1})):
        with pytest.raises(InvalidInput, match="is not in the vocabulary of 280"):
            engine.add_request("x", params)


def test_a_request_with_nan_ends_alone(model_path):
    """Token 9 has no embedding to speak of; whoever uses it fails, and nobody else."""
    engine = Engine(EngineConfig(model=model_path("tiny-llama"), num_blocks=64, block_size=4))
    good = engine.generate([[3, 4, 5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    with torch.no_grad():
        engine.loaded.model.get_input_embeddings().weight[9] = float("nan")
    engine.reset_prefix_cache()
    bias = {9: -100.0}
    params = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias=bias)
    bad = engine.add_request([3, 4, 5, 6, 9, 8], params)
    fine = engine.add_request([3, 4, 5, 6, 7], params)
    engine.core.want_completions([bad, fine])
    events = [event for record in run(engine) for event in record.events]
    assert any(isinstance(event, Failed) and event.request_id == bad for event in events)
    ends = {e.request_id: e.reason for e in events if isinstance(e, Finished)}
    assert ends == {bad: FinishReason.ERROR, fine: FinishReason.LENGTH}
    failed, whole = engine.core.take_completion(bad), engine.core.take_completion(fine)
    assert failed is not None
    assert failed.error
    assert whole is not None
    assert 9 in good.token_ids or whole.token_ids == good.token_ids
    engine.core.scheduler.check_integrity()
