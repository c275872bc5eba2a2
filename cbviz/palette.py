"""Colours and glyphs: the visual grammar of the explorer, in one place.

Rows are queries, columns are keys; green tints are True, one tint a request; orange is padding;
grey was computed before (cached), bright is computed in this step. No colour ever speaks alone: a
letter names the request and a glyph the state, so the same picture reads in 16 colours, without
colour, in ASCII and for a colour-blind eye (neighbouring tints differ in lightness most).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.color import Color
from rich.style import Style

ColorMode = Literal["truecolor", "256", "16", "none"]


@dataclass(frozen=True)
class Glyphs:
    """The characters that grids and bars are made of, each one cell wide."""

    full: str
    """A whole cell: True, new."""
    cached: str
    """A whole cell: True, cached before this step."""
    upper: str
    lower: str
    """The halves of a cell, for two rows a line; equal to `full` where there are none."""
    half_blocks: bool
    """Whether `upper` and `lower` really are halves."""
    off: str
    """False, or nothing here."""
    free: str
    """A free block."""
    evictable: str
    """A block in no table whose content is cached."""
    pad: str
    """Padding."""
    fills: Sequence[str]
    """How full: index 0 is empty, the last full."""
    shades: Sequence[str]
    """How dense: index 0 is nothing, the last everything."""
    bar: str
    bar_alt: str
    bar_rest: str
    """Parts of a horizontal bar: the first share, the second, what is left."""
    edge: str
    """Between two tokens in a row."""
    samples: str
    """A token that yields a logit."""
    written: str
    """Written in this step."""
    evicted: str
    """Taken from the prefix cache in this step, and written."""
    shared: str
    """In more than one block table."""
    cursor: str
    """Points at the selected row."""
    ellipsis: str
    arrow: str
    dash: str
    """Between two numbers, or where there is no value."""
    times: str
    middot: str
    check: str
    cross: str
    line: str
    spark: Sequence[str]
    """Heights of a small plot, lowest first."""
    waiting: str
    waiting_again: str
    idle: str
    decode: str
    hit: str
    preempted: str
    cancelled: str
    """What a request did in a step; beside them `fills` for a prefill chunk, `check`, `cross`."""
    here: str
    """A column that is looked at, where it is empty."""
    down: str
    """Points at that column."""


UNICODE_GLYPHS = Glyphs(
    full="█", cached="▓", upper="▀", lower="▄", half_blocks=True, off="·", free="·", evictable="▯",
    pad="╳", fills=" ▁▂▃▄▅▆▇█", shades=" ░▒▓█", bar="█", bar_alt="▓", bar_rest="░", edge="▏",
    samples="▸", written="◂", evicted="✗", shared="+", cursor="▸", ellipsis="…",
    arrow="→", dash="–", times="×", middot="·", check="✓", cross="✗", line="─", spark="▁▂▃▄▅▆▇█",
    waiting="·", waiting_again=":", idle="╌", decode="━", hit="◆", preempted="!", cancelled="⊘",
    here="│", down="▾",
)  # fmt: skip

ASCII_GLYPHS = Glyphs(
    full="#", cached="+", upper="#", lower="#", half_blocks=False, off=".", free=".", evictable=":",
    pad="x", fills=".12345678", shades=" -=%#", bar="#", bar_alt="=", bar_rest=".", edge="|",
    samples=">", written="<", evicted="!", shared="+", cursor=">", ellipsis="~",
    arrow=">", dash="-", times="x", middot="-", check="v", cross="x", line="-", spark="_.-:=+*#",
    waiting=".", waiting_again=":", idle=",", decode="-", hit="+", preempted="!", cancelled="c",
    here="|", down="v",
)  # fmt: skip


@dataclass(frozen=True)
class Tint:
    """The colours of one request.

    `bright`: computed in this step, on the background. `dim`: cached before. `on`: as `bright`, as
    a field with writing on it. `name`: the letter of the request, and other words about it.
    """

    bright: Style
    dim: Style
    on: Style
    name: Style


# Green, teal and lime in turn, light beside dark: the eye that sees no hue still sees a step.
_TINTS_DARK = (
    ("#5fe07a", "#6a8a72"), ("#1fa58f", "#527370"), ("#c6f04a", "#858f66"), ("#2f9e44", "#567059"),
    ("#7fe9d0", "#748d88"), ("#7f9f22", "#636e4a"), ("#45d67c", "#5f8270"), ("#b9f5b0", "#84967f"),
)  # fmt: skip
_TINTS_LIGHT = (
    ("#1d7a3a", "#9bb3a2"), ("#4bb8a4", "#bccfcb"), ("#5d7a00", "#a8b08c"), ("#63b868", "#bfd1c0"),
    ("#00645a", "#8fa8a4"), ("#93b92c", "#c8d1a9"), ("#0d5a2b", "#8aa592"), ("#3f9d57", "#abc2b1"),
)  # fmt: skip
_TINTS_256 = ((84, 65), (36, 59), (191, 101), (34, 240), (122, 66), (106, 58), (41, 29), (157, 108))
_TINTS_16 = (("bright_green", "bright_black"), ("cyan", "bright_black"),
             ("bright_cyan", "bright_black"), ("green", "bright_black"))  # fmt: skip

_UI_NAMES = (
    "text", "muted", "faint", "accent", "ok", "warn", "error", "title", "decode", "prefill",
    "waiting", "preempted", "finished", "pad", "rest", "evictable",
)  # fmt: skip
_UI_DARK = (
    "#d7dde5", "#8b95a3", "#4a535f", "#8ab4f8", "#7ddc8a", "#f2c14e", "#ff7b72", "bold #f0f3f6",
    "#7cc7ff", "#8f7ee6", "#c9b458", "#e58fd0", "#8b95a3", "#ff9d3c", "#4a535f", "#7d8590",
)  # fmt: skip
_UI_LIGHT = (
    "#20262d", "#5c6670", "#b4bcc5", "#1f5fbf", "#1d7a3a", "#8a5a00", "#b3261e", "bold #101418",
    "#0a6fb8", "#6b4fd0", "#7a6200", "#9c2f80", "#5c6670", "#b85c00", "#b4bcc5", "#8a939d",
)  # fmt: skip
_UI_256 = (
    "color(253)", "color(246)", "color(240)", "color(111)", "color(114)", "color(221)",
    "color(209)", "bold color(255)", "color(117)", "color(105)", "color(179)", "color(176)",
    "color(246)", "color(208)", "color(240)", "color(244)",
)  # fmt: skip
_UI_16 = (
    "white", "bright_black", "bright_black", "bright_blue", "bright_green", "bright_yellow",
    "bright_red", "bold bright_white", "bright_white", "bright_blue", "yellow", "bright_magenta",
    "bright_black", "yellow", "bright_black", "bright_black",
)  # fmt: skip
_UI_NONE = (
    "none", "dim", "dim", "bold", "none", "bold", "bold reverse", "bold", "bold", "none", "dim",
    "underline", "dim", "reverse", "dim", "dim",
)  # fmt: skip


@dataclass(frozen=True)
class Palette:
    """Everything that says how things look. Build it with `Palette.make`.

    The named styles set a foreground only, so that panels keep their own background.
    """

    ascii: bool
    color: ColorMode
    dark: bool
    glyphs: Glyphs
    tints: tuple[Tint, ...]
    text: Style
    muted: Style
    faint: Style
    """Grid lines, empty cells: there, and not in the way."""
    accent: Style
    ok: Style
    warn: Style
    error: Style
    title: Style
    decode: Style
    prefill: Style
    waiting: Style
    preempted: Style
    finished: Style
    pad: Style
    rest: Style
    """The part of a bar that nothing fills."""
    evictable: Style
    """What is cached and may be taken: grey, of no request any more."""
    cursor: Style
    """Laid over what is selected."""

    @classmethod
    def make(
        cls, *, ascii: bool = False, color: ColorMode = "truecolor", dark: bool = True
    ) -> Palette:
        """The palette for a terminal.

        Args:
            ascii: use no character outside ASCII.
            color: what the terminal can show; `none` uses bold, dim, reverse, underline only.
            dark: whether the background is dark (matters for `truecolor` alone).
        """
        ui = dict(zip(_UI_NAMES, map(Style.parse, _ui(color, dark)), strict=True))
        return cls(
            ascii=ascii,
            color=color,
            dark=dark,
            glyphs=ASCII_GLYPHS if ascii else UNICODE_GLYPHS,
            tints=_tints(color, dark),
            cursor=Style(reverse=True, bold=True),
            **ui,
        )

    def letter(self, ordinal: int) -> str:
        """The letter that names a request, `A` to `Z` and round again."""
        return chr(ord("A") + ordinal % 26)

    def tint(self, ordinal: int) -> Tint:
        """The colours of a request, by how many were added before it."""
        return self.tints[ordinal % len(self.tints)]

    def dim(self, style: Style) -> Style:
        """A style pushed back, for what is history."""
        return style + Style(dim=True)


def _ui(color: ColorMode, dark: bool) -> Sequence[str]:
    if color == "truecolor":
        return _UI_DARK if dark else _UI_LIGHT
    return {"256": _UI_256, "16": _UI_16, "none": _UI_NONE}[color]


def _tints(color: ColorMode, dark: bool) -> tuple[Tint, ...]:
    if color == "none":
        plain = Tint(Style(bold=True), Style(dim=True), Style(reverse=True), Style(bold=True))
        other = Tint(Style(), Style(dim=True), Style(reverse=True), Style(bold=True))
        return (plain, other)
    if color == "256":
        return tuple(
            _tint(Color.from_ansi(bright), Color.from_ansi(dim), Color.from_ansi(16))
            for bright, dim in _TINTS_256
        )
    if color == "16":
        black = Color.parse("black")
        return tuple(_tint(Color.parse(b), Color.parse(d), black) for b, d in _TINTS_16)
    pairs = _TINTS_DARK if dark else _TINTS_LIGHT
    return tuple(_tint(Color.parse(b), Color.parse(d), _ink(Color.parse(b))) for b, d in pairs)


def _tint(bright: Color, dim: Color, ink: Color) -> Tint:
    return Tint(
        bright=Style.from_color(bright),
        dim=Style.from_color(dim),
        on=Style.from_color(ink, bright),
        name=Style.from_color(bright) + Style(bold=True),
    )


def _ink(field: Color) -> Color:
    """Black or white, whichever reads on the field (relative luminance, WCAG 2)."""
    red, green, blue = field.get_truecolor()
    luminance = 0.2126 * _linear(red) + 0.7152 * _linear(green) + 0.0722 * _linear(blue)
    dark_contrast = (luminance + 0.05) / 0.05
    return Color.parse("#0b0f0c" if dark_contrast >= 1.05 / (luminance + 0.05) else "#ffffff")


def _linear(channel: int) -> float:
    value = channel / 255
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)
