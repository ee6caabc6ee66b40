"""Turns the gloo spans and c10d calls of one rank into Members: which call each span served, in which group and turn.

A gloo collective leaves two marks: the c10d op on the calling thread, which knows kind, shapes, root and peer, and a
`gloo:` span on a worker thread, which knows the time. Neither knows the group; the flight recorder beside the trace
does, and where there is none the worker threads (two per group) tell groups apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scaletrace.parse.events import TIME_UNKNOWN, Events
from scaletrace.parse.groups import Groups
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, Group, RankTrace
from scaletrace.parse.members import P2P, UNKNOWN, concrete, elements_of, kind_of, parsed, times, type_bytes

_ROOT_AT = {"broadcast": 2, "reduce": 3, "gather": 3, "scatter": 3}
_SLACK_NS = 1_000


@dataclass(slots=True)
class _Call:
    """One c10d call while it is being joined with its spans and its flight-recorder entry."""

    row: int
    name: str
    kind: int
    start: int
    end: int
    lane: int
    dims: Any
    functional: int = 0
    entry: Mapping[str, Any] | None = None
    spans: list[int] = field(default_factory=list)

    @staticmethod
    def at(events: Events, row: int) -> _Call:
        name, start = events.name_of(row), int(events.ts_ns[row])
        end, dims = start + int(events.dur_ns[row]), parsed(events.text("Input Dims", row))
        return _Call(row, name, kind_of(name), start, end, int(events.lane[row]), dims)


def gloo_members(trace: RankTrace, groups: Groups, health: Health) -> Iterator[dict[str, int]]:
    """One row per gloo collective of this rank that has a span, as for `members_from`."""
    events = trace.events
    is_span = np.isin(events.name, [i for i, text in enumerate(events.strings) if text.startswith("gloo:")])
    spans = np.flatnonzero(is_span & (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN))
    if not len(spans):
        if "fake" in _backend(trace):
            yield from _without_spans(trace, groups)
        return
    ops = _calls(events)
    _join_spans(events, ops, spans.tolist())
    joined = _join_sidecar(ops, trace.sidecar)
    served = {row for op in ops for row in op.spans}
    orphans = [row for row in spans.tolist() if row not in served]
    _count(health, "gloo spans without a c10d call", len(orphans))
    _count(health, "c10d calls without a gloo span", sum(not op.spans for op in ops))
    own = groups.of_rank(trace.rank)
    lanes = {} if len(own) < 2 else _lanes_to_groups(events, ops, own, trace, groups)
    guessed = 0
    for op in ops:
        if op.spans:
            group, sure = _group(op, trace, groups, own, lanes, events)
            guessed += not sure
            yield _row(events, op, group, groups)
    for row in orphans:
        yield _orphan(events, row, own[0].id if len(own) == 1 else lanes.get(int(events.lane[row]), -1))
    if guessed:
        health.guessed["gloo collectives whose group was inferred"] += guessed
    if trace.sidecar is not None:
        bare = sum(op.entry is None and op.kind not in P2P and bool(op.spans) for op in ops)
        _count(health, "gloo collectives without a flight-recorder entry", bare)
    elif joined == 0 and ops:
        health.note("no flight-recorder dump beside the gloo trace: collectives are matched by order")


def _backend(trace: RankTrace) -> str:
    info = trace.header.get("distributedInfo")
    return str(info.get("backend", "")) if isinstance(info, Mapping) else ""


def _without_spans(trace: RankTrace, groups: Groups) -> Iterator[dict[str, int]]:
    """The calls of a fake process group, which moves nothing: kind, group and payload stand, no span carries a time."""
    events = trace.events
    ops = _calls(events)
    _join_sidecar(ops, trace.sidecar)
    own = groups.of_rank(trace.rank)
    for op in ops:
        group, _ = _group(op, trace, groups, own, {}, events)
        yield _row(events, op, group, groups)


def _count(health: Health, reason: str, number: int) -> None:
    if number:
        health.unmatched[reason] += number


def _calls(events: Events) -> list[_Call]:
    """The c10d calls in the order of their start; a call inside another of the same kind is the same collective."""
    codes = [i for i, text in enumerate(events.strings) if text.startswith("c10d::") and kind_of(text) != UNKNOWN]
    rows = np.flatnonzero(np.isin(events.name, codes) & (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN))
    ops: list[_Call] = []
    open_until: dict[int, _Call] = {}
    for row in rows.tolist():
        op = _Call.at(events, row)
        outer = open_until.get(op.lane)
        if outer is not None and op.end <= outer.end and op.kind == outer.kind:
            continue
        open_until[op.lane] = op
        ops.append(op)
    wraps = np.flatnonzero(
        np.isin(events.name, [i for i, t in enumerate(events.strings) if t.startswith("_c10d_functional::")])
    )
    begins, ends, lanes = events.ts_ns[wraps], events.end_ns[wraps], events.lane[wraps]
    for op in ops:
        at = int(np.searchsorted(begins, op.start, side="right")) - 1
        op.functional = int(at >= 0 and ends[at] >= op.end and lanes[at] == op.lane)
    return ops


def _span_kinds(op: _Call) -> tuple[str, ...]:
    """Names under which gloo may run this call; reduce_scatter is one all_reduce of the whole input."""
    kind = KINDS[op.kind]
    return ("reduce_scatter", "all_reduce") if kind == "reduce_scatter" else (kind,)


def _expected(op: _Call) -> tuple[int, int]:
    """(elements of one span, number of spans); -1 elements where shapes are not recorded."""
    if KINDS[op.kind] == "reduce_scatter" and len(op.dims) > 1 and _is_list_of_lists(op.dims[1]):
        parts = op.dims[1][0]
        return _elements(parts[0]) if parts else -1, max(len(parts), 1)
    inside, out = elements_of(op.kind, op.dims, 1)
    if KINDS[op.kind] in ("scatter", "gather") or "coalesced" in op.name:
        return -1, 1
    return inside if inside >= 0 else out, 1


def _is_list_of_lists(dims: Any) -> bool:
    return bool(dims) and isinstance(dims[0], list) and bool(dims[0]) and isinstance(dims[0][0], list)


def _elements(dims: Any) -> int:
    return int(np.prod([int(n) for n in dims])) if isinstance(dims, list) and dims else -1


def _join_spans(events: Events, ops: Sequence[_Call], spans: Sequence[int]) -> None:
    """Give every call the earliest free span of its kind and size that starts after it."""
    free: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in reversed(spans):
        dims = parsed(events.text("Input Dims", row))
        count = _elements(dims[0]) if dims else -1
        free[(KINDS[kind_of(events.name_of(row))], count)].append(row)
    by_kind: dict[str, list[int]] = defaultdict(list)
    for kind, count in free:
        by_kind[kind].append(count)
    for op in ops:
        count, number = _expected(op)
        for _ in range(number):
            queue = _queue(op, count, free, by_kind, events)
            if queue is None:
                break
            op.spans.append(queue.pop())


def _queue(
    op: _Call, count: int, free: Mapping[tuple[str, int], list[int]], by_kind: Mapping[str, list[int]], events: Events
) -> list[int] | None:
    """The queue whose next span this call can own; spans that began before the call belong to earlier, unseen calls."""
    best: list[int] | None = None
    for kind in _span_kinds(op):
        for size in by_kind.get(kind, ()):
            if count >= 0 and size >= 0 and size != count:
                continue
            queue = free[(kind, size)]
            while queue and events.ts_ns[queue[-1]] < op.start - _SLACK_NS:
                queue.pop()
            if queue and (best is None or events.ts_ns[queue[-1]] < events.ts_ns[best[-1]]):
                best = queue
    return best


def _join_sidecar(ops: Sequence[_Call], sidecar: Mapping[str, Any] | None) -> int:
    """Give every call the flight-recorder entry that was created while it ran; how many were found."""
    entries = [e for e in (sidecar or {}).get("entries", []) if isinstance(e, Mapping) and _is_entry(e)]
    entries.sort(key=lambda e: int(e["time_created_ns"]))
    created = np.array([int(e["time_created_ns"]) for e in entries], np.int64)
    used = np.zeros(len(entries), bool)
    joined = 0
    for op in ops:
        if op.kind in P2P:
            continue
        low, high = np.searchsorted(created, [op.start - _SLACK_NS, op.end + _SLACK_NS])
        for at in range(int(low), int(high)):
            said = kind_of(str(entries[at].get("profiling_name", "")))
            fits = said in (op.kind, UNKNOWN) or KINDS[said] in _span_kinds(op)
            if not used[at] and fits:
                op.entry, used[at] = entries[at], True
                joined += 1
                break
    return joined


def _is_entry(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("time_created_ns"), int) and not entry.get("is_p2p", False)


def _entry_name(entry: Mapping[str, Any]) -> str | None:
    group = entry.get("process_group")
    return str(group[0]) if isinstance(group, list | tuple) and group else None


def _group(
    op: _Call, trace: RankTrace, groups: Groups, own: Sequence[Group], lanes: Mapping[int, int], events: Events
) -> tuple[int, bool]:
    """(group id, whether it is certain)."""
    if op.entry is not None:
        found = groups.of(trace.rank, _entry_name(op.entry))
        if found >= 0:
            return found, True
    if len(own) == 1:
        return own[0].id, True
    if op.kind in P2P:
        staged = [group for group in own if "pp" in group.description or "pipe" in group.description.lower()]
        return (staged or own)[0].id if own else -1, not own
    return lanes.get(int(events.lane[op.spans[0]]), -1) if op.spans else -1, False


def _lanes_to_groups(
    events: Events, ops: Sequence[_Call], own: Sequence[Group], trace: RankTrace, groups: Groups
) -> dict[int, int]:
    """Worker lane → group. Each group has two threads, made when the group is, so thread ids follow group order.

    Lanes that a flight-recorder entry names are certain. The rest are taken pairwise in order; sizes rule out groups
    (an all-gather that doubles its input is not one of four), and the default group comes last, since a job that makes
    its own groups leaves it idle.
    """
    known: dict[int, int] = {}
    needed: dict[int, set[int]] = defaultdict(set)
    for op in ops:
        for row in op.spans:
            lane = int(events.lane[row])
            if op.kind in P2P:
                continue
            needed.setdefault(lane, set())
            if op.entry is not None and (group := groups.of(trace.rank, _entry_name(op.entry))) >= 0:
                known[lane] = group
            inside, out = elements_of(op.kind, op.dims, 0)
            if KINDS[op.kind] in ("all_gather", "reduce_scatter") and min(inside, out) > 0:
                needed[lane].add(max(inside, out) // min(inside, out))
    pairs: list[list[int]] = []
    for lane in sorted(
        (lane for lane in needed if lane not in known), key=lambda k: str(events.lanes[k].tid).zfill(24)
    ):
        tid, before = events.lanes[lane].tid, events.lanes[pairs[-1][0]].tid if pairs else None
        together = isinstance(tid, int) and isinstance(before, int) and tid - before == 1 and len(pairs[-1]) < 2
        if together:
            pairs[-1].append(lane)
        else:
            pairs.append([lane])
    left = [group for group in [*own[1:], own[0]] if group.id not in known.values()]
    for pair in pairs:
        sizes = set().union(*(needed[lane] for lane in pair))
        fitting = [group for group in left if not sizes or group.size in sizes]
        if fitting:
            left.remove(fitting[0])
            known.update(dict.fromkeys(pair, fitting[0].id))
    return known


def _row(events: Events, op: _Call, group: int, groups: Groups) -> dict[str, int]:
    first, last = (op.spans[0], op.spans[-1]) if op.spans else (op.row, -1)
    members = groups.groups[group].members if group >= 0 else ()
    n_in, n_out = elements_of(op.kind, op.dims, len(members))
    size = _element_bytes(events, op, first)
    kind = KINDS[op.kind]
    peer = concrete(events.text("Concrete Inputs", op.row), 2) if op.kind in P2P else -1
    root = concrete(events.text("Concrete Inputs", op.row), _ROOT_AT[kind]) if kind in _ROOT_AT else -1
    return {
        "event": last,
        "host_event": op.row,
        "kind": op.kind,
        "group": group,
        "seq": int(op.entry.get("collective_seq_id", -1)) if op.entry is not None else -1,
        "bytes_in": times(n_in, size),
        "bytes_out": times(n_out, size),
        "start_ns": int(events.ts_ns[first]),
        "end_ns": max(int(events.ts_ns[row] + events.dur_ns[row]) for row in op.spans or [op.row]),
        "issue_ns": op.start,
        "turn_ns": op.start,
        "peer": members[peer] if 0 <= peer < len(members) else peer,
        "root": members[root] if 0 <= root < len(members) else root,
        "label": op.kind,
        "stream": -1 if op.kind in P2P else int(events.lane[first]),
        "functional": op.functional,
        "on_device": 0,
    }


def _element_bytes(events: Events, op: _Call, span: int) -> int:
    """Element size from the flight recorder, else the span, else the call (whose tensor lists carry no type)."""
    types: list[Any] = []
    if op.entry is not None:
        types += [kind for key in ("input_dtypes", "output_dtypes") for kind in op.entry.get(key) or []]
    types += [*parsed(events.text("Input type", span)), *parsed(events.text("Input type", op.row))]
    sizes = (type_bytes(name) for name in types if isinstance(name, str))
    return next((size for size in sizes if size > 0), -1)


def _orphan(events: Events, row: int, group: int) -> dict[str, int]:
    kind = kind_of(events.name_of(row))
    dims, types = parsed(events.text("Input Dims", row)), parsed(events.text("Input type", row))
    count = _elements(dims[0]) if dims else -1
    moved = times(count, type_bytes(types[0]) if types and isinstance(types[0], str) else -1)
    exact = KINDS[kind] in ("all_reduce", "broadcast", "send", "recv")
    start = int(events.ts_ns[row])
    return {
        "event": row,
        "kind": kind,
        "group": group,
        "bytes_in": moved,
        "bytes_out": moved if exact else 0 if KINDS[kind] == "barrier" else -1,
        "start_ns": start,
        "end_ns": start + int(events.dur_ns[row]),
        "issue_ns": start,
        "turn_ns": start,
        "label": kind,
        "stream": int(events.lane[row]),
        "functional": 0,
        "on_device": 0,
    }
