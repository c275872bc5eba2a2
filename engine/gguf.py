"""GGUF files: turned once into a Hugging Face directory, which is then loaded as any other.

transformers reads the file (its weights are dequantised then, since they run in torch). The
directory lies in the user's cache, under a name made of the file's path, size and time of
modification, so that another file in the same place is converted anew.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from platformdirs import user_cache_path
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.errors import ModelUnavailable, first_line

LAYOUT = "1"
"""Part of the name: changed when the directories of older versions must not be used."""


def unpacked(file: Path, say: Callable[[str], None], *, weights: bool) -> Path:
    """The Hugging Face directory of a GGUF file, made now unless it was made before.

    Args:
        file: the GGUF file.
        say: told what is being done, when it may take a while.
        weights: False = the configuration and the tokenizer are enough.

    Raises:
        ModelUnavailable: packages are missing, or the file cannot be read or its copy written.
    """
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelUnavailable(
            f"reading {file} needs the package {missing[0]}: pip install 'cbviz[gguf]'"
        )
    try:
        folder = user_cache_path("cbviz") / "gguf"
        whole = folder / _name(file)
        if whole.is_dir():
            return whole
        target = whole if weights else folder / f"{whole.name}-config"
        if target.is_dir():
            return target
        say(f"unpacking {file.name}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as scratch:
            made = Path(scratch) / "model"
            _convert(file, made, weights=weights)
            _put(made, target)
        return target
    except Exception as error:
        line = first_line(error, 200)
        raise ModelUnavailable(f"cannot read the GGUF file {file}: {line}") from error


def _name(file: Path) -> str:
    status = file.stat()
    key = f"{LAYOUT}\0{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _convert(file: Path, target: Path, *, weights: bool) -> None:
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(target)
    if not weights:
        AutoConfig.from_pretrained(file.parent, **source).save_pretrained(target)
        return
    packed = getattr(transformers, "GgufConfig", None)
    if packed is not None:
        # Newer versions may keep the quantised blocks and compute on them.
        source["quantization_config"] = packed(dequantize=True)
    dtype = _stored_dtype(file)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **source)
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    free = shutil.disk_usage(target).free
    if needed > free:
        raise OSError(f"unpacked it takes {needed} bytes on disk and {free} are free")
    _ordinary(model, dtype).save_pretrained(target)


def _ordinary(model: Any, dtype: torch.dtype) -> Any:
    """The same weights in a model that does not know where they come from.

    transformers refuses to save a model that it read from a GGUF file, dequantised or not.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config, dtype=dtype)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh


def _stored_dtype(file: Path) -> torch.dtype:
    """Wide enough for what the file holds: quantised weights have fewer bits than float16."""
    from gguf import GGMLQuantizationType, GGUFReader

    types = {t.tensor_type for t in GGUFReader(file).tensors if len(t.shape) > 1}
    if GGMLQuantizationType.F32 in types:
        return torch.float32
    return torch.bfloat16 if GGMLQuantizationType.BF16 in types else torch.float16


def _put(made: Path, target: Path) -> None:
    """In one stroke; whoever comes second uses what the first has put there."""
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise
