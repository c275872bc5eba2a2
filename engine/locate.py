"""Where a model is: shipped, in a local directory or GGUF file, or on the hub. No torch, so that a
wrong name is told at once."""

from __future__ import annotations

import re
from pathlib import Path

from engine.config import EMBEDDED
from engine.errors import ModelUnavailable

EMBEDDED_PATH = Path(__file__).parent / "embedded" / "model"

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?")


def local_model(model: str) -> Path | None:
    """The directory or GGUF file of a model; None when the name is one for the hub.

    Raises:
        ModelUnavailable: it is neither a model directory, nor a GGUF file, nor a possible hub name.
    """
    if model == EMBEDDED:
        return EMBEDDED_PATH
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"{model} is not a Hugging Face model directory: it holds no config.json"
            )
        return path
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise ModelUnavailable(
            f"{model} is a file and not a .gguf; give the directory of the model"
        )
    if not _HUB_NAME.fullmatch(model):
        raise ModelUnavailable(
            f"there is no directory {model} (and a hub name looks like gpt2 or organisation/model)"
        )
    return None
