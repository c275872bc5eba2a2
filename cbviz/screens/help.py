"""Help, made from the bindings: what is listed is what the keys do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from cbviz.palette import Palette

_KEY_WORDS = {
    "left": "←", "right": "→", "up": "↑", "down": "↓", "plus": "+", "minus": "-",
    "equals_sign": "=", "left_square_bracket": "[", "right_square_bracket": "]",
    "question_mark": "?", "comma": ",", "full_stop": ".",
}  # fmt: skip
_ASCII_WORDS = {"left": "left", "right": "right", "up": "up", "down": "down"}

LEGEND = """\
Rows are queries, columns are keys. A tint and a letter stand for one request.
Bright: computed in this step. Grey: cached before. Empty: False.
m is the token budget: tokens computed in one step at most."""


class HelpScreen(ModalScreen[None]):
    """All keys, and how to read the pictures. Any of its keys leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter,space", "dismiss", "close", show=False),
    ]

    def __init__(self, palette: Palette, groups: Sequence[tuple[str, Sequence[Binding]]]) -> None:
        super().__init__()
        self._palette = palette
        self._groups = groups

    def compose(self) -> ComposeResult:
        """One scrollable box."""
        with VerticalScroll(id="help") as box:
            box.border_title = "Help"
            box.border_subtitle = "esc closes"
            yield Static(self.text(), markup=False)

    def text(self) -> Text:
        """What the screen says."""
        palette = self._palette
        words = Text(f"{LEGEND}\n", style=palette.muted)
        for heading, bindings in self._groups:
            words.append(f"\n{heading}\n", style=palette.title)
            for keys, tooltip in merged(bindings, ascii=palette.ascii):
                words.append(f"  {keys:<16}", style=palette.accent)
                words.append(f"{tooltip}\n", style=palette.text)
        return words


def merged(bindings: Sequence[Binding], *, ascii: bool) -> list[tuple[str, str]]:
    """`(keys, tooltip)`: one line for each thing that can be done."""
    lines: dict[str, list[str]] = {}
    for binding in bindings:
        words = binding.tooltip or binding.description
        keys = [key_words(key.strip(), ascii=ascii) for key in binding.key.split(",")]
        lines.setdefault(words, []).extend(keys)
    return [(" ".join(keys), words) for words, keys in lines.items()]


def key_words(key: str, *, ascii: bool) -> str:
    """A key as it is written on the keyboard."""
    *modifiers, name = key.split("+")
    names = {**_KEY_WORDS, **(_ASCII_WORDS if ascii else {})}
    return "+".join([*modifiers, names.get(name, name)])
