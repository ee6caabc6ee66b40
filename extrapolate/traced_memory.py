"""Turns one rank's recorded shapes into the memory that its step needs, and its memory events into what it took.

Weights are what forward operators read as such; a tensor between two operators stays for the backward pass if the one
that makes it or the one that takes it saves it (autograd's formulas). Nothing else of the model needs to be known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from scaletrace.extrapolate.held import held_micro_batches
from scaletrace.extrapolate.kernels import Work, classify, element_bytes
from scaletrace.extrapolate.layers import steps_of
from scaletrace.extrapolate.memory import StateBytes, measured_peak_bytes
from scaletrace.extrapolate.operators import Operators, outermost
from scaletrace.extrapolate.recompute import FULL, find_again
from scaletrace.extrapolate.signatures import sections_of
from scaletrace.parse.events import Events, IntArray
from scaletrace.parse.job import RankTrace
from scaletrace.parse.members import is_shape

_WEIGHTS = {
    "linear": (1, 2), "addmm": (), "conv1d": (1, 2), "conv2d": (1, 2), "conv3d": (1, 2), "convolution": (1, 2),
    "_convolution": (1, 2), "batch_norm": (1, 2, 3, 4), "layer_norm": (2, 3), "rms_norm": (2,), "group_norm": (2, 3),
    "embedding": (0,), "native_layer_norm": (2, 3),
}  # fmt: skip
_TAKES = re.compile(
    r"^(linear|conv\dd|_?convolution|batch_norm|(native_)?layer_norm|rms_norm|group_norm|gelu|silu|mul|matmul|bmm|mm|"
    r"scaled_dot_product_attention|max_pool2d|cross_entropy_loss|pow|_?log_softmax|addmm|CheckpointFunction)$"
)
"""Operators whose backward needs their input."""
_MAKES = re.compile(
    r"^(relu_?|tanh|sigmoid|_?softmax|exp|scaled_dot_product_attention|cross_entropy_loss|_?log_softmax)$"
)
"""Operators whose backward needs their output."""
_BESIDE = {"max_pool2d": 2, "dropout": 1}
"""Bytes kept beside for an element of the input: indices of a pool of 2 × 2, masks."""


_TABLES = re.compile(r"split_embedding\w*lookup", re.IGNORECASE)
"""Lookups of FBGEMM, whose tables are updated in the backward pass by an optimizer of their own."""
_KEPT_FROM = 14
"""Operands of such a lookup before which no float one is the optimizer's."""
_OPTIMIZER = re.compile(r"Optimizer\.step#(\w+)")
_MOMENTS: Mapping[str, int] = {"sgd": 1, "adagrad": 1, "rmsprop": 1, "muon": 1, "lion": 1}
"""fp32 values an optimizer keeps beside each parameter; two (Adam) where its name is another or not known."""


@dataclass(frozen=True, slots=True)
class Traced:
    """Bytes of one rank by what they hold at the peak, from shapes; `measured` is that of its memory events, 0 = none.

    states: gradients and what the optimizer keeps; passing: gradients of one operator's input and output
    on_device: the measured total is a device's and holds all of these; a host's counts what the window allocates, which
    is activations and what passes
    held: micro batches whose activations are there at once, which `activations` counts
    elements: trained weights that one rank reads, as numbers, without tables that update themselves
    tables, fused: bytes of such tables (part of `weights`) and of what their optimizer keeps (part of `states`)
    """

    weights: int
    states: int
    activations: int
    passing: int
    measured: int
    optimizer: str
    on_device: bool
    held: float = 1.0
    elements: int = 0
    tables: int = 0
    fused: int = 0

    @property
    def predicted(self) -> int:
        whole = self.weights + self.states if self.on_device or not self.measured else 0
        return whole + self.activations + self.passing

    def to_json(self) -> dict[str, Any]:
        return {
            "predicted_bytes": self.predicted if self.weights and self.activations else None,
            "measured_bytes": self.measured or None,
            "measured_of": None if not self.measured else "device" if self.on_device else "host, beyond its start",
            "weights_bytes": self.weights or None,
            "states_bytes": self.states if self.weights else None,
            "activations_bytes": self.activations if self.weights else None,
            "optimizer": self.optimizer or None,
        }


def traced_memory(trace: RankTrace, states: StateBytes | None = None) -> Traced:
    """What the shapes of the first step say, beside what the memory events of all steps say.

    states: bytes an element of what training keeps; default: by this rank's optimizer and the type of its weights
    """
    events = trace.events
    device, measured = _measured(events)
    names = {text for text in events.strings if text.startswith("Optimizer.step#")}
    optimizer = next((re.sub(r"^Optimizer\.step#(\w+)\.step.*", r"\1", name) for name in sorted(names)), "")
    rows = np.zeros(0, np.int64)
    tables = fused = 0
    for step in steps_of(trace)[:1]:
        ops = outermost(events, step)
        tables, fused = _tables_before(events, ops)
        forward = np.flatnonzero(~ops.backward & (ops.partner >= 0))
        if len(forward):
            block = ops.block[ops.partner[forward]]
            rows = ops.row[forward[block == block[0]]]
    walk = _walk(events, rows)
    kept, moved = _kept(trace, rows, walk)
    states = states or states_of([trace], 0, walk.weights / walk.elements if walk.elements else 0.0)
    kept_states = round(walk.elements * (states.gradient + states.optimizer)) + fused
    # The gradient of one weight passes until it is added to the ones before.
    passing = moved + walk.largest * bool(kept)
    held = held_micro_batches(sections_of(trace)) if kept else 1.0
    return Traced(
        walk.weights + tables, kept_states, round(kept * held), passing, measured, optimizer, device, held, walk.elements,
        tables, fused,
    )  # fmt: skip


def states_of(traces: Sequence[RankTrace], gradient_bytes: float, compute_bytes: float) -> StateBytes:
    """Bytes an element of what a measured job keeps: the one place where that is said.

    gradient_bytes  of an element as gradients are reduced, 0 = not seen
    compute_bytes   of an element of the layers' products, 0 = not seen
    """
    weight = compute_bytes or gradient_bytes or 2.0
    master = 4.0 if weight < 4.0 and compute_bytes else 0.0
    optimizer = 4.0 * _moments(traces) + master
    return StateBytes(weight, gradient_bytes or weight, optimizer, compute_bytes or weight, fused_attention(traces))


def _moments(traces: Sequence[RankTrace]) -> int:
    """fp32 values beside each parameter, by the name of the optimizer in its step's annotation."""
    for trace in traces:
        for text in trace.events.strings:
            found = _OPTIMIZER.match(text)
            if found:
                return next((count for name, count in _MOMENTS.items() if name in found[1].lower()), 2)
    return 2


def fused_attention(traces: Sequence[RankTrace]) -> bool:
    """Whether attention keeps no scores: a fused operator or kernel is seen, or none at all."""
    texts = [text for trace in traces for text in trace.events.strings]
    return any(classify(text) is Work.ATTENTION for text in texts) or not any(
        text in ("aten::softmax", "aten::_softmax") for text in texts
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """A forward pass: weights in all and the largest; of each operator what stays for its backward and its input, bytes.

    elements: of the weights, as numbers
    """

    weights: int
    elements: int
    largest: int
    saved: IntArray
    tensor: IntArray


def _measured(events: Events) -> tuple[bool, int]:
    """(whether of a device, peak): its largest "Total Allocated"; of a host the rise, which counts from the first event."""
    found = measured_peak_bytes(events)
    if found:
        return True, max(found.values())
    total, kind = events.ints("Total Allocated"), events.ints("Device Type")
    rows = np.flatnonzero((total >= 0) & (kind == 0))
    return False, int(total[rows].max() - max(0, total[rows[0]])) if len(rows) else 0


def _kept(trace: RankTrace, rows: IntArray, walk: _Walk) -> tuple[int, int]:
    """(activations, transient bytes) at the peak: while backward runs, what is left and the gradients of one operator.

    Where layers run again in backward only their inputs stay, and one of them in full.
    """
    saved = walk.saved
    if not len(rows):
        return 0, 0
    again = find_again(trace.events)
    sections = sections_of(trace)
    if len(again.row) and sections.layers:
        at = sections.at(trace.events.ts_ns[rows])
        unit = np.where(at >= 0, sections.unit[np.maximum(at, 0)], -1)
        layered = np.array([*sections.is_layer, False], np.bool_)[unit]
        passes = max(1, len(steps_of(trace)) * max(1, sections.micro_batches))
        if len(again.row) / passes >= FULL * max(1, int(layered.sum())):
            first = layered & np.append(True, unit[1:] != unit[:-1])
            whole = max((int(saved[unit == one].sum()) for one in np.unique(unit[layered])), default=0)
            saved = np.where(layered, np.where(first, walk.tensor, 0), saved)
            return int(saved.sum()) + whole, 2 * int(walk.tensor[-1])
    held = np.cumsum(saved)
    peak = int(np.argmax(held + 2 * walk.tensor))
    return int(held[peak]), 2 * int(walk.tensor[peak])


def _walk(events: Events, rows: IntArray) -> _Walk:
    """Weights, saved tensors and inputs of a forward pass in order of time."""
    weights = elements_read = largest = 0
    saved, tensors = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    makes = False
    for at, row in enumerate(rows.tolist()):
        name = events.name_of(row).removeprefix("aten::")
        dims = _dims(events.text("Input Dims", row))
        if not any(dims):
            continue
        size = element_bytes(_first_type(events, row))
        places = _WEIGHTS.get(name, ())
        read = [round(prod(dims[place]) * size) for place in places if place < len(dims) and dims[place]]
        weights, largest = weights + sum(read), max([largest, *read])
        elements_read += round(sum(read) / size)
        elements = prod(next(entry for entry in dims if entry)) if 0 not in places else 0
        tensors[at] = round(elements * size)
        if makes or _TAKES.match(name):
            saved[at] = tensors[at]
            if name == "scaled_dot_product_attention":
                saved[at] += sum(round(prod(entry) * size) for entry in dims[1:3] if entry)
        saved[at] += round(elements * _BESIDE.get(name, 0))
        makes = bool(_MAKES.match(name))
    return _Walk(weights, elements_read, largest, saved, tensors)


def _tables_before(events: Events, ops: Operators) -> tuple[int, int]:
    """(bytes of tables, of what their optimizers keep) of the lookups ahead of the first backward operator."""
    first = int(np.argmax(ops.backward)) if ops.backward.any() else len(ops.row)
    found = [
        _tables(events, row, _dims(events.text("Input Dims", row)))
        for row in ops.row[:first].tolist()
        if _TABLES.search(events.name_of(row))
    ]
    return sum(pair[0] for pair in found), sum(pair[1] for pair in found)


def _tables(events: Events, row: int, dims: list[list[int]]) -> tuple[int, int]:
    """(bytes of the embedding tables on the device, of what their fused optimizer keeps) of one lookup.

    FBGEMM passes the tables on the device, on the host and the cache behind a placeholder, and for each thing that the
    optimizer keeps its part on the device and its part on the host.
    """
    types = _types(events, row)
    sizes = [
        round(prod(entry) * element_bytes(kind)) if entry and _is_float(kind) else 0
        for entry, kind in zip(dims, types, strict=False)
    ]
    kept = [at for at, kind in enumerate(types[: len(sizes)]) if at >= _KEPT_FROM and _is_float(kind) and dims[at]]
    return sum(sizes[1:2] + sizes[3:4]), sum(sizes[at] for at in kept[::2])


def _types(events: Events, row: int) -> list[str]:
    text = events.text("Input type", row) or ""
    try:
        return [str(kind) for kind in json.loads(text)] if text else []
    except (ValueError, RecursionError):
        return []


def _is_float(kind: str) -> bool:
    return bool(kind) and not any(word in kind.lower() for word in ("int", "long", "bool", "scalar", "char"))


def _first_type(events: Events, row: int) -> str:
    floats = [kind for kind in _types(events, row) if kind and "long" not in kind.lower() and "int" not in kind.lower()]
    return floats[0] if floats else "float"


def _dims(text: str | None) -> list[list[int]]:
    try:
        entries = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    return [e if is_shape(e) else [] for e in entries]
