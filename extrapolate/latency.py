"""Turns a device's kernels into how much of each is neither launch nor work, so that no change of size stretches it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.kernels import Ceilings, Shape, classify, latency_s, shape_of
from scaletrace.extrapolate.nodework import NodeWork
from scaletrace.parse.build import Built
from scaletrace.parse.cats import OP_CATS
from scaletrace.parse.events import Events
from scaletrace.parse.graph import NodeKind


def with_latency(built: Built, work: NodeWork, ceilings: Ceilings) -> NodeWork:
    """The work with what kernels wait beside launch and work (kernels.latency_s) among what nothing stretches.

    Only the operator that launched a kernel says what the kernel does, and only if both are of one kind: a compiled
    stretch has one operator and many kernels.
    """
    graph = built.graph
    kernels = work.computes & (graph.kind == int(NodeKind.KERNEL)) & (graph.event >= 0)
    held = work.held_ns.copy() if len(work.held_ns) else np.zeros(len(graph))
    kinds = [classify(name) for name in graph.names]
    for trace in built.job.ranks:
        events = trace.events
        row_of = _operators(events)
        known: dict[tuple[int, int], Shape | None] = {}
        dims, types = events.texts("Input Dims"), events.texts("Input type")
        for node in np.flatnonzero(kernels & (graph.rank == trace.rank)).tolist():
            row = row_of.get(int(events.external_id[graph.event[node]]))
            if row is None or work.shape[node] is None:
                continue
            key = (int(events.name[row]), int(dims[row]))
            if key not in known:
                kind = events.strings[int(types[row])] if types[row] >= 0 else None
                known[key] = shape_of(events.strings[key[0]], events.strings[key[1]], kind)
            own = known[key]
            if own is not None and own.work is kinds[int(graph.name[node])]:
                held[node] += 1e9 * latency_s((float(graph.dur_ns[node]) - held[node]) * 1e-9, own, ceilings)
    return replace(work, held_ns=held)


def _operators(events: Events) -> dict[int, int]:
    """The operator with dimensions that carries each External id: the innermost, which is the last to begin."""
    rows = np.flatnonzero(events.in_cats(*OP_CATS) & (events.external_id >= 0) & (events.texts("Input Dims") >= 0))
    rows = rows[np.argsort(events.ts_ns[rows], kind="stable")]
    return dict(zip(events.external_id[rows].tolist(), rows.tolist(), strict=True))
