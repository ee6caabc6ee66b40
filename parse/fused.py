"""Turns one file into which several ranks were merged back into one event table per rank, where its ids allow it.

Three ways of merging are in use: an argument "rank" on every event with shifted pids (TraceLens), pids that became
texts such as "[TP03] 1234" (SGLang), and plain concatenation, where only the host processes stay apart.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from scaletrace.errors import NotATraceError
from scaletrace.parse import cats
from scaletrace.parse.events import MISSING, BoolArray, Events, IntArray
from scaletrace.parse.health import Health
from scaletrace.parse.reader import TraceFile

_TAGGED = re.compile(r"^\[([^\]]+)\]\s*(-?\w+.*)$")
_RANK_IN_TAG = re.compile(r"(\d+)")
_MAX_RANKS = 65536
_AGREEMENT = 0.95


def is_fused(events: Events) -> bool:
    """Whether the table holds the events of more than one rank."""
    return _by_argument(events) is not None or _by_tag(events) is not None or len(_host_pids(events)) > 1


def split_ranks(trace: TraceFile) -> list[TraceFile]:
    """The ranks of a fused file, each with its own table and `distributedInfo`; [trace] where it holds only one.

    Raises NotATraceError where ids of different ranks can't be told apart.
    """
    events = trace.events
    owner, rule = _by_argument(events), "the argument rank"
    if owner is None:
        owner, rule = _by_tag(events), "the tag in the pid"
    if owner is None and len(_host_pids(events)) > 1:
        owner, rule = _by_process(trace), "the host process"
    if owner is None:
        return [trace]
    ranks = np.unique(owner[owner != MISSING]).tolist()
    lost = int((owner == MISSING).sum())
    return [_part(trace, owner, rank, len(ranks), rule, lost) for rank in ranks]


def _part(trace: TraceFile, owner: IntArray, rank: int, count: int, rule: str, lost: int) -> TraceFile:
    rows = np.flatnonzero(owner == rank)
    info = trace.header.get("distributedInfo")
    merged: dict[str, Any] = {**info} if isinstance(info, dict) else {}
    health = Health()
    health.add(trace.health)
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


def _by_argument(events: Events) -> IntArray | None:
    """Rank of each event by its argument "rank"; None unless nearly every event has one and they differ."""
    ranks = events.ints("rank")
    given = ranks != MISSING
    if given.sum() < _AGREEMENT * max(len(events), 1) or len(np.unique(ranks[given])) < 2:
        return None
    return ranks


def _by_tag(events: Events) -> IntArray | None:
    found = [_TAGGED.match(str(lane.pid)) for lane in events.lanes]
    tags = sorted({match[1] for match in found if match}, key=_natural)
    if len(tags) < 2:
        return None
    numbers = [_RANK_IN_TAG.findall(tag) for tag in tags]
    last = [int(number[-1]) if len(number) == 1 else -1 for number in numbers]
    ranks = last if len(set(last)) == len(tags) and -1 not in last else list(range(len(tags)))
    by_lane = np.array([ranks[tags.index(match[1])] if match else MISSING for match in found], np.int64)
    return by_lane[events.lane]


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _pids(events: Events) -> tuple[list[int | str], IntArray]:
    """(distinct pids, number of the pid of each lane)."""
    distinct = list(dict.fromkeys(lane.pid for lane in events.lanes))
    return distinct, np.array([distinct.index(lane.pid) for lane in events.lanes], np.int64)


def _host_pids(events: Events) -> list[int]:
    """Numbers of the processes that run operators and make device calls of their own."""
    distinct, of_lane = _pids(events)
    if len(distinct) < 2:
        return []
    calls = np.unique(of_lane[events.lane[events.in_cats(*cats.RUNTIME_CATS)]])
    ops = np.unique(of_lane[events.lane[events.in_cats(*cats.OP_CATS)]])
    return [int(pid) for pid in np.intersect1d(calls, ops)]


def _by_process(trace: TraceFile) -> IntArray:
    """Rank of each event by host process; a device belongs to the process whose launches its records fit."""
    events = trace.events
    _, of_lane = _pids(events)
    pid = of_lane[events.lane]
    hosts = _host_pids(events)
    owner_of_pid = np.full(int(of_lane.max()) + 1, MISSING, np.int64)
    owner_of_pid[hosts] = np.arange(len(hosts))
    is_work = events.in_cats(*cats.DEVICE_CATS) & (events.correlation > 0)
    for device in np.unique(pid[is_work]).tolist():
        fits = [_fit(events, is_work & (pid == device), pid == host) for host in hosts]
        best = int(np.argmax(fits))
        if fits[best] < _AGREEMENT or sorted(fits)[-2] > fits[best] / 2:
            raise NotATraceError(
                f"{trace.source}: {len(hosts)} ranks are fused into one file and the GPU records of process {device} "
                "fit several of them; give each rank its own file"
            )
        owner_of_pid[device] = best
    return owner_of_pid[pid]


def _fit(events: Events, work: BoolArray, host: BoolArray) -> float:
    """Share of the records `work` whose correlation a call of this host has, before the record starts."""
    calls = np.flatnonzero(host & events.in_cats(*cats.RUNTIME_CATS) & (events.correlation > 0))
    order = calls[np.argsort(events.correlation[calls], kind="stable")]
    ids, wanted = events.correlation[order], events.correlation[work]
    if not len(ids) or not len(wanted):
        return 0.0
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    good = (ids[at] == wanted) & (events.ts_ns[order[at]] <= events.ts_ns[work])
    return float(good.mean())
