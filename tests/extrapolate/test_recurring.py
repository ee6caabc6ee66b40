"""Collectives whose launches a trace lacks are placed as in the other steps, which repeat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.rewrite.recurring import like_other_steps
from scaletrace.parse.graph import EdgeKind, Graph, GraphGroup, NodeKind
from tests.extrapolate.conftest import build_layered

BEHIND = (int(Phase.BACKWARD), 1, 0), (int(Phase.BACKWARD), 0, 0), (int(Phase.OPTIMIZER), -1, -1)
"""Where the three collectives of a step belong: two scatters of layers and a gather."""
ASTRAY = int(Phase.FORWARD), 0, 0


def steps(launched: list[list[bool]]) -> tuple[Graph, Anatomy]:
    """A step of two scatters and a gather for each list; what was not launched lies astray, with a stall ahead of it."""
    draft = Draft(groups=[GraphGroup("fsdp", 8, 1)])
    places, numbers = [], []

    def add(step: int, place: tuple[int, int, int]) -> None:
        numbers.append(step)
        places.append(place)

    for step, calls in enumerate(launched):
        for at, (kind, called) in enumerate(
            zip(("reduce_scatter", "reduce_scatter", "all_gather"), calls, strict=True)
        ):
            place = BEHIND[at] if called else ASTRAY
            if called:
                call = draft.node(NodeKind.LAUNCH, 5, lane="thread", name="launch")
                add(step, place)
            else:
                draft.node(NodeKind.STALL, 3, name="stall")
                add(step, place)
            (transfer,) = draft.collective(kind, 0, 64, [(0, [])], 10)
            add(step, place)
            add(step, place)
            if called:
                draft.edge(call, transfer - 1, EdgeKind.LAUNCH)
    graph = replace(draft.graph(), step=np.array(numbers, np.int32))
    anatomy = build_layered(2, 1)[1]
    phase, unit, batch = np.array(places).T
    return graph, replace(
        anatomy,
        phase=phase.astype(np.uint8),
        unit=unit.astype(np.int32),
        micro_batch=batch.astype(np.int32),
        is_message=np.zeros(len(graph), np.bool_),
        exact_ns=graph.dur_ns.astype(np.float64),
    )


def placed(graph: Graph, anatomy: Anatomy, step: int) -> list[tuple[int, int, int]]:
    """Phase, unit and micro batch of the transfers of a step."""
    nodes = np.flatnonzero((graph.kind == int(NodeKind.TRANSFER)) & (graph.step == step))
    return [(int(anatomy.phase[n]), int(anatomy.unit[n]), int(anatomy.micro_batch[n])) for n in nodes]


def test_what_lacks_its_launch_stands_as_in_other_steps() -> None:
    """A step before the window's first call is placed as the one behind it, with the stalls and arrivals, and counted."""
    graph, anatomy = steps([[False, False, False], [True, True, True]])
    found = like_other_steps(graph, anatomy)

    assert list(BEHIND) == placed(graph, found, 0) == placed(graph, found, 1)
    assert not ((found.phase == int(Phase.FORWARD)) & (graph.step == 0)).any()
    assert [3] == list(found.health.guessed.values())


def test_one_that_no_step_launched_joins_its_neighbour() -> None:
    """Of a sequence whose second call is always lost, the second collective stands as the first."""
    graph, anatomy = steps([[True, False, True], [True, False, True]])

    assert [BEHIND[0], BEHIND[0], BEHIND[2]] == placed(graph, like_other_steps(graph, anatomy), 1)


def test_a_trace_without_any_launch_stays_as_it_is() -> None:
    """Nothing says where such collectives belong, so nothing is moved."""
    graph, anatomy = steps([[False, False, False], [False, False, False]])

    assert np.array_equal(anatomy.phase, like_other_steps(graph, anatomy).phase)


def test_a_step_of_another_sequence_teaches_nothing() -> None:
    """A step with other collectives in other places is no witness."""
    graph, anatomy = steps([[False, False, False], [True, True, True]])
    items = [replace(item, bytes_in=32) if at == 4 else item for at, item in enumerate(graph.collectives)]
    other = replace(graph, collectives=tuple(items))

    assert [ASTRAY] * 3 == placed(other, like_other_steps(other, anatomy), 0)
