"""Token ids to text, one by one, with no broken characters and no lost spaces.

Only the text of a short window is decoded anew for each token: what the window says beyond what
it said before is new. While it ends in an unfinished character nothing is given out. The idea of
the two offsets is that of Text Generation Inference and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"
_LOOKBACK = 6


class Detokenizer:
    """Streams the output text of one request.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_ids: token ids of the prompt, which the first output tokens may lean on.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt_ids[-_LOOKBACK:]
        self._window = 0
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        self._ids.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        """What is still held back at the end: the pieces of a cut-off character."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._decode(self._ids[self._window : self._read])
        now = self._decode(self._ids[self._window :])
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not final):
            return ""
        self._window = self._read
        self._read = len(self._ids)
        return now[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class TokenizerText:
    """The text side of a tokenizer (`engine.core.TextSide`)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._piece = Pieces(tokenizer)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return [self._piece(token_id) for token_id in token_ids]

    def stream(self, prompt_ids: list[int]) -> Detokenizer:
        """A stream for the output that follows a prompt."""
        return Detokenizer(self._tokenizer, prompt_ids)


class Pieces:
    """The text of single tokens, as a grid shows them: leading spaces kept, odd bytes as hex."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """The piece of one token."""
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> str:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return f"<{token_id}>"
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        if _UNFINISHED in text:
            return token if token.startswith("<0x") else f"<{_hex(token)}>"
        # SentencePiece marks a leading space, which decoding one token alone takes away.
        return " " + text if token.startswith("▁") and not text.startswith(" ") else text


def _hex(token: str) -> str:
    """A byte-level token that is no whole character, as the hex of its bytes."""
    table = {chr(256 + i): byte for i, byte in enumerate(_unprintable_bytes())}
    return " ".join(f"{table.get(char, ord(char)):02X}" for char in token)


def _unprintable_bytes() -> list[int]:
    """Bytes that GPT-2's byte-level alphabet writes as characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [byte for byte in range(256) if byte not in printable]
