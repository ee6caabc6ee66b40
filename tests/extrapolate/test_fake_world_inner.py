"""Structure: exchanges of experts and of context ranks are what PyTorch issues at the target layout in a fake world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.cp import spread_context
from scaletrace.parse.job import Job
from tests.extrapolate.test_fake_world import ROOT, Structure, issued, recorded, state_of, structure

JOBS = ROOT / "tests/extrapolate/jobs"
SEQUENCE, BATCH = 64, 4
Recorder = Callable[..., Job]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """record(world, script, *arguments) → the job as one fake rank records it; each is recorded once."""
    folder = tmp_path_factory.mktemp("inner")
    done: dict[tuple[object, ...], Job] = {}

    def run(world: int, script: Path, *arguments: object) -> Job:
        key = (world, script, *arguments)
        if key not in done:
            done[key] = recorded(folder / f"{world}_{len(done)}", world, script, *arguments)
        return done[key]

    return run


def plain(record: Recorder, layers: int = 3) -> Job:
    """The sample transformer under FSDP2 over 8 ranks, with whole samples."""
    return record(8, ROOT / "traces/jobs/transformer.py", "--strategy", "fsdp2", "--steps", 7, "--layers", layers)


def by_axis(found: Structure, gradients: int) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """(of the groups inside, of the widest group); `gradients` is the size of the latter."""
    inner = [item for (size, _), items in sorted(found.items()) if size != gradients for item in items]
    return inner, [item for (size, _), items in found.items() if size == gradients for item in items]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "degree"), [(8, 2), (64, 4), (1024, 8)])
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_context_ranks_exchange_what_pytorch_exchanges(
    record: Recorder, world: int, degree: int, exchange: str
) -> None:
    """From FSDP over 8 ranks with whole samples to context ranks under it: groups, kinds, bytes and order per group."""
    method = {"all_gather": "allgather", "ring": "alltoall"}[exchange]
    expected = issued(record(world, JOBS / "context.py", ROOT / "traces/jobs", degree, method, 3))
    state = state_of(plain(record), Layout(fsdp=8, mbs=BATCH, seq=SEQUENCE), default_pg="fsdp")
    made = relayout(spread_context(state, degree, exchange), Layout(fsdp=world // degree, cp=degree))

    assert expected == structure(made)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_recorded_context_ranks_are_changed_and_removed(record: Recorder, exchange: str) -> None:
    """From two context ranks to four, and to none at all: what PyTorch issues there."""
    method = {"all_gather": "allgather", "ring": "alltoall"}[exchange]
    job = record(8, JOBS / "context.py", ROOT / "traces/jobs", 2, method, 3)
    axes = {"mesh_cp": "cp", "mesh_dp_shard_cp": "fsdp"}
    state = state_of(job, Layout(fsdp=4, cp=2, mbs=BATCH, seq=SEQUENCE), **axes)
    four = relayout(spread_context(state, 4, exchange), Layout(fsdp=16, cp=4))

    assert issued(job) == structure(state)
    assert issued(record(64, JOBS / "context.py", ROOT / "traces/jobs", 4, method, 3)) == structure(four)
    assert issued(plain(record)) == structure(relayout(state, Layout(fsdp=8)))


EXPERTS = 16
AXES = {"default_pg": "dp", "mesh_edp": "dp", "mesh_ep": "ep"}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "degree"), [(8, 8), (64, 2), (64, 8), (1024, 16)])
def test_experts_exchange_what_pytorch_exchanges(record: Recorder, world: int, degree: int) -> None:
    """From four expert ranks of eight: groups of experts and of ranks with the same ones, bytes, order per group."""
    expected = issued(record(world, JOBS / "experts.py", degree, EXPERTS, 0, 2))
    state = state_of(record(8, JOBS / "experts.py", 4, EXPERTS, 0, 2), Layout(dp=8, ep=4, mbs=1, seq=256), **AXES)
    made = relayout(state, Layout(dp=world, ep=degree))

    assert issued(record(8, JOBS / "experts.py", 4, EXPERTS, 0, 2)) == structure(state)
    assert expected == structure(made)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "degree"), [(8, 4), (64, 8), (1024, 16)])
def test_experts_inserted_into_a_job_that_holds_them_all_are_what_pytorch_issues(
    record: Recorder, world: int, degree: int
) -> None:
    """From eight ranks with all experts each: exchanges, gradients of experts and all others, order per group."""
    job = record(8, JOBS / "experts.py", 1, EXPERTS, 0, 2)
    state = state_of(job, Layout(dp=8, mbs=1, seq=256), **AXES)
    made = relayout(state, Layout(dp=world, ep=degree))

    assert issued(record(world, JOBS / "experts.py", degree, EXPERTS, 0, 2)) == structure(made)


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_experts_on_one_rank_exchange_nothing(record: Recorder, world: int) -> None:
    """From four expert ranks to none: gradients of experts join all others over all ranks, in PyTorch's order."""
    state = state_of(record(8, JOBS / "experts.py", 4, EXPERTS, 0, 2), Layout(dp=8, ep=4, mbs=1, seq=256), **AXES)

    assert issued(record(world, JOBS / "experts.py", 1, EXPERTS, 0, 2)) == structure(relayout(state, Layout(dp=world)))


@pytest.mark.slow
def test_experts_move_in_with_each_other_and_out_again(record: Recorder) -> None:
    """Four expert ranks to none and back to eight: exchanges of tokens as PyTorch issues them, gradients over all."""
    state = state_of(record(8, JOBS / "experts.py", 4, EXPERTS, 0, 2), Layout(dp=8, ep=4, mbs=1, seq=256), **AXES)
    none = relayout(state, Layout(dp=8))
    back = structure(relayout(none, Layout(dp=8, ep=8)))
    expected = issued(record(8, JOBS / "experts.py", 8, EXPERTS, 0, 2))

    assert {"all_reduce"} == {kind for items in structure(none).values() for kind, *_ in items}
    assert [i for i in expected[8, 1] if i[0] == "all_to_all"] == [i for i in back[8, 1] if i[0] == "all_to_all"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_checkpointed_shards_issue_what_pytorch_issues(record: Recorder, world: int) -> None:
    """FSDP2 with and without checkpointing: a layer's weights are gathered once for its backward, run again or not."""
    jobs = [record(size, JOBS / "checkpointed.py", ROOT / "traces/jobs", how, 3, "fsdp2")
            for size, how in ((8, "none"), (8, "full"), (world, "full"))]  # fmt: skip
    off, on = (state_of(job, Layout(fsdp=8, mbs=BATCH, seq=SEQUENCE), default_pg="fsdp") for job in jobs[:2])
    target = Layout(fsdp=world)

    assert ("none", "full") == (off.layout.recompute, on.layout.recompute)
    assert issued(jobs[2]) == structure(relayout(off, replace(target, recompute="full")))
    assert issued(jobs[2]) == structure(relayout(on, target))
    assert issued(jobs[0]) == structure(relayout(on, Layout(fsdp=8, recompute="off")))
