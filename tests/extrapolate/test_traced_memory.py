"""Memory from shapes, beside what memory events measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.extrapolate.traced_memory import fused_attention, traced_memory
from scaletrace.parse.load import load
from tests.extrapolate.recordings import recorded


def test_a_measured_gpu_peak_follows_from_shapes(shared_data: Path) -> None:
    """VGG13 on 512 images, trained with Adam: within 5 % of the 39.3 GB that the allocator reported."""
    file = shared_data / "traces" / "triosim_vgg13" / "profiler_vgg13-iter41.json.gz"
    found = traced_memory(load(file).ranks[0])

    assert ("Adam", 39_343_881_216, True) == (found.optimizer, found.measured, found.on_device)
    assert found.predicted == pytest.approx(found.measured, rel=0.05)
    assert 3 * found.weights == found.states


def test_without_shapes_only_the_measured_peak_is_told(shared_data: Path) -> None:
    """A trace with memory events and no dimensions says what it took and nothing of what it needs."""
    found = traced_memory(load(shared_data / "traces" / "hta_v100_2").ranks[0]).to_json()

    assert (6_629_508_096, None, "device") == (
        found["measured_bytes"], found["predicted_bytes"], found["measured_of"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two traces of one transformer, plain and checkpointed."""
    return recorded(tmp_path_factory.mktemp("memory"), "memory", "memory, checkpointed")


@pytest.mark.parametrize("case", ["memory", "memory, checkpointed"])
def test_recorded_activations_follow_from_shapes(recordings: Path, case: str) -> None:
    """What a transformer allocates in a step on the host is its activations, in full or checkpointed, within 12 %."""
    job = load(recordings / f"{case}.json")
    found = traced_memory(job.ranks[0])

    assert found.predicted == pytest.approx(found.measured, rel=0.12)
    assert fused_attention(job.ranks)


def test_checkpoints_keep_less(recordings: Path) -> None:
    """Of the same model less than half stays where every block is run again."""
    plain, kept = (
        traced_memory(load(recordings / f"{case}.json").ranks[0]).activations
        for case in ("memory", "memory, checkpointed")
    )

    assert 0 < kept < plain / 2
