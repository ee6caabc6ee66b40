"""Ranks that share the cores of a host: who they are, and what of other sizes is left open."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.cores import Crowd
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.parse.load import load


@pytest.mark.parametrize(
    ("domain", "ranks", "said"),
    [
        (0, 4, "4 of them have fewer"),
        (0, 1, "1 of them have more"),
        (0, 2, ""),
        (1, 4, ""),
        (8, 4, "4 of them have fewer"),
    ],
)
def test_a_band_is_open_where_another_number_of_ranks_may_share_a_host(domain: int, ranks: int, said: str) -> None:
    """Two were recorded on one host: a cluster with a host a rank leaves none open, one of hosts of 8 does, so does none."""
    reason = Crowd(2, 1, 0, domain).untold(ranks)

    assert said in reason and bool(said) == bool(reason)


def test_ranks_on_several_hosts_stay_as_many_on_each() -> None:
    """Four ranks on two hosts: eight of them are taken to be four on each."""
    assert [2, 4] == [Crowd(2, 2, 0, 0).on_a_host(ranks) for ranks in (4, 8)]


def test_the_note_says_what_a_host_has_and_what_is_not_predicted() -> None:
    """CPUs are named where the manifest tells them; without a named cluster the remedy is."""
    assert "2 ranks ran on one host of 4 CPUs and shared its cores." in Crowd(2, 1, 4, 0).note()
    assert "--cluster" in Crowd(2, 1, 4, 0).note() and "--cluster" not in Crowd(2, 1, 4, 1).note()


def test_a_device_that_another_process_shares_leaves_every_other_size_open() -> None:
    """Whether one does there is not known; the graph's own note already says that it did here."""
    crowd = Crowd(0, 0, 0, 0, (3,))

    assert crowd.untold(16).startswith("another process shared the device of rank 3;")
    assert "" == crowd.note()


def test_a_sample_on_one_host_leaves_the_band_of_other_sizes_open(samples: Path) -> None:
    """34 ms over two ranks were 117 ms over four on the same cores: the answer says that this is in no number."""
    alike = extrapolate(load(samples / "fsdp2_w2"), sizes=[2, 4])
    named = extrapolate(load(samples / "fsdp2_w2"), sizes=[4], cluster=Cluster.load("gloo_10g"))
    alone = extrapolate(load(samples / "ddp_w1"), sizes=[4])

    assert [False, True] == ["step_time_band" in point.unknown for point in alike.points]
    assert "step_time_band" not in named.points[0].unknown
    assert any("shared its cores" in note for note in named.health.notes)
    assert not any("shared its cores" in note for note in alone.health.notes)
