"""Opening the explorer on a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cbviz.app import CbvizApp
from cbviz.palette import Palette
from cbviz.sources.base import Source
from engine.config import EngineConfig
from engine.protocol import Add
from engine.request import SamplingParams


def open_live(
    config: EngineConfig,
    *,
    trace: Path | None,
    prompts: Sequence[tuple[str, SamplingParams]],
    demo: bool,
    speed: float,
    paused: bool,
    palette: Palette,
) -> int:
    """Explore a live engine until the user leaves; the exit code."""
    from cbviz.demo import demo_requests
    from cbviz.sources.live import LiveSource

    adds = [Add(text, params) for text, params in prompts]
    if demo:
        adds = demo_requests()
    return _open(LiveSource(config, trace), adds, speed, paused, palette)


def open_replay(path: Path, *, speed: float, palette: Palette) -> int:
    """Explore a trace until the user leaves; the exit code.

    Raises:
        InvalidInput: the file is no readable trace.
    """
    from cbviz.sources.replay import ReplaySource

    return _open(ReplaySource(path), [], speed, False, palette)


def _open(source: Source, adds: Sequence[Add], speed: float, paused: bool, palette: Palette) -> int:
    app = CbvizApp(source, palette=palette, speed=speed, demo=adds, start_paused=paused)
    app.run()
    return app.return_code or 0
