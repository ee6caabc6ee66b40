"""Turns a capture's manifest into what the job needs of it: which ranks were expected, and measured clock bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaletrace.parse.clocks import Bound


def expected_ranks(manifest: Mapping[str, Any]) -> tuple[int, ...]:
    """Ranks that should be there, written as a list or a count; () where the manifest does not say."""
    ranks = manifest.get("ranks")
    value = ranks.get("expected") if isinstance(ranks, Mapping) else manifest.get("world_size")
    if isinstance(value, int) and not isinstance(value, bool):
        return tuple(range(value))
    return tuple(r for r in value if isinstance(r, int)) if isinstance(value, list) else ()


def bounds_in(manifest: Mapping[str, Any], ranks: Sequence[int]) -> tuple[Bound, ...]:
    """Clock probes as bounds between rank indices, each against the lowest rank present that has none of its own.

    A probe is any mapping with `low_ns` and `high_ns` (own clock minus reference clock) that belongs to a rank, through
    a `rank` beside it or above it, or through a key that is the rank's number.
    """
    index = {rank: i for i, rank in enumerate(ranks)}
    probes = [(rank, low, high) for rank, low, high in _probes(manifest, None) if rank in index]
    probed = {rank for rank, _, _ in probes}
    reference = next((rank for rank in ranks if rank not in probed), None)
    if reference is None and probes:
        # everyone measured against a clock outside of the job, so intervals subtract
        first = min(probed)
        lows = max(low for rank, low, _ in probes if rank == first)
        highs = min(high for rank, _, high in probes if rank == first)
        return tuple(Bound(index[r], index[first], low - highs, high - lows) for r, low, high in probes if r != first)
    return tuple(Bound(index[r], index[reference], low, high) for r, low, high in probes if reference is not None)


def _probes(value: Any, rank: int | None) -> Iterator[tuple[int, int, int]]:
    if isinstance(value, list):
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
        numbered = int(key) if isinstance(key, str) and key.isdigit() else rank
        yield from _probes(inner, numbered)
