"""Turns the ids of an event table into the rank that each event belongs to, where several ranks were merged into one file.

Three ways of merging are in use: an argument "rank" on every event with shifted pids (TraceLens), pids that became
texts such as "[TP03] 1234" (SGLang), and plain concatenation, where only the host processes stay apart.
"""

from __future__ import annotations

import re

import numpy as np

from scaletrace.errors import NotATraceError
from scaletrace.parse import cats
from scaletrace.parse.events import MISSING, BoolArray, Events, IntArray

_TAGGED = re.compile(r"^\[([^\]]+)\]\s*(-?\w+.*)$")
_RANK_IN_TAG = re.compile(r"(\d+)")
_AGREEMENT = 0.95


def is_fused(events: Events) -> bool:
    """Whether the table holds the events of more than one rank."""
    return _by_argument(events) is not None or _by_tag(events) is not None or len(_host_pids(events)) > 1


def owners(events: Events, source: str) -> tuple[IntArray, str] | None:
    """(rank of each event, -1 where it belongs to none; how they were told apart), None where there is but one rank.

    Raises NotATraceError, naming `source`, where the ids of different ranks can't be told apart.
    """
    found = _by_argument(events)
    if found is not None:
        return found, "the argument rank"
    found = _by_tag(events)
    if found is not None:
        return found, "the tag in the pid"
    if len(_host_pids(events)) > 1:
        return _by_process(events, source), "the host process"
    return None


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
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


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


def _by_process(events: Events, source: str) -> IntArray:
    """Rank of each event by host process; a device belongs to the process whose launches its records fit."""
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
                f"{source}: {len(hosts)} ranks are fused into one file and the GPU records of process {device} "
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
