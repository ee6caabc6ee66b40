"""Turns the communication kernels of one rank into Members: kind, group, sequence and payload from the host records.

The kernel knows the time. What it did stands in its own metadata or in the `record_param_comms` that launched it;
its name is the last resort, since NCCL runs several collectives under one name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scaletrace.parse.cats import KERNEL_CATS
from scaletrace.parse.events import MISSING, TIME_UNKNOWN, BoolArray, Events, IntArray
from scaletrace.parse.groups import Groups, restore_members
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, RankTrace
from scaletrace.parse.kernels import Rules, default_rules
from scaletrace.parse.links import launch_of
from scaletrace.parse.members import (
    KIND,
    P2P,
    UNKNOWN,
    Members,
    concrete,
    elements_of,
    kind_of,
    label_of,
    parsed,
    type_bytes,
)

LIBRARY = "communication/nccl"
_NO_COLLECTIVE = ("wait", "init", "end", "start")
_NAME_TYPE = re.compile(r"_(f16|f32|f64|bf16|u8|u32|u64|i8|i32|i64|half|float|double)(_|\(|$)")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class _Records:
    """Host records of collectives of one rank, in the order of their start."""

    rows: IntArray
    lane: IntArray
    start: IntArray
    end: IntArray
    kind: IntArray


def enclosing(
    start: IntArray, end: IntArray, lane: IntArray, time: IntArray, on: IntArray, depth: int = 16
) -> IntArray:
    """Index of the innermost interval of `lane` that holds each `time` on lane `on`, -1 where none does.

    Looks back at most `depth` intervals, which is deeper than calls nest between a communication op and its launch.
    """
    out = np.full(len(time), -1, np.int64)
    if not len(start) or not len(time):
        return out
    ranked = np.sort(start)
    wide = len(start) + 1
    key = lane * wide + np.searchsorted(ranked, start, side="right")
    order = np.lexsort((-end, key))
    at = np.searchsorted(key[order], on * wide + np.searchsorted(ranked, time, side="right"), side="right") - 1
    open_ = at >= 0
    for _ in range(depth):
        row = order[np.maximum(at, 0)]
        open_ &= lane[row] == on
        hit = open_ & (end[row] >= time)
        out[hit] = row[hit]
        open_ &= ~hit
        at = at - 1
        open_ &= at >= 0
        if not open_.any():
            break
    return out


def device_members(
    trace: RankTrace, groups: Groups, health: Health, patterns: Sequence[str] = (), rules: Rules | None = None
) -> Members | None:
    """The communication kernels of this rank, one row each (several where one kernel runs a batch of sends)."""
    events = trace.events
    rows, custom = communication_kernels(events, patterns, rules)
    if not len(rows):
        return None
    records = _records(events)
    launches = launch_of(events)[rows]
    record, batches = _link(events, rows, records, launches, custom)
    call = np.where(custom, -1, _calls(events, launches))
    if lost := int(np.sum((record < 0) & ~custom)):
        health.unmatched["communication kernels without a host record"] += lost
    kernel = np.repeat(np.arange(len(rows)), [len(batches.get(i, (0,))) for i in range(len(rows))])
    source = np.where(record[kernel] >= 0, records.rows[record[kernel]] if len(records.rows) else -1, -1)
    for i, batch in batches.items():
        source[kernel == i] = records.rows[batch]
    columns = _describe(trace, rows[kernel], source, call[kernel], custom[kernel], groups)
    columns["host_event"] = np.where(source >= 0, source, call[kernel])
    _time(events, rows[kernel], launches[kernel], columns)
    return _fold(trace.rank, columns, kernel)


def _time(events: Events, row: IntArray, launch: IntArray, columns: dict[str, IntArray]) -> None:
    labels = {code: label_of(_base_name(events.strings[code])) for code in np.unique(events.name[row]).tolist()}
    columns["event"] = row
    columns["start_ns"] = columns["turn_ns"] = events.ts_ns[row]
    columns["end_ns"] = events.end_ns[row]
    columns["issue_ns"] = np.where(launch >= 0, events.ts_ns[launch], events.ts_ns[row])
    columns["label"] = np.array([labels[code] for code in events.name[row].tolist()], np.int64)
    columns["stream"] = np.where(events.stream[row] >= 0, events.stream[row], events.lane[row])
    columns["step"] = np.full(len(row), -1, np.int64)
    columns["functional"] = np.zeros(len(row), np.int64)
    columns["on_device"] = np.ones(len(row), np.int64)


def _fold(rank: int, columns: dict[str, IntArray], kernel: IntArray) -> Members:
    """Records that one kernel serves become one row with their bytes summed, unless they are sends and receives."""
    p2p = np.isin(columns["kind"], list(P2P))
    first = np.r_[True, kernel[1:] != kernel[:-1]]
    for side in ("bytes_in", "bytes_out"):
        total = np.bincount(kernel, np.maximum(columns[side], 0)).astype(np.int64)
        unknown = np.bincount(kernel, columns[side] < 0) > 0
        summed = np.where(unknown, -1, total)[kernel]
        columns[side] = np.where(p2p, columns[side], summed)
    keep = first | p2p
    return Members.of(rank, {name: column[keep] for name, column in columns.items()})


@lru_cache(maxsize=65_536)
def _class_of(name: str, rules: Rules) -> str:
    """Class of a kernel name; the ranks of a job share their names, and rules are many."""
    return rules.labels[rules.code(name)]


def _base_name(name: str) -> str:
    return name.split("(")[0].strip()


def communication_kernels(
    events: Events, patterns: Sequence[str] = (), rules: Rules | None = None
) -> tuple[IntArray, BoolArray]:
    """(rows of the kernels that communicate, whether each is of another library than NCCL and RCCL), by start.

    A kernel counts through its metadata, its class (kernels.yaml) or a pattern; those without a usable time are left out.
    """
    mine = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    is_kernel = events.in_cats(*KERNEL_CATS) & (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN)
    names = np.unique(events.name[is_kernel])
    classes = [_class_of(events.strings[n], rules or default_rules()) for n in names.tolist()]
    by_library = [n for n, label in zip(names.tolist(), classes, strict=True) if label == LIBRARY]
    by_pattern = [
        n
        for n, label in zip(names.tolist(), classes, strict=True)
        if label != LIBRARY
        and (label.startswith("communication") or any(pattern.search(events.strings[n]) for pattern in mine))
    ]
    described = events.texts("Collective name") != MISSING
    is_custom = np.isin(events.name, by_pattern) & ~described
    rows = np.flatnonzero(is_kernel & (np.isin(events.name, by_library) | is_custom | described))
    rows = rows[np.argsort(events.ts_ns[rows], kind="stable")].astype(np.int64)
    return rows, is_custom[rows]


def _records(events: Events) -> _Records:
    """record_param_comms that stand for a collective; a barrier's inner all-reduce is not one of its own."""
    rows = np.flatnonzero(events.named("record_param_comms") & (events.ts_ns != TIME_UNKNOWN)).astype(np.int64)
    names = events.texts("Collective name")[rows]
    kinds, skipped = np.full(len(rows), UNKNOWN, np.int64), np.zeros(len(rows), np.bool_)
    for code in np.unique(names[names >= 0]).tolist():
        kinds[names == code] = kind_of(events.strings[code])
        skipped[names == code] = events.strings[code].startswith(_NO_COLLECTIVE)
    rows, kinds = rows[~skipped], kinds[~skipped]
    start, end, lane = events.ts_ns[rows], events.end_ns[rows], events.lane[rows].astype(np.int64)
    seq = events.ints("Seq")[rows]
    inner = np.zeros(len(rows), np.bool_)
    for b in np.flatnonzero(kinds == KIND["barrier"]).tolist():
        mine = (lane == lane[b]) & (kinds == KIND["all_reduce"])
        inner |= mine & (((start >= start[b]) & (end <= end[b])) | ((seq == seq[b]) & (seq[b] >= 0)))
    return _Records(rows[~inner], lane[~inner], start[~inner], end[~inner], kinds[~inner])


def _link(
    events: Events, rows: IntArray, records: _Records, launches: IntArray, custom: BoolArray
) -> tuple[IntArray, dict[int, IntArray]]:
    """For each kernel the index of its record (-1 none), and for those launched at the end of a group all its records.

    In this order: the record that encloses the launch, the record with the same External id (which must not be the
    correlation in disguise), the records on that thread since the previous communication launch.
    """
    launched = (launches >= 0) & ~custom
    time = np.where(launched, events.ts_ns[launches], 0)
    lane = np.where(launched, events.lane[launches], -1).astype(np.int64)
    at = enclosing(records.start, records.end, records.lane, time, lane)
    at[~launched] = -1
    if len(records.rows):
        external = events.external_id[records.rows]
        order = np.argsort(external, kind="stable")
        wanted = events.external_id[rows]
        usable = (at < 0) & ~custom & (wanted >= 0) & ((wanted != events.correlation[rows]) | ~launched)
        k = np.minimum(np.searchsorted(external[order], wanted), len(order) - 1)
        usable &= external[order[k]] == wanted
        at[usable] = order[k[usable]]
    return at, _batches(records, at, launched, time, lane)


def _batches(
    records: _Records, at: IntArray, launched: BoolArray, time: IntArray, lane: IntArray
) -> dict[int, IntArray]:
    """Records that wait for a launch outside of them, by kernel; `at` is set to the first of each batch."""
    batches: dict[int, IntArray] = {}
    taken = np.zeros(len(records.rows), np.bool_)
    taken[at[at >= 0]] = True
    for i in np.flatnonzero(launched & (at < 0)).tolist():
        before = time[launched & (lane == lane[i]) & (time < time[i])]
        since = int(before.max()) if len(before) else TIME_UNKNOWN
        waiting = ~taken & (records.lane == lane[i]) & (records.start < time[i]) & (records.start >= since)
        batch = np.flatnonzero(waiting)
        if len(batch):
            batches[i], at[i] = batch, batch[0]
            taken[batch] = True
    return batches


def _calls(events: Events, launches: IntArray) -> IntArray:
    """Row of the c10d op in which each kernel was launched, -1 where there is none."""
    codes = [i for i, t in enumerate(events.strings) if t.startswith("c10d::") and kind_of(t) != UNKNOWN]
    rows = np.flatnonzero(np.isin(events.name, codes) & (events.ph == ord("X"))).astype(np.int64)
    launched = launches >= 0
    time = np.where(launched, events.ts_ns[launches], 0)
    lane = np.where(launched, events.lane[launches], -1).astype(np.int64)
    at = enclosing(events.ts_ns[rows], events.end_ns[rows], events.lane[rows].astype(np.int64), time, lane)
    return np.where(at >= 0, rows[at], -1) if len(rows) else at


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Arguments of the records, completed from the kernels' own metadata; -1 where neither has them."""

    events: Events
    row: IntArray
    source: IntArray

    def texts(self, key: str) -> IntArray:
        return self._pick(self.events.texts(key).astype(np.int64))

    def ints(self, key: str) -> IntArray:
        arg = self.events.args.get(key)
        if arg is None or arg.is_text:
            return np.full(len(self.row), MISSING, np.int64)
        return self._pick(self.events.ints(key))

    def _pick(self, dense: IntArray) -> IntArray:
        own = np.where(self.source >= 0, dense[self.source], MISSING)
        return np.where(own != MISSING, own, dense[self.row])


def _describe(
    trace: RankTrace, row: IntArray, source: IntArray, call: IntArray, custom: BoolArray, groups: Groups
) -> dict[str, IntArray]:
    """Kind, group, sequence, payload and peers of each (kernel, record); worked out once for each distinct description."""
    events = trace.events
    look = _Lookup(events, row, source)
    called = [np.where(call >= 0, column[call], MISSING) for column in (events.name, *map(events.texts, _CALL_TEXTS))]
    rank_in_group = look.ints("Rank")
    n_in, n_out = look.ints("In msg nelems"), look.ints("Out msg nelems")
    key = np.column_stack(
        [
            *(look.texts(k) for k in ("Collective name", "Process Group Name", "Process Group Ranks", "dtype")),
            *(look.ints(k) for k in ("Group size", "Global rank start", "Global rank stride")),
            *called,
            events.name[row],
            n_in < 0,
        ]
    )
    distinct, which = np.unique(key, axis=0, return_inverse=True)
    said = np.array([_one(trace, groups, *values) for values in distinct.tolist()], np.int64)[which.reshape(-1)]
    kind, group, width, call_in, call_out, call_peer = said.T
    kind = np.where(custom, KIND["custom"], kind)
    n_in, n_out = np.where(n_in < 0, call_in, n_in), np.where(n_in < 0, call_out, n_out)
    inside = np.where(rank_in_group >= 0, rank_in_group, call_peer)
    sends, receives = kind == KIND["send"], kind == KIND["recv"]
    rooted = np.isin(kind, [KIND[k] for k in _ROOTED])
    stated = np.where(sends, look.ints("Dst Rank"), np.where(receives, look.ints("Src Rank"), -1))
    other = _global_rank(groups, group, inside)
    return {
        "kind": kind,
        "group": group,
        "seq": np.where(sends | receives, -1, look.ints("Seq")),
        "bytes_in": _bytes(n_in, width),
        "bytes_out": _bytes(n_out, width),
        "peer": np.where(sends | receives, np.where(stated >= 0, stated, other), -1),
        "root": np.where(rooted, other, -1),
    }


_CALL_TEXTS = ("Input Dims", "Input type", "Concrete Inputs")


def _bytes(count: IntArray, width: IntArray) -> IntArray:
    return np.where((count < 0) | ((width <= 0) & (count > 0)), -1, count * np.maximum(width, 0))


def _global_rank(groups: Groups, group: IntArray, inside: IntArray) -> IntArray:
    """Global rank of the `inside`-th member of each group, -1 where unknown."""
    out = np.full(len(group), -1, np.int64)
    for g in np.unique(group[group >= 0]).tolist():
        members = np.array(groups.groups[g].members, np.int64)
        fits = (group == g) & (inside >= 0) & (inside < len(members))
        out[fits] = members[inside[fits]]
    return out


def _one(
    trace: RankTrace,
    groups: Groups,
    name: int,
    group_name: int,
    ranks: int,
    dtype: int,
    size: int,
    start: int,
    stride: int,
    call: int,
    dims: int,
    types: int,
    inputs: int,
    kernel: int,
    ask_call: int,
) -> tuple[int, int, int, int, int, int]:
    """(kind, group, element bytes, elements in and out and peer according to the c10d op) of one distinct description."""
    text = trace.events.strings

    def at(code: int) -> str | None:
        return text[code] if code >= 0 else None

    kinds = (kind_of(text[code]) for code in (name, call, kernel) if code >= 0)
    kind = next((k for k in kinds if k != UNKNOWN), UNKNOWN)
    group = groups.of(trace.rank, at(group_name), restore_members(at(ranks) or "", size, start, stride))
    members = groups.groups[group].members if group >= 0 else ()
    width, n_in, n_out = type_bytes(at(dtype) or ""), -1, -1
    if ask_call and call >= 0:
        n_in, n_out = elements_of(kind, parsed(at(dims)), len(members))
        width = _call_type(at(types), text[kernel])
    return (
        kind,
        group,
        width,
        n_in,
        n_out,
        concrete(at(inputs), 2) if KINDS[kind] in ("send", "recv", "broadcast") else -1,
    )


def _call_type(types: str | None, kernel: str) -> int:
    """Element size from the op's "Input type", else from the type in a reduction kernel's name."""
    for name in parsed(types):
        if isinstance(name, str) and (size := type_bytes(name)) > 0:
            return size
    found = _NAME_TYPE.search(_base_name(kernel))
    return type_bytes(found[1]) if found else -1
