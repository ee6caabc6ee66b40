"""Turns the step annotations of one rank into Steps: which numbers, from when to when, and which are usable."""

from __future__ import annotations

import re

import numpy as np

from scaletrace.parse.cats import HOST_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, IntArray
from scaletrace.parse.health import Health
from scaletrace.parse.job import Step
from scaletrace.parse.literals import whole

PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)$")
_HOST_MARKS = ("user_annotation", "cpu_op", "Operator", "python_function", "")


def find_steps(events: Events, health: Health, annotation: str | None = None) -> tuple[Step, ...]:
    """The steps of one rank in the order of their starts, on the host clock of that rank.

    Steps come from `ProfilerStep#N` ranges, or, where `annotation` is given, from the ranges whose name matches that
    regular expression fully (its first group is the number; without a group they are counted from 0).
    A step in which nothing was called while others are full is dropped and counted: stopping a profiler after `step()`
    leaves one behind.
    """
    pattern = PROFILER_STEP if annotation is None else re.compile(annotation)
    marks = {code: hit for code, text in enumerate(events.strings) if (hit := pattern.fullmatch(text)) is not None}
    is_mark = np.isin(events.name, list(marks)) & (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN)
    rows = np.flatnonzero(is_mark & events.in_cats(*_HOST_MARKS))
    work = events.in_cats(*HOST_CATS) & (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN) & ~is_mark
    work_ns = np.sort(events.ts_ns[work])
    # a truncated file can be trusted up to the end of the last thing that was called
    cut_ns = int(events.end_ns[work].max()) if work.any() else TIME_UNKNOWN
    unfinished = _unfinished(events)
    found: list[Step] = []
    for row in rows.tolist():
        start = int(events.ts_ns[row])
        end = start + int(events.dur_ns[row])
        mark = marks[int(events.name[row])]
        said = whole(mark[1]) if mark.re.groups else None
        number = len(found) if said is None else said
        complete = not unfinished[row] and not (_is_cut(health) and end > cut_ns)
        found.append(Step(number, start, end, complete))
    if not found:
        health.note("no ProfilerStep in the trace: the whole window is analysed as it is")
    return _with_work(_once(found, health), work_ns, health)


def _once(found: list[Step], health: Health) -> list[Step]:
    """Each step once: marks of one number that overlap are one step written several times, of which the longest counts."""
    kept: list[Step] = []
    for step in sorted(found, key=lambda step: (step.start_ns, -step.end_ns)):
        if any(step.number == one.number and step.start_ns < one.end_ns for one in kept[-2:]):
            health.repaired["steps that were marked more than once"] += 1
        else:
            kept.append(step)
    return kept


def _with_work(found: list[Step], work_ns: IntArray, health: Health) -> tuple[Step, ...]:
    calls = [int(np.searchsorted(work_ns, s.end_ns) - np.searchsorted(work_ns, s.start_ns)) for s in found]
    if not any(calls):
        return tuple(found)
    for step, count in zip(found, calls, strict=True):
        if not count:
            health.dropped["steps without work"] += 1
            health.note(f"ProfilerStep#{step.number}: {(step.end_ns - step.start_ns) / 1000:g} us, no work; dropped")
    return tuple(step for step, count in zip(found, calls, strict=True) if count)


def _unfinished(events: Events) -> BoolArray:
    """Events that the profiler marked `"finished": false`, however the reader holds the value."""
    no = [code for code, text in enumerate(events.strings) if text == "false"]
    return np.asarray((events.ints("finished") == 0) | np.isin(events.texts("finished"), no), np.bool_)


def _is_cut(health: Health) -> bool:
    """Whether the reader lost the end of this file."""
    said = [*health.repaired, *health.clipped, *health.dropped, *health.notes]
    return any("truncated" in text or "cut off" in text for text in said)
