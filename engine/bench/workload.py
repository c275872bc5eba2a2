"""A whole workload: 32 requests of mixed lengths, ours and transformers' in turn."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec

from engine.bench.peers import Job, TransformersBatching
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import SamplingParams

REQUESTS = 32
PROMPTS = (8, 256)
OUTPUTS = (8, 128)
SEED = 1234
"""3,817 prompt and 2,101 output tokens."""
TOKEN_BUDGET = 512
NUM_BLOCKS = 1024


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One shape. Times in s; rates in output tokens/s of the fastest round; `ratios`: theirs to
    ours, round by round; `same`: requests with the same tokens on both sides."""

    shape: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    ours_s: list[float]
    theirs_s: list[float]
    ours_tok_per_s: float
    theirs_tok_per_s: float | None
    ratios: list[float]
    same: int | None


def jobs(vocab_size: int) -> list[Job]:
    """The requests, the same every time."""
    rng = random.Random(SEED)
    prompts = [rng.randint(*PROMPTS) for _ in range(REQUESTS)]
    outputs = [rng.randint(*OUTPUTS) for _ in range(REQUESTS)]
    return [
        ([rng.randrange(1, vocab_size) for _ in range(prompt)], output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def measure(path: Path, rounds: int, peers: bool) -> Result:
    """Ours and theirs in turn, so that what else runs on the machine meets both."""
    engine = Engine(
        EngineConfig(
            model=str(path), token_budget=TOKEN_BUDGET, max_num_seqs=REQUESTS,
            # Every round computes every token.
            num_blocks=NUM_BLOCKS, prefix_caching=False,
        )
    )  # fmt: skip
    theirs = TransformersBatching(path) if peers else None
    given = jobs(engine.loaded.facts.vocab_size)
    _ours(engine, [(prompt, 2) for prompt, _ in given[:4]])
    ours_s, theirs_s, same = [], [], None
    for _ in range(rounds):
        seconds, tokens = _ours(engine, given)
        ours_s.append(seconds)
        if theirs is not None:
            seconds, their_tokens, _ = theirs.run(given)
            theirs_s.append(seconds)
            same = sum(a == b for a, b in zip(tokens, their_tokens, strict=True))
    output = sum(length for _, length in given)
    return Result(
        shape=path.name,
        requests=len(given),
        prompt_tokens=sum(len(prompt) for prompt, _ in given),
        output_tokens=output,
        ours_s=ours_s,
        theirs_s=theirs_s,
        ours_tok_per_s=output / min(ours_s),
        theirs_tok_per_s=output / min(theirs_s) if theirs_s else None,
        ratios=[b / a for a, b in zip(ours_s, theirs_s, strict=False)],
        same=same,
    )


def _ours(engine: Engine, given: list[Job]) -> tuple[float, list[list[int]]]:
    started = time.perf_counter()
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for _, length in given]
    done = engine.generate([prompt for prompt, _ in given], params)
    return time.perf_counter() - started, [completion.token_ids for completion in done]
