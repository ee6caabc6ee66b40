"""Turns a DDP graph into one with other bucket sizes: neighbouring buckets merged up to a cap, larger ones split.

A merged bucket is ready when its last part is. A part of a split one is ready at its share of the work between the
bucket before and its own, on every lane that it waits for. What waited for a bucket waits for all that carry a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.extrapolate.rewrite.select import keep_nodes
from scaletrace.parse.build_draft import topological_keys
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import (
    NO_RELEASE,
    EdgeKind,
    EdgeSource,
    Graph,
    GraphCollective,
    NodeKind,
    edges_by_destination,
)
from scaletrace.parse.health import Health

CostNs = Callable[[GraphCollective], float]
FIRST_BYTES, CAP_BYTES = 1 << 20, 25 << 20
"""What DDP fills its first bucket and all others with, where the job names no size (torch 2.13)."""


def ddp_buckets(sizes: Sequence[int], first_bytes: int = FIRST_BYTES, cap_bytes: int = CAP_BYTES) -> list[int]:
    """Where each bucket ends (exclusive) that DDP makes of gradients of these bytes, in the order in which they are ready.

    A bucket is closed by the gradient with which it reaches its limit, as compute_bucket_assignment_by_size has it.
    """
    ends, held, limit = [], 0, first_bytes
    for at, size in enumerate(sizes):
        held += size
        if held >= limit:
            ends.append(at + 1)
            held, limit = 0, cap_bytes
    return ends if ends[-1:] == [len(sizes)] or not len(sizes) else [*ends, len(sizes)]


def measured_caps(runs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, int, bool] | None:
    """(first, cap, told) that make the measured buckets of each run of gradients (sizes, ends); None where none do.

    told: whether no other usual size would make the same
    """
    usual = [(FIRST_BYTES, CAP_BYTES), *((mib << 20, mib << 20) for mib in (25, 1, 50, 100, *range(2, 1025)))]
    low, high = 0, 1 << 62
    for sizes, ends in runs:
        for begin, end in pairwise([0, *ends]):
            whole = sum(sizes[begin:end])
            low = max(low, whole - sizes[end - 1])
            high = min(high, whole) if end < len(sizes) else high
    if high < 1 << 62:
        usual.append((high, high))
    fitting = [
        (first, cap)
        for first, cap in dict.fromkeys(usual)
        if (first != cap or low < cap <= high)
        and all(ddp_buckets(sizes, first, cap) == list(ends) for sizes, ends in runs)
    ]
    if not fitting:
        return None
    return *fitting[0], len(fitting) == 1


@dataclass(frozen=True, slots=True)
class Bucket:
    """A measured bucket: its instance, and by rank its ARRIVE and TRANSFER nodes."""

    instance: int
    arrive: dict[int, int]
    transfer: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A new bucket: of which measured ones (first, last), and up to which share of the last it reaches."""

    first: int
    last: int
    size_bytes: int
    share: float


def rebucket(graph: Graph, cap_bytes: int, cost_ns: CostNs, health: Health | None = None) -> Graph:
    """The graph with gradient buckets of at most `cap_bytes` (merged only whole); `cost_ns` prices a collective.

    Transfers keep their measured level: new ones take the measured time of what they carry, times the ratio of costs.
    A wait for a bucket before the one that it is merged with is ready is dropped and counted in `health`.
    """
    if cap_bytes < 1:
        raise UsageError(f"a bucket holds at least one byte, got {cap_bytes}")
    per_step = buckets_of(graph)
    plans = {step: _plan(graph, buckets, cap_bytes) for step, buckets in per_step.items()}
    if all(len(plan) == len(per_step[s]) and all(p.first == p.last for p in plan) for s, plan in plans.items()):
        return graph
    sketch = _Sketch(graph, health or Health())
    for step, buckets in per_step.items():
        sketch.replace(buckets, plans[step], cost_ns)
    return sketch.finish({bucket.instance for buckets in per_step.values() for bucket in buckets})


def buckets_of(graph: Graph) -> dict[int, list[Bucket]]:
    """Buckets of each step in order of issue: all-reduces of the data axis with more than a scalar."""
    found: dict[int, dict[int, Bucket]] = {}
    for node in np.flatnonzero((graph.kind == NodeKind.ARRIVE) | (graph.kind == NodeKind.TRANSFER)).tolist():
        instance, step = int(graph.instance[node]), int(graph.step[node])
        if instance < 0 or step < 0 or not is_gradient(graph, graph.collectives[instance]):
            continue
        bucket = found.setdefault(step, {}).setdefault(instance, Bucket(instance, {}, {}))
        (bucket.arrive if graph.kind[node] == NodeKind.ARRIVE else bucket.transfer)[int(graph.rank[node])] = node
    return {
        step: sorted(
            (b for b in table.values() if b.arrive.keys() == b.transfer.keys()), key=lambda b: min(b.arrive.values())
        )
        for step, table in found.items()
    }


def is_gradient(graph: Graph, item: GraphCollective) -> bool:
    axis = graph.groups[item.group].axis if item.group >= 0 else ""
    return item.kind == "all_reduce" and item.bytes_in > 64 and axis in ("dp", "world", "")


def _plan(graph: Graph, buckets: list[Bucket], cap_bytes: int) -> list[_Piece]:
    """Greedy as DDP does it: fill a bucket until the next gradient would not fit; what is too large is cut evenly."""
    out: list[_Piece] = []
    first, held = 0, 0
    for at, bucket in enumerate(buckets):
        size = graph.collectives[bucket.instance].bytes_in
        if held and held + size > cap_bytes:
            out.append(_Piece(first, at - 1, held, 1.0))
            held = 0
        if not held:
            first = at
        if size > cap_bytes:
            parts = -(-size // cap_bytes)
            edges = [size * i // parts for i in range(parts + 1)]
            out += [_Piece(at, at, high - low, (i + 1) / parts) for i, (low, high) in enumerate(pairwise(edges))]
            held = 0
        else:
            held += size
    if held:
        out.append(_Piece(first, len(buckets) - 1, held, 1.0))
    return out


class _Sketch:
    """The new nodes and edges while they are found; old nodes keep their ids until the end."""

    def __init__(self, graph: Graph, health: Health) -> None:
        self.graph, self.health = graph, health
        self.items: list[GraphCollective] = list(graph.collectives)
        self.rows: list[tuple[int, int, int, int, float, int]] = []  # like node, kind, dur, instance, key, step
        self.edges: list[tuple[int, int, int, int]] = []
        self.heirs: dict[int, list[int]] = {}

    def add(self, like: int, kind: NodeKind, dur_ns: int, instance: int, key: float) -> int:
        self.rows.append((like, int(kind), dur_ns, instance, key, int(self.graph.step[like])))
        return len(self.graph) + len(self.rows) - 1

    def replace(self, buckets: list[Bucket], plan: list[_Piece], cost_ns: CostNs) -> None:
        """Put the pieces of one step in place of its buckets."""
        graph = self.graph
        previous: dict[int, int] = {}
        for piece in plan:
            whole = buckets[piece.first : piece.last + 1]
            last = buckets[piece.last]
            like = graph.collectives[last.instance]
            item = replace(like, bytes_in=piece.size_bytes, bytes_out=piece.size_bytes)
            instance = len(self.items)
            self.items.append(item)
            siblings = [p for p in plan if (p.first, p.last) == (piece.first, piece.last)]
            old_cost = sum(cost_ns(graph.collectives[b.instance]) for b in whole)
            share = piece.size_bytes / sum(p.size_bytes for p in siblings)
            ratio = cost_ns(item) / old_cost if old_cost > 0 else share
            before = buckets[piece.first - 1] if piece.first else None
            arrivals = {r: self._arrive(last, before, piece.share, r, instance, previous) for r in last.arrive}
            key = max(self.rows[node - len(graph)][4] for node in arrivals.values()) + 0.25
            for rank, own in arrivals.items():
                measured = sum(int(graph.dur_ns[b.transfer[rank]]) for b in whole if rank in b.transfer)
                node = self.add(last.transfer[rank], NodeKind.TRANSFER, round(measured * ratio), instance, key)
                self.edges.append((own, node, 0, int(EdgeKind.STREAM)))
                self.edges += [(o, node, 0, int(EdgeKind.RENDEZVOUS)) for o in arrivals.values() if o != own]
                previous[rank] = node
                for bucket in whole:
                    if rank in bucket.transfer:
                        self.heirs.setdefault(bucket.transfer[rank], []).append(node)

    def _arrive(
        self, last: Bucket, before: Bucket | None, share: float, rank: int, instance: int, previous: dict[int, int]
    ) -> int:
        """The ARRIVE of one rank: what the bucket waited for, or the point on the same lane that the share falls on."""
        graph, old = self.graph, last.arrive[rank]
        preds = range(int(graph.pred_ptr[old]), int(graph.pred_ptr[old + 1]))
        wanted = [e for e in preds if graph.kind[graph.pred[e]] != NodeKind.TRANSFER]
        sources = [(self._back(int(graph.pred[e]), before, share, rank), e) for e in wanted]
        key = max((node for node, _ in sources), default=old) + 0.5
        if rank in previous:
            key = max(key, self.rows[previous[rank] - len(graph)][4] + 0.25)
        node = self.add(old, NodeKind.ARRIVE, 0, instance, key)
        self.edges += [(source, node, int(graph.lag_ns[e]), int(graph.edge_kind[e])) for source, e in sources]
        if rank in previous:
            self.edges.append((previous[rank], node, 0, int(EdgeKind.STREAM)))
        return node

    def _back(self, node: int, before: Bucket | None, share: float, rank: int) -> int:
        """The node on the lane of `node` by which `share` of the work since the bucket before was done."""
        graph = self.graph
        if share >= 1.0:
            return node
        start = before.arrive[rank] if before is not None and rank in before.arrive else -1
        lane = np.flatnonzero(graph.lane[start + 1 : node + 1] == graph.lane[node]) + start + 1
        lane = lane[(graph.step[lane] == graph.step[node]) & (graph.instance[lane] < 0)]
        if not len(lane):
            return node
        done = np.cumsum(graph.dur_ns[lane])
        return int(lane[min(int(np.searchsorted(done, share * done[-1])), len(lane) - 1)])

    def finish(self, replaced: set[int]) -> Graph:
        """Drop the old buckets, hand their waiters on, and sort."""
        graph, new = self.graph, self.rows
        n, total = len(graph), len(graph) + len(self.rows)
        gone = np.isin(graph.instance, list(replaced)) & (graph.kind != NodeKind.RENDEZVOUS)
        into = graph.edge_dst
        stays = ~gone[graph.pred] & ~gone[into]
        edges = [
            np.stack([graph.pred[stays], into[stays], graph.lag_ns[stays], graph.edge_kind[stays]]).astype(np.int64)
        ]
        hub = graph.kind == NodeKind.RENDEZVOUS
        # Order on the lane itself binds collectives only, and those are new.
        waits = gone[graph.pred] & ~gone[into] & ~hub[into] & (graph.kind[graph.pred] == NodeKind.TRANSFER)
        waits &= (graph.lane[graph.pred] != graph.lane[into]) | (graph.edge_kind != EdgeKind.STREAM)
        for e in np.flatnonzero(waits):
            for heir in self.heirs.get(int(graph.pred[e]), []):
                self.edges.append((heir, int(into[e]), int(graph.lag_ns[e]), int(graph.edge_kind[e])))
        edges.append(np.array(self.edges, np.int64).reshape(-1, 4).T)
        src, dst, lag, kind = np.concatenate(edges, axis=1)
        like = np.concatenate((np.arange(n), [row[0] for row in new])).astype(np.int64)
        key = np.concatenate((np.arange(n, dtype=np.float64), [row[4] for row in new]))
        keys, acyclic = topological_keys((key * 1000).astype(np.int64), src.astype(np.int32), dst.astype(np.int32))
        if not acyclic.all():
            # A wait between two buckets that are now one can't hold back the second; later waits still do.
            self.health.dropped["waits for a bucket before the one that it was merged with was ready"] += int(
                (~acyclic).sum()
            )
            src, dst, lag, kind = src[acyclic], dst[acyclic], lag[acyclic], kind[acyclic]
        order = np.argsort(keys, kind="stable")
        position = np.empty(total, np.int64)
        position[order] = np.arange(total)
        known = np.full(len(acyclic), int(EdgeSource.REWRITE), np.uint8)
        known[: int(stays.sum())] = graph.edge_source[stays]
        known = known[acyclic]
        csr = edges_by_destination(total, position[src], position[dst], lag, kind, known)
        out = self._columns(like, order, new)
        woven = replace(
            out, pred_ptr=csr[0], pred=csr[1], lag_ns=csr[2], edge_kind=csr[3], edge_source=csr[4],
            collectives=tuple(self.items),
        )  # fmt: skip
        dead = np.concatenate((gone, np.zeros(len(new), np.bool_)))[order]
        dead |= (woven.kind == NodeKind.RENDEZVOUS) & (np.diff(woven.pred_ptr) == 0)
        return keep_nodes(woven, ~dead)

    def _columns(self, like: IntArray, order: IntArray, new: list[tuple[int, int, int, int, float, int]]) -> Graph:
        """All node columns in their new order, new nodes after the old ones they resemble."""
        graph, n = self.graph, len(self.graph)
        columns: dict[str, npt.NDArray[np.generic]] = {}
        for name in (
            "dur_ns",
            "release_ns",
            "kind",
            "rank",
            "lane",
            "name",
            "step",
            "event",
            "instance",
            "blocks",
            "layer",
        ):
            if len(getattr(graph, name)):
                columns[name] = getattr(graph, name)[like].copy()
        for name, at, dtype in (("kind", 1, np.uint8), ("dur_ns", 2, np.int64), ("instance", 3, np.int32)):
            columns[name][n:] = np.array([row[at] for row in new], dtype)
        columns["release_ns"][n:] = NO_RELEASE
        columns["event"][n:] = -1
        return replace(graph, **{name: column[order] for name, column in columns.items()})  # type: ignore[arg-type]
