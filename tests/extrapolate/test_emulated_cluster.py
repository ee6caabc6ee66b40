"""Ground truth of our own: a job really trained on an emulated network, predicted from fewer ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks are no part of the package: they are found from the root of the checkout."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])


@pytest.mark.slow
def test_four_ranks_follow_from_two(tmp_path: Path) -> None:
    """DDP at 50 Mbit/s a rank: the step of 4 ranks is predicted from a capture of 2 within 5 % (quiet machine, root)."""
    from benchmarks.cluster.network import why_not
    from benchmarks.cluster.run import Case, measure, predict

    reason = why_not()
    if reason:
        pytest.skip(reason)
    case = Case("ddp", 50)
    two, four = (measure(case, ranks, 1, tmp_path)[0] for ranks in (2, 4))
    low, predicted, high = predict(case, two, 4)

    assert low < predicted < high
    assert four.median_s == pytest.approx(predicted, rel=0.05)


def test_racks_fill_one_after_the_other() -> None:
    """Four ranks in two racks: 0 and 1 here, 2 and 3 there."""
    from benchmarks.cluster.network import Spec

    assert [0, 0, 1, 1] == [Spec(4, 50, racks=2).rack(rank) for rank in range(4)]
