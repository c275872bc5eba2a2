"""Reading a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import InvalidInput
from engine.request import SamplingParams

_OWN_TYPES: dict[str, Any] = {
    field.name: field.type for field in msgspec.structs.fields(SamplingParams)
} | {"stop": str | list[str]}
OWN_PARAMS = tuple(_OWN_TYPES)
"""The sampling parameters that a line of a `.jsonl` file may hold: all there are."""

_PromptLine = msgspec.defstruct(
    "PromptLine",
    [
        ("prompt", str),
        *((name, kind | msgspec.UnsetType, msgspec.UNSET) for name, kind in _OWN_TYPES.items()),
    ],
    kw_only=True,
)
"""One line of a `.jsonl` file; parameters left out are those of the command line."""


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
    try:
        values = msgspec.json.decode(line, type=dict[str, Any])
    except RecursionError:
        raise InvalidInput("it is nested too deeply") from None
    for name in values:
        if name != "prompt" and name not in OWN_PARAMS:
            raise InvalidInput(
                f"there is no field {name!r}; there are prompt, {', '.join(OWN_PARAMS)}"
            )
    entry = msgspec.convert(values, _PromptLine, str_keys=True)
    given = {name: getattr(entry, name) for name in values}
    return given.pop("prompt"), params(given)


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not UTF-8 text (byte {error.start})") from error
