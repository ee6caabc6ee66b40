"""Who a process is, from what its launcher says, and which ranks are recorded."""

from __future__ import annotations

import pytest

from scaletrace.collect.ranks import from_environment, here, is_data_axis, is_selected, leads_its_class, parse_list
from scaletrace.errors import UsageError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, ("torchrun", 3, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}, ("slurm", 5, 16, 0)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ("openmpi", 1, 2, None)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, ("mvapich", 1, 2, None)),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, ("pmi", 0, 4, 0)),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"},
            ("torchrun", 3, 8, 3),
        ),
    ],
)
def test_each_launcher_says_it_its_own_way(
    environment: dict[str, str], expected: tuple[str, int, int, int | None]
) -> None:
    """Rank, world size and local rank come from the variables of the launcher, torchrun's first."""
    place = from_environment(environment)
    assert place is not None
    assert expected == (place.source, place.rank, place.world_size, place.local_rank)


@pytest.mark.parametrize(
    "environment", [{}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}]
)
def test_half_told_is_not_told(environment: dict[str, str]) -> None:
    """A rank without a world, or outside of it, is no rank."""
    assert from_environment(environment) is None


def test_a_process_alone_is_a_job_of_one() -> None:
    """Without a launcher and without torch.distributed, the process is rank 0 of 1."""
    place = here({})
    assert (0, 1, "rank00000_of00001") == (place.rank, place.world_size, place.stem)


def test_restarts_are_counted() -> None:
    """torchrun says which attempt this is."""
    place = from_environment({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert place is not None
    expected = 2
    assert expected == place.attempt


def test_lists_of_ranks() -> None:
    """Ranks and ranges, in any order."""
    expected = frozenset({0, 4, 5, 6, 7, 12})
    assert expected == parse_list("12, 0,4-7")


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-2", "0-99999999"])
def test_lists_that_are_none(text: str) -> None:
    """Anything else is refused with the text in the message."""
    with pytest.raises(UsageError, match="ranks"):
        parse_list(text)


@pytest.mark.parametrize(
    ("description", "expected"),
    [("mesh_dp_shard", True), ("mesh_dp_replicate", True), ("mesh_fsdp", True), ("mesh_tp", False), ("mesh_pp", False)],
)
def test_data_axes(description: str, expected: bool) -> None:
    """Ranks along data-parallel axes do the same work; those along the others don't."""
    assert expected == is_data_axis(description)


def test_one_rank_a_class_of_a_mesh() -> None:
    """In a 2 x 2 mesh of data and tensor parallelism, the ranks of the first data replica stand for all."""
    groups = [("default_pg", [0, 1, 2, 3]), ("mesh_dp_shard", [0, 2]), ("mesh_dp_shard", [1, 3])]
    groups += [("mesh_tp", [0, 1]), ("mesh_tp", [2, 3])]
    expected = [True, True, False, False]
    assert expected == [leads_its_class(rank, groups, 4) for rank in range(4)]


def test_one_rank_a_class_without_a_mesh() -> None:
    """A job that says nothing of axes is recorded at its first and its last rank."""
    expected = [True, False, False, True]
    assert expected == [leads_its_class(rank, [("default_pg", [0, 1, 2, 3])], 4) for rank in range(4)]


def test_selection() -> None:
    """`all`, a list, and what is not in it."""
    place = here({"RANK": "3", "WORLD_SIZE": "8"})
    expected = [True, True, False]
    assert expected == [is_selected(spec, place) for spec in ("all", "0,2-3", "0-2")]
