"""What the window looks like, from recorded steps; `pytest --snapshot-update` after a change.

Look at each new picture before it is committed.
"""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from cbviz.app import CbvizApp
from cbviz.palette import Palette
from tests.cbviz.fake_source import ReplayFake
from tests.cbviz.synthetic import story

SIZES = [(80, 24), (120, 40), (200, 50)]


def window(**look: Any) -> CbvizApp:
    engine = story(11)
    return CbvizApp(ReplayFake(engine.records, engine.header), palette=Palette.make(**look))


async def at_the_last_step(pilot: Pilot[int]) -> None:
    app = pilot.app
    assert isinstance(app, CbvizApp)
    while not app.panels_are_up or app.session.newest < 10:
        await pilot.pause()
    await pilot.press("end")
    await pilot.pause()
    app._draw()
    await pilot.pause()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_window(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(window(), terminal_size=size, run_before=at_the_last_step)


def test_the_window_without_colour(snap_compare: Any) -> None:
    app = window(color="none")
    assert snap_compare(app, terminal_size=(120, 40), run_before=at_the_last_step)


def test_the_mask_alone(snap_compare: Any) -> None:
    async def zoomed(pilot: Pilot[int]) -> None:
        await at_the_last_step(pilot)
        await pilot.press("2", "z")
        await pilot.pause()

    assert snap_compare(window(), terminal_size=(120, 40), run_before=zoomed)
