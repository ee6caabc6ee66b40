"""`scaletrace catalog` as a user runs it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.catalog import catalog


def run(*arguments: str) -> Any:
    """The command in this process, which spares the imports of a new one."""
    app = typer.Typer()
    app.command("catalog")(catalog)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("what", ["devices", "networks", "clusters", "models"])
def test_json_gives_every_number_a_source(what: str) -> None:
    """Each entry carries its source beside its numbers."""
    done = run(what, "--json")

    assert 0 == done.exit_code, done.stderr
    answer = json.loads(done.stdout)
    assert "scaletrace.catalog/1" == answer["schema"]
    assert answer[what] and all(entry["source"] for entry in answer[what].values())


def test_one_entry_shows_value_and_source() -> None:
    """The overlap slowdown of the H100 comes with the rows that fixed it."""
    done = run("devices", "H100 SXM")

    assert 0 == done.exit_code, done.stderr
    assert "1.027" in done.stdout and "MosaicML" in done.stdout


def test_names_alone_are_one_a_line() -> None:
    """--quiet is for scripts."""
    names = run("clusters", "--quiet").stdout.split()
    assert {"dgx_h100", "gb200_nvl72", "gloo_10g"} <= set(names)


def test_an_unknown_entry_is_answered_with_the_known_ones() -> None:
    """Exit code 2 and the list to choose from."""
    done = run("clusters", "cray")

    assert 2 == done.exit_code
    assert "dgx_h100" in done.stderr
