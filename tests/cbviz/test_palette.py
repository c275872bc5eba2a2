"""The palette: no colour speaks alone, and every mode keeps to what it promises."""

from __future__ import annotations

from dataclasses import fields

import pytest
from rich.cells import cell_len
from rich.color import ColorType
from rich.style import Style

from cbviz.palette import Palette

MODES = ("truecolor", "256", "16", "none")


def styles(palette: Palette) -> list[Style]:
    """Every style that a palette hands out."""
    named = [getattr(palette, field.name) for field in fields(palette)]
    tints = [style for t in palette.tints for style in (t.bright, t.dim, t.on, t.name)]
    return [style for style in named if isinstance(style, Style)] + tints


def luminance(style: Style) -> float:
    """Relative luminance of a foreground (WCAG 2)."""
    assert style.color is not None
    parts = [value / 255 for value in style.color.get_truecolor()]
    red, green, blue = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    """Contrast ratio of two luminances (WCAG 2)."""
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_without_colour_there_are_only_attributes() -> None:
    assert all(s.color is None and s.bgcolor is None for s in styles(Palette.make(color="none")))


def test_sixteen_colours_are_the_terminals_own() -> None:
    colors = [c for s in styles(Palette.make(color="16")) for c in (s.color, s.bgcolor) if c]
    assert colors
    assert all(color.type is ColorType.STANDARD for color in colors)


def test_256_colours_need_no_true_colour() -> None:
    colors = [c for s in styles(Palette.make(color="256")) for c in (s.color, s.bgcolor) if c]
    assert colors
    assert all(color.type is not ColorType.TRUECOLOR for color in colors)


@pytest.mark.parametrize("ascii", [False, True])
def test_every_glyph_is_one_cell(ascii: bool) -> None:
    glyphs = Palette.make(ascii=ascii).glyphs
    for field in fields(glyphs):
        value = getattr(glyphs, field.name)
        if isinstance(value, bool):
            continue
        for glyph in value:
            assert cell_len(glyph) == 1, field.name
            assert glyph.isascii() or not ascii, field.name


@pytest.mark.parametrize("ascii", [False, True])
def test_what_differs_in_colour_differs_in_shape(ascii: bool) -> None:
    glyphs = Palette.make(ascii=ascii).glyphs
    assert len({glyphs.full, glyphs.cached, glyphs.off, glyphs.pad}) == 4
    assert len({glyphs.bar, glyphs.bar_alt, glyphs.bar_rest, glyphs.pad}) == 4
    assert len({glyphs.free, glyphs.evictable, *glyphs.shades}) == 7
    assert len({glyphs.written, glyphs.evicted, glyphs.shared}) == 3
    assert len(set(glyphs.fills)) == len(glyphs.fills) == 9
    assert len(set(glyphs.shades)) == len(glyphs.shades) == 5


def test_letters_go_round() -> None:
    palette = Palette.make()
    assert [palette.letter(n) for n in (0, 1, 25, 26)] == ["A", "B", "Z", "A"]
    assert palette.tint(0) == palette.tint(len(palette.tints))


@pytest.mark.parametrize("dark", [True, False])
def test_neighbours_differ_in_lightness(dark: bool) -> None:
    tints = Palette.make(dark=dark).tints
    for one, other in zip(tints, (*tints[1:], tints[0]), strict=True):
        assert contrast(luminance(one.bright), luminance(other.bright)) > 1.3


@pytest.mark.parametrize("dark", [True, False])
def test_bright_and_text_stand_out_from_the_background(dark: bool) -> None:
    palette = Palette.make(dark=dark)
    ground = 0.006 if dark else 0.95
    for style in (palette.text, palette.accent, palette.error, palette.decode, palette.prefill):
        assert contrast(luminance(style), ground) >= 4.5
    for tint in palette.tints:
        assert contrast(luminance(tint.bright), ground) >= 2
        ink = Style(color=tint.on.bgcolor)
        assert contrast(luminance(tint.on), luminance(ink)) >= 4.5
        if dark:
            assert luminance(tint.bright) > luminance(tint.dim)


@pytest.mark.parametrize("color", MODES)
def test_new_and_cached_look_different(color: str) -> None:
    palette = Palette.make(color=color)  # type: ignore[arg-type]
    assert all(tint.bright != tint.dim for tint in palette.tints)
