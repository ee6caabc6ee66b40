"""Turns a step with an optimizer sharded by whole tensors (ZeRO-1 as InternEvo does it) into a lane program.

Each tensor has one owner. The last backward reduces each owner's gradients to it, and after the update every owner
broadcasts its parameters: one collective an owner, each with the ring latency of the whole group. A model of equal
shards (one reduce-scatter, one all-gather) would be flat where these grow with the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaletrace.extrapolate.described.lanes import LaneProgram


@dataclass(frozen=True, slots=True)
class OwnedStep:
    """`micro_batches` of forward and backward; reductions hide under the last backward, broadcasts do not hide.

    reduce_s     seconds of each reduction, in the order in which gradients become ready
    broadcast_s  seconds of all broadcasts after the optimizer
    """

    micro_batches: int
    reduce_s: tuple[float, ...]
    broadcast_s: float
    optimizer_s: float
    forward_share: float = 1 / 3


def owned_program(step: OwnedStep) -> LaneProgram:
    """The lane program of one rank; total compute weight is 1."""
    program = LaneProgram(1)
    share = 1.0 / step.micro_batches
    program.compute(0, share * (step.micro_batches - 1) + share * step.forward_share, label="forward and backward")
    backward = share * (1 - step.forward_share) / max(1, len(step.reduce_s))
    last = -1
    for i, seconds in enumerate(step.reduce_s):
        done = program.compute(0, backward, label=f"backward part {i}")
        last = program.collective(0, seconds, [(done, 0.0)], f"reduce part {i}")
    if not step.reduce_s:
        program.compute(0, share * (1 - step.forward_share), label="backward")
    program.fixed(0, step.optimizer_s, [(last, 0.0)] if last >= 0 else [], "optimizer")
    program.fixed(0, step.broadcast_s, label="broadcast")
    return program
