"""Ground truth of our own: a job really trained on an emulated network, predicted from fewer ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = Path(__file__).parent / "data" / "emulated_ddp_50mbit"
"""What `run.py --keep` left of DDP at 50 Mbit/s on a quiet machine: the capture of 2 ranks, step times of 2, 4 and 8."""


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


@pytest.mark.parametrize("ranks", [4, 8])
def test_what_was_measured_once_is_still_predicted(ranks: int) -> None:
    """From the kept capture of 2 ranks, the whole way: load, build, calibrate, stretch; within 5 % and inside the band."""
    from benchmarks.cluster.run import CASES, kept, predict

    case = CASES[0]
    (two,), (measured, again) = kept(case, 2, KEPT), kept(case, ranks, KEPT)
    low, predicted, high = predict(case, two, ranks)

    assert again.median_s == pytest.approx(measured.median_s, rel=0.01)
    assert measured.median_s == pytest.approx(predicted, rel=0.05)
    assert low < measured.median_s < high


def test_kept_runs_are_predicted_anew_without_network_or_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--again DIR` says when and on what the measurements were made, and leaves out what is not there."""
    from benchmarks import common
    from benchmarks.cluster import run

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--again", str(KEPT)])

    assert 0 == run.main()
    text = capsys.readouterr().out
    assert "Measured 2026-11-30 19:46 to 19:46 UTC on AMD EPYC, 2 cores, Linux" in text
    assert ["2", "4", "8"] == [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| DDP")]
    assert "| FSDP2" not in text


def test_racks_fill_one_after_the_other() -> None:
    """Four ranks in two racks: 0 and 1 here, 2 and 3 there."""
    from benchmarks.cluster.network import Spec

    assert [0, 0, 1, 1] == [Spec(4, 50, racks=2).rack(rank) for rank in range(4)]
