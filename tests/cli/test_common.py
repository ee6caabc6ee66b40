"""Values that no option can take are refused by name, and JSON holds no number that JSON has no word for."""

from __future__ import annotations

import io
import math

import pytest
import typer
from rich.table import Table
from rich.text import Text

from scaletrace.cli.common import _Console, exit_codes, finite, in_range
from scaletrace.errors import UsageError


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 11.0])
def test_a_value_outside_its_range_is_wrong_usage(value: float) -> None:
    """NaN passes every comparison that is written the wrong way round, so it is tried here too."""
    with pytest.raises(UsageError, match="--knee"):
        in_range("--knee", value, 0, 10)


def test_a_value_inside_its_range_passes() -> None:
    """Bounds belong to the range, and an option that was not given has no value to check."""
    in_range("--knee", 0, 0, 10)
    in_range("--knee", 10, 0, 10)
    in_range("--knee", None, 0, 10)


def test_json_gets_null_for_what_is_not_a_number() -> None:
    """NaN and infinities anywhere in an answer become null."""
    assert {"a": [1, None, (2.5)], "b": None} == finite({"a": [1, math.nan, 2.5], "b": math.inf})


def test_a_refusal_of_the_system_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that can't be opened ends with its name and exit code 1, wherever in a command it happens."""
    with pytest.raises(typer.Exit) as stopped, exit_codes():
        open("/nonexistent/file").close()

    assert 1 == stopped.value.exit_code
    assert "/nonexistent/file: No such file or directory" in capsys.readouterr().err.replace("\n", " ")


def test_an_interrupt_ends_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C says that it was heard, without a traceback, and leaves the code that shells know."""
    with pytest.raises(typer.Exit) as stopped, exit_codes():
        raise KeyboardInterrupt

    assert (130, "stopped\n") == (stopped.value.exit_code, capsys.readouterr().err)


@pytest.mark.parametrize("text", ["a\x1b[2Jgone", "\x07\x9b31m", "abc\u202etxt"])
def test_a_terminal_gets_no_character_that_it_obeys(text: str) -> None:
    """Names come from anyone: as text, in a table or inside markup they are shown, not sent; styles still are."""
    table = Table(box=None, show_header=False)
    table.add_row(text)
    console = _Console(file=io.StringIO(), highlight=False, width=80)
    console.print(text, Text(text), table, f"[bold]{text}[/]", soft_wrap=True)
    written = console.file.getvalue()

    assert "" == "".join(c for c in written if not c.isprintable() and c != "\n")
    assert 3 <= written.count(ascii(text[1:])[1:-1])  # in the table its end may be cut


def test_a_long_error_keeps_reason_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """A name of a hundred thousand characters gives way between them."""
    with pytest.raises(typer.Exit), exit_codes():
        raise UsageError(f"reason {'x' * 100_000} remedy")

    said = capsys.readouterr().err
    assert (True, True, True) == ("reason xxx" in said, said.endswith("xxx remedy\n"), len(said) < 2100)
