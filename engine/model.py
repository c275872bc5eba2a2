"""Finding, downloading, loading and vetting a decoder-only transformers model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from engine.attention.cpu.kernel import problem
from engine.attention.interface import register, transformers_name
from engine.config import EngineConfig
from engine.errors import ModelUnavailable, first_line
from engine.gguf import unpacked
from engine.hub import download
from engine.linear import pack_linears
from engine.locate import local_model
from engine.record import ModelFacts
from engine.request import MAX_PENALTY, MIN_PENALTY

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
StageReport = Callable[[str, str, int, int], None]
"""Called with stage name, detail, done, total while loading."""

_STANDARD_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run packed batches, and what goes with it."""

    model: Any
    tokenizer: Any
    facts: ModelFacts
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    eos_token_ids: frozenset[int]
    repetition_penalty: float = 1.0
    """The model's own, for requests that bring none; 1 = none."""


def load(config: EngineConfig, attention: str, report: StageReport) -> LoadedModel:
    """Load a model and switch its attention to ours.

    Raises:
        ModelUnavailable: it cannot be found, downloaded, read, or run here; one line says why.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    path = resolve(config, report)
    hf_config = read_config(config, path)
    check_supported(hf_config, config.model)
    max_model_len = context_limit(config, hf_config)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device, hf_config)
    tokenizer = _read_tokenizer(config, path)
    report("weights", f"{_short(config.model)} as {_dtype_name(dtype)}", 0, 0)
    model = _read_weights(config, path, dtype, device)
    register(attention, split_keys=config.split_keys)
    model.set_attn_implementation(transformers_name(attention))
    facts = describe(config, model, hf_config)
    _prepare_for_cpu(model, attention, facts, report)
    return LoadedModel(
        model, tokenizer, facts, device, dtype, max_model_len, _eos_ids(model, tokenizer),
        _repetition_penalty(model, config.model),
    )  # fmt: skip


def _prepare_for_cpu(model: Any, attention: str, facts: ModelFacts, report: StageReport) -> None:
    """Build what makes float32 on CPU fast, and say so where it cannot be had.

    Parameters that are replaced are gone from the model afterwards: `facts` come first.
    """
    if model.device.type != "cpu" or model.dtype is not torch.float32:
        return
    obstacle = problem() if attention == "paged" else None
    if obstacle:
        report("weights", f"attention with torch's own operators: {obstacle}", 0, 0)
    pack_linears(model)


def resolve(config: EngineConfig, report: StageReport, *, weights: bool = True) -> Path:
    """The directory that holds the model (without its weights, if so wished); a hub name is
    downloaded first, a GGUF file unpacked.

    Raises:
        ModelUnavailable: there is no such directory, the file cannot be read, or the hub cannot
            give it.
    """
    path = local_model(config.model)
    if path is not None and path.is_file():
        return unpacked(path, lambda detail: report("weights", detail, 0, 0), weights=weights)
    if path is not None:
        return path
    return download(
        config.model,
        config.revision,
        lambda detail, n, of: report("download", detail, n, of),
        weights=weights,
    )


def check_supported(hf_config: Any, name: str) -> None:
    """Refuse what cannot work, before any weights are read.

    Raises:
        ModelUnavailable: the architecture is not a decoder with ordinary attention.
    """
    kind = hf_config.model_type
    if hf_config.is_encoder_decoder:
        raise ModelUnavailable(
            f"{name} is an encoder-decoder model ({kind}); cbviz runs decoder-only models"
        )
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(hf_config)]
    except KeyError:
        raise ModelUnavailable(
            f"{name} ({kind}) is not a text-generation model; cbviz runs decoder-only models"
        ) from None
    if isinstance(model_class, tuple | list):
        model_class = model_class[0]
    text = hf_config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or [])
    if layers - _STANDARD_LAYERS or getattr(model_class, "_is_stateful", False):
        odd = ", ".join(sorted(layers - _STANDARD_LAYERS)) or "state-space"
        raise ModelUnavailable(f"{name} ({kind}) has {odd} layers, which have no paged KV cache")
    try:
        beyond = _beyond_attention(text)
    except Exception as error:
        # A configuration that refuses to name one number for all layers.
        line = first_line(error, 120)
        raise ModelUnavailable(f"{name} ({kind}) has layers of different shapes: {line}") from error
    if beyond:
        raise ModelUnavailable(f"{name} ({kind}) has {beyond}, which cbviz does not compute")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelUnavailable(
            f"{name} ({kind}) does not let its attention be replaced (transformers' attention "
            f"interface), so it cannot run on a paged cache"
        )


def _beyond_attention(text: Any) -> str:
    """What its attention has beyond scale, causal mask, window and soft-cap; empty = nothing.

    Only what a configuration tells: the rest is refused when the first batch shows it.
    """
    for same in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        getattr(text, same, None)
    if text.model_type in ("bloom", "mpt") or getattr(text, "alibi", False):
        return "position biases in its attention (ALiBi)"
    if text.model_type == "gpt_oss":
        return "attention sinks"
    if getattr(text, "kv_lora_rank", None):
        return "compressed keys and values (multi-head latent attention)"
    if getattr(text, "num_kv_shared_layers", 0):
        return "layers that share their keys and values"
    if getattr(text, "use_bidirectional_attention", False) is True:
        return "attention to later tokens"
    return ""


def pick_device(wanted: str) -> torch.device:
    """`auto` = CUDA where there is one.

    Raises:
        ModelUnavailable: CUDA was asked for and is not there.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelUnavailable("this torch sees no CUDA device; use --device cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def pick_dtype(wanted: str, device: torch.device, hf_config: Any) -> torch.dtype:
    """`auto` = float32 on CPU, what the checkpoint holds on CUDA."""
    if wanted != "auto":
        return DTYPES[wanted]
    own: torch.dtype | None = getattr(hf_config, "dtype", None)
    if device.type == "cuda" and own is not None and own in DTYPES.values():
        return own
    return torch.float32


def read_config(config: EngineConfig, path: Path) -> Any:
    """The model's transformers configuration.

    Raises:
        ModelUnavailable: it is missing, damaged or of an unknown kind.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        raise _unreadable("config", config, error) from error


def _read_tokenizer(config: EngineConfig, path: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        raise _unreadable("tokenizer", config, error) from error


def _read_weights(
    config: EngineConfig, path: Path, dtype: torch.dtype, device: torch.device
) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
        return model.to(device).eval().requires_grad_(False)
    except (Exception, MemoryError) as error:
        raise _unreadable("weights", config, error) from error


def context_limit(config: EngineConfig, hf_config: Any) -> int:
    """Tokens of a request at most: the model's context, or the smaller limit asked for."""
    text = hf_config.get_text_config()
    context = int(getattr(text, "max_position_embeddings", 0) or 2048)
    limit = config.max_model_len or context
    if limit > context:
        raise ModelUnavailable(
            f"--max-model-len {limit} is more than the context of {config.model}, {context}"
        )
    original = _longrope_limit(text)
    if original and limit > original:
        if config.max_model_len:
            raise ModelUnavailable(
                f"{config.model} turns positions otherwise beyond {original} tokens (longrope), "
                f"for a whole batch at once: give --max-model-len {original} or less"
            )
        limit = original
    return limit


def _longrope_limit(text: Any) -> int:
    """Tokens up to which a longrope model turns positions one way; 0 = no such model.

    transformers picks the factors by the largest position in the whole batch, so a long request
    would change the tokens of the short ones beside it.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return 0
    own = getattr(text, "original_max_position_embeddings", None)
    return int(rope.get("original_max_position_embeddings") or own or 0)


def describe(config: EngineConfig, model: Any, hf_config: Any) -> ModelFacts:
    """The facts of a model, whose weights need not be there."""
    text = hf_config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if getattr(text, "multi_query", False):
        kv_heads = 1
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    layers = int(text.num_hidden_layers)
    parameters = list(model.parameters())
    size = parameters[0].element_size()
    return ModelFacts(
        name=_short(config.model),
        architecture=type(model).__name__,
        num_parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(text.vocab_size),
        context=int(getattr(text, "max_position_embeddings", 0) or 2048),
        bytes_per_token=2 * layers * kv_heads * head_dim * size,
    )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End tokens as `generate()` knows them; the tokenizer's where the model names none."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _repetition_penalty(model: Any, name: str) -> float:
    """What `generate()` would apply, from the generation config.

    Raises:
        ModelUnavailable: it is no penalty.
    """
    penalty = model.generation_config.repetition_penalty
    if penalty is None:
        return 1.0
    if not isinstance(penalty, int | float) or not MIN_PENALTY <= penalty <= MAX_PENALTY:
        raise ModelUnavailable(
            f"the generation config of {name} has a repetition_penalty of {penalty!r}; it must "
            f"lie between {MIN_PENALTY} and {MAX_PENALTY}"
        )
    return float(penalty)


def _short(model: str) -> str:
    """A name for a title: the last part of a path, a hub name as it is."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() and os.sep in model else model


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unreadable(part: str, config: EngineConfig, error: BaseException) -> ModelUnavailable:
    return ModelUnavailable(f"cannot read the {part} of {config.model}: {first_line(error)}")
