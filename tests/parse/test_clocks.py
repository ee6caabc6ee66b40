"""Clock offsets: intervals that contain the truth, drift, probes, messages, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from scaletrace.errors import AlignmentError
from scaletrace.parse.clocks import UNBOUNDED, Bound, Instances, align, apply, comparable
from scaletrace.parse.job import Clock

US = 1_000


def job(
    offsets: Sequence[int],
    count: int = 20,
    drift_ppm: Sequence[float] = (),
    tight: bool = True,
    teams: Sequence[Sequence[int]] = (),
    seed: int = 0,
) -> Instances:
    """Collectives of 100 us every millisecond, with ranks that arrive up to 300 us early, on clocks that are off."""
    rng = np.random.default_rng(seed)
    drift = list(drift_ppm) or [0.0] * len(offsets)
    rank, instance, start, end = [], [], [], []
    for k in range(count):
        team = list(teams[k % len(teams)]) if teams else list(range(len(offsets)))
        last = k * 1000 * US
        early = rng.integers(0, 300 * US, len(team))
        early[rng.integers(len(team))] = 0
        for r, before in zip(team, early.tolist(), strict=True):
            ends = last + 100 * US + int(rng.integers(0, 3 * US if tight else 200 * US))
            clock = [t + offsets[r] + round(t * drift[r] / 1e6) for t in (last - before, ends)]
            rank.append(r)
            instance.append(k)
            start.append(clock[0])
            end.append(clock[1])
    device = np.full(len(rank), tight)
    return Instances(np.array(rank), np.array(instance), np.array(start), np.array(end), device)


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_interval_holds_the_truth(tight: bool, seed: int) -> None:
    """Three clocks off by up to 123 ms: each offset lies in its interval, and kernels pin it to microseconds."""
    truth = (0, -20_000 * US, 123_000 * US)
    found = align(job(truth, tight=tight, seed=seed), [0, 1, 2], ["a", "b", "c"])

    for rank, offset in enumerate(truth):
        clock = found.clocks[rank]
        assert clock.low_ns <= offset <= clock.high_ns
        assert abs(clock.offset_ns - offset) <= (3 * US if tight else 150 * US)
    assert ["reference", *["ends of kernels" if tight else "middle of the bounds"] * 2] == [
        clock.source for clock in found.clocks.values()
    ]


def test_ranks_that_never_meet_are_tied_through_others() -> None:
    """Ranks 0 and 2 share no collective; rank 1 shares one with each."""
    truth = (0, 5_000 * US, -7_000 * US)
    found = align(job(truth, teams=[(0, 1), (1, 2)]), [0, 1, 2], ["", "", ""])

    assert found.clocks[2].low_ns <= truth[2] <= found.clocks[2].high_ns
    assert abs(found.clocks[2].offset_ns - truth[2]) <= 5 * US


def test_drift_is_fitted_where_the_data_demand_it() -> None:
    """50 ppm over ten seconds contradict any constant offset; the drift is found and taken out."""
    found = align(job((0, 5_000 * US), count=10_000, drift_ppm=(0, 50)), [0, 1], ["a", "b"])
    clock = found.clocks[1]

    assert 50 == pytest.approx(clock.drift_ppm, abs=0.5)
    assert clock.low_ns <= 5_000 * US
    assert 5_000 * US + 500 * US <= clock.high_ns
    assert np.median(found.residual_ns) <= 4 * US


def test_without_drift_none_is_claimed() -> None:
    """Jitter of microseconds is no drift."""
    assert 0.0 == align(job((0, 5_000 * US), count=200), [0, 1], ["a", "b"]).clocks[1].drift_ppm


def impossible() -> Instances:
    """Rank 2 is matched wrongly: once it seems a second early, once a second late."""
    good = job((0, 1_000 * US, 0))
    jump = np.where(good.rank == 2, np.where(good.instance % 2, 1_000_000 * US, -1_000_000 * US), 0)
    return Instances(good.rank, good.instance, good.start_ns + jump, good.end_ns + jump, good.tight)


def test_an_impossible_alignment_is_refused() -> None:
    """The rank that contradicts every offset is left unaligned, the others keep their clocks."""
    found = align(impossible(), [0, 1, 2], ["", "", ""])

    assert "unaligned" == found.clocks[2].source
    assert abs(found.clocks[1].offset_ns - 1_000 * US) <= 3 * US
    assert ("rank 2 contradicts every offset; its times can't be compared with those of other ranks",) == found.refused
    assert [True, True, False] == comparable(found.clocks, np.array([0, 1, 2])).tolist()


def test_strict_raises_on_an_impossible_alignment() -> None:
    """The error names the rank and by how much it is off."""
    with pytest.raises(AlignmentError, match=r"rank 2.*ms"):
        align(impossible(), [0, 1, 2], ["", "", ""], strict=True)


def test_ranks_without_common_collectives_are_unaligned_unless_they_share_a_host() -> None:
    """Nothing is known but that one host has one clock."""
    nothing = job((0, 0, 0), count=0)
    found = align(nothing, [0, 1, 2], ["a", "a", "b"])

    assert ["reference", "same host", "unaligned"] == [clock.source for clock in found.clocks.values()]
    assert UNBOUNDED == found.clocks[2].high_ns


def test_one_host_has_one_clock_as_far_as_the_bounds_allow() -> None:
    """Spans that end far apart do not move a clock that can be zero; bounds that exclude zero do."""
    near, far = (align(job((0, off), tight=False), [0, 1], ["a", "a"]).clocks[1] for off in (5 * US, 5_000 * US))

    assert (0, "same host") == (near.offset_ns, near.source)
    assert ("middle of the bounds", True) == (far.source, abs(far.offset_ns - 5_000 * US) < 200 * US)


def test_one_host_claims_no_drift_between_its_ranks() -> None:
    """Where the ends of spans seem to drift, ranks of one clock still keep it; on two hosts the drift is taken out."""
    drifting = job((0, 0), count=4_000, drift_ppm=(0, 40), tight=False)
    one, two = (align(drifting, [0, 1], hosts).clocks[1] for hosts in (["a", "a"], ["a", "b"]))

    assert (0.0, "same host") == (one.drift_ppm, one.source)
    assert 40 == pytest.approx(two.drift_ppm, abs=5)


def test_a_probe_ties_ranks_that_share_no_collective() -> None:
    """Bounds of the manifest are bounds like all others."""
    found = align(job((0, 0), count=0), [0, 1], ["a", "b"], [Bound(1, 0, 900 * US, 1_100 * US)])
    clock = found.clocks[1]

    assert "middle of the bounds" == clock.source
    assert 1_000 * US == clock.offset_ns
    assert clock.low_ns <= 900 * US
    assert 1_100 * US <= clock.high_ns


def test_messages_in_both_directions_make_an_interval() -> None:
    """A receive can't end before its send was issued; one direction alone leaves the other side open."""
    both = [Bound(1, 0, -UNBOUNDED, 3_000 * US), Bound(0, 1, -UNBOUNDED, -1_000 * US)]
    nothing = job((0, 0), count=0)

    assert 2_000 * US == align(nothing, [0, 1], ["a", "b"], both).clocks[1].offset_ns
    assert "unaligned" == align(nothing, [0, 1], ["a", "b"], both[:1]).clocks[1].source


def test_times_are_moved_by_offset_and_drift() -> None:
    """The offset holds at the origin and grows by the drift."""
    clock = Clock(100, 0, 200, drift_ppm=1000.0, source="ends of kernels", origin_ns=1_000_000)

    assert [999_900, 1_998_900] == apply({3: clock}, np.array([3, 3]), np.array([1_000_000, 2_000_000])).tolist()
