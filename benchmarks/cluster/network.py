"""Turns a description of a small cluster into network namespaces joined by bridges, every link rate-limited.

Each rank lives in a namespace with one interface; tc tbf limits both directions. With two bridges the ranks are split
between them and a slower link joins the bridges. Needs root; everything is named ts… and is removed on leaving.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

MTU, BURST, LATENCY = 9000, "10kb", "400ms"
CPU_GROUP = Path("/sys/fs/cgroup/cpu/tscluster")
PERIOD_US = 10_000


@dataclass(frozen=True, slots=True)
class Spec:
    """ranks on `racks` bridges; rate_mbit of every rank's link, uplink_mbit between racks; quota 0.1 = 10 % of a core.

    burst  what a link that was idle lets through at once; the less, the more it is like a cable, which lets through none
    """

    ranks: int
    rate_mbit: float
    racks: int = 1
    uplink_mbit: float = 0.0
    quota: float = 0.0
    burst: str = BURST

    def rack(self, rank: int) -> int:
        """Ranks fill one rack after the other."""
        return rank * self.racks // self.ranks


def why_not() -> str:
    """Why no cluster can be emulated here, or ""."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root for network namespaces"
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    probe = subprocess.run(["ip", "netns", "add", "tsprobe"], check=False, capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces are not allowed here: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "tsprobe"], check=False, capture_output=True)
    return ""


class Network:
    """The cluster while it exists: `with Network(spec) as net: subprocess.Popen(net.command(rank, [...]))`."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __enter__(self) -> Self:
        if subprocess.run(["ip", "link", "show", "tsbr0"], check=False, capture_output=True).returncode == 0:
            raise RuntimeError(
                "the bridge tsbr0 is there: wait for the other emulated cluster, or remove what a killed one left "
                "(ip link del tsbr0; ip -all netns del)"
            )
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    def command(self, rank: int, command: list[str]) -> list[str]:
        """`command` inside the rank's namespace."""
        return ["nsenter", f"--net=/run/netns/tsN{rank}", *command]

    def cpu_group(self, rank: int) -> Path | None:
        """Where a thread of the rank writes its id to come under the quota; None without one."""
        return CPU_GROUP / f"r{rank}" / "tasks" if self.spec.quota else None

    def _up(self) -> None:
        spec = self.spec
        for rack in range(spec.racks):
            _run(f"ip link add tsbr{rack} type bridge")
            _run(f"ip link set tsbr{rack} mtu {MTU} up")
        if spec.racks == 2:
            _run(f"ip link add tsup0 mtu {MTU} type veth peer name tsup1 mtu {MTU}")
            for rack in range(2):
                _run(f"ip link set tsup{rack} master tsbr{rack} up")
                _run(f"tc qdisc add dev tsup{rack} {_limit(spec.uplink_mbit, spec.burst)}")
        for rank in range(spec.ranks):
            _run(f"ip netns add tsN{rank}")
            _run(f"ip link add tsv{rank} mtu {MTU} type veth peer name eth0 mtu {MTU} netns tsN{rank}")
            _run(f"ip link set tsv{rank} master tsbr{spec.rack(rank)} up")
            _run(f"ip -n tsN{rank} addr add 10.77.0.{rank + 1}/24 dev eth0")
            _run(f"ip -n tsN{rank} link set eth0 up")
            _run(f"ip -n tsN{rank} link set lo up")
            _run(f"tc -n tsN{rank} qdisc add dev eth0 {_limit(spec.rate_mbit, spec.burst)}")
            _run(f"tc qdisc add dev tsv{rank} {_limit(spec.rate_mbit, spec.burst)}")
            if spec.quota:
                group = CPU_GROUP / f"r{rank}"
                group.mkdir(parents=True, exist_ok=True)
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * spec.quota)))

    def _down(self) -> None:
        for rank in range(self.spec.ranks):
            _run(f"ip link del tsv{rank}", check=False)
            _run(f"ip netns del tsN{rank}", check=False)
            group = CPU_GROUP / f"r{rank}"
            if group.exists():
                group.rmdir()
        if CPU_GROUP.exists():
            CPU_GROUP.rmdir()
        _run("ip link del tsup0", check=False)
        for rack in range(self.spec.racks):
            _run(f"ip link del tsbr{rack}", check=False)


def _limit(rate_mbit: float, burst: str) -> str:
    return f"root tbf rate {rate_mbit}mbit burst {burst} latency {LATENCY}"


def _run(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=True, text=True)
