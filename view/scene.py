"""Draws timelines onto a sink: a group a rank, a track a lane, arrows, counters, and the critical path above them all.

Tracks hang under top-level groups whose names sort as they should be seen ("Critical path", "rank 00", "rank 01", …),
since the Perfetto UI orders the groups of real processes by their number of slices. Each rank is named as a process too,
so that SQL can count and join. Measured, replayed and projected tracks of one lane are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.view.counters import loads_of, rank_curves
from scaletrace.view.flows import edge_flows, join, rendezvous_flows
from scaletrace.view.layout import Rows, Variant, lane_key, lay_out, split_crossing
from scaletrace.view.path import Path
from scaletrace.view.sink import Argument, FloatArray, Flow, Sink, Slices, rows_where

PATH_GROUP = "Critical path"
"""Name of the critical path's track; the kind of each piece and the steps hang under it."""

_CATEGORY = {
    NodeKind.HOST: "host",
    NodeKind.LAUNCH: "launch",
    NodeKind.WAIT: "wait",
    NodeKind.KERNEL: "kernel",
    NodeKind.COPY: "copy",
    NodeKind.TRANSFER: "comm",
    NodeKind.STALL: "stall",
}


_Place = tuple[tuple[bool, tuple[tuple[int, int, str], ...]], int, int, int]
"""Where a track stands among its rank's: key of the lane, variant, lane, extra track."""
_NO_ROWS: IntArray = np.zeros(0, np.int64)


@dataclass(slots=True)
class Drawn:
    """What was drawn, for the report: a count of each, and the arrows that would have pointed back in time."""

    slices: int = 0
    flows: int = 0
    flows_backward: int = 0
    counter_steps: int = 0
    processes: int = 0
    tracks: int = 0
    extra_tracks: int = 0


@dataclass(slots=True)
class Scene:
    """Draws variants of one job onto `sink`. Flow ids are handed out in the order of drawing."""

    sink: Sink
    counters: bool = True
    drawn: Drawn = field(default_factory=Drawn)
    _next_flow: int = 1

    def draw(
        self, variants: Sequence[Variant], path: Path | None, ranks: Sequence[int] | None, owner: int = 0
    ) -> Drawn:
        """Draw everything; `owner` is the variant that the path belongs to."""
        laid = [lay_out(variant, ranks) for variant in variants]
        chain = self._path_flows(laid[owner], path) if path is not None else None
        self._path_group(laid, path, chain[1] if chain else None, owner)
        tracks = self._rank_tracks(laid)
        for index, rows in enumerate(laid):
            self._rows(rows, tracks[index], chain[0] if chain and index == owner else None)
        return self.drawn

    def _track(self, name: str, parent: int = 0, order: int = 0, unit: str = "", description: str = "") -> int:
        self.drawn.tracks += 1
        return self.sink.track(name, parent, order, unit, description)

    def _slices(self, batch: Slices) -> None:
        self.sink.slices(batch)
        self.drawn.slices += len(batch)

    # The critical path and the steps

    def _path_flows(self, rows: Rows, path: Path) -> tuple[Flow, Flow]:
        """(flows of the nodes' slices, flows of the path's slices): each piece points at the slice it stands for."""
        target = np.where(path.node >= 0, rows.row_of[np.maximum(path.node, 0)], -1)
        piece = rows_where(target >= 0)
        ids = self._next_flow + np.arange(len(piece), dtype=np.int64)
        self._next_flow += len(piece)
        self.drawn.flows += len(piece)
        order = np.argsort(target[piece], kind="stable")
        return Flow(target[piece][order], ids[order]), Flow(piece, ids)

    def _path_group(self, laid: Sequence[Rows], path: Path | None, flow: Flow | None, owner: int) -> None:
        if path is not None and len(path):
            whose = laid[owner].variant.label or "replayed"
            about = f"the chain of work and waits that sets the length of the {whose} run; an arrow joins each piece to its slice"
            group = self._track(PATH_GROUP, description=about)
            self._path_track(group, laid[owner].variant.graph, path, flow)
        else:
            group = self._track("Job")
        for order, rows in enumerate(laid):
            self._step_track(group, order + 2, rows)

    def _path_track(self, group: int, graph: Graph, path: Path, flow: Flow | None) -> None:
        n = len(path)
        every, real = np.arange(n, dtype=np.int64), rows_where(path.node >= 0)
        names = [*path.texts, "critical path"]
        category = np.full(n, len(path.texts), np.int64)
        lanes = [f"rank {lane.rank} {lane.name}" for lane in graph.lanes]
        lane = graph.lane[path.node[real]].astype(np.int64)
        placed = lane >= 0
        arguments = [
            Argument("what", every, path.what, path.texts),
            Argument("why", every, path.why, path.texts),
            Argument("node", real, path.node[real]),
            Argument("rank", real, graph.rank[path.node[real]].astype(np.int64)),
            Argument("lane", real[placed], lane[placed], lanes or [""]),
        ]
        track = np.full(n, group, np.int64)
        self._slices(Slices(track, path.start_ns, path.end_ns, path.label, category, names, arguments, flow))
        self._kind_track(group, path, category, names)

    def _kind_track(self, group: int, path: Path, category: IntArray, names: Sequence[str]) -> None:
        """The kind of each piece; neighbours of one kind become one slice, so that colours can be read from afar."""
        begins = np.ones(len(path), np.bool_)
        begins[1:] = (path.what[1:] != path.what[:-1]) | (path.start_ns[1:] != path.end_ns[:-1])
        first = rows_where(begins)
        last = np.append(first[1:], len(path)) - 1
        track = self._track("What it is", group, 1, description="the kind of work or gap that the path goes through")
        places = np.full(len(first), track, np.int64)
        start, end, what = path.start_ns[first], path.end_ns[last], path.what[first]
        self._slices(Slices(places, start, end, what, category[first], names))

    def _step_track(self, group: int, order: int, rows: Rows) -> None:
        """Steps as slices: from the first start to the last end of their nodes; overlapping ones on tracks of their own."""
        step = rows.variant.graph.step[rows.node].astype(np.int64)
        known = rows_where(step >= 0)
        if not len(known):
            return
        numbers, at = np.unique(step[known], return_inverse=True)
        start, end = np.full(len(numbers), 2**62, np.int64), np.full(len(numbers), -(2**62), np.int64)
        np.minimum.at(start, at, rows.start_ns[known])
        np.maximum.at(end, at, rows.end_ns[known])
        names = [f"step {number}" for number in numbers.tolist()] + ["step"]
        code = np.lexsort((-end, start)).astype(np.int64)
        start, end = start[code], end[code]
        level = split_crossing(np.zeros(len(code), np.int64), start, end, np.zeros(1, np.bool_))
        labels = [_labelled("Steps" + (f" ({k + 1})" if k else ""), rows) for k in range(int(level.max()) + 1)]
        tracks = np.array([self._track(label, group, order) for label in labels], np.int64)
        self._slices(Slices(tracks[level], start, end, code, np.full(len(code), len(code), np.int64), names))

    # The ranks

    def _rank_tracks(self, laid: Sequence[Rows]) -> list[IntArray]:
        """Declare processes and tracks. For each variant int64[lanes, levels]: the track of a lane's level."""
        tables = [np.zeros((max(len(r.variant.graph.lanes), 1), _levels(r)), np.int64) for r in laid]
        places: dict[int, list[_Place]] = {}
        for index, (rows, table) in enumerate(zip(laid, tables, strict=True)):
            for slot in np.unique(rows.lane * table.shape[1] + rows.level).tolist():
                lane, level = divmod(slot, table.shape[1])
                seat = rows.variant.graph.lanes[lane]
                places.setdefault(seat.rank, []).append((lane_key(seat), index, lane, level))
        owned = [_by_rank(rows) for rows in laid]
        loads = [loads_of(rows) for rows in laid]
        digits = max(2, len(str(max(places, default=0))))
        for rank in sorted(places):
            self.sink.process(rank + 1, f"rank {rank}")
            self.drawn.processes += 1
            group = self._track(f"rank {rank:0{digits}d}", description=_about_rank(laid, rank))
            self._lane_tracks(group, sorted(places[rank]), laid, tables)
            if self.counters:
                mine = [rows_of.get(rank, _NO_ROWS) for rows_of in owned]
                self._rank_counters(group, len(places[rank]), laid, mine, loads)
        return tables

    def _lane_tracks(
        self, group: int, places: Sequence[_Place], laid: Sequence[Rows], tables: Sequence[IntArray]
    ) -> None:
        """Tracks of one rank: by lane, then variant, then extra track."""
        for order, (_, index, lane, level) in enumerate(places):
            name = laid[index].variant.graph.lanes[lane].name or f"lane {lane}"
            name = _labelled(name + (f" ({level + 1})" if level else ""), laid[index])
            tables[index][lane, level] = self._track(name, group, order)
            self.drawn.extra_tracks += level > 0

    def _rank_counters(
        self, group: int, order: int, laid: Sequence[Rows], mine: Sequence[IntArray], loads: Sequence[FloatArray]
    ) -> None:
        for rows, own, load in zip(laid, mine, loads, strict=True):
            for curve in rank_curves(rows, own, load) if len(own) else ():
                track = self._track(_labelled(curve.name, rows), group, order, curve.unit)
                self.sink.counter(track, curve.at_ns, curve.values)
                self.drawn.counter_steps += len(curve.at_ns)
                order += 1

    def _rows(self, rows: Rows, tracks: IntArray, path: Flow | None) -> None:
        """Draw one variant's slices with their names, categories, arguments and arrows."""
        graph = rows.variant.graph
        edges, arrows, backward = edge_flows(rows, self._next_flow)
        self._next_flow += arrows
        meetings, chains, ids = rendezvous_flows(rows, self._next_flow)
        self._next_flow += ids
        self.drawn.flows += arrows + chains
        self.drawn.flows_backward += backward
        names = [*graph.names, *_CATEGORY.values()]
        category = np.zeros(max(NodeKind) + 1, np.int64)
        for offset, kind in enumerate(_CATEGORY):
            category[kind] = len(graph.names) + offset
        self._slices(
            Slices(
                tracks[rows.lane, rows.level],
                rows.start_ns,
                rows.end_ns,
                graph.name[rows.node].astype(np.int64),
                category[graph.kind[rows.node]],
                names,
                list(_arguments(rows)),
                join(*(flow for flow in (edges, meetings, path) if flow is not None)),
            )
        )


def _arguments(rows: Rows) -> Iterable[Argument]:
    """Node and step of every slice; of communication its bytes, group, axis, size, wait and transfer."""
    graph = rows.variant.graph
    yield Argument("node", np.arange(len(rows), dtype=np.int64), rows.node)
    step = graph.step[rows.node].astype(np.int64)
    in_step = rows_where(step >= 0)
    yield Argument("step", in_step, step[in_step])
    member = rows_where(graph.instance[rows.node] >= 0)
    if not len(member):
        return
    instance = graph.instance[rows.node[member]].astype(np.int64)
    kinds, kind = _coded([c.kind for c in graph.collectives])
    payload = np.array([max(c.bytes_in, c.bytes_out) for c in graph.collectives], np.int64)
    group = np.array([c.group for c in graph.collectives], np.int64)
    yield Argument("collective", member, kind[instance], kinds)
    yield Argument("instance", member, instance)
    sized = payload[instance] >= 0
    yield Argument("bytes", member[sized], payload[instance][sized])
    if graph.groups:
        grouped = (group[instance] >= 0) & (group[instance] < len(graph.groups))
        of = group[instance][grouped]
        yield Argument(
            "group", member[grouped], of, [g.description or f"group {i}" for i, g in enumerate(graph.groups)]
        )
        yield Argument("axis", member[grouped], of, [g.axis or "unknown" for g in graph.groups])
        yield Argument("ranks", member[grouped], np.array([g.size for g in graph.groups], np.int64)[of])
    transfer = graph.kind[rows.node[member]] == NodeKind.TRANSFER
    split = member[transfer]
    yield Argument("wait_ns", split, rows.wait_ns[split])
    yield Argument("transfer_ns", split, rows.end_ns[split] - rows.start_ns[split] - rows.wait_ns[split])


def _coded(texts: Sequence[str]) -> tuple[list[str], IntArray]:
    """(distinct texts in order of appearance, int64 codes)."""
    known: dict[str, int] = {}
    codes = np.array([known.setdefault(text, len(known)) for text in texts], np.int64)
    return list(known) or [""], codes


def _by_rank(rows: Rows) -> dict[int, IntArray]:
    """Rows of each rank, ascending."""
    order = np.argsort(rows.rank, kind="stable").astype(np.int64)
    ranks, first = np.unique(rows.rank[order], return_index=True)
    return dict(zip(ranks.tolist(), np.split(order, first[1:]), strict=True)) if len(order) else {}


def _levels(rows: Rows) -> int:
    return int(rows.level.max()) + 1 if len(rows) else 1


def _labelled(name: str, rows: Rows) -> str:
    return f"{name} ({rows.variant.label})" if rows.variant.label else name


def _about_rank(laid: Sequence[Rows], rank: int) -> str:
    """What a reader should know of a rank: how many real ranks it stands for."""
    for rows in laid:
        many = rows.variant.graph.multiplicity
        if rank < len(many) and many[rank] > 1:
            return f"stands for {int(many[rank]):,} ranks that do the same work"
    return ""
