"""Turns the communication kernels of one rank into Members: kind, group, sequence and payload from the host records.

The kernel knows the time. What it did stands in its own metadata or in the `record_param_comms` that launched it;
its name is the last resort, since NCCL runs several collectives under one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.parse.events import MISSING, TIME_UNKNOWN, BoolArray, Events, IntArray
from scaletrace.parse.groups import Groups, restore_members
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, RankTrace
from scaletrace.parse.members import (
    KIND,
    P2P,
    UNKNOWN,
    concrete,
    elements_of,
    kind_of,
    label_of,
    parsed,
    times,
    type_bytes,
)

KERNEL_CATS = ("kernel", "Kernel")
RUNTIME_CATS = ("cuda_runtime", "cuda_driver", "Runtime", "xpu_runtime", "privateuse1_runtime", "mtia_runtime")
LIBRARY = re.compile(r"nccl|rccl", re.IGNORECASE)
CUSTOM_PATTERNS = (
    r"deep_?ep::.*(dispatch|combine)",
    r"cross_device_reduce",
    r"nvshmem",
    r"all_?reduce_?(one|two)_?shot|(one|two)_?shot_?all_?reduce",
    r"multimem_(all_reduce|all_gather|one_shot|two_shot)",
    r"quick_?reduce",
    r"mori::.*(dispatch|combine)",
)
"""Kernels of other libraries that move data between ranks; `load(patterns=…)` adds to them."""
_NAME_TYPE = re.compile(r"_(f16|f32|f64|bf16|u8|u32|u64|i8|i32|i64|half|float|double)(_|\(|$)")


@dataclass(frozen=True, slots=True)
class _Records:
    """Host records of collectives of one rank, in the order of their start."""

    rows: IntArray
    lane: IntArray
    start: IntArray
    end: IntArray
    kind: npt.NDArray[np.int64]


def enclosing(
    start: IntArray, end: IntArray, lane: IntArray, time: IntArray, on: IntArray, depth: int = 16
) -> IntArray:
    """Index of the innermost interval of `lane` that holds each `time` on lane `on`, -1 where none does.

    Looks back at most `depth` intervals, which is deeper than calls nest between a communication op and its launch.
    """
    out = np.full(len(time), -1, np.int64)
    if not len(start):
        return out
    order = np.lexsort((start, lane))
    span = max(int(start.max()), int(time.max(initial=0))) + 1
    base = min(int(start.min()), int(time.min(initial=span)))
    width = span - base + 1
    keys = lane[order].astype(np.float64) * width + (start[order] - base)
    at = np.searchsorted(keys, on.astype(np.float64) * width + (time - base), side="right") - 1
    open_ = at >= 0
    for _ in range(depth):
        row = order[np.maximum(at, 0)]
        hit = open_ & (lane[row] == on) & (end[row] >= time)
        out[hit] = row[hit]
        open_ &= ~hit & (lane[row] == on)
        at = at - 1
        open_ &= at >= 0
        if not open_.any():
            break
    return out


def device_members(
    trace: RankTrace, groups: Groups, health: Health, patterns: Sequence[str] = ()
) -> Iterator[dict[str, int]]:
    """One row per communication kernel of this rank (several where one kernel runs a batch of sends), for `members_from`."""
    events = trace.events
    rows, custom = communication_kernels(events, patterns)
    if not len(rows):
        return
    records = _records(events)
    launches = _launches(events, rows)
    at, batches = _link(events, rows, records, launches, custom)
    call = _calls(events, launches)
    health.unmatched["communication kernels without a host record"] += int(np.sum((at < 0) & ~custom))
    for i, row in enumerate(rows.tolist()):
        found = [int(records.rows[k]) for k in batches.get(i, [int(at[i])] if at[i] >= 0 else [])]
        issue = int(events.ts_ns[launches[i]]) if launches[i] >= 0 else int(events.ts_ns[row])
        base = {
            "event": row,
            "start_ns": int(events.ts_ns[row]),
            "end_ns": int(events.end_ns[row]),
            "issue_ns": issue,
            "turn_ns": int(events.ts_ns[row]),
            "label": label_of(_base_name(events.name_of(row))),
            "stream": int(events.stream[row]) if events.stream[row] >= 0 else int(events.lane[row]),
            "functional": 0,
        }
        yield from _rows(trace, row, found, int(call[i]), bool(custom[i]), base, groups)


def _base_name(name: str) -> str:
    return name.split("(")[0].strip()


def communication_kernels(events: Events, patterns: Sequence[str] = ()) -> tuple[IntArray, BoolArray]:
    """(rows of the kernels that communicate, whether each is of another library than NCCL and RCCL), by start.

    A kernel counts through its metadata, its name, or a pattern; those without a usable time are left out.
    """
    custom = [re.compile(pattern, re.IGNORECASE) for pattern in (*CUSTOM_PATTERNS, *patterns)]
    is_kernel = events.in_cats(*KERNEL_CATS) & (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN)
    by_library, by_pattern = [], []
    for code in np.unique(events.name[is_kernel]).tolist():
        if LIBRARY.search(events.strings[code]):
            by_library.append(code)
        elif any(pattern.search(events.strings[code]) for pattern in custom):
            by_pattern.append(code)
    described = events.texts("Collective name") != MISSING
    is_custom = np.isin(events.name, by_pattern) & ~described
    rows = np.flatnonzero(is_kernel & (np.isin(events.name, by_library) | is_custom | described))
    rows = rows[np.argsort(events.ts_ns[rows], kind="stable")].astype(np.int64)
    return rows, is_custom[rows]


def _records(events: Events) -> _Records:
    """record_param_comms that stand for a collective; a barrier's inner all-reduce is not one of its own."""
    names = events.texts("Collective name")
    mask = events.named("record_param_comms") & (events.ts_ns != TIME_UNKNOWN)
    rows = np.flatnonzero(mask).astype(np.int64)
    kinds = np.array([kind_of(events.strings[c]) if c >= 0 else UNKNOWN for c in names[rows].tolist()], np.int64)
    skipped = [c >= 0 and events.strings[c].startswith(("wait", "init", "end", "start")) for c in names[rows].tolist()]
    keep = ~np.array(skipped, bool) if len(rows) else np.zeros(0, bool)
    rows, kinds = rows[keep], kinds[keep]
    start, end, lane = events.ts_ns[rows], events.end_ns[rows], events.lane[rows].astype(np.int64)
    seq = events.ints("Seq")[rows]
    barrier = np.flatnonzero(kinds == KIND["barrier"])
    inner = np.zeros(len(rows), bool)
    for b in barrier.tolist():
        same = (lane == lane[b]) & (start >= start[b]) & (end <= end[b]) & (kinds == KIND["all_reduce"])
        twin = (lane == lane[b]) & (kinds == KIND["all_reduce"]) & (seq == seq[b]) & (seq[b] >= 0)
        inner |= same | twin
    inner[barrier] = False
    return _Records(rows[~inner], lane[~inner], start[~inner], end[~inner], kinds[~inner])


def _launches(events: Events, rows: IntArray) -> IntArray:
    """Row of the runtime or driver call that launched each kernel, by correlation; -1 where it is not in the trace."""
    calls = np.flatnonzero(events.in_cats(*RUNTIME_CATS) & (events.correlation >= 0)).astype(np.int64)
    out = np.full(len(rows), -1, np.int64)
    if not len(calls):
        return out
    order = np.argsort(events.correlation[calls], kind="stable")
    ids = events.correlation[calls][order]
    at = np.minimum(np.searchsorted(ids, events.correlation[rows]), len(ids) - 1)
    hit = (ids[at] == events.correlation[rows]) & (events.correlation[rows] >= 0)
    out[hit] = calls[order[at[hit]]]
    return out


def _link(
    events: Events, rows: IntArray, records: _Records, launches: IntArray, custom: BoolArray
) -> tuple[IntArray, dict[int, list[int]]]:
    """For each kernel the index of its record (-1 none), and for kernels launched at the end of a group all of its records.

    In this order: the record that encloses the launch, the record with the same External id (which must not be the
    correlation in disguise), the records on that thread since the previous communication launch.
    """
    launched = launches >= 0
    time = np.where(launched, events.ts_ns[launches], 0)
    lane = np.where(launched, events.lane[launches], -1).astype(np.int64)
    at = enclosing(records.start, records.end, records.lane, time, lane)
    at[~launched | custom] = -1
    external = events.external_id[records.rows]
    order = np.argsort(external, kind="stable")
    wanted = events.external_id[rows]
    usable = (at < 0) & ~custom & (wanted >= 0) & ((wanted != events.correlation[rows]) | ~launched)
    if len(order):
        k = np.minimum(np.searchsorted(external[order], wanted), len(order) - 1)
        usable &= external[order[k]] == wanted
        at[usable] = order[k[usable]]
    batches: dict[int, list[int]] = {}
    taken = np.zeros(len(records.rows), bool)
    taken[at[at >= 0]] = True
    since: dict[int, int] = {}
    for i in np.argsort(time, kind="stable").tolist():
        if not launched[i] or custom[i]:
            continue
        if at[i] < 0:
            waiting = (
                (records.lane == lane[i]) & (records.start < time[i]) & (records.start >= since.get(int(lane[i]), 0))
            )
            batch = np.flatnonzero(waiting & ~taken)
            if len(batch):
                batches[i] = batch.tolist()
                at[i] = batch[0]
                taken[batch] = True
        since[int(lane[i])] = int(time[i])
    return at, batches


def _calls(events: Events, launches: IntArray) -> IntArray:
    """Row of the c10d op in which each kernel was launched, -1 where there is none."""
    codes = [i for i, t in enumerate(events.strings) if t.startswith("c10d::") and kind_of(t) != UNKNOWN]
    rows = np.flatnonzero(np.isin(events.name, codes) & (events.ph == ord("X"))).astype(np.int64)
    launched = launches >= 0
    time = np.where(launched, events.ts_ns[launches], 0)
    lane = np.where(launched, events.lane[launches], -1).astype(np.int64)
    at = enclosing(events.ts_ns[rows], events.end_ns[rows], events.lane[rows].astype(np.int64), time, lane)
    return np.where(at >= 0, rows[at], -1) if len(rows) else at


def _rows(
    trace: RankTrace, row: int, found: Sequence[int], call: int, custom: bool, base: dict[str, int], groups: Groups
) -> Iterator[dict[str, int]]:
    """The member of one kernel: one row, with the payload of a batch summed; a batch of sends is a row each."""
    events = trace.events
    if custom:
        yield {**base, "kind": KIND["custom"]}
        return
    described = [_describe(trace, source, row, call, groups) for source in (found or [row])]
    host = {"host_event": found[0] if found else call}
    if any(one["kind"] in P2P for one in described):
        for source, one in zip(found or [call], described, strict=True):
            yield {**base, **one, "host_event": source}
        return
    first = described[0]
    if first["kind"] == UNKNOWN:
        first["kind"] = kind_of(events.name_of(row))
    for side in ("bytes_in", "bytes_out"):
        sizes = [one[side] for one in described]
        first[side] = sum(sizes) if min(sizes) >= 0 else -1
    yield {**base, **host, **first}


def _describe(trace: RankTrace, source: int, row: int, call: int, groups: Groups) -> dict[str, int]:
    """Kind, group, sequence, payload and peers of one record; the kernel's own metadata fills what it lacks."""
    events = trace.events

    def text(key: str) -> str | None:
        own = events.text(key, source)
        return own if own is not None else events.text(key, row)

    def number(key: str) -> int:
        for place in (source, row):
            if (value := _int(events, key, place)) >= 0:
                return value
        return -1

    name = text("Collective name")
    kind = kind_of(name) if name else UNKNOWN
    if kind == UNKNOWN and call >= 0:
        kind = kind_of(events.name_of(call))
    size = number("Group size")
    listed = restore_members(
        text("Process Group Ranks") or "", size, number("Global rank start"), number("Global rank stride")
    )
    group = groups.of(trace.rank, text("Process Group Name"), listed)
    members = groups.groups[group].members if group >= 0 else ()
    width = type_bytes(text("dtype") or "")
    n_in, n_out = number("In msg nelems"), number("Out msg nelems")
    if n_in < 0 and call >= 0:
        n_in, n_out = elements_of(kind, parsed(events.text("Input Dims", call)), len(members))
        width = _call_type(events, call, row)
    peer, root = -1, -1
    if kind in P2P:
        peer = number("Dst Rank" if KINDS[kind] == "send" else "Src Rank")
        inside = number("Rank")
        if peer < 0 and 0 <= inside < len(members):
            peer = members[inside]
        if peer < 0 and call >= 0 and 0 <= (at := concrete(events.text("Concrete Inputs", call), 2)) < len(members):
            peer = members[at]
    elif KINDS[kind] in ("broadcast", "reduce", "gather", "scatter"):
        inside = number("Rank")
        root = members[inside] if 0 <= inside < len(members) else inside
    return {
        "kind": kind,
        "group": group,
        "seq": -1 if kind in P2P else number("Seq"),
        "bytes_in": times(n_in, width),
        "bytes_out": times(n_out, width),
        "peer": peer,
        "root": root,
    }


def _call_type(events: Events, call: int, row: int) -> int:
    """Element size from the op's "Input type", else from the type in a reduction kernel's name."""
    for name in parsed(events.text("Input type", call)):
        if isinstance(name, str) and (size := type_bytes(name)) > 0:
            return size
    found = _NAME_TYPE.search(_base_name(events.name_of(row)))
    return type_bytes(found[1]) if found else -1


def _int(events: Events, key: str, row: int) -> int:
    arg = events.args.get(key)
    if arg is None or arg.is_text:
        return MISSING
    at = int(np.searchsorted(arg.rows, row))
    if at == len(arg.rows) or arg.rows[at] != row:
        return MISSING
    value = int(arg.values[at])
    return value if value < 2**63 else MISSING
