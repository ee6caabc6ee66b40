"""Turns one file into which several ranks were merged back into one trace per rank, where its ids allow it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from scaletrace.parse.events import MISSING, IntArray
from scaletrace.parse.health import Health
from scaletrace.parse.owners import owners
from scaletrace.parse.reader import TraceFile


def split_ranks(trace: TraceFile) -> list[TraceFile]:
    """The ranks of a fused file, each with its own table and `distributedInfo`; [trace] where it holds only one.

    Raises NotATraceError where ids of different ranks can't be told apart.
    """
    found = owners(trace.events, trace.source)
    if found is None:
        return [trace]
    owner, rule = found
    ranks = np.unique(owner[owner != MISSING]).tolist()
    lost = int((owner == MISSING).sum())
    return [_part(trace, owner, rank, len(ranks), rule, lost) for rank in ranks]


def _part(trace: TraceFile, owner: IntArray, rank: int, count: int, rule: str, lost: int) -> TraceFile:
    rows = np.flatnonzero(owner == rank)
    info = trace.header.get("distributedInfo")
    merged: dict[str, Any] = {**info} if isinstance(info, dict) else {}
    health = Health()
    health.add(trace.health)
    health.notes = [note for note in health.notes if "split_ranks" not in note]
    health.guessed["ranks split out of a fused file"] += 1
    health.note(f"{count} ranks in one file, told apart by {rule}")
    if lost:
        health.dropped["events of a fused file that belong to no rank"] += lost
    return replace(
        trace,
        source=f"{trace.source}#rank{rank}",
        events=trace.events.select(rows),
        header={**trace.header, "distributedInfo": {**merged, "rank": rank}},
        health=health,
        offsets=trace.offsets[rows],
    )
