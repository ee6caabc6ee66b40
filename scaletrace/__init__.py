"""Turns a folder of Kineto traces into one replayable dependency graph, and stretches it to larger clusters."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaletrace.api import Trace, load

__version__ = "0.1.0"
__all__ = ["Trace", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Load the analysis stack on first use, so that a training node can import scaletrace.collect without it."""
    if name in ("Trace", "load"):
        from scaletrace import api

        return getattr(api, name)
    raise AttributeError(f"module 'scaletrace' has no attribute {name!r}")
