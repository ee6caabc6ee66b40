"""Turns the list of arguments that analysis needs into the lookup table that the scanner uses.

Every other argument stays in the file and is read on demand (`TraceFile.arguments`).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from scaletrace.parse.events import IntArray

INT, REAL, TEXT, PRODUCT, LABEL = 0, 1, 2, 3, 4
"""How a wanted argument is stored: integer (also from "17", true, 2.0), float64, text or JSON, product of a list.

LABEL: a text that names a process or thread in a metadata record, kept for those only.
"""

DENSE = ("correlation", "External id", "stream", "device")
"""Arguments with a column of their own in Events; their key numbers are their positions here."""

_INTS = """
context|cbid|cid|bytes|registers per thread|shared memory|graph id|graph node id|priority|channel|event_id
wait_on_stream|wait_on_cuda_event_record_corr_id|wait_on_cuda_event_id
In msg nelems|Out msg nelems|Group size|Global rank start|Global rank stride|Rank|Src Rank|Dst Rank|Seq|Comms Id
Is asynchronized op|Process Group ID|Sequence number|Fwd thread id|Record function id|Ev Idx|finished
Python id|Python parent id|Python module id|Python thread
Bytes|Addr|Device Type|Device Id|Total Allocated|Total Reserved
fromDevice|inDevice|toDevice|num_warps|num_stages|flops|sqid|seq_num|stream_id|Op count|hsa_queue|Trace iteration|rank
"""
_REALS = "blocks per SM|warps per SM|est. achieved occupancy %|memory bandwidth (GB/s)|Est. SM Efficiency|value"
_TEXTS = """
Collective name|dtype|In split size|Out split size
Process Group Name|Process Group Description|Process Group Ranks
Input Dims|Input type|Concrete Inputs|cuda_sync_kind|kind|kernel|kernel_backend|direction|channel_type
executable_name|Module Hierarchy|sycl queue|l0 queue
"""
_PRODUCTS = {"grid": "grid_size", "block": "block_size"}
_OLDER_NAMES = {"external id": "External id", "Profiler Event Index": "Ev Idx", "Backend": "kernel_backend"}


def _names(block: str) -> list[str]:
    return [name for line in block.strip().splitlines() for name in line.split("|")]


KINDS: dict[str, int] = {
    **dict.fromkeys(DENSE, INT),
    **dict.fromkeys(_names(_INTS), INT),
    **dict.fromkeys(_names(_REALS), REAL),
    **dict.fromkeys(_names(_TEXTS), TEXT),
    **dict.fromkeys(_PRODUCTS.values(), PRODUCT),
    **dict.fromkeys(("name", "labels"), LABEL),
}
NAMES = tuple(KINDS)


KEY_SLOTS = 512


def fnv1a(text: bytes) -> int:
    """The hash that `scan_text.string_hash` computes."""
    h = 0xCBF29CE484222325
    for byte in text:
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


@cache
def key_table() -> IntArray:
    """int64[3 x KEY_SLOTS + 256]: open-addressing table of (hash, length, number) for all spellings, then the kinds."""
    slots = np.zeros((KEY_SLOTS, 3), np.int64)
    slots[:, 2] = -1
    spellings = {name: NAMES.index(name) for name in NAMES}
    for name, stored in (*_PRODUCTS.items(), *_OLDER_NAMES.items()):
        spellings[name] = NAMES.index(stored)
    for name, number in spellings.items():
        h = fnv1a(name.encode())
        slot = h % KEY_SLOTS
        while slots[slot, 2] >= 0:
            slot = (slot + 1) % KEY_SLOTS
        slots[slot] = np.array(h, np.uint64).view(np.int64), len(name.encode()), number
    kinds = np.zeros(256, np.int64)
    kinds[: len(NAMES)] = [KINDS[name] for name in NAMES]
    return np.concatenate([slots.ravel(), kinds])
