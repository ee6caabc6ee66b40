"""Files can be read by the workers of a Dask cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.parse.load import load

distributed = pytest.importorskip("distributed", reason="Dask is not installed (pip install 'scaletrace[dask]')")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_reads_the_same_job(samples: Path) -> None:
    """Two worker processes give the tables that this process gives."""
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        there = load(samples / "ddp_w2", scheduler=cluster.scheduler_address)
    here = load(samples / "ddp_w2")

    assert here.health.to_json() == there.health.to_json()
    assert all(np.array_equal(a.events.ts_ns, b.events.ts_ns) for a, b in zip(here.ranks, there.ranks, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_that_is_not_there_is_named(samples: Path) -> None:
    """The address that was tried stands in the sentence."""
    with pytest.raises(UsageError, match=r"tcp://127\.0\.0\.1:9"):
        load(samples / "ddp_w2", scheduler="tcp://127.0.0.1:9")
