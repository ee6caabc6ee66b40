"""`scaletrace view`: the address of a Perfetto UI on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.view import _Done, view
from scaletrace.errors import MissingExtraError
from scaletrace.view import serve
from scaletrace.view.webui import web_folder

app = typer.Typer()
app.command()(view)
RUNNER = CliRunner()


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace, and a server that is interrupted at once."""
    try:
        web_folder()
    except MissingExtraError as error:
        pytest.skip(str(error))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve.TraceServer, "serve", interrupt)
    file = tmp_path / "t.pftrace"
    file.write_bytes(b"x")
    return file


def test_the_address_is_printed_and_ctrl_c_ends_quietly(trace: Path) -> None:
    """The address is on stdout, a remark on stderr, and an interrupt is no error."""
    result = RUNNER.invoke(app, [str(trace), "--no-browser"])

    assert result.exit_code == 0
    assert result.stdout.startswith("http://127.0.0.1:")
    assert "this machine only" in result.stderr


def test_json_gives_the_address_alone(trace: Path) -> None:
    """One document on stdout, for programs that open the page themselves."""
    answer = json.loads(RUNNER.invoke(app, [str(trace), "--no-browser", "--json", "--quiet"]).stdout)

    assert answer["schema"] == "scaletrace.view/1"
    assert f"http://127.0.0.1:{answer['port']}/#!/?url=" in answer["url"]
    assert f"http://127.0.0.1:{answer['port']}/open" == answer["short_url"]


def test_the_browser_is_opened_on_the_trace(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --no-browser the default browser gets the page that the printed address leads to."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url))
    result = RUNNER.invoke(app, [str(trace)])

    assert len(opened) == 1
    assert opened[0].startswith(result.stdout.strip().removesuffix("/open") + "/#!/?url=")


def test_a_missing_file_is_exit_code_1(tmp_path: Path) -> None:
    """The message names the file and the remedy."""
    result = RUNNER.invoke(app, [str(tmp_path / "none.pftrace"), "--no-browser"])

    assert result.exit_code == 1
    assert "scaletrace replay" in result.output


def test_the_public_ui_is_served_until_it_has_fetched_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stays while nobody has asked, and some seconds beyond the request."""
    now = iter([100.0, 100.0, 104.0, 106.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    server = SimpleNamespace(requests=0)
    done = _Done(cast(serve.TraceServer, server))
    before = done()
    server.requests = 1

    assert before is False
    assert [done(), done(), done()] == [False, False, True]
