"""Turns a state into one whose gradients, or gathered parameters, travel in another precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.layout import DATA_AXES, PRECISIONS
from scaletrace.extrapolate.rewrite.data import ELEMENT_BYTES
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, recosted, scaled_bytes, told
from scaletrace.parse.graph import GraphCollective

GRADIENTS = ("all_reduce", "reduce_scatter")
PARAMETERS = ("all_gather", "broadcast")
SCALAR_BYTES = 64
"""What moves no more than this is a loss, a norm or a flag, and keeps its precision."""
DTYPES = {"fp32": "Float", "bf16": "BFloat16", "fp16": "Half", "fp8": "Float8"}


def reduce_gradients(state: State, precision: str) -> State:
    """Gradients reduced in `precision` ("fp32", "bf16", "fp16", "fp8") instead of the measured one.

    What they are measured in is told by the collectives' own types, else by the bytes that the weights would take.
    Raises UsageError for a name that is not known.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"gradients are reduced in one of {', '.join(PRECISIONS)}, not {precision!r}")
    measured = PRECISIONS.get(state.layout.grads) or measured_bytes(state)
    out = state
    if measured is None:
        measured = 4.0
        out = told(state, guess="precision of the measured gradients taken as fp32, since no type or weight tells")
    out = reduce_in(out, PRECISIONS[precision], measured, dtype=DTYPES[precision])
    return replace(out, layout=replace(state.layout, grads=precision))


def measured_bytes(state: State) -> float | None:
    """Bytes an element of the gradients' collectives, None where nothing tells."""
    found = [item for item in state.graph.collectives if _moves(item, state, GRADIENTS)]
    for item in found:
        if item.dtype in ELEMENT_BYTES:
            return float(ELEMENT_BYTES[item.dtype])
    weights = float(sum(weight.elements for unit in state.work.weights for weight in unit))
    steps = max(1, len({int(step) for step in state.graph.step[state.graph.step >= 0].tolist()}))
    # A job that reduces behind every micro batch moves its gradients that often; once is enough to tell their size.
    members = np.flatnonzero(state.graph.instance >= 0)
    batch_of = dict(
        zip(state.graph.instance[members].tolist(), state.anatomy.micro_batch[members].tolist(), strict=True)
    )
    sums: dict[int, int] = {}
    for at, item in enumerate(state.graph.collectives):
        if at in batch_of and _moves(item, state, GRADIENTS) and item.bytes_in > 0:
            sums[batch_of[at]] = sums.get(batch_of[at], 0) + item.bytes_in
    total = sums.pop(-1, 0) + max(sums.values(), default=0)
    ratio = total / steps / weights if weights else 0.0
    nearest = min((1.0, 2.0, 4.0, 8.0), key=lambda size: abs(ratio / size - 1))
    return nearest if abs(ratio / nearest - 1) < 0.2 else None


def reduce_in(
    state: State, new_bytes: float, old_bytes: float, kinds: tuple[str, ...] = GRADIENTS, dtype: str = ""
) -> State:
    """Collectives of the data axes and these kinds at `new_bytes` an element where `old_bytes` were measured.

    Casts before and after are not added. Raises UsageError for sizes that are not positive.
    """
    if new_bytes <= 0 or old_bytes <= 0:
        raise UsageError(f"bytes an element must be positive, got {new_bytes} and {old_bytes}")
    items = []
    for item in state.graph.collectives:
        if _moves(item, state, kinds):
            item = scaled_bytes(item, new_bytes / old_bytes)
            item = replace(item, dtype=dtype) if dtype and item.dtype else item
        items.append(item)
    return recosted(state, items, state.graph.groups)


def _moves(item: GraphCollective, state: State, kinds: tuple[str, ...]) -> bool:
    """Whether a collective carries gradients (or parameters) over a data axis."""
    axis = axis_of_item(item, state.graph.groups)
    large = max(item.bytes_in, item.bytes_out) > SCALAR_BYTES
    return item.kind in kinds and large and axis in (*DATA_AXES, "world", "")
