"""Turns launch shapes and device properties into how many thread blocks fill the device, kernel by kernel.

A kernel whose grid needs more blocks than fit at once keeps every slot taken until its last blocks are placed, so that
the kernel of another stream has to wait. How many fit follows from threads, registers and shared memory of a block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaletrace.parse.events import Events, Int32Array, IntArray
from scaletrace.parse.graph import UNKNOWN_DEVICE_BLOCKS

WARP = 32
_REGISTER_UNIT = 256
_BLOCK_LIMIT = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24}
_MOST_BLOCKS = 32
_RESERVED_BYTES = 1024
_USUAL_THREADS, _USUAL_REGISTERS = 2048, 65536


@dataclass(frozen=True, slots=True)
class Device:
    """What one device can hold; 0 where the trace does not say.

    processors  streaming multiprocessors;  the rest is a processor's: threads, registers, shared memory, blocks
    reserved_bytes  shared memory that the system takes of each block
    """

    processors: int
    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0
    blocks: int = _MOST_BLOCKS
    reserved_bytes: int = 0


def device_of(properties: Any) -> Device | None:
    """The first of Kineto's `deviceProperties` that tells its number of processors, None where none does."""
    for one in properties if isinstance(properties, list) else ():
        if isinstance(one, Mapping) and _whole(one, "numSms"):
            generation = (_whole(one, "computeMajor"), _whole(one, "computeMinor"))
            return Device(
                _whole(one, "numSms"),
                _whole(one, "maxThreadsPerMultiprocessor"),
                _whole(one, "regsPerMultiprocessor"),
                _whole(one, "sharedMemPerMultiprocessor"),
                _BLOCK_LIMIT.get(generation, _MOST_BLOCKS),
                _RESERVED_BYTES if generation >= (8, 0) else 0,
            )
    return None


def _whole(properties: Mapping[str, Any], key: str) -> int:
    value = properties.get(key)
    return value if isinstance(value, int) and 0 < value < 1 << 40 else 0


def grid_blocks(events: Events) -> IntArray:
    """Thread blocks of each kernel's grid, int64[n], 0 where the trace does not say."""
    return _product(events, "grid")


def _product(events: Events, key: str) -> IntArray:
    """Product of a recorded list such as [108, 1, 1], int64[n], 0 where the trace does not say.

    Readers hold it as a number already (`grid_size`) or as the text of the list (`grid`).
    """
    if f"{key}_size" in events.args:
        return events.ints(f"{key}_size", 0)
    codes = events.texts(key)
    product = {-1: 0}
    for code in np.unique(codes[codes >= 0]).tolist():
        numbers = [int(part) for part in re.findall(r"\d+", events.strings[code])]
        product[code] = min(math.prod(numbers), 2**40) if numbers else 0
    used, inverse = np.unique(codes, return_inverse=True)
    return np.array([product[int(code)] for code in used], np.int64)[inverse] if len(codes) else np.zeros(0, np.int64)


def device_from(events: Events, rows: IntArray, properties: Any) -> Device:
    """The device that the records `rows` ran on, by its properties, else by recorded ratios, else the default one."""
    found = device_of(properties) or _from_ratio(events, rows, grid_blocks(events)[rows])
    return Device(UNKNOWN_DEVICE_BLOCKS, blocks=1) if found is None else found


def filling_blocks(events: Events, rows: IntArray, device: Device) -> Int32Array:
    """For each of the device records `rows` how many thread blocks of its shape fill the device, int32[len(rows)]."""
    threads = _product(events, "block")[rows]
    warps = -(-threads // WARP)
    most = np.full(len(rows), device.blocks, np.int64)
    registers = -(-np.maximum(events.ints("registers per thread", 0)[rows], 0) * WARP // _REGISTER_UNIT)
    registers *= _REGISTER_UNIT * warps
    shared = np.maximum(events.ints("shared memory", 0)[rows], 0) + device.reserved_bytes
    limits = ((device.threads, warps * WARP), (device.registers, registers), (device.shared_bytes, shared))
    for limit, need in limits:
        if limit:
            most = np.where(need > 0, np.minimum(most, limit // np.maximum(need, 1)), most)
    resident = np.where(threads > 0, np.maximum(most, 1), 1)
    fill: Int32Array = np.minimum(resident * device.processors, 2**31 - 1).astype(np.int32)
    return fill


def _from_ratio(events: Events, rows: IntArray, blocks: IntArray) -> Device | None:
    """A device known only by the recorded blocks per processor; one of those is taken to hold what data-centre GPUs do."""
    ratio = events.reals("blocks per SM")[rows]
    known = np.isfinite(ratio) & (ratio > 0) & (blocks > 0)
    if not known.any():
        return None
    processors = max(round(float(np.median(blocks[known] / ratio[known]))), 1)
    return Device(processors, _USUAL_THREADS, _USUAL_REGISTERS)
