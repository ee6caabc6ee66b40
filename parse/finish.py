"""Turns the matched table of members into Collectives: numbered by time, on the job's clock, with wait and transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scaletrace.parse import clocks as clock_tools
from scaletrace.parse import waits
from scaletrace.parse.collectives import Table, rung_of
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.groups import Groups
from scaletrace.parse.health import Health
from scaletrace.parse.job import Clock, Collectives, Group
from scaletrace.parse.members import P2P


def finish(
    table: Table,
    groups: Groups,
    ranks: Sequence[int],
    world: int,
    clocks: Mapping[int, Clock],
    health: Health,
) -> Collectives:
    """The table in its final order and shape: instances by first start, members by rank, times on the job's clock."""
    start = clock_tools.apply(clocks, table.rank, table.start_ns)
    end = clock_tools.apply(clocks, table.rank, table.end_ns)
    order = np.lexsort((table.rank, table.instance))
    instance = table.instance[order]
    first = np.flatnonzero(np.r_[True, instance[1:] != instance[:-1]]) if len(order) else np.zeros(0, np.int64)
    begun = np.minimum.reduceat(start[order], first) if len(first) else first
    number = np.empty(len(first), np.int64)
    number[np.argsort(begun, kind="stable")] = np.arange(len(first))
    renumbered = np.empty(len(order), np.int64)
    renumbered[order] = np.repeat(number, np.diff(np.r_[first, len(order)]))
    order = np.lexsort((table.rank, renumbered))
    instance = renumbered[order]
    first = np.flatnonzero(np.r_[True, instance[1:] != instance[:-1]]) if len(order) else np.zeros(0, np.int64)
    size = np.diff(np.r_[first, len(order)])
    matched = np.repeat(_full(table, order, first, size, groups.groups, ranks), size)
    alone = np.repeat(size == 1, size) & ~_single(table, order, groups.groups, world)
    comparable = clock_tools.comparable(clocks, table.rank)[order]
    comparable = np.repeat(np.logical_and.reduceat(comparable, first), size) if len(first) else comparable
    wait, transfer = waits.split(
        first,
        size,
        table.rank[order],
        table.kind[order],
        table.root[order],
        start[order],
        end[order],
        table.on_device[order] > 0,
        comparable,
        alone | ~matched,
    )
    unmatched = int(np.sum(~matched))
    _report(table, order, first, size, start, end, matched, groups.groups, ranks, health)
    take = {
        name: getattr(table, name)[order]
        for name in ("rank", "event", "host_event", "kind", "group", "seq", "bytes_in", "bytes_out")
    }
    return Collectives(
        instance=instance,
        start_ns=start[order],
        end_ns=end[order],
        wait_ns=wait,
        transfer_ns=transfer,
        matched=matched,
        rung=rung_of(table),
        unmatched=unmatched,
        **take,
    )


def _full(
    table: Table,
    order: IntArray,
    first: IntArray,
    size: IntArray,
    groups: Sequence[Group],
    ranks: Sequence[int],
) -> BoolArray:
    """For each instance whether all members that are present in the job are in it."""
    present = set(ranks)
    expected = np.array([len(present.intersection(group.members)) for group in groups] + [len(ranks)], np.int64)
    lead = order[first] if len(first) else order[:0]
    need = expected[np.where(table.group[lead] >= 0, table.group[lead], len(groups))]
    p2p = np.isin(table.kind[lead], list(P2P))
    peers = np.isin(table.peer[lead], list(present))
    need = np.where(p2p, np.where(peers, 2, 1), need)
    return np.asarray(size >= need, np.bool_)


def _single(table: Table, order: IntArray, groups: Sequence[Group], world: int) -> BoolArray:
    """Members whose group holds nobody else."""
    sizes = np.array([group.size for group in groups] + [world], np.int64)
    lone = sizes[np.where(table.group[order] >= 0, table.group[order], len(groups))] == 1
    return np.asarray(lone, np.bool_) & ~np.isin(table.kind[order], list(P2P))


def _report(
    table: Table,
    order: IntArray,
    first: IntArray,
    size: IntArray,
    start: IntArray,
    end: IntArray,
    matched: BoolArray,
    groups: Sequence[Group],
    ranks: Sequence[int],
    health: Health,
) -> None:
    """Count the unmatched members: those that the windows of other ranks do not cover, and the rest."""
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for group in np.unique(table.group).tolist():
        for rank in ranks:
            mine = (table.rank == rank) & (table.group == group)
            if mine.any():
                spans[(group, rank)] = (int(start[mine].min()), int(end[mine].max()))
    outside = inside = 0
    for k in np.flatnonzero(~matched[first]).tolist() if len(first) else []:
        rows = order[first[k] : first[k] + size[k]]
        group = int(table.group[rows[0]])
        expected = set(groups[group].members if group >= 0 else ranks).intersection(ranks)
        lacking = expected.difference(table.rank[rows].tolist())
        begun, ended = int(start[rows].min()), int(end[rows].max())
        gone = [(group, rank) not in spans or _beyond(spans[(group, rank)], begun, ended) for rank in lacking]
        if all(gone):
            outside += len(rows)
        else:
            inside += len(rows)
    if outside:
        health.unmatched["members of collectives outside the common window of the ranks"] += outside
    if inside:
        health.unmatched["members of collectives without all their partners"] += inside


def _beyond(span: tuple[int, int], begun: int, ended: int) -> bool:
    """Whether something from `begun` to `ended` began before the span or ended after it."""
    return begun < span[0] or ended > span[1]
