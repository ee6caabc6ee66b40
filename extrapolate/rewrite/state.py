"""Turns a built job into the state that the layout rewrites pass on: graph, anatomy, work of its nodes, layout, network.

Each rewrite takes a state and returns another. Durations are kept unrounded and every change is a factor on what was
measured, so that a rewrite and its inverse give the measured graph back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scaletrace.errors import InputError
from scaletrace.extrapolate.anatomy import Anatomy, dissect, recorded_dims
from scaletrace.extrapolate.estimate import MESSAGE_OVERHEAD_S, Network
from scaletrace.extrapolate.inferred import with_inferred_shapes
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.latency import with_latency
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout, renamed
from scaletrace.extrapolate.nodework import NodeWork, Stretch, node_work, retime
from scaletrace.extrapolate.recompute import how_much, like_forward, marked, with_recompute
from scaletrace.extrapolate.rewrite.agreement import agreed
from scaletrace.extrapolate.rewrite.messages import MessageTime, Streamed
from scaletrace.extrapolate.rewrite.recurring import like_other_steps
from scaletrace.extrapolate.routing import UNKNOWN, Routing, observed
from scaletrace.extrapolate.transfers import beyond_ns
from scaletrace.extrapolate.workload import infer_model, measured_ceilings
from scaletrace.parse.build import Built
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import RankTrace
from scaletrace.replay.engine import replay

Floats = np.typing.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Source:
    """What a state was laid from (`state`), what it was when it was laid (`made`), and which node of the source each of
    its nodes comes from: place int32[n], -1 = new."""

    state: State
    made: State
    place: Int32Array


@dataclass(frozen=True, slots=True)
class State:
    """One job under one layout.

    layout     says mbs, microbatches and seq of the graph
    columns    for each data-parallel column its ranks (of the graph) in order of pipeline stage
    error      relative error that stretched kernels have collected (one sigma, weighted by time)
    routing    where the capture's tokens went, if it has experts
    exact_bytes  float64[collectives, 2]: bytes in and out before rounding, where they were scaled; may be short
    source     what this was cut into a pipeline from, None where it was not (rewrite.uncut)
    accumulated  how often the capture's first rank accumulated a gradient of each shape
    """

    graph: Graph
    anatomy: Anatomy
    work: NodeWork
    layout: Layout
    network: Network
    ceilings: Ceilings
    columns: tuple[tuple[int, ...], ...]
    error: float = 0.0
    health: Health = field(default_factory=Health)
    routing: Routing = UNKNOWN
    exact_bytes: np.typing.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))
    source: Source | None = None
    accumulated: Mapping[tuple[int, ...], int] = field(default_factory=dict)

    def with_durations(self) -> State:
        """The same with the graph's durations taken from the unrounded ones."""
        return replace(self, graph=replace(self.graph, dur_ns=np.rint(self.anatomy.exact_ns).astype(np.int64)))


def told(state: State, sentence: str = "", guess: str = "") -> State:
    """The state with a further note or one more guess in its health report; the old one's report stays as it is."""
    health = Health()
    health.add(state.health)
    if sentence:
        health.note(sentence)
    if guess:
        health.guessed[guess] += 1
    return replace(state, health=health)


def open_state(built: Built, layout: Layout, network: Network, ceilings: Ceilings | None = None) -> State:
    """The state of a measured job; micro batch and length are read from its shapes where the layout leaves them open."""
    groups, said = renamed(built.graph.groups, layout)
    built, again = with_recompute(replace(built, graph=replace(built.graph, groups=groups)) if said else built)
    anatomy = agreed(built.graph, like_other_steps(built.graph, marked(dissect(built, layout), again)))
    if network.cluster.backend == "gloo":
        timeline = replay(built.graph)
        anatomy = replace(anatomy, beyond_ns=beyond_ns(built.graph, timeline.start_ns, timeline.end_ns))
    work = like_forward(built.graph, anatomy, node_work(built, anatomy, layout.tp))
    if not (layout.mbs and layout.seq):
        try:
            _, measured, _ = infer_model(built, anatomy, layout)
        except InputError as error:
            anatomy.health.note(f"Micro batch and length are not known ({error}); they count as 1 and 1.")
            measured = replace(layout, mbs=1, seq=1)
        layout = layout.over(measured)
    layout = layout if layout.microbatches else replace(layout, microbatches=max(1, anatomy.micro_batches))
    if layout.recompute == "none":
        layout = replace(layout, recompute=how_much(anatomy, work))
    ceilings = ceilings or _ceilings(built, network)
    work = with_inferred_shapes(built.graph, anatomy, work, layout, ceilings)
    work = with_latency(built, work, ceilings)
    health = Health()
    health.add(anatomy.health)
    health.add(work.health)
    for sentence in said:
        health.note(sentence)
    ranks = [trace.rank for trace in built.job.ranks]
    return State(
        built.graph, anatomy, work, layout, network, ceilings, _columns(ranks, layout),
        0.0, health, observed(built.job), accumulated=_accumulated(built.job.ranks[:1]),
    )  # fmt: skip


def _accumulated(traces: Sequence[RankTrace]) -> Counter[tuple[int, ...]]:
    """Gradients by shape, as autograd adds them to their parameters."""
    out: Counter[tuple[int, ...]] = Counter()
    for events in (trace.events for trace in traces):
        named = [text.endswith("::AccumulateGrad") and " " not in text for text in events.strings]
        texts = events.texts("Input Dims")
        mine = np.array([*named, False], np.bool_)[events.name] & (texts >= 0)
        for code, count in Counter(texts[mine].tolist()).items():
            for dims in recorded_dims(events.strings[code])[:1]:
                out[tuple(dims)] += count
    return out


def _ceilings(built: Built, network: Network) -> Ceilings:
    """Of the cluster's device where the job ran kernels on one, else those that its own operators reached."""
    graph = built.graph
    device = np.array([lane.is_device for lane in graph.lanes] + [False], np.bool_)[graph.lane]
    if (device & (graph.kind == int(NodeKind.KERNEL))).any():
        return Ceilings.of(network.cluster.device)
    measured = measured_ceilings(built)
    return measured if np.isfinite([measured.flops, measured.memory_Bps]).all() else Ceilings.of(network.cluster.device)


def _columns(ranks: Sequence[int], layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The ranks that are there by column; a column that lacks a stage is left out."""
    if layout.pp == 1:
        return tuple((rank,) for rank in ranks)
    firsts = [rank for rank in ranks if layout.coordinates(rank)["pp"] == 0]
    columns = [tuple(layout.members("pp", rank)) for rank in firsts]
    out = tuple(column for column in columns if set(column) <= set(ranks))
    if not out:
        raise InputError("no pipeline is complete in this capture: give the traces of all its stages")
    return out


QUICK = 0.25
"""Quantile of gloo's messages that stood behind none of the other direction (messages.Streamed)."""


def message_ns(state: State, quantile: float = QUICK) -> MessageTime:
    """Time of a message between stages: the measured one stretched by the cost model, the model alone without one.

    A message of unknown size (0 bytes) takes the measured time as it is.
    quantile: which of gloo's measured messages counts; of others the median does
    """
    graph = state.graph
    streamed = state.network.cluster.backend == "gloo"
    nodes = np.flatnonzero((graph.kind == int(NodeKind.TRANSFER)) & state.anatomy.is_message)
    waits = np.zeros(len(graph), np.bool_)
    waits[graph.edge_dst[graph.edge_kind == int(EdgeKind.RENDEZVOUS)]] = True
    # A send may be over when its bytes are buffered, whatever it waited for; a receive is when they are there.
    nodes = nodes[waits[nodes]] if waits[nodes].any() else nodes
    longest = np.zeros(len(graph.collectives) + 1)
    np.maximum.at(longest, graph.instance[nodes], graph.dur_ns[nodes])
    seen = longest[np.unique(graph.instance[nodes])]
    measured = float(np.quantile(seen, quantile if streamed else 0.5)) if len(nodes) else 0.0
    sizes = [max(graph.collectives[i].bytes_in, graph.collectives[i].bytes_out) for i in graph.instance[nodes].tolist()]
    size = float(np.median(sizes)) if sizes else 0.0
    stride = max(1, state.layout.span("pp").stride)
    there = state.network.seconds("send", size, 2, stride) if size > 0 else 0.0

    def time(size_bytes: int, src: int, dst: int) -> int:
        model = state.network.seconds("send", size_bytes, 2, stride) if size_bytes > 0 else 0.0
        if measured > 0 and size_bytes <= 0:
            # How much a stage hands on is not known, but that it takes time was measured; unknown is not nothing.
            return round(measured)
        if there > 0:
            return round(measured * model / there)
        return round((model + MESSAGE_OVERHEAD_S) * 1e9)

    return Streamed(time) if streamed else time


def passes(state: State) -> BoolArray:
    """Mask of the nodes that belong to forward or backward, run once or again."""
    return np.isin(state.anatomy.phase, [int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.RECOMPUTE)])


def on_weights(graph: Graph) -> BoolArray:
    """Mask of the nodes whose size is that of weights, whatever the batch: accumulation, transposes, FSDP's copies."""
    words = ("AccumulateGrad", "TBackward", "fsdp::", "foreach", "RegisterPostBackward", "Optimizer", "chunk_cat")
    named = np.array([any(word in name for word in words) for name in graph.names] + [False], np.bool_)
    return np.asarray(named[graph.name], np.bool_)


def stretched(state: State, stretch: Stretch, where: BoolArray, other: Ceilings | None = None) -> State:
    """The state with the work of some nodes changed; durations follow by the ratio of the shapes' models.

    other: ceilings of another device, on which all of them run afterwards
    """
    exact, shapes, error = retime(
        state.graph, state.anatomy.exact_ns, state.work, stretch, state.ceilings, where, other
    )
    return replace(
        state,
        ceilings=other or state.ceilings,
        anatomy=replace(state.anatomy, exact_ns=exact),
        work=replace(state.work, shape=shapes),
        error=float(np.hypot(state.error, error)),
    ).with_durations()


def recosted(state: State, collectives: Sequence[GraphCollective], groups: Sequence[GraphGroup]) -> State:
    """The state with other collectives and groups (same numbering); transfers follow by the ratio of their costs."""
    graph = state.graph
    factor, absolute = np.ones(len(collectives)), np.zeros(len(collectives))
    for at, (was, now) in enumerate(zip(graph.collectives, collectives, strict=True)):
        before, after = cost_s(state.network, was, graph.groups), cost_s(state.network, now, groups)
        if before > 0:
            factor[at] = after / before
        elif after > 0:
            factor[at], absolute[at] = 0.0, after * 1e9
    exact = state.anatomy.exact_ns.copy()
    at_nodes = np.flatnonzero((graph.kind == int(NodeKind.TRANSFER)) & (graph.instance >= 0))
    of = graph.instance[at_nodes]
    exact[at_nodes] = longer(state.anatomy, at_nodes, factor[of]) + absolute[of]
    return replace(
        state,
        graph=replace(graph, collectives=tuple(collectives), groups=tuple(groups)),
        anatomy=replace(state.anatomy, exact_ns=exact),
    ).with_durations()


def longer(anatomy: Anatomy, nodes: IntArray, factor: Floats) -> Floats:
    """Times of transfers, `factor` times as long but for what goes beyond them (Anatomy.beyond_ns); 0 leaves nothing."""
    exact = anatomy.exact_ns[nodes]
    if anatomy.beyond_ns is None:
        return exact * factor
    beyond = np.where(factor > 0, np.minimum(anatomy.beyond_ns[nodes], exact), 0.0)
    return np.asarray((exact - beyond) * factor + beyond, np.float64)


def whole_bytes(item: GraphCollective, size: int) -> int:
    """Bytes of the whole vector, 0 where the trace does not say."""
    if item.kind == "all_gather":
        return max(0, item.bytes_out if item.bytes_out >= 0 else item.bytes_in * size)
    if item.kind == "reduce_scatter":
        return max(0, item.bytes_in if item.bytes_in >= 0 else item.bytes_out * size)
    return max(0, item.bytes_in, item.bytes_out)


def cost_s(network: Network, item: GraphCollective, groups: Sequence[GraphGroup]) -> float:
    """Model seconds of a collective, 0 for one of unknown group or kind."""
    if item.group < 0 or item.kind in ("unknown", "custom"):
        return 0.0
    group = groups[item.group]
    return network.seconds(item.kind, whole_bytes(item, group.size), group.size, max(1, group.stride))


def scaled_bytes(item: GraphCollective, factor: float) -> GraphCollective:
    """The collective moving `factor` as much; unknown stays unknown."""
    sizes = [round(size * factor) if size >= 0 else size for size in (item.bytes_in, item.bytes_out)]
    return replace(item, bytes_in=sizes[0], bytes_out=sizes[1])


def axis_of_item(item: GraphCollective, groups: Sequence[GraphGroup]) -> str:
    """Axis of a collective's group, "" where unknown."""
    return groups[item.group].axis if item.group >= 0 else ""
