"""Turns recorded gradient buckets into those that a pipeline's stages have: how many bytes, when ready, parts of which.

DDP fills its buckets along the gradients of one module in the order in which they are ready. Where the recorded buckets
are found to be runs of the weights that the operators read, the plan follows the same rule for each stage's module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.rewrite.buckets import Bucket, buckets_of, ddp_buckets
from scaletrace.extrapolate.rewrite.state import State, axis_of_item
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient in the order of readiness: its unit, and that it is number `at` of the `of` gradients there."""

    unit: int
    at: int
    of: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Pass:
    """The buckets that one backward pass issued on some ranks, and the gradients that they are made of.

    ends: how many gradients the buckets up to each hold, () where they are no runs of the weights that are known
    """

    step: int
    micro_batch: int
    ranks: tuple[int, ...]
    units: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A bucket of one stage: it is ready with a gradient of `unit` and carries parts of the recorded buckets `olds`.

    last: number of the gradient in the run's order, -1 where the gradients are not known
    """

    stage: int
    size_bytes: int
    unit: int
    olds: tuple[int, ...]
    last: int


def line_of(state: State, units: Sequence[int], width: int) -> list[Gradient]:
    """Gradients of some units in the order in which a backward pass has them ready."""
    return [
        Gradient(unit, at, len(state.work.weights[unit]), weight.elements * width)
        for unit in sorted(units, reverse=True)
        for at, weight in enumerate(reversed(state.work.weights[unit]))
    ]


def passes_of(state: State) -> tuple[int, list[Pass]]:
    """(bytes of an element, the recorded buckets by step, ranks and backward pass); 0 bytes where weights don't fit."""
    graph, anatomy = state.graph, state.anatomy
    if _scatters(graph):
        return 0, []
    found: dict[tuple[int, tuple[int, ...]], list[Bucket]] = {}
    for step, buckets in buckets_of(graph).items():
        for bucket in buckets:
            found.setdefault((step, tuple(sorted(bucket.arrive))), []).append(bucket)
    units = {ranks: _held(graph, anatomy, ranks) for _, ranks in found}
    for width in (4, 2, 8):
        runs: list[Pass] = []
        for (step, ranks), buckets in found.items():
            sizes = [gradient.size_bytes for gradient in line_of(state, units[ranks], width)]
            passes = _passes([graph.collectives[bucket.instance].bytes_in for bucket in buckets], sizes)
            if not passes:
                break
            for begin, ends in passes:
                mine = tuple(buckets[begin : begin + len(ends)])
                runs.append(Pass(step, _micro_batch(graph, anatomy, mine), ranks, units[ranks], mine, ends))
        else:
            return width, runs
    return 0, [
        Pass(step, batch, ranks, units[ranks], tuple(mine), ())
        for (step, ranks), buckets in found.items()
        for batch, mine in _by_batch(graph, anatomy, buckets).items()
    ]


def _scatters(graph: Graph) -> bool:
    """Whether gradients are scattered, so that what is all-reduced are replicas of shards."""
    return any(
        item.kind == "reduce_scatter" and axis_of_item(item, graph.groups) in ("dp", "fsdp", "world", "")
        for item in graph.collectives
    )


def _held(graph: Graph, anatomy: Anatomy, ranks: Sequence[int]) -> tuple[int, ...]:
    """Units that ranks work on."""
    mine = np.isin(graph.rank, ranks) & (anatomy.unit >= 0) & (anatomy.phase == int(Phase.FORWARD))
    return tuple(np.unique(anatomy.unit[mine]).tolist())


def _passes(buckets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(first bucket, ends in gradients) of every backward pass, if all buckets are runs of whole gradients; else []."""
    borders = {total: number + 1 for number, total in enumerate(accumulate(sizes))}
    whole, held, begin = sum(sizes), 0, 0
    ends: list[int] = []
    out: list[tuple[int, tuple[int, ...]]] = []
    for at, size in enumerate(buckets):
        held += size
        if held not in borders:
            return []
        ends.append(borders[held])
        if held == whole:
            out.append((begin, tuple(ends)))
            held, begin, ends = 0, at + 1, []
    return [] if ends else out


def _micro_batch(graph: Graph, anatomy: Anatomy, buckets: Sequence[Bucket]) -> int:
    """The micro batch that issued some buckets; what a stall has moved out of every pass is told by the others."""
    nodes = [node for bucket in buckets for node in bucket.arrive.values()]
    known = anatomy.micro_batch[nodes]
    return int(known.max()) if (known >= 0).any() else max(0, anatomy.micro_batches - 1)


def _by_batch(graph: Graph, anatomy: Anatomy, buckets: Sequence[Bucket]) -> dict[int, list[Bucket]]:
    out: dict[int, list[Bucket]] = {}
    batch = _micro_batch(graph, anatomy, buckets)
    for bucket in buckets:
        known = anatomy.micro_batch[list(bucket.arrive.values())].max()
        batch = int(known) if known >= 0 else batch
        out.setdefault(batch, []).append(bucket)
    return out


def distinct(lines: Sequence[list[Gradient]], runs: Sequence[Pass]) -> list[tuple[Sequence[int], Sequence[int]]]:
    pairs = {(tuple(each.size_bytes for each in line), run.ends) for line, run in zip(lines, runs, strict=True)}
    return list(pairs)


def by_gradient(
    line: Sequence[Gradient],
    run: Pass,
    stage_of: IntArray,
    stages: Sequence[Sequence[int]],
    whole: Sequence[Gradient],
    caps: tuple[int, int],
) -> list[Planned]:
    """DDP's own buckets of every stage that are ready on the run's ranks, in order of readiness."""
    number = {(each.unit, each.at): at for at, each in enumerate(line)}
    out = []
    for stage in {int(stage_of[unit]) for unit in run.units}:
        mine = [each for each in whole if stage_of[each.unit] == stage]
        begin = 0
        for end in ddp_buckets([each.size_bytes for each in mine], *caps):
            part, last = mine[begin:end], mine[end - 1]
            begin = end
            if (last.unit, last.at) not in number:
                continue  # ready on the ranks of another recorded stage
            here = [number[each.unit, each.at] for each in part if (each.unit, each.at) in number]
            olds = sorted({int(np.searchsorted(run.ends, at, side="right")) for at in here})
            size = sum(each.size_bytes for each in part)
            out.append(Planned(stage, size, last.unit, tuple(olds), number[last.unit, last.at]))
    return sorted(out, key=lambda each: each.last)


def by_share(state: State, run: Pass, stage_of: IntArray) -> list[Planned]:
    """The recorded buckets, each cut where units that it carries are of different stages.

    A bucket carries the units that are done since the one before was issued, up to the one that issued it.
    """
    graph, anatomy = state.graph, state.anatomy
    weight = anatomy.parameters if anatomy.parameters.sum() else np.ones(len(anatomy.units))
    above, out = max(run.units, default=-1) + 1, []
    for at, bucket in enumerate(run.buckets):
        known = anatomy.unit[list(bucket.arrive.values())]
        known = known[(known >= 0) & (known < above)]
        last = int(known.max()) if len(known) else max(above - 1, min(run.units, default=0))
        units = [unit for unit in run.units if last <= unit < above] or [last]
        above = last
        size = graph.collectives[bucket.instance].bytes_in
        parts: dict[int, list[int]] = {}
        for unit in units:
            parts.setdefault(int(stage_of[unit]), []).append(unit)
        shares = {stage: float(weight[mine].sum()) for stage, mine in parts.items()}
        total, given = sum(shares.values()), 0
        for place, (stage, mine) in enumerate(sorted(parts.items(), reverse=True)):
            rest = place == len(parts) - 1
            piece = size - given if rest else round(size * shares[stage] / total) if total else 0
            given += piece
            if piece:
                out.append(Planned(stage, piece, min(mine), (at,), -1))
    return out
