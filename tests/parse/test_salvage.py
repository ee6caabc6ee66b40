"""Events that are not JSON are repaired one by one, and every repair is counted."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scaletrace.parse import salvage
from scaletrace.parse.reader import TraceFile, read_file


def read(text: str) -> TraceFile:
    """The trace that stands in `text`."""
    return read_file(io.BytesIO(text.encode()))


def around(bad: str, sep: str = ",\n  ") -> str:
    """A document with good events before and after the bad one."""
    good = [json.dumps({"ph": "X", "name": f"good{k}", "pid": 1, "tid": 1, "ts": k}) for k in range(2)]
    return '{"schemaVersion": 1, "traceEvents": [' + sep.join([good[0], bad, good[1]]) + '], "traceName": "t"}'


@pytest.mark.parametrize(
    ("bad", "name", "reasons"),
    [
        ('{"ph":"X","name":"say "hi" now","ts":5}', 'say "hi" now', [salvage.NAME_QUOTES]),
        ('{"ph":"X","name":"a"b","ts":5}', 'a"b', [salvage.NAME_QUOTES]),
        ('{"ph":"X","name":"f("x", "y")","ts":5}', 'f("x", "y")', [salvage.NAME_QUOTES]),
        ('{"ph":"X","name":""quoted"","ts":5}', '"quoted"', [salvage.NAME_QUOTES]),
        ('{"ph":"X","name":"x","ts":5,"args":{"doc":"see "this"","cbid":4}}', "x", [salvage.QUOTES]),
        ('{"ph":"X","name":"x","ts":5,"args":{"Input dims":N/A}}', "x", [salvage.BARE]),
        ('{"ph":"X","name":"x","ts":5,"args":{"flops":nan,"y":-inf}}', "x", [salvage.BARE]),
        ('{"ph":"X","name":"x","ts":5,"args":{"bw":NaN}}', "x", [salvage.BARE]),
        ('{"ph":"X","name":"x","ts":5,"args":{"Process Group Description": ,"cbid":4}}', "x", [salvage.EMPTY]),
        ('{"ph":"X","name":"x","ts":5,"args":{"cbid": }}', "x", [salvage.EMPTY]),
        ('{"ph":"X","name":"x","ts":5,}', "x", [salvage.COMMAS]),
        ('{"ph":"X","name":"x" "ts":5}', "x", [salvage.COMMAS]),
        ('{"ph":"X","name":"x","ts":5,"args":{"Input Dims":[[1,2,],]}}', "x", [salvage.COMMAS]),
        ('{"ph":"X","name":"x","tid": 0,ts": 5}', "x", [salvage.KEY_QUOTE]),
        ('{"ph":"X","name":"C:\\dir\\x","ts":5}', None, ["strings with unknown escapes"]),
    ],
)
def test_a_bad_event_is_repaired_and_its_neighbours_kept(bad: str, name: str | None, reasons: list[str]) -> None:
    """Three events come out of three, at their times, and the report names the fault once."""
    trace = read(around(bad))

    names = [trace.events.name_of(k) for k in range(len(trace.events))]
    assert ["good0", "good1"] == names[:2]
    assert 3 == len(names)
    assert name is None or names[2] == name
    assert [5000] == trace.events.ts_ns[2:].tolist()
    assert Counter(reasons) == trace.health.repaired
    assert "t" == trace.header["traceName"]


def test_a_repair_does_not_lose_the_other_arguments() -> None:
    """Only the faulty value is missing."""
    trace = read(around('{"ph":"X","name":"x","ts":5,"args":{"Process Group Description": ,"cbid":4}}'))

    assert [-1, -1, 4] == trace.events.ints("cbid").tolist()


def test_exact_times_survive_a_repair() -> None:
    """Times of a repaired event are not rounded through a float."""
    trace = read(around('{"ph":"X","name":"a "b"","ts":1615207264505000.123}'))

    assert 1615207264505000123 in trace.events.ts_ns.tolist()


@pytest.mark.parametrize("sep", ["", "\n", ",,", " , ,\n"])
def test_missing_and_spare_commas_between_events(sep: str) -> None:
    """Events follow each other whatever stands between them."""
    trace = read(around('{"ph":"X","name":"mid","ts":5}', sep))

    assert 3 == len(trace.events)
    assert {salvage.COMMAS: 2} == trace.health.repaired


def test_text_between_events_is_skipped_and_counted() -> None:
    """A line of a log in the list costs no event."""
    trace = read(around('[rank0] warning {"a": 1} {"ph":"X","name":"mid","ts":5}'))

    assert ["good0", "good1", "mid"] == [trace.events.name_of(k) for k in range(3)]
    assert trace.health.dropped


def test_what_no_rung_can_read_is_dropped_and_counted() -> None:
    """The event is lost, its neighbours are not."""
    trace = read(around('{"ph":"X","name":"x","ts":5,"args":{{{"}'))

    assert {"good0", "good1"} <= {trace.events.name_of(k) for k in range(len(trace.events))}
    assert 1 == trace.health.dropped["events that can't be read"]


def test_the_last_event_can_be_the_bad_one() -> None:
    """Its end is found at the end of the list."""
    good = json.dumps({"ph": "X", "name": "good", "ts": 1})
    for tail in (']\n, "traceName": "t.json"}', "]}", "]", " ] } \n"):
        trace = read('{"traceEvents": [' + good + ', {"ph":"X","name":"the "last"","ts":5}' + tail)

        assert 'the "last"' == trace.events.name_of(1)


def test_many_bad_events_cost_time_in_proportion() -> None:
    """Thousands of bad events do not make the walk quadratic."""
    bad = ",".join('{"ph":"X","name":"say "hi" now","ts":%d}' % k for k in range(4000))  # noqa: UP031
    start = time.process_time()
    trace = read('{"traceEvents":[' + bad + "]}")

    assert 4000 == len(trace.events)
    assert {salvage.NAME_QUOTES: 4000} == trace.health.repaired
    assert time.process_time() - start < 20


def test_numbers_are_re_encoded_as_written() -> None:
    """Encoding a repaired event keeps the digits and turns what is not finite into null."""
    event, _ = salvage.decode_event(
        b'{"a":1.2345678901234567890,"b":NaN,"c":[true,null,"\\u00e9"],"d":12345678901234567890}'
    )

    expected: Any = '{"a":1.2345678901234567890,"b":null,"c":[true,null,"\\u00e9"],"d":12345678901234567890}'
    assert expected.encode() == salvage.encode_event(event)


def test_an_event_full_of_quotes_does_not_hang() -> None:
    """Hundreds of thousands of quotes in one broken text cost time in proportion."""
    start = time.process_time()
    trace = read(
        '{"traceEvents":[{"ph":"X","name":"a' + ' "b" \\"' * 100_000 + ',"ts":5},{"ph":"X","name":"c","ts":6}]}'
    )

    assert "c" in [trace.events.name_of(k) for k in range(len(trace.events))]
    assert time.process_time() - start < 20


def test_a_huge_integer_is_no_obstacle(tmp_path: Path) -> None:
    """Python refuses to convert thousands of digits; the event and its other arguments are read all the same."""
    path = tmp_path / "rank0.json"
    path.write_text('{"traceEvents":[{"ph":"X","name":"a","ts":5,"args":{"big":' + "9" * 6000 + ',"cbid":4,"x":1}}]}')
    trace = read_file(path)

    assert [4] == trace.events.ints("cbid").tolist()
    assert 1 == trace.arguments([0])[0]["x"]
