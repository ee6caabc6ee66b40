"""Turns an event table into what a reader should know about its quality: missing links, overlaps, unknown names."""

from __future__ import annotations

import re

import numpy as np

from scaletrace.parse import cats
from scaletrace.parse.events import MISSING, TIME_UNKNOWN, BoolArray, Events, IntArray
from scaletrace.parse.health import Health
from scaletrace.parse.kernels import Rules, list_unknown
from scaletrace.parse.links import crossings, gpu_rows, launch_of
from scaletrace.parse.owners import is_fused

NO_KERNEL = "launches without GPU records"
NO_LAUNCH = "GPU records without a launch"
OVERLAPS = "overlapping GPU records on one stream"
CROSSINGS = "host spans that cross instead of nesting"
WAITS = "stream waits whose event is not resolved"
UNKNOWN_CATS = "events of unknown categories"

_LAUNCH = re.compile(r"launch(?!hostfunc)|memcpy|memset|enqueue", re.IGNORECASE)


def is_launch(events: Events) -> BoolArray:
    """Mask of the runtime and driver calls that put work on a device (kernel and graph launches, copies, sets)."""
    names = np.array([_LAUNCH.search(text) is not None for text in events.strings], np.bool_)
    return events.in_cats(*cats.RUNTIME_CATS) & names[events.name]


def survey(events: Events, health: Health, rules: Rules | None = None) -> None:
    """Count what the trace lacks or contradicts; nothing is changed."""
    launches = launch_of(events)
    work = gpu_rows(events)
    calls = np.flatnonzero(is_launch(events))
    _links(events, launches, work, calls, health)
    _overlaps(events, work, health)
    _waits(events, health)
    crossing = len(crossings(events))
    if crossing:
        health.unmatched[CROSSINGS] += crossing
    list_unknown(events, health, rules)
    if is_fused(events):
        health.note("several ranks are fused into this file: take them apart with scaletrace.parse.fused.split_ranks")
    halves = int(np.isin(events.ph, [ord("B"), ord("E")]).sum())
    if halves:
        health.guessed["begin and end records kept as instants"] += halves
    unknown = [cat for cat in events.cats if cat not in cats.KNOWN_CATS]
    if unknown:
        health.guessed[UNKNOWN_CATS] += int(events.in_cats(*unknown).sum())
        health.note(f"unknown categories, used as neither host nor device work: {', '.join(unknown[:8])}")


def _links(events: Events, launches: IntArray, work: IntArray, calls: IntArray, health: Health) -> None:
    timeless = int((events.in_cats(*cats.DEVICE_CATS) & (events.ts_ns == TIME_UNKNOWN)).sum())
    if timeless:
        health.note(f"{timeless:,} GPU records have no usable time and stay out of spans, busy time and graph")
    if len(calls) and not len(work):
        health.note(
            "host launches present, no GPU records (out of range, or CUPTI off): GPU figures are absent, not zero"
        )
        return
    if not len(work):
        return
    orphans = int((launches[work] == MISSING).sum())
    if orphans:
        health.unmatched[NO_LAUNCH] += orphans
    with_records = np.unique(launches[launches != MISSING])
    barren = calls[~np.isin(calls, with_records)]
    if len(barren):
        health.unmatched[NO_KERNEL] += len(barren)
    kernels = np.flatnonzero(events.in_cats(*cats.KERNEL_CATS))
    _shared_correlations(events, launches[kernels], barren, health)


def _shared_correlations(events: Events, launch: IntArray, barren: IntArray, health: Health) -> None:
    """ROCm can give one correlation to the records of two launches, so that their streams can't be trusted."""
    rows, count = np.unique(launch[launch != MISSING], return_counts=True)
    several = rows[count > 1]
    graph = np.array(["graph" in text.lower() for text in events.strings], np.bool_)
    several = several[~graph[events.name[several]]]
    if len(several) and len(barren):
        shown = int(events.correlation[several[0]])
        health.guessed["launches that share a correlation"] += len(several)
        health.note(
            f"correlation {shown} has several GPU records while other launches have none: "
            "stream attribution is unreliable (ROCm)"
        )


def _overlaps(events: Events, work: IntArray, health: Health) -> None:
    """A stream runs one record at a time, apart from programmatic dependent launch."""
    order = work[np.lexsort((events.ts_ns[work], events.lane[work]))]
    if len(order) < 2:
        return
    lane, start, end = events.lane[order], events.ts_ns[order], events.end_ns[order]
    overlapping = (lane[1:] == lane[:-1]) & (start[1:] < end[:-1])
    if overlapping.any():
        health.unmatched[OVERLAPS] += int(overlapping.sum())


def _waits(events: Events, health: Health) -> None:
    kind = events.texts("cuda_sync_kind")
    waiting = [code for code, text in enumerate(events.strings) if text in ("Stream Wait Event", "Event Sync")]
    waits = np.isin(kind, waiting)
    unresolved = waits & (events.ints("wait_on_cuda_event_record_corr_id") < 0)
    if unresolved.any():
        health.unmatched[WAITS] += int(unresolved.sum())
        health.note("some waits do not say what they wait for: dependencies between streams are a lower bound")
