"""Turns a typed Python function into a numba-compiled one without losing its type for the checkers."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile on first call and cache on disk; `function.py_func` keeps the plain version for tests.

    Numba keys its cache by the function's own file, while constants and callees of other files are compiled in: after
    a change of one of them it would go on using the old code. So the stamp of the cache covers them too.
    """
    compiled: Any = numba.njit(cache=True, nogil=True)(function)
    stamp = dependencies(cast(types.FunctionType, function))
    compiled.scaletrace_stamp = stamp
    index: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(index, "_source_stamp"):
        index._source_stamp = (index._source_stamp, stamp)
    return cast(Callable[P, R], compiled)


def dependencies(function: types.FunctionType) -> str:
    """Digest of the code of `function` and of the constants and compiled functions that it names, whatever their file."""
    digest = hashlib.sha256(function.__code__.co_code + repr(function.__code__.co_consts).encode())
    for name in sorted(function.__code__.co_names):
        digest.update(name.encode() + _mark(function.__globals__.get(name)))
    return digest.hexdigest()


def _mark(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, type) and issubclass(value, Enum):
        return repr([(member.name, member.value) for member in value]).encode()
    if isinstance(value, int | float | str | bytes | tuple | Enum | np.generic):
        return repr(value).encode()
    return str(getattr(value, "scaletrace_stamp", "")).encode()
