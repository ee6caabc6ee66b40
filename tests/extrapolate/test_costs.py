"""Costs of collectives: the tuner's form, tiers, NICs of a group, gloo, and how they grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import UsageError
from scaletrace.extrapolate import catalog
from scaletrace.extrapolate.cluster import Cluster, place
from scaletrace.extrapolate.costs import FAMILY, Provenance, collective_seconds

H100 = Cluster.load("dgx_h100")
ETHERNET = Cluster.load("gloo_1g")
MIB = 1 << 20


def test_an_all_gather_over_a_thousand_ranks_costs_the_tuners_latency() -> None:
    """8.4 + 896 · 3.4 + 127 · 14 µs of latency, and 63/64 of the bytes over 384 GB/s capped by NVLink's 360."""
    cost = collective_seconds("all_gather", 1024 * MIB, 1024, H100)

    assert pytest.approx((8.4 + 896 * 3.4 + 127 * 14) * 1e-6) == cost.alpha_s
    assert pytest.approx(1024 * MIB * 1023 / 1024 / 360e9) == cost.beta_s
    assert ("ring", Provenance.PRIOR) == (cost.algorithm, cost.provenance)


def test_a_step_of_a_gather_takes_the_same_time_from_4_to_64_kib_a_rank() -> None:
    """LL takes a further channel with every 4 KiB of a rank up to 16, each at 1/16 of its 20.4 GB/s; links hardly work."""
    costs = [collective_seconds("all_gather", kib * 1024 * 1024, 1024, H100) for kib in (4, 16, 64)]
    step = 896 * 1.0 + 127 * 2.7 + 1023 * (4096 * 16 / 20.4e3)

    assert [pytest.approx((6.6 + step) * 1e-6)] * 3 == [cost.seconds for cost in costs]
    assert pytest.approx(20.4 / 180 / 16) == costs[0].busy


def test_one_member_a_node_has_two_channels() -> None:
    """A NIC a node makes two rings: LL is at its full rate from 8 KiB a rank."""
    strided = [collective_seconds("all_gather", 64 * kib * 1024, 64, H100, stride=8) for kib in (4, 8)]

    assert [pytest.approx(63 * 8192 / 20.4e9)] * 2 == [cost.beta_s for cost in strided]


def test_bytes_of_a_gather_hide_in_the_plateau_of_its_ring() -> None:
    """From the switch to Simple every step takes 1.4 times its hops, until hops and bytes take longer than that."""
    hops = 896 * 3.4 + 127 * 14
    seconds = [collective_seconds("reduce_scatter", part << 20, 1024, H100).seconds * 1e6 for part in (128, 512, 1024)]

    plain = [8.4 + hops + (part << 20) * 1023 / 1024 / 360e3 for part in (128, 512, 1024)]
    assert [pytest.approx(1.4 * (8.4 + hops))] * 2 + [pytest.approx(plain[2])] == seconds
    assert plain[1] < seconds[1] < seconds[2]


def test_between_two_protocols_time_rises_with_bytes_and_not_at_once() -> None:
    """NCCL's table switches at 74 KiB a rank, where Simple takes half as long again: the rise ends before 128 KiB."""
    steps = [collective_seconds("all_gather", kib << 20, 1024, H100).seconds / 1023 * 1e6 for kib in (64, 72, 90, 112)]

    assert [4.4, 4.8, 6.0, 6.6] == [round(step, 1) for step in steps]


def test_a_group_owns_as_many_nics_as_it_has_members_in_a_node() -> None:
    """Large all-gathers run at k · 48 GB/s, where k members share a node, and never faster than NVLink."""
    big = 64 << 30
    rates = [
        big * (n - 1) / n / collective_seconds("all_gather", big, n, H100, stride=stride).beta_s / 1e9
        for n, stride in ((128, 8), (128, 4), (128, 1))
    ]

    assert [48.0, 96.0, 360.0] == [round(rate, 3) for rate in rates]


def test_fewer_nics_than_members_bind_the_group() -> None:
    """A ring with one channel uses one NIC a node, however many ranks it has there."""
    one = collective_seconds("all_gather", 1 << 34, 384, H100, nics=1)

    assert pytest.approx((1 << 34) * 383 / 384 / 48e9) == one.beta_s


def test_a_partly_filled_last_node_sets_the_pace() -> None:
    """With 3 members on the last node rings own 3 NICs of 48 GB/s, with 7 NVLink binds again; one more node full, too."""
    size = 1 << 34
    rates = [
        size * (n - 1) / n / collective_seconds("all_gather", size, n, H100).beta_s / 1e9 for n in (11, 15, 16, 24)
    ]

    assert [144.0, 336.0, 360.0, 360.0] == [round(rate, 3) for rate in rates]
    strided = collective_seconds("reduce_scatter", size, 9, H100, stride=2)
    assert pytest.approx(size * 8 / 9 / 48e9) == strided.beta_s


def test_a_leaf_with_few_members_owns_few_links_of_the_spine() -> None:
    """264 ranks leave 8 of them on the second leaf: above it they have 8 shares, of which 1 in 16 is left."""
    thin = H100.with_tier(2, oversubscription=16.0)
    size = 1 << 36
    part, full = (collective_seconds("all_gather", size, n, thin) for n in (264, 512))

    assert pytest.approx(size * 263 / 264 / (8 * 48e9 / 16)) == part.beta_s
    assert full.beta_s < part.beta_s / 10


def test_oversubscription_of_the_spine_binds_only_groups_that_cross_it() -> None:
    """With 1 : 16 above leaves of 256, a strided group of 512 slows down, one inside a leaf does not."""
    thin = H100.with_tier(2, oversubscription=64.0)
    inside, across = (collective_seconds("all_gather", 1 << 34, n, thin, stride=8).beta_s for n in (32, 64))
    free = collective_seconds("all_gather", 1 << 34, 64, H100, stride=8).beta_s

    assert pytest.approx(free, rel=0.02) == inside
    assert pytest.approx(2 * free) == across


def test_small_all_reduces_take_the_tree_and_large_ones_in_a_node_the_switch() -> None:
    """NVLink SHARP wins for large vectors on Hopper nodes, and only where the cluster has it."""
    names = [
        collective_seconds("all_reduce", size, n, cluster).algorithm
        for size, n, cluster in (
            (1 << 30, 8, H100),
            (1 << 30, 8, replace(H100, nvls=False)),
            (1 << 30, 4, H100),
            (64 * MIB, 4096, replace(H100, nvls=False)),
        )
    ]

    assert ["nvls", "ring", "ring", "tree"] == names


def test_constants_follow_the_nccl_version() -> None:
    """The network hop of rings was 9.6 µs before 2.12, 28 in 2.12, 14 since 2.18."""
    latency = [
        collective_seconds("all_gather", 2048 * MIB, 512, replace(H100, nccl_version=version)).alpha_s * 1e6
        for version in ("2.8", "2.12", "2.18.3", "2.30")
    ]

    assert [8.4 + 448 * 3.4 + 63 * hop for hop in (9.6, 28, 14, 14)] == [pytest.approx(value) for value in latency]


def test_gloo_rings_move_twice_the_vector_over_one_link() -> None:
    """15 µs of the call, 2 (n-1) steps of latency and 2 (n-1)/n of the bytes; a reduce-scatter is an all-reduce there."""
    cost = collective_seconds("all_reduce", 4 * MIB, 4, ETHERNET)

    assert pytest.approx(15e-6 + 6 * 30e-6) == cost.alpha_s
    assert pytest.approx(1.5 * 4 * MIB / (0.125e9 * 0.94)) == cost.beta_s
    assert cost.seconds == collective_seconds("reduce_scatter", 4 * MIB, 4, ETHERNET).seconds


def test_gloos_last_rank_announces_behind_what_it_sends() -> None:
    """Half a shard more on the one connection of two ranks; of larger rings at most what a host queues, 128 KiB."""
    two, small, large = (
        collective_seconds("all_gather", size, n, ETHERNET) for size, n in ((4 * MIB, 2), (MIB // 4, 4), (64 * MIB, 4))
    )
    rate = 0.125e9 * 0.94

    assert pytest.approx(0.75 * 4 * MIB / rate) == two.beta_s
    assert pytest.approx(0.875 * MIB / 4 / rate) == small.beta_s
    assert pytest.approx((0.75 * 64 * MIB + MIB / 8) / rate) == large.beta_s
    assert pytest.approx(MIB / rate) == two.last_s


def test_one_rank_costs_nothing_and_an_unknown_kind_is_refused() -> None:
    """A group of one moves nothing; a custom operation has no model."""
    assert 0.0 == collective_seconds("all_reduce", MIB, 1, H100).seconds
    with pytest.raises(UsageError, match="'custom'"):
        collective_seconds("custom", MIB, 8, H100)


PLAIN = {name: replace(Cluster.load(name), nvls=False) for name in catalog.names("clusters")}
"""Without reduction in the switches: that starts at five or six GPUs and is faster from there."""
KINDS = sorted(FAMILY)


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 1 << 36),
    more=st.floats(1.0, 4.0),
    ranks=st.integers(1, 5000),
    stride=st.sampled_from([1, 2, 4, 8]),
    name=st.sampled_from(sorted(PLAIN)),
)
def test_more_bytes_never_cost_less(kind: str, size: int, more: float, ranks: int, stride: int, name: str) -> None:
    """Over every kind, cluster and placement, across the borders of protocols and algorithms too."""
    cluster = PLAIN[name]
    base = collective_seconds(kind, size, ranks, cluster, stride=stride).seconds

    assert base <= collective_seconds(kind, size * more, ranks, cluster, stride=stride).seconds * (1 + 1e-12)


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 1 << 36),
    ranks=st.one_of(st.integers(1, 5000), st.sampled_from([7, 8, 15, 16, 63, 64, 71, 72, 255, 256, 575, 576, 1023])),
    stride=st.sampled_from([1, 2, 4, 8]),
    name=st.sampled_from(sorted(PLAIN)),
)
def test_one_rank_more_never_costs_less(kind: str, size: int, ranks: int, stride: int, name: str) -> None:
    """From 8 to 9 ranks, from one node to two, from a leaf to the spine: a group that fills its domains costs no more than
    any larger one. Only filling a partly filled domain may help."""
    cluster = PLAIN[name]
    filled = ranks
    for tier in range(len(cluster.tiers)):
        inside = place(filled, cluster, stride).members[tier]
        filled = filled - filled % inside if filled > inside else filled
    base = collective_seconds(kind, size, filled, cluster, stride=stride).seconds

    for more in (1, ranks + 1 - filled):
        assert base <= collective_seconds(kind, size, filled + more, cluster, stride=stride).seconds * (1 + 1e-12)


@settings(deadline=None)
@given(size=st.integers(1 << 22, 1 << 34), ranks=st.integers(5, 5000))
def test_with_reduction_in_the_switch_more_ranks_never_cost_less(size: int, ranks: int) -> None:
    """From the size of group on from which the switch reduces, where nodes are full."""
    filled = ranks if ranks <= 8 else ranks - ranks % 8
    assert (
        collective_seconds("all_reduce", size, filled, H100).seconds
        <= collective_seconds("all_reduce", size, ranks + 1, H100).seconds
    )
