"""Turns the waits of a job into a verdict per rank: who holds the others up, by how much, and why.

A rank that others wait for computes longer (slow rank), launches later without computing more (late host), or sits on
a group whose transfers take longer than those of its sister groups (slow link).

A verdict must not depend on how far clocks are apart. Kernels of one collective end together, so the shortest member
arrived last and every other one waited for as long as it is longer: no clock takes part. Spans of gloo end
milliseconds apart, so there starts are compared, on clocks set to the middle of their bounds, which moves with any
offset that a clock has. Ranks that are known to share a host, and so a clock, need no bounds.

Kernels beside a collective are slower, also beside one that waits. So a rank whose kernels are slow in themselves is
told by those that run alone (pace.py).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from scaletrace.parse.cats import KERNEL_CATS
from scaletrace.parse.clocks import UNBOUNDED
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, IntArray
from scaletrace.parse.job import KINDS, SYNCHRONISING, Clock, Job, RankTrace
from scaletrace.parse.match_device import communication_kernels
from scaletrace.parse.members import KIND
from scaletrace.parse.pace import slower_ns

_SYNC = tuple(KIND[kind] for kind in (*SYNCHRONISING, "custom"))
_SHARE_OF_STEP = 0.05
_SHARE_OF_PEERS = 0.25
_LINK_RATIO = 1.3
_LINK_SAMPLES = 5
_LINK_FLOOR_NS = 20_000


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank costs the job, in ns per step.

    delay_ns        the longest time that any other rank waited for this one
    caused_wait_ns  the waits of all other ranks for this one, summed over ranks
    waited_ns       how long this rank waited for others
    behind_ns       how much longer every other rank (of the same pipeline stage) waited at least; what the job would
                    gain if this rank kept pace. Negative where another rank waited less
    compute_ns      time in own work: kernels, or operators where there is no device
    extra_compute_ns  compute beyond the median of the other ranks (of the same pipeline stage), or what its kernels take
                    beyond the same ones of other ranks where nothing runs beside them, whichever is more
    transfer_excess_ns  transfer time beyond that of sister groups
    cause           "computes longer", "launches later", "transfers longer", or "" where the rank stands out in nothing
    clock_doubt_ns  how far a wait for it may be off because clocks of hosts are known no better; 0 where no clock takes
                    part or all ranks have one, None where nothing bounds it
    """

    rank: int
    delay_ns: int
    caused_wait_ns: int
    waited_ns: int
    behind_ns: int
    compute_ns: int
    extra_compute_ns: int
    transfer_excess_ns: int
    cause: str = ""
    clock_doubt_ns: int | None = 0


def straggler_summary(job: Job) -> tuple[RankShare, ...]:
    """One row per rank, the one that holds the others up most first.

    A rank that was itself made late passes its delay on, so the culprit is not who is late but who is late without
    having waited.
    """
    steps = steps_held(job)
    step_ns = _step_ns(job, steps)
    delay, caused, waited = _waits(job)
    excess = _link_excess(job)
    compute = {trace.rank: _compute_ns(trace) // steps for trace in job.ranks}
    stage = _stages(job)
    slower, doubt = slower_ns(job), clock_doubt_ns(job)
    rows = []
    for trace in job.ranks:
        rank = trace.rank
        peers = [one.rank for one in job.ranks if one.rank != rank and stage[one.rank] == stage[rank]]
        less = [(waited[peer] - waited[rank]) // steps for peer in peers]
        row = RankShare(
            rank,
            delay[rank] // steps,
            caused[rank] // steps,
            waited[rank] // steps,
            min(less, default=0),
            compute[rank],
            max(compute[rank] - int(np.median([compute[peer] for peer in peers])), slower[rank] // steps)
            if peers
            else 0,
            excess[rank] // steps,
            clock_doubt_ns=doubt[rank],
        )
        rows.append(replace(row, cause=_cause(row, float(np.median(less)) if less else 0.0, step_ns)))
    return tuple(sorted(rows, key=lambda row: (not row.cause, -row.delay_ns, row.rank)))


def steps_held(job: Job) -> int:
    """Steps by which what the window holds in all is divided: the marked ones, or more where not all of it is marked.

    A window can hold collectives before and behind its marked steps, or of steps whose marks were lost.
    """
    marked = max((len(trace.steps) for trace in job.ranks), default=0) or 1
    c = job.collectives
    if not len(c) or not any(trace.steps for trace in job.ranks):
        return marked
    return max(marked, round(int(c.end_ns.max() - c.start_ns.min()) / max(1, _step_ns(job, marked))))


def _cause(row: RankShare, less_ns: float, step_ns: int) -> str:
    """A rank is named when others wait a twentieth of the step for it, when half of its peers wait so much longer than
    it does, and when every peer waits a good part of that."""
    limit = _SHARE_OF_STEP * step_ns
    if row.delay_ns > 0 and min(row.delay_ns, less_ns) >= limit and row.behind_ns >= _SHARE_OF_PEERS * less_ns:
        return "computes longer" if 2 * row.extra_compute_ns >= row.behind_ns else "launches later"
    return "transfers longer" if row.transfer_excess_ns >= max(_LINK_FLOOR_NS, limit / 5) else ""


def _step_ns(job: Job, steps: int) -> int:
    """Median step, or the length of the window where there are no steps."""
    durations = [step.end_ns - step.start_ns for trace in job.ranks for step in trace.steps]
    if durations:
        return int(np.median(durations))
    c = job.collectives
    return int(c.end_ns.max() - c.start_ns.min()) // steps if len(c) else 0


def _waits(job: Job) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """(delay, caused, waited) by rank over the whole window; overlapping collectives count once."""
    c = job.collectives
    zero = {trace.rank: 0 for trace in job.ranks}
    delay, caused, waited = dict(zero), dict(zero), dict(zero)
    rows = np.flatnonzero(np.isin(c.kind, _SYNC) & c.matched & ~_across_stages(job))
    if not len(rows):
        return delay, caused, waited
    instance = c.instance[rows]
    first = np.flatnonzero(np.r_[True, instance[1:] != instance[:-1]])
    size = np.diff(np.r_[first, len(rows)])
    of = np.repeat(np.arange(len(first)), size)
    wait, last = _own_waits(job, rows, first, of)
    late = np.full(len(first), -1, np.int64)
    late[of[last][::-1]] = c.rank[rows][last][::-1]
    for rank in zero:
        mine = c.rank[rows] == rank
        begin = c.start_ns[rows]
        waited[rank] = _covered(begin[mine], begin[mine] + wait[mine])
        for other in np.unique(late[of][mine]).tolist():
            both = mine & (late[of] == other)
            held = _covered(begin[both], begin[both] + wait[both])
            if other != rank and other in delay:
                caused[other] += held
                delay[other] = max(delay[other], held)
    return delay, caused, waited


def _stages(job: Job) -> dict[int, int]:
    """Pipeline stage of each rank, its place in its pipeline group; 0 where there is no pipeline."""
    out = {trace.rank: 0 for trace in job.ranks}
    for group in job.groups:
        if group.axis == "pp":
            out.update({rank: place for place, rank in enumerate(group.members) if rank in out})
    return out


def _across_stages(job: Job) -> BoolArray:
    """Members of instances that span pipeline stages: the first stage always ends last, which makes it no straggler."""
    stage = _stages(job)
    across = {group.id for group in job.groups if len({stage.get(rank, 0) for rank in group.members}) > 1}
    if len(set(stage.values())) > 1:
        across.add(-1)
    return np.isin(job.collectives.group, list(across))


def _own_waits(job: Job, rows: IntArray, first: IntArray, of: IntArray) -> tuple[IntArray, IntArray]:
    """(wait of each member, which of them arrived last): by duration for kernels, by start for spans of the host."""
    c = job.collectives
    dur = c.end_ns[rows] - c.start_ns[rows]
    start = c.start_ns[rows].copy()
    on_device = np.zeros(len(rows), np.bool_)
    for trace in job.ranks:
        mine = c.rank[rows] == trace.rank
        clock = job.clocks[trace.rank]
        if clock.source != "same host" and clock.high_ns < UNBOUNDED and clock.low_ns > -UNBOUNDED:
            start[mine] += clock.offset_ns - (clock.low_ns + clock.high_ns) // 2
        kernels = trace.events.in_cats(*KERNEL_CATS)
        on_device[mine] = kernels[c.event[rows][mine]] & (c.event[rows][mine] >= 0)
    by_duration = np.logical_and.reduceat(on_device, first)[of]
    longer = dur - np.minimum.reduceat(dur, first)[of]
    earlier = np.clip(np.maximum.reduceat(start, first)[of] - start, 0, dur)
    wait = np.where(by_duration, longer, earlier)
    return wait, np.flatnonzero(np.where(by_duration, longer == 0, start == np.maximum.reduceat(start, first)[of]))


def clock_doubt_ns(job: Job) -> dict[int, int | None]:
    """By rank, how far the clocks leave open when the others waited for it (RankShare.clock_doubt_ns).

    Only starts on the host are compared across clocks: the doubt is half the rank's interval and the widest half among
    those that it meets.
    """
    c = job.collectives
    rows = np.flatnonzero(np.isin(c.kind, _SYNC) & c.matched & ~_across_stages(job))
    timed = set()
    for trace in job.ranks:
        event = c.event[rows[c.rank[rows] == trace.rank]]
        if len(event) and not trace.events.in_cats(*KERNEL_CATS)[event[event >= 0]].all():
            timed.add(trace.rank)
    half = {rank: _half_width_ns(job.clocks[rank]) for rank in timed}
    out: dict[int, int | None] = dict.fromkeys((trace.rank for trace in job.ranks), 0)
    for rank, own in half.items():
        others = [one for other, one in half.items() if other != rank]
        known = [one for one in others if one is not None]
        out[rank] = None if own is None or (others and not known) else own + max(known, default=0)
    return out


def _half_width_ns(clock: Clock) -> int | None:
    """Half the interval of an offset: 0 for the clock that others are set to and one shared with it, None: no bounds."""
    if clock.source in ("reference", "same host"):
        return 0
    if clock.source == "unaligned" or clock.high_ns >= UNBOUNDED or clock.low_ns <= -UNBOUNDED:
        return None
    return (clock.high_ns - clock.low_ns + 1) // 2


def _covered(start: IntArray, end: IntArray) -> int:
    """Length of the union of intervals."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.r_[True, start[1:] > reach[:-1]]
    begin = start[opens]
    close = reach[np.r_[np.flatnonzero(opens)[1:] - 1, len(reach) - 1]]
    return int(np.sum(close - begin))


def _compute_ns(trace: RankTrace) -> int:
    """Time in which the rank did work of its own: kernels that do not communicate, else operators on the host."""
    events = trace.events
    usable = (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN)
    kernels = events.in_cats(*KERNEL_CATS) & usable
    if kernels.any():
        kernels[communication_kernels(events)[0]] = False
        return _covered(events.ts_ns[kernels], events.end_ns[kernels])
    return _operator_ns(events)


def _operator_ns(events: Events) -> int:
    """Union of the operators of a CPU job, without its communication calls and the waits for them."""
    codes = [
        i for i, t in enumerate(events.strings) if t.startswith(("c10d::", "_c10d_functional::", "gloo:", "c10d_"))
    ]
    usable = (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN) & events.in_cats("cpu_op", "Operator")
    talks = usable & np.isin(events.name, codes)
    both = _covered(events.ts_ns[usable], events.end_ns[usable])
    return both - _covered(events.ts_ns[talks], events.end_ns[talks])


def _link_excess(job: Job) -> dict[int, int]:
    """Transfer time of each rank's groups beyond the median of groups that move the same over as many ranks."""
    c = job.collectives
    out = {trace.rank: 0 for trace in job.ranks}
    rows = np.flatnonzero(np.isin(c.kind, _SYNC) & c.matched & (c.group >= 0))
    if not len(rows):
        return out
    instance = c.instance[rows]
    first = np.flatnonzero(np.r_[True, instance[1:] != instance[:-1]])
    dur = np.minimum.reduceat(c.end_ns[rows] - c.start_ns[rows], first)
    lead = rows[first]
    by_shape: dict[tuple[str, int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, ns in zip(lead.tolist(), dur.tolist(), strict=True):
        group = job.groups[int(c.group[row])]
        moved = max(int(c.bytes_in[row]), int(c.bytes_out[row]))
        if moved > 0 and group.size > 1:
            by_shape[(KINDS[int(c.kind[row])] + group.axis, moved, group.size)][group.id].append(ns)
    for sisters in by_shape.values():
        for team, own in sisters.items():
            rest = [ns for other, all_ns in sisters.items() if other != team for ns in all_ns]
            if min(len(own), len(rest)) < _LINK_SAMPLES:
                continue
            # its fast quarter must be slower than the slow quarter of the others, or it is noise
            if np.quantile(own, 0.25) > _LINK_RATIO * np.quantile(rest, 0.75):
                for rank in out.keys() & set(job.groups[team].members):
                    out[rank] += round(float(np.median(own) - np.median(rest)) * len(own))
    return out
