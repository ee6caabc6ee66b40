"""The server behind `scaletrace view`: the UI, one trace, and nothing else."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest

from scaletrace.errors import InputError, MissingExtraError, UsageError
from scaletrace.view import serve
from scaletrace.view.webui import web_folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[serve.TraceServer]:
    try:
        web_folder()
    except MissingExtraError as error:
        pytest.skip(str(error))
    trace = tmp_path / "my trace é.pftrace"
    trace.write_bytes(b"trace bytes")
    (tmp_path / "secret").write_text("secret")
    running = serve.TraceServer(trace)
    stop = threading.Event()
    thread = threading.Thread(target=running.serve, args=(stop.is_set,))
    thread.start()
    yield running
    stop.set()
    thread.join()
    running.close()


def ask(
    server: serve.TraceServer, path: str, host: str | None = None, method: str = "GET", origin: str = ""
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    headers = {"Host": host or f"127.0.0.1:{server.port}", "Connection": "close"}
    connection.request(method, path, headers={**headers, "Origin": origin} if origin else headers)
    response = connection.getresponse()
    answer = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return answer


def test_the_page_and_its_parts_have_the_right_types(server: serve.TraceServer) -> None:
    """A browser runs WebAssembly and scripts only with their own MIME types."""
    wasm = next(web_folder().glob("v*/trace_processor.wasm")).relative_to(web_folder())
    got = {path: ask(server, path)[1]["Content-Type"] for path in ("/", f"/{wasm}", "/service_worker.js")}

    expected = {"/": "text/html", f"/{wasm}": "application/wasm", "/service_worker.js": "text/javascript"}
    assert expected == got


def test_the_trace_is_served_under_its_own_name(server: serve.TraceServer) -> None:
    """The address in the page leads to the bytes of the file, with spaces and accents in its name."""
    target = parse_qs(server.url.split("?", 1)[1])["url"][0]
    status, headers, body = ask(server, target.split(str(server.port), 1)[1])

    assert status == 200
    assert body == b"trace bytes"
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/trace/secret",
        "/../secret",
        "/%2e%2e/secret",
        "/trace/../secret",
        "//etc/passwd",
        "/%00",
        "/trace/",
        "/nothing",
        "/" + "x" * 300,
    ],
)
def test_no_other_file_can_be_had(server: serve.TraceServer, path: str) -> None:
    """Neither a neighbour of the trace nor a path that climbs out of the UI's folder is served."""
    assert ask(server, path)[0] == 404


def test_an_address_that_is_none_is_said(server: serve.TraceServer) -> None:
    """It is answered, where the reading of it failing would leave the asker without a word."""
    assert ask(server, "http://[")[0] == 400


def test_foreign_host_names_are_refused(server: serve.TraceServer) -> None:
    """A web page whose name was rebound to 127.0.0.1 gets nothing."""
    assert ask(server, "/", host="evil.example:80")[0] == 403


def test_a_short_address_leads_to_the_page(server: serve.TraceServer) -> None:
    """The address that is printed fits on a line and redirects to the one with the trace and the questions."""
    status, headers, _ = ask(server, server.short_url.split(str(server.port), 1)[1])

    assert len(server.short_url) < 40
    assert (302, server.url) == (status, headers["Location"])


def test_the_page_pins_the_path_and_asks_the_prepared_questions(server: serve.TraceServer) -> None:
    """The address carries the commands that the UI runs once the trace is loaded."""
    commands = unquote(server.url)

    for word in (
        "PinTracksByRegex",
        "Critical path",
        "RunQueryAndShowTab",
        "-- stragglers",
        "-- exposed communication",
    ):
        assert word in commands


def test_the_public_ui_gets_the_trace_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For ui.perfetto.dev only the trace is served, readable by that origin alone."""
    monkeypatch.setattr(serve, "PUBLIC_UI_PORT", 0)
    trace = tmp_path / "t.pftrace"
    trace.write_bytes(b"x")
    running = serve.TraceServer(trace, online=True)
    thread = threading.Thread(target=running.serve, args=(lambda: running.requests > 0,))
    thread.start()
    page = ask(running, "/")
    allowed = ask(running, "/trace/t.pftrace", method="OPTIONS", origin="https://ui.perfetto.dev")
    refused = ask(running, "/trace/t.pftrace", method="OPTIONS", origin="https://evil.example")
    _, headers, body = ask(running, "/trace/t.pftrace")
    thread.join()
    running.close()

    assert (page[0], allowed[0], refused[0]) == (404, 204, 403)
    assert allowed[1]["Access-Control-Allow-Private-Network"] == "true"
    assert headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
    assert body == b"x"
    assert running.url.startswith("https://ui.perfetto.dev/#!/?url=http%3A%2F%2F127.0.0.1")


def test_a_missing_file_and_a_taken_port_are_said(tmp_path: Path, server: serve.TraceServer) -> None:
    """The message names the file, or the port."""
    with pytest.raises(InputError, match="no such file"):
        serve.TraceServer(tmp_path / "none")
    with pytest.raises(UsageError, match=f"port {server.port} .* can't be used"):
        serve.TraceServer(server.trace, server.port)
