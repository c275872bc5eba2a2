"""What this machine and a model would make of each other, without loading any weights."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import msgspec
import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.attention.interface import choose, triton_trouble
from engine.config import EngineConfig
from engine.errors import ModelUnavailable, first_line
from engine.memory import MemoryPlan, free_memory, plan_memory
from engine.model import (
    check_supported,
    context_limit,
    describe,
    pick_device,
    pick_dtype,
    read_config,
    resolve,
)
from engine.record import ModelFacts
from engine.version import __version__


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `cbviz info`."""

    versions: dict[str, str]
    device: str
    device_name: str
    dtype: str
    attention: dict[str, str]
    """Each implementation, and whether it can be used here."""
    model: ModelFacts
    memory: MemoryPlan


def gather(config: EngineConfig) -> Info:
    """Read the model's configuration, not its weights, and plan memory for it.

    Raises:
        ModelUnavailable, InvalidInput: as `Engine` would.
    """
    path = resolve(config, _quiet, weights=False)
    hf_config = read_config(config, path)
    check_supported(hf_config, config.model)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device, hf_config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    except Exception as error:
        raise ModelUnavailable(f"cannot size {config.model}: {first_line(error)}") from error
    facts = describe(config, model, hf_config)
    # Nothing is loaded yet: what the weights will take is not free any more then.
    free = max(0, free_memory(device) - facts.weight_bytes)
    return Info(
        versions=_versions(),
        device=device.type,
        device_name=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=_attention(device),
        model=facts,
        memory=plan_memory(config, facts, device.type, context_limit(config, hf_config), free),
    )


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's architecture and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} thread{'' if threads == 1 else 's'}"


def _attention(device: torch.device) -> dict[str, str]:
    usable = dict.fromkeys(("dense", "paged", "triton"), "available")
    trouble = triton_trouble(device)
    if trouble:
        usable["triton"] = f"not available: {trouble}"
    usable[choose("auto", device)] += " (the default)"
    return usable


def _versions() -> dict[str, str]:
    versions = {
        "cbviz": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    for name in ("textual", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _quiet(name: str, detail: str, done: int, total: int) -> None:
    """Stages are not worth a line here."""
