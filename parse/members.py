"""Holds one rank's part in all collectives as columns, and turns the words of records into kinds and bytes."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from scaletrace.parse.events import ByteArray, Int32Array, IntArray
from scaletrace.parse.job import KINDS

KIND = {name: code for code, name in enumerate(KINDS)}
UNKNOWN = KIND["unknown"]
P2P = frozenset({KIND["send"], KIND["recv"]})
UNIFORM = frozenset(KIND[k] for k in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier"))
"""Kinds whose largest side has the same size on every member, so that sizes tell instances apart."""

# in this order: "allgather" holds "gather", "reducescatter" holds "reduce" and "scatter"
_KIND_WORDS = (
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("bcast", "broadcast"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("sendrecv", "unknown"),
    ("isend", "send"),
    ("irecv", "recv"),
    ("send", "send"),
    ("recv", "recv"),
    ("reduce", "reduce"),
)
_TYPE_BYTES = {
    1: ("byte", "char", "bool", "uint8", "int8", "unsignedchar", "signedchar", "u8", "i8", "float8", "f8"),
    2: ("half", "bfloat16", "short", "int16", "float16", "bf16", "f16", "uint16", "shortint"),
    4: ("float", "int", "float32", "f32", "int32", "uint32", "i32", "u32"),
    8: ("double", "long", "longint", "int64", "float64", "f64", "i64", "u64", "uint64", "complexfloat"),
    16: ("complexdouble",),
}
_SIZE_OF = {name: size for size, names in _TYPE_BYTES.items() for name in names}


@dataclass(frozen=True, slots=True)
class Members:
    """What one rank took part in, in the order of issue; columns as in Collectives, times on the rank's own clock.

    issue_ns  int64: start of the host call, or of the span where no call was recorded
    turn_ns   int64: what orders the members of one group: the issue for gloo, the start for a kernel on its stream
    peer, root  int32: global ranks, -1 unknown
    label     int64: what the ordering rungs compare (kernel name or kind), equal on all members of an instance
    stream    int64: stream (or lane) of the span
    step      int64: number of the step in which it was issued, -1 outside or unknown
    functional  int64: 1 where the call came from a functional collective
    on_device int64: 1 where the span is a kernel, whose end all members share within microseconds
    """

    rank: int
    event: Int32Array
    host_event: Int32Array
    kind: ByteArray
    group: Int32Array
    seq: IntArray
    bytes_in: IntArray
    bytes_out: IntArray
    start_ns: IntArray
    end_ns: IntArray
    issue_ns: IntArray
    turn_ns: IntArray
    peer: Int32Array
    root: Int32Array
    label: IntArray
    stream: IntArray
    step: IntArray
    functional: IntArray
    on_device: IntArray

    def __len__(self) -> int:
        return len(self.event)

    @staticmethod
    def of(rank: int, columns: Mapping[str, Any]) -> Members:
        """Members from one array a column, in the right width and ordered by turn."""
        order = np.lexsort((columns["event"], columns["start_ns"], columns["turn_ns"]))
        narrow = {name: np.uint8 if name == "kind" else np.int32 for name in _NARROW}
        built: dict[str, Any] = {n: np.asarray(c)[order].astype(narrow.get(n, np.int64)) for n, c in columns.items()}
        return Members(rank, **built)

    @property
    def size_bytes(self) -> IntArray:
        """The size that all members of an instance share, -1 where the kind has none or it is unknown."""
        largest = np.maximum(self.bytes_in, self.bytes_out)
        return np.where(np.isin(self.kind, list(UNIFORM)), largest, -1)


_NARROW = ("kind", "event", "host_event", "group", "peer", "root")


def members_from(rank: int, rows: Sequence[Mapping[str, int]]) -> Members:
    """Members from one mapping a row; a key that a row lacks becomes -1."""
    names = [name for name in Members.__slots__ if name != "rank"]
    return Members.of(rank, {name: np.array([row.get(name, -1) for row in rows], np.int64) for name in names})


def concatenated(parts: Sequence[Members]) -> Members:
    """Several Members of one rank as one."""
    names = [name for name in Members.__slots__ if name != "rank"]
    return Members.of(parts[0].rank, {name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


@lru_cache(maxsize=4096)
def kind_of(name: str) -> int:
    """Code of the kind that an op, record or kernel name says; UNKNOWN where it says none."""
    text = re.sub("[^a-z]", "", name.lower())
    for word, kind in _KIND_WORDS:
        if word in text:
            return KIND[kind]
    return UNKNOWN


@lru_cache(maxsize=1024)
def type_bytes(name: str) -> int:
    """Size of one element of a type as Kineto writes it ("BFloat16", "c10::Half", "long int"), -1 unknown."""
    text = re.sub("[^a-z0-9]", "", name.lower().replace("c10::", ""))
    if text in _SIZE_OF:
        return _SIZE_OF[text]
    return 1 if text.startswith("float8") else -1


def label_of(text: str) -> int:
    """A number for a text that is the same in every process."""
    return zlib.crc32(text.encode("utf-8", "replace"))


@lru_cache(maxsize=4096)
def parsed(text: str | None) -> Any:
    """The JSON list behind "Input Dims" and its like; an empty tuple where it can't be read."""
    try:
        value = json.loads(text) if text else ()
    except (ValueError, RecursionError):
        return ()
    return value if isinstance(value, list) else ()


_MOST_ELEMENTS = 1 << 42
"""No tensor has more; as many for each rank of the largest job still fit 64 bits."""
_MOST_BYTES = 1 << 62


def is_shape(value: Any) -> bool:
    """Whether these are the sizes of a tensor that can be, so that their product fits a column of 64 bits."""
    return isinstance(value, list) and all(isinstance(one, int) for one in value) and abs(prod(value)) <= _MOST_ELEMENTS


def _count(dims: Any) -> int:
    """Elements of a tensor ([2, 3]), of a list of tensors, or of a list of lists."""
    if not isinstance(dims, list):
        return 0
    if any(isinstance(part, list) for part in dims):
        return min(sum(_count(part) for part in dims), _MOST_ELEMENTS)
    if not dims or not all(isinstance(part, int) and 0 <= part <= _MOST_ELEMENTS for part in dims):
        return 0
    return min(prod(dims), _MOST_ELEMENTS)


_OUT_FIRST = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def elements_of(kind: int, dims: Any, size: int) -> tuple[int, int]:
    """(elements in, elements out) of a c10d op from its "Input Dims"; -1 where shapes were not recorded.

    Ops with two tensors name the output first. The list forms of all_gather and reduce_scatter record only one side
    usably; the other is that times the group size.
    """
    if not isinstance(dims, list) or not dims:
        return (0, 0) if kind == KIND["barrier"] else (-1, -1)
    if KINDS[kind] not in _OUT_FIRST or len(dims) < 2:
        n = _count(dims[0])
        return (n, n) if n or kind == KIND["barrier"] else (-1, -1)
    out, inside = _count(dims[0]), _count(dims[1])
    if KINDS[kind] == "all_gather" and not out and inside:
        out = inside * max(size, 1)
    if KINDS[kind] == "reduce_scatter" and not inside and out:
        inside = out * max(size, 1)
    return (inside, out) if inside or out else (-1, -1)


def times(count: int, size_bytes: int) -> int:
    """count × size where both are known, else -1."""
    known = count > 0 and size_bytes > 0 and count * size_bytes <= _MOST_BYTES
    return count * size_bytes if known else 0 if count == 0 else -1


def concrete(text: str | None, index: int) -> int:
    """Integer at `index` of "Concrete Inputs", -1 where there is none."""
    values = parsed(text)
    try:
        found = int(values[index])
    except (IndexError, TypeError, ValueError, OverflowError):
        return -1
    return found if abs(found) <= _MOST_ELEMENTS else -1
