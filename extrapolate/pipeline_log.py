"""Turns a pipeline's own log of its actions (one JSON file a rank, as Primus' pp_vis writes) into times to predict from.

Such a log holds no operators, only when each forward and backward of each micro batch started and ended on its rank.
Stages share their layers' time: what the first and the last stage take more than the others is embedding and head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.rewrite.pp import pipeline_graph
from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program, build
from scaletrace.parse.graph import Graph
from scaletrace.parse.small import read_small

FloatArray = np.typing.NDArray[np.float64]
KEYS = ("fwd_start", "fwd_end", "bwd_start", "bwd_end")
LARGEST_LOG = 256 << 20


@dataclass(frozen=True, slots=True)
class PipelineLog:
    """Times in ns: [step, rank, k-th action of the rank]. total_ns [step, rank]: end of the rank's step."""

    forward_start_ns: FloatArray
    forward_end_ns: FloatArray
    backward_start_ns: FloatArray
    backward_end_ns: FloatArray
    total_ns: FloatArray

    @property
    def ranks(self) -> int:
        return int(self.total_ns.shape[1])

    @property
    def actions(self) -> int:
        """Forwards of a rank in a step: micro batches × chunks."""
        return int(self.forward_start_ns.shape[2])

    @property
    def step_ns(self) -> FloatArray:
        """Length of each step: that of its slowest rank."""
        return np.asarray(self.total_ns.max(axis=1))


def read_pipeline_log(paths: Sequence[Path], unit_ns: float = 1e6, skip_steps: int = 2) -> PipelineLog:
    """Read one file a pipeline rank, in order of rank. Times are in units of `unit_ns` (ms); the first steps warm up.

    Raises InputError for what is not such a log, naming file, step and key.
    """
    if not paths:
        raise InputError("no pipeline log given; name one JSON file a pipeline rank")
    ranks = [_read(path) for path in paths]
    steps = [step for step in ranks[0] if all(step in rank for rank in ranks)][skip_steps:]
    if not steps:
        raise InputError(f"{paths[0]}: fewer than {skip_steps + 1} steps that all ranks have; record more")
    columns = []
    for key in (*KEYS, "total"):
        values = [[ranks[r][step].get(key) for r in range(len(paths))] for step in steps]
        try:
            columns.append(np.array(values, np.float64) * unit_ns)
        except (TypeError, ValueError) as error:
            raise InputError(f"{paths[0]} and its neighbours: {key!r} is missing or differs in length") from error
    if not all(np.isfinite(column).all() for column in columns):
        raise InputError(f"{paths[0]} and its neighbours: a time is missing or not finite")
    return PipelineLog(*columns)


def _read(path: Path) -> Mapping[str, Mapping[str, object]]:
    try:
        document = json.loads(read_small(path, "give a log of a pipeline's times", LARGEST_LOG))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(document, dict) or not all(isinstance(step, dict) for step in document.values()):
        raise InputError(f"{path}: not a pipeline log, which maps a step to {', '.join(KEYS)} and total")
    return document


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the log tells of a stage's parts, in ns.

    forward, backward   float64[ranks, micro batches]: one action of the measured program
    head_forward, head_backward  what the last stage's actions take beyond the others'
    overhead, hop       from one action to the next on a rank; from an action's end to its successor's start elsewhere
    end                 what follows the last action of a step on the first rank
    """

    forward_ns: FloatArray
    backward_ns: FloatArray
    head_forward_ns: float
    head_backward_ns: float
    overhead_ns: float
    hop_ns: float
    end_ns: float


def stage_times(log: PipelineLog) -> StageTimes:
    """Medians over the steps. The source must be a pipeline without chunks, so that each action is a whole stage."""
    forward = np.median(log.forward_end_ns - log.forward_start_ns, axis=0)
    backward = np.median(log.backward_end_ns - log.backward_start_ns, axis=0)
    typical_forward, typical_backward = np.median(forward[:-1]), np.median(backward[:-1])
    starts = np.sort(np.concatenate([log.forward_start_ns, log.backward_start_ns], axis=2), axis=2)
    ends = np.sort(np.concatenate([log.forward_end_ns, log.backward_end_ns], axis=2), axis=2)
    hop = np.concatenate(
        [
            (log.forward_start_ns[:, 1:] - log.forward_end_ns[:, :-1]).ravel(),
            (log.backward_start_ns[:, :-1] - log.backward_end_ns[:, 1:]).ravel(),
        ]
    )
    gaps = starts[:, -1, 1:] - ends[:, -1, :-1]  # the last rank of a full pipeline never waits in its steady state
    tail = log.total_ns - np.maximum(log.forward_end_ns.max(axis=2), log.backward_end_ns.max(axis=2))
    return StageTimes(
        forward,
        backward,
        max(0.0, float(np.median(forward[-1]) - typical_forward)),
        max(0.0, float(np.median(backward[-1]) - typical_backward)),
        max(0.0, float(np.median(gaps))),
        max(0.0, float(np.quantile(hop, 0.05))),
        max(0.0, float(np.median(tail[:, 0]))),
    )


def predict(log: PipelineLog, program: Program) -> Graph:
    """The graph of the same layers under another program on as many ranks; replay gives its step.

    A chunk takes its share of its rank's stage, the last one the head beside; fixed cost of an action and hops stay.
    Raises UsageError where the ranks or micro batches differ.
    """
    times = stage_times(log)
    if program.ranks != log.ranks or program.micro_batches != log.actions:
        raise UsageError(
            f"the log has {log.ranks} ranks and {log.actions} micro batches, the program {program.ranks} and "
            f"{program.micro_batches}"
        )

    def time_ns(action: Action) -> int:
        rank = program.rank_of_stage[action.stage]
        forward = action.op is Op.FORWARD
        whole = (times.forward_ns if forward else times.backward_ns)[rank, action.micro_batch]
        head = times.head_forward_ns if forward else times.head_backward_ns
        layers = whole - (head if rank == log.ranks - 1 else 0.0)
        share = layers / program.chunks + (head if action.stage == program.stages - 1 else 0.0)
        if action.op in (Op.INPUT, Op.WEIGHT):
            share /= 2
        return round(float(share) + times.overhead_ns)

    return pipeline_graph(program, time_ns, lambda size, src, dst: round(max(0.0, times.hop_ns - times.overhead_ns)))


def measured_program(log: PipelineLog) -> Program:
    """1F1B over the log's ranks."""
    return build("1F1B", log.ranks, log.actions)
