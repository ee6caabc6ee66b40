"""Turns a state into one on another device: kernels by the ratio of its ceilings, host work as it was."""

from __future__ import annotations

import numpy as np

from scaletrace.extrapolate.kernels import Ceilings, Shape
from scaletrace.extrapolate.nodework import Role
from scaletrace.extrapolate.rewrite.state import State, stretched, told


def move(state: State, ceilings: Ceilings) -> State:
    """All kernels on a device with these ceilings; the network stays (relayout costs it anew on its own cluster).

    A kernel without a known shape is taken to be bound by memory, and counted.
    """
    by_memory = state.ceilings.memory_Bps / ceilings.memory_Bps

    def stretch(shape: Shape | None, role: Role) -> tuple[Shape | None, float]:
        return shape, by_memory

    out = stretched(state, stretch, np.ones(len(state.graph), np.bool_), ceilings)
    if any(shape is None and computes for shape, computes in zip(state.work.shape, state.work.computes, strict=True)):
        out = told(out, guess="kernels without a shape taken as bound by memory on another device")
    return out
