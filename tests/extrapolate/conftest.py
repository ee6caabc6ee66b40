"""A small measured-looking graph of a layered model: host thread, stream, micro batches, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.nodework import Mark, NodeWork, Role, Weight
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.graph import EdgeKind, Graph, GraphGroup, NodeKind

Layered = Callable[..., tuple[Graph, Anatomy]]


@pytest.fixture
def layered() -> Layered:
    """layered(layers, micro_batches, ranks=1, …) → (graph, anatomy) of forward, backward and optimizer."""
    return build_layered


def build_layered(
    layers: int,
    micro_batches: int,
    ranks: int = 1,
    *,
    forward_ns: int = 100,
    launch_ns: int = 2,
    gap_ns: int = 3,
    optimizer_ns: int = 960,
    reduce_ns: int = 0,
    steps: int = 1,
) -> tuple[Graph, Anatomy]:
    """Each unit launches one kernel (backward takes twice the forward); embedding and head take a tenth.

    With `reduce_ns` the last backward of each layer issues an all-reduce over all ranks on a stream of its own.
    """
    draft = Draft(groups=[GraphGroup("dp", ranks, 1)])
    rows: list[tuple[int, int, int, int]] = []
    host: list[int | None] = [None] * ranks
    stream: list[int | None] = [None] * ranks
    comm: list[int | None] = [None] * ranks

    current = [0]

    def add(*row: int) -> None:
        rows.append((row[0], row[1], row[2], current[0]))

    def unit(rank: int, number: int, phase: Phase, batch: int, dur_ns: int) -> int:
        launch = draft.node(NodeKind.LAUNCH, launch_ns, rank=rank, lane="thread 1", name=f"launch {number}")
        add(int(phase), number, batch)
        if host[rank] is not None:
            draft.edge(host[rank] or 0, launch, EdgeKind.PROGRAM, gap_ns)
        kernel = draft.node(NodeKind.KERNEL, dur_ns, rank=rank, lane="stream 7", name=f"gemm {number}")
        add(int(phase), number, batch)
        draft.edge(launch, kernel, EdgeKind.LAUNCH, 1)
        if stream[rank] is not None:
            draft.edge(stream[rank] or 0, kernel, EdgeKind.STREAM)
        host[rank], stream[rank] = launch, kernel
        return kernel

    def reduce(number: int, batch: int, kernels: list[int]) -> None:
        members = draft.collective("all_reduce", 0, 4096, [(rank, [kernels[rank]]) for rank in range(ranks)], reduce_ns)
        for _ in range(2 * ranks):
            add(int(Phase.BACKWARD), number, batch)
        for rank, node in enumerate(members):
            if comm[rank] is not None:
                draft.edge(comm[rank] or 0, node, EdgeKind.STREAM)
            comm[rank] = node

    last = layers + 1
    for step in range(steps):
        current[0] = step
        for batch in range(micro_batches):
            for number in range(last + 1):
                for rank in range(ranks):
                    unit(rank, number, Phase.FORWARD, batch, forward_ns // (10 if number in (0, last) else 1))
            for number in reversed(range(last + 1)):
                dur_ns = 2 * forward_ns // (10 if number in (0, last) else 1)
                kernels = [unit(rank, number, Phase.BACKWARD, batch, dur_ns) for rank in range(ranks)]
                if reduce_ns and batch == micro_batches - 1 and 0 < number < last:
                    reduce(number, batch, kernels)
        for rank in range(ranks):
            node = unit(rank, -1, Phase.OPTIMIZER, -1, optimizer_ns)
            if comm[rank] is not None:
                draft.edge(comm[rank] or 0, node, EdgeKind.EVENT_WAIT)
    table = np.array(rows)
    graph = replace(draft.graph(), step=table[:, 3].astype(np.int32))
    return graph, Anatomy(
        phase=table[:, 0].astype(np.uint8),
        unit=table[:, 1].astype(np.int32),
        micro_batch=table[:, 2].astype(np.int32),
        is_message=np.zeros(len(graph), np.bool_),
        units=("embedding", *(f"layer {i}" for i in range(layers)), "head"),
        is_layer=(False, *([True] * layers), False),
        parameters=np.array([50.0, *([100.0] * layers), 50.0]),
        boundary_bytes=1024,
        exact_ns=graph.dur_ns.astype(np.float64),
        rule="repeated operators",
    )


Stateful = Callable[..., State]
WIDTH, TOKENS, SEQ = 4096, 8192, 2048


@pytest.fixture
def stateful() -> Stateful:
    """stateful(layers, micro_batches, ranks=1, …) → the state of such a job on H100s, with shapes and roles."""
    return build_state


def build_state(layers: int, micro_batches: int, ranks: int = 1, **options: int) -> State:
    """Every layer is one column product, attention, one row product and a norm in turn, by kernel number."""
    graph, anatomy = build_layered(layers, micro_batches, ranks, **options)
    kinds = [
        (Role.COLUMN, Shape(Work.MATMUL, TOKENS, 3 * WIDTH, WIDTH)),
        (Role.HEADS, Shape(Work.ATTENTION, SEQ, SEQ, 128, TOKENS // SEQ * WIDTH // 128, causal=True)),
        (Role.ROW, Shape(Work.MATMUL, TOKENS, WIDTH, WIDTH)),
        (Role.WHOLE, Shape(Work.NORM, TOKENS, WIDTH)),
    ]
    shapes: list[Shape | None] = [None] * len(graph)
    role, mark = np.zeros(len(graph), np.uint8), np.zeros(len(graph), np.uint8)
    kernels = graph.kind == int(NodeKind.KERNEL)
    layer = np.array([*anatomy.is_layer, False])[anatomy.unit]
    for node in np.flatnonzero(kernels & layer).tolist():
        of_role, shapes[node] = kinds[(int(anatomy.unit[node]) - 1) % 4]
        role[node] = int(of_role)
        forward = anatomy.phase[node] == int(Phase.FORWARD)
        if of_role is Role.COLUMN:
            mark[node] = Mark.BEFORE_COLUMN if forward else Mark.AFTER_COLUMN_BACKWARD
        elif of_role is Role.ROW:
            mark[node] = Mark.AFTER_ROW if forward else Mark.BEFORE_ROW_BACKWARD
    weights = [(), *[(Weight((kinds[i % 4][1].columns, WIDTH), kinds[i % 4][0]),) if i % 2 == 0 else
               (Weight((WIDTH,), Role.WHOLE),) for i in range(layers)], ()]  # fmt: skip
    work = NodeWork(
        tuple(shapes), role, kernels, tuple(tuple(unit) for unit in weights), np.full(len(graph), -1, np.int32), mark
    )
    layout = Layout(dp=ranks, mbs=TOKENS // SEQ, microbatches=micro_batches, seq=SEQ)
    network = Network(Cluster.load("dgx_h100"))
    columns = tuple((rank,) for rank in range(ranks))
    return State(graph, anatomy, work, layout, network, Ceilings.of(network.cluster.device), columns)
