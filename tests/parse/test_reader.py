"""One file in any form gives the same table: layout, compression, order, base, damage."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from scaletrace.errors import CorruptTraceError, InputError, LimitError, NotATraceError
from scaletrace.parse.events import TIME_UNKNOWN, Events, Lane
from scaletrace.parse.limits import Limits
from scaletrace.parse.reader import TraceFile, read_file

BASE = 1790857026000000000


def event(name: str, ts: float, dur: float = 1, **more: Any) -> dict[str, Any]:
    """A host span on thread 2 of process 1."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur, **more}


def read(document: Any, **options: Any) -> TraceFile:
    """The trace of a document given as bytes or as what json.dumps takes."""
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return read_file(io.BytesIO(raw), **options)


def fingerprint(events: Events) -> list[Any]:
    """All that a table holds, as plain values."""
    columns = ("ph", "cat", "name", "lane", "ts_ns", "dur_ns", "correlation", "external_id", "stream", "device")
    args = {key: (arg.rows.tolist(), arg.values.tolist(), arg.is_text) for key, arg in events.args.items()}
    flows = [getattr(events.flows, name).tolist() for name in events.flows.__slots__]
    plain = [getattr(events, name).tolist() for name in columns]
    return [plain, events.strings, events.cats, events.lanes, args, flows]


def test_base_is_added_wherever_it_stands() -> None:
    """Before torch 2.7 the base came after the events; absolute time is base + ts either way."""
    before = read({"baseTimeNanoseconds": BASE, "traceEvents": [event("a", 0.5)]})
    after = read({"traceEvents": [event("a", 0.5)], "baseTimeNanoseconds": BASE})

    assert [BASE + 500] == before.events.ts_ns.tolist() == after.events.ts_ns.tolist()


def test_old_traces_have_absolute_times_without_a_base() -> None:
    """Integer microseconds since the epoch, as before torch 2.4."""
    trace = read({"traceEvents": [event("a", 1615207264505000)]})

    assert [1615207264505000000] == trace.events.ts_ns.tolist()


def test_events_come_sorted_by_time_then_longest_first_then_lane_then_name() -> None:
    """The order of the table is decided by content, never by the file."""
    rows = [event("b", 1, 5), event("a", 1, 5), event("a", 1, 9), event("z", 0), event("a", 1, 5, tid=1)]
    events = read({"traceEvents": rows}).events

    order = [(events.name_of(k), int(events.dur_ns[k]), events.lanes[events.lane[k]].tid) for k in range(5)]
    assert [("z", 1000, 2), ("a", 9000, 2), ("a", 5000, 1), ("a", 5000, 2), ("b", 5000, 2)] == order


def job_like(seed: int, count: int = 400) -> dict[str, Any]:
    """A document with every kind of record, ties in time included."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for k in range(count):
        args = {
            "External id": k // 3,
            "Input Dims": [[rng.randrange(4), 2]],
            "Seq": rng.randrange(2**64),
            "x": {"y": []},
        }
        rows.append(event(f"op é {rng.randrange(9)}", rng.randrange(50) / 4, rng.randrange(5), tid=k % 3, args=args))
        rows.append({"ph": "s", "id": k, "pid": 1, "tid": k % 3, "ts": 1, "cat": "ac2g", "name": "ac2g"})
        rows.append({"ph": "f", "id": k, "pid": 0, "tid": 7, "ts": 2.125, "cat": "ac2g", "name": "ac2g", "bp": "e"})
    for tid in range(3):
        rows.append(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "ts": 0, "args": {"name": f"thread {tid}"}}
        )
    return {"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": rows, "traceName": "t.json"}


def test_the_table_does_not_depend_on_layout_compression_or_order(tmp_path: Path) -> None:
    """Compact, pretty, reordered keys, reordered events, gzip in two members and zstd: the same table."""
    document = job_like(1)
    shuffled = dict(document)
    shuffled["traceEvents"] = [
        dict(random.Random(k).sample(list(row.items()), len(row))) for k, row in enumerate(document["traceEvents"])
    ]
    random.Random(2).shuffle(shuffled["traceEvents"])
    compact = json.dumps(document, separators=(",", ":")).encode()
    half = len(compact) // 2
    variants = [
        json.dumps(document, indent=2).encode(),
        json.dumps(document, indent="\t", ensure_ascii=False).encode(),
        json.dumps(shuffled).encode(),
        gzip.compress(compact[:half]) + gzip.compress(compact[half:]),
        zstandard.compress(compact),
        b"\xef\xbb\xbf" + compact,
    ]
    expected = fingerprint(read(compact).events)
    for k, raw in enumerate(variants):
        path = tmp_path / f"rank0.{k}"
        path.write_bytes(raw)

        assert expected == fingerprint(read_file(path).events), k


def test_a_url_goes_through_fsspec() -> None:
    """Whatever file system fsspec knows, here its memory."""
    import fsspec

    with fsspec.open("memory://bucket/rank0.json.gz", "wb") as sink:
        sink.write(gzip.compress(json.dumps({"traceEvents": [event("a", 1)]}).encode()))

    assert ["a"] == [read_file("memory://bucket/rank0.json.gz").events.name_of(0)]


def test_brackets_and_blanks_in_a_file_name_are_harmless(tmp_path: Path) -> None:
    """Lightning writes names such as fit-profiler-[Strategy]."""
    path = tmp_path / "fit profiler-[Strategy]DDP.json"
    path.write_text(json.dumps({"traceEvents": [event("a", 1)], "traceName": "x]y"}))

    assert 1 == len(read_file(path).events)


def test_missing_files_are_an_input_error(tmp_path: Path) -> None:
    """The message names the file and what to give instead."""
    with pytest.raises(InputError, match=r"rank9\.json: No such file"):
        read_file(tmp_path / "rank9.json")


def test_metadata_names_lanes_and_flows_stand_apart() -> None:
    """Thread and process names go to lanes, arrows to `flows`; `records` counts all entries."""
    rows = [
        event("a", 1),
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "ts": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "ts": 0, "args": {"name": "thread 2 (python)"}},
        {"ph": "s", "id": 7, "pid": 1, "tid": 2, "ts": 1, "cat": "ac2g", "name": "ac2g"},
    ]
    trace = read({"traceEvents": rows, "baseTimeNanoseconds": 1000})

    assert (Lane(1, 2, "thread 2 (python)", "python CPU"),) == trace.events.lanes
    assert ([7], [True], [2000]) == tuple(
        getattr(trace.events.flows, name).tolist() for name in ("id", "is_start", "ts_ns")
    )
    assert (1, 5) == (len(trace.events), trace.records)


def test_of_two_thread_names_the_one_for_the_work_wins() -> None:
    """gloo threads are named after the process first, whatever the order in the file."""
    names = [(2, "thread 2 (python3)"), (2, "thread 2 (pt_gloo_runloop)"), (3, "thread 3 (python3)")]
    rows = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": t, "args": {"name": n}} for t, n in names]
    for order in (rows, rows[::-1]):
        lanes = read({"traceEvents": [*order, event("a", 1), event("b", 1, tid=3)]}).events.lanes

        assert ["thread 2 (pt_gloo_runloop)", "thread 3 (python3)"] == [lane.name for lane in lanes]


def test_all_arguments_can_be_had_on_demand(tmp_path: Path) -> None:
    """What has no column is read again at the event's place, also in a repaired event and through gzip."""
    rows = [event(f"op{k}", k, args={"Call stack": f"f{k}", "big": 2**70 + k, "n": [None, 1.5]}) for k in range(3000)]
    text = json.dumps({"traceEvents": rows}).replace('"Call stack": "f2000"', '"Call stack": "f"2000""')
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    trace = read_file(path, limits=Limits(piece_bytes=5000))

    args = trace.arguments([2000, 0, 2999])
    assert [{"Call stack": 'f"2000"', "big": 2**70 + 2000, "n": [None, 1.5]}] == args[:1]
    assert ["f0", "f2999"] == [arg["Call stack"] for arg in args[1:]]


def test_unknown_times_are_marked_and_counted() -> None:
    """A record at 0 in a trace that starts in 2021 has no time; in a trace that starts at 0 it has."""
    old = read({"traceEvents": [event("a", 1615207264505000), event("k", 0, 0)]})
    legacy = read([event("a", 5), event("k", 0, 0)])

    assert [TIME_UNKNOWN, 1615207264505000000] == old.events.ts_ns.tolist()
    assert {"records without a usable time": 1} == old.health.dropped
    assert [0, 5000] == legacy.events.ts_ns.tolist()


def test_ends_beyond_the_record_window_are_clipped_and_counted() -> None:
    """An op that never finished ends where the recording ended."""
    window = {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 100, "s": "g"}
    trace = read({"traceEvents": [event("a", 10, 1e9), event("b", 20, -5), event("c", 30, 70), window]})

    assert [90000, 0, 70000, 0] == trace.events.dur_ns.tolist()
    assert {"ends beyond the record window": 1, "negative durations set to 0": 1} == trace.health.clipped


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("packed", [False, True])
def test_a_cut_file_keeps_its_readable_prefix(cut: float, packed: bool) -> None:
    """At most the last event is lost, and the report says that the file is truncated."""
    rng = random.Random(3)
    rows = [event(f"op{rng.random()}", k, args={"x": rng.random()}) for k in range(2000)]
    whole = json.dumps({"traceEvents": rows}).encode()
    raw = gzip.compress(whole) if packed else whole
    raw = raw[: int(len(raw) * cut)]
    trace = read(raw)

    assert trace.truncated
    assert any("truncated" in note for note in trace.health.notes)
    kept = len(trace.events)
    assert [f"op{row}" for row in range(0)] + [row["name"] for row in rows[:kept]] == [
        trace.events.name_of(k) for k in range(kept)
    ]
    assert kept >= 2000 * cut * 0.9 - 2
    with pytest.raises(CorruptTraceError):
        read(raw, strict=True)


def test_a_bad_checksum_is_reported_and_the_data_used() -> None:
    """The last bytes of a gzip file are its checksum; without --strict the events are kept."""
    raw = bytearray(gzip.compress(json.dumps({"traceEvents": [event("a", 1)]}).encode()))
    raw[-6] ^= 0xFF
    trace = read(bytes(raw))

    assert 1 == len(trace.events)
    assert trace.truncated


def test_several_writers_are_refused() -> None:
    """Two documents in one file are never half read as one."""
    text = json.dumps({"schemaVersion": 1, "traceEvents": [event("a", 1)]})
    for raw in (text + text, text[:-2] + "," + text, text[:60] + text, text + "\n" + text):
        with pytest.raises(CorruptTraceError, match="two writers"):
            read(raw.encode())


@pytest.mark.parametrize(
    ("raw", "limits", "flag"),
    [
        (
            b'{"traceEvents":[{"name":"' + b"a" * 5000,
            Limits(max_event_bytes=2000, piece_bytes=500),
            "--max-event-bytes",
        ),
        (b'{"INFO":"' + b"a" * 5000, Limits(max_event_bytes=2000, piece_bytes=500), "--max-event-bytes"),
        (b'{"traceEvents":[{"args":' + b"[" * 5000, Limits(), "--max-depth"),
        (b'{"INFO":' + b"[" * 5000, Limits(), "--max-depth"),
        (b'{"traceEvents":[' + b" " * 100000, Limits(max_bytes=50000, piece_bytes=500), "--max-bytes"),
        (
            gzip.compress(b'{"traceEvents":[' + b" " * 3_000_000),
            Limits(ratio_floor_bytes=1_000_000, piece_bytes=50_000),
            "--max-ratio",
        ),
    ],
)
def test_hostile_files_meet_a_limit_that_names_its_flag(raw: bytes, limits: Limits, flag: str) -> None:
    """Depth, one huge text, size and expansion are bounded with a clear error."""
    with pytest.raises(LimitError, match=flag):
        read(raw, limits=limits)


def test_a_million_blanks_are_no_event() -> None:
    """White space between events is passed by without being kept."""
    raw = b'{"traceEvents":[' + b" " * 1_000_000 + json.dumps(event("a", 1)).encode() + b"\n" * 1_000_000 + b"]}"

    assert 1 == len(read(raw, limits=Limits(max_event_bytes=10_000, piece_bytes=4_000)).events)


def test_headers_survive_one_unreadable_key() -> None:
    """Events and the other keys load; the lost key is named."""
    text = '{"schemaVersion":1,"INFO":["Logging {"event_id": 3}"],"trace_id":"x","traceEvents":[' + json.dumps(
        event("a", 1)
    )
    trace = read(f"{text}]}}".encode())

    assert {"schemaVersion": 1, "trace_id": "x"} == trace.header
    assert {"unreadable top-level keys": 1} == trace.health.dropped
    assert any("INFO" in note for note in trace.health.notes)


def test_a_trace_without_events_is_still_a_trace() -> None:
    """An empty list gives an empty table; no list at all is something else."""
    assert 0 == len(read({"traceEvents": []}).events)
    with pytest.raises(NotATraceError, match="without a list of traceEvents"):
        read({"displayTimeUnit": "ms"})


def test_the_table_can_be_a_frame() -> None:
    """Names and categories are categoricals, arguments are columns on request."""
    frame = read({"traceEvents": [event("a", 1, args={"cbid": 3, "dtype": "Float"})]}).events.to_frame(
        ["cbid", "dtype"]
    )

    assert {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "cbid": 3, "dtype": "Float"} == {
        key: value
        for key, value in frame.iloc[0].items()
        if key in ("ph", "cat", "name", "pid", "tid", "cbid", "dtype")
    }


def test_a_selection_keeps_arguments_and_codes() -> None:
    """Rows keep their arguments under their new numbers."""
    events = read({"traceEvents": [event(f"n{k}", k, args={"cbid": k}) for k in range(5)]}).events.select(
        np.array([1, 3], np.int64)
    )

    assert (["n1", "n3"], [1, 3]) == ([events.name_of(k) for k in range(2)], events.ints("cbid").tolist())


def test_a_base_is_not_added_to_times_that_are_absolute_already() -> None:
    """Some merges keep a header's base although they wrote absolute times."""
    trace = read({"baseTimeNanoseconds": BASE, "traceEvents": [event("a", 1790857026000000.5)]})

    assert [1790857026000000500] == trace.events.ts_ns.tolist()
    assert {"files whose times are absolute in spite of a base": 1} == trace.health.guessed


def test_arguments_of_an_unexpected_type_are_counted() -> None:
    """A text where an id belongs has no place in the column; on demand it is still there."""
    trace = read({"traceEvents": [event("a", 1, args={"stream": "queue 7", "cbid": [1], "correlation": None})]})

    assert ([-1], [-1], [-1]) == tuple(
        column.tolist() for column in (trace.events.stream, trace.events.ints("cbid"), trace.events.correlation)
    )
    assert {"arguments of an unexpected type left out of the columns": 2} == trace.health.dropped


def test_an_infinite_base_is_dropped() -> None:
    """JSON's 1e999 is infinite to Python; times count from 0 then, and the loss is counted."""
    trace = read(b'{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 5, "dur": 1}], '
                 b'"baseTimeNanoseconds": 1e999}')  # fmt: skip

    assert ([5000], 1) == (trace.events.ts_ns.tolist(), trace.health.dropped["unusable baseTimeNanoseconds"])
