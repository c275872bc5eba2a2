"""The engine: a model, its paged cache, and the core that steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import torch

from engine.attention.interface import choose
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.core import Completion, EngineCore
from engine.detokenizer import TokenizerText
from engine.errors import InvalidInput
from engine.info import device_name
from engine.knobs import Knob
from engine.memory import format_bytes, free_memory, plan_memory
from engine.model import StageReport, load, pick_device
from engine.record import Event, RunHeader, StepRecord
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.sampler import derived_seed, sample_seed
from engine.scheduler import POLICY, CacheStats, Scheduler
from engine.version import __version__

LARGEST_GRAPH = 256
"""Decodes in a step beyond which launching kernels one by one costs little beside running them."""


class Engine:
    """A continuous-batching engine over one model.

    Args:
        config: every knob; the default runs the embedded model.
        report: told about the stages of loading.

    Raises:
        ModelUnavailable: the model cannot be loaded or run.
        InvalidInput: the settings do not fit the model or the machine.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, report: StageReport | None = None
    ) -> None:
        self.config = config or EngineConfig()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        report = report or _silent
        self.attention = choose(self.config.attention, pick_device(self.config.device))
        self.loaded = load(self.config, self.attention, report)
        device = self.loaded.device
        self.memory = plan_memory(
            self.config,
            self.loaded.facts,
            device.type,
            self.loaded.max_model_len,
            free_memory(device),
        )
        size = format_bytes(self.memory.pool_bytes)
        report(
            "memory plan", f"{self.memory.num_blocks} blocks of {self.memory.block_size}: {size}",
            0, 0,
        )  # fmt: skip
        graphs = self.config.cuda_graphs and self.attention == "triton" and device.type == "cuda"
        self.runner = ModelRunner(
            self.loaded,
            self.memory.num_blocks,
            self.memory.block_size,
            graphed=min(self.memory.max_num_seqs, LARGEST_GRAPH) if graphs else 0,
        )
        windows = self.runner.verify()
        facts = msgspec.structs.replace(self.loaded.facts, windows=windows)
        self.loaded = replace(self.loaded, facts=facts)
        self.core = EngineCore(
            self._new_scheduler(),
            self.runner,
            TokenizerText(self.loaded.tokenizer),
            check=self.config.check,
        )
        self.header = self._header()
        self._num_given = 0

    def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt, as text or as token ids; returns the id of the request.

        With `n` samples, that of the first of them; the others are requests of their own, named
        `A.2`, `A.3`, … after an `A` (see `sample_ids`).

        Raises:
            RequestRefused: it can never run; the message holds the arithmetic.
            InvalidInput: the id is in use, or a token id is not in the vocabulary.
        """
        params = params or SamplingParams()
        self._check_vocabulary(params)
        if isinstance(prompt, str):
            prompt = _without_surrogates(prompt)
        token_ids = self._encode(prompt)
        text = prompt if isinstance(prompt, str) else self.loaded.tokenizer.decode(prompt)
        seed = params.seed
        if seed is None:
            seed = derived_seed(self.config.seed, self._num_given)
        request_id = self._next_id() if request_id is None else _without_surrogates(request_id)
        names = sample_ids(request_id, params.n)
        for name in names:
            if self.core.is_live(name):
                raise InvalidInput(f"request id {name!r} is in use by a live request")
        self._num_given += 1
        first: Request | None = None
        for index, name in enumerate(names):
            request = Request(name, text, token_ids, params, sample_seed(seed, index), first)
            self.core.add(request)
            first = first or request
        return request_id

    def cancel(self, request_id: str) -> bool:
        """Take a request out, whatever its state; False when no live request has this id."""
        return self.core.cancel(request_id)

    def set_knob(self, name: str, value: Knob) -> None:
        """Change a setting (`engine.knobs.Knobs`) from the next step on.

        Raises:
            InvalidInput: there is no such knob, or the value is not for it.
        """
        self.core.set_knob(name, value)

    def reset_prefix_cache(self, *, force: bool = False) -> None:
        """Make the prefix cache forget everything computed so far.

        With `force`, running requests keep their blocks, and never share them any more.

        Raises:
            InvalidInput: running requests hold cached blocks, and it is not forced.
        """
        self.core.reset_prefix_cache(force=force)

    @property
    def has_work(self) -> bool:
        """Some request is waiting or running."""
        return self.core.has_work

    @property
    def next_step(self) -> int:
        """The number that the next step will have."""
        return self.core.step_number

    @property
    def cache_stats(self) -> CacheStats:
        """What the prefix cache did and what preemption cost so far."""
        return self.core.scheduler.stats

    @property
    def pending_events(self) -> list[Event]:
        """What happened since the last step; the next record will hold it."""
        return self.core.pending_events

    def pending_since(self, first: int) -> list[Event]:
        """`pending_events[first:]`, without copying the rest."""
        return self.core.pending_since(first)

    def step(self) -> StepRecord:
        """Run one step. Without work, the record holds only what happened since the last one.

        Raises:
            StepFailed: the forward pass or the sampling raised. Nothing of the step has happened;
                it may be tried again, with other settings.
        """
        return self.core.step()

    def flush(self) -> StepRecord:
        """A record of what happened since the last step, without running anything."""
        return self.core.flush()

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Run prompts to their end, with whatever else the engine has to do.

        Results in the order of the prompts; with `n` samples, all those of a prompt together.

        Raises:
            RequestRefused: a prompt can never run; none of them is then.
            InvalidInput: the number of params is not that of the prompts.
            StepFailed: a step could not be executed.
        """
        each = _for_each(params, len(prompts))
        added: list[str] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                added += sample_ids(self.add_request(prompt, own), own.n)
            self.core.want_completions(added)
            while not all(map(self.core.has_completion, added)):
                self.step()
        except BaseException:
            # Nobody will fetch what the others say: take them out.
            for request_id in added:
                self.cancel(request_id)
                self.core.take_completion(request_id)
            raise
        found = map(self.core.take_completion, added)
        return [completion for completion in found if completion is not None]

    # -- helpers ---------------------------------------------------------------------------

    def _encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids; no text is no tokens, whatever a tokenizer would put before it."""
        if isinstance(prompt, str):
            return list(self.loaded.tokenizer(prompt)["input_ids"]) if prompt else []
        vocab = self.loaded.facts.vocab_size
        for token_id in prompt:
            if not isinstance(token_id, int):
                raise InvalidInput(f"a prompt is text or a list of token ids, not of {token_id!r}")
            if not 0 <= token_id < vocab:
                raise InvalidInput(f"token id {token_id} is not in the vocabulary of {vocab}")
        return list(prompt)

    def _check_vocabulary(self, params: SamplingParams) -> None:
        """Token ids among the parameters name tokens of this model."""
        vocab = self.loaded.facts.vocab_size
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token_id in token_ids:
                if token_id >= vocab:
                    raise InvalidInput(
                        f"{name}: token id {token_id} is not in the vocabulary of {vocab}"
                    )

    def _next_id(self) -> str:
        """`A`, `B`, … `Z`, `AA`, …: short enough to be read in a grid."""
        ordinal = self._num_given
        while self.core.is_live(letters(ordinal)):
            ordinal += 1
        return letters(ordinal)

    def _new_scheduler(self) -> Scheduler:
        plan = self.memory
        return Scheduler(
            BlockPool(plan.num_blocks, plan.block_size),
            self.config.knobs(plan.token_budget, plan.max_num_seqs),
            max_model_len=plan.max_model_len,
            eos_token_ids=self.loaded.eos_token_ids,
        )

    def _header(self) -> RunHeader:
        plan = self.memory
        return RunHeader(
            version=__version__,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            model=self.loaded.facts,
            device=self.loaded.device.type,
            device_name=device_name(self.loaded.device),
            dtype=str(self.loaded.dtype).removeprefix("torch."),
            attention=self.attention,  # type: ignore[arg-type]
            policy=POLICY,
            knobs=self.core.scheduler.knobs,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            seed=self.config.seed,
        )


def sample_ids(request_id: str, n: int) -> list[str]:
    """Ids of the `n` samples of a prompt: `A`, `A.2`, `A.3`, …"""
    return [request_id, *(f"{request_id}.{index}" for index in range(2, n + 1))]


def _without_surrogates(text: str) -> str:
    """Halves of surrogate pairs can be neither tokenized nor sent: they become U+FFFD."""
    return text.encode("utf-8", "replace").decode("utf-8")


def letters(ordinal: int) -> str:
    """0 to `A`, 25 to `Z`, 26 to `AA`, as columns of a spreadsheet."""
    text = ""
    ordinal += 1
    while ordinal:
        ordinal, digit = divmod(ordinal - 1, 26)
        text = chr(ord("A") + digit) + text
    return text


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidInput(f"{len(params)} sampling params for {count} prompts")
    return list(params)


def _silent(name: str, detail: str, done: int, total: int) -> None:
    """No one wants to know."""


__all__ = ["Completion", "Engine", "letters"]
