"""Pipelines of DDP modules: the buckets of each stage are those that PyTorch makes of its module in a fake world."""

from __future__ import annotations

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
JOB = fake.variant(
    fake.PIPELINE_JOB,
    ("name, ranks, chunks, m, layers = ", "name, ranks, chunks, m, layers, width, cap = "),
    ('"dp_shard"))', '"dp_replicate"))'),
    ("batch=m)", "batch=m, width=width)"),
    (
        """        for unit in (model.embedding, *model.blocks, model.head):
            if unit is not None:
                fully_shard(unit, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
""",
        """        model = torch.nn.parallel.DistributedDataParallel(
            model, process_group=mesh["dp_replicate"].get_group(), bucket_cap_mb=cap or None, gradient_as_bucket_view=True
        )
""",
    ),
)


@pytest.fixture(scope="module")
def record_ddp(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """record_ddp(world, rank, schedule, ranks, chunks, m, layers, width, cap) → what that rank records."""
    return fake.stage_recorder(tmp_path_factory.mktemp("ddp_stages"), JOB)


def reduced(state: State, home: int) -> fake.Structure:
    """Collectives of one pipeline rank (column 0) of a rewritten graph in order of issue, without its messages."""
    graph, out = state.graph, {}
    for node in np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == state.columns[0][home])).tolist():
        item = graph.collectives[int(graph.instance[node])]
        group = graph.groups[item.group]
        if group.axis != "pp":
            out.setdefault((group.size, group.stride), []).append((item.kind, item.bytes_in, item.bytes_out))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ranks", "schedule", "chunks", "home", "cap"),
    [(8, 4, "1F1B", 1, 0, 0), (8, 4, "1F1B", 1, 1, 0), (8, 4, "1F1B", 1, 3, 0), (8, 4, "GPipe", 1, 3, 1),
     (8, 4, "1F1B", 1, 0, 1), (8, 2, "1F1B", 1, 1, 2), (8, 2, "Interleaved1F1B", 2, 1, 0), (8, 4, "LoopedBFS", 2, 0, 1),
     (64, 8, "1F1B", 1, 7, 0), (64, 4, "GPipe", 1, 2, 1), (1024, 8, "1F1B", 1, 0, 0), (1024, 4, "1F1B", 1, 3, 1)],
)  # fmt: skip
def test_buckets_of_stages_are_those_of_pytorch(
    record_ddp: Recorder, world: int, ranks: int, schedule: str, chunks: int, home: int, cap: int
) -> None:
    """From DDP over two ranks to DDP of each stage's module: groups, counts, bytes and order of all reductions."""
    base = record_ddp(2, 0, "1F1B", 1, 1, 8, 8, 128, cap)
    state = fake.state_of(base, Layout(dp=2), mesh_dp_replicate="dp")
    target = Layout(dp=world // ranks, pp=ranks, microbatches=8, schedule=schedule, chunks=chunks)
    recorded = fake.issued(record_ddp(world, home * (world // ranks), schedule, ranks, chunks, 8, 8, 128, cap))
    expected = {
        group: kept for group, calls in recorded.items() if (kept := [c for c in calls if c[0] not in ("send", "recv")])
    }

    assert expected == reduced(relayout(state, target), home)
