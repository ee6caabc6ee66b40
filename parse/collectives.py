"""Turns the members of all ranks into instances: which calls on different ranks were one collective.

The ladder, best rung first, each instance at the best one it can reach:
  seq        same group and sequence number (NCCL metadata, flight recorder)
  order      same group, sequences of kinds and sizes laid over each other
  names      no group known: sequences of kernel names of all ranks laid over each other
Sends and receives are paired in match_pairs, once the clocks are aligned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.groups import Groups, Use
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, RankTrace
from scaletrace.parse.kernels import Rules
from scaletrace.parse.match_align import Sequence_, place
from scaletrace.parse.match_device import device_members
from scaletrace.parse.match_gloo import gloo_members
from scaletrace.parse.members import KIND, P2P, UNIFORM, UNKNOWN, Members, concatenated, members_from

RUNGS = ("seq", "order", "names", "alone")
SEQ, ORDER, NAMES, ALONE = range(4)


@dataclass(slots=True)
class Table:
    """All members of all ranks as one table of m rows, before clocks: the columns of Members plus instance and rung."""

    rank: Int32Array
    event: Int32Array
    host_event: Int32Array
    kind: ByteArray
    group: Int32Array
    seq: IntArray
    bytes_in: IntArray
    bytes_out: IntArray
    start_ns: IntArray
    end_ns: IntArray
    issue_ns: IntArray
    turn_ns: IntArray
    peer: Int32Array
    root: Int32Array
    label: IntArray
    stream: IntArray
    step: IntArray
    functional: IntArray
    on_device: IntArray
    size_bytes: IntArray
    instance: IntArray
    rung: IntArray

    def __len__(self) -> int:
        return len(self.rank)


def members_of(
    trace: RankTrace, groups: Groups, health: Health, patterns: Sequence[str] = (), rules: Rules | None = None
) -> Members:
    """Everything one rank took part in: communication kernels and gloo spans, in the order of issue."""
    on_host = members_from(trace.rank, list(gloo_members(trace, groups, health)))
    on_device = device_members(trace, groups, health, patterns, rules)
    members = on_host if on_device is None else concatenated([on_host, on_device])
    if trace.steps:
        starts = np.array([step.start_ns for step in trace.steps])
        ends = np.array([step.end_ns for step in trace.steps])
        numbers = np.array([step.number for step in trace.steps])
        at = np.searchsorted(starts, members.issue_ns, side="right") - 1
        inside = (at >= 0) & (members.issue_ns < ends[np.maximum(at, 0)]) & (members.host_event >= 0)
        members.step[:] = np.where(inside, numbers[np.maximum(at, 0)], -1)
    return members


def join(members: Sequence[Members], health: Health) -> Table:
    """One table, sorted by (rank, issue), with groups and kinds filled in from the rest of their stream."""
    for one in members:
        _fill_from_stream(one, health)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(one, name) for one in members]) if members else np.zeros(0, np.int64)
        for name in Members.__slots__
        if name != "rank"
    }
    rank = (
        np.concatenate([np.full(len(one), one.rank, np.int32) for one in members]) if members else np.zeros(0, np.int32)
    )
    size = np.concatenate([one.size_bytes for one in members]) if members else np.zeros(0, np.int64)
    n = len(rank)
    return Table(rank=rank, size_bytes=size, instance=np.full(n, -1, np.int64), rung=np.full(n, ALONE), **columns)


def _fill_from_stream(one: Members, health: Health) -> None:
    """A kernel whose record is not in the window has the group and kind of the others with its name on its stream."""
    for name, unknown, reason in (
        ("kind", UNKNOWN, "collectives whose kind was taken from others on their stream"),
        ("group", -1, "collectives whose group was taken from others on their stream"),
    ):
        column = getattr(one, name)
        missing = (column == unknown) & (one.kind != KIND["custom"]) & (one.stream >= 0)
        for stream, label in {
            (s, k) for s, k in zip(one.stream[missing].tolist(), one.label[missing].tolist(), strict=True)
        }:
            alike = (one.stream == stream) & (column != unknown)
            if name == "kind":
                alike &= one.label == label
            known = np.unique(column[alike])
            if len(known) == 1:
                fill = missing & (one.stream == stream) & (one.label == label)
                column[fill] = known[0]
                health.guessed[reason] += int(fill.sum())


def match(table: Table, groups: Groups, ranks: Sequence[int], health: Health) -> None:
    """Give every row but sends and receives its `instance` (numbers without meaning) and `rung`, in place."""
    _fill_sequence_numbers(table, health)
    p2p = np.isin(table.kind, list(P2P))
    next_id = _by_seq(table, ~p2p & ~_half_numbered(table, p2p))
    next_id = _by_order(table, ~p2p & (table.instance < 0) & (table.group >= 0), next_id, health)
    next_id = _by_names(table, ~p2p & (table.instance < 0), ranks, next_id, health)
    alone = (table.instance < 0) & ~p2p
    table.instance[alone] = next_id + np.arange(int(alone.sum()))
    _agree_on_kinds(table)
    _agree_on_sizes(table, health)


def _half_numbered(table: Table, p2p: BoolArray) -> BoolArray:
    """Members of groups in which some rank has no number at all (its sidecar is missing): order serves all of them."""
    out = np.zeros(len(table), np.bool_)
    for group in np.unique(table.group[table.group >= 0]).tolist():
        mine = (table.group == group) & ~p2p
        named = np.unique(table.rank[mine & (table.seq >= 0)])
        if len(named) and len(named) < len(np.unique(table.rank[mine])):
            out |= mine
    return out


def _fill_sequence_numbers(table: Table, health: Health) -> None:
    """Members without a number between numbered ones of the same group and rank, where numbers run without holes."""
    usable = (table.group >= 0) & ~np.isin(table.kind, list(P2P))
    for rank, group in sorted(set(zip(table.rank[usable].tolist(), table.group[usable].tolist(), strict=True))):
        rows = np.flatnonzero(usable & (table.rank == rank) & (table.group == group))
        seq = table.seq[rows]
        known = np.flatnonzero(seq >= 0)
        if len(known) in (0, len(rows)):
            continue
        offsets = np.unique(seq[known] - known)
        if len(offsets) == 1 and offsets[0] + 0 >= 0:
            table.seq[rows] = np.arange(len(rows)) + offsets[0]
            health.guessed["sequence numbers continued from their neighbours"] += len(rows) - len(known)


def _by_seq(table: Table, usable: BoolArray) -> int:
    rows = np.flatnonzero(usable & (table.seq >= 0) & (table.group >= 0))
    if not len(rows):
        return 0
    key = np.column_stack([table.group[rows], table.seq[rows], table.kind[rows], np.zeros(len(rows), np.int64)])
    # coalesced members share one number: the k-th of a rank belongs to the k-th of the others
    per_rank = np.column_stack([key[:, :3], table.rank[rows]])
    key[:, 3] = _occurrence(per_rank)
    _, instance = np.unique(key, axis=0, return_inverse=True)
    instance = instance.reshape(-1)
    table.instance[rows] = instance
    table.rung[rows] = SEQ
    return int(instance.max()) + 1


def _occurrence(key: IntArray) -> IntArray:
    """For each row how many rows before it have the same key."""
    _, code = np.unique(key, axis=0, return_inverse=True)
    code = code.reshape(-1)
    order = np.argsort(code, kind="stable")
    first = np.r_[0, np.flatnonzero(np.diff(code[order])) + 1]
    run = np.repeat(first, np.diff(np.r_[first, len(order)]))
    out = np.empty(len(order), np.int64)
    out[order] = np.arange(len(order)) - run
    return out


def _sequence(table: Table, rows: IntArray) -> Sequence_:
    label = np.where(np.isin(table.kind[rows], [UNKNOWN, KIND["custom"]]), table.label[rows], table.kind[rows])
    return Sequence_(
        int(table.rank[rows[0]]),
        label.astype(np.int64),
        table.size_bytes[rows],
        table.step[rows],
        table.end_ns[rows],
        bool(np.all(table.on_device[rows] > 0)),
    )


def _by_order(table: Table, usable: BoolArray, next_id: int, health: Health) -> int:
    for group in np.unique(table.group[usable]).tolist():
        rows = np.flatnonzero(usable & (table.group == group))
        next_id = _lay_over(table, rows, next_id, ORDER, health)
    return next_id


def _by_names(table: Table, usable: BoolArray, ranks: Sequence[int], next_id: int, health: Health) -> int:
    """All ranks, stream by stream where they use the same ones, since streams run independently of each other."""
    for is_custom in (False, True):
        rows = np.flatnonzero(usable & ((table.kind == KIND["custom"]) == is_custom))
        if not len(rows):
            continue
        streams: dict[int, set[int]] = {}
        for stream, rank in zip(table.stream[rows].tolist(), table.rank[rows].tolist(), strict=True):
            streams.setdefault(stream, set()).add(rank)
        present = set().union(*streams.values())
        shared = all(users == present for users in streams.values())
        for stream in sorted(streams) if shared else [None]:
            part = rows if stream is None else rows[table.stream[rows] == stream]
            next_id = _lay_over(table, part, next_id, NAMES, health)
    return next_id


def _lay_over(table: Table, rows: IntArray, next_id: int, rung: int, health: Health) -> int:
    """Match the rows of several ranks by position on a common line."""
    parts = [rows[table.rank[rows] == rank] for rank in np.unique(table.rank[rows]).tolist()]
    parts = [part[np.argsort(table.turn_ns[part], kind="stable")] for part in parts]
    placed = place([_sequence(table, part) for part in parts])
    if placed.ambiguous:
        health.guessed["alignments for which a second shift was as good"] += placed.ambiguous
    if placed.gaps:
        health.repaired["alignments with collectives missing in the middle"] += placed.gaps
    everything = np.concatenate(placed.positions)
    _, instance = np.unique(everything, return_inverse=True)
    table.instance[np.concatenate(parts)] = instance.reshape(-1) + next_id
    table.rung[rows] = rung
    return next_id + int(instance.max()) + 1


def _agree_on_kinds(table: Table) -> None:
    """Members that do not know their kind take it from the others of their instance."""
    unknown = np.flatnonzero(table.kind == UNKNOWN)
    if not len(unknown):
        return
    order = np.argsort(table.instance, kind="stable")
    for row in unknown.tolist():
        low, high = np.searchsorted(table.instance[order], [table.instance[row], table.instance[row] + 1])
        kinds = table.kind[order[low:high]]
        known = kinds[kinds != UNKNOWN]
        if len(known):
            table.kind[row] = known[0]


def _agree_on_sizes(table: Table, health: Health) -> None:
    """Payloads of members whose record is missing: from their instance, else from the same place in another step."""
    rows = np.flatnonzero(np.isin(table.kind, list(UNIFORM)))
    for group in np.unique(table.group[rows]).tolist():
        mine = rows[table.group[rows] == group]
        if not np.any(table.bytes_in[mine] < 0) or np.all(table.bytes_in[mine] < 0):
            continue
        instances, code = np.unique(table.instance[mine], return_inverse=True)
        code = code.reshape(-1)
        begun = np.full(len(instances), np.iinfo(np.int64).max)
        np.minimum.at(begun, code, table.start_ns[mine])
        sides = []
        for column in (table.bytes_in, table.bytes_out):
            known = np.full(len(instances), -1, np.int64)
            np.maximum.at(known, code, column[mine])
            sides.append(known)
        kind = np.zeros(len(instances), np.int64)
        kind[code] = table.kind[mine].astype(np.int64) * 2**33 + table.label[mine]
        order = np.argsort(begun, kind="stable")
        period = _period(kind[order], sides[0][order])
        for column, known in zip((table.bytes_in, table.bytes_out), sides, strict=True):
            from_peers = known[code]
            known[order] = _repeat(known[order], period)
            column[mine] = np.where(column[mine] >= 0, column[mine], known[code])
        if inherited := int(np.sum((from_peers < 0) & (table.bytes_out[mine] >= 0))):
            health.guessed["payloads taken from the same place in another step"] += inherited


def _period(kind: IntArray, size: IntArray) -> int:
    """Smallest shift at which a sequence of kinds and sizes (-1 unknown) repeats, 0 where it does not."""
    for p in range(1, len(kind) // 2 + 1):
        a, b = size[:-p], size[p:]
        if np.array_equal(kind[:-p], kind[p:]) and not np.any((a != b) & (a >= 0) & (b >= 0)):
            return p
    return 0


def _repeat(size: IntArray, period: int) -> IntArray:
    """Sizes filled in from the same place of other periods."""
    if not period:
        return size
    place = np.arange(len(size)) % period
    known = np.full(period, -1, np.int64)
    np.maximum.at(known, place, size)
    return np.where(size >= 0, size, known[place])


def rung_of(table: Table) -> str:
    """The rungs in use, most used first, for the report."""
    counts = Counter(RUNGS[code] for code in table.rung.tolist() if code != ALONE)
    return ", ".join(f"{name}" for name, _ in counts.most_common())


def uses(table: Table, traces: Sequence[RankTrace]) -> Mapping[int, Use]:
    """How each group was used, for naming its axis."""
    out: dict[int, Use] = {}
    wrappers: dict[int, set[str]] = {}
    turns = {trace.rank: _first_backwards(trace) for trace in traces}
    for trace in traces:
        found = wrappers.setdefault(trace.rank, set())
        if any(text.startswith("FSDP::") for text in trace.events.strings):
            found.add("FSDP")
        if any(text.startswith("DistributedDataParallel") for text in trace.events.strings):
            found.add("DDP")
    for group in np.unique(table.group).tolist():
        rows = table.group == group
        use = Use()
        kinds, counts = np.unique(table.kind[rows], return_counts=True)
        use.kinds.update({KINDS[k]: int(c) for k, c in zip(kinds.tolist(), counts.tolist(), strict=True)})
        use.functional = int(table.functional[rows].clip(0).sum())
        for rank in np.unique(table.rank[rows]).tolist():
            use.wrappers |= wrappers.get(rank, set())
        _count_forward(use, table, np.flatnonzero(rows & (table.kind == KIND["all_reduce"])), turns)
        out[group] = use
    return out


_BACKWARD = "autograd::engine::evaluate_function"
_FEW_BYTES = 64
"""An all-reduce of no more carries a loss, a norm or a flag."""


def _first_backwards(trace: RankTrace) -> tuple[IntArray, IntArray, IntArray]:
    """(start, end, first backward operator or end) of each step of a rank, on its own clock; the whole window where no
    step is marked. Steps without any operator say nothing and are left out."""
    events = trace.events
    ops = np.sort(events.ts_ns[events.in_cats("cpu_op")])
    backward = np.array([text.startswith(_BACKWARD) for text in events.strings], np.bool_)
    turns = np.sort(events.ts_ns[backward[events.name] & events.in_cats("cpu_op")])
    if not len(ops):
        return ops, ops, ops
    spans = [(step.start_ns, step.end_ns) for step in trace.steps] or [(int(ops[0]), int(events.end_ns.max()))]
    start, end = (np.array([span[at] for span in spans], np.int64) for at in (0, 1))
    worked = np.searchsorted(ops, end) > np.searchsorted(ops, start)
    start, end = start[worked], end[worked]
    at = np.searchsorted(turns, start)
    turn = np.append(turns, np.iinfo(np.int64).max)[at]
    return start, end, np.minimum(turn, end)


def _count_forward(
    use: Use, table: Table, rows: IntArray, turns: Mapping[int, tuple[IntArray, IntArray, IntArray]]
) -> None:
    """Count the all-reduces among `rows` that recur before the backward pass of their step."""
    sizes: Counter[int] = Counter()
    for rank in np.unique(table.rank[rows]).tolist():
        start, end, turn = turns.get(rank, (np.zeros(0, np.int64),) * 3)
        if not len(start):
            continue
        mine = rows[(table.rank[rows] == rank) & (table.size_bytes[rows] > _FEW_BYTES) & (table.host_event[rows] >= 0)]
        issued = table.issue_ns[mine]
        at = np.searchsorted(start, issued, side="right") - 1
        inside = (at >= 0) & (issued < end[np.maximum(at, 0)])
        early = inside & (issued < turn[np.maximum(at, 0)])
        use.passes += len(start)
        use.reduced += int(inside.sum())
        use.forward += int(early.sum())
        sizes.update(table.size_bytes[mine[early]].tolist())
    use.alike = max(sizes.values(), default=0)
