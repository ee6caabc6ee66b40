"""Records a running distributed PyTorch job as a capture: one Kineto file a rank, sidecars, a manifest."""

from __future__ import annotations

from scaletrace.collect.session import Session, mark_step, record

__all__ = ["Session", "mark_step", "record"]
