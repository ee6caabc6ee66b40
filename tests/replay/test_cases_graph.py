"""Faults of real traces that concern dependencies: the graph gives the right answer of docs/cases for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from tests.parse.traces import edges, named


@pytest.fixture
def case(shared_data: Path) -> Any:
    """The graph and the right answer of one case."""
    answers = json.loads((shared_data / "cases" / "expected.json").read_text())

    def of(number: int) -> tuple[Built, Any]:
        return build(load(shared_data / "cases" / str(number))), answers[str(number)]

    return of


def _reaches(built: Built, src: str, dst: str) -> bool:
    """Whether a path leads from one named node to another."""
    graph = built.graph
    reached = np.zeros(len(graph), np.bool_)
    reached[named(built, src)] = True
    for node in range(len(graph)):
        preds = graph.pred[graph.pred_ptr[node] : graph.pred_ptr[node + 1]]
        reached[node] |= bool(reached[preds].any())
    return bool(reached[named(built, dst)].all())


def test_case_40_graph_launch_reaches_all_its_kernels(case: Any) -> None:
    """One cudaGraphLaunch leads to the first kernel, the stream to the rest, and all of them are on the path."""
    built, answer = case(40)
    path = critical_path(replay(built.graph)).to_frame()["name"].tolist()

    assert answer["kernels_of_launch"] == sum(name.startswith("k") for name in path)
    assert {("cudaGraphLaunch", "k0"), ("k0", "k1"), ("k1", "k2"), ("k2", "k3"), ("k3", "k4")} == edges(built)


def test_case_43_a_kernel_belongs_to_the_step_of_its_launch(case: Any) -> None:
    """The backward kernel runs far beyond its annotation and still belongs to step 1."""
    built, answer = case(43)
    device = built.graph.nodes(NodeKind.KERNEL) & (built.graph.step == 1)
    low = min(int(built.measured.start_ns[device].min()), 2**62)
    origin = int(built.measured.start_ns.min())

    assert answer["step1_gpu_span"] == [
        (low - origin) // 1000,
        (int(built.measured.end_ns[device].max()) - origin) // 1000,
    ]


def test_case_47_recorded_event_names_its_stream(case: Any) -> None:
    """The recorded wait leads from the kernel of the awaited stream, not from the thread's last launch."""
    built, answer = case(47)

    assert _reaches(built, *answer["edge"])
    assert not _reaches(built, *answer["not_edge"])


def test_case_48_unrecorded_wait_is_inferred(case: Any) -> None:
    """Without cuda_sync the wait is inferred, the refuted candidate is counted, and k_s2 isn't free at 35 us."""
    built, answer = case(48)
    start = replay(built.graph).start_ns

    assert _reaches(built, *answer["edge"])
    assert 1 == sum(built.health.guessed.values())
    assert int(start[named(built, "k_s2")[0]] - start.min()) > 35_000


def test_case_50_blocking_copy_is_a_wait(case: Any) -> None:
    """While the device works the copy call weighs nothing: the path is the gemm and the copy."""
    built, answer = case(50)
    path = critical_path(replay(built.graph)).to_frame().set_index("name")["dur_ns"] // 1000

    assert answer["critical_path_us"] == {
        "gemm": int(path["gemm"]),
        "memcpy": int(path["Memcpy DtoH (Device -> Pageable)"]),
    }
    assert 0 == path.get("cudaMemcpyAsync", 0)


def test_case_51_no_edge_goes_back_in_time(case: Any) -> None:
    """The wait that would lead backwards makes no edge, is counted, and the graph is a DAG."""
    built, answer = case(51)

    assert answer["edge_b_after_a"] is (("a", "b") in edges(built))
    assert answer["graph_is_dag"] is built.graph.is_topological()
    assert (
        1
        == built.health.unmatched["recorded stream waits whose event is not in the trace (the graph is a lower bound)"]
    )


def test_case_52_stream_order_is_an_edge(case: Any) -> None:
    """A collective on the stream of a kernel waits for it, and the device span is that of both."""
    built, answer = case(52)
    timeline = replay(built.graph)
    device = ~built.graph.nodes(NodeKind.HOST, NodeKind.LAUNCH)

    assert tuple(answer["edge"]) in edges(built)
    span = int(timeline.end_ns[device].max() - timeline.start_ns[device].min())
    assert answer["gpu_span_us"] == pytest.approx(span / 1000, abs=1)


def test_case_64_waiting_is_not_transferring(case: Any) -> None:
    """Of rank 0's 500 us in the collective 400 are waiting for rank 1."""
    built, answer = case(64)
    timeline = replay(built.graph)
    arrive, transfer = (np.flatnonzero(built.graph.nodes(k)) for k in (NodeKind.ARRIVE, NodeKind.TRANSFER))
    waited = {
        f"rank{built.graph.rank[t]}": {
            "wait_us": int(timeline.start_ns[t] - timeline.end_ns[a]) // 1000,
            "transfer_us": int(built.graph.dur_ns[t]) // 1000,
        }
        for a, t in zip(arrive, transfer, strict=True)
    }

    assert {"rank0": {"wait_us": 400, "transfer_us": 100}, "rank1": answer["rank1"]} == waited
    assert 2 == int((built.graph.edge_kind == EdgeKind.RENDEZVOUS).sum())
