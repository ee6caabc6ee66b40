"""Turns a pipeline schedule (1F1B, interleaved) with its messages and parameter traffic into a lane program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.lanes import LaneProgram
from scaletrace.extrapolate.rewrite.schedules import Op, Program, build

Operation = tuple[bool, int, int]
"""(is forward, chunk, micro batch)."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One training step of a pipeline of `stages` ranks, each with `chunks` model chunks, over `micro_batches`.

    forward, backward     work of [stage][chunk] for one micro batch, in units of the calibrated compute time
    send_s                one activation or gradient message; in warm-up and flush it also occupies the sender
    gather_s, reduce_s    parameter gather and gradient reduction of one chunk on the data-parallel group
    overlapped            whether those run beside compute (chunk by chunk) or before and after all of it
    end_s                 optimizer, norms, tied embedding: after everything
    """

    stages: int
    chunks: int
    micro_batches: int
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    send_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    end_s: float = 0.0
    overlapped: bool = True

    def __post_init__(self) -> None:
        if min(self.stages, self.chunks, self.micro_batches) < 1:
            raise UsageError("a pipeline needs at least one stage, one chunk and one micro batch")
        if self.chunks > 1 and self.micro_batches % self.stages:
            raise UsageError(
                f"{self.micro_batches} micro batches on {self.stages} stages: an interleaved schedule needs a multiple"
            )


def order(stages: int, chunks: int, micro_batches: int, stage: int) -> tuple[list[Operation], int]:
    """The actions of one stage in the order of schedules.py, and how many forwards are warm-up by Megatron's count.

    Megatron departs from it in one case: with chunks and as many micro batches as stages, every forward goes first.
    """
    total = micro_batches * chunks
    warm_up = min(stages - stage - 1, micro_batches)
    if chunks > 1:
        warm_up = total if micro_batches == stages else min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
    row = _program(stages, chunks, micro_batches).actions[stage]
    operations = [(action.op is Op.FORWARD, action.stage // stages, action.micro_batch) for action in row]
    if warm_up == total:
        operations.sort(key=lambda operation: not operation[0])
    return operations, warm_up


@lru_cache(maxsize=8)
def _program(stages: int, chunks: int, micro_batches: int) -> Program:
    return build("1F1B" if chunks == 1 else "Interleaved1F1B", stages, micro_batches, chunks)


def pipeline_program(pipeline: Pipeline) -> LaneProgram:
    """The lane program of all stages; stage r is rank r."""
    program = LaneProgram(pipeline.stages)
    numbers = _Numbers(pipeline)
    for stage in range(pipeline.stages):
        numbers.reserve(stage)
    last = []
    for stage in range(pipeline.stages):
        last += _add_stage(program, pipeline, stage, numbers)
    if pipeline.end_s:
        for stage in range(pipeline.stages):
            program.fixed(stage, pipeline.end_s, [(operation, 0.0) for operation in last], "optimizer")
    return program


class _Numbers:
    """Where each operation will stand in the program, known before it is built, since stages depend on each other."""

    __slots__ = ("_base", "_next", "_pipeline", "_place", "orders")

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._next = 0
        self._place: list[dict[Operation, int]] = []
        self._base: list[int] = []
        self.orders: list[tuple[list[Operation], int]] = []

    def reserve(self, stage: int) -> None:
        """Number the operations of one stage in the order in which `_add_stage` adds them."""
        pipeline = self._pipeline
        operations, warm_up = order(pipeline.stages, pipeline.chunks, pipeline.micro_batches, stage)
        self.orders.append((operations, warm_up))
        self._base.append(self._next)
        place: dict[Operation, int] = {}
        at = self._next + _leading(pipeline)
        for i, operation in enumerate(operations):
            place[operation] = at
            at += 2 if _blocks(pipeline, i, len(operations), warm_up) else 1
        self._place.append(place)
        self._next = at + _trailing(pipeline)

    def base(self, stage: int) -> int:
        return self._base[stage]

    def of(self, stage: int, operation: Operation) -> int:
        return self._place[stage][operation]


def _leading(pipeline: Pipeline) -> int:
    if not pipeline.gather_s:
        return 0
    return pipeline.chunks if pipeline.overlapped else 1


def _trailing(pipeline: Pipeline) -> int:
    if not pipeline.reduce_s:
        return 0
    return pipeline.chunks if pipeline.overlapped else 1


def _blocks(pipeline: Pipeline, at: int, count: int, warm_up: int) -> bool:
    """Whether the send after operation `at` occupies the rank: in warm-up and flush there is no compute to hide it."""
    return pipeline.send_s > 0 and pipeline.stages > 1 and (at < warm_up or at >= count - warm_up)


def _add_stage(program: LaneProgram, pipeline: Pipeline, stage: int, numbers: _Numbers) -> list[int]:
    """Add one stage; returns the operations that must end before the optimizer may start."""
    chunks, base = pipeline.chunks, numbers.base(stage)
    if pipeline.gather_s:
        if pipeline.overlapped:
            for chunk in range(chunks):
                program.collective(stage, pipeline.gather_s, label=f"all_gather chunk {chunk}")
        else:
            program.fixed(stage, chunks * pipeline.gather_s, label="all_gather")
    operations, warm_up = numbers.orders[stage]
    for i, operation in enumerate(operations):
        is_forward, chunk, micro_batch = operation
        after = [(numbers.of(*need), lag) for need, lag in _needs(pipeline, stage, operation)]
        if is_forward and micro_batch == 0 and pipeline.gather_s and pipeline.overlapped:
            after.append((base + chunk, 0.0))
        weight = (pipeline.forward if is_forward else pipeline.backward)[stage][chunk]
        name = "forward" if is_forward else "backward"
        program.compute(stage, weight, after, f"{name} chunk {chunk} micro batch {micro_batch}")
        if _blocks(pipeline, i, len(operations), warm_up):
            program.fixed(stage, pipeline.send_s, label="send")
    ends = [numbers.of(stage, operations[-1])]
    if not pipeline.reduce_s:
        return ends
    if not pipeline.overlapped:
        return [program.fixed(stage, chunks * pipeline.reduce_s, label="reduce_scatter")]
    last = pipeline.micro_batches - 1
    for chunk in reversed(range(chunks)):
        after = [(numbers.of(stage, (False, chunk, last)), 0.0)]
        ends.append(program.collective(stage, pipeline.reduce_s, after, f"reduce_scatter chunk {chunk}"))
    return ends


def _needs(pipeline: Pipeline, stage: int, operation: Operation) -> list[tuple[tuple[int, Operation], float]]:
    """The operation on another stage (or the forward of a backward at the very end) that this one waits for."""
    is_forward, chunk, micro_batch = operation
    last_stage, last_chunk = pipeline.stages - 1, pipeline.chunks - 1
    if is_forward:
        if stage:
            return [((stage - 1, operation), pipeline.send_s)]
        return [((last_stage, (True, chunk - 1, micro_batch)), pipeline.send_s)] if chunk else []
    if stage < last_stage:
        return [((stage + 1, operation), pipeline.send_s)]
    if chunk < last_chunk:
        return [((0, (False, chunk + 1, micro_batch)), pipeline.send_s)]
    return [((stage, (True, chunk, micro_batch)), 0.0)]
