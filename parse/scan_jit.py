"""Turns a scanner function into a compiled one whose cache on disk notices changes in all scanner modules.

Numba keys its cache by the function's own file, while constants and callees of other files are compiled in: after an
update of one of them it would go on using the old code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from scaletrace.jit import jit as plain_jit

P = ParamSpec("P")
R = TypeVar("R")


@cache
def family_stamp() -> bytes:
    """Digest of the sources of all scanner modules."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("scan*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """`scaletrace.jit.jit`, with a cache that is renewed when any scanner module changes."""
    compiled = plain_jit(function)
    index: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(index, "_source_stamp"):
        index._source_stamp = (index._source_stamp, family_stamp())
    return compiled
