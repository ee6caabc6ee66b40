"""Sharded pipelines: what each stage gathers, scatters and sends is what PyTorch's stages do in a fake world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.job import Job
from tests.extrapolate import test_fake_world as fake

Recorder = Callable[..., Job]
record, record_stage = fake.record, fake.record_stage
KINDS = ("all_gather", "reduce_scatter")


def sharded(job: Job) -> Counter[tuple[str, int]]:
    """Gathers and scatters of the recorded rank's step, with the bytes of the whole vector."""
    out: Counter[tuple[str, int]] = Counter()
    for calls in fake.issued(job).values():
        out.update((kind, max(sides)) for kind, *sides in calls if kind in KINDS)
    return out


def laid(state: State, home: int) -> Counter[tuple[str, int]]:
    """The same of one pipeline rank (column 0) of a rewritten graph."""
    graph, rank = state.graph, state.columns[0][home]
    out: Counter[tuple[str, int]] = Counter()
    for node in np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == rank)).tolist():
        item = graph.collectives[int(graph.instance[node])]
        if item.kind in KINDS:
            out[item.kind, max(item.bytes_in, item.bytes_out)] += 1
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ranks", "schedule", "chunks", "home"),
    [(8, 4, "1F1B", 1, 1), (8, 4, "1F1B", 1, 0), (8, 4, "GPipe", 1, 2), (8, 4, "1F1B", 1, 3), (8, 4, "Interleaved1F1B", 2, 1),
     (8, 4, "LoopedBFS", 2, 3), (8, 4, "InterleavedZeroBubble", 2, 1), (8, 4, "InterleavedZeroBubble", 2, 3),
     (8, 4, "InterleavedZeroBubble", 1, 3), (8, 4, "ZBVZeroBubble", 2, 0), (8, 4, "ZBVZeroBubble", 2, 3),
     (8, 4, "DualPipeV", 2, 0), (4, 2, "Interleaved1F1B", 4, 1), (4, 2, "InterleavedZeroBubble", 4, 0), (64, 8, "ZBVZeroBubble", 2, 0), (64, 8, "1F1B", 1, 3), (1024, 8, "1F1B", 1, 5)],
)  # fmt: skip
def test_stages_gather_and_scatter_what_pytorch_does(
    record: Recorder, record_stage: Recorder, world: int, ranks: int, schedule: str, chunks: int, home: int
) -> None:
    """From FSDP alone to stages with FSDP over the rest; stages whose split backward finds no weights scatter nothing."""
    layers = max(8, ranks * chunks)
    base = record(2, "--strategy", "fsdp2", "--layers", str(layers), "--batch", "1")
    state = fake.state_of(base, Layout(fsdp=2), default_pg="fsdp")
    target = Layout(fsdp=world // ranks, pp=ranks, microbatches=8, schedule=schedule, chunks=chunks)
    rank = home * (world // ranks)

    expected = sharded(record_stage(world, rank, schedule, ranks, chunks, 8, layers))
    assert expected == laid(relayout(state, target), home)
