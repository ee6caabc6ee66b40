"""Turns the nodes of a built graph into what they compute: shape, role in a split layer, and weights of each unit.

A role says which dimension of an operator is divided by tensor parallelism: the columns of the first matrices of
attention and MLP, the rows of the second ones, heads of attention, width of what lies between; norms and residuals stay
whole. Backward nodes take shape and role of the forward operator that autograd names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.dispatch import dispatch_ns
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work, anchored, classify, ratio_error, shape_of
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.operators import Operators, all_outermost
from scaletrace.jit import jit
from scaletrace.parse.build import Built
from scaletrace.parse.events import BoolArray, ByteArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import STEADY, RankTrace
from scaletrace.parse.members import is_shape

FloatArray = npt.NDArray[np.float64]
SMALL_NS = 2_000
"""Where no shape is known, this much of a kernel is taken to be launch and drain, which no change of size moves."""


class Mark(IntEnum):
    """Where tensor parallelism communicates: bits of NodeWork.mark."""

    AFTER_ROW = 1
    """The last node of a row product: its partial sums are reduced behind it."""
    AFTER_COLUMN_BACKWARD = 2
    """The last node of the backward of the first of a group of column products: the input's gradient is reduced."""
    BEFORE_COLUMN = 4
    """The first node of the first of a group of column products: with sequence parallelism its input is gathered."""
    BEFORE_ROW_BACKWARD = 8
    """The first node of the backward of a row product: with sequence parallelism the gradient is gathered."""


class Role(IntEnum):
    """How tensor parallelism divides an operator."""

    WHOLE = 0
    COLUMN = 1
    ROW = 2
    HEADS = 3
    BETWEEN = 4


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter as an operator reads it: its dimensions on this rank and the role of the operator."""

    dims: tuple[int, ...]
    role: Role

    @property
    def elements(self) -> int:
        return int(np.prod(self.dims, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class NodeWork:
    """n nodes: shape[v] (None = unknown), role uint8[n]; computes bool[n]: its time follows the size of its work.

    weights: the parameters of each unit (Anatomy.units), as one rank holds them, unsharded
    op int32[n]: running number of the node's outermost operator on its rank, -1 = none
    mark uint8[n]: bits of Mark, where a layer divided by tensor parallelism communicates
    held_ns float64[n]: what of the node's time is dispatch (dispatch.dispatch_ns); empty: nothing
    """

    shape: tuple[Shape | None, ...]
    role: ByteArray
    computes: BoolArray
    weights: tuple[tuple[Weight, ...], ...]
    op: Int32Array
    mark: ByteArray
    health: Health = field(default_factory=Health)
    held_ns: FloatArray = field(default_factory=lambda: np.zeros(0))

    def moved(self, origin: Int32Array) -> NodeWork:
        """The same for a graph whose node v was node origin[v] (-1: new)."""
        here = origin >= 0
        return replace(
            self,
            shape=tuple(self.shape[o] if o >= 0 else None for o in origin.tolist()),
            role=np.where(here, self.role[origin], 0).astype(np.uint8),
            computes=np.where(here, self.computes[origin], False),
            op=np.where(here, self.op[origin], -1).astype(np.int32),
            mark=np.where(here, self.mark[origin], 0).astype(np.uint8),
            held_ns=np.where(here, self.held_ns[origin], 0.0) if len(self.held_ns) else self.held_ns,
        )


def node_work(built: Built, anatomy: Anatomy, tp: int = 1) -> NodeWork:
    """Shapes and roles of all nodes; `tp` is the tensor degree of the trace (its matrices are already divided)."""
    graph = built.graph
    n = len(graph)
    op = np.full(n, -1, np.int64)
    shapes: list[Shape | None] = [None] * n
    role = np.zeros(n, np.uint8)
    weights: list[tuple[Weight, ...]] = [()] * len(anatomy.units)
    tables: dict[int, tuple[list[Shape | None], ByteArray]] = {}
    marks: dict[int, dict[int, int]] = {}
    held = np.zeros(n)
    for trace in built.job.ranks:
        ops = all_outermost(trace)
        clock = built.job.clocks.get(trace.rank, STEADY)
        mine = np.flatnonzero(graph.rank == trace.rank)
        began = clock.to_own_ns(built.measured.start_ns[mine])
        at = np.searchsorted(ops.start_ns, began, side="right") - 1
        inside = (at >= 0) & (began < ops.end_ns[np.maximum(at, 0)]) if len(ops.row) else np.zeros(len(mine), np.bool_)
        op[mine] = np.where(inside, at, -1)
        unit = _unit_of_ops(graph, anatomy, op, mine, len(ops.row))
        of_op, weights_here = _roles(trace, ops, unit, anatomy, tp)
        for number, found in weights_here.items():
            weights[number] = weights[number] or found
        marks[trace.rank] = _marks(trace.events, ops, of_op, unit)
        tables[trace.rank] = (_shapes(trace.events, ops), of_op)
        ran = mine[inside & (op[mine] >= 0)]
        start, end = (clock.to_own_ns(times[ran]) for times in (built.measured.start_ns, built.measured.end_ns))
        held[ran] = dispatch_ns(trace.events, ops, op[ran], start, end)
    host = np.array([not lane.is_device for lane in graph.lanes] + [False], np.bool_)[graph.lane]
    issued = _spread(graph.pred_ptr, graph.pred, graph.edge_kind, graph.rank, op, host)
    for rank, (shape_of_op, role_of_op) in tables.items():
        events = built.job.rank(rank).events
        inner = _inner_shapes(events)
        for node in np.flatnonzero((graph.rank == rank) & (issued >= 0)).tolist():
            number = int(issued[node])
            role[node] = role_of_op[number]
            shapes[node] = shape_of_op[number]
            if shapes[node] is None and graph.event[node] >= 0:
                shapes[node] = inner(int(events.external_id[graph.event[node]]))
    computes = _computes(graph, op)
    return NodeWork(
        tuple(shapes),
        role,
        computes,
        tuple(weights),
        issued.astype(np.int32),
        _place(graph, issued, computes, marks),
        _health(graph, shapes),
        np.where(computes & (graph.kind == int(NodeKind.HOST)), np.minimum(held, graph.dur_ns), 0.0),
    )


def _health(graph: Graph, shapes: Sequence[Shape | None]) -> Health:
    health = Health()
    blind = sum(
        shape is None and kind == int(NodeKind.KERNEL) for shape, kind in zip(shapes, graph.kind.tolist(), strict=True)
    )
    if blind:
        health.guessed["kernels without a shape, whose time is stretched in proportion"] += blind
    return health


def _computes(graph: Graph, op: IntArray) -> BoolArray:
    """Kernels and copies on a device; where there is no device, the operators of the host."""
    device = np.array([lane.is_device for lane in graph.lanes] + [False], np.bool_)[graph.lane]
    kernels = np.isin(graph.kind, [int(NodeKind.KERNEL), int(NodeKind.COPY)]) & device & (graph.instance < 0)
    if kernels.any():
        return np.asarray(kernels, np.bool_)
    quiet = np.array([name.startswith(("c10d::", "gloo:", "between")) for name in graph.names] + [True], np.bool_)
    return np.asarray((graph.kind == int(NodeKind.HOST)) & (op >= 0) & ~quiet[graph.name], np.bool_)


@jit
def _spread(
    pred_ptr: IntArray, pred: Int32Array, edge_kind: ByteArray, rank: Int32Array, op: IntArray, host: BoolArray
) -> IntArray:
    """Operator of every node: its own on the host, elsewhere that of the call that issued it."""
    out = op.copy()
    for v in range(len(op)):
        if host[v]:
            continue
        out[v] = -1
        for e in range(pred_ptr[v], pred_ptr[v + 1]):
            if rank[pred[e]] == rank[v] and (edge_kind[e] == 1 or edge_kind[e] == 5):
                out[v] = out[pred[e]]
    return out


def _unit_of_ops(graph: Graph, anatomy: Anatomy, op: IntArray, mine: IntArray, count: int) -> Int32Array:
    """Unit of each outermost operator, where it is a forward one of some unit."""
    out = np.full(count, -1, np.int32)
    known = mine[(op[mine] >= 0) & (anatomy.phase[mine] == int(Phase.FORWARD)) & (anatomy.unit[mine] >= 0)]
    out[op[known]] = anatomy.unit[known]
    return out


def _dims(text: str | None) -> list[tuple[int, ...]]:
    try:
        entries = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    if not isinstance(entries, list):
        return []
    return [tuple(e) if is_shape(e) else () for e in entries]


def _operand(events: Events, row: int) -> tuple[str, list[tuple[int, ...]]]:
    """Name and dimensions of an operator, or of the first linear layer, product or attention inside it.

    Of an operator on distributed tensors those of this rank's part, which the call inside their wrapper has.
    """
    name, dims = events.name_of(row), _dims(events.text("Input Dims", row))
    inner = _inside(events, row)
    local = _wrapped(events, inner)
    if classify(name) in _KNOWN:
        return (name, _of_part(name, dims, events, local)) if local >= 0 else (name, dims)
    for at in inner:
        found = events.name_of(at)
        if classify(found) in (Work.MATMUL, Work.ATTENTION):
            of_at = _dims(events.text("Input Dims", at))
            return (found, _of_part(found, of_at, events, local)) if local >= 0 else (found, of_at)
    return name, dims


_WRAPPER = "PythonSubclass"
_KNOWN = (Work.MATMUL, Work.ATTENTION, Work.EMBEDDING, Work.NORM)


def _inside(events: Events, row: int) -> list[int]:
    """Rows of the operators that run inside one, on its thread, in order."""
    out, at, end = [], row + 1, int(events.end_ns[row])
    while at < len(events) and int(events.ts_ns[at]) < end:
        if events.lane[at] == events.lane[row]:
            out.append(at)
        at += 1
    return out


def _told(events: Events, row: int) -> Role | None:
    """How tensor parallelism divides a linear layer on distributed tensors: by which dimension of its weight is smaller
    on this rank than as a whole. None where the trace does not tell."""
    rows = [row, *_inside(events, row)]
    at = next((each for each in rows if events.name_of(each) == "aten::linear"), -1)
    local = _wrapped(events, rows)
    if at < 0 or local < 0 or classify(events.name_of(local)) is not Work.MATMUL:
        return None
    whole = _dims(events.text("Input Dims", at))
    part = _of_part("aten::linear", whole, events, local)
    if len(whole) < 2 or len(whole[1]) != 2 or len(part[1]) != 2:
        return None
    columns, depth = (mine < total for mine, total in zip(part[1], whole[1], strict=True))
    return Role.COLUMN if columns else Role.ROW if depth else Role.WHOLE


def _wrapped(events: Events, rows: Sequence[int]) -> int:
    """The first known operator that runs inside a wrapper of distributed tensors, -1 without one."""
    until = -1
    for at in rows:
        if events.name_of(at) == _WRAPPER:
            until = max(until, int(events.end_ns[at]))
        elif int(events.ts_ns[at]) < until and classify(events.name_of(at)) in _KNOWN:
            return at
    return -1


def _of_part(name: str, dims: list[tuple[int, ...]], events: Events, local: int) -> list[tuple[int, ...]]:
    """Dimensions of this rank's part of an operator, from the call on its part; the whole ones where that tells less."""
    found = _dims(events.text("Input Dims", local))
    if events.name_of(local) == name:
        return found
    factors = [each for each in found if len(each) == 2]
    if name == "aten::linear" and len(factors) == 2 and dims:
        (rows, depth), (_, columns) = factors
        lead = dims[0][:-1] if int(np.prod(dims[0][:-1], dtype=np.int64)) == rows else (rows,)
        bias = [(columns,)] if len(dims) > 2 and dims[2] else []
        return [(*lead, depth), (columns, depth), *bias]
    return dims


def _roles(
    trace: RankTrace, ops: Operators, unit: Int32Array, anatomy: Anatomy, tp: int
) -> tuple[ByteArray, dict[int, tuple[Weight, ...]]]:
    """Role of every outermost operator, and the weights of each unit from its first micro batch."""
    role = np.zeros(len(ops.row), np.uint8)
    weights: dict[int, tuple[Weight, ...]] = {}
    forward = np.flatnonzero((unit >= 0) & ~ops.backward)
    runs = np.split(forward, np.flatnonzero((np.diff(unit[forward]) != 0) | (np.diff(forward) > 64)) + 1)
    for run in runs:
        if not len(run):
            continue
        operands = [_operand(trace.events, int(ops.row[at])) for at in run.tolist()]
        is_layer = anatomy.is_layer[int(unit[run[0]])]
        told = [_told(trace.events, int(ops.row[at])) for at in run.tolist()] if tp > 1 else []
        found = layer_roles(operands, tp, told) if is_layer else [Role.WHOLE] * len(operands)
        role[run] = found
        weights.setdefault(int(unit[run[0]]), tuple(_weights(operands, found)))
    paired = np.flatnonzero(ops.backward & (ops.partner >= 0))
    role[paired] = role[ops.partner[paired]]
    # What has no partner (AccumulateGrad, transposes) follows the node whose gradient it takes.
    back = np.flatnonzero(ops.backward)
    known = np.maximum.accumulate(np.where(ops.partner[back] >= 0, np.arange(len(back)), -1)) if len(back) else back
    role[back] = np.where(known >= 0, role[back[np.maximum(known, 0)]], role[back])
    return role, weights


def layer_roles(
    operands: Sequence[tuple[str, list[tuple[int, ...]]]], tp: int = 1, told: Sequence[Role | None] = ()
) -> list[Role]:
    """Roles of a layer's forward operators in order, from names and dimensions; `told` are those that are known.

    A product from the layer's width to another is a column one, from another back to it a row one; between equal widths
    the ones before attention are columns and the first after it is a row. `tp` > 1: one of the two widths is divided.
    """
    works = [classify(name) for name, _ in operands]
    products = [
        _product(name, dims) if work is Work.MATMUL else None
        for (name, dims), work in zip(operands, works, strict=True)
    ]
    if not any(products):  # no dimensions: what multiplies is divided, the rest is not
        return [{Work.MATMUL: Role.COLUMN, Work.ATTENTION: Role.HEADS}.get(work, Role.WHOLE) for work in works]
    inputs = [p[1] for p in products if p]
    hidden = inputs[0] if inputs else 0
    attends = [i for i, work in enumerate(works) if work is Work.ATTENTION]
    out = [Role.WHOLE] * len(operands)
    for i, found in enumerate(products):
        known = told[i] if i < len(told) else None
        if known is not None:
            out[i] = known
            continue
        if not found:
            continue
        columns, depth = found
        seen = [a for a in attends if a < i]
        after_attention = bool(seen) and not any(products[j] for j in range(seen[-1] + 1, i))
        if after_attention and columns == hidden:
            out[i] = Role.ROW
        elif depth == hidden and columns != hidden:
            out[i] = Role.COLUMN
        elif depth != hidden and columns == hidden:
            out[i] = Role.ROW
        elif any(a > i for a in attends):
            out[i] = Role.COLUMN
    inside = False
    for i, given in enumerate(out):
        if works[i] is Work.ATTENTION and inside:
            out[i] = Role.HEADS
        elif given is Role.COLUMN:
            inside = True
        elif given is Role.ROW:
            inside = False
        elif inside:
            out[i] = Role.BETWEEN
    return out


def _marks(events: Events, ops: Operators, role: ByteArray, unit: Int32Array) -> dict[int, int]:
    """Bits of Mark by outermost operator: AFTER bits belong to its last node, BEFORE bits to its first."""
    works = [classify(events.name_of(row)) for row in ops.row.tolist()]
    backward_of: dict[int, int] = {}
    for at in np.flatnonzero(ops.backward & (ops.partner >= 0)).tolist():
        if works[at] is Work.MATMUL or int(ops.partner[at]) not in backward_of:
            backward_of[int(ops.partner[at])] = at
    out: dict[int, int] = {}
    in_group = False
    for at in np.flatnonzero((unit >= 0) & ~ops.backward).tolist():
        if role[at] == Role.COLUMN and works[at] is Work.MATMUL:
            if not in_group:
                out[at] = out.get(at, 0) | Mark.BEFORE_COLUMN
                if at in backward_of:
                    out[backward_of[at]] = out.get(backward_of[at], 0) | Mark.AFTER_COLUMN_BACKWARD
            in_group = True
        elif role[at] == Role.ROW and works[at] is Work.MATMUL:
            out[at] = out.get(at, 0) | Mark.AFTER_ROW
            if at in backward_of:
                out[backward_of[at]] = out.get(backward_of[at], 0) | Mark.BEFORE_ROW_BACKWARD
            in_group = False
        elif role[at] in (Role.HEADS, Role.WHOLE):
            in_group = False
    return out


def _place(graph: Graph, op: IntArray, computes: BoolArray, marks: dict[int, dict[int, int]]) -> ByteArray:
    """The marks of operators on the first and last computing node of each."""
    out = np.zeros(len(graph), np.uint8)
    before = Mark.BEFORE_COLUMN | Mark.BEFORE_ROW_BACKWARD
    for rank, of_op in marks.items():
        mine = np.flatnonzero((graph.rank == rank) & computes & (op >= 0))
        last = dict(zip(op[mine].tolist(), mine.tolist(), strict=True))
        first = dict(zip(op[mine[::-1]].tolist(), mine[::-1].tolist(), strict=True))
        for number, bits in of_op.items():
            if number in last:
                out[last[number]] |= bits & ~before
                out[first[number]] |= bits & before
    return out


def _product(name: str, dims: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
    """(columns, depth) of a linear layer or a plain product, None for batched ones."""
    shape = shape_of(name, json.dumps([list(d) for d in dims]))
    return (int(shape.columns), int(shape.depth)) if shape and shape.batch == 1 else None


def _weights(operands: Sequence[tuple[str, list[tuple[int, ...]]]], roles: Sequence[Role]) -> list[Weight]:
    out = []
    for (name, dims), role in zip(operands, roles, strict=True):
        if name == "aten::linear" and len(dims) > 1:
            out.append(Weight(dims[1], role))
            if len(dims) > 2 and dims[2]:
                out.append(Weight(dims[2], role if role is Role.COLUMN else Role.WHOLE))
        elif name == "aten::embedding" and dims:
            out.append(Weight(dims[0], Role.WHOLE))
        elif name in ("aten::layer_norm", "aten::rms_norm"):
            out.extend(Weight(dims[at], Role.WHOLE) for at in (2, 3) if at < len(dims) and dims[at])
    return out


def _shapes(events: Events, ops: Operators) -> list[Shape | None]:
    """Shape of every outermost operator; of a backward node that of its forward operator."""
    out: list[Shape | None] = []
    for row in ops.row.tolist():
        name, dims = _operand(events, row)
        out.append(shape_of(name, json.dumps([list(d) for d in dims]), events.text("Input type", row)))
    for at in np.flatnonzero(ops.backward).tolist():
        partner = int(ops.partner[at])
        out[at] = out[partner] if partner >= 0 else None
    return out


def _inner_shapes(events: Events) -> Callable[[int], Shape | None]:
    """Shape of the operator that carries an External id, looked up on demand."""
    rows = np.flatnonzero(events.in_cats("cpu_op") & (events.external_id >= 0) & (events.texts("Input Dims") >= 0))
    row_of = dict(zip(events.external_id[rows].tolist(), rows.tolist(), strict=True))

    def find(number: int) -> Shape | None:
        row = row_of.get(number)
        if row is None:
            return None
        return shape_of(events.name_of(row), events.text("Input Dims", row), events.text("Input type", row))

    return find


Stretch = Callable[[Shape | None, Role], tuple[Shape | None, float]]
"""(old shape, role) → (new shape, factor of the work where no shape is known)."""


def retime(
    graph: Graph,
    exact_ns: FloatArray,
    work: NodeWork,
    stretch: Stretch,
    ceilings: Ceilings,
    where: BoolArray,
    other: Ceilings | None = None,
) -> tuple[FloatArray, tuple[Shape | None, ...], float]:
    """(durations, shapes, mean relative error) after changing the work of the nodes in `where` that compute.

    other: ceilings of the device that they then run on, where that is not the measured one
    """
    out, shapes = exact_ns.copy(), list(work.shape)
    held = work.held_ns if len(work.held_ns) else np.zeros(len(graph))
    cache: dict[tuple[Shape | None, int], tuple[Shape | None, float, float]] = {}
    weighted = total = 0.0
    for node in np.flatnonzero(work.computes & where).tolist():
        old = work.shape[node]
        key = (old, int(work.role[node]))
        if key not in cache:
            new, factor = stretch(old, Role(key[1]))
            known = old is not None and new is not None
            error = ratio_error(old, new) if old is not None and new is not None else 0.1 * (factor != 1.0)
            cache[key] = (new if known else None, factor, error)
        new, factor, error = cache[key]
        fixed = held[node]
        if old is not None and new is not None:
            out[node] = fixed + anchored((out[node] - fixed) * 1e-9, old, new, ceilings, other) * 1e9
            shapes[node] = new
        elif factor != 1.0:
            fixed += min(out[node] - fixed, SMALL_NS)
            out[node] = fixed + (out[node] - fixed) * factor
        weighted += error * out[node]
        total += out[node]
    return out, tuple(shapes), weighted / total if total else 0.0
