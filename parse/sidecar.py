"""Turns flight-recorder dumps that lie beside the traces into entries with group, sequence and payload."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletrace.errors import InputError
from scaletrace.parse.health import Health
from scaletrace.parse.peek import Found, read_head

LARGEST_BYTES = 512 << 20
"""Decompressed; the recorder's ring holds some thousands of entries of a few hundred bytes."""
_RANK = re.compile(r"(\d+)\D*$")


def sidecars_by_rank(found: Sequence[Found], health: Health) -> dict[int, Mapping[str, Any]]:
    """The dumps of a capture by rank. The rank is the dump's own, or the last number of its name."""
    out: dict[int, Mapping[str, Any]] = {}
    for file in found:
        named = _RANK.search(re.sub(r"\.json(\.gz|\.zst)?$", "", file.path.name))
        rank = file.rank if file.rank is not None else int(named[1]) if named else None
        dump = _read(file.path)
        if rank is None or dump is None:
            health.dropped["flight-recorder dumps that can't be read"] += 1
            health.note(f"{file.path.name}: not used, no rank or no readable entries")
            continue
        out[rank] = dump
    return out


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        raw = read_head(path, LARGEST_BYTES + 1)
        dump = json.loads(raw) if len(raw) <= LARGEST_BYTES else None
    except (InputError, ValueError, RecursionError):
        return None
    return dump if isinstance(dump, dict) and isinstance(dump.get("entries"), list) else None
