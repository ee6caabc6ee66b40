"""`scaletrace query`: SQL in, a table, CSV or JSON out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.query import query
from scaletrace.errors import MissingExtraError
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from scaletrace.view.perfetto import write_timeline
from scaletrace.view.webui import trace_processor_wasm
from tests.view.graphs import two_ranks

app = typer.Typer()
app.command()(query)
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    try:
        trace_processor_wasm()
    except MissingExtraError as error:
        pytest.skip(str(error))
    timeline = replay(two_ranks())
    target = tmp_path_factory.mktemp("query") / "t.pftrace"
    return str(write_timeline(target, timeline, critical_path=critical_path(timeline)).path)


def test_rows_print_as_a_table(trace: str) -> None:
    """Columns have headings and a missing value is a dash."""
    result = RUNNER.invoke(app, [trace, "SELECT 'gemm' AS name, 90 AS dur, NULL AS gap"])

    expected = ["name  dur  gap", "gemm   90  –"]
    assert (0, expected) == (result.exit_code, [line.rstrip() for line in result.stdout.splitlines()])


def test_views_give_ranks_lanes_and_communication_as_columns(trace: str) -> None:
    """st_comm has one row a member with its wait and transfer; CSV goes to stdout alone."""
    sql = "SELECT rank, lane, timeline, axis, bytes, wait_ns, transfer_ns FROM st_comm ORDER BY rank"
    result = RUNNER.invoke(app, [trace, sql, "--csv"])

    expected = [
        "rank,lane,timeline,axis,bytes,wait_ns,transfer_ns",
        "0,stream 20,replayed,dp,3000,50,30",
        "1,stream 20,replayed,dp,3000,0,30",
    ]
    assert expected == result.stdout.splitlines()


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        ("critical-path", [["compute", 1, 9e-05], ["communication", 1, 3e-05], ["host", 2, 1.5e-05]]),
        ("stragglers", [[1, "replayed", 1, 5e-05]]),
        ("exposed-communication", [[0, "replayed", 8e-05, 0.0], [1, "replayed", 3e-05, 0.0]]),
    ],
)
def test_prepared_questions_have_answers(trace: str, ask: str, expected: list[list[object]]) -> None:
    """Each prepared question runs on a trace of ours and says what the graph says."""
    result = RUNNER.invoke(app, [trace, "--ask", ask, "--json"])
    answer = json.loads(result.stdout)

    assert ("scaletrace.query/1", expected) == (answer["schema"], answer["rows"])


def test_bad_sql_is_one_sentence_and_exit_code_2(trace: str) -> None:
    """Perfetto's own words come through, without a traceback."""
    result = RUNNER.invoke(app, [trace, "SELECT 1 FROM nowhere"])

    assert result.exit_code == 2
    assert "error: SQL: no such table: nowhere" in result.output
    assert "Traceback" not in result.output


def test_sql_and_ask_exclude_each_other(trace: str) -> None:
    """Neither or both is wrong usage."""
    both = RUNNER.invoke(app, [trace, "SELECT 1", "--ask", "stragglers"])

    for result in (both, RUNNER.invoke(app, [trace])):
        assert result.exit_code == 2


def test_a_missing_file_is_exit_code_1(tmp_path: Path) -> None:
    """The message names the file and the remedy."""
    result = RUNNER.invoke(app, [str(tmp_path / "none.pftrace"), "SELECT 1"])

    assert result.exit_code == 1
    assert "no such file" in result.output


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, trace: str) -> None:
    """Garbage gives a sentence, not a crash."""
    file = tmp_path / "x.pftrace"
    file.write_bytes(b"garbage that is no trace at all\n" * 10)
    result = RUNNER.invoke(app, [str(file), "SELECT 1"])

    assert result.exit_code == 1
    assert "can't read this file" in result.output


def test_rows_beyond_the_limit_are_counted(trace: str) -> None:
    """A long answer is cut on the terminal and says so on stderr."""
    result = RUNNER.invoke(app, [trace, "SELECT 1 AS a UNION ALL SELECT 2", "--limit", "1"])

    assert "1 of 2 rows shown" in result.stderr


def test_an_endless_question_ends_at_its_limit(trace: str) -> None:
    """A recursion without end is stopped after --timeout seconds, which is wrong usage and says what to look at."""
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"
    outcome = RUNNER.invoke(app, [trace, endless, "--timeout", "0.5"])

    assert 2 == outcome.exit_code
    assert "SQL: no answer after 0.5 s" in " ".join(outcome.output.split())
