"""Turns a graph and rules into the graph of a job that has never run, and both replays into what the change is worth."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.replay.contention import Slowdown, fit_slowdown, overlapped_share
from scaletrace.replay.delays import Removal, remove_delay
from scaletrace.replay.engine import replay
from scaletrace.replay.rules import CLASSES, Action, Rule, meant, parse_rule
from scaletrace.replay.stragglers import peers_pace
from scaletrace.replay.timeline import Timeline

_CLASS_KINDS = {
    "compute": (NodeKind.KERNEL,),
    "comm": (NodeKind.TRANSFER,),
    "memory": (NodeKind.COPY,),
    "host": (NodeKind.HOST, NodeKind.LAUNCH),
    "stall": (NodeKind.STALL,),
    "all": (NodeKind.HOST, NodeKind.LAUNCH, NodeKind.KERNEL, NodeKind.COPY, NodeKind.TRANSFER, NodeKind.STALL),
}
SWEEPS = 3
MOST_NS = 2**60
"""All durations together after a rule; what is longer would leave 64 bits on its way through the graph."""
BOUND = (
    "overlap=ideal lets no work wait for communication, which real dependencies do: the gain is an upper bound, the step "
    "a lower one"
)
TIERS = ("nic", "nvlink")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The replays before and after; `changed` counts the nodes each rule touched; notes say what was assumed.

    removed  what each rule that takes a delay out asked for and found
    """

    before: Timeline
    after: Timeline
    rules: tuple[Rule, ...]
    changed: dict[str, int]
    notes: list[str] = field(default_factory=list)
    removed: dict[str, Removal] = field(default_factory=dict)

    @property
    def is_bound(self) -> bool:
        """Whether the answer is the most that the change can bring instead of what it will."""
        return any(rule.action is Action.IDEAL_OVERLAP for rule in self.rules)

    @property
    def change_ns(self) -> int:
        """Makespan after minus before: negative is faster."""
        return self.after.makespan_ns - self.before.makespan_ns

    @property
    def speedup(self) -> float:
        return self.before.makespan_ns / self.after.makespan_ns if self.after.makespan_ns else float("inf")


def whatif(graph: Graph, rules: Sequence[str | Rule], *, arbitrate: bool = True, slowdown: bool = False) -> WhatIf:
    """Replay `graph` as it is and with `rules`.

    arbitrate  let full-GPU kernels hold back others at run time, before and after, instead of by measured order
    slowdown   remove what kernels lost to overlapped communication before the change, and add what they lose after it
    Raises UsageError for a rule that selects nothing.
    """
    parsed = tuple(parse_rule(rule) if isinstance(rule, str) else rule for rule in rules)
    before = replay(graph, arbitrate=arbitrate)
    notes: list[str] = []
    removed: dict[str, Removal] = {}
    changed_graph, dur, changed = apply_rules(graph, parsed, notes, removed)
    if not slowdown:
        return WhatIf(before, replay(changed_graph, dur, arbitrate=arbitrate), parsed, changed, notes, removed)
    fitted = fit_slowdown(before)
    notes.append(fitted.describe())
    after = _with_slowdown(before, changed_graph, dur, fitted, arbitrate)
    return WhatIf(before, after, parsed, changed, notes, removed)


def _with_slowdown(before: Timeline, graph: Graph, dur: IntArray, fitted: Slowdown, arbitrate: bool) -> Timeline:
    """Fixed point of: durations without contention, replayed overlap, durations with it (a few sweeps)."""
    free = dur / fitted.stretch(overlapped_share(before))
    after = replay(graph, np.rint(free).astype(np.int64), arbitrate=arbitrate)
    for _ in range(SWEEPS):
        stretched = free * fitted.stretch(overlapped_share(after))
        after = replay(graph, np.rint(stretched).astype(np.int64), arbitrate=arbitrate)
    return after


def apply_rules(
    graph: Graph, rules: Sequence[Rule], notes: list[str], removed: dict[str, Removal]
) -> tuple[Graph, IntArray, dict[str, int]]:
    """The graph and durations after all rules in order, and how many nodes each changed: those that last longer or
    shorter, the members of what was dropped, or what no longer waits for a transfer."""
    dur, changed = graph.dur_ns.copy(), {}
    for rule in rules:
        was, count = dur, -1
        if rule.action is Action.IDEAL_OVERLAP:
            graph, count = _ideal_overlap(graph)
            notes.append(BOUND)
        elif rule.action is Action.DROP:
            graph, dur, count = _drop(graph, dur, rule)
        elif rule.action is Action.PEERS:
            mine = graph.rank == _known_rank(graph, rule)
            dur = np.where(mine, np.minimum(dur, peers_pace(graph)), dur)
        elif rule.action is Action.DELAY and rule.time_ns < 0:
            ranks = _ranks(graph) if rule.rank is None else [_known_rank(graph, rule)]
            dur, _, removed[rule.text] = remove_delay(graph, dur, ranks, -rule.time_ns)
            notes.append(removed[rule.text].describe(rule.text))
        elif rule.action is Action.DELAY:
            dur = _delay(graph, dur, rule)
        elif rule.action in (Action.BANDWIDTH, Action.LATENCY):
            dur = _link(graph, dur, rule, notes)
        else:
            chosen = select(graph, rule)
            dur = dur.copy()
            with np.errstate(over="ignore"):  # what overflows is refused with the rule's name
                dur[chosen] = _whole(np.maximum(dur[chosen] * rule.factor + rule.time_ns, 0), rule)
        changed[rule.text] = count if count >= 0 else int((dur != was).sum())
    return graph, dur, changed


def _whole(values_ns: npt.NDArray[np.float64], rule: Rule) -> IntArray:
    """Durations as whole nanoseconds. Raises UsageError where a rule makes the job longer than its times can hold."""
    if not float(values_ns.sum()) <= MOST_NS:
        raise UsageError(f"rule {rule.text!r} makes the job last more than {MOST_NS // 10**9 // 31_557_600} years")
    return np.rint(values_ns).astype(np.int64)


def select(graph: Graph, rule: Rule) -> BoolArray:
    """The nodes that a scaling rule means: a class, a layer pattern, or names (kernels, operators, collectives)."""
    timed = graph.nodes(*_CLASS_KINDS["all"])
    target = rule.target
    if target in CLASSES:
        chosen = graph.nodes(*_CLASS_KINDS[target])
    elif target == "":
        chosen = timed
    elif target.startswith("layer:"):
        wanted = _matching(graph.layers, target.removeprefix("layer:"))
        chosen = np.isin(graph.layer, wanted) if len(graph.layer) else np.zeros(len(graph), np.bool_)
    else:
        chosen = timed & np.isin(graph.name, _matching(graph.names, target))
        chosen |= graph.nodes(NodeKind.TRANSFER) & _of_kind(graph, target)
    if rule.rank is not None:
        chosen = chosen & (graph.rank == _known_rank(graph, rule))
    if not chosen.any():
        hosts_alone = not any(lane.is_device for lane in graph.lanes)
        where = "; this job ran on no device, so its operators are part of host" if hosts_alone else ""
        raise UsageError(
            f"rule {rule.text!r} selects nothing{meant(target, _names(graph))}; give a class ({', '.join(CLASSES)}), a name "
            f"pattern or layer:PATTERN{where}"
        )
    return chosen


def _names(graph: Graph) -> list[str]:
    """What a rule may select by name: kinds of collectives, and names of one word."""
    kinds = {one.kind for one in graph.collectives}
    return sorted(kinds | {name for name in graph.names if name.isidentifier()})


def _matching(texts: Sequence[str], pattern: str) -> list[int]:
    """Indices of the texts that match, without regard to case; a bare word matches anywhere in a name."""
    low = pattern.lower()
    if not any(c in low for c in "*?["):
        exact = [i for i, text in enumerate(texts) if text.lower() == low]
        return exact or [i for i, text in enumerate(texts) if low in text.lower()]
    starred = [i for i, text in enumerate(texts) if fnmatch.fnmatchcase(text.lower(), low)]
    return starred or [i for i, text in enumerate(texts) if fnmatch.fnmatchcase(text.lower(), f"*{low}")]


def _of_kind(graph: Graph, pattern: str) -> BoolArray:
    """Nodes of the collectives whose kind matches."""
    kinds = [one.kind for one in graph.collectives]
    return np.isin(graph.instance, _matching(kinds, pattern)) & (graph.instance >= 0)


def _ranks(graph: Graph) -> list[int]:
    return [int(rank) for rank in np.unique(graph.rank[graph.lane >= 0])]


def _known_rank(graph: Graph, rule: Rule) -> int:
    ranks = _ranks(graph)
    if rule.rank is None or rule.rank not in ranks:
        raise UsageError(f"rule {rule.text!r}: rank {rule.rank} is not in this job (ranks {ranks[0]} to {ranks[-1]})")
    return rule.rank


def _delay(graph: Graph, dur: IntArray, rule: Rule) -> IntArray:
    """Lengthen the first host node of every step, of one rank or of all."""
    host = graph.nodes(NodeKind.HOST, NodeKind.LAUNCH)
    if rule.rank is not None:
        host &= graph.rank == _known_rank(graph, rule)
    at = np.flatnonzero(host)
    stepped = at[graph.step[at] >= 0] if (graph.step[at] >= 0).any() else at
    _, first = np.unique(np.stack((graph.rank[stepped], graph.step[stepped])), axis=1, return_index=True)
    out = dur.copy()
    out[stepped[first]] = _whole(out[stepped[first]].astype(np.float64) + rule.time_ns, rule)
    return out


def _drop(graph: Graph, dur: IntArray, rule: Rule) -> tuple[Graph, IntArray, int]:
    """Take a kind of collective out: no transfer, and nobody waits for anybody in it."""
    gone = _of_kind(graph, rule.target)
    if not gone.any():
        kinds = sorted({one.kind for one in graph.collectives})
        raise UsageError(
            f"rule {rule.text!r}: no such collective{meant(rule.target, kinds)}; here: {', '.join(kinds) or 'none'}"
        )
    met = (graph.edge_kind == EdgeKind.RENDEZVOUS) & gone[graph.edge_dst]
    return _without_edges(graph, met), np.where(gone, 0, dur), int(gone.sum())


def _without_edges(graph: Graph, drop: BoolArray) -> Graph:
    keep = ~drop
    pred_ptr = np.zeros(len(graph) + 1, np.int64)
    np.cumsum(np.bincount(graph.edge_dst[keep], minlength=len(graph)), out=pred_ptr[1:])
    return replace(
        graph,
        pred_ptr=pred_ptr,
        pred=graph.pred[keep],
        lag_ns=graph.lag_ns[keep],
        edge_kind=graph.edge_kind[keep],
        edge_source=graph.edge_source[keep],
    )


def _ideal_overlap(graph: Graph) -> tuple[Graph, int]:
    """Nothing waits for a transfer but the next transfer and the end: the most that hiding communication can bring."""
    after = graph.nodes(NodeKind.TRANSFER)[graph.pred]
    blocked = after & np.isin(graph.edge_kind, (EdgeKind.EVENT_WAIT, EdgeKind.HOST_SYNC, EdgeKind.OCCUPANCY))
    blocked |= (
        after & (graph.edge_kind == EdgeKind.STREAM) & ~graph.nodes(NodeKind.ARRIVE, NodeKind.STALL)[graph.edge_dst]
    )
    return _without_edges(graph, blocked), int(blocked.sum())


def _link(graph: Graph, dur: IntArray, rule: Rule, notes: list[str]) -> IntArray:
    """Change bandwidth or latency of the links of an axis or a tier: each transfer is latency plus what bytes take."""
    chosen = graph.nodes(NodeKind.TRANSFER) & _on_link(graph, rule)
    if rule.rank is not None:
        chosen &= graph.rank == _known_rank(graph, rule)
    if not chosen.any():
        axes = sorted({group.axis for group in graph.groups if group.axis})
        raise UsageError(
            f"rule {rule.text!r}: no transfer there; tiers: nic, nvlink; axes here: {', '.join(axes) or 'none'}"
        )
    latency = np.minimum(latencies(graph, notes), dur)
    if rule.action is Action.LATENCY and not latency[chosen].any():
        notes.append(
            f"{rule.text}: the recorded transfers do not tell latency from bandwidth here (too few sizes), so the rule "
            "has nothing to act on; that is no statement that latency does not matter"
        )
    if rule.action is Action.LATENCY:
        changed = dur - latency + _whole(np.where(chosen, latency * rule.factor, 0.0), rule)
    elif rule.factor == 0:
        raise UsageError(f"rule {rule.text!r}: a bandwidth of zero never ends")
    else:
        changed = latency + _whole(np.where(chosen, (dur - latency) / rule.factor, 0.0), rule)
    return np.where(chosen, changed, dur)


def _on_link(graph: Graph, rule: Rule) -> BoolArray:
    if not rule.target:
        return np.ones(len(graph), np.bool_)
    fits = []
    for one in graph.collectives:
        group = graph.groups[one.group] if one.group >= 0 else None
        if rule.target in TIERS:
            fits.append(group is not None and (group.nodes_spanned > 1) == (rule.target == "nic"))
        else:
            fits.append(group is not None and group.axis == rule.target)
    table = np.array([*fits, False], np.bool_)
    return table[np.where(graph.instance >= 0, graph.instance, len(fits))]


def latencies(graph: Graph, notes: list[str]) -> IntArray:
    """The part of each transfer that bytes do not explain (int64[n]): intercept over payloads, by kind and group.

    One payload alone tells nothing about latency: there it is 0, and a note says so.
    """
    out = np.zeros(len(graph), np.int64)
    nodes = np.flatnonzero(graph.nodes(NodeKind.TRANSFER) & (graph.instance >= 0))
    payload = np.array([max(one.bytes_in, one.bytes_out) for one in graph.collectives] or [0], np.int64)
    family: dict[tuple[str, int], list[int]] = {}
    for node in nodes.tolist():
        one = graph.collectives[int(graph.instance[node])]
        family.setdefault((one.kind, one.group), []).append(node)
    single = 0
    for members in family.values():
        at = np.array(members)
        size, time = payload[graph.instance[at]], graph.dur_ns[at]
        sizes = np.unique(size[size >= 0])
        if len(sizes) < 2:
            single += 1
            continue
        least = np.array([time[size == s].min() for s in sizes], np.float64)
        slope, intercept = np.polyfit(sizes.astype(np.float64), least, 1)
        out[at] = round(float(np.clip(intercept if slope > 0 else least.min(), 0, least.min())))
    if single:
        which = (
            f"{single} kinds of collective have one payload size: their"
            if single > 1
            else ("1 kind of collective has one payload size: its")
        )
        notes.append(f"{which} whole transfer counts as bandwidth")
    return out
