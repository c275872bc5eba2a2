"""Opening the explorer on a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cbviz.app import CbvizApp
from cbviz.palette import Palette
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
    params: SamplingParams,
    palette: Palette,
    break_on: Sequence[str] = (),
) -> int:
    """Explore a live engine until the user leaves; the exit code.

    `params`: how tokens are drawn for prompts that are typed in; `break_on`: breakpoints.
    """
    from cbviz.demo import demo_requests
    from cbviz.sources.live import LiveSource

    adds = [Add(text, params) for text, params in prompts]
    if demo:
        adds = demo_requests()
    app = CbvizApp(
        LiveSource(config, trace), palette=palette, speed=speed, demo=adds, start_paused=paused,
        params=params, break_on=break_on,
    )  # fmt: skip
    return _run(app)


def open_replay(path: Path, *, speed: float, palette: Palette, break_on: Sequence[str] = ()) -> int:
    """Explore a trace until the user leaves; the exit code.

    Raises:
        InvalidInput: the file is no readable trace.
    """
    from cbviz.sources.replay import ReplaySource

    source = ReplaySource(path)
    return _run(CbvizApp(source, palette=palette, speed=speed, break_on=break_on))


def _run(app: CbvizApp) -> int:
    app.run()
    return app.return_code or 0
