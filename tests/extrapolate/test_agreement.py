"""Collectives whose members the ranks' own moments place in different units: they stay one collective when laid anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.rewrite.agreement import agreed
from scaletrace.extrapolate.rewrite.pp import cut
from scaletrace.extrapolate.rewrite.schedules import build
from scaletrace.parse.graph import Graph, NodeKind
from tests.extrapolate.conftest import Layered


def strayed(graph: Graph, anatomy: Anatomy, rank: int, phase: Phase, unit: int, batch: int) -> Anatomy:
    """The anatomy in which one rank's members of the first collective lie elsewhere."""
    mine = (graph.instance == 0) & (graph.rank == rank)
    return replace(
        anatomy,
        phase=np.where(mine, int(phase), anatomy.phase).astype(np.uint8),
        unit=np.where(mine, unit, anatomy.unit).astype(np.int32),
        micro_batch=np.where(mine, batch, anatomy.micro_batch).astype(np.int32),
    )


def members(graph: Graph) -> list[int]:
    """How many ranks meet in each collective that has a member."""
    transfers = graph.instance[(graph.kind == int(NodeKind.TRANSFER)) & (graph.instance >= 0)]
    return sorted(np.unique(transfers, return_counts=True)[1].tolist())


@pytest.mark.parametrize(("phase", "unit", "batch"), [(Phase.OTHER, -1, -1), (Phase.BACKWARD, 1, 1)])
def test_members_come_together_where_most_of_them_are(layered: Layered, phase: Phase, unit: int, batch: int) -> None:
    """Of four members the fourth follows the others, and that is counted."""
    graph, anatomy = layered(2, 2, 4, reduce_ns=50)
    found = agreed(graph, strayed(graph, anatomy, 3, phase, unit, batch))

    assert np.array_equal(anatomy.phase, found.phase)
    assert np.array_equal(anatomy.unit, found.unit)
    assert np.array_equal(anatomy.micro_batch, found.micro_batch)
    assert [1] == list(found.health.guessed.values())


def test_of_two_members_the_one_inside_a_pass_wins(layered: Layered) -> None:
    """A member that stands outside forward and backward joins the one inside."""
    graph, anatomy = layered(2, 1, 2, reduce_ns=50)

    assert np.array_equal(anatomy.phase, agreed(graph, strayed(graph, anatomy, 0, Phase.OTHER, -1, -1)).phase)


def test_an_anatomy_that_agrees_stays_as_it_is(layered: Layered) -> None:
    """Nothing is moved or counted where all members lie together."""
    graph, anatomy = layered(2, 2, 4, reduce_ns=50)

    assert anatomy is agreed(graph, anatomy)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_collective_at_a_seam_stays_one_when_it_is_laid_anew(layered: Layered, micro_batches: int) -> None:
    """Every collective of the new graph has both members; without agreement the one at the seam falls apart."""
    graph, anatomy = layered(2, micro_batches, 2, reduce_ns=50)
    seam = strayed(graph, anatomy, 1, Phase.BACKWARD, 1, 0)
    program = build("1F1B", 1, micro_batches)

    assert [1, 1, 2] == members(
        cut(graph, strayed(graph, anatomy, 1, Phase.OTHER, -1, -1), program, lambda *_: 0).graph
    )
    assert [2, 2] == members(cut(graph, agreed(graph, seam), program, lambda *_: 0).graph)
