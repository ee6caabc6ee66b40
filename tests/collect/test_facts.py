"""Facts of the machine and the model: what is known is said, what is not is absent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from scaletrace.collect.facts import host, nics, parameters, told


def test_links_with_a_known_rate(tmp_path: Path) -> None:
    """Ethernet links that are up and InfiniBand ports, in bits a second; links without a speed are left out."""
    for name, speed, state in (("eth0", "100000", "up"), ("eth1", "25000", "down"), ("lo", "", "unknown")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "speed").write_text(f"{speed}\n")
        (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    expected = [
        {"name": "eth0", "rate_bps": 100_000_000_000, "kind": "ethernet"},
        {"name": "mlx5_0:1", "rate_bps": 400_000_000_000, "kind": "infiniband"},
    ]
    assert expected == nics(tmp_path)


def test_this_host_says_who_it_is() -> None:
    """Name, CPUs and memory are known on any Linux."""
    found = host()
    assert found["name"]
    assert found["cpus"] >= 1
    assert found["memory_bytes"] > 1 << 20


class Sharded:
    """As much of a DTensor as counting needs: 100 elements, 25 of them here."""

    def numel(self) -> int:
        return 100

    def to_local(self) -> Plain:
        return Plain(25)


class Plain:
    """A tensor that is whole here."""

    def __init__(self, elements: int) -> None:
        self.elements = elements

    def numel(self) -> int:
        return self.elements


def test_parameters_are_counted_whole_and_local() -> None:
    """A sharded parameter counts whole for the model and as its shard for this rank."""
    optimizer = SimpleNamespace(param_groups=[{"params": [Sharded(), Plain(7)]}, {"params": [Plain(3)]}])
    expected = {"parameters": 110, "parameters_local": 35}
    assert expected == parameters(optimizer)


def test_a_fact_that_cannot_be_had_is_absent() -> None:
    """A failure in somebody else's library gives the other answer, not an error."""
    expected: dict[str, str] = {}
    assert expected == told(lambda: {"version": str(1 / 0)}, {})
