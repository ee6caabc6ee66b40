"""Turns PyTorch's flight recorder into a small JSON document that says what Kineto does not: which group, which number.

Kineto's traces of gloo jobs carry no group and no sequence number; the flight recorder has both for each collective,
with its time of issue on the same clock. It is on by default, and TORCH_FR_BUFFER_SIZE=0 turns it off.
"""

from __future__ import annotations

import json
from typing import Any


def flight_record(rank: int, world_size: int) -> dict[str, Any] | None:
    """The collectives that this process remembers (2,000 by default), None where this PyTorch can't tell.

    Keys as PyTorch writes them: `entries` (each with process_group [name, description], collective_seq_id, sizes,
    dtypes, time_created_ns in unix ns), `pg_config`, `pg_status`; beside them `rank` and `world_size`.
    A time that PyTorch never learnt is null, not 0.
    """
    try:
        from torch._C import _distributed_c10d as c10d
    except ImportError:
        return None
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            record: dict[str, Any] = json.loads(dump(includeCollectives=True, onlyActive=False))
            return complete(record, rank, world_size)
    return None


def complete(record: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """`record` with its rank, with `entries` even where there are none, and without zeros that mean unknown."""
    entries = record.setdefault("entries", [])
    for entry in entries:
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[key] = entry.get(key) or None
    record["rank"], record["world_size"] = rank, world_size
    return record
