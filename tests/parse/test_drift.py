"""Clocks that drift: times of a rank to the job's clock and back."""

from __future__ import annotations

import numpy as np
import pytest

from scaletrace.parse.job import STEADY, Clock


@pytest.mark.parametrize("drift_ppm", [0.0, 14.2, -14.2, 300.0])
def test_own_times_come_back_from_the_jobs_clock(drift_ppm: float) -> None:
    """To the job's clock and back gives the rank's time, or the nanosecond before it where two became one."""
    origin = 1_796_073_074_689_268_108
    own = origin + np.arange(0, 10**11, 10**11 // 997 + 1)
    clock = Clock(12_345, 0, 0, drift_ppm, origin_ns=origin)
    back = clock.to_own_ns(clock.to_job_ns(own))

    assert clock.to_job_ns(own).tolist() == clock.to_job_ns(back).tolist()
    assert set((own - back).tolist()) <= {0, 1}
    assert own.tolist() == STEADY.to_own_ns(own).tolist()
