"""Pipelines of tensor-parallel stages: what each rank issues in each group is what PyTorch issues in a fake world."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.graph import NodeKind
from tests.extrapolate import test_fake_world as fake

record = fake.record
WIDTH = 256
Call = tuple[str, int, int]

JOB = fake.variant(
    fake.PIPELINE_JOB,
    ("pipelining import PipelineStage\n", "pipelining import PipelineStage\nfrom transformer import split_tensors\n"),
    ("name, ranks, chunks, m, layers = ", "name, ranks, chunks, m, layers, tp = "),
    ('(ranks, world // ranks), mesh_dim_names=("pp", "dp_shard"))',
     '(ranks, world // ranks // tp, tp), mesh_dim_names=("pp", "dp_shard", "tp"))'),
    ("shape = Shape(layers=layers, batch=m)", f"shape = Shape(layers=layers, batch=m, width={WIDTH})"),
    ("    if world > ranks:\n", "    split_tensors(model, mesh['tp'])\n    if world > ranks * tp:\n"),
)  # fmt: skip


@pytest.fixture(scope="module")
def record_stage(tmp_path_factory: pytest.TempPathFactory) -> fake.Recorder:
    """record_stage(world, rank, schedule, ranks, chunks, m, layers, tp) → what that rank records."""
    return fake.stage_recorder(tmp_path_factory.mktemp("tensor_stages"), JOB)


def made(state: State, home: int) -> fake.Structure:
    """The structure of one pipeline rank (column 0) of a rewritten graph, messages named by their direction."""
    graph, rank = state.graph, state.columns[0][home]
    arrive = np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == rank) & (graph.instance >= 0))
    issuer = [int(graph.pred[graph.pred_ptr[node]]) if graph.pred_ptr[node + 1] > graph.pred_ptr[node] else node
              for node in arrive.tolist()]  # fmt: skip
    out: fake.Structure = {}
    for node in arrive[np.argsort(issuer, kind="stable")].tolist():
        item, name = graph.collectives[int(graph.instance[node])], graph.name_of(node)
        group = graph.groups[item.group]
        kind = "recv" if "RECV" in name else "send" if "SEND" in name else item.kind
        out.setdefault((group.size, group.stride), []).append((kind, item.bytes_in, item.bytes_out))
    return {key: value for key, value in out.items() if key[0] > 1}


def counted(calls: list[Call]) -> Counter[tuple[str, int]]:
    """Calls of a group by kind and bytes of the whole vector, whatever their order."""
    return Counter((kind, max(sides)) for kind, *sides in calls)


CASES = [
    (8, 4, "1F1B", 1, 2, 1), (8, 2, "1F1B", 1, 2, 0), (8, 4, "GPipe", 1, 2, 3), (8, 2, "Interleaved1F1B", 2, 2, 1),
    (8, 2, "ZBVZeroBubble", 2, 4, 0), (64, 4, "1F1B", 1, 4, 2), (64, 4, "InterleavedZeroBubble", 2, 4, 1),
    (1024, 8, "1F1B", 1, 8, 5), (1024, 4, "DualPipeV", 2, 4, 3),
]  # fmt: skip
"""(world, pipeline ranks, schedule, chunks, tensor ranks, pipeline rank that is compared)"""


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks", "schedule", "chunks", "tp", "home"), CASES)
@pytest.mark.parametrize("base", ["fsdp2", "tp"])
def test_tensor_parallel_stages_issue_what_pytorch_does(
    record: fake.Recorder, record_stage: fake.Recorder, world: int, ranks: int, schedule: str, chunks: int, tp: int,
    home: int, base: str,
) -> None:  # fmt: skip
    """From FSDP alone, or TP2 with FSDP, to tensor-parallel stages with FSDP over the rest: every group's calls."""
    sizes = ("--layers", "8", "--batch", "1", "--width", str(WIDTH))
    job = record(8, "--strategy", base, *sizes, *(("--tp-size", "2") if base == "tp" else ()))
    start = Layout(fsdp=4, tp=2) if base == "tp" else Layout(fsdp=8)
    state = fake.state_of(job, start, default_pg="fsdp" if base == "fsdp2" else "dp")
    shards = world // ranks // tp
    target = Layout(fsdp=shards, tp=tp, pp=ranks, microbatches=8, schedule=schedule, chunks=chunks)
    expected = fake.issued(record_stage(world, home * (world // ranks), schedule, ranks, chunks, 8, 8, tp))
    found = made(relayout(state, target), home)

    assert expected.keys() == found.keys()
    for group in ((tp, 1), (ranks, world // ranks)):
        assert expected[group] == found[group]
    assert {key: counted(calls) for key, calls in expected.items()} == {
        key: counted(calls) for key, calls in found.items()
    }
