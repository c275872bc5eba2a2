"""What screens over the panels have in common: they can be drawn anew while a run goes on."""

from __future__ import annotations

from textual.screen import ModalScreen

from cbviz.frame import Frame


class LiveScreen(ModalScreen[None]):
    """A screen over the panels that is told of each new frame, as they are."""

    def show(self, frame: Frame | None) -> None:
        """Draw this frame from now on."""
