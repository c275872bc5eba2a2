"""The engine on a CUDA card: is it right, and how far is it from what the card allows?

    python -m engine.bench.cuda [--out DIRECTORY]

First, greedy tokens in float32 against transformers on the CPU, one request at a time. Then
tokens a second in bfloat16, against transformers' own continuous batching and against the floor:
the time in which the card can read the weights once a step and the keys and values that are
attended to. Everything is written to `<card>.json`; the exit status is 1 when tokens differ.

Runs on a CPU too, with small sizes, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from engine import Engine, EngineConfig, SamplingParams
from engine.bench.floor import bytes_read
from engine.bench.random_models import FAMILIES, LLAMA_1B, SMALL, save_random
from engine.config import EMBEDDED
from engine.errors import first_line
from engine.info import device_name
from engine.locate import local_model
from engine.model import pick_device

Json = dict[str, Any]
DIFFERENT_WAYS: list[Json] = [
    {},
    {"token_budget": 37},
    {"cuda_graphs": False},
    {"split_keys": False, "block_size": 7},
    {"attention": "paged"},
]
"""Settings that must not change a token."""


def main() -> int:
    """Check, measure, write; 1 when tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m engine.bench.cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    out: Path = parser.parse_args().out
    device = pick_device("auto")
    result: Json = {
        "card": device_name(device),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    with tempfile.TemporaryDirectory() as scratch:
        result["parity"] = check_parity(Path(scratch))
        result["speed"] = measure(Path(scratch), device)
    out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", result["card"].lower()).strip("-")
    (out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 1 if any(case["different"] for case in result["parity"]) else 0


# -- parity ------------------------------------------------------------------------------------


def check_parity(scratch: Path) -> list[Json]:
    """For every model and way to run it, how many of its requests said something different."""
    cases = []
    for model in (EMBEDDED, *FAMILIES):
        path = model
        if model != EMBEDDED:
            path = str(scratch / model)
            save_random(Path(path), model, FAMILIES[model], torch.float32, torch.device("cpu"))
        prompts = _prompts(8, 1, 200, vocab=2048)
        expected = [_alone(path, prompt, 24) for prompt in prompts]
        for way in DIFFERENT_WAYS:
            settings: Json = {"dtype": "float32", "num_blocks": 2000, "max_num_seqs": 5} | way
            engine = Engine(EngineConfig(model=path, **settings))
            done = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
            different = sum(d.token_ids != e for d, e in zip(done, expected, strict=True))
            cases.append(
                {"model": model, "attention": engine.attention, **way, "different": different}
                | {"requests": len(prompts)}
            )
    return cases


def _alone(path: str, prompt: list[int], tokens: int) -> list[int]:
    """What transformers says on the CPU in float32."""
    model = AutoModelForCausalLM.from_pretrained(local_model(path), dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=None,
    )  # fmt: skip
    return [int(token) for token in output[0, len(prompt) :]]


def _prompts(count: int, shortest: int, longest: int, vocab: int) -> list[list[int]]:
    rng = random.Random(count)
    return [
        [rng.randrange(1, vocab) for _ in range(rng.randint(shortest, longest))]
        for _ in range(count)
    ]


# -- speed -------------------------------------------------------------------------------------


def measure(scratch: Path, device: torch.device) -> Json:
    """Throughput of ours and of transformers, and the floor of a decode step."""
    cuda = device.type == "cuda"
    path, dtype = scratch / "measured", torch.bfloat16 if cuda else torch.float32
    save_random(path, "llama", LLAMA_1B if cuda else SMALL, dtype, device)
    # Prompts of one length, so that the last steps decode all requests together.
    requests, length, tokens = (64, 512, 256) if cuda else (4, 20, 8)
    prompts = _prompts(requests, length, length, vocab=2048)
    bandwidth = copy_bandwidth(device, 2**31 if cuda else 2**26)
    ours = measure_engine(str(path), prompts, tokens, bandwidth, {})
    runs = {"graphs": ours}
    if cuda:
        runs["no graphs"] = measure_engine(
            str(path), prompts, tokens, bandwidth, {"cuda_graphs": False}
        )
    return {
        "requests": requests, "prompt_tokens": length, "output_tokens": tokens,
        "copy_bandwidth_bytes_per_s": bandwidth, "engine": runs,
        "transformers": measure_transformers(path, prompts, tokens, dtype, device),
    }  # fmt: skip


def measure_engine(
    path: str, prompts: list[list[int]], tokens: int, bandwidth: float, way: Json
) -> Json:
    """Tokens a second, and the median step that decodes every request against its floor."""
    _free_what_is_unused()
    count = len(prompts)
    most = count * (len(prompts[0]) + tokens)
    engine = Engine(
        EngineConfig(
            model=path, max_num_seqs=count, token_budget=2048, num_blocks=most // 16 + count,
            prefix_caching=False, **way,
        )
    )  # fmt: skip
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    for prompt in prompts:
        engine.add_request(prompt, params)
    decodes: list[tuple[float, int]] = []
    with _seconds(engine.loaded.device) as elapsed:
        while engine.has_work:
            began = time.perf_counter()
            record = engine.step()
            if len(record.segments) == count == len(record.token_ids):
                keys = sum(s.context + 1 for s in record.segments)
                decodes.append((time.perf_counter() - began, keys))
    took, keys = sorted(decodes)[len(decodes) // 2]
    floor = bytes_read(engine.loaded.facts, keys) / bandwidth
    return {
        "attention": engine.attention,
        "output_tokens_per_s": count * tokens / elapsed(),
        "decode_step_s": took,
        "decode_floor_s": floor,
        "of_floor": floor / took,
    }


def measure_transformers(
    path: Path, prompts: list[list[int]], tokens: int, dtype: torch.dtype, device: torch.device
) -> Json:
    """Tokens a second of transformers' continuous batching; why not, where it cannot run."""
    _free_what_is_unused()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        # Twice with one manager, so that its cache and its graphs are there the second time.
        model.generate_batch(prompts, generation_config=settings, persistent_manager=True)
        with _seconds(device) as elapsed:
            found = model.generate_batch(
                prompts, generation_config=settings, persistent_manager=True
            )
        total = sum(len(output.generated_tokens) for output in found.values())
        return {"output_tokens_per_s": total / elapsed(), "output_tokens": total}
    except Exception as error:
        return {"error": first_line(error)}


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second, read and written, of copying `size` bytes within the device's memory."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    rounds = 10
    with _seconds(device) as elapsed:
        for _ in range(rounds):
            target.copy_(source)
    return 2 * size * rounds / elapsed()


@contextmanager
def _seconds(device: torch.device) -> Iterator[Callable[[], float]]:
    """How long the block took on the device, to be asked for after it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    wait()
    began = time.perf_counter()
    ended: list[float] = []
    yield lambda: ended[0] - began
    wait()
    ended.append(time.perf_counter())


def _free_what_is_unused() -> None:
    """The engine measured before holds most of the card until it is collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _nothing() -> None:
    """A CPU has done what it was told."""


if __name__ == "__main__":
    sys.exit(main())
