"""Turns a typed Python function into a numba-compiled one without losing its type for the checkers."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile on first call and cache on disk; `function.py_func` keeps the plain version for tests."""
    return cast(Callable[P, R], numba.njit(cache=True, nogil=True)(function))
