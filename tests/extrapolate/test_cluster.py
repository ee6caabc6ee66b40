"""Clusters as data: the catalog, what a description may say, and how groups lie on tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate import catalog
from scaletrace.extrapolate.cluster import Cluster, Link, place

TWO_TIERS = """
device: H100 SXM
source: a rack of ours
tiers:
  - {name: nvlink, kind: nvlink, domain: 8, bandwidth_GBps: 450, efficiency: 0.8}
  - {name: spine, kind: network, domain: 0, bandwidth_GBps: 50, efficiency: 0.96, oversubscription: 2}
"""


def test_every_catalog_entry_loads_and_names_a_source_for_every_number() -> None:
    """The catalog holds nothing that can't be used, and no number without an origin."""
    clusters = [Cluster.load(name) for name in catalog.names("clusters")]
    devices = [catalog.load_device(name) for name in catalog.names("devices")]
    networks = [catalog.load_network(name) for name in catalog.names("networks")]
    models = [catalog.load_model(name) for name in catalog.names("models")]

    missing = [
        (name, number)
        for name, sources in [
            *((cluster.name, tier.sources) for cluster in clusters for tier in cluster.tiers),
            *((device.name, device.sources) for device in devices),
            *(("network", network.all_sources()) for network in networks),
            *(("model", model.all_sources()) for model in models),
        ]
        for number, source in sources.items()
        if not source or source == "given by the user"
    ]

    assert [] == missing
    assert {
        "dgx_v100",
        "dgx_a100",
        "dgx_h100",
        "dgx_h200",
        "dgx_b200",
        "gb200_nvl72",
        "mi300x",
        "aws_p4d",
        "aws_p5",
    } <= {cluster.name for cluster in clusters}


def test_a_described_cluster_gives_the_rates_of_its_tiers(tmp_path: Path) -> None:
    """Efficiency and oversubscription are in the rate that a rank's share carries."""
    path = tmp_path / "mine.yaml"
    path.write_text(TWO_TIERS)

    cluster = Cluster.load(path)

    assert ("mine", 8, [360e9, 24e9]) == (cluster.name, cluster.node_size, [tier.rate_Bps for tier in cluster.tiers])
    assert [Link.NVLINK, Link.NETWORK] == [tier.link for tier in cluster.tiers]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("450", "-1"), r"tiers.0.bandwidth_GBps: Input should be greater than 0"),
        (("domain: 8", "domain: 0"), "domains must grow"),
        (("kind: nvlink", "kind: rope"), "tiers.0.kind"),
        (("oversubscription: 2", "typo: 2"), "tiers.1.typo: Extra inputs"),
        (("H100 SXM", "H900"), "no device 'H900'"),
        (("device", ": ]["), "not a readable cluster description"),
    ],
)
def test_a_wrong_description_names_field_and_reason(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    """A user sees which field is wrong, in one sentence."""
    path = tmp_path / "mine.yaml"
    path.write_text(TWO_TIERS.replace(*change))

    with pytest.raises((InputError, UsageError), match=message):
        Cluster.load(path)


def test_an_unknown_cluster_is_answered_with_the_known_names() -> None:
    """The remedy for a wrong name is the list of right ones."""
    with pytest.raises(UsageError, match="dgx_h100"):
        Cluster.load("dgx_h101")


@pytest.mark.parametrize(
    ("size", "stride", "per_node", "members", "nodes"),
    [
        (8, 1, None, (8, 8, 8), 1),
        (1024, 1, None, (8, 256, 1024), 128),
        (128, 8, None, (1, 32, 128), 128),
        (4, 2, None, (4, 4, 4), 1),
        (16, 4, None, (2, 16, 16), 8),
        (64, 1, 2, (2, 64, 64), 32),
        (1, 1, None, (1, 1, 1), 1),
    ],
)
def test_groups_lie_on_tiers_by_size_and_stride(
    size: int, stride: int, per_node: int | None, members: tuple[int, ...], nodes: int
) -> None:
    """Neighbours share a node, strided groups own fewer of its NICs."""
    placed = place(size, Cluster.load("dgx_h100"), stride, per_node)

    assert (members, nodes) == (placed.members, placed.nodes)


def test_an_impossible_group_is_refused() -> None:
    """A group of no ranks has no place."""
    with pytest.raises(UsageError, match="size ≥ 1"):
        place(0, Cluster.load("dgx_h100"))
