"""What of a host operator is dispatch, and which part of a distributed tensor an operator works on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.extrapolate.dispatch import dispatch_ns
from scaletrace.extrapolate.nodework import Role, _operand, _told
from scaletrace.extrapolate.operators import all_outermost
from scaletrace.parse.job import RankTrace
from tests.parse.traces import Event, job_of, op


def rank_of(folder: Path, events: list[Event]) -> RankTrace:
    """The trace of one rank with one step around these events."""
    step = op("ProfilerStep#1", 0, 10_000, cat="user_annotation")
    return job_of(folder, [step, *events]).ranks[0]


def held_us(trace: RankTrace) -> dict[str, float]:
    """Dispatch of each outermost operator, microseconds."""
    ops = all_outermost(trace)
    held = dispatch_ns(trace.events, ops, np.arange(len(ops.row)), ops.start_ns, ops.end_ns)
    return {trace.events.name_of(int(row)): ns / 1e3 for row, ns in zip(ops.row, held, strict=True)}


def test_only_what_touches_data_computes(tmp_path: Path) -> None:
    """Of a linear layer the product computes; views, the look-ups that it calls, wrappers and Python are dispatch, and a
    function that hides what it does computes all the time."""
    trace = rank_of(
        tmp_path,
        [
            op("aten::linear", 10, 100),
            op("aten::t", 12, 20),
            op("aten::as_strided", 14, 10),
            op("aten::matmul", 40, 65),
            op("aten::mm", 50, 50),
            op("aten::resolve_conj", 55, 2),
            op("_ToTorchTensor", 200, 30),
            op("aten::view", 205, 10),
            op("Sleep", 300, 400),
            op("aten::copy_", 650, 10),
            op("autograd::engine::evaluate_function: MmBackward0", 800, 100),
            op("aten::mm", 810, 30),
            op("aten::mm", 850, 40),
        ],
    )

    expected = {
        "aten::linear": 50.0,
        "_ToTorchTensor": 30.0,
        "Sleep": 0.0,
        "autograd::engine::evaluate_function: MmBackward0": 30.0,
    }

    assert expected == held_us(trace)


def wrapped(weight: list[int], part: list[list[int]]) -> list[Event]:
    """A linear layer on distributed tensors, as PyTorch records it: whole dimensions outside, this rank's inside."""

    def dims(*tensors: list[int]) -> Any:
        return {"Input Dims": list(tensors)}

    return [
        op("aten::linear", 10, 100, **dims([64, 256], weight, [])),
        op("aten::t", 12, 10, **dims(weight)),
        op("PythonSubclass", 13, 8, **dims(weight)),
        op("aten::mm", 40, 60, **dims([64, 256], weight[::-1])),
        op("PythonSubclass", 42, 55, **dims([64, 256], weight[::-1])),
        op("aten::mm", 50, 40, **dims(*part)),
    ]


@pytest.mark.parametrize(
    ("weight", "part", "role", "expected"),
    [
        ([512, 256], [[64, 256], [256, 128]], Role.COLUMN, [(64, 256), (128, 256)]),
        ([256, 256], [[64, 64], [64, 256]], Role.ROW, [(64, 64), (256, 64)]),
        ([512, 256], [[64, 256], [256, 512]], Role.WHOLE, [(64, 256), (512, 256)]),
    ],
)
def test_the_part_of_a_distributed_tensor_tells_its_role(
    tmp_path: Path, weight: list[int], part: list[list[int]], role: Role, expected: list[tuple[int, ...]]
) -> None:
    """Dimensions are those of the rank, and the one that is smaller than the whole says how the matrix is divided."""
    trace = rank_of(tmp_path, wrapped(weight, part))
    row = int(all_outermost(trace).row[0])

    assert ("aten::linear", expected) == _operand(trace.events, row)
    assert role is _told(trace.events, row)
