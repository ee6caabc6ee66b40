"""Turns raw columns in file order into the event table, in an order and with codes that the content alone decides."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.parse import tidy
from scaletrace.parse.events import (
    TIME_UNKNOWN,
    Arg,
    BoolArray,
    CodeArray,
    Events,
    Flows,
    Int32Array,
    IntArray,
    Lane,
)
from scaletrace.parse.health import Health
from scaletrace.parse.pairs import pair
from scaletrace.parse.rawtable import COLUMNS, RawTable
from scaletrace.parse.scan import MISSING
from scaletrace.parse.scan_keys import KINDS, NAMES, REAL, TEXT
from scaletrace.parse.scan_state import texts_of

_WINDOW_END = b"Record Window End"
_EVENT_NAMES = {"ts": "ts_ns", "dur": "dur_ns"}


def build(table: RawTable, base_ns: int, health: Health) -> tuple[Events, IntArray]:
    """(events, document offset of each event's text). Empties `table`."""
    table.finish()
    meta, flows = _split(table.take_others())
    columns: dict[str, npt.NDArray[Any]] = {name: table.take(name) for name in COLUMNS}
    columns["ts"] = tidy.mark_unknown(columns["ts"], health)
    base_ns = tidy.base_for(columns["ts"], base_ns, health)
    is_window_end = _window_end(table, columns["ph"], columns["name"])
    paired = pair(columns, MISSING, health)
    if paired is not None:
        for name in columns:
            columns[name] = columns[name][paired[0]]
        is_window_end = is_window_end[paired[0]]
    columns["dur"] = tidy.clip(columns["ph"], columns["ts"], columns["dur"], is_window_end, health)
    strings, recode = _strings(table, columns["name"], health)
    columns["name"] = recode[columns["name"]]
    cats, cat_recode = _cats(table, columns["cat"], flows[:, 2])
    columns["cat"] = cat_recode[columns["cat"]]
    lanes, lane_recode = _lanes(table, columns["lane"], flows[:, 1], meta)
    columns["lane"] = lane_recode[columns["lane"]]
    order = _order(columns)
    del columns["content"]
    for name in columns:  # one at a time, so that only one column stands in memory twice
        columns[name] = columns[name][order]
    np.add(columns["ts"], base_ns, out=columns["ts"], where=columns["ts"] != TIME_UNKNOWN)
    place = _places(order, paired)
    args: dict[str, Arg] = {}
    for number, key in enumerate(NAMES):
        rows, values, unsigned = table.take_arg(number)
        if paired is not None:
            known = place[rows] >= 0
            rows, values, unsigned = rows[known], values[known], unsigned[known]
        if len(rows):
            args[key] = _arg(key, place[rows], values, unsigned, recode)
    offsets: IntArray = columns.pop("offset")
    events = Events(
        **{_EVENT_NAMES.get(name, name): column for name, column in columns.items()},
        strings=strings,
        cats=cats,
        lanes=lanes,
        args=args,
        flows=_flows(flows, cat_recode, lane_recode, base_ns),
    )
    return events, offsets


def _places(order: IntArray, paired: tuple[BoolArray, IntArray] | None) -> Int32Array:
    """For each row as it was read its row in the table, where some were joined to others; -1: it has none."""
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    if paired is None:
        return place
    keep, heir = paired
    kept = np.full(len(keep), MISSING, np.int32)
    kept[keep] = place
    return kept[heir]


def _split(others: IntArray) -> tuple[IntArray, IntArray]:
    is_meta = others[:, 0] == ord("M")
    return others[is_meta], others[~is_meta]


def _window_end(table: RawTable, ph: npt.NDArray[np.uint8], names: Int32Array) -> BoolArray:
    instants = np.flatnonzero(ph != ord("X"))
    codes = [code for code in np.unique(names[instants]).tolist() if table.text(code) == _WINDOW_END]
    mask = np.zeros(len(ph), np.bool_)
    mask[instants] = np.isin(names[instants], codes)
    return mask


def _order(columns: dict[str, npt.NDArray[Any]]) -> IntArray:
    """Positions sorted by ts, longest first, then lane and name; only rows that share a ts pay for the ties.

    What then still ties goes by a hash of category, phase and arguments, so that the file's order never decides.
    """
    ts = columns["ts"]
    order = np.argsort(ts, kind="stable")
    at = np.flatnonzero(np.diff(ts[order]) == 0)
    shared = np.zeros(len(ts), np.bool_)
    shared[at] = True
    shared[at + 1] = True
    at = np.flatnonzero(shared)
    rows = order[at]
    rest = columns["content"][rows]
    rest += columns["cat"][rows].astype(np.int64) << 8 | columns["ph"][rows]
    place = columns["lane"][rows].astype(np.int64) << 32 | columns["name"][rows]
    order[at] = rows[np.lexsort((rest, place, -columns["dur"][rows], ts[rows]))]
    return order


def _strings(table: RawTable, names: Int32Array, health: Health) -> tuple[tuple[str, ...], CodeArray]:
    """(sorted texts of names and text arguments, new code of every old one; [-1] is the code of "" if needed)."""
    used = np.zeros(table.text_count + 1, np.bool_)
    used[names] = True
    for held in table.text_codes():
        used[held] = True
    needs_empty, used = bool(used[-1]), used[:-1]
    raw_texts, codes = texts_of(table.st, table.mem, used)
    texts, broken = [], 0
    for raw_text in raw_texts:
        try:
            texts.append(raw_text.decode())
        except UnicodeDecodeError:
            texts.append(raw_text.decode("utf-8", "replace"))
            broken += 1
    if broken:
        health.repaired["texts that are not UTF-8"] += broken
    distinct = sorted({*texts, ""} if needs_empty else set(texts))
    position = {text: code for code, text in enumerate(distinct)}
    recode = np.full(len(used) + 1, MISSING, np.int32)
    recode[codes] = [position[text] for text in texts]
    if needs_empty:
        recode[-1] = position[""]
    return tuple(distinct), recode


def _used(count: int, *columns: npt.NDArray[Any]) -> IntArray:
    """The codes below `count` that stand in any of the columns, ascending; -1 (missing) last where it occurs."""
    seen = np.zeros(count + 1, np.bool_)
    for column in columns:
        seen[column] = True
    codes = np.flatnonzero(seen)
    codes[codes == count] = MISSING
    return codes


def _cats(table: RawTable, cats: Int32Array, flow_cats: IntArray) -> tuple[tuple[str, ...], CodeArray]:
    codes = _used(table.text_count, cats, flow_cats)
    texts = [table.text(code).decode("utf-8", "replace") for code in codes.tolist()]
    distinct = sorted(set(texts))
    recode = np.full(table.text_count + 1, MISSING, np.int32)
    recode[codes] = [distinct.index(text) for text in texts]
    return tuple(distinct), recode


def _lanes(
    table: RawTable, lanes: Int32Array, flow_lanes: IntArray, meta: IntArray
) -> tuple[tuple[Lane, ...], CodeArray]:
    used = _used(table.lanes, lanes, flow_lanes)
    pairs = [table.lane_pair(lane) for lane in range(table.lanes)]
    tokens = [(_id(table.text(pid)), _id(table.text(tid))) for pid, tid in pairs]
    names, processes = _lane_names(table, tokens, meta)
    distinct = sorted({tokens[lane] for lane in used.tolist()}, key=_lane_key)
    position = {key: at for at, key in enumerate(distinct)}
    recode = np.full(len(tokens) + 1, MISSING, np.int32)
    for lane in used.tolist():
        recode[lane] = position[tokens[lane]]
    made = tuple(Lane(pid, tid, names.get((pid, tid), ""), processes.get(pid, "")) for pid, tid in distinct)
    return made, recode


def _lane_key(key: tuple[int | str, int | str]) -> tuple[bool, int | str, bool, int | str]:
    pid, tid = key
    return isinstance(pid, str), pid, isinstance(tid, str), tid


def _id(token: bytes) -> int | str:
    """A pid or tid as written; "" where it is absent or null."""
    text = token.decode("utf-8", "replace")
    if re.fullmatch(r"-?\d{1,30}", text):
        return int(text)
    try:
        value = json.loads(text, strict=False) if text else None
    except ValueError:
        return text
    return "" if value is None else value if isinstance(value, str) else text


def _lane_names(
    table: RawTable, tokens: list[tuple[int | str, int | str]], meta: IntArray
) -> tuple[dict[tuple[int | str, int | str], str], dict[int | str, str]]:
    """(thread name of each lane, "name label" of each process).

    A thread may be named twice, first after its process and then after its work; the name that fewer threads bear wins.
    """
    distinct = sorted(set(map(tuple, meta[:, 1:4].tolist())))
    threads: set[tuple[tuple[int | str, int | str], str]] = set()
    processes: dict[int | str, dict[str, set[str]]] = {}
    for lane, name, value in distinct:
        what, text = table.text(name), table.text(value).decode("utf-8", "replace")
        key = tokens[lane]
        if what == b"thread_name" and text:
            threads.add((key, text))
        elif what in (b"process_name", b"process_labels") and text:
            processes.setdefault(key[0], {}).setdefault(what.decode(), set()).add(text)
    bearers = Counter(re.sub(r"\d+", "", text) for _, text in threads)
    names: dict[tuple[int | str, int | str], str] = {}
    for key, text in sorted(threads, key=lambda item: (-bearers[re.sub(r"\d+", "", item[1])], item[1])):
        names[key] = text
    labelled = {
        pid: " ".join(sorted(kinds.get("process_name", ())) + sorted(kinds.get("process_labels", ())))
        for pid, kinds in processes.items()
    }
    return names, labelled


def _arg(key: str, rows: Int32Array, values: npt.NDArray[Any], unsigned: BoolArray, recode: CodeArray) -> Arg:
    """One argument's column in table order; of a key that stands twice in an event the last value counts."""
    order = np.argsort(rows, kind="stable")
    rows, values, unsigned = rows[order], values[order], unsigned[order]
    last = np.append(rows[1:] != rows[:-1], True)
    if not last.all():
        rows, values, unsigned = rows[last], values[last], unsigned[last]
    if KINDS[key] == TEXT:
        return Arg(rows, recode[values], is_text=True)
    if KINDS[key] == REAL:
        return Arg(rows, values.view(np.float64))
    if unsigned.any():
        keep = unsigned | (values >= 0)
        return Arg(rows[keep], values[keep].view(np.uint64))
    return Arg(rows, values)


def _flows(raw: IntArray, cats: CodeArray, lanes: CodeArray, base_ns: int) -> Flows:
    ph, lane_codes, cat_codes, ids, ts = raw.T
    cat, lane, is_start = cats[cat_codes], lanes[lane_codes], ph == ord("s")
    order = np.lexsort((lane, ~is_start, ts, ids, cat))
    return Flows(cat[order], ids[order], lane[order], ts[order] + base_ns, is_start[order])
