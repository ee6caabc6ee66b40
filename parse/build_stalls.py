"""Turns starts that no edge explains into fallback edges where a device event fits, and into STALL nodes where none does."""

from __future__ import annotations

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.build_draft import NODE_COLUMNS, Columns, Draft
from scaletrace.parse.build_gpu import RankGpu
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.graph import NO_RELEASE, EdgeKind, EdgeSource, NodeKind

STALL_NS = 5_000
"""Delays up to this are the resolution of old traces and the jitter of launches."""
TIGHT_NS = 15_000
IN_GRAPH_NS = 2_000
LOOK_BACK = 400
TIGHT_LAG_NS = 2_000


@jit
def _latest(
    n: int, src: Int32Array, dst: Int32Array, lag_ns: IntArray, end_ns: IntArray, release_ns: IntArray
) -> IntArray:
    best = release_ns.copy()
    for e in range(len(src)):
        at = end_ns[src[e]] + lag_ns[e]
        best[dst[e]] = max(best[dst[e]], at)
    return best


def residuals(nodes: Columns, edges: Columns) -> IntArray:
    """Measured start minus what the measured ends of the predecessors explain, int64[n]; 0 where nothing precedes."""
    best = _latest(
        len(nodes["start_ns"]), edges["src"], edges["dst"], edges["lag_ns"], nodes["end_ns"], nodes["release_ns"]
    )
    return np.where(best == NO_RELEASE, 0, nodes["start_ns"] - best)


@jit
def _tight_ends(
    late: Int32Array, residual: IntArray, start: IntArray, end: IntArray, stream: Int32Array, call: Int32Array
) -> tuple[Int32Array, BoolArray]:
    """For each late kernel the one of another stream that ended just before its start, and whether in the same graph."""
    best, in_graph = np.full(len(late), -1, np.int32), np.zeros(len(late), np.bool_)
    for i in range(len(late)):
        k = late[i]
        for p in range(k - 1, max(-1, k - LOOK_BACK - 1), -1):
            after = start[k] - end[p]
            if stream[p] == stream[k] or after < -500 or after > 8000:
                continue
            same = call[p] >= 0 and call[p] == call[k]
            if residual[i] > (IN_GRAPH_NS if same else TIGHT_NS) and (best[i] < 0 or end[p] > end[best[i]]):
                best[i], in_graph[i] = p, same
    return best, in_graph


@jit
def _occupants(
    late: Int32Array, start: IntArray, end: IntArray, stream: Int32Array, blocks: Int32Array, every: int
) -> Int32Array:
    """For each late kernel the kernel of another stream, with a block on every processor, whose tail lies closest to its
    start: with that evidence it need not fill the device to have left no room."""
    best = np.full(len(late), -1, np.int32)
    for i in range(len(late)):
        k, closest = late[i], np.int64(0)
        for p in range(k - 1, max(-1, k - LOOK_BACK - 1), -1):
            dur, after = end[p] - start[p], start[k] - end[p]
            if stream[p] == stream[k] or blocks[p] < every or dur <= 50_000:
                continue
            if -max(60_000, dur // 4) <= after <= 10_000 and (best[i] < 0 or abs(after) < closest):
                best[i], closest = p, abs(after)
    return best


def add_tight_ends(draft: Draft, gpu: RankGpu, residual: IntArray) -> int:
    """Edges inside CUDA graphs and, outside, from the kernel whose end fits a late start; returns their number."""
    kernels = gpu.kernels
    late = np.flatnonzero(residual[gpu.node_in] > IN_GRAPH_NS).astype(np.int32)
    best, in_graph = _tight_ends(
        late, residual[gpu.node_in[late]], kernels.start_ns, kernels.end_ns, kernels.stream, kernels.call
    )
    found = best >= 0
    lag = np.clip(kernels.start_ns[late] - kernels.end_ns[best], 0, TIGHT_LAG_NS)
    for source, pick in ((EdgeSource.IN_GRAPH, found & in_graph), (EdgeSource.TIGHT_END, found & ~in_graph)):
        if pick.any():
            draft.contradict(source, int(pick.sum()), 0)
            draft.add_edges(gpu.node_out[best[pick]], gpu.node_in[late[pick]], lag[pick], EdgeKind.EVENT_WAIT, source)
    return int(found.sum())


def add_occupancy(draft: Draft, gpu: RankGpu, residual: IntArray) -> int:
    """Edges from a full-GPU kernel that kept a ready kernel of another stream from starting; returns their number."""
    kernels = gpu.kernels
    late = np.flatnonzero(residual[gpu.node_in] > TIGHT_NS).astype(np.int32)
    best = _occupants(late, kernels.start_ns, kernels.end_ns, kernels.stream, kernels.blocks, kernels.processors)
    found = best >= 0
    if found.any():
        draft.contradict(EdgeSource.OCCUPANCY, int(found.sum()), 0)
        draft.add_edges(
            gpu.node_out[best[found]],
            gpu.node_in[late[found]],
            (kernels.start_ns[late] - kernels.end_ns[best])[found],
            EdgeKind.OCCUPANCY,
            EdgeSource.OCCUPANCY,
        )
    return int(found.sum())


TIME_SLICED = "stall: time-sliced device"
"""Name of the stalls of a device that another process shares."""
TIME_SLICED_SHARE = 0.1
TIME_SLICED_STALLS = 10
TIME_SLICED_LEAST_NS = 100_000


def time_sliced(nodes: Columns, residual: IntArray) -> tuple[int, ...]:
    """Ranks whose device stands still at regular intervals with work ready, as one that another process shares does.

    At least ten long stalls, in sum a tenth of the window, of which most end one period after the last.
    """
    late = (residual > TIME_SLICED_LEAST_NS) & np.isin(nodes["kind"], _STALLED[:3])
    window = int(nodes["end_ns"].max() - nodes["start_ns"].min()) if len(residual) else 0
    out = []
    for rank in np.unique(nodes["rank"][late]).tolist():
        mine = late & (nodes["rank"] == rank)
        if mine.sum() < TIME_SLICED_STALLS or int(residual[mine].sum()) < TIME_SLICED_SHARE * window:
            continue
        period = np.diff(np.sort(nodes["start_ns"][mine]))
        if (np.abs(period / np.median(period) - 1) < 0.1).mean() > 0.5:
            out.append(int(rank))
    return tuple(out)


_STALLED: ByteArray = np.array(
    [int(k) for k in (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE, NodeKind.WAIT)], np.uint8
)


def insert_stalls(
    draft: Draft, nodes: Columns, edges: Columns, residual: IntArray, sliced: tuple[int, ...]
) -> tuple[Columns, Columns]:
    """Put a STALL node before every start that is later than its predecessors explain; `sliced` are time-sliced ranks.

    All edges to the node lead to the stall instead, so that the delay follows whatever binds in another replay.
    """
    at = np.flatnonzero((residual > STALL_NS) & np.isin(nodes["kind"], _STALLED))
    if not len(at):
        return nodes, edges
    first = draft.count
    draft.count += len(at)
    labels = {
        int(NodeKind.WAIT): draft.name("stall: late return of a blocking call"),
        int(NodeKind.ARRIVE): draft.name("stall: late start of a collective"),
    }
    start_label = draft.name("stall: late start on the device")
    stall: Columns = {key: np.full(len(at), default, dtype) for key, (dtype, default) in NODE_COLUMNS.items()}
    for key in ("rank", "lane", "step", "start_ns", "layer"):
        stall[key] = nodes[key][at].copy()
    stall["dur_ns"] = residual[at]
    stall["end_ns"] = nodes["start_ns"][at].copy()
    stall["start_ns"] = nodes["start_ns"][at] - residual[at]
    stall["kind"][:] = int(NodeKind.STALL)
    stall["release_ns"] = nodes["release_ns"][at].copy()
    stall["name"] = np.array([labels.get(int(kind), start_label) for kind in nodes["kind"][at]], np.int32)
    shared = np.isin(nodes["rank"][at], sliced) & (nodes["kind"][at] != int(NodeKind.WAIT))
    if shared.any():
        stall["name"][shared] = draft.name(TIME_SLICED)
    moved = np.full(draft.count, -1, np.int32)
    moved[at] = np.arange(first, draft.count, dtype=np.int32)
    nodes = {key: np.concatenate((nodes[key], stall[key])) for key in NODE_COLUMNS}
    nodes["release_ns"][at] = NO_RELEASE
    dst = edges["dst"]
    edges = dict(edges, dst=np.where(moved[dst] >= 0, moved[dst], dst))
    link: Columns = {
        "src": np.arange(first, draft.count, dtype=np.int32),
        "dst": at.astype(np.int32),
        "lag_ns": np.zeros(len(at), np.int64),
        "edge_kind": np.full(len(at), int(EdgeKind.STREAM), np.uint8),
        "edge_source": np.full(len(at), int(EdgeSource.ORDER), np.uint8),
    }
    return nodes, {key: np.concatenate((edges[key], link[key])) for key in edges}
