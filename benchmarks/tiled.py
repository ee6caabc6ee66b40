"""Turns a job into a longer one: the same events again and again, shifted in time, with their ids kept apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.parse.events import Arg, Events
from scaletrace.parse.job import Collectives, Job, RankTrace

_ARGS = ("Concrete Inputs", "grid_size", "grid", "block_size", "block", "registers per thread", "shared memory")


def _tile_events(events: Events, times: int, period_ns: int) -> Events:
    n = len(events)
    base = np.repeat(np.arange(times, dtype=np.int64), n)
    most = int(events.correlation.max(initial=0)) + 1
    correlation = np.tile(events.correlation, times)
    args = {}
    for key in _ARGS:
        arg = events.args.get(key)
        if arg is not None:
            rows = (np.tile(arg.rows.astype(np.int64), times) + np.repeat(np.arange(times) * n, len(arg.rows))).astype(
                np.int32
            )
            args[key] = Arg(rows, np.tile(arg.values, times), arg.is_text)
    return replace(
        events,
        ph=np.tile(events.ph, times),
        cat=np.tile(events.cat, times),
        name=np.tile(events.name, times),
        lane=np.tile(events.lane, times),
        ts_ns=np.tile(events.ts_ns, times) + base * period_ns,
        dur_ns=np.tile(events.dur_ns, times),
        correlation=np.where(correlation > 0, correlation + base * most, correlation),
        external_id=np.tile(events.external_id, times),
        stream=np.tile(events.stream, times),
        device=np.tile(events.device, times),
        args=args,
    )


def _tile_rank(trace: RankTrace, times: int, period_ns: int) -> RankTrace:
    last = max((step.number for step in trace.steps), default=0) + 1
    steps = tuple(
        replace(s, number=s.number + i * last, start_ns=s.start_ns + i * period_ns, end_ns=s.end_ns + i * period_ns)
        for i in range(times)
        for s in trace.steps
    )
    return replace(trace, events=_tile_events(trace.events, times, period_ns), steps=steps)


def _tile_collectives(job: Job, times: int, period_ns: int) -> Collectives:
    table, m = job.collectives, len(job.collectives)
    copy = np.repeat(np.arange(times, dtype=np.int64), m)
    sizes = np.array([len(job.rank(int(rank)).events) for rank in table.rank], np.int64)
    columns = {
        name: np.tile(getattr(table, name), times)
        for name in Collectives.__slots__
        if isinstance(getattr(table, name), np.ndarray)
    }
    shift = np.tile(sizes, times) * copy
    for name in ("event", "host_event"):
        columns[name] = np.where(columns[name] >= 0, columns[name] + shift, -1).astype(np.int32)
    columns["instance"] = columns["instance"] + copy * (int(table.instance.max(initial=-1)) + 1)
    columns["start_ns"] = columns["start_ns"] + copy * period_ns
    columns["end_ns"] = columns["end_ns"] + copy * period_ns
    return replace(table, **columns)


def tile(job: Job, times: int, gap_ns: int = 1_000_000) -> Job:
    """The job repeated `times` times; all numbers of events, launches and collectives grow by that factor."""
    low = min(int(r.events.ts_ns.min()) for r in job.ranks)
    high = max(int(r.events.end_ns.max()) for r in job.ranks)
    period = high - low + gap_ns
    ranks = tuple(_tile_rank(rank, times, period) for rank in job.ranks)
    return replace(job, ranks=ranks, collectives=_tile_collectives(job, times, period))
