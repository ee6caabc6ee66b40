"""Turns a state into one whose gradients, or gathered parameters, travel in another precision."""

from __future__ import annotations

from scaletrace.errors import UsageError
from scaletrace.extrapolate.layout import DATA_AXES
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, recosted, scaled_bytes

GRADIENTS = ("all_reduce", "reduce_scatter")
PARAMETERS = ("all_gather", "broadcast")


def reduce_in(state: State, new_bytes: float, old_bytes: float, kinds: tuple[str, ...] = GRADIENTS) -> State:
    """Collectives of the data axes and these kinds at `new_bytes` an element where `old_bytes` were measured.

    Casts before and after are not added. Raises UsageError for sizes that are not positive.
    """
    if new_bytes <= 0 or old_bytes <= 0:
        raise UsageError(f"bytes an element must be positive, got {new_bytes} and {old_bytes}")
    groups = state.graph.groups
    items = [
        scaled_bytes(item, new_bytes / old_bytes)
        if item.kind in kinds and axis_of_item(item, groups) in (*DATA_AXES, "")
        else item
        for item in state.graph.collectives
    ]
    return recosted(state, items, groups)
