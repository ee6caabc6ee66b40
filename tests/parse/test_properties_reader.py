"""For any input: only our own errors, bounded time and memory; for any layout of one document: the same table."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import InputError
from scaletrace.parse.events import Events
from scaletrace.parse.limits import Limits
from scaletrace.parse.reader import read_file

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(-(2**64), 2**65), st.floats(-1e9, 1e9), TEXT)
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
KEY = st.one_of(
    TEXT,
    st.sampled_from(
        [
            "correlation",
            "External id",
            "stream",
            "device",
            "Input Dims",
            "dtype",
            "Seq",
            "Comms Id",
            "grid",
            "Rank",
            "cbid",
        ]
    ),
)
MICROSECONDS = st.one_of(st.integers(0, 10**7), st.decimals(0, 10**7, places=3).map(float))
EVENT = st.fixed_dictionaries(
    {"ph": st.sampled_from("XXXXisfMC"), "name": TEXT, "ts": MICROSECONDS},
    optional={
        "cat": st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "ac2g", "weird"]),
        "pid": st.integers(0, 3) | st.just("Spans"),
        "tid": st.integers(0, 3) | st.none(),
        "dur": MICROSECONDS,
        "id": st.integers(0, 2**40),
        "args": st.dictionaries(KEY, VALUE, max_size=4),
        "s": st.just("g"),
    },
)


def fingerprint(events: Events) -> list[Any]:
    """All that a table holds, as plain values."""
    columns = ("ph", "cat", "name", "lane", "ts_ns", "dur_ns", "correlation", "external_id", "stream", "device")
    args = {
        key: (arg.rows.tolist(), str(arg.values.dtype), arg.values.tolist(), arg.is_text)
        for key, arg in sorted(events.args.items())
    }
    flows = [getattr(events.flows, name).tolist() for name in events.flows.__slots__]
    plain = [getattr(events, name).tolist() for name in columns]
    return [plain, events.strings, events.cats, events.lanes, args, flows]


def read(raw: bytes, **options: Any) -> Events:
    return read_file(io.BytesIO(raw), **options).events


@given(st.lists(EVENT, max_size=12), st.randoms(use_true_random=False), st.integers(1, 200))
@settings(deadline=None, max_examples=120)
def test_any_document_gives_one_table_in_any_form(events: list[dict[str, Any]], rng: random.Random, piece: int) -> None:
    """Compact, pretty, shuffled, gzip, in pieces of any size: one table; strict mode accepts what json wrote."""
    document = {"baseTimeNanoseconds": 10**18, "traceEvents": events, "traceName": "t"}
    shuffled = [dict(rng.sample(list(event.items()), len(event))) for event in events]
    rng.shuffle(shuffled)
    moved = {"traceEvents": shuffled, "traceName": "t", "baseTimeNanoseconds": 10**18}
    expected = fingerprint(read(json.dumps(document, separators=(",", ":")).encode(), strict=True))

    assert expected == fingerprint(read(json.dumps(document, indent=rng.randrange(4), ensure_ascii=False).encode()))
    assert expected == fingerprint(read(gzip.compress(json.dumps(moved).encode())))
    assert expected == fingerprint(read(json.dumps(moved, indent=1).encode(), limits=Limits(piece_bytes=piece)))


@given(st.lists(EVENT, min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_names_and_times_are_those_of_the_standard_decoder(events: list[dict[str, Any]]) -> None:
    """What json.loads gives is what the table holds."""
    spans = [event for event in events if event["ph"] in "XiC"]
    table = read(json.dumps({"traceEvents": events}).encode())

    found = sorted((table.name_of(k), chr(table.ph[k])) for k in range(len(table)))
    assert sorted((event["name"], event["ph"]) for event in spans) == found


def bounded(raw: bytes, **options: Any) -> None:
    """Read, allowing our own errors only, in bounded time."""
    start = time.process_time()
    with contextlib.suppress(InputError):  # refusing is a right answer; any other exception fails the test
        read_file(io.BytesIO(raw), limits=Limits(max_event_bytes=1 << 20, piece_bytes=1 << 14), **options)
    assert time.process_time() - start < 10


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """Random bytes alone, as a list of events, and as gzip."""
    for made in (
        raw,
        b'{"traceEvents":[' + raw,
        b'{"traceEvents":[{"ph":"X",' + raw + b"}]}",
        b"\x1f\x8b\x08\x00" + raw,
    ):
        bounded(made)
        bounded(made, strict=True)


@given(st.text(alphabet='{}[]",:\\ \n0123e-+.tfnu/XphnameTSs', max_size=200))
@settings(deadline=None, max_examples=300)
def test_any_heap_of_json_tokens_is_read_or_refused(text: str) -> None:
    """Token soup exercises every branch of the grammar and of the repair."""
    bounded(b'{"traceEvents":[{"ph":"X","name":"a","ts":1},' + text.encode())
    bounded(b'{"schemaVersion":1,' + text.encode() + b'"traceEvents":[]}')
    bounded(text.encode())


def flip(raw: bytearray, rng: random.Random) -> None:
    """Change single bytes."""
    for _ in range(rng.randrange(1, 12)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)


def cut_out(raw: bytearray, rng: random.Random) -> None:
    """Remove a stretch."""
    at = rng.randrange(len(raw))
    del raw[at : at + rng.randrange(1, 400)]


def repeat(raw: bytearray, rng: random.Random) -> None:
    """Copy a stretch to another place."""
    a, b = rng.randrange(len(raw)), rng.randrange(len(raw))
    raw[b:b] = raw[a : a + rng.randrange(1, 600)]


def tokens(raw: bytearray, rng: random.Random) -> None:
    """Insert structure where none belongs."""
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(raw))
        raw[at:at] = rng.choice(
            [b'"', b"{", b"}", b"]", b"[", b",", b":", b"\\", b"\\u", b"NaN", b"\0", b"\xff", b"1e999"]
        )


def truncate(raw: bytearray, rng: random.Random) -> None:
    """Cut the end off."""
    del raw[rng.randrange(len(raw)) :]


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [flip, cut_out, repeat, tokens, truncate]
SEEDS = [
    "misc-pytorch_kineto/after_fix_trace.json",
    "misc-pytorch_kineto/gpu_metrics_input.json",
    "misc-facebookresearch_HolisticTraceAnalysis/triton_example.json.gz",
    "hta_critical_path/event_sync_trace.json.gz",
    "misc-pytorch_PiPPy/pipe_visualized.json",
]


def seed_files(shared_data: Path) -> list[bytes]:
    """Real traces, decompressed."""
    out = []
    for name in SEEDS:
        path = shared_data / "traces" / name
        if path.is_file():
            raw = path.read_bytes()
            out.append(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    return out


def fuzz(shared_data: Path, rounds: int, seed: int) -> None:
    """Read mutated copies of real files, plain and gzip."""
    rng = random.Random(seed)
    files = seed_files(shared_data)
    for k in range(rounds):
        raw = bytearray(rng.choice(files))
        for _ in range(rng.randrange(1, 4)):
            if raw:
                rng.choice(MUTATIONS)(raw, rng)
        bounded(bytes(raw), strict=k % 7 == 0)
        if k % 5 == 0 and raw:
            packed = bytearray(gzip.compress(bytes(raw), 1))
            rng.choice(MUTATIONS)(packed, rng)
            bounded(bytes(packed))


def test_mutated_real_files_are_read_or_refused(shared_data: Path) -> None:
    """No exception but our own, no hang."""
    fuzz(shared_data, 250, 1)


@pytest.mark.slow
def test_many_mutated_real_files_are_read_or_refused(shared_data: Path) -> None:
    """The same for longer."""
    fuzz(shared_data, 4000, 2)


def test_memory_stays_in_proportion_on_hostile_files() -> None:
    """One huge text, deep nesting and a bomb stop at their limit, far below their size."""
    limits = Limits(max_event_bytes=1 << 20, max_bytes=1 << 28, ratio_floor_bytes=1 << 22, piece_bytes=1 << 18)
    blanks = gzip.compress(b'{"traceEvents":[' + b" " * (1 << 26), 9)
    endless = gzip.compress(b'{"traceEvents":[{"name":"' + b"a" * (1 << 26), 9)
    for raw in (blanks, endless):
        tracemalloc.start()
        with pytest.raises(InputError):
            read_file(io.BytesIO(raw), limits=limits)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

        assert peak < 64 << 20
