"""Files of two jobs in one folder are refused, not blended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scaletrace.errors import InputError
from scaletrace.parse.events import Events, Lane
from scaletrace.parse.health import Health
from scaletrace.parse.job import RankTrace
from scaletrace.parse.load import assemble
from scaletrace.parse.one_job import refuse_several_jobs

EPOCH_NS = 1_790_000_000 * 10**9


def _trace(rank: int, start_ns: int = EPOCH_NS, world: int | None = 2, **info: Any) -> RankTrace:
    zero, one = np.zeros(1, np.int32), np.zeros(1, np.int64)
    events = Events(
        ph=np.array([88], np.uint8),
        cat=zero,
        name=zero,
        lane=zero,
        ts_ns=one + start_ns,
        dur_ns=one + 1000,
        correlation=one,
        external_id=one,
        stream=one,
        device=one,
        strings=("op",),
        cats=("cpu_op",),
        lanes=(Lane(1, 1),),
    )
    return RankTrace(rank, world, events, f"rank{rank}.json", {"distributedInfo": info})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (_trace(1, world=4), "world size 2 and 4"),
        (_trace(1, backend="nccl"), "backend gloo and nccl"),
        (_trace(1, backend="gloo", pg_config=[{"pg_desc": "default_pg", "pg_size": 8}]), "default group 2 and 8"),
        (_trace(1, EPOCH_NS + 3600 * 10**9, backend="gloo"), "3600 s before"),
    ],
)
def test_contradictions_are_refused(other: RankTrace, why: str) -> None:
    """World size, backend, default group and windows hours apart each tell two jobs apart."""
    first = _trace(0, backend="gloo", pg_config=[{"pg_desc": "default_pg", "pg_size": 2}])

    with pytest.raises(InputError, match=why):
        refuse_several_jobs([first, other])


def test_silence_contradicts_nobody() -> None:
    """A file that states neither world size nor backend may belong to any job, and so may one that counts from zero."""
    refuse_several_jobs([_trace(0, backend="gloo"), _trace(1, world=None), _trace(1, start_ns=0)])


def test_one_recording_under_two_names_is_refused() -> None:
    """Two files with one trace id and the same times are copies; equal times alone are not (synthetic ranks have them)."""
    times = EPOCH_NS + np.arange(60, dtype=np.int64) * 1000
    many = replace(_trace(0).events, ts_ns=times, dur_ns=np.full(60, 10, np.int64))
    first, second = (replace(_trace(rank, backend="gloo"), events=many) for rank in (0, 1))
    named = [replace(trace, header={**trace.header, "trace_id": "A1"}) for trace in (first, second)]

    refuse_several_jobs([first, second])
    with pytest.raises(InputError, match="same recording"):
        refuse_several_jobs(named)


def test_ranks_that_no_job_has_are_refused() -> None:
    """A damaged world size must not cost memory by the rank."""
    with pytest.raises(InputError, match="rank 0 of 2147483648"):
        assemble([_trace(0, world=2**31)], Health())
