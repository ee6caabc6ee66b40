"""Turns `scaletrace view` into a Perfetto UI on this machine, opened on a trace."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrace.cli.common import document, err, exit_codes, out, print_json

if TYPE_CHECKING:
    from scaletrace.view.serve import TraceServer

_GRACE_S = 5.0


def view(
    file: Annotated[Path, typer.Argument(help="A .pftrace of ours, or a Kineto .json or .json.gz.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the default browser.")] = True,
    online: Annotated[
        bool, typer.Option("--online", help="Use ui.perfetto.dev; the trace stays on this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No remarks on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Open a trace in the Perfetto UI, served from this machine and without a network.

    The critical path and the steps are pinned, and query tabs answer what the path is made of, where communication is
    exposed and who is late. Stops with Ctrl-C.

    Example: scaletrace view replay.pftrace
    """
    with exit_codes(debug):
        from scaletrace.view.serve import TraceServer

        server = TraceServer(file, port, online)
        try:
            _announce(server, file, as_json, quiet)
            if browser:
                webbrowser.open(server.url)
            server.serve(_Done(server) if online else lambda: False)
        except KeyboardInterrupt:
            pass
        finally:
            server.close()


def _announce(server: TraceServer, file: Path, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(
            document("scaletrace.view/1", str(file), {}, url=server.url, short_url=server.short_url, port=server.port)
        )
    else:
        out.print(server.short_url, markup=False, soft_wrap=True)
    out.file.flush()
    if not quiet:
        err.print("serving on this machine only; stop with Ctrl-C", markup=False)


class _Done:
    """True once the trace was fetched and some seconds have gone by; ui.perfetto.dev asks once and needs no server then."""

    def __init__(self, server: TraceServer) -> None:
        self._server = server
        self._since: float | None = None

    def __call__(self) -> bool:
        if self._server.requests and self._since is None:
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() - self._since > _GRACE_S
