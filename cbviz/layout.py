"""Which panels are to be seen, for the size of the terminal and for what the user asked for."""

from __future__ import annotations

from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer

from cbviz.panels.base import Panel

PANELS = ("batch", "mask", "kv", "throughput", "requests", "timeline", "events")
WIDE_ONLY = ("timeline", "events")
"""Panels that stand beside the others in a large terminal; in a smaller one they come alone."""
ALL_EIGHT_FROM = (160, 45)
"""Columns and lines from which on these have room, too."""
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
        self._lower_row = screen.query_one("#history")
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
        self._roomy = False
        self._alone_for_room = False
        """The zoomed panel is alone only because there is no room for it beside others."""
        self._loading = True

    def apply(self, size: Size) -> None:
        """Take the size of the terminal into account."""
        self._both = size.height >= BOTH_SIDES_FROM
        self._tiny = size.width < ALL_FROM[0] or size.height < ALL_FROM[1]
        self._flat = size.height < BATCH_FROM
        self._roomy = size.width >= ALL_EIGHT_FROM[0] and size.height >= ALL_EIGHT_FROM[1]
        if self._roomy and self._alone_for_room:
            self._unzoom()
        elif not self._roomy and self._zoomed in WIDE_ONLY:
            self._alone_for_room = True
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
        no_room = name in WIDE_ONLY and not self._roomy
        if not no_room and (name != "batch" or self._flat):
            self._main = name
        if no_room and self._zoomed is None:
            self._zoomed, self._alone_for_room = name, True
        elif self._alone_for_room and not no_room:
            self._unzoom()
        elif self._zoomed is not None:
            self._zoomed = name
        self._arrange()
        panel = self._widgets[name]
        assert isinstance(panel, Panel)
        return panel

    def toggle_zoom(self, focused: Widget | None) -> None:
        """One panel alone (the focused one, else the mask), or all again."""
        if self._zoomed is not None:
            self._unzoom()
        else:
            name = focused.id if focused is not None else None
            self._zoomed = name if name in PANELS else "mask"
        self._arrange()

    def _unzoom(self) -> None:
        self._zoomed, self._alone_for_room = None, False

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
        self._lower_row.display = visible["timeline"] or visible["events"]
        self._lower_row.set_class(self._zoomed in WIDE_ONLY, "-zoomed")
        for name in PANELS:
            self._widgets[name].set_class(name == self._zoomed, "-zoomed")

    def _visible(self, name: str) -> bool:
        if self._zoomed is not None:
            return name == self._zoomed
        if name in WIDE_ONLY:
            return self._roomy
        if self._tiny:
            return name == self._main or (name == "batch" and not self._flat)
        return self._both or name not in ("kv", "throughput") or name == self._lower
