"""The compiled scanner reads JSON text exactly: numbers, escapes, lists, any layout, any piece size."""

from __future__ import annotations

import io
import json
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import CorruptTraceError
from scaletrace.parse.events import Events
from scaletrace.parse.limits import Limits
from scaletrace.parse.reader import TraceFile, read_file
from scaletrace.parse.scan_keys import fnv1a
from scaletrace.parse.scan_text import hash_bytes, real, scaled


def read(text: str | bytes, **options: object) -> TraceFile:
    """The trace that stands in `text`."""
    raw = text.encode() if isinstance(text, str) else text
    return read_file(io.BytesIO(raw), **options)  # type: ignore[arg-type]


def one(fields: str) -> Events:
    """The table of one complete event with these further fields."""
    return read('{"traceEvents":[{"ph":"X","pid":1,"tid":2,' + fields + "}]}").events


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1.5", 1500),
        ("7889238123456.789", 7889238123456789),
        ("1615207264505000.123", 1615207264505000123),
        ("1e3", 1000000),
        ("12.0004", 12000),
        ("12.0005", 12000),
        ("12.0015", 12002),
        ("482.5592041015625", 482559),
        ("-3.25", -3250),
        ("3503599627370497.001", 3503599627370497001),
    ],
)
def test_times_are_exact_integer_nanoseconds_of_the_decimal_text(text: str, expected: int) -> None:
    """No float stands between the text and the nanoseconds; beyond 3 decimals rounding is half to even."""
    events = one(f'"name":"a","ts":{text},"dur":1')

    assert expected == int((Decimal(text) * 1000).to_integral_value())
    assert [expected] == events.ts_ns.tolist()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (r'"say \"hi\" now"', 'say "hi" now'),
        (r'"a\\b\/c\n\t\u00e9"', "a\\b/c\n\té"),
        (r'"\ud83d\ude00 \u20ac"', "😀 €"),
        ('"Größe ✓"', "Größe ✓"),
        ('""', ""),
        ("null", ""),
        ("17", "17"),
    ],
)
def test_names_are_exact_after_unescaping(written: str, expected: str) -> None:
    """Escapes, surrogate pairs and raw UTF-8 give the same text; a missing name is empty."""
    events = one(f'"name":{written},"ts":1')

    assert expected == events.name_of(0)


def test_half_a_surrogate_pair_is_replaced_and_counted() -> None:
    """A lone surrogate can't stand in UTF-8, so it becomes U+FFFD and the repair is counted."""
    trace = read(r'{"traceEvents":[{"ph":"X","name":"a\ud83db","ts":1}]}')

    assert "a\ufffdb" == trace.events.name_of(0)
    assert {"strings with half a surrogate pair": 1} == trace.health.repaired


def test_ids_keep_all_64_bits() -> None:
    """Comms Id may use the 64th bit; it stays an exact uint64."""
    events = one('"name":"a","ts":1,"args":{"Comms Id":10159970886766084423,"Seq":9223372036854775807}')

    assert np.uint64 == events.args["Comms Id"].values.dtype
    assert [10159970886766084423] == events.args["Comms Id"].values.tolist()
    assert [9223372036854775807] == events.args["Seq"].values.tolist()


def test_integers_beyond_64_bits_stay_out_of_the_column_and_are_counted() -> None:
    """What no column can hold exactly is left to the arguments on demand."""
    trace = read('{"traceEvents":[{"ph":"X","name":"a","ts":1,"args":{"Comms Id":18446744073709551616,"Seq":1}}]}')

    assert "Comms Id" not in trace.events.args
    assert {"integers beyond 64 bits left out of the columns": 1} == trace.health.dropped


def test_integer_arguments_are_read_from_quoted_numbers_and_booleans() -> None:
    """On-demand traces quote their ranks, and flags are written as "1", 1 or true."""
    events = one('"name":"a","ts":1,"args":{"Rank":"3","Is asynchronized op":true,"finished":false,"Src Rank":2.0}')

    values = {key: arg.values.tolist() for key, arg in events.args.items()}
    assert {"Rank": [3], "Is asynchronized op": [1], "finished": [0], "Src Rank": [2]} == values


def test_older_spellings_fill_the_same_columns() -> None:
    """Torch 1.8 wrote "external id" and "Profiler Event Index"."""
    events = one('"name":"a","ts":1,"args":{"external id":6307,"Profiler Event Index":5}')

    assert [6307] == events.external_id.tolist()
    assert [5] == events.ints("Ev Idx").tolist()


def test_grid_and_block_become_products() -> None:
    """Lists and texts of extents become the number of blocks and threads."""
    events = one('"name":"a","ts":1,"args":{"grid":[864, 2, 1],"block":"128,1,1"}')

    assert [1728] == events.ints("grid_size").tolist()
    assert [128] == events.ints("block_size").tolist()


def test_what_is_no_list_of_extents_has_no_product() -> None:
    """Other texts, nested objects and signs are missing, however they are escaped."""
    for value in (
        '"\\u007f1"',
        '"a1"',
        '{"x":1}',
        "[1.5]",
        "[-2]",
        '["2"]',
        "[]",
        '""',
        "[999999999,999999999,999999999]",
    ):
        assert [-1] == one(f'"name":"a","ts":1,"args":{{"grid":{value}}}').ints("grid_size").tolist(), value


def test_list_arguments_are_texts_without_white_space() -> None:
    """Lists are kept as the JSON that was written; white space inside their strings stays."""
    events = one('"name":"a","ts":1,"args":{"Input Dims":[[ 3,\n 4 ], [ ]],"Concrete Inputs":["a b", ""]}')

    assert "[[3,4],[]]" == events.text("Input Dims", 0)
    assert '["a b",""]' == events.text("Concrete Inputs", 0)


def test_absent_and_null_are_missing_not_zero() -> None:
    """Missing ids are -1, missing reals NaN, missing texts None."""
    events = one('"name":"a","ts":1,"args":{"stream":null,"Input Dims":null,"correlation":0}')

    assert [-1] == events.stream.tolist()
    assert [0] == events.correlation.tolist()
    assert [-1] == events.ints("cbid").tolist()
    assert np.isnan(events.reals("blocks per SM")).all()
    assert events.text("Input Dims", 0) is None


def test_of_a_repeated_key_the_last_value_counts() -> None:
    """As in every JSON reader."""
    events = one('"name":"a","name":"b","ts":1,"ts":2,"args":{"cbid":1,"cbid":7}')

    assert "b" == events.name_of(0)
    assert [2000] == events.ts_ns.tolist()
    assert [7] == events.ints("cbid").tolist()


def test_keys_with_escapes_are_understood() -> None:
    """An escaped key is rare enough to take the slow way, but it means the same."""
    events = read(r'{"traceEvents":[{"ph":"X","n\u0061me":"a","ts":1,"args":{"cbid":3}}]}').events

    assert "a" == events.name_of(0)


def test_pid_and_tid_keep_their_type_and_null_is_empty() -> None:
    """7 and "7" are different lanes; what is not given is ""."""
    rows = ",".join(f'{{"ph":"X","name":"a","ts":{k},"pid":{pid}}}' for k, pid in enumerate(("7", '"7"', "null")))
    events = read('{"traceEvents":[' + rows + "]}").events

    assert [7, "7", ""] == [events.lanes[code].pid for code in events.lane]
    assert {""} == {lane.tid for lane in events.lanes}


def sample(count: int) -> list[dict[str, object]]:
    """`count` events of several kinds, more than one batch and one piece can hold."""
    out: list[dict[str, object]] = []
    for k in range(count):
        args = {"External id": k, "Input Dims": [[k % 7, 2], []], "cbid": k % 5, "Collective name": f"c{k % 3}"}
        out.append({"ph": "X", "cat": f"cat{k % 4}", "name": f"op {k % 211}", "pid": 1, "tid": k % 9, "ts": k * 3.25,
                    "dur": k % 13, "args": args})  # fmt: skip
        if k % 10 == 0:
            out.append({"ph": "s", "id": k, "pid": 1, "tid": k % 9, "ts": k * 3.25, "cat": "ac2g", "name": "ac2g"})
    return out


def same(a: Events, b: Events) -> bool:
    """Whether two tables hold the same in every column."""
    columns = ("ph", "cat", "name", "lane", "ts_ns", "dur_ns", "correlation", "external_id", "stream", "device")
    plain = all(np.array_equal(getattr(a, c), getattr(b, c)) for c in columns)
    texts = (a.strings, a.cats, a.lanes) == (b.strings, b.cats, b.lanes)
    flows = all(np.array_equal(getattr(a.flows, c), getattr(b.flows, c)) for c in a.flows.__slots__)
    args = a.args.keys() == b.args.keys() and all(
        np.array_equal(a.args[key].rows, b.args[key].rows) and np.array_equal(a.args[key].values, b.args[key].values)
        for key in a.args
    )
    return plain and texts and flows and args


@pytest.mark.parametrize("piece_bytes", [1, 7, 61, 1000, 40_000])
def test_the_size_of_the_pieces_changes_nothing(piece_bytes: int) -> None:
    """An event that is cut by the end of a piece is read when the rest has come."""
    count = 40 if piece_bytes < 50 else 1500
    text = json.dumps({"traceEvents": sample(count), "baseTimeNanoseconds": 10**18}).encode()

    whole = read(text)
    pieces = read(text, limits=Limits(piece_bytes=piece_bytes))

    assert whole.records == pieces.records == count + (count + 9) // 10
    assert same(whole.events, pieces.events)
    assert whole.offsets.tolist() == pieces.offsets.tolist()


def test_tables_grow_as_far_as_they_must() -> None:
    """Tens of thousands of texts and hundreds of lanes exceed every starting size."""
    rows = [
        {"ph": "X", "name": f"n{k}", "pid": k % 700, "tid": f"t{k % 11}", "ts": k, "args": {"kind": "x" * (k % 97)}}
        for k in range(9000)
    ]
    events = read(json.dumps({"traceEvents": rows})).events

    assert 9000 == len(events)
    assert [f"n{k}" for k in range(9000)] == [events.name_of(k) for k in range(9000)]
    assert 7700 == len(events.lanes)
    assert "x" * 96 == events.text("kind", 96)


def test_an_event_with_thousands_of_arguments_is_taken() -> None:
    """The batch makes room for whatever one event needs."""
    args = ",".join(f'"cbid":{k}' for k in range(30_000))
    trace = read(
        '{"traceEvents":[{"ph":"X","name":"a","ts":1,"args":{' + args + "}}]}", limits=Limits(piece_bytes=4096)
    )

    assert [29_999] == trace.events.ints("cbid").tolist()


@pytest.mark.parametrize(
    "event",
    [
        '{"ph":"X","name":"a","ts":01}',
        '{"ph":"X","name":"a","ts":1.}',
        '{"ph":"X","name":"a","ts":1e}',
        '{"ph":"X","name":"a","ts":-}',
        '{"ph":"X","name":"a","ts":+1}',
        '{"ph":"X","name":"a","ts":1,"args":{"x":tru}}',
        '{"ph":"X","name":"a","ts":1,"args":{"x":[1,]}}',
        '{"ph":"X","name":"a","ts":1,"args":{"x":{"y"}}}',
        '{"ph":"X","name":"a","ts":1,"args":{"x":[1}}}',
        '{"ph":"X","name":"a","ts":1,}',
        '{"ph":"X","name":"a" "ts":1}',
        '{"ph":"X","name":"a\\q","ts":1}',
        '{"ph":"X","name":"a\\u12g4","ts":1}',
        '{"ph":"X","name":"a\tb","ts":1}',
        "{'ph':'X'}",
    ],
)
def test_strict_refuses_what_json_refuses(event: str) -> None:
    """The fast reader accepts no more than the standard grammar when it is asked to be strict."""
    text = '{"traceEvents":[' + event + "]}"
    with pytest.raises(ValueError):
        json.loads(text)

    with pytest.raises(CorruptTraceError, match="at byte"):
        read(text, strict=True)


def test_the_python_and_the_compiled_hash_agree() -> None:
    """The key table is built in Python and searched by compiled code."""
    text = b"Process Group Name"

    assert fnv1a(text) == int(hash_bytes(np.frombuffer(text, np.uint8), 0, len(text)))


def test_scaling_rounds_half_to_even_and_says_when_it_had_to_cap() -> None:
    """(value, capped) of digits x 10^power."""
    assert (2, False) == scaled(False, np.uint64(25), -1)
    assert (4, False) == scaled(False, np.uint64(35), -1)
    assert (-12000, False) == scaled(True, np.uint64(12), 3)
    assert (0, False) == scaled(False, np.uint64(5), -40)
    assert (2**63 - 1, True) == scaled(False, np.uint64(5), 30)


@given(st.decimals(0, 10**6, places=16), st.integers(1, 22))
@settings(deadline=None, max_examples=300)
def test_reals_are_those_of_the_standard_decoder(value: Decimal, places: int) -> None:
    """Up to 18 digits and 22 decimals round as float() does."""
    digits = int(value.scaleb(16)) % 10**18

    assert float(f"{digits}e-{places}") == real(False, np.uint64(digits), -places)
