"""Compiled code on disk is renewed when anything it was compiled from changes."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np

from scaletrace.jit import dependencies, jit

FACTOR = 2


def scaled(x: int) -> int:
    return x * FACTOR


def _with(**names: object) -> types.FunctionType:
    assert isinstance(scaled, types.FunctionType)
    return types.FunctionType(scaled.__code__, {**scaled.__globals__, **names})


def test_constants_of_other_files_are_part_of_the_stamp() -> None:
    """The same source with another constant behind a name is another function; with the same one it is the same."""
    same, other = dependencies(_with(FACTOR=2)), dependencies(_with(FACTOR=3))

    assert dependencies(_with()) == same
    assert same != other
    assert dependencies(_with(FACTOR=np.array([1]))) != dependencies(_with(FACTOR=np.array([2])))


def test_callees_are_part_of_the_stamp() -> None:
    """A function that calls a compiled one changes with it."""

    def calling(callee: Callable[[int], int]) -> str:
        def outer(x: int) -> int:
            return inner(x)  # type: ignore[name-defined]  # noqa: F821

        assert isinstance(outer, types.FunctionType)
        return dependencies(types.FunctionType(outer.__code__, {"inner": callee}))

    two, three = jit(_with(FACTOR=2)), jit(_with(FACTOR=3))

    assert calling(two) != calling(three)
    assert (8, 12) == (two(4), three(4))
