"""Drawing the next tokens: greedy, temperature, top-k, top-p, a seed a request.

The random number of a draw depends on the request's seed and on how many tokens it has generated,
and on nothing else: neither on what shares the batch nor on what was preempted in between.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch

from engine.errors import StepFailed
from engine.request import MAX_SEED, Request, SamplingParams


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
    """One token a row of `logits [n_S, vocab]`, and the log-probability of each.

    The log-probabilities are those of the model, before temperature and truncation.

    Raises:
        StepFailed: a row holds NaN or infinity.
    """
    if not requests:
        return [], []
    logits = logits.float()
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise StepFailed("the model's logits are not finite (an overflow in this dtype?)")
    tokens = logits.argmax(dim=-1)
    for row, request in enumerate(requests):
        if not request.params.greedy:
            tokens[row] = _draw(logits[row], request)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
    return tokens.tolist(), logprobs.tolist()


def derived_seed(seed: int, ordinal: int) -> int:
    """The seed of the `ordinal`-th request of an engine, for requests that bring none."""
    return _hash(seed, ordinal) & MAX_SEED


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the `index`-th draw under a seed."""
    return (_hash(seed, index) >> 11) * 2.0**-53


def _hash(first: int, second: int) -> int:
    digest = blake2b(struct.pack("<QQ", first, second), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _draw(logits: torch.Tensor, request: Request) -> int:
    """Inverse transform over the vocabulary in its own order, in float64."""
    probabilities = truncated_probabilities(logits, request.params)
    cumulative = probabilities.cumsum(dim=-1)
    target = uniform(request.seed, request.num_output_tokens) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    # Rounding may put the target on the last sum: take the last token that has any probability.
    return min(index, int(probabilities.nonzero()[-1]))


def truncated_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Unnormalised probabilities `[vocab]`, float64, after temperature, top-k and top-p."""
    # From the largest one down: however small the temperature, nothing overflows.
    scaled = (logits.double() - logits.max().double()) / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        threshold = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # A token stays when those before it have not reached top_p yet; the first always stays.
        dropped = ordered.cumsum(dim=-1) - ordered >= params.top_p
        probabilities = probabilities.index_fill(0, order[dropped], 0.0)
    return probabilities
