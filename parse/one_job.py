"""Turns the traces of a folder into a verdict: one job, or files of several that must not be mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaletrace.errors import InputError
from scaletrace.parse.events import TIME_UNKNOWN
from scaletrace.parse.job import RankTrace

FURTHEST_APART_NS = 60 * 10**9
"""Windows further apart than this were not recorded together: no host's clock is that wrong, and nothing could match."""


def refuse_several_jobs(traces: Sequence[RankTrace]) -> None:
    """Raise InputError when the files contradict each other on what job they belong to.

    Only what files state counts (world size, backend, size of the default group), and whether their windows lie
    minutes apart; a file that states nothing contradicts nobody.
    """
    for what, said in (("world size", _world), ("backend", _backend), ("size of the default group", _default_group)):
        _compare(what, traces, said)
    _compare_windows(traces)
    _compare_contents(traces)


def _info(trace: RankTrace) -> Mapping[str, Any]:
    info = trace.header.get("distributedInfo")
    return info if isinstance(info, Mapping) else {}


def _world(trace: RankTrace) -> object:
    return trace.world_size


def _backend(trace: RankTrace) -> object:
    return _info(trace).get("backend")


def _default_group(trace: RankTrace) -> object:
    groups = _info(trace).get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, Mapping) and group.get("pg_desc") == "default_pg":
            return group.get("pg_size")
    return None


def _compare(what: str, traces: Sequence[RankTrace], said: Callable[[RankTrace], object]) -> None:
    first: dict[str, RankTrace] = {}
    for trace in traces:
        value = said(trace)
        if value is not None:
            first.setdefault(str(value), trace)
    if len(first) > 1:
        (a, one), (b, other), *_ = first.items()
        raise InputError(
            f"{Path(one.source).name} and {Path(other.source).name} are of two jobs ({what} {a} and {b}); "
            "give each job a folder of its own"
        )


ENOUGH_EVENTS = 50
"""With fewer events than this, equal times say little."""


def _compare_contents(traces: Sequence[RankTrace]) -> None:
    """Kineto gives each recording an id of its own; two files with one id and the same times are copies of one file."""
    seen: dict[str, RankTrace] = {}
    for trace in traces:
        name = trace.header.get("trace_id")
        if not isinstance(name, str) or not name or len(trace.events) < ENOUGH_EVENTS:
            continue
        other = seen.setdefault(name, trace)
        if other is not trace and np.array_equal(trace.events.ts_ns, other.events.ts_ns):
            raise InputError(
                f"{Path(other.source).name} and {Path(trace.source).name} hold the same recording; "
                "keep one, or give each rank its own file"
            )


def _compare_windows(traces: Sequence[RankTrace]) -> None:
    """Compare the earliest end with the latest start, of files whose times count from the Unix epoch."""
    windows = []
    for trace in traces:
        known = trace.events.ts_ns != TIME_UNKNOWN
        start, end = trace.events.ts_ns[known], trace.events.end_ns[known]
        if len(start) and int(np.median(start)) > FURTHEST_APART_NS * 10**6:
            windows.append((int(start.min()), int(end.max()), trace.source))
    if len(windows) < 2:
        return
    ended, began = min(windows, key=lambda w: w[1]), max(windows, key=lambda w: w[0])
    apart = began[0] - ended[1]
    if apart > FURTHEST_APART_NS:
        raise InputError(
            f"{Path(ended[2]).name} ends {apart / 1e9:.0f} s before {Path(began[2]).name} begins, so they were not "
            "recorded together; give each recording a folder of its own"
        )
