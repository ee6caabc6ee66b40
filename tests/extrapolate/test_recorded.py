"""A trace of one network stretched on another: as the user says, or as its transfers show."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scaletrace.extrapolate.calibrate import Evidence
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import Calibration, Fit
from scaletrace.extrapolate.curve import ScalingCurve, extrapolate
from scaletrace.extrapolate.recorded import beyond_line_rate, carried, faster, same_network
from scaletrace.parse.build import build
from scaletrace.parse.load import load

ROOT = Path(__file__).resolve().parent.parent.parent
CAPTURE = Path(__file__).parent / "data" / "emulated_ddp_50mbit" / "ddp_50_2_0"
ETHERNET = Cluster.load("gloo_1g")


def _stretched(monkeypatch: pytest.MonkeyPatch, rate_mbit: int, recorded_mbit: int | None) -> ScalingCurve:
    """The kept capture of two ranks on 50 Mbit/s, stretched on links of another rate."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    from benchmarks.cluster.run import Case, kept

    (two,) = kept(Case("ddp", 50), 2, CAPTURE.parent)
    recorded = Case("ddp", recorded_mbit).cluster(8) if recorded_mbit else None
    cluster = Case("ddp", rate_mbit).cluster(8)
    return extrapolate(build(load(two.capture)), cluster=cluster, sizes=[2, 4, 8], recorded=recorded)


def test_a_capture_of_slow_links_predicts_what_was_measured_on_links_twice_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorded on 50 Mbit/s: 4 and 8 ranks on 100 take the 0.388 and 0.430 s of benchmarks/results/cluster.md, within 5 %."""
    curve = _stretched(monkeypatch, 100, 50)

    assert [pytest.approx(0.388, rel=0.05), pytest.approx(0.430, rel=0.05)] == [p.p50_s for p in curve.points[1:]]
    assert all(
        point.low_s < seconds < point.high_s for point, seconds in zip(curve.points[1:], (0.388, 0.430), strict=True)
    )
    assert "network" == curve.base.rebuilt
    assert any(note.startswith("CARRIED: ") for note in curve.health.notes)


def test_transfers_faster_than_the_link_were_recorded_on_another_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """On links of 10 Mbit/s the capture of 50 takes what it does with --recorded-on, and the reason is said."""
    seen, told = _stretched(monkeypatch, 10, None), _stretched(monkeypatch, 10, 50)

    assert [point.p50_s for point in told.points] == pytest.approx([point.p50_s for point in seen.points], rel=0.01)
    assert any("5 times the line rate" in note or "4.99 times the line rate" in note for note in seen.health.notes)


def test_the_network_that_is_named_twice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded on the cluster itself: every bit as without it."""
    plain, told = _stretched(monkeypatch, 50, None), _stretched(monkeypatch, 50, 50)

    assert [point.p50_s for point in plain.points] == [point.p50_s for point in told.points]
    assert "" == told.base.rebuilt


def test_gpus_on_slower_links_between_their_nodes_are_carried_too() -> None:
    """The default of a GPU trace is its own cluster, too: with --recorded-on only what crosses the slower links slows."""
    here = Cluster.load("dgx_h100")
    there = here.with_tier(1, bandwidth_Bps=here.tiers[1].bandwidth_Bps / 4)

    assert same_network(here, replace(here, name="mine")) and not same_network(here, there)
    fit = Calibration({("gather", "", True): Fit(2.0, 0.5, 1.1, residual=0.0, count=3, top=1)})
    moved = carried(fit, here, there).fits["gather", "", True]
    assert (2.0, 0.5, 1.1, 0.1) == (moved.local, moved.remote, moved.wire, moved.residual)


@pytest.mark.parametrize(
    ("wire", "times", "expected"),
    [(1.1, 0.1, 1.1), (1.1, 10, 1.1), (4.0, 0.5, 2.0), (4.0, 0.1, 1.0), (4.0, 3.0, 12.0), (0.3, 1.0, 0.94)],
)
def test_hosts_that_set_the_pace_keep_their_rate_and_links_theirs(wire: float, times: float, expected: float) -> None:
    """A multiplier near 1 is the link's and stays; a large one is the host's, whose seconds a byte stay instead."""
    fits = Calibration({("all_reduce", "", False): Fit(wire=wire, count=3, seen=frozenset({(2, 2, 64)}))})
    moved = carried(fits, ETHERNET, faster(ETHERNET, times)).fits["all_reduce", "", False]

    assert expected == pytest.approx(moved.wire)
    assert not moved.seen


def test_only_large_vectors_tell_of_the_line_rate() -> None:
    """Two ranks that reduce 8 MiB in a tenth of the time that 1 Gb/s takes; 64 KiB say nothing."""
    large = Evidence("all_reduce", 8 << 20, 2, (8 << 20) / 0.125e9 / 10)

    assert 10 == pytest.approx(beyond_line_rate([large], ETHERNET))
    assert 0.0 == beyond_line_rate([replace(large, size_bytes=1 << 16)], ETHERNET)
