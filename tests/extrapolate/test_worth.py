"""Which size to measure next: as good as its promise when it is measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scaletrace.extrapolate.calibrate import Evidence, calibrate
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import collective_seconds
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.worth import Load, load_of, worth_measuring
from scaletrace.parse.graph import GraphCollective, GraphGroup

H100 = Cluster.load("dgx_h100")
MIB = 1 << 20


def _load(gpus: int, error_s: float = 0.02, sizes: tuple[int, ...] = (16 * MIB, 64 * MIB, 256 * MIB)) -> Load:
    """A point of one second that gathers three sizes over all its ranks."""
    keys = [("all_gather", size, gpus, 1) for size in sizes]
    seconds = {key: collective_seconds(*key[:3], H100).seconds for key in keys}
    return Load(gpus, seconds, dict.fromkeys(keys, 1), 1.0, error_s)


def _small() -> list[Evidence]:
    """What one node measured."""
    return [
        Evidence("all_gather", size, 8, collective_seconds("all_gather", size, 8, H100).seconds)
        for size in (MIB, 64 * MIB)
    ]


def test_a_size_beyond_the_node_narrows_what_one_node_can_not_tell() -> None:
    """All suggestions lie beyond the measured ranks, and promise a narrower error."""
    loads = [_load(gpus) for gpus in (16, 64, 512)]
    found = worth_measuring(loads, loads, _small(), H100, 8, calibrate(_small(), H100))

    assert found and {each.gpus for each in found} <= {16, 64, 512}
    assert all(0 < each.narrows <= 1 for each in found)


def test_the_promise_is_kept_when_the_size_is_measured() -> None:
    """The errors that the cost model states with that evidence shrink by what was promised, the measured size to none."""
    loads = [_load(gpus) for gpus in (64, 512)]
    before = calibrate(_small(), H100)
    best = worth_measuring(loads, loads, _small(), H100, 8, before)[0]
    measured = next(load for load in loads if load.gpus == best.gpus)
    seen = [
        Evidence(kind, size, ranks, measured.seconds[kind, size, ranks, stride])
        for kind, size, ranks, stride in measured.seconds
    ]
    after = calibrate([*_small(), *seen], H100)
    left = []
    for load in loads:
        was, now = (
            sum(s * collective_seconds(*key[:3], H100, calibration=fits).rel_error for key, s in load.seconds.items())
            for fits in (before, after)
        )
        left.append(0.0 if load.gpus == best.gpus else min(1.0, now / was))

    assert best.narrows == pytest.approx(1 - float(np.mean(left)))


def test_cheap_sizes_win_where_they_tell_as_much() -> None:
    """Measuring 64 leaves as little open at 512 as measuring 256 would, so the smaller one is named first."""
    loads = [_load(gpus) for gpus in (64, 256, 512)]
    found = worth_measuring([loads[2]], loads[:2], _small(), H100, 8, calibrate(_small(), H100))

    assert 64 == found[0].gpus


def test_sizes_at_hand_come_first_by_how_much_they_narrow() -> None:
    """Measured 8: sizes up to 64 are sorted by their promise, and a larger one stands behind them if it promises more."""
    loads = [_load(gpus) for gpus in (16, 32, 64, 512, 4096)]
    found = worth_measuring(loads, loads, _small(), H100, 8, calibrate(_small(), H100))
    near, far = [each for each in found if each.gpus <= 64], [each for each in found if each.gpus > 64]

    assert near and (*near, *far) == found
    for group in (near, far):
        assert sorted(group, key=lambda each: -round(each.narrows, 1)) == group
    assert all(each.narrows > max(one.narrows for one in near) for each in far)


def test_a_size_out_of_reach_is_named_where_none_at_hand_tells_anything() -> None:
    """One point of 4,096 ranks: with nothing else to measure it is that size."""
    found = worth_measuring([_load(4096)], [_load(4096)], _small(), H100, 8, calibrate(_small(), H100))

    assert [(4096, 1.0)] == [(each.gpus, each.narrows) for each in found]


def test_nothing_is_worth_measuring_where_nothing_is_uncertain() -> None:
    """Points without an error of communication, none beyond the measured size, or none with communication."""
    sure = [replace(_load(64), comm_error_s=0.0)]
    nothing = [Load(64, {}, {}, 1.0, 0.1)]

    for loads in (sure, [_load(8)], nothing, []):
        assert () == worth_measuring(loads, loads, _small(), H100, 8, calibrate(_small(), H100))


def test_a_load_sums_what_one_rank_transfers() -> None:
    """Two gathers of one size over two ranks: their time on one rank, and that there were two."""
    draft = Draft(groups=[GraphGroup("fsdp", 2, 1)])
    for _ in range(2):
        draft.collective("all_gather", 0, 8, [(0, []), (1, [])], 500)
        draft.collectives[-1] = GraphCollective("all_gather", 0, 4, 8)
    graph = draft.graph()
    found = load_of(graph, graph.dur_ns, 2, 1.0, 0.0)

    assert {("all_gather", 8, 2, 1): pytest.approx(1e-6)} == found.seconds
    assert {("all_gather", 8, 2, 1): 2} == found.counts
