"""Fetching a model from the Hugging Face hub, by the hub's own conventions.

`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` are honoured because `huggingface_hub`
does the work. Only what transformers needs is fetched: configuration, tokenizer and safetensors
(or, where a repository has none, PyTorch's own format).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging, tqdm

from engine.errors import ModelUnavailable, first_line

SIDE_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]
UNWANTED = ["*/*", "consolidated*"]
"""Other formats of the same weights, which transformers does not read."""
PATIENCE_S = (3.0, 10.0, 10.0, 10.0)
"""How long the hub may take to answer at all: connect (to each of its addresses), read, write and
wait for a free connection."""
Progress = Callable[[str, int, int], None]
"""Called with what is being fetched, bytes done, bytes in all."""


def download(name: str, revision: str | None, progress: Progress, *, weights: bool) -> Path:
    """The local snapshot of a hub model, fetched as far as it is not cached.

    Raises:
        ModelUnavailable: the hub does not have it, does not give it, or cannot be reached.
    """
    logging.set_verbosity_error()
    progress(name, 0, 0)
    try:
        local = not _reachable(name, revision)
        wanted = [*SIDE_FILES, *(["*.safetensors"] if weights else [])]
        path = _snapshot(name, revision, wanted, progress, local)
        if weights and not any(path.glob("*.safetensors")):
            wanted = [*SIDE_FILES, "pytorch_model*.bin"]
            path = _snapshot(name, revision, wanted, progress, local)
        return path
    except Exception as error:
        raise ModelUnavailable(_explain(name, revision, error)) from error


def _reachable(name: str, revision: str | None) -> bool:
    """Whether the hub answers, be it with a refusal.

    `snapshot_download` would ask with many retries or without a timeout, and so seem to hang.
    """
    if is_offline_mode():
        return False
    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE_S)
    except Exception as error:
        return isinstance(error, HfHubHTTPError) or not _of_the_network(error)
    return True


def _snapshot(
    name: str, revision: str | None, wanted: list[str], progress: Progress, local: bool
) -> Path:
    """Fetch in a thread of its own, so that Ctrl-C ends each file with its next bytes:
    `snapshot_download` by itself would first finish those it has begun."""
    stop = threading.Event()
    found: Future[str] = Future()

    def fetch() -> None:
        try:
            path = snapshot_download(
                name,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=UNWANTED,
                local_files_only=local,
                tqdm_class=_reporting_bar(name, progress, stop),
            )
            found.set_result(path)
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=fetch, name="download", daemon=True).start()
    try:
        return Path(found.result())
    finally:
        stop.set()


def _reporting_bar(model: str, progress: Progress, stop: threading.Event) -> Any:
    """A tqdm class that draws nothing and reports bytes, those of all files together."""
    lock = threading.Lock()

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            # There is a bar for what is stored, one for what comes over the network (which may be
            # less) and one for the number of files.
            self.reports = kwargs.get("unit") == "B" and not str(name).endswith(".transfer")

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise InterruptedError
            # A disabled bar does not count; several files are fetched by several threads.
            with lock:
                self.n += n or 0
                if self.reports and n and self.total:
                    progress(model, int(self.n), int(self.total))

    return Bar


def _explain(name: str, revision: str | None, error: BaseException) -> str:
    """One line for each way in which a download fails."""
    cause = error.__cause__
    if isinstance(error, LocalEntryNotFoundError):
        error = cause if isinstance(cause, HfHubHTTPError | FileMetadataError) else error
    if isinstance(error, GatedRepoError):
        return f"{name} is gated: ask for access on the hub, then set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no model {name} (or it is private: set HF_TOKEN)"
    if isinstance(error, FileMetadataError | json.JSONDecodeError):
        return f"cannot fetch {name}: what answers at {constants.ENDPOINT} is not a hub"
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
        return f"the hub does not accept the token it was given for {name} (HF_TOKEN)"
    if isinstance(error, HfHubHTTPError):
        return f"the hub refused {name}: {first_line(error, 200)}"
    if isinstance(error, LocalEntryNotFoundError):
        if is_offline_mode():
            return f"{name} is not in the local cache, and HF_HUB_OFFLINE forbids fetching it"
        return f"{name} is not in the local cache and {constants.ENDPOINT} cannot be reached"
    if _of_the_network(error):
        return f"the download of {name} broke off, run it again: {first_line(error, 200)}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot store {name}: {error.strerror}"
    return f"cannot fetch {name}: {first_line(error, 200)}"


def _of_the_network(error: BaseException) -> bool:
    return type(error).__module__.startswith(("httpx", "httpcore"))
