"""Turns a measured job into the share of its global batch that a rank of another size works on (strong scaling).

Micro batches go first, as long as a step holds several: with r times the ranks a step of m keeps m / r of them. Then
the micro batch shrinks, and its kernels are re-timed by the models of their shapes (kernels.anchored), or in proportion
where no shape tells; launches, waits and work on parameters stay, and no kernel falls below its floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work, ratio_error, work_seconds
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.nodework import SMALL_NS, Role, Stretch
from scaletrace.extrapolate.rewrite.batch import ACTIVATIONS, token_stretch
from scaletrace.extrapolate.rewrite.state import State, on_weights, passes
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import Graph, NodeKind

if TYPE_CHECKING:
    from scaletrace.extrapolate.base import Base

Floats = npt.NDArray[np.float64]
BY_TIME_ERROR = 0.1
"""Relative error (1 sigma) of a kernel shortened in proportion to its samples, for want of a shape."""
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank of a size does in a step: `micro_batches` of `samples` each, `factor` of the measured micro batch."""

    micro_batches: int
    samples: int
    factor: float


@dataclass(frozen=True, slots=True)
class Batch:
    """A measured job's batch on one rank, ready to be divided.

    state    the job as measured;  samples: of one micro batch, 0 = not known
    unit     what is counted: "samples", "rows of matrix products" (samples × tokens), "" where nothing tells
    assemble makes the base of a state with another number of micro batches;  made: those bases by that number
    """

    state: State
    samples: int
    unit: str
    assemble: Callable[[State], Base]
    made: dict[int, Base] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        return max(1, self.state.layout.microbatches)

    def share(self, data_ranks: int, gpus: int) -> Share:
        """The part of a rank when `data_ranks` ranks take samples. Raises UsageError where the batch does not divide."""
        old, count = self.state.layout.data_ranks, self.micro_batches
        each = Fraction(max(1, self.samples) * count * old, data_ranks)
        if not self.samples:
            # Samples are not known, so a micro batch may shrink to any part; only their number is whole.
            number = max(1, ceil(each))
            return Share(number, 0, float(each / number))
        if each.denominator != 1 or each < 1:
            raise UsageError(
                f"{gpus} GPUs: the global batch of {self.samples * count * old} {self.unit} "
                f"({self.samples} × {count} micro batches × {old} data-parallel ranks) can't be divided over "
                f"{data_ranks} data-parallel ranks; take a divisor"
            )
        whole = int(each)
        number = next(m for m in range(ceil(whole / self.samples), whole + 1) if whole % m == 0)
        return Share(number, whole // number, whole / number / self.samples)


def batch_of(state: State, assemble: Callable[[State], Base], given: bool = False) -> Batch:
    """The batch that a job's shapes tell: samples of its attention, else rows of its products.

    Those are the tokens of a micro batch of its layers (workload.infer_model, as `search` counts them), or where no
    layer told them the rows of the products that take most time.
    given: the user's layout says the samples of a micro batch
    """
    shapes = [shape for shape in state.work.shape if shape is not None]
    # A length of one token is open_state's way of saying that no shape told the micro batch.
    attends = state.layout.seq > 1 and any(shape.work is Work.ATTENTION and shape.depth > 1 for shape in shapes)
    if given or attends:
        return Batch(state, state.layout.mbs, "samples", assemble)
    forward = state.anatomy.phase == int(Phase.FORWARD)
    spent: dict[int, float] = {}
    for node in np.flatnonzero(forward & state.work.computes).tolist():
        shape = state.work.shape[node]
        if shape is not None and shape.work is Work.MATMUL and shape.batch == 1 and shape.rows > 1:
            spent[int(shape.rows)] = spent.get(int(shape.rows), 0.0) + float(state.graph.dur_ns[node])
    if not spent:
        return Batch(state, 0, "", assemble)
    tokens = state.layout.mbs * state.layout.seq if state.layout.seq > 1 else 0
    rows = tokens or max(spent, key=lambda rows: (spent[rows], rows))
    return Batch(state, rows, "rows of matrix products", assemble)


def agreed(state: State) -> State:
    """The state in which all members of a collective belong to one micro batch, phase and unit: those of its first rank.

    Ranks differ in when a bucket becomes ready, and one that is reduced after the last backward on some of them would
    be taken apart when micro batches are laid anew.
    """
    graph, anatomy = state.graph, state.anatomy
    nodes = np.flatnonzero((graph.instance >= 0) & (graph.kind != int(NodeKind.RENDEZVOUS)) & ~anatomy.is_message)
    order = nodes[np.lexsort((nodes, graph.rank[nodes], graph.instance[nodes]))]
    _, first, member = np.unique(graph.instance[order], return_index=True, return_inverse=True)
    leader = order[first][member.reshape(-1)]
    columns = {name: getattr(anatomy, name).copy() for name in ("phase", "unit", "micro_batch")}
    for column in columns.values():
        column[order] = column[leader]
    return replace(state, anatomy=replace(anatomy, **columns))


@dataclass(frozen=True, slots=True)
class Retimed:
    """Durations for another micro batch; shares of compute time by how they were found, and their relative error."""

    dur_ns: IntArray
    by_shape: float
    by_time: float
    error: float


@dataclass(frozen=True, slots=True)
class Retiming:
    """n nodes: kind[v], an index into `kinds` (shape and role of its operator), -1 = keeps its time.

    stretch  makes, for a factor of the samples, the change of each kind (rewrite.batch.token_stretch)
    """

    kind: Int32Array
    kinds: tuple[tuple[Shape | None, Role], ...]
    ceilings: Ceilings
    stretch: Callable[[float], Stretch]

    def moved(self, origin: Int32Array) -> Retiming:
        """The same for a graph whose node v was node origin[v] (-1: new, stays as it is)."""
        return replace(self, kind=np.where(origin >= 0, self.kind[origin], -1).astype(np.int32))

    @property
    def by_time(self) -> BoolArray:
        """bool[n]: nodes that follow time alone, for want of a shape."""
        blind = np.array([*(shape is None for shape, _ in self.kinds), False], np.bool_)
        return np.asarray(blind[self.kind], np.bool_)

    def apply(self, dur_ns: IntArray, factor: float) -> Retimed:
        """Durations when each micro batch holds `factor` times the samples: floor + (time - floor) · ratio, by kind."""
        change = self.stretch(factor)
        ratio, floor, error = (np.zeros(len(self.kinds) + 1) for _ in range(3))
        for at, (shape, role) in enumerate(self.kinds):
            new, scale = change(shape, role)
            if shape is None or new is None:
                ratio[at], floor[at], error[at] = scale, SMALL_NS, BY_TIME_ERROR
                continue
            before = work_seconds(shape, self.ceilings)
            ratio[at] = work_seconds(new, self.ceilings) / before if before > 0 else 1.0
            floor[at], error[at] = self.ceilings.floor_s * 1e9, ratio_error(shape, new)
        nodes = np.flatnonzero(self.kind >= 0)
        kind, old = self.kind[nodes], dur_ns[nodes].astype(np.float64)
        small = np.minimum(floor[kind], old)
        new_ns = small + (old - small) * ratio[kind]
        out = dur_ns.copy()
        out[nodes] = np.round(new_ns).astype(np.int64)
        blind = self.by_time[nodes]
        whole = max(1.0, float(old.sum()))
        return Retimed(
            out,
            float(old[~blind].sum()) / whole,
            float(old[blind].sum()) / whole,
            float((error[kind] * new_ns).sum()) / max(1.0, float(new_ns.sum())),
        )


def retiming_of(state: State) -> Retiming:
    """Which nodes of a job follow its samples: forward and backward, but for work on parameters.

    Where no forward or backward is recognised (captured or compiled steps) all compute but the optimizer's counts.
    """
    computes = state.work.computes
    inside = computes & passes(state) & ~on_weights(state.graph)
    if not inside.any():
        inside = computes & (state.anatomy.phase != int(Phase.OPTIMIZER))
    number: dict[tuple[Shape | None, int], int] = {}
    kind = np.full(len(state.graph), -1, np.int32)
    shape, role = state.work.shape, state.work.role
    for node in np.flatnonzero(inside).tolist():
        key = (shape[node], int(role[node]))
        kind[node] = number.setdefault(key, len(number))
    kinds = tuple((shape, Role(role)) for shape, role in number)
    return Retiming(kind, kinds, state.ceilings, lambda factor: token_stretch(state, factor, batch=factor))


def with_activations(graph: Graph, factor: float) -> Graph:
    """The graph whose collectives of activations (tensor, expert, context, pipeline) move `factor` times the bytes."""

    def size(value: int) -> int:
        return round(value * factor) if value >= 0 else value

    items = tuple(
        replace(item, bytes_in=size(item.bytes_in), bytes_out=size(item.bytes_out))
        if item.group >= 0 and graph.groups[item.group].axis in ACTIVATIONS
        else item
        for item in graph.collectives
    )
    return graph if items == graph.collectives else replace(graph, collectives=items)


def told_by_time(graph: Graph, retiming: Retiming, dur_ns: IntArray) -> str:
    """The names of the kernels that follow time alone and take longest, for a reader."""
    nodes = np.flatnonzero(retiming.by_time)
    if not len(nodes):
        return ""
    total = np.bincount(graph.name[nodes], weights=dur_ns[nodes], minlength=len(graph.names))
    names = [graph.names[at][:40] for at in np.argsort(-total, kind="stable")[:MOST_NAMED] if total[at] > 0]
    return ", ".join(names)
