"""`cbviz run` and `cbviz info`: the engine in this process, no window, torch imported here."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from cbviz.sanitize import one_line, sanitize
from engine.config import EngineConfig
from engine.engine import Completion, Engine, sample_ids
from engine.errors import InvalidInput, StepFailed
from engine.explain import explain_step
from engine.info import Info, gather
from engine.memory import format_bytes
from engine.record import Preempted, SegmentKind, StepRecord
from engine.request import FinishReason, SamplingParams
from engine.trace import Recording
from engine.world import World


class Summary(msgspec.Struct, kw_only=True):
    """Totals of a run. Rates are tokens over the summed time of the steps, s.

    `requests`: samples of prompts, and prompts that were `refused`. `hit_tokens` of
    `queried_tokens` looked up came from the prefix cache, which lost `evictions` blocks;
    `recomputed_tokens` had been computed before a preemption.
    """

    requests: int = 0
    refused: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    queried_tokens: int = 0
    evictions: int = 0
    recomputed_tokens: int = 0
    step_time_s: float = 0.0
    wall_s: float = 0.0
    output_tok_per_s: float = 0.0
    peak_kv_blocks: int = 0
    kv_blocks: int = 0

    def count(self, record: StepRecord) -> None:
        """Take in one step."""
        self.steps += 1
        self.prefill_tokens += record.tokens_of(SegmentKind.PREFILL)
        self.decode_tokens += record.tokens_of(SegmentKind.DECODE)
        self.output_tokens += len(record.sampled)
        self.preemptions += sum(isinstance(e, Preempted) for e in record.events)
        self.step_time_s += record.phases.total
        self.peak_kv_blocks = max(self.peak_kv_blocks, record.blocks_used)


class _Run:
    """One headless run: an engine, an optional trace, running totals."""

    def __init__(self, config: EngineConfig, trace: Path | None, explain: bool) -> None:
        self.engine = Engine(config, report=_narrate_stage)
        self.recording = Recording(trace, self.engine.header, narrate)
        self.summary = Summary(kv_blocks=self.engine.memory.num_blocks)
        self.world = World(self.engine.header) if explain else None
        self.refusals: dict[int, str] = {}
        """By the place of the prompt, from 0."""
        self.failed = 0
        """Requests that ended with an error."""

    def step(self) -> None:
        """One step, recorded."""
        record = self.engine.step()
        self.summary.count(record)
        self.recording.write(record)
        if self.world is not None:
            self.world.apply(record)
            for request_id, words in explain_step(record, self.world):
                print(one_line(f"step {record.step:<5}{request_id:<4} {words}"), file=sys.stderr)

    def finish(self) -> None:
        """Close the trace."""
        pending = self.engine.pending_events
        self.recording.finish(self.engine.flush() if pending else None)


def run_prompts(
    config: EngineConfig,
    prompts: list[tuple[str, SamplingParams]],
    *,
    as_json: bool,
    trace: Path | None,
    explain: bool = False,
) -> int:
    """Run prompts to their end and print the results in the order of the prompts.

    `explain`: also a line a request a step on stderr that says what it did, or why it waited.

    Returns the exit code: 0, 1 when a step, a request or the trace failed, 2 when a prompt was
    refused, 130 when interrupted.
    """
    narrate("importing torch and transformers, loading the model …")
    run = _Run(config, trace, explain)
    narrate(describe(run.engine))
    started = time.perf_counter()
    added = [_add(run, number, *prompt) for number, prompt in enumerate(prompts)]
    run.engine.core.want_completions([name for names in added for name in names])
    code = _run_all(run)
    run.finish()
    summary = run.summary
    summary.wall_s = time.perf_counter() - started
    summary.requests = sum(max(1, len(names)) for names in added)
    if summary.step_time_s:
        summary.output_tok_per_s = summary.output_tokens / summary.step_time_s
    summary.refused = len(run.refusals)
    cache = run.engine.cache_stats
    summary.hit_tokens, summary.queried_tokens = cache.hit, cache.queried
    summary.evictions, summary.recomputed_tokens = cache.evictions, cache.recomputed
    for number, (names, (prompt, _)) in enumerate(zip(added, prompts, strict=True)):
        for name in names:
            _print_result(run, name, prompt, as_json)
        if number in run.refusals and as_json:
            error = run.refusals[number]
            _print_json({"request_id": None, "prompt": prompt, "error": error})
    if as_json:
        _print_json({"summary": msgspec.to_builtins(summary)})
    narrate(_summary_line(summary))
    if code == 0 and (summary.refused or run.failed or run.recording.lost):
        code = 2 if summary.refused else 1
    return code


def print_info(config: EngineConfig, *, as_json: bool) -> None:
    """Answer `cbviz info`."""
    found = gather(config)
    if as_json:
        _print_json(msgspec.to_builtins(found))
        return
    for label, value in _info_lines(found):
        print(f"{label:<12}{one_line(value)}")


def narrate(message: str) -> None:
    """One line on stderr."""
    print(f"cbviz: {one_line(message)}", file=sys.stderr, flush=True)


def describe(engine: Engine) -> str:
    """The engine in one line."""
    header, plan = engine.header, engine.memory
    return (
        f"{header.model.name} ({header.model.num_parameters / 1e6:.1f} M parameters) on "
        f"{header.device} {header.dtype}, {header.attention} attention, "
        f"{plan.num_blocks} blocks of {plan.block_size}, m = {header.knobs.token_budget}"
    )


def _add(run: _Run, number: int, prompt: str, params: SamplingParams) -> list[str]:
    """Queue a prompt; the ids of its samples, none if it was refused."""
    try:
        return sample_ids(run.engine.add_request(prompt, params), params.n)
    except InvalidInput as error:
        narrate(f"prompt {number + 1} refused: {error}")
        run.refusals[number] = str(error)
        return []


def _print_result(run: _Run, request_id: str, prompt: str, as_json: bool) -> None:
    """What a request said, or that it did not come to its end."""
    completion = run.engine.core.take_completion(request_id)
    if completion is not None and completion.finish_reason is FinishReason.ERROR:
        run.failed += 1
        narrate(f"request {request_id} ended with an error: {completion.error}")
    if as_json:
        _print_json(
            {"request_id": request_id, "prompt": prompt, "error": "not finished"}
            if completion is None
            else _without_unasked(completion)
        )
    elif completion is not None:
        _print_text(completion.text)


def _without_unasked(completion: Completion) -> dict[str, object]:
    """A completion for JSON: log-probabilities only if asked for, an error only if there is one."""
    fields: dict[str, object] = msgspec.structs.asdict(completion)
    for name in ("logprobs", "top_logprobs", "error"):
        if fields[name] in (None, ""):
            del fields[name]
    return fields


def _run_all(run: _Run) -> int:
    """Step until nothing is left; the exit code."""
    try:
        while run.engine.has_work:
            run.step()
    except KeyboardInterrupt:
        narrate(f"interrupted after {run.summary.steps} steps")
        return 130
    except StepFailed as error:
        narrate(str(error))
        return 1
    return 0


def _print_text(text: str) -> None:
    """Into a pipe as it is; into a terminal only what cannot steer it."""
    print("\n".join(map(sanitize, text.split("\n"))) if sys.stdout.isatty() else text)


def _print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def _summary_line(summary: Summary) -> str:
    cache = ""
    if summary.hit_tokens:
        cache = f", {summary.hit_tokens} of {summary.queried_tokens} prompt tokens cached"
    return (
        f"{summary.steps} steps, {summary.prefill_tokens} prefill and {summary.decode_tokens} "
        f"decode tokens, {summary.output_tokens} output tokens at "
        f"{summary.output_tok_per_s:.1f} tok/s, peak {summary.peak_kv_blocks} of "
        f"{summary.kv_blocks} KV blocks{cache}"
    )


def _narrate_stage(name: str, detail: str, done: int, total: int) -> None:
    if done == 0:
        narrate(f"{name}: {detail}")


def _info_lines(found: Info) -> list[tuple[str, str]]:
    model, plan = found.model, found.memory
    lines = [
        ("versions", " · ".join(f"{name} {value}" for name, value in found.versions.items())),
        ("device", f"{found.device} ({found.device_name}), {found.dtype}"),
        ("attention", " · ".join(f"{name}: {value}" for name, value in found.attention.items())),
        ("model", f"{model.name}: {model.architecture}, {model.num_parameters / 1e6:.1f} M "
                  f"parameters, {model.num_layers} layers, {model.num_heads} heads "
                  f"({model.num_kv_heads} for keys and values) of {model.head_dim}, "
                  f"context {model.context}"),
        ("weights", format_bytes(plan.weight_bytes)),
        ("KV cache", f"{format_bytes(plan.bytes_per_token)} a token, "
                     f"{format_bytes(plan.bytes_per_block)} a block of {plan.block_size}"),
        ("pool", f"{plan.num_blocks} blocks = {plan.num_blocks * plan.block_size} tokens = "
                 f"{format_bytes(plan.pool_bytes)}; {plan.fitting} would fit in the share of "
                 f"the {format_bytes(plan.free_bytes)} free that the pool may take"),
        ("defaults", f"token budget {plan.token_budget}, {plan.max_num_seqs} running requests, "
                     f"{plan.max_model_len} tokens a request"),
    ]  # fmt: skip
    return lines
