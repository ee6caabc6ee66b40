"""Turns a built graph into its anatomy: of every node the phase, the layer and the micro batch that it works for.

Host nodes are told by the moment at which they ran (layers.Sections), nodes on streams and worker threads by the call
that issued them. What a rewrite needs of shapes (parameters of a unit, bytes between two layers) is read here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scaletrace.extrapolate.kernels import Shape, element_bytes, shape_of
from scaletrace.extrapolate.layers import Phase, Sections
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.lone import staged
from scaletrace.extrapolate.signatures import sections_of
from scaletrace.jit import jit
from scaletrace.parse.build import Built
from scaletrace.parse.events import BoolArray, ByteArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import STEADY, Job, RankTrace
from scaletrace.parse.members import is_shape

MESSAGES = ("send", "recv")
_MESSAGE_CALL = re.compile(r"c10d::(send|recv|recv_|coalesced)|batch_isend_irecv|p2p", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """n nodes: phase uint8[n] (Phase); unit, micro_batch int32[n], -1 = none; is_message bool[n]: part of a send.

    units       names in model order over all stages; is_layer says which are the repeated ones
    parameters  float64[units]: weights of each unit on one rank, 0 where no shape tells
    boundary_bytes  what one micro batch hands from one layer to the next, 0 unknown
    kind        what sort of layer each unit is, "" for the others
    why         why no layers were found and what to record, "" where there are some
    exact_ns    float64[n]: durations before rounding, so that scaling back and forth loses nothing
    entry       as weave keeps it, for the same purpose
    beyond_ns   float64[n]: of each transfer's time, what another size does not stretch (transfers.beyond_ns); None: nothing
    """

    phase: ByteArray
    unit: Int32Array
    micro_batch: Int32Array
    is_message: BoolArray
    units: tuple[str, ...]
    is_layer: tuple[bool, ...]
    parameters: np.typing.NDArray[np.float64]
    boundary_bytes: int
    exact_ns: np.typing.NDArray[np.float64]
    rule: str
    entry: IntArray | None = None
    kind: tuple[str, ...] = ()
    why: str = ""
    health: Health = field(default_factory=Health)
    beyond_ns: np.typing.NDArray[np.float64] | None = None

    @property
    def micro_batches(self) -> int:
        return int(self.micro_batch.max()) + 1 if len(self.micro_batch) else 0

    @property
    def layers(self) -> int:
        return sum(self.is_layer)

    def to_json(self) -> dict[str, Any]:
        """What `inspect` shows: units in model order, which of them are layers, and how they were found."""
        return {
            "rule": self.rule,
            "layers": self.layers,
            "micro_batches": self.micro_batches,
            "units": [
                {"name": name, "layer": is_layer, "parameters": int(count) if count else None}
                for name, is_layer, count in zip(self.units, self.is_layer, self.parameters, strict=True)
            ],
            "boundary_bytes": self.boundary_bytes or None,
        }

    def moved(self, origin: Int32Array) -> Anatomy:
        """The anatomy of a graph whose node v was node origin[v] (-1: new, belongs to nothing)."""
        here = origin >= 0
        return replace(
            self,
            phase=np.where(here, self.phase[origin], 0).astype(np.uint8),
            unit=np.where(here, self.unit[origin], -1).astype(np.int32),
            micro_batch=np.where(here, self.micro_batch[origin], -1).astype(np.int32),
            is_message=np.where(here, self.is_message[origin], False),
            exact_ns=np.where(here, self.exact_ns[origin], 0.0),
            beyond_ns=None if self.beyond_ns is None else np.where(here, self.beyond_ns[origin], 0.0),
        )


def dissect(built: Built, layout: Layout | None = None) -> Anatomy:
    """The anatomy of a job. With a pipeline in `layout` the units of its stages are numbered through."""
    graph, job = built.graph, built.job
    sections, outline = outlined(job, stages_in(job, layout))
    names, flags, shift = outline.names, outline.is_layer, outline.shift
    at = np.full(len(graph), -1, np.int64)
    for rank, found in sections.items():
        mine = np.flatnonzero(graph.rank == rank)
        at[mine] = found.at(job.clocks.get(rank, STEADY).to_own_ns(built.measured.start_ns[mine]))
    host = np.isin(graph.kind, [int(k) for k in (NodeKind.HOST, NodeKind.LAUNCH, NodeKind.WAIT, NodeKind.STALL)])
    host &= np.array([not lane.is_device for lane in graph.lanes] + [False], np.bool_)[graph.lane]
    issued = _issued(graph.pred_ptr, graph.pred, graph.edge_kind, graph.rank, at, host)
    phase, unit, batch = _columns(graph, sections, issued, shift)
    for rank, found in sections.items():
        _place(graph, rank, found, shift[rank], phase, unit, batch)
    parameters = np.zeros(len(names))
    boundary = 0
    for trace in job.ranks:
        found = sections[trace.rank]
        own = _parameters(trace, found, len(names), shift[trace.rank])
        parameters = np.maximum(parameters, own)
        boundary = max(boundary, _boundary(trace, found))
    return Anatomy(
        phase,
        unit,
        batch,
        _messages(graph),
        names,
        flags,
        parameters,
        boundary,
        graph.dur_ns.astype(np.float64),
        outline.rule,
        kind=outline.kind,
        why=outline.why,
        health=outline.health,
    )


@dataclass(frozen=True, slots=True)
class Outline:
    """The units of a whole job: names, flags and kinds in model order over all stages, and how they were found.

    shift: for each rank its local units' global numbers, int32
    """

    names: tuple[str, ...]
    is_layer: tuple[bool, ...]
    kind: tuple[str, ...]
    shift: Mapping[int, Int32Array]
    rule: str
    why: str
    health: Health = field(default_factory=Health)

    @property
    def layers(self) -> int:
        return sum(self.is_layer)


def stages_in(job: Job, layout: Layout | None) -> dict[int, int]:
    """Pipeline stage of each rank that is there under a layout, 0 without one."""
    ranks = [trace.rank for trace in job.ranks]
    return {rank: layout.coordinates(rank)["pp"] if layout and rank < layout.ranks else 0 for rank in ranks}


def outlined(job: Job, stages: Mapping[int, int]) -> tuple[dict[int, Sections], Outline]:
    """Sections of every rank, and the units that they make together; pipeline stages (by rank) are numbered through."""
    sections = {trace.rank: sections_of(trace) for trace in job.ranks}
    if any(not found.layers for found in sections.values()):
        sections |= staged({trace.rank: trace for trace in job.ranks}, stages)
    health = Health()
    most = max((found.layers for found in sections.values()), default=0)
    first = next((found for found in sections.values() if found.layers == most), None)
    rule, why = (first.rule, first.why) if first else ("nothing", "the capture holds no rank")
    if most and not rule.startswith(("FSDP", "names", "annotations")):
        health.guessed[f"ranks whose layers were found by {rule}"] += len(sections)
    uncut = sum(found.uncut for found in sections.values())
    if uncut:
        health.unmatched["passes in which another number of layers was seen"] += uncut
    if not most:
        health.note(f"No layers were found: {why}. The model counts as one unit.")
    names, flags, kinds, shift = _number(sections, stages)
    return sections, Outline(names, flags, kinds, shift, rule, why if not most else "", health)


def _number(
    sections: Mapping[int, Sections], stages: Mapping[int, int]
) -> tuple[tuple[str, ...], tuple[bool, ...], tuple[str, ...], dict[int, Int32Array]]:
    """Names over all stages, which are layers, their kinds, and for each rank its local units' global numbers.

    The embedding is the first stage's, the head the last one's; the layers of later stages follow those of earlier ones.
    """
    last = max(stages.values(), default=0)
    by_stage = {stage: sections[rank] for rank, stage in sorted(stages.items(), reverse=True)}
    names: list[str] = []
    flags: list[bool] = []
    kinds: list[str] = []
    offset: dict[int, int] = {}

    def add(found: Sections, unit: int, name: str = "") -> None:
        names.append(name or found.units[unit])
        flags.append(found.is_layer[unit])
        kinds.append(found.kind[unit] if unit < len(found.kind) else "")

    for stage in sorted(by_stage):
        found = by_stage[stage]
        framed = len(found.units) >= 3
        if stage == 0 and framed:
            add(found, 0)
        offset[stage] = len(names)
        for unit in range(1, len(found.units) - 1) if framed else range(len(found.units)):
            numbered = found.units[unit].startswith("layer ") and found.units[unit][6:].isdigit()
            add(found, unit, f"layer {sum(flags)}" if numbered else "")
        if stage == last and framed:
            add(found, len(found.units) - 1)
    shift = {}
    for rank, stage in stages.items():
        count = len(sections[rank].units)
        numbers = np.arange(count, dtype=np.int32) + offset[stage] - (1 if count >= 3 else 0)
        shift[rank] = np.clip(numbers, 0, len(names) - 1).astype(np.int32)
    return tuple(names), tuple(flags), tuple(kinds), shift


@jit
def _issued(
    pred_ptr: IntArray, pred: Int32Array, edge_kind: ByteArray, rank: Int32Array, at: IntArray, host: BoolArray
) -> IntArray:
    """Section of every node: its own on the host, elsewhere that of the call that issued it or of what it follows."""
    out = np.full(len(at), -1, np.int64)
    launch, hand_over, stream, rendezvous = 1, 5, 2, 6
    for v in range(len(at)):
        if host[v]:
            out[v] = at[v]
            continue
        best = 0
        for e in range(pred_ptr[v], pred_ptr[v + 1]):
            u = pred[e]
            if rank[u] != rank[v] or edge_kind[e] == rendezvous:
                continue
            weight = 3 if edge_kind[e] == launch or edge_kind[e] == hand_over else 2 if edge_kind[e] == stream else 1
            if weight > best:
                best = weight
                out[v] = out[u]
        if best == 0:
            out[v] = at[v]
    return out


def _columns(
    graph: Graph, sections: Mapping[int, Sections], issued: IntArray, shift: Mapping[int, Int32Array]
) -> tuple[ByteArray, Int32Array, Int32Array]:
    phase = np.zeros(len(graph), np.uint8)
    unit, batch = np.full(len(graph), -1, np.int32), np.full(len(graph), -1, np.int32)
    for rank, found in sections.items():
        mine = np.flatnonzero((graph.rank == rank) & (issued >= 0) & (graph.kind != int(NodeKind.RENDEZVOUS)))
        at = issued[mine]
        phase[mine] = found.phase[at]
        local = found.unit[at]
        unit[mine] = np.where(local >= 0, shift[rank][np.maximum(local, 0)], -1)
        batch[mine] = found.micro_batch[at]
    return phase, unit, batch


def _place(
    graph: Graph,
    rank: int,
    found: Sections,
    shift: Int32Array,
    phase: ByteArray,
    unit: Int32Array,
    batch: Int32Array,
) -> None:
    """Kernels of one launch are told apart by their own rows, in place."""
    if found.placed is None or not len(found.placed.row):
        return
    mine = np.flatnonzero((graph.rank == rank) & (graph.event >= 0))
    at = np.minimum(np.searchsorted(found.placed.row, graph.event[mine]), len(found.placed.row) - 1)
    hit = found.placed.row[at] == graph.event[mine]
    nodes, at = mine[hit], at[hit]
    phase[nodes], batch[nodes] = found.placed.phase[at], found.placed.micro_batch[at]
    local = found.placed.unit[at]
    unit[nodes] = np.where(local >= 0, shift[np.maximum(local, 0)], -1)


def _messages(graph: Graph) -> BoolArray:
    """Nodes of sends and receives, and the host calls that issue them."""
    kinds = np.array([item.kind in MESSAGES for item in graph.collectives] + [False], np.bool_)
    calls = np.array([bool(_MESSAGE_CALL.search(name)) for name in graph.names] + [False], np.bool_)
    return np.asarray(kinds[graph.instance] | (calls[graph.name] & (graph.kind == int(NodeKind.HOST))), np.bool_)


def forward_ops(trace: RankTrace, sections: Sections) -> IntArray:
    """Rows of the forward operators with recorded dimensions, outermost or not, in order of time."""
    events = trace.events
    rows = np.flatnonzero(events.in_cats("cpu_op") & (events.texts("Input Dims") >= 0))
    if not len(sections.phase):
        return np.zeros(0, np.int64)
    at = sections.at(events.ts_ns[rows])
    forward = (at >= 0) & (sections.phase[np.maximum(at, 0)] == int(Phase.FORWARD))
    return np.asarray(rows[forward], np.int64)


def _parameters(trace: RankTrace, sections: Sections, count: int, shift: Int32Array) -> np.typing.NDArray[np.float64]:
    """Weights that the forward operators of each unit read, from their dimensions, in the first micro batch."""
    out = np.zeros(count)
    events = trace.events
    rows = forward_ops(trace, sections)
    at = sections.at(events.ts_ns[rows])
    first = (sections.micro_batch[at] == 0) & (sections.step[at] == sections.step[0]) if len(at) else at > 0
    for row, section in zip(rows[first].tolist(), at[first].tolist(), strict=True):
        unit = int(sections.unit[section])
        if unit >= 0:
            out[shift[unit]] += _weights(events, row)
    return out


_WEIGHT_AT = {"aten::linear": (1, 2), "aten::embedding": (0,), "aten::layer_norm": (2, 3), "aten::rms_norm": (2,)}


def _weights(events: Events, row: int) -> float:
    """Elements of the weights of one operator; matrix products inside aten::linear are not counted twice."""
    places = _WEIGHT_AT.get(events.name_of(row))
    if places is None:
        return 0.0
    dims = recorded_dims(events.text("Input Dims", row))
    return float(sum(np.prod(dims[place]) for place in places if place < len(dims) and dims[place]))


def recorded_dims(text: str | None) -> list[list[int]]:
    """The dimensions of each operand that an operator's "Input Dims" lists; none where the text is no such list."""
    try:
        entries = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    return [e for e in entries if is_shape(e)] if entries else []


def _boundary(trace: RankTrace, sections: Sections) -> int:
    """Bytes of the first operand of the first operator of a layer other than the first, 0 where unknown."""
    events = trace.events
    layers = [unit for unit, is_layer in enumerate(sections.is_layer) if is_layer][1:]
    rows = forward_ops(trace, sections)
    unit = sections.unit[sections.at(events.ts_ns[rows])]
    for row in rows[np.isin(unit, layers)].tolist():
        dims = recorded_dims(events.text("Input Dims", row))
        if dims and len(dims[0]) > 1:
            types = events.text("Input type", row) or ""
            kind = types.lstrip('["').split('"')[0]
            return int(np.prod(dims[0]) * element_bytes(kind))
    return 0


def node_shapes(built: Built) -> list[Shape | None]:
    """The recorded shape of every host node that an operator stands for, None elsewhere."""
    graph = built.graph
    out: list[Shape | None] = [None] * len(graph)
    for trace in built.job.ranks:
        events = trace.events
        cached: dict[tuple[int, int, int], Shape | None] = {}
        dims, types = events.texts("Input Dims"), events.texts("Input type")
        for node in np.flatnonzero((graph.rank == trace.rank) & (graph.event >= 0)).tolist():
            row = int(graph.event[node])
            key = (int(events.name[row]), int(dims[row]), int(types[row]))
            if key not in cached:
                text = events.strings[key[1]] if key[1] >= 0 else None
                kinds = events.strings[key[2]] if key[2] >= 0 else None
                cached[key] = shape_of(events.strings[key[0]], text, kinds)
            out[node] = cached[key]
    return out
