"""Process groups: members restored, names reconciled, axes named or inferred."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scaletrace.errors import InputError
from scaletrace.parse.groups import (
    Said,
    Use,
    axis_from_description,
    build_groups,
    from_header,
    infer_axis,
    name_axes,
    override_axes,
    restore_members,
)
from scaletrace.parse.health import Health
from scaletrace.parse.job import Group
from scaletrace.parse.load import load
from tests.parse.jobs import Event, host, loaded, nccl, step

CUT = ", ".join(str(8 * k) for k in range(29))


@pytest.mark.parametrize(
    ("text", "size", "start", "stride", "expected"),
    [
        ("[0, 1]", 2, -1, -1, (0, 1)),
        ("[3]", 1, -1, -1, (3,)),
        (f"[{CUT}, ..., 1016]", 128, -1, -1, tuple(range(0, 1024, 8))),
        (f"[{CUT}, ...]", 128, -1, -1, tuple(range(0, 1024, 8))),
        (f"[{CUT}, ...]", 128, 0, 8, tuple(range(0, 1024, 8))),
        (f"[{CUT}, ..., 1017]", 128, -1, -1, ()),
        ("[0, 1, 5, ...]", 64, -1, -1, ()),
        ("[]", 4, -1, -1, ()),
    ],
)
def test_cut_lists(text: str, size: int, start: int, stride: int, expected: tuple[int, ...]) -> None:
    """A cut list is continued where it is regular and agrees with its last entry; otherwise nothing is claimed."""
    assert expected == restore_members(text, size, start, stride)


def test_header_forms() -> None:
    """Ranks as a list or as the text of on-demand traces, names as pg_name or uid, and headers without groups."""
    config = [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]},
        {"uid": "7", "pg_size": 2, "ranks": "[0, 1]"},
    ]

    assert [Said("0", "default_pg", (0, 1)), Said("7", "", (0, 1))] == from_header(
        {"distributedInfo": {"pg_config": config}}
    )
    assert [] == from_header({}) == from_header({"distributedInfo": {"rank": 0}})
    assert [] == from_header({"distributedInfo": "broken"})


def test_one_group_under_two_names_is_one_group() -> None:
    """Counters of names may differ between ranks; members and description say that it is the same group."""
    said = {
        0: [Said("0", "default_pg", (0, 1)), Said("5", "mesh_tp", (0, 1))],
        1: [Said("0", "default_pg", (0, 1)), Said("6", "mesh_tp", (0, 1))],
    }
    groups = build_groups(said, 2, Health())

    assert [("0", (0, 1)), ("5", (0, 1))] == [(group.name, group.members) for group in groups.groups]
    assert groups.of(0, "5") == groups.of(1, "6") == 1


def test_groups_with_equal_members_and_other_names_stay_apart() -> None:
    """Megatron makes several groups over the same ranks, each with its own sequence numbers."""
    said = {rank: [Said("0", "default_pg", (0, 1)), Said("4", "", (0, 1)), Said("9", "", (0, 1))] for rank in (0, 1)}

    assert ["0", "4", "9"] == [group.name for group in build_groups(said, 2, Health()).groups]


def test_without_any_group_all_ranks_are_assumed() -> None:
    """Old traces name no group; the assumption is counted and half sure."""
    health = Health()
    groups = build_groups({0: [], 1: []}, 2, health).groups

    assert [((0, 1), 0.5)] == [(group.members, group.confidence) for group in groups]
    assert health.guessed["groups assumed to hold all ranks"] == 1


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("mesh_tp", "tp"),
        ("mesh_dp_replicate", "dp"),
        ("mesh_dp_shard_cp", "fsdp"),
        ("mesh_replicate", "dp"),
        ("mesh_shard", "fsdp"),
        ("mesh_cp", "cp"),
        ("mesh_ep", "ep"),
        ("mesh_pp", "pp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "fsdp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("default_pg", ""),
        ("undefined", ""),
        ("mesh_default", ""),
        ("", ""),
    ],
)
def test_descriptions(description: str, axis: str) -> None:
    """Names of DeviceMesh, torchtitan and Megatron."""
    assert axis == axis_from_description(description)


def use(functional: int = 0, wrappers: tuple[str, ...] = (), **kinds: int) -> Use:
    """How a group was used."""
    return Use(Counter(kinds), functional, set(wrappers))


@pytest.mark.parametrize(
    ("members", "world", "seen", "axis"),
    [
        ((0, 1, 2, 3), 4, use(send=3, recv=3), "pp"),
        ((0, 1, 2, 3), 4, use(all_to_all=4), "ep"),
        ((0, 1, 2, 3), 4, use(wrappers=("FSDP",), all_gather=4, reduce_scatter=2), "fsdp"),
        ((0, 1, 2, 3), 4, use(wrappers=("DDP",), all_reduce=5), "dp"),
        ((0, 4), 8, use(all_reduce=5), "dp"),
        ((0, 1), 8, use(all_reduce=5), "tp"),
        ((0, 1, 2, 3), 4, use(functional=5, all_reduce=5), "tp"),
        ((0, 4), 8, use(all_gather=4, reduce_scatter=4), "fsdp"),
        ((0, 1), 2, Use(Counter(all_reduce=12), 0, {"DDP"}, passes=2, reduced=12, forward=8, alike=8), "tp"),
        ((0, 1), 2, Use(Counter(all_reduce=12), 0, set(), passes=2, reduced=12, forward=0, alike=0), "dp"),
        ((0, 1), 2, Use(Counter(all_reduce=12), 0, set(), passes=4, reduced=12, forward=4, alike=4), "dp"),
        ((0, 1), 2, Use(Counter(all_reduce=12), 0, set(), passes=2, reduced=12, forward=8, alike=1), "dp"),
        ((0, 1, 2, 3), 4, use(), "world"),
        ((0, 1), 4, use(), ""),
    ],
)
def test_axes_are_inferred_from_use(members: tuple[int, ...], world: int, seen: Use, axis: str) -> None:
    """Stride, size and mix of collectives name an axis, surely only where nothing was used."""
    group = Group(0, "0", "undefined", members)
    found, confidence = infer_axis(group, seen, world)

    assert axis == found
    assert confidence == 1.0 if not seen.kinds else confidence < 1.0


def test_a_stated_axis_is_certain_and_an_inferred_one_is_counted() -> None:
    """The description wins over the use."""
    groups = [Group(0, "0", "mesh_dp", (0, 1)), Group(1, "1", "undefined", (0, 1))]
    health = Health()
    named = name_axes(groups, {0: use(send=1), 1: use(all_reduce=1)}, 4, health)

    assert [("dp", 1.0), ("tp", 0.5)] == [(group.axis, group.confidence) for group in named]
    assert health.guessed["axes of groups inferred from their use"] == 1


def test_the_default_group_beside_others_is_the_world() -> None:
    """Where a job has groups of its own, all-reduces over all ranks clip gradients; they are no axis."""
    groups = [Group(0, "0", "default_pg", (0, 1, 2, 3)), Group(1, "1", "mesh_tp", (0, 1))]

    assert ["world", "tp"] == [group.axis for group in name_axes(groups, {0: use(all_reduce=3)}, 4, Health())]


def test_a_yaml_file_overrides_axes(tmp_path: Path) -> None:
    """Selectors must all fit; the answer is certain then."""
    path = tmp_path / "axes.yaml"
    path.write_text("groups:\n- {size: 2, stride: 4, axis: dp}\n- {description: 'x$', axis: cp}\n")
    groups = [Group(0, "0", "a", (0, 4), "tp", 0.5), Group(1, "1", "ax", (0, 1), "tp", 0.5)]

    assert [("dp", 1.0), ("cp", 1.0)] == [(group.axis, group.confidence) for group in override_axes(groups, path)]


@pytest.mark.parametrize(
    "text",
    [
        "groups: 3",
        "groups:\n- {axis: xp}",
        "groups:\n- {axis: tp, colour: red}",
        "groups:\n- {axis: tp, 1: a, x: b, 2001-01-01: c}",
        "groups:\n- {axis: [tp]}",
        "groups:\n- {axis: tp, description: '('}",
        "{",
        "- 1",
    ],
)
def test_a_broken_yaml_file_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file."""
    path = tmp_path / "axes.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"axes\.yaml"):
        override_axes([Group(0, "0", "", (0, 1))], path)


FORWARD, BACKWARD = "aten::mm", "autograd::engine::evaluate_function: MmBackward0"


def _rank(forward: list[int], backward: list[int], backward_op: str = BACKWARD) -> list[Event]:
    """One step: all-reduces of so many elements in the forward pass, then in the backward pass."""
    events, at = [step(0, 0, 1000)], 10
    for elements, name in [*((e, FORWARD) for e in forward), *((e, backward_op) for e in backward)]:
        events += [host(name, at, 5), *nccl("allreduce", at + 6, at + 15, at + 25, at, elements=elements)]
        at += 40
    return [*events, host(FORWARD if backward_op == FORWARD else backward_op, at, 5)]


@pytest.mark.parametrize(
    ("forward", "backward", "backward_op", "axis"),
    [
        ([256] * 4, [256] * 4, BACKWARD, "tp"),
        ([], [100, 200, 300], BACKWARD, "dp"),
        ([1], [100, 200, 300], BACKWARD, "dp"),
        ([64], [100, 200, 300], BACKWARD, "dp"),
        ([256] * 4, [256] * 4, FORWARD, "tp"),
    ],
)
def test_equal_all_reduces_before_the_backward_pass_are_tensor_parallel(
    tmp_path: Path, forward: list[int], backward: list[int], backward_op: str, axis: str
) -> None:
    """Partial sums recur in the forward pass (of training, or of a trace that trains nothing); gradients do not, nor do
    a loss or one buffer."""
    job = loaded(tmp_path, {rank: _rank(forward, backward, backward_op) for rank in (0, 1)})

    assert [axis] == [group.axis for group in job.groups if group.size == 2]
    assert all(group.confidence < 1 for group in job.groups if group.size == 2)


@pytest.mark.parametrize(
    ("capture", "axis"),
    [
        ("gloo/tp_w2", "tp"),
        ("gloo/tp_w4", "tp"),
        ("gloo/ddp_w4", "dp"),
        ("gloo/fsdp2_w4", "fsdp"),
        ("gloo/pp_1f1b_w4", "pp"),
        ("traces/megatron_tp2_v100", "tp"),
        ("traces/nanogpt8_h100", "fsdp"),
    ],
)
def test_public_jobs_are_taken_for_what_they_are(shared_data: Path, capture: str, axis: str) -> None:
    """The axis that moves data in each of them, whether the trace names it or not."""
    job = load(shared_data / capture)
    used = set(job.collectives.group[job.collectives.group >= 0].tolist())

    assert axis in {group.axis for group in job.groups if group.id in used and group.size > 1}
