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
    assert {f"InfiniBand {name}" for name in ("EDR", "HDR", "NDR", "XDR")} <= set(catalog.names("networks"))
    assert {f"Ethernet {rate}G" for rate in (1, 10, 25, 100, 200, 400, 800)} <= set(catalog.names("networks"))
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
        "gcp_a3_high",
        "gcp_a3_mega",
        "azure_nd_a100_v4",
        "azure_nd_h100_v5",
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
        (("450", "-1"), r"tiers\.0\.bandwidth_GBps: Input should be greater than 0"),
        (("450", ".nan"), r"tiers\.0\.bandwidth_GBps: Input should be"),
        (("450", ".inf"), r"tiers\.0\.bandwidth_GBps: Input should be"),
        (("450", "1e300"), r"tiers\.0\.bandwidth_GBps: Input should be less than"),
        (("450", "yes"), r"tiers\.0\.bandwidth_GBps: a number is needed, not yes or no"),
        (("450", "450GB/s"), r"tiers\.0\.bandwidth_GBps: Input should be a valid number"),
        (("0.96", "1.7"), r"tiers\.1\.efficiency: Input should be less than or equal to 1\.5"),
        (("domain: 8", "domain: 0"), "tiers: domains must grow"),
        (("domain: 8", "domain: 8.5"), r"tiers\.0\.domain: Input should be a valid integer"),
        (("domain: 8", "domain: 99999999999"), r"tiers\.0\.domain: Input should be less than"),
        (("kind: nvlink", "kind: rope"), r"tiers\.0\.kind: Input should be 'nvlink', 'pci', 'network' or 'tcp'"),
        (("oversubscription: 2", "typo: 2"), r"tiers\.1\.typo: no such key"),
        (("oversubscription: 2", "oversubscription: .inf"), r"tiers\.1\.oversubscription"),
        (("bandwidth_GBps: 450,", ""), r"tiers\.0\.bandwidth_GBps: is missing"),
        (("name: nvlink, kind: nvlink, ", ""), r"tiers\.0\.name: is missing \(and 1 more\)"),
        (("H100 SXM", "H900"), "device: no device 'H900' in the catalog; known: "),
        (("H100 SXM", "{generation: hopper}"), r"device\.bf16_tflops: is missing \(and 3 more\)"),
        (("H100 SXM", "5"), "device: Input should be a valid string"),
        (("source: a rack", "nccl_version: 2.30\nsource: a rack"), 'nccl_version: a version goes in quotes, as "2.30"'),
        (("device", ": ]["), "not valid YAML: line 2: "),
        (("source", "device"), "not valid YAML: line 2: 'device' is there twice"),
        (("450", "2001-99-99"), "not valid YAML: month must be"),
        (("tiers:\n", "tiers: &a [*a]\nx:\n"), "its aliases stand for more than 1,000,000 values"),
        ((TWO_TIERS, ""), "nothing where an entry of keys and values is needed"),
        ((TWO_TIERS, "- 1"), "a list where an entry of keys and values is needed"),
        ((TWO_TIERS, "a: 1\n---\nb: 2"), "expected a single document"),
        ((TWO_TIERS, "[" * 5000), "nested too deeply"),
        ((TWO_TIERS, "a: " + "9" * 5000), "not valid YAML"),
        ((TWO_TIERS, "# " + "x" * (1 << 20)), "larger than 1 MiB"),
    ],
)
def test_a_wrong_description_names_file_place_and_reason(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    """A user sees in one sentence which file and field is wrong, and where an example is."""
    path = tmp_path / "mine.yaml"
    path.write_text(TWO_TIERS.replace(*change))

    with pytest.raises(InputError, match=message) as raised:
        Cluster.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_aliases_without_end_are_refused_at_once(tmp_path: Path) -> None:
    """Nine levels of ten aliases each stand for a billion tiers; a wrong one is named, not all."""
    levels = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 9)]
    path = tmp_path / "laughs.yaml"
    path.write_text("\n".join(["x0: &x0 [1]", *levels, "device: H100 SXM", "tiers: *x8"]))

    with pytest.raises(InputError, match=r"^.*laughs\.yaml: "):
        Cluster.load(path)


def test_a_file_is_found_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description needs no .yaml at its end; a name that is neither file nor known is answered with the known ones."""
    (tmp_path / "mine").write_text(TWO_TIERS)
    monkeypatch.chdir(tmp_path)

    assert "mine" == Cluster.load("mine").name
    with pytest.raises(InputError, match=r"^absent\.yaml: No such file"):
        Cluster.load("absent.yaml")
    with pytest.raises(InputError, match="not a regular file"):
        Cluster.load(tmp_path)


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
