"""Turns flight-recorder dumps that lie beside the traces into entries with group, sequence and payload."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletrace.parse.health import Health
from scaletrace.parse.peek import Found

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
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        elif raw[:4] == b"\x28\xb5\x2f\xfd":
            import zstandard

            raw = zstandard.ZstdDecompressor().stream_reader(raw).read()
        dump = json.loads(raw)
    except (OSError, EOFError, ValueError):
        return None
    return dump if isinstance(dump, dict) and isinstance(dump.get("entries"), list) else None
