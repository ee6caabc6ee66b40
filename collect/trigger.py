"""Turns a touched file into a step number on which all ranks begin to record.

`touch FOLDER/record` asks for a window. The first rank of each host that sees it writes the step into
`FOLDER/record.at`, far enough ahead that every rank reads it in time, and rounded up so that hosts without a common
folder agree too, unless the request falls between them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from scaletrace.collect.ranks import Place

REQUEST, PLAN = "record", "record.at"
POLL_S = 0.5
LEAD_S = 3 * POLL_S


class Trigger:
    """Looks for a request at most every half second."""

    def __init__(self, folder: str) -> None:
        self._request, self._plan = Path(folder) / REQUEST, Path(folder) / PLAN
        self._next = 0.0
        self._began: tuple[int, float] | None = None
        self._done = self._stamp(self._plan)

    def poll(self, completed: int, place: Callable[[], Place]) -> int | None:
        """The step at which to begin, once one is planned that was not seen before; `completed` steps are done."""
        now = time.monotonic()
        if self._began is None:
            self._began = completed, now
        if now < self._next:
            return None
        self._next = now + POLL_S
        if self._request.exists() and place().local_rank in (0, None):
            self._write_plan(completed, now)
        stamp = self._stamp(self._plan)
        if stamp is None or stamp == self._done:
            return None
        self._done = stamp
        text = self._plan.read_text()
        return int(text) if text.strip().isdecimal() else None

    def _write_plan(self, completed: int, now: float) -> None:
        steps, seconds = completed - (self._began or (0, 0.0))[0], now - (self._began or (0, 0.0))[1]
        lead = int(LEAD_S * steps / seconds) if seconds > 0 else 0
        step = round_up(completed + 2 + lead)
        part = self._plan.with_name(f".{PLAN}.{os.getpid()}.part")
        part.write_text(str(step))
        os.replace(part, self._plan)
        self._request.unlink(missing_ok=True)

    @staticmethod
    def _stamp(path: Path) -> int | None:
        try:
            return path.stat().st_mtime_ns
        except OSError:
            return None


def round_up(step: int) -> int:
    """The next multiple of 10, or of 100 from step 1,000 on."""
    unit = 100 if step >= 1000 else 10
    return -(-step // unit) * unit
