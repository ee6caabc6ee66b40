"""Turns what a job's trace can't tell of its scaling into sentences of the health report, before any number is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.calibrate import Evidence
from scaletrace.extrapolate.cluster import Cluster, Link
from scaletrace.extrapolate.costs import FAMILY
from scaletrace.extrapolate.layout import DATA_AXES, Layout, axis_of
from scaletrace.extrapolate.operators import BACKWARD
from scaletrace.extrapolate.rewrite.gradients import SCALAR_BYTES
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.replay.stragglers import stragglers
from scaletrace.replay.timeline import Timeline

STANDS_OUT = 0.05
"""A rank whose own delay takes this share of the measured time is named."""
SURE = 0.9
"""A group whose axis is less certain than this is named with its certainty."""


LEAST_CERTAIN = 0.25
"""Bands are widened by the inverse of the certainty, at most to four times their width."""


def costs(found: Sequence[Evidence], cluster: Cluster, health: Health) -> None:
    """Say what the costs of collectives rest on."""
    if not found:
        health.note(
            "No transfer of the trace could be used for calibration: communication that changes with the size costs what "
            "the prior says, the rest keeps its measured time."
        )
    elif cluster.tiers[0].link is Link.TCP:
        health.note(
            "Transfers are as measured between these ranks; for another network than theirs, give --cluster, and theirs as --recorded-on."
        )
    if cluster.backend == "nccl" and found:
        largest = max(item.ranks for item in found)
        if largest <= cluster.node_size:
            health.note(f"All measured groups fit one domain of {cluster.node_size}: costs beyond it are the prior's.")


def straggler(timeline: Timeline, health: Health) -> None:
    """Say so where a slow rank is stretched along: its delay shows as communication of the ranks that wait for it."""
    worst = max(stragglers(timeline), key=lambda found: found.shorter_by_ns, default=None)
    if worst is not None and worst.shorter_by_ns > STANDS_OUT * timeline.makespan_ns:
        share = worst.shorter_by_ns / timeline.makespan_ns
        health.note(
            f"Rank {worst.rank} is slower than its peers: at their pace the measured window would be {share:.0%} shorter, "
            "whether or not others waited for it (see replay). Its delay is stretched along, as waiting that counts as "
            f"communication; see what it costs with whatif --set rank{worst.rank}.delay=none."
        )


def has_data_axis(graph: Graph) -> bool:
    """Whether any collective of the job belongs to a data axis, so that growing it costs something.

    A loss that is averaged does not, nor does what a lone rank sends to itself while nothing waits for it: where it would
    be waited for among more ranks was not seen.
    """
    awaited = _awaited(graph)
    found = {
        axis_of(graph.groups[item.group].axis)
        for at, item in enumerate(graph.collectives)
        if item.group >= 0
        and not 0 <= max(item.bytes_in, item.bytes_out) <= SCALAR_BYTES
        and (graph.groups[item.group].size > 1 or at in awaited)
    }
    return bool(found & set(DATA_AXES))


def _awaited(graph: Graph) -> set[int]:
    """Collectives whose end decides when other work may start."""
    of = np.repeat(np.arange(len(graph)), np.diff(graph.pred_ptr))
    moves = graph.kind == NodeKind.TRANSFER
    work = np.isin(graph.kind[of], (NodeKind.HOST, NodeKind.LAUNCH, NodeKind.WAIT, NodeKind.KERNEL, NodeKind.COPY))
    kept = moves[graph.pred] & work
    return set(np.unique(graph.instance[graph.pred[kept]]).tolist())


def data_axis(graph: Graph, health: Health) -> None:
    """Say so where growing the data axis would add ranks that never talk, or what they say has no cost model."""
    unmodelled = sum(item.kind not in FAMILY for item in graph.collectives)
    if unmodelled:
        health.guessed["collectives of a kind without a cost model, which keep their measured time"] += unmodelled
    if not has_data_axis(graph):
        health.note(
            "The trace holds no collective of a data axis that work waits for, so what more data-parallel ranks send each "
            "other is in no number here: a step that rises does so by the expected wait for the slowest of more ranks "
            "alone. Record the job with at least two of them to have gradients synchronised."
        )


NO_BACKWARD = 0.6
"""How certain it is that all-reduces of an unknown group are tensor parallel where nothing is trained."""
MOST_TENSOR = 72
"""Ranks of the largest NVLink domain, which tensor parallelism stays within."""


def unnamed(job: Job, graph: Graph, health: Health) -> Graph:
    """The graph with an axis for collectives of which no record names a group, and what it was taken for.

    Gradients need a backward pass: where operators were recorded and none belongs to one, what is all-reduced again and
    again are activations. Elsewhere the group stays without a name and counts as dp.
    """
    lost = [at for at, group in enumerate(graph.groups) if not group.axis and group.size > 1]
    small = all(graph.groups[at].size <= MOST_TENSOR for at in lost)
    reduces = [item for item in graph.collectives if item.group in lost and item.kind in ("all_reduce", "custom")]
    if not reduces:
        return graph
    ops = any(bool(trace.events.in_cats("cpu_op").any()) for trace in job.ranks)
    trained = any(text.startswith(BACKWARD) for trace in job.ranks for text in trace.events.strings)
    if (
        not ops
        or trained
        or not small
        or len(reduces) < 2 * max(1, max((len(trace.steps) for trace in job.ranks), default=1))
    ):
        health.note(
            f"No record names the group of {len(reduces)} all-reduces: they are taken to join all {graph.groups[lost[0]].size} "
            "ranks as dp. If they do not, name the groups with --axes."
        )
        return graph
    health.note(
        f"No record names the group of {len(reduces)} all-reduces, and no operator belongs to a backward pass: they are "
        f"taken to be tensor parallel with {NO_BACKWARD:.0%} certainty. If they are not, name the groups with --axes."
    )
    health.guessed["all-reduces without a group taken to be tensor parallel, since nothing is trained"] += len(reduces)
    named = tuple(replace(group, axis="tp") if at in lost else group for at, group in enumerate(graph.groups))
    return replace(graph, groups=named)


def axes(job: Job, graph: Graph, layout: Layout, health: Health) -> float:
    """Name the layout that the groups are taken for, and return the certainty of the least certain axis that decides it."""
    moved = {item.group for item in graph.collectives if item.group >= 0 and item.kind != "barrier"}
    used = {(graph.groups[at].axis, graph.groups[at].size) for at in moved if graph.groups[at].size > 1}
    told = any(axis in DATA_AXES for axis, _ in used)
    doubts = [
        group
        for group in job.groups
        if group.size > 1
        and (group.axis, group.size) in used
        and group.confidence < SURE
        # A world-wide group is the data axis only where no other is: beside one it sums a loss or a norm.
        and not (told and group.axis in ("world", ""))
    ]
    if not doubts:
        return 1.0
    worst = min(doubts, key=lambda group: group.confidence)
    named = "dp" if worst.axis in ("world", "") else worst.axis
    health.note(
        f"The job is taken to be {layout}: its group of {worst.size} ranks {max(worst.stride, 1)} apart is taken for "
        f"{named} with {worst.confidence:.0%} certainty, inferred from how it is used. Bands of other sizes are "
        f"{1 / max(worst.confidence, LEAST_CERTAIN):.2g} times as wide for that. If it is not, name the axes with --axes."
    )
    return max(worst.confidence, LEAST_CERTAIN)
