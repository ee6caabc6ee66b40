"""Turns environment variables and process groups into who this process is, and whether it is to be recorded.

A launcher says it by environment variables, but a job that sets its ranks itself (mp.spawn) says it only through
`torch.distributed`, so that one wins once it is there.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scaletrace.errors import UsageError

LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mvapich", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Launcher and its variables for rank, world size and local rank, most specific first."""

DATA_AXES = ("dp", "ddp", "fsdp", "shard", "replicate", "data")
"""Parts of an axis name that make its ranks do the same work on other data."""


@dataclass(frozen=True, slots=True)
class Place:
    """Who this process is. `source` says which rule told; `attempt` counts restarts by torchelastic."""

    rank: int
    world_size: int
    local_rank: int | None
    source: str
    attempt: int = 0
    host: str = ""
    pid: int = 0

    @property
    def stem(self) -> str:
        """How this rank's files are called: `rank00003_of00008`."""
        return f"rank{self.rank:05d}_of{self.world_size:05d}"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that the launcher's variables give; None where there are none or they are no numbers."""
    for source, rank_name, world_name, local_name in LAUNCHERS:
        rank, world = _number(environment.get(rank_name)), _number(environment.get(world_name))
        if rank is not None and world is not None and rank < world:
            attempt = _number(environment.get("TORCHELASTIC_RESTART_COUNT")) or 0
            local = _number(environment.get(local_name))
            return Place(rank, world, local, source, attempt, socket.gethostname(), os.getpid())
    return None


def here(environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process now: torch.distributed first, then the environment, else the only rank of a job of one."""
    told = from_environment(environment) or Place(0, 1, None, "single process", 0, socket.gethostname(), os.getpid())
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
        if (rank, world) != (told.rank, told.world_size):
            return replace(told, rank=rank, world_size=world, local_rank=None, source="torch.distributed")
    return told


def parse_list(text: str) -> frozenset[int]:
    """`0,4-7` as a set of ranks.

    Raises UsageError for anything else, and for ranges of more than a million ranks.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise UsageError(f"ranks {text!r}: {part!r} is no rank or range; write all, classes, or a list as 0,4-7")
        if dash and int(high) - int(low) > 1_000_000:
            raise UsageError(f"ranks {text!r}: more than a million ranks in {part!r}")
        ranks.update(range(int(low), int(high or low) + 1))
    return frozenset(ranks)


def check_spec(spec: str) -> None:
    """Raise UsageError unless `spec` is `all`, `classes` or a list of ranks."""
    if spec not in ("all", "classes"):
        parse_list(spec)


def is_data_axis(description: str) -> bool:
    """Whether a group so described holds ranks that do the same work: `mesh_dp_shard`, `fsdp`, but not `mesh_tp`."""
    name = description.lower().removeprefix("mesh_")
    return any(part.startswith(DATA_AXES) for part in name.split("_"))


def leads_its_class(rank: int, groups: Iterable[tuple[str, Sequence[int]]], world_size: int) -> bool:
    """Whether `rank` is the one of its class to record: the first member of each data-parallel group that it is in.

    `groups` are (description, members) of the groups of this rank. A job whose groups say nothing of axes is taken for
    plain data parallelism, where rank 0 stands for all; the last rank is recorded too, since it is often the odd one.
    """
    own = [(description, members) for description, members in groups if rank in members]
    meshes = [(description, members) for description, members in own if description.startswith("mesh_")]
    if not meshes:
        return rank in (0, world_size - 1)
    return all(members[0] == rank for description, members in meshes if is_data_axis(description))


def is_selected(spec: str, place: Place, groups: Iterable[tuple[str, Sequence[int]]] = ()) -> bool:
    """Whether this rank writes a full trace; the others write the light sidecar only."""
    if spec == "all":
        return True
    if spec == "classes":
        return leads_its_class(place.rank, groups, place.world_size)
    return place.rank in parse_list(spec)
