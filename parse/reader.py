"""Turns the bytes of one Kineto file into an event table and its header."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from scaletrace.errors import CorruptTraceError, InputError
from scaletrace.parse.events import Arg, Events, Flows, Lane
from scaletrace.parse.health import Health


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One file as read: events, the top-level keys beside them, and what had to be done."""

    source: str
    events: Events
    header: dict[str, Any]
    health: Health = field(default_factory=Health)


def _ns(value: Any) -> int:
    return int((Decimal(str(value)) * 1000).to_integral_value())


def read_file(source: str | Path, *, strict: bool = False) -> TraceFile:
    """Read one rank's trace.

    Raises InputError when the file can't be opened and CorruptTraceError when it holds no readable trace.
    """
    path = Path(source)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a folder of Kineto files or one file") from error
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CorruptTraceError(f"{path}: not valid JSON ({error})") from error
    header = {k: v for k, v in document.items() if k != "traceEvents"}
    return TraceFile(str(path), _table(document["traceEvents"], int(header.get("baseTimeNanoseconds") or 0)), header)


def _table(raw: list[dict[str, Any]], base_ns: int) -> Events:
    strings: dict[str, int] = {}
    cats: dict[str, int] = {}
    lanes: dict[tuple[Any, Any], int] = {}
    lane_names: dict[tuple[Any, Any], str] = {}
    columns: dict[str, list[int]] = defaultdict(list)
    arg_rows: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    flows: list[tuple[int, int, int, int, bool]] = []

    def code(table: dict[Any, int], key: Any) -> int:
        return table.setdefault(key, len(table))

    events = [e for e in raw if e.get("ph") not in ("M", "s", "f", "t")]
    events.sort(key=lambda e: (e.get("ts", 0), -float(e.get("dur") or 0), str(e.get("tid")), str(e.get("name"))))
    for e in raw:
        if e.get("ph") == "M" and e.get("name") == "thread_name":
            lane_names[(e["pid"], e["tid"])] = e["args"]["name"]
        elif e.get("ph") in ("s", "f", "t"):
            lane = code(lanes, (e["pid"], e["tid"]))
            flows.append((code(cats, e["cat"]), int(e["id"]), lane, base_ns + _ns(e["ts"]), e["ph"] == "s"))
    for row, e in enumerate(events):
        args = e.get("args") or {}
        columns["ph"].append(ord(e.get("ph", "X")))
        columns["cat"].append(code(cats, e.get("cat") or ""))
        columns["name"].append(code(strings, str(e.get("name"))))
        columns["lane"].append(code(lanes, (e.get("pid", 0), e.get("tid", 0))))
        columns["ts_ns"].append(base_ns + _ns(e.get("ts", 0)))
        columns["dur_ns"].append(_ns(e.get("dur") or 0))
        for column, key in (
            ("correlation", "correlation"),
            ("external_id", "External id"),
            ("stream", "stream"),
            ("device", "device"),
        ):
            value = args.get(key)
            columns[column].append(value if isinstance(value, int) else -1)
        for key, value in args.items():
            arg_rows[key].append((row, value))
    built: dict[str, Arg] = {}
    for key, pairs in arg_rows.items():
        rows = np.array([row for row, _ in pairs], np.int32)
        if all(isinstance(v, int) for _, v in pairs):
            big = any(v >= 2**63 for _, v in pairs)
            built[key] = Arg(rows, np.array([v for _, v in pairs], np.uint64 if big else np.int64))
        else:
            codes = [code(strings, v if isinstance(v, str) else json.dumps(v, separators=(",", ":"))) for _, v in pairs]
            built[key] = Arg(rows, np.array(codes, np.int32), is_text=True)
    cat, id_, lane_, ts, is_start = zip(*flows, strict=True) if flows else ((),) * 5
    return Events(
        ph=np.array(columns["ph"], np.uint8),
        cat=np.array(columns["cat"], np.int32),
        name=np.array(columns["name"], np.int32),
        lane=np.array(columns["lane"], np.int32),
        ts_ns=np.array(columns["ts_ns"], np.int64),
        dur_ns=np.array(columns["dur_ns"], np.int64),
        correlation=np.array(columns["correlation"], np.int64),
        external_id=np.array(columns["external_id"], np.int64),
        stream=np.array(columns["stream"], np.int64),
        device=np.array(columns["device"], np.int64),
        strings=tuple(strings),
        cats=tuple(cats),
        lanes=tuple(Lane(pid, tid, lane_names.get((pid, tid), "")) for pid, tid in lanes),
        args=built,
        flows=Flows(
            np.array(cat, np.int32),
            np.array(id_, np.int64),
            np.array(lane_, np.int32),
            np.array(ts, np.int64),
            np.array(is_start, np.bool_),
        ),
    )
