"""Turns the host nodes of a job without a device into how much of each is dispatch, which no change of size moves.

What computes is an operator that calls no other: a product, a copy, an addition. What surrounds it (Python, autograd,
the wrappers of DTensor, views) is host work and stays as it was measured. A function of the user's own that hides what
it does is taken to compute all the time.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.operators import Operators
from scaletrace.parse.events import BoolArray, Events, IntArray

FloatArray = npt.NDArray[np.float64]
_LIBRARY = re.compile(
    r"^(autograd::engine::evaluate_function: )?(aten::|torch::autograd::|c10d|_c10d|fsdp|FSDP::|"
    r"_?(To|From)TorchTensor|Redistribute|NestedRedistribute|_ToTorchTensor|_FromTorchTensor|PythonSubclass|"
    r"RegisterPostBackward|AsyncCollective|_AllReduce|_AllGather|_ReduceScatter|CheckpointFunction|\w+Backward\d+$)"
)
"""Operators of PyTorch itself, whose compute stands in operators that they call."""
_VIEWS = re.compile(
    r"^aten::(t|transpose|permute|view|_unsafe_view|reshape|_reshape_alias|as_strided|expand|expand_as|select|slice|narrow|"
    r"unsqueeze|squeeze|detach|detach_|alias|unbind|split|chunk|empty|empty_like|empty_strided|new_empty|new_empty_strided|"
    r"resize_|set_|result_type|to|lift_fresh|_to_copy|contiguous|item|_local_scalar_dense|is_nonzero|requires_grad_|resolve_conj|resolve_neg)$"
)
"""Operators that only look at a tensor in another way, or make room for one."""


def dispatch_ns(events: Events, ops: Operators, op: IntArray, start_ns: IntArray, end_ns: IntArray) -> FloatArray:
    """Of each node (int64[k]: its outermost operator op ≥ 0, when it ran on the rank's own clock) what is no compute."""
    leaf = np.flatnonzero(_leaves(events))
    lane = events.lane[ops.row[op]]
    covered = np.zeros(len(op))
    for code in np.unique(lane):
        mine = np.flatnonzero(lane == code)
        inner = leaf[events.lane[leaf] == code]
        inner = inner[np.argsort(events.ts_ns[inner], kind="stable")]
        begin, end = events.ts_ns[inner], np.maximum.accumulate(events.end_ns[inner])
        total = np.concatenate([[0], np.cumsum(end - begin)])
        covered[mine] = _until(end_ns[mine], begin, end, total) - _until(start_ns[mine], begin, end, total)
    spent = (end_ns - start_ns).astype(np.float64)
    library = np.array([bool(_LIBRARY.match(text)) for text in events.strings] + [False], np.bool_)
    opaque = ~library[events.name[ops.row[op]]] & (covered < 0.5 * spent)
    return np.asarray(np.where(opaque, 0.0, np.clip(spent - covered, 0.0, spent)), np.float64)


def _leaves(events: Events) -> BoolArray:
    """Operators that touch data and call no other that does: bool[rows]."""
    computes = np.array(
        [text.startswith("aten::") and not _VIEWS.match(text) for text in events.strings] + [False], np.bool_
    )
    rows = np.flatnonzero(events.in_cats("cpu_op") & (events.dur_ns >= 0) & computes[events.name])
    rows = rows[np.lexsort((-events.dur_ns[rows], events.ts_ns[rows], events.lane[rows]))]
    alone = np.ones(len(rows), np.bool_)
    same = events.lane[rows[1:]] == events.lane[rows[:-1]]
    alone[:-1] = ~(same & (events.ts_ns[rows[1:]] < events.end_ns[rows[:-1]]))
    out = np.zeros(len(events), np.bool_)
    out[rows[alone]] = True
    return out


def _until(moment: IntArray, begin: IntArray, end: IntArray, total: IntArray) -> FloatArray:
    """How long any of the intervals (sorted, disjoint) had run by each moment."""
    at = np.searchsorted(begin, moment, side="right")
    last = np.maximum(at - 1, 0)
    over = np.where(at > 0, np.maximum(end[last] - moment, 0), 0) if len(begin) else np.zeros(len(moment), np.int64)
    return np.asarray(total[at] - over, np.float64)
