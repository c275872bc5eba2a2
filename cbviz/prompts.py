"""Reading a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import InvalidInput
from engine.request import SamplingParams

OWN_PARAMS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos")


class PromptLine(msgspec.Struct, kw_only=True):
    """One line of a `.jsonl` file; parameters left out are those of the command line."""

    prompt: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None


def read_prompts(
    name: str, params: Callable[[dict[str, Any]], SamplingParams]
) -> list[tuple[str, SamplingParams]]:
    """The prompts of a file (`-`: standard input), with their parameters.

    A name that ends in `.jsonl` holds one object a line with a `prompt` and, if wanted, sampling
    parameters; any other file one prompt a line. Empty lines are passed over.

    Raises:
        InvalidInput: the file cannot be read, or a line of it not be used; the message says which.
    """
    found = []
    # Not splitlines(): U+2028, form feeds and the like may stand inside a prompt.
    for number, raw in enumerate(_read(name).split("\n"), 1):
        line = raw.removesuffix("\r")
        if not line.strip():
            continue
        try:
            found.append(_parse(line, params) if name.endswith(".jsonl") else (line, params({})))
        except (msgspec.MsgspecError, InvalidInput) as error:
            raise InvalidInput(f"{name}, line {number}: {error}") from error
    if not found:
        raise InvalidInput(f"{name} holds no prompt")
    return found


def _parse(
    line: str, params: Callable[[dict[str, Any]], SamplingParams]
) -> tuple[str, SamplingParams]:
    entry = msgspec.json.decode(line, type=PromptLine)
    own = {name: getattr(entry, name) for name in OWN_PARAMS if getattr(entry, name) is not None}
    return entry.prompt, params(own)


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not UTF-8 text (byte {error.start})") from error
