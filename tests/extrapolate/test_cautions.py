"""What a trace can't tell of its scaling is said before any number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from scaletrace.extrapolate import cautions
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.layout import Layout, measured_layout
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup
from scaletrace.parse.health import Health
from scaletrace.parse.job import Group


def _job(*names: str, groups: tuple[Group, ...] = ()) -> Any:
    events = SimpleNamespace(in_cats=lambda *_: np.array([bool(names)]), strings=names)
    return SimpleNamespace(ranks=(SimpleNamespace(events=events, steps=()),), groups=groups)


def _reduces(axis: str, count: int = 6, kind: str = "all_reduce") -> Graph:
    draft = Draft(groups=[GraphGroup(axis, 8, 1)])
    for _ in range(count):
        draft.collective("all_reduce", 0, 4096, [(0, [])])
        draft.collectives[-1] = GraphCollective(kind, 0, 4096, 4096)
    return draft.graph()


def test_reductions_of_unknown_group_in_a_job_that_trains_nothing_are_tensor_parallel() -> None:
    """An inference job whose kernels carry no record of their group, also with an all-reduce of its own."""
    for kind in ("all_reduce", "custom"):
        health = Health()
        graph = cautions.unnamed(_job("aten::mm"), _reduces("", kind=kind), health)

        assert Layout(tp=8) == measured_layout(graph, 8)
        assert "tensor parallel with 60% certainty" in health.notes[0] and "--axes" in health.notes[0]


def test_with_a_backward_pass_or_without_operators_they_stay_data_parallel_and_that_is_said() -> None:
    """Nothing tells them apart from gradients."""
    for names in (("aten::mm", "autograd::engine::evaluate_function: X"), ()):
        health = Health()
        graph = cautions.unnamed(_job(*names), _reduces(""), health)

        assert Layout(dp=8) == measured_layout(graph, 8)
        assert "all 8 ranks as dp" in health.notes[0] and "--axes" in health.notes[0]


def test_more_ranks_than_a_domain_holds_are_not_tensor_parallel() -> None:
    """Three hundred ranks that train nothing stay without a name."""
    health = Health()
    wide = Draft(groups=[GraphGroup("", 300, 1)])
    for _ in range(6):
        wide.collective("all_reduce", 0, 4096, [(0, [])])

    assert Layout(dp=300) == measured_layout(cautions.unnamed(_job("aten::mm"), wide.graph(), health), 300)
    assert "all 300 ranks as dp" in health.notes[0]


def test_a_guessed_axis_is_named_with_its_certainty() -> None:
    """One that the trace states, or that is nearly certain, is not."""
    for confidence, said in ((0.7, 1), (0.95, 0), (1.0, 0)):
        health = Health()
        group = Group(0, "0", "default_pg", tuple(range(8)), "fsdp", confidence)
        cautions.axes(_job(groups=(group,)), _reduces("fsdp"), Layout(fsdp=8), health)

        assert said == len(health.notes)
        assert not said or ("taken to be fsdp=8" in health.notes[0] and "70% certainty" in health.notes[0])


def test_a_guessed_axis_widens_bands_by_the_inverse_of_its_certainty() -> None:
    """The factor is said; certain axes leave bands as they are, and a wild guess makes them four times as wide at most."""
    found = []
    for confidence in (1.0, 0.5, 0.01):
        health = Health()
        group = Group(0, "0", "default_pg", tuple(range(8)), "fsdp", confidence)
        found.append(cautions.axes(_job(groups=(group,)), _reduces("fsdp"), Layout(fsdp=8), health))
        assert (confidence == 0.5) == any("are 2 times as wide" in note for note in health.notes)

    assert [1.0, 0.5, 0.25] == found
