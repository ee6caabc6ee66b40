"""The types of a job: groups by shape, lookups, frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.parse.job import Clock, Group
from tests.parse.jobs import loaded, nccl


@pytest.mark.parametrize(("members", "stride"), [((0,), 0), ((0, 1, 2), 1), ((1, 5, 9), 4), ((0, 1, 4), -1), ((), 0)])
def test_stride_of_a_group(members: tuple[int, ...], stride: int) -> None:
    """Constant distance, none for a single member, irregular otherwise."""
    assert (stride, len(members)) == (Group(0, "", "", members).stride, Group(0, "", "", members).size)


def test_a_clock_without_drift_only_subtracts() -> None:
    """No rounding where there is no drift."""
    assert [2**60 - 7] == Clock(7, 0, 9).to_job_ns(np.array([2**60])).tolist()


def test_lookups(tmp_path: Path) -> None:
    """Ranks by number, the backend, and an error for who is not there."""
    job = loaded(tmp_path, {r: nccl("allreduce", 0, 10, 30, 1, Seq=1) for r in (0, 1)}, world=3)

    assert (1, "nccl", (2,)) == (job.rank(1).rank, job.backend, job.missing_ranks)
    with pytest.raises(KeyError, match="rank 2"):
        job.rank(2)


def test_collectives_as_a_frame(tmp_path: Path) -> None:
    """One row a member, kinds as words, sorted by instance and rank."""
    job = loaded(tmp_path, {r: nccl("allreduce", 0, 10 + r, 30, 1, Seq=1) for r in (0, 1)})
    frame = job.collectives.to_frame()

    assert [(0, 0, "all_reduce", 1_000, 19_000), (0, 1, "all_reduce", 0, 19_000)] == list(
        frame[["instance", "rank", "kind", "wait_ns", "transfer_ns"]].itertuples(index=False, name=None)
    )
