"""Turns a capture's manifest into what the job needs of it: expected ranks, groups, shared clocks and measured bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from scaletrace.errors import InputError
from scaletrace.parse.clocks import Bound
from scaletrace.parse.groups import Said
from scaletrace.parse.limits import MOST_RANKS
from scaletrace.parse.literals import whole


def expected_ranks(manifest: Mapping[str, Any]) -> tuple[int, ...]:
    """Ranks that should be there, written as a list or a count; () where the manifest does not say."""
    ranks = manifest.get("ranks")
    value = ranks.get("expected") if isinstance(ranks, Mapping) else manifest.get("world_size")
    listed = [value] if is_int(value) else numbers(value)
    if not all(0 <= one <= MOST_RANKS for one in listed):
        raise InputError("manifest.json: it expects ranks that no job has; correct the file, or move it away")
    return tuple(range(value)) if is_int(value) else tuple(listed)


def is_int(value: Any) -> TypeGuard[int]:
    """Whether `value` is an integer (bool is not a number here)."""
    return isinstance(value, int) and not isinstance(value, bool)


def numbers(value: Any) -> list[int]:
    """The integers of a list; a saved job holds its lists as tuples."""
    return [one for one in value if is_int(one)] if isinstance(value, list | tuple) else []


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list | tuple) else []


def hosts_in(manifest: Mapping[str, Any]) -> dict[int, str]:
    """What names the clock of each rank: the boot id of its host (equal ids share a clock), else the host's name."""
    out: dict[int, str] = {}
    for host in mappings(manifest.get("hosts")):
        identity = host.get("boot_id") or host.get("name")
        if isinstance(identity, str):
            out.update(dict.fromkeys(numbers(host.get("ranks")), identity))
    return out


def cpus_in(manifest: Mapping[str, Any]) -> dict[int, int]:
    """How many CPUs the host of each rank has, where the manifest tells."""
    out: dict[int, int] = {}
    for host in mappings(manifest.get("hosts")):
        cpus = host.get("cpus")
        if is_int(cpus) and cpus > 0:
            out.update(dict.fromkeys(numbers(host.get("ranks")), cpus))
    return out


def groups_in(manifest: Mapping[str, Any]) -> list[Said]:
    """All process groups of the job as the collector saw them."""
    out: list[Said] = []
    for group in mappings(manifest.get("groups")):
        start, stride, size = (group.get(key) for key in ("start", "stride", "size"))
        members = tuple(numbers(group.get("ranks")))
        if not members and is_int(start) and is_int(stride) and is_int(size) and size <= MOST_RANKS:
            members = tuple(start + stride * k for k in range(size))
        if members:
            out.append(Said(str(group.get("name", "")), str(group.get("description", "")), members))
    return out


def bounds_in(manifest: Mapping[str, Any], ranks: Sequence[int]) -> tuple[Bound, ...]:
    """Clock probes as bounds between rank indices, each against the lowest rank present that has none of its own.

    A probe is any mapping with `low_ns` and `high_ns` (own clock minus reference clock) that belongs to a rank, through
    a `rank` beside it or above it, or through a key that is the rank's number.
    """
    index = {rank: i for i, rank in enumerate(ranks)}
    probes = [(rank, low, high) for rank, low, high in _probes(manifest.get("clocks"), None) if rank in index]
    probed = {rank for rank, _, _ in probes}
    reference = next((rank for rank in ranks if rank not in probed), None)
    if reference is None and probes:
        # the reference clock is of no rank that is present, so intervals subtract
        first = min(probed)
        lows = max(low for rank, low, _ in probes if rank == first)
        highs = min(high for rank, _, high in probes if rank == first)
        return tuple(Bound(index[r], index[first], low - highs, high - lows) for r, low, high in probes if r != first)
    return tuple(Bound(index[r], index[reference], low, high) for r, low, high in probes if reference is not None)


def _probes(value: Any, rank: int | None) -> Iterator[tuple[int, int, int]]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _probes(one, rank)
    if not isinstance(value, Mapping):
        return
    own = value.get("rank")
    rank = own if isinstance(own, int) and not isinstance(own, bool) else rank
    low, high = value.get("low_ns"), value.get("high_ns")
    if rank is not None and isinstance(low, int) and isinstance(high, int) and low <= high:
        yield rank, low, high
    for key, inner in value.items():
        numbered = whole(key)
        yield from _probes(inner, rank if numbered is None else numbered)
