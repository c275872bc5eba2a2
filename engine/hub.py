"""Fetching a model from the Hugging Face hub, by the hub's own conventions.

`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` are honoured because `huggingface_hub`
does the work. Only what transformers needs is fetched: configuration, tokenizer and safetensors
(or, where a repository has none, PyTorch's own format).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from engine.errors import ModelUnavailable

SIDE_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]
Progress = Callable[[str, int, int], None]
"""Called with what is being fetched, bytes done, bytes in all."""


def download(name: str, revision: str | None, progress: Progress, *, weights: bool) -> Path:
    """The local snapshot of a hub model, fetched as far as it is not cached.

    Raises:
        ModelUnavailable: the hub does not have it, does not give it, or cannot be reached.
    """
    progress(name, 0, 0)
    try:
        path = _snapshot(
            name, revision, [*SIDE_FILES, *(["*.safetensors"] if weights else [])], progress
        )
        if weights and not any(path.glob("*.safetensors")):
            path = _snapshot(name, revision, [*SIDE_FILES, "*.bin"], progress)
        return path
    except Exception as error:
        raise ModelUnavailable(_explain(name, revision, error)) from error


def _snapshot(name: str, revision: str | None, patterns: list[str], progress: Progress) -> Path:
    return Path(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            tqdm_class=_reporting_bar(progress),
        )
    )


def _reporting_bar(progress: Progress) -> Any:
    """A tqdm class that draws nothing and reports bytes."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["file"] = open(os.devnull, "w")  # noqa: SIM115 (closed with the process)
            kwargs["disable"] = False
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                progress(str(self.desc or "").strip(" :"), int(self.n), int(self.total))
            return shown

    return Bar


def _explain(name: str, revision: str | None, error: BaseException) -> str:
    """One line for each way in which a download fails."""
    if isinstance(error, GatedRepoError):
        return f"{name} is gated: ask for access on the hub, then set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no model {name} (or it is private: set HF_TOKEN)"
    if isinstance(error, OfflineModeIsEnabled) or os.environ.get("HF_HUB_OFFLINE", "0") not in (
        "", "0",
    ):  # fmt: skip
        return f"{name} is not in the local cache, and HF_HUB_OFFLINE forbids fetching it"
    if isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError):
        return f"{name} is not in the local cache and the hub cannot be reached"
    if isinstance(error, HfHubHTTPError):
        return f"the hub refused {name}: {str(error).splitlines()[0][:200]}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot store {name}: {error.strerror}"
    if type(error).__module__.startswith(("httpx", "httpcore")):
        return f"{name} is not in the local cache and the hub cannot be reached"
    return f"cannot fetch {name}: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
