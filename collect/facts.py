"""Turns this process and its machine into the facts of the manifest: versions, host, devices, NICs, groups, meshes, model.

Every fact is best effort: what can't be found out is absent, never guessed.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Versions of what shapes a trace."""
    torch: Any = sys.modules.get("torch")
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    if torch is not None:
        found["torch"] = str(torch.__version__)
        for name in ("cuda", "hip"):
            if getattr(torch.version, name, None):
                found[name] = str(getattr(torch.version, name))
        if torch.cuda.is_available():
            found.update(told(lambda: {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}, {}))
            found.update(told(lambda: {"cudnn": str(torch.backends.cudnn.version())}, {}))
    return found


def told(ask: Callable[[], Any], otherwise: Any) -> Any:
    """The answer of a call into somebody else's library, `otherwise` where it fails: a missing fact costs no recording."""
    try:
        return ask()
    except Exception:  # noqa: BLE001  (private parts of torch, of versions to come)
        return otherwise


def host() -> dict[str, Any]:
    """This machine: name, boot id (ranks with the same one share a clock), CPUs, memory, devices, NICs."""
    found: dict[str, Any] = {"name": socket.gethostname(), "cpus": os.cpu_count()}
    boot = _text(Path("/proc/sys/kernel/random/boot_id"))
    if boot:
        found["boot_id"] = boot
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            found["cpu"] = line.partition(":")[2].strip()
            break
    found.update(told(lambda: {"memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}, {}))
    return {**found, "devices": devices(), "nics": nics()}


def devices() -> list[dict[str, Any]]:
    """The CUDA devices that this process sees; asked only where CUDA is already in use, since asking would start it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": facts.name,
                "memory_bytes": facts.total_memory,
                "multiprocessors": facts.multi_processor_count,
                "capability": f"{facts.major}.{facts.minor}",
            }
        )
    return found


def nics(root: Path = Path("/sys/class")) -> list[dict[str, Any]]:
    """Network links with their rate: Ethernet from `net` (Mbit/s), InfiniBand from `infiniband` ("400 Gb/sec …")."""
    found: list[dict[str, Any]] = []
    for path in sorted(root.glob("net/*")):
        speed = _text(path / "speed")
        if speed.isdecimal() and _text(path / "operstate") == "up":
            found.append({"name": path.name, "rate_bps": int(speed) * 1_000_000, "kind": "ethernet"})
    for path in sorted(root.glob("infiniband/*/ports/*/rate")):
        number = _text(path).partition(" ")[0]
        if number.replace(".", "", 1).isdecimal():
            name = f"{path.parts[-4]}:{path.parts[-2]}"
            found.append({"name": name, "rate_bps": int(float(number) * 1e9), "kind": "infiniband"})
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def regular(members: Sequence[int]) -> dict[str, Any]:
    """A group's members as start, stride and size where they are evenly spaced, else as the list."""
    stride = members[1] - members[0] if len(members) > 1 else 0
    if all(b - a == stride for a, b in pairwise(members)):
        return {"start": members[0], "stride": stride, "size": len(members)}
    return {"size": len(members), "ranks": list(members)}


def groups() -> list[dict[str, Any]]:
    """The process groups of this rank, in the order of their creation; [] where the job has none."""
    return [
        {"name": name, "description": description, "backend": backend, **regular(members)}
        for name, description, backend, members in process_groups()
    ]


def process_groups() -> list[tuple[str, str, str, list[int]]]:
    """(name, description, backend, members) of each group that this rank belongs to."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return []
    found = []
    for group, ranks in c10d._world.pg_group_ranks.items():
        if not isinstance(group, int) and group in c10d._world.pg_names:
            backend = str(c10d._world.pg_backend_config.get(group, ""))
            members = sorted(ranks)
            found.append((c10d._world.pg_names[group], str(getattr(group, "group_desc", "")), backend, members))
    return found


def meshes() -> list[dict[str, Any]]:
    """The device meshes of this process: axis names and shape, largest first; looking for them takes about 0.1 s."""
    module: Any = sys.modules.get("torch.distributed.device_mesh")
    kind = getattr(module, "DeviceMesh", None)
    if kind is None:
        return []
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for thing in gc.get_objects():
        if type(thing) is kind:
            fact = told(functools.partial(_mesh, thing), {})
            if fact:
                found[tuple(fact["axes"]), tuple(fact["shape"])] = fact
    return sorted(found.values(), key=lambda fact: (-len(fact["shape"]), fact["axes"]))


def _mesh(mesh: Any) -> dict[str, Any]:
    shape = [int(size) for size in mesh.shape]
    return {"axes": list(mesh.mesh_dim_names or ["" for _ in shape]), "shape": shape, "device": str(mesh.device_type)}


def parameters(optimizer: Any) -> dict[str, int]:
    """Parameters that this rank's optimizer trains: `parameters` as the model has them, `parameters_local` as held here.

    A sharded parameter (DTensor) knows both numbers; under tensor or pipeline parallelism by hand they are the same.
    """
    whole = local = 0
    for group in getattr(optimizer, "param_groups", []):
        for parameter in group["params"]:
            whole += int(parameter.numel())
            to_local = getattr(parameter, "to_local", None)
            local += int(to_local().numel()) if to_local is not None else int(parameter.numel())
    return {"parameters": whole, "parameters_local": local}
