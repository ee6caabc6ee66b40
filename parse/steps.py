"""Turns the step annotations of one rank into Steps: which numbers, from when to when, and which are usable."""

from __future__ import annotations

import re

import numpy as np

from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events
from scaletrace.parse.health import Health
from scaletrace.parse.job import Step

PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)$")
_HOST_MARKS = ("user_annotation", "cpu_op", "Operator", "python_function", "")
_WORK = ("cpu_op", "Operator", "cuda_runtime", "cuda_driver", "Runtime", "python_function", "xpu_runtime")


def find_steps(events: Events, health: Health, annotation: str | None = None) -> tuple[Step, ...]:
    """The steps of one rank in the order of their starts, on the host clock of that rank.

    Steps come from `ProfilerStep#N` ranges, or, where `annotation` is given, from the ranges whose name matches that
    regular expression fully (its first group is the number; without a group they are counted from 0).
    A step in which nothing was called is dropped and counted: stopping a profiler after `step()` leaves one behind.
    """
    pattern = PROFILER_STEP if annotation is None else re.compile(annotation)
    marks = {code: found for code, text in enumerate(events.strings) if (found := pattern.fullmatch(text)) is not None}
    is_mark = np.isin(events.name, list(marks)) & (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN)
    rows = np.flatnonzero(is_mark & events.in_cats(*_HOST_MARKS))
    work_ns = np.sort(events.ts_ns[_is_work(events) & ~is_mark])
    cut_ns = _last_end(events)
    steps: list[Step] = []
    for row in rows.tolist():
        start = int(events.ts_ns[row])
        end = start + int(events.dur_ns[row])
        found = marks[int(events.name[row])]
        number = int(found[1]) if found.re.groups and found[1] is not None and found[1].isdigit() else len(steps)
        if np.searchsorted(work_ns, start) == np.searchsorted(work_ns, end):
            health.dropped["steps without work"] += 1
            health.note(f"ProfilerStep#{number}: {(end - start) / 1000:g} us, no work; dropped")
            continue
        complete = events.text("finished", row) != "false" and not (_is_cut(health) and end > cut_ns)
        steps.append(Step(number, start, end, complete))
    if not steps:
        health.note("no ProfilerStep in the trace: the whole window is analysed as it is")
    return tuple(steps)


def _is_work(events: Events) -> BoolArray:
    return events.in_cats(*_WORK) & (events.ph == ord("X"))


def _is_cut(health: Health) -> bool:
    """Whether the reader lost the end of this file."""
    return any("truncat" in reason for kind in (health.repaired, health.clipped, health.dropped) for reason in kind)


def _last_end(events: Events) -> int:
    """End of the last thing that was called, which is as far as a truncated file can be trusted."""
    work = _is_work(events)
    return int(events.end_ns[work].max()) if work.any() else TIME_UNKNOWN
