"""A real continuous-batching engine, usable alone; it knows nothing of the explorer.

`Engine` needs torch, which takes seconds to import, so it is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.version import __version__

if TYPE_CHECKING:
    from engine.core import Completion
    from engine.engine import Engine

__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Completion", "Engine"):
        from engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
