"""Which panels are to be seen, for the size of the terminal and for what the user asked for."""

from __future__ import annotations

from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer

from cbviz.panels.base import Panel

PANELS = ("batch", "mask", "kv", "throughput", "requests")
BOTH_SIDES_FROM = 34
"""Lines from which on KV cache and throughput stand one above the other."""

ALL_FROM = (60, 16)
"""Columns and lines from which on there is room for more than the batch and one other panel."""
BATCH_FROM = 10
"""Lines from which on even the batch has room."""
NARROW = 100
"""Columns below which the footer has room for keys alone."""


class Layout:
    """Shows and hides the panels of a screen; their sizes follow from the style sheet."""

    def __init__(self, screen: Screen[object]) -> None:
        self._widgets = {name: screen.query_one(f"#{name}") for name in (*PANELS, "loading")}
        self._middle = screen.query_one("#middle")
        self._side = screen.query_one("#side")
        self._footer = screen.query_one(Footer)
        self._screen = screen
        self._both = True
        self._lower = "kv"
        """Which of the two side panels is shown where there is room for one."""
        self._tiny = False
        self._flat = False
        self._main = "mask"
        """The panel that a tiny terminal shows."""
        self._zoomed: str | None = None
        self._loading = True

    def apply(self, size: Size) -> None:
        """Take the size of the terminal into account."""
        self._both = size.height >= BOTH_SIDES_FROM
        self._tiny = size.width < ALL_FROM[0] or size.height < ALL_FROM[1]
        self._flat = size.height < BATCH_FROM
        self._screen.set_class(size.height < BOTH_SIDES_FROM, "-low")
        self._footer.show_command_palette = size.width >= NARROW
        self._arrange()

    def show_loading(self, loading: bool) -> None:
        """The list of stages stands where the requests will be."""
        if loading != self._loading:
            self._loading = loading
            self._arrange()

    def bring(self, name: str) -> Panel:
        """Make sure that a panel can be seen; that panel."""
        if name in ("kv", "throughput"):
            self._lower = name
        if name != "batch" or self._flat:
            self._main = name
        if self._zoomed is not None:
            self._zoomed = name
        self._arrange()
        panel = self._widgets[name]
        assert isinstance(panel, Panel)
        return panel

    def toggle_zoom(self, focused: Widget | None) -> None:
        """One panel alone (the focused one, else the mask), or all again."""
        if self._zoomed is not None:
            self._zoomed = None
        else:
            name = focused.id if focused is not None else None
            self._zoomed = name if name in PANELS else "mask"
        self._arrange()

    def shows(self, panel: Panel) -> bool:
        """Whether it is to be seen now."""
        return panel.display

    def _arrange(self) -> None:
        visible = {name: self._visible(name) for name in PANELS}
        if self._tiny and self._loading:
            visible = {name: name == "requests" for name in PANELS}
        visible["loading"] = self._loading and visible["requests"]
        visible["requests"] = visible["requests"] and not self._loading
        for name, shown in visible.items():
            self._widgets[name].display = shown
        self._side.display = visible["kv"] or visible["throughput"]
        self._middle.display = visible["mask"] or self._side.display
        for name in PANELS:
            self._widgets[name].set_class(name == self._zoomed, "-zoomed")

    def _visible(self, name: str) -> bool:
        if self._zoomed is not None:
            return name == self._zoomed
        if self._tiny:
            return name == self._main or (name == "batch" and not self._flat)
        return self._both or name not in ("kv", "throughput") or name == self._lower
