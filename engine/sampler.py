"""Drawing the next tokens: greedy or by chance, with penalties, bias and a seed a request.

The random number of a draw depends on the request's seed and on how many tokens it has generated,
and on nothing else: neither on what shares the batch nor on what was preempted in between.

What is done to the logits of a row, in this order: repetition penalty, presence and frequency
penalty, bias, a mask over the tokens that may not come yet (`min_tokens`); then the likeliest token
is taken (temperature 0), or one drawn after temperature, top-k, top-p and min-p. The
log-probabilities that are reported are those of the model, before all of this.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from engine.request import MAX_SEED, Request, SamplingParams

_CHUNK = 1 << 22
"""Logits that are copied and worked on at once, at most: bounds the memory of a large batch."""
_NUCLEUS = 1024
"""So many of the likeliest tokens are sorted first; nearly always they hold top_p already."""
_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures that float32 can divide by, without an effect on what is drawn beyond them."""


@dataclass(frozen=True)
class Drawn:
    """What was drawn, a row each.

    `logprobs`: of the drawn token, under the model's own distribution. `top_logprobs`: the
    likeliest tokens of that distribution with their log-probabilities, likeliest first, as many
    as `SamplingParams.logprobs` asks for (fewer if fewer are possible). `errors`: by row, in one
    line, why nothing could be drawn there; its other values are placeholders.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    errors: dict[int, str]


class Sampler:
    """Draws a token a row.

    Args:
        eos_token_ids: the end tokens of the model.
        repetition_penalty: for requests that bring none.
    """

    def __init__(self, eos_token_ids: frozenset[int], repetition_penalty: float = 1.0) -> None:
        self.eos_token_ids = eos_token_ids
        self.repetition_penalty = repetition_penalty

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Drawn:
        """One token for each row of `logits [n_S, vocab]`, which are left as they are.

        A row that holds NaN or +inf, or nothing finite, fails alone (`Drawn.errors`).
        """
        if not requests:
            return Drawn([], [], [], {})
        logits = logits.float()
        # Finite exactly where a row can be drawn from: it passes on NaN, +inf and all -inf.
        mass = logits.logsumexp(dim=-1)
        tokens = logits.argmax(dim=-1)
        errors = _unusable(mass)
        special = [
            row
            for row, request in enumerate(requests)
            if row not in errors and not (request.params.greedy and self._untouched(request))
        ]
        for rows in _chunks(special, logits.shape[-1]):
            self._draw(logits, rows, [requests[row] for row in rows], tokens, errors)
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - mass
        top = _top_logprobs(logits, mass, requests, errors)
        token_ids, logprob_list = tokens.tolist(), logprobs.tolist()
        for row in errors:
            token_ids[row], logprob_list[row] = 0, 0.0
        return Drawn(token_ids, logprob_list, top, errors)

    def _untouched(self, request: Request) -> bool:
        """The logits are used as they come from the model."""
        params = request.params
        return (
            self._repetition(params) == 1.0
            and not params.presence_penalty
            and not params.frequency_penalty
            and not params.logit_bias
            and request.num_output_tokens >= params.min_tokens
        )

    def _repetition(self, params: SamplingParams) -> float:
        own = params.repetition_penalty
        return self.repetition_penalty if own is None else own

    def _draw(
        self,
        logits: torch.Tensor,
        rows: list[int],
        requests: list[Request],
        tokens: torch.Tensor,
        errors: dict[int, str],
    ) -> None:
        """Put into `tokens` what these rows draw, into `errors` why they cannot."""
        touched = [i for i, request in enumerate(requests) if not self._untouched(request)]
        scores = logits[rows] if touched else _rows(logits, rows)
        for index in touched:
            self._adjust(scores[index], requests[index])
        chosen = scores.argmax(dim=-1)
        possible = scores.gather(1, chosen[:, None])[:, 0].isfinite().tolist()
        errors |= {
            row: "no token is left to draw: parameters of the request rule out every one"
            for row, able in zip(rows, possible, strict=True)
            if not able
        }
        random = [
            index
            for index, request in enumerate(requests)
            if possible[index] and not request.params.greedy
        ]
        if random:
            chosen[random] = _by_chance(_rows(scores, random), [requests[i] for i in random])
        tokens[rows] = chosen

    def _adjust(self, scores: torch.Tensor, request: Request) -> None:
        """Penalties, bias and mask of one request, on its `scores [vocab]`, in place."""
        params = request.params
        repetition = self._repetition(params)
        presence, frequency = params.presence_penalty, params.frequency_penalty
        if repetition != 1.0 or presence or frequency:
            found = np.unique(request.token_ids, return_counts=True)
            seen, counts = (torch.from_numpy(part).to(scores.device) for part in found)
            values = scores[seen]
            if repetition != 1.0:
                values = torch.where(values < 0, values * repetition, values / repetition)
            if presence or frequency:
                values -= presence + frequency * counts
            scores[seen] = values
        vocab = scores.shape[-1]
        bias = {i: value for i, value in params.logit_bias.items() if i < vocab}
        if bias:
            scores[list(bias)] += torch.tensor(list(bias.values()), device=scores.device)
        if request.num_output_tokens < params.min_tokens:
            scores[[i for i in self._ends(params) if i < vocab]] = -torch.inf

    def _ends(self, params: SamplingParams) -> set[int]:
        """The tokens that end a request with these parameters."""
        return {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}


def truncated_weights(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Unnormalised probabilities `[n, vocab]` after temperature, top-k, top-p and min-p.

    Each row of `scores [n, vocab]` has its params; each has a finite largest value, whose weight
    becomes 1. Tokens exactly as likely as the last one that top-k or top-p keeps are kept, too, so
    that the result does not depend on the order of a sort.
    """
    temperatures = [min(max(own.temperature, _COLDEST), _HOTTEST) for own in params]
    # From the largest one down: however small the temperature, nothing overflows.
    scaled = scores - scores.amax(dim=-1, keepdim=True)
    scaled /= _column(temperatures, scaled)
    vocab = scaled.shape[-1]
    limited = [row for row, own in enumerate(params) if 0 < own.top_k < vocab]
    if limited:
        floor = torch.full_like(scaled[:, :1], -torch.inf)
        floor[limited] = _kth_largest(_rows(scaled, limited), [params[i].top_k for i in limited])
        scaled.masked_fill_(scaled < floor, -torch.inf)
    weights = scaled.exp_()
    nucleus = [row for row, own in enumerate(params) if own.top_p < 1.0]
    if nucleus or any(own.min_p for own in params):
        floor = _column([own.min_p for own in params], weights)
        if nucleus:
            last = _nucleus_floor(_rows(weights, nucleus), [params[i].top_p for i in nucleus])
            floor[nucleus] = torch.maximum(floor[nucleus], last)
        weights.masked_fill_(weights < floor, 0.0)
    return weights


def derived_seed(seed: int, ordinal: int) -> int:
    """The seed of the `ordinal`-th request of an engine, for requests that bring none."""
    return _hash(seed, ordinal) & MAX_SEED


def sample_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th of the `n` samples of a request; the first has its own."""
    return _hash(seed, index, b"sample") & MAX_SEED if index else seed


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the `index`-th draw under a seed."""
    return (_hash(seed, index) >> 11) * 2.0**-53


def _hash(first: int, second: int, purpose: bytes = b"") -> int:
    data = struct.pack("<QQ", first, second)
    return int.from_bytes(blake2b(data, digest_size=8, person=purpose).digest(), "little")


def _by_chance(scores: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """`[n]` tokens: inverse transform over the vocabulary in its own order, sums in float64."""
    weights = truncated_weights(scores, [request.params for request in requests])
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    chances = [uniform(request.seed, request.num_output_tokens) for request in requests]
    # A chance is at most 1 - 2**-53, so rounding cannot lift a target to the last sum.
    targets = _column(chances, sums) * sums[:, -1:]
    return torch.searchsorted(sums, targets, right=True)[:, 0]


def _kth_largest(scores: torch.Tensor, ks: list[int]) -> torch.Tensor:
    """`[n, 1]`: of each row of `[n, vocab]` the k-th largest value, k a row."""
    indices = torch.tensor(ks, device=scores.device)[:, None] - 1
    return scores.topk(max(ks)).values.gather(1, indices)


def _nucleus_floor(weights: torch.Tensor, top_ps: list[float]) -> torch.Tensor:
    """`[n, 1]`: the smallest weight of each row among the likeliest that together reach top_p."""
    needed = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    needed *= _column(top_ps, needed)
    vocab = weights.shape[-1]
    largest = weights.topk(min(_NUCLEUS, vocab)).values
    sums = largest.cumsum(dim=-1, dtype=torch.float64)
    if largest.shape[-1] < vocab and not bool((sums[:, -1:] >= needed).all()):
        largest = weights.sort(descending=True).values
        sums = largest.cumsum(dim=-1, dtype=torch.float64)
    # A token stays when those before it have not reached top_p yet; the first always stays.
    last = (sums[:, :-1] < needed).sum(dim=-1, keepdim=True)
    return largest.gather(1, last)


def _top_logprobs(
    logits: torch.Tensor, mass: torch.Tensor, requests: Sequence[Request], errors: dict[int, str]
) -> list[list[tuple[int, float]]]:
    """For each row the likeliest tokens, as many as it asks for."""
    found: list[list[tuple[int, float]]] = [[] for _ in requests]
    wanted = {
        row: min(request.params.logprobs, logits.shape[-1])
        for row, request in enumerate(requests)
        if request.params.logprobs and row not in errors
    }
    if wanted:
        rows = list(wanted)
        values, ids = _rows(logits, rows).topk(max(wanted.values()))
        pairs = zip(ids.tolist(), (values - mass[rows, None]).tolist(), strict=True)
        for (row, count), (row_ids, row_values) in zip(wanted.items(), pairs, strict=True):
            likeliest = list(zip(row_ids, row_values, strict=True))[:count]
            # What is impossible has no log-probability that could be written down.
            found[row] = [(i, value) for i, value in likeliest if value > -math.inf]
    return found


def _unusable(mass: torch.Tensor) -> dict[int, str]:
    """By row, why it cannot be drawn from; `mass [n_S]` are the rows' logsumexp."""
    if bool(mass.isfinite().all()):
        return {}
    return {
        row: f"the model's logits are not finite ({_WRONG.get(value, 'NaN')}): an overflow in "
        f"this dtype, or damaged weights"
        for row, value in enumerate(mass.tolist())
        if not math.isfinite(value)
    }


_WRONG = {math.inf: "infinity", -math.inf: "every one is -infinity"}


def _chunks(rows: list[int], vocab: int) -> Iterator[list[int]]:
    size = max(1, _CHUNK // vocab)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows, in increasing order; no copy when it is all of them."""
    return values if len(rows) == len(values) else values[rows]


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """`[n, 1]` of the kind of another tensor."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
