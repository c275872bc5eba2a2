"""What every panel has in common: it draws one `Frame`, and nothing else."""

from __future__ import annotations

from textual.widget import Widget

from cbviz.frame import Frame
from cbviz.palette import Palette

__all__ = ["Frame", "Panel"]


class Panel(Widget):
    """A bordered widget that draws the current `Frame`.

    Subclasses override `update_frame`, which prepares what `render_line`s then slice, and sets
    `border_title` (the panel's own figures stand there). They must cope with `frame is None`
    (nothing loaded yet), no record, nothing running, and any size.
    """

    can_focus = True

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.palette = palette
        self.frame: Frame | None = None

    def show(self, frame: Frame | None) -> None:
        """Draw this frame from now on."""
        self.frame = frame
        self.update_frame()
        self.refresh()

    def update_frame(self) -> None:
        """Prepare what drawing needs from `self.frame`, once a frame."""

    def show_selection(self, request_id: str, position: int | None) -> None:
        """Light what belongs to a token picked elsewhere, or (None) to a whole request."""
