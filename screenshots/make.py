"""Make the pictures of this folder: the real program, in a real terminal, cell by cell.

    pip install '.[test]' pillow
    python screenshots/make.py [NAME …]

Needs a monospaced TrueType font (DejaVu Sans Mono by default; `--font FILE` for another).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.e2e.terminal import Terminal  # noqa: E402

FONT = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono.ttf"
SIZE = 20
INK, PAPER = "d8dee9", "121212"
NAMED = {
    "black": "000000", "red": "d05050", "green": "50b050", "brown": "c0a040", "blue": "5080d0",
    "magenta": "b060b0", "cyan": "40b0b0", "white": "d8d8d8",
}  # fmt: skip
# Shares of a cell from its bottom, and densities: drawn, since fonts leave gaps between them.
RISES = {char: (i + 1) / 8 for i, char in enumerate("▁▂▃▄▅▆▇█")}
SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}


@dataclass(frozen=True)
class Scene:
    """One picture: how the program is started, and what is done before it is taken."""

    size: tuple[int, int]
    play: Callable[[Terminal], None]
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


def pause_at(step: int) -> Callable[[Terminal], None]:
    """Let the demo run, stand still, and look at one step."""

    def play(terminal: Terminal) -> None:
        terminal.until(lambda: terminal.step > step + 1)
        terminal.press("space")
        terminal.until("paused")
        terminal.press("g", f"{step}\r")
        terminal.until(lambda: terminal.step == step and "press i" in terminal.text)

    return play


def then(first: Callable[[Terminal], None], wanted: str, *keys: str) -> Callable[[Terminal], None]:
    """Press keys after a scene, and wait for a text."""

    def play(terminal: Terminal) -> None:
        first(terminal)
        terminal.press(*keys)
        terminal.until(wanted)

    return play


SCENES = {
    "demo-140x42": Scene((140, 42), pause_at(18)),
    "demo-80x24": Scene((80, 24), pause_at(18)),
    "demo-120x40": Scene((120, 40), pause_at(18)),
    "demo-200x50": Scene((200, 50), pause_at(18)),
    "mask-120x40": Scene((120, 40), then(pause_at(3), "queries 0", "2", "z", "v")),
    "blocks-120x40": Scene((120, 40), then(pause_at(18), "KV", "3", "z")),
    "no-colour-120x40": Scene((120, 40), pause_at(18), env={"NO_COLOR": "1"}),
    "ascii-120x40": Scene((120, 40), pause_at(18), ("--ascii",)),
    "loading-120x40": Scene((120, 40), lambda terminal: terminal.until("torch and transformers")),
    "help-120x40": Scene((120, 40), then(pause_at(8), "esc closes", "?")),
}


def picture(terminal: Terminal, font_file: str) -> Image.Image:
    """Every cell of the emulator's screen, drawn."""
    font = ImageFont.truetype(font_file, SIZE)
    bold = ImageFont.truetype(font_file.replace(".ttf", "-Bold.ttf"), SIZE)
    ascent, descent = font.getmetrics()
    wide, high = round(font.getlength("M")), ascent + descent
    image = Image.new("RGB", (terminal.width * wide, terminal.height * high), f"#{PAPER}")
    draw = ImageDraw.Draw(image)
    for y in range(terminal.height):
        for x in range(terminal.width):
            cell = terminal.screen.buffer[y][x]
            ink, paper = _colours(cell)
            box = (x * wide, y * high, (x + 1) * wide - 1, (y + 1) * high - 1)
            if paper != f"#{PAPER}":
                draw.rectangle(box, fill=paper)
            if cell.data in RISES:
                top = box[3] + 1 - round(RISES[cell.data] * high)
                draw.rectangle((box[0], top, box[2], box[3]), fill=ink)
            elif cell.data in SHADES:
                draw.rectangle(box, fill=_mixed(ink, paper, SHADES[cell.data]))
            elif cell.data.strip():
                face = bold if cell.bold else font
                draw.text((box[0], box[1]), cell.data, font=face, fill=ink)
    return image


def _colours(cell: object) -> tuple[str, str]:
    ink = _hex(cell.fg, INK)  # type: ignore[attr-defined]
    paper = _hex(cell.bg, PAPER)  # type: ignore[attr-defined]
    return (paper, ink) if cell.reverse else (ink, paper)  # type: ignore[attr-defined]


def _hex(colour: str, default: str) -> str:
    if colour == "default":
        return f"#{default}"
    return f"#{NAMED.get(colour, colour)}"


def _mixed(ink: str, paper: str, share: float) -> str:
    def parts(text: str) -> list[int]:
        return [int(text[i : i + 2], 16) for i in (1, 3, 5)]

    mixed = (
        round(a * share + b * (1 - share)) for a, b in zip(parts(ink), parts(paper), strict=True)
    )
    return "#" + "".join(f"{value:02x}" for value in mixed)


def main() -> None:
    """Make the scenes named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENES))
    parser.add_argument("--font", default=FONT)
    args = parser.parse_args()
    for name in args.names or SCENES:
        scene = SCENES[name]
        with Terminal(*scene.arguments, size=scene.size, env=scene.env) as terminal:
            scene.play(terminal)
            # What is still being drawn comes with the next bytes, if any do.
            for _ in range(5):
                terminal.read(0.2)
            image = picture(terminal, args.font)
        image.quantize(160, dither=Image.Dither.NONE).save(HERE / f"{name}.png", optimize=True)
        print(f"{name}.png {image.width}×{image.height}")


if __name__ == "__main__":
    main()
