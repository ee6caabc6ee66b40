"""Kernel signatures: layers of a compiled model, told by its kernels alone."""

from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.layers import Phase, Sections
from scaletrace.extrapolate.signatures import launches, sections_from_kernels, sections_of
from scaletrace.parse.events import Arg, Events, Lane
from scaletrace.parse.job import RankTrace, Step
from scaletrace.parse.load import load


def trace_of(letters: str) -> RankTrace:
    """A call at 100, 110, … for each letter, and its kernel (name = letter) a microsecond later."""
    n = len(letters)
    strings = (*sorted(set(letters)), "cudaLaunchKernel", "[1,1,1]")
    name = np.array([strings.index("cudaLaunchKernel")] * n + [strings.index(x) for x in letters], np.int32)
    start = np.concatenate([100 + 10 * np.arange(n), 1100 + 10 * np.arange(n)])
    i32, minus = np.zeros(2 * n, np.int32), np.full(2 * n, -1, np.int64)
    grid = Arg(np.arange(n, 2 * n, dtype=np.int32), np.full(n, len(strings) - 1, np.int32), is_text=True)
    events = Events(
        np.full(2 * n, ord("X"), np.uint8), np.repeat([0, 1], n).astype(np.int32), name, i32, start.astype(np.int64),
        np.full(2 * n, 5, np.int64), np.tile(np.arange(n), 2).astype(np.int64), minus, minus, minus,
        strings, ("cuda_runtime", "kernel"), (Lane(1, 1),), {"grid": grid},
    )  # fmt: skip
    return RankTrace(0, 1, events, "test", steps=(Step(0, 0, 9000),))


def phases(backward_at: int) -> Sections:
    """One step: forward from 90, backward from the given moment; nothing known of layers."""
    return Sections(
        np.array([0, 90, backward_at]), np.array([0, 1, 2], np.uint8), np.full(3, -1, np.int32),
        np.array([-1, 0, 0], np.int32), np.zeros(3, np.int32), ("model",), (False,), "nothing repeats",
    )  # fmt: skip


def test_layers_of_a_compiled_model_are_repeated_kernels() -> None:
    """e (ab) (ab) (ab) h forward and H (cd) (cd) (cd) E backward are three layers, the last one first in backward."""
    letters = "eabababh" + "HcdcdcdE"
    sections = sections_from_kernels(trace_of(letters), phases(175))
    words = [f"{Phase(p).name[0]}{u}" for p, u in zip(sections.phase, sections.unit, strict=True)]

    assert ("embedding", "layer 0", "layer 1", "layer 2", "head") == sections.units
    assert ["O-1", "F0", "F0", "F1", "F2", "F3", "F4", "B4", "B4", "B3", "B2", "B1", "B0"] == words


def test_kernels_that_do_not_repeat_change_nothing() -> None:
    """Without repetition the sections stay as they were."""
    base = phases(140)

    assert base is sections_from_kernels(trace_of("abcdefgh"), base)


def test_calls_are_joined_to_kernels_by_correlation_and_communication_is_left_out() -> None:
    """Letters stand in order of launch, at the time of the call."""
    when, letters = launches(trace_of("aba").events)

    assert [100, 110, 120] == when.tolist()
    assert letters[0] == letters[2] != letters[1]


@pytest.mark.parametrize(
    ("folder", "layers", "kinds", "micro_batches"),
    [
        ("nanogpt8_h100", 10, 1, 1),  # compiled; one of its blocks has no attention and counts with the one before
        ("lightllm8_h200-logs-run1", 61, 2, 1),  # one CUDA graph of DeepSeek-V3: 3 dense layers, 58 with experts
        ("lightllm8_h200-logs_decode_overlap-run1", 61, 2, 2),  # the same with two batches in flight
        ("dlrm8_v100", 0, 0, 1),  # towers of unequal products
        ("torchrec4_v100-sst_long_a2a_optimizer_5-run1", 0, 0, 1),
        ("torchrec4_v100-sst_long_a2a_optimizer_5_qcomm-run1", 0, 0, 1),
    ],
)
def test_real_gpu_jobs_show_their_layers(
    shared_data: Path, folder: str, layers: int, kinds: int, micro_batches: int
) -> None:
    """Public jobs without a named module show as many layers and kinds as their models have, on every rank alike."""
    found = {
        (s.layers, len({kind for kind in s.kind if kind}), s.micro_batches)
        for s in map(sections_of, load(shared_data / "traces" / folder).ranks)
    }

    assert {(layers, kinds, micro_batches)} == found
