"""Turns a trace file into a page: the Perfetto UI served on the loopback interface, straight to the loaded trace.

Nothing is fetched from elsewhere: a Content-Security-Policy keeps the page to this server. Requests whose Host header is
not this server are refused, so that no web page can reach it by a rebound name.
"""

from __future__ import annotations

import json
import mimetypes
import shutil
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from scaletrace.errors import UsageError
from scaletrace.view.sql import PREPARED, VIEWS
from scaletrace.view.webui import trace_file, web_folder

LOOPBACK = "127.0.0.1"
PUBLIC_UI = "https://ui.perfetto.dev"
PUBLIC_UI_PORT = 9001
"""The only port from which ui.perfetto.dev may fetch a trace (its own Content-Security-Policy)."""

_POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'; "
    "frame-ancestors 'none'; form-action 'none'; base-uri 'self'"
)
_TYPES = {".wasm": "application/wasm", ".js": "text/javascript", ".json": "application/json", ".woff2": "font/woff2"}
_TRACE_PREFIX = "/trace/"
_OPEN = "/open"
_PINNED = r"^(Critical path|What it is|Steps( \(\d+\))?)$"
_EXPANDED = "^rank 0+$"


class TraceServer:
    """Serves one trace, with the UI or (for ui.perfetto.dev) alone.

    `url` is what to open, with the trace and the prepared questions in it; `short_url` leads there and fits on a line.
    Raises InputError for a missing file, UsageError for a port that can't be had, MissingExtraError without the UI files.
    """

    def __init__(self, trace: str | Path, port: int = 0, online: bool = False) -> None:
        self.trace = trace_file(trace)
        folder = None if online else web_folder().resolve()
        wanted = PUBLIC_UI_PORT if online else port
        try:
            self._server = _Server(wanted, self.trace, folder)
        except OSError as error:
            said = f"port {wanted} of {LOOPBACK} can't be used ({error.strerror}); choose another one"
            raise UsageError(said) from error
        self.port: int = self._server.server_address[1]
        here = f"http://{LOOPBACK}:{self.port}"
        trace_url = f"{here}{_TRACE_PREFIX}{quote(self.trace.name)}"
        commands = quote(json.dumps(startup_commands(), separators=(",", ":")))
        self.url = f"{PUBLIC_UI if online else here}/#!/?url={quote(trace_url, safe='')}&startupCommands={commands}"
        self.short_url = here + _OPEN
        self._server.url = self.url

    @property
    def requests(self) -> int:
        """How many files were asked for and served."""
        return self._server.requests

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Answer requests until interrupted, or until `until()` after a request."""
        self._server.timeout = 0.1
        while not until():
            self._server.handle_request()

    def close(self) -> None:
        self._server.server_close()


def startup_commands() -> list[dict[str, object]]:
    """What the UI does once the trace is loaded: pin the path, and answer the prepared questions in query tabs."""
    commands: list[dict[str, object]] = [
        {"id": "dev.perfetto.PinTracksByRegex", "args": [_PINNED]},
        {"id": "dev.perfetto.ExpandTracksByRegex", "args": [_EXPANDED]},
        {"id": "dev.perfetto.RunQuery", "args": [VIEWS]},
    ]
    questions = [f"-- {title}\n{sql}" for title, sql in reversed(PREPARED.items())]
    return commands + [{"id": "dev.perfetto.RunQueryAndShowTab", "args": [question]} for question in questions]


class _Server(ThreadingHTTPServer):
    """A server on the loopback interface that knows its one trace; without a folder it serves the trace alone."""

    daemon_threads = True

    def __init__(self, port: int, trace: Path, folder: Path | None) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.trace, self.folder, self.requests, self.url = trace, folder, 0, ""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request; the trace goes to ui.perfetto.dev only where the server has no folder."""

    server: _Server
    server_version = "scaletrace"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_OPTIONS(self) -> None:
        """Chromium asks before a public page may reach the loopback interface; only ui.perfetto.dev may."""
        if self.server.folder is not None or self.headers.get("Origin") != PUBLIC_UI:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        self.send_response(HTTPStatus.NO_CONTENT)
        self.send_header("Access-Control-Allow-Origin", PUBLIC_UI)
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):  # the browser went away
            self.close_connection = True

    def _answer(self, with_body: bool) -> None:
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in (LOOPBACK, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "this server answers to its own address only")
            return
        trace = self.server.trace
        try:
            path = unquote(urlsplit(self.path).path)
        except ValueError:  # as in http://[
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        if path == _OPEN:
            self._redirect()
            return
        file = trace if path == _TRACE_PREFIX + trace.name else _inside(self.server.folder, path)
        if file is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.server.requests += 1
        self._send(file, with_body)

    def _redirect(self) -> None:
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Location", self.server.url)
        self.send_header("Content-Length", "0")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _send(self, file: Path, with_body: bool) -> None:
        try:
            stream = file.open("rb")
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with stream:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", content_type(file))
            self.send_header("Content-Length", str(file.stat().st_size))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if self.server.folder is None:
                self.send_header("Access-Control-Allow-Origin", PUBLIC_UI)
            else:
                self.send_header("Content-Security-Policy", _POLICY)
            self.end_headers()
            if with_body:
                shutil.copyfileobj(stream, self.wfile, 1 << 20)


def content_type(file: Path) -> str:
    """MIME type by the file's name; a browser runs WebAssembly and modules only with the right one."""
    return _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"


def _inside(folder: Path | None, path: str) -> Path | None:
    """The file that `path` names below `folder`, or None; links and ".." can't lead out."""
    if folder is None or "\0" in path:
        return None
    try:
        file = (folder / ("index.html" if path in ("", "/") else path.lstrip("/"))).resolve()
        return file if file.is_relative_to(folder) and file.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, a ring of links, bytes that are no name
        return None
