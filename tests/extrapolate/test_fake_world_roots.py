"""Stages whose root module holds embedding or head: what each gathers and scatters is what PyTorch's do in a fake world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.job import Job
from tests.extrapolate import test_fake_world as fake
from tests.extrapolate.test_fake_world_from_stages import expected_of, shards

Recorder = Callable[..., Job]
WRAPPED = "for unit in (model.embedding, *model.blocks, model.head):", "for unit in model.blocks:"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """(script of a sharded job, recorder of its stages) that wrap each block, and leave the rest to the root."""
    folder: Path = tmp_path_factory.mktemp("roots")
    script = folder / "transformer.py"
    script.write_text(fake.variant((fake.ROOT / "traces/jobs/transformer.py").read_text(), WRAPPED))
    return script, fake.stage_recorder(folder, fake.variant(fake.PIPELINE_JOB, WRAPPED))


@pytest.fixture(scope="module")
def sharded(jobs: tuple[Path, Recorder]) -> State:
    """Eight layers sharded over two ranks, without a pipeline."""
    script, _ = jobs
    sizes = "--strategy", "fsdp2", "--steps", 7, "--layers", 8, "--batch", 1
    return fake.state_of(fake.recorded(script.with_name("base"), 2, script, *sizes), Layout(fsdp=2), default_pg="fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ranks", "schedule", "chunks", "home"),
    [(8, 4, "1F1B", 1, 0), (8, 4, "1F1B", 1, 1), (8, 4, "1F1B", 1, 3), (8, 4, "GPipe", 1, 3), (8, 4, "LoopedBFS", 2, 3),
     (8, 4, "Interleaved1F1B", 2, 0), (8, 4, "Interleaved1F1B", 2, 3), (8, 4, "ZBVZeroBubble", 2, 0), (64, 8, "1F1B", 1, 7),
     (1024, 8, "1F1B", 1, 7), (1024, 8, "1F1B", 1, 0)],
)  # fmt: skip
def test_each_stage_has_a_root_of_its_own(
    jobs: tuple[Path, Recorder], sharded: State, world: int, ranks: int, schedule: str, chunks: int, home: int
) -> None:
    """The root's group is divided by what each stage holds of it: kinds, sizes of groups and bytes, whatever their order."""
    target = Layout(fsdp=world // ranks, pp=ranks, microbatches=8, schedule=schedule, chunks=chunks)
    recorded = jobs[1](world, home * (world // ranks), schedule, ranks, chunks, 8, 8)

    assert sorted(expected_of(recorded)) == sorted(shards(relayout(sharded, target), home))
