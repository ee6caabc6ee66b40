"""Turns a fully sharded step (FSDP, ZeRO-3, ZeRO-2) into a lane program with one communication queue."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.lanes import LaneProgram

PREFETCHED_UNITS = 2
"""How many units may be gathered ahead of compute (FSDP's `limit_all_gathers`)."""


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """One step of `units` equal wrapped units and a root, `accumulation` micro batches.

    gather_s, reduce_s            one unit's parameter all-gather and gradient reduce-scatter
    root_gather_s, root_reduce_s  the same for the root unit (embedding, head, final norm): head and tail, exposed
    forward_share                 share of compute in the forward: 1/3, or 1/4 with full recomputation
    regather                      parameters are gathered again in the backward (FULL_SHARD, ZeRO-3)
    end_s                         optimizer and norms
    blocking_s                    tensor-parallel messages of one unit, in forward and again in backward; nothing hides them
    """

    units: int
    gather_s: float
    reduce_s: float
    root_gather_s: float = 0.0
    root_reduce_s: float = 0.0
    end_s: float = 0.0
    forward_share: float = 1 / 3
    regather: bool = True
    accumulation: int = 1
    blocking_s: float = 0.0

    def __post_init__(self) -> None:
        if self.units < 1 or self.accumulation < 1:
            raise UsageError("a sharded step needs at least one unit and one micro batch")


def sharded_program(step: ShardedStep) -> LaneProgram:
    """The lane program of one rank (all ranks do the same); total compute weight is 1."""
    program = LaneProgram(1)
    last: int | None = None
    for _ in range(step.accumulation):
        last = _micro_batch(program, step, last)
    program.fixed(0, step.end_s, [(last, 0.0)] if last is not None else [], "optimizer")
    return program


def _micro_batch(program: LaneProgram, step: ShardedStep, previous: int | None) -> int:
    """One forward and backward; returns the root's reduction, which the next micro batch or the optimizer awaits."""
    forward = step.forward_share / step.units / step.accumulation
    backward = (1 - step.forward_share) / step.units / step.accumulation
    begin = [(previous, 0.0)] if previous is not None else []
    root = program.collective(0, step.root_gather_s, begin, "all_gather root")
    ends: list[int] = []
    for unit in range(step.units):
        window = [(ends[unit - PREFETCHED_UNITS], 0.0)] if unit >= PREFETCHED_UNITS else []
        gathered = program.collective(0, step.gather_s, window, f"all_gather unit {unit}")
        ends.append(program.compute(0, forward, [(gathered, 0.0), (root, 0.0)], f"forward unit {unit}"))
        if step.blocking_s:
            ends[-1] = program.fixed(0, step.blocking_s, label=f"tensor parallel, forward unit {unit}")
    done = ends[-1]
    gathered = (
        program.collective(0, step.gather_s, [(done, 0.0)], "all_gather first backward") if step.regather else done
    )
    for unit in reversed(range(step.units)):
        needed = gathered
        if step.regather and unit:
            # The next unit's gather is issued when this unit's backward begins, so it goes before its reduction.
            gathered = program.collective(0, step.gather_s, [(done, 0.0), (needed, 0.0)], f"all_gather unit {unit - 1}")
        done = program.compute(0, backward, [(needed, 0.0)], f"backward unit {unit}")
        if step.blocking_s:
            done = program.fixed(0, step.blocking_s, label=f"tensor parallel, backward unit {unit}")
        program.collective(0, step.reduce_s, [(done, 0.0)], f"reduce_scatter unit {unit}")
    return program.collective(0, step.root_reduce_s, [(done, 0.0)], "reduce_scatter root")
