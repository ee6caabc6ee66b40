"""Turns the traces of all ranks into the same traces with doubtful steps marked, and says what some ranks lack.

What a profiler dropped must not look like a fast rank: missing is never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.parse.cats import KERNEL_CATS, RUNTIME_CATS
from scaletrace.parse.events import TIME_UNKNOWN
from scaletrace.parse.health import Health
from scaletrace.parse.job import RankTrace, Step
from scaletrace.parse.match_device import communication_kernels

_LAUNCH_WORDS = ("launchkernel", "launchcooperative")
_ENOUGH_LAUNCHES = 8
_LOST_SHARE = 0.5


def check_completeness(traces: Sequence[RankTrace], expected: Sequence[int], health: Health) -> list[RankTrace]:
    """The traces with steps marked incomplete whose kernels were dropped; missing ranks, kernels and steps are noted."""
    present = {trace.rank for trace in traces}
    missing = [rank for rank in expected if rank not in present]
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        health.note(
            f"{len(traces)} of {len(expected)} ranks present (missing: {shown}); "
            "waits for a missing rank are not seen, so transfer times are upper bounds"
        )
    _kernels(traces, health)
    checked = [replace(trace, steps=_steps(trace, health)) for trace in traces]
    _step_numbers(checked, health)
    return checked


def _kernels(traces: Sequence[RankTrace], health: Health) -> None:
    """Ranks that lack all kernels, or those of computation or of communication, while most others have them."""
    counts: dict[int, tuple[int, int]] = {}
    for trace in traces:
        kernels = int(np.sum(trace.events.in_cats(*KERNEL_CATS)))
        talking = len(communication_kernels(trace.events)[0])
        counts[trace.rank] = (kernels - talking, talking)
    for index, what in enumerate(("compute", "communication")):
        usual = float(np.median([pair[index] for pair in counts.values()])) if counts else 0.0
        lacking = [rank for rank, pair in counts.items() if pair[index] == 0]
        if lacking and usual >= 1:
            health.unmatched[f"ranks without {what} kernels while others have some"] += len(lacking)
            health.note(f"ranks {lacking} have no {what} kernels while others do: their times are missing, not zero")


def _steps(trace: RankTrace, health: Health) -> tuple[Step, ...]:
    """Steps whose launches mostly have no kernel, though others of the same rank have theirs, are not complete."""
    events = trace.events
    codes = [i for i, text in enumerate(events.strings) if any(word in text.lower() for word in _LAUNCH_WORDS)]
    launches = np.flatnonzero(np.isin(events.name, codes) & events.in_cats(*RUNTIME_CATS) & (events.correlation >= 0))
    kernels = events.in_cats(*KERNEL_CATS) & (events.ts_ns != TIME_UNKNOWN)
    if not len(launches) or not kernels.any():
        if len(launches) >= _ENOUGH_LAUNCHES:
            health.unmatched["launches without kernels"] += len(launches)
            health.note(
                f"rank {trace.rank}: {len(launches)} launches but no kernels; device times are missing, not zero"
            )
        return trace.steps
    answered = np.isin(events.correlation[launches], events.correlation[kernels])
    out = []
    for step in trace.steps:
        inside = (events.ts_ns[launches] >= step.start_ns) & (events.ts_ns[launches] < step.end_ns)
        count, lost = int(inside.sum()), int(np.sum(inside & ~answered))
        if count >= _ENOUGH_LAUNCHES and lost > _LOST_SHARE * count:
            health.dropped["steps whose kernels were not recorded"] += 1
            health.note(
                f"rank {trace.rank}: {lost} of {count} launches of step {step.number} have no kernel; step left out"
            )
            step = replace(step, complete=False)
        out.append(step)
    return tuple(out)


def _step_numbers(traces: Sequence[RankTrace], health: Health) -> None:
    """Ranks recorded different steps."""
    numbers = {trace.rank: tuple(step.number for step in trace.steps) for trace in traces}
    if len(set(numbers.values())) > 1:
        common = set.intersection(*(set(steps) for steps in numbers.values()))
        health.unmatched["steps that not every rank recorded"] += len(set().union(*numbers.values()) - common)
        health.note(f"ranks recorded different steps; all have {sorted(common) if common else 'none'} in common")
