"""scaletrace limits: the documented JSON, what the options change, and errors."""

from __future__ import annotations

import inspect
import json

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.limits import limits


def ask(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the one command."""
    app = typer.Typer()
    app.command()(limits)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_the_answer_has_the_documented_parts() -> None:
    """device, linear_until_flop, wall_flop and a curve of flop, utilization, layout."""
    code, out, _ = ask("--json", "--flop", "1e26,2e28")
    answer = json.loads(out)

    assert 0 == code
    assert "scaletrace.limits/1" == answer["schema"]
    assert "H100 SXM" == answer["device"]
    assert answer["wall_flop"] == pytest.approx(1.97e31, rel=0.01)
    assert 1e28 < answer["linear_until_flop"] < 2e29
    assert [1e26, 2e28] == [point["flop"] for point in answer["curve"]]
    assert {"flop", "utilization", "layout"} == set(answer["curve"][0])
    assert 0.6 < answer["curve"][1]["utilization"] < 0.7


def test_options_move_the_limits() -> None:
    """Half the latencies move the wall by four; more network moves the linear end."""
    base, near, fast = (
        json.loads(ask("--json", "--flop", "1e26", *more)[1])
        for more in ((), ("--latency-us", "1.35", "--launch-us", "2.9"), ("--network", "4"))
    )

    assert near["wall_flop"] == pytest.approx(4 * base["wall_flop"])
    assert fast["linear_until_flop"] > 10 * base["linear_until_flop"]


def test_no_limit_is_null_and_said() -> None:
    """Without any latency there is no wall: null in JSON, words in the table."""
    free = ("--latency-us", "0", "--launch-us", "0", "--flop", "1e26")

    assert json.loads(ask("--json", *free)[1])["wall_flop"] is None
    assert "wall at no end below 1e36" in " ".join(ask(*free)[1].split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--flop", "many"), "write numbers such as 1e26,2e28"),
        (("--network", "0"), "--network: 0.0 is not possible; at least 1e-06"),
        (("--latency-us", "-1"), "--latency-us: -1.0 is not possible; at least 0"),
        (("--utilization", "2"), "--utilization: 2.0 is not possible; at least 0.001 and at most 1"),
        (("--cluster", "no-such"), "no-such"),
    ],
)
def test_wrong_usage_is_exit_code_two(arguments: tuple[str, ...], message: str) -> None:
    """One sentence on stderr, nothing on stdout."""
    code, out, err = ask(*arguments)

    assert (2, "") == (code, out)
    assert message in " ".join(err.split())


def test_quiet_prints_nothing() -> None:
    """The exit code tells."""
    assert (0, "", "") == ask("--quiet", "--flop", "1e26")


NUMBERS = {
    "--days": ("0", "-1", "nan", "inf", "1e300"),
    "--latency-us": ("-1", "nan", "inf", "1e300"),
    "--launch-us": ("-1", "nan", "inf", "-inf", "1e300"),
    "--network": ("0", "-2", "nan", "inf", "1e300", "1e-300"),
    "--memory": ("0", "-2", "nan", "inf", "1e300", "1e-300"),
    "--domain": ("-1", "1.5", "nan", "9" * 400),
    "--utilization": ("0", "-0.1", "1.1", "nan", "inf"),
    "--bits": ("0", "-8", "65", "nan", "9" * 400),
    "--batch-exponent": ("nan", "inf", "-2", "1e300"),
    "--depth-exponent": ("nan", "-inf", "2", "1e300"),
    "--wider": ("0", "-1", "nan", "inf", "1e300"),
    "--sparsity": ("0.5", "-1", "nan", "inf", "1e300"),
    "--flop": ("0", "-1e26", "nan", "inf", "1e400", "1", "1e26,nan", ",", "1e26," * 200, "x"),
}


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, values in NUMBERS.items() for v in values])
def test_numbers_that_can_not_be_are_one_sentence_and_exit_code_two(option: str, value: str) -> None:
    """Every numeric option, with what is no number, without end, negative, or far beyond any machine."""
    code, out, err = ask("--json", f"{option}={value}")

    assert (2, "") == (code, out)
    assert err.strip()
    assert "Traceback" not in err


def test_every_numeric_option_is_among_those_tried() -> None:
    """A new option with a number comes with its bounds."""
    hints = inspect.signature(limits).parameters
    numeric = {
        "--" + name.replace("_", "-")
        for name, p in hints.items()
        if str(p.annotation).split("[")[1].startswith(("int", "float"))
    }

    assert numeric <= set(NUMBERS)


def test_the_table_has_whole_headings_and_says_what_degrees_are() -> None:
    """No box, no heading that is cut, and a sentence on fractions and on the two ways of tensor parallelism."""
    code, out, _ = ask("--flop", "1e26")

    assert 0 == code and "┃" not in out and "…" not in out
    assert {"utilization", "devices", "pp", "dp", "residual", "batches"} <= set(out.split())
    assert "continuous model" in out and "hidden (feed-forward) width" in " ".join(out.split())
