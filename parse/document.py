"""Turns pieces of text into raw event columns and header values: the walk over one trace document, with its ladder.

The fast scanner reads what is JSON. An event that is not goes alone through the standard decoder and then through the
forgiving parser of `salvage`, so that one bad event neither slows nor loses the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scaletrace.errors import CorruptTraceError, LimitError, NotATraceError
from scaletrace.parse import salvage, sniff
from scaletrace.parse.buffer import Buffer
from scaletrace.parse.health import Health
from scaletrace.parse.limits import Limits
from scaletrace.parse.rawtable import RawTable
from scaletrace.parse.scan import DONE, SEPARATOR, scan_events
from scaletrace.parse.scan_state import FLOODS, FRESH
from scaletrace.parse.scan_text import CONTROL, DEEP, FULL, GROW, NEED, WHERE, space, string_end, value_end

_HEADER_KEY = re.compile(rb',?\s*"(?:' + salvage.HEADER_KEYS.encode() + rb')"\s*:\s*(?=["\[{\-\d tfn])')

_MAX_FLOODS = 64


@dataclass(slots=True)
class Document:
    """What one walk found: raw columns, the top-level values beside them, and the shape of the file."""

    table: RawTable
    header: dict[str, Any] = field(default_factory=dict)
    has_events: bool = False
    list_at_root: bool = False
    truncated: bool = False


class Walker:
    """Reads one document. `run` may raise CorruptTraceError, NotATraceError and LimitError."""

    __slots__ = ("_buf", "_doc", "_header_bytes", "_health", "_limits", "_name", "_stack", "_state", "_strict")

    def __init__(self, pieces: Iterator[bytes], name: str, limits: Limits, strict: bool, health: Health) -> None:
        self._buf = Buffer(pieces, limits.piece_bytes + (1 << 16))
        self._doc, self._header_bytes = Document(RawTable(limits)), 0
        self._health, self._limits, self._name, self._strict = health, limits, name, strict
        self._stack = np.zeros(limits.max_depth, np.uint8)
        self._state = np.zeros(WHERE + 1, np.int64)

    def run(self) -> Document:
        """Walk the whole document."""
        self._refuse_other_formats()
        first = self._peek()
        if first == 0xEF and self._buf.text(self._buf.at, self._buf.at + 3) == b"\xef\xbb\xbf":
            self._imperfect("byte order marks", "a byte order mark", self._buf.offset)
            self._buf.at += 3
            first = self._peek()
        self._buf.at += 1
        if first == ord("["):
            self._doc.list_at_root = self._doc.has_events = True
            self._events()
        else:
            self._object()
        self._after_root()
        return self._doc

    def _refuse_other_formats(self) -> None:
        buf = self._buf
        while buf.end - buf.at < sniff.HEAD_BYTES and buf.more():
            pass
        look = sniff.describe(buf.text(buf.at, buf.at + sniff.HEAD_BYTES))
        if not look.readable:
            raise NotATraceError(f"{self._name}: {look.reason}")

    def _peek(self) -> int:
        """The next byte that is not white space, 0 at the end of the input."""
        buf = self._buf
        while True:
            buf.at = min(int(space(buf.data, buf.at)), buf.end)
            if buf.at < buf.end:
                return int(buf.data[buf.at])
            if not buf.more():
                return 0

    # -- the object at the root -------------------------------------------------------------------------------------

    def _object(self) -> None:
        while True:
            c = self._peek()
            if c in (ord("}"), ord(",")):
                self._buf.at += 1
                if c == ord("}"):
                    return
                continue
            if c == 0:
                self._cut("before its last brace")
                return
            key = self._key() if c == ord('"') else None
            going = self._entry(key) if key is not None else self._resync_header("?")
            if not going:
                return

    def _key(self) -> str | None:
        """The key at the cursor, which then stands after its colon; None where there is none."""
        buf = self._buf
        while True:
            close, _ = string_end(buf.data, buf.at + 1, buf.end)
            colon = int(space(buf.data, close + 1)) if close >= 0 else buf.end
            if colon < buf.end:
                break
            self._bounded("a top-level key")
            if not buf.more():
                return None
        if buf.data[colon] != ord(":"):
            return None
        raw = buf.text(buf.at, close + 1).decode("utf-8", "replace")
        buf.at = colon + 1
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            return raw[1:-1]

    def _entry(self, key: str) -> bool:
        """Read the value of one top-level key; False where the document can't be followed any further."""
        if key == "traceEvents" and self._peek() == ord("["):
            if self._doc.has_events:
                raise self._several_writers(self._buf.offset)
            self._doc.has_events = True
            self._buf.at += 1
            return self._events()
        self._peek()
        buf = self._buf
        while True:
            after, flags = value_end(buf.data, buf.at, buf.end, self._stack, 0, len(self._stack), self._state)
            if after != NEED or not buf.more():
                break
            self._bounded(f"the top-level key {key!r}")
        if after == DEEP:
            raise self._too_deep(buf.base + int(self._state[WHERE]))
        if after == NEED:
            self._cut(f"inside the top-level key {key!r}")
            return False
        if after < 0:
            return self._resync_header(key)
        if flags & CONTROL:
            self._imperfect(
                "header texts with raw control characters", f"a raw control character in {key!r}", buf.offset
            )
        return self._keep(key, after) or self._resync_header(key)

    def _keep(self, key: str, after: int) -> bool:
        buf, header = self._buf, self._doc.header
        raw = buf.text(buf.at, after)
        text = raw.decode("utf-8", "replace")
        if "\ufffd" in text and b"\xef\xbf\xbd" not in raw:
            self._imperfect("header texts that are not UTF-8", f"invalid UTF-8 in {key!r}", buf.offset)
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return False
        if key in header and header[key] != value:
            if key in ("schemaVersion", "deviceProperties", "distributedInfo", "baseTimeNanoseconds"):
                raise self._several_writers(buf.offset)
            self._health.note(f"top-level key {key!r} stands twice; the last one counts")
        header[key] = value
        self._header_bytes += after - buf.at
        if self._header_bytes + 64 * len(header) > self._limits.max_event_bytes:
            raise LimitError(
                f"{self._name}: the header is longer than {self._limits.max_event_bytes:,} bytes; "
                "raise max_event_bytes (--max-event-bytes)"
            )
        buf.at = after
        return True

    def _resync_header(self, key: str) -> bool:
        """Skip an unreadable top-level value up to the next known key."""
        buf = self._buf
        place = buf.base + max(int(self._state[WHERE]), buf.at)
        if self._strict:
            raise self._corrupt(place, f"unreadable top-level key {key!r}")
        while True:
            match = _HEADER_KEY.search(buf.data[buf.at + 1 : buf.end].tobytes())
            if match or not buf.more():
                break
            self._bounded(f"the top-level key {key!r}")
        self._health.dropped["unreadable top-level keys"] += 1
        self._health.note(f"unreadable top-level key {key} ignored (byte {place:,})")
        if not match:
            return False
        buf.at += 1 + match.start()
        return True

    # -- the list of events -----------------------------------------------------------------------------------------

    def _events(self) -> bool:
        """Read events up to the list's end; False where the file ends first."""
        buf, table, fresh = self._buf, self._doc.table, True
        while True:
            table.fit(len(buf.data))
            stop, at = scan_events(buf.data, buf.at, buf.end, buf.base, self._strict, fresh, table.st, table.mem)
            fresh = bool(table.st[FRESH])
            buf.at = int(at)
            if stop == DONE:
                return True
            if stop == GROW:
                table.grow()
            elif stop == FULL:
                table.make_room()
            elif stop == DEEP:
                raise self._too_deep(buf.base + int(table.st[WHERE]))
            elif stop == NEED:
                self._bounded("one event")
                if table.st[FLOODS] > _MAX_FLOODS:
                    raise LimitError(
                        f"{self._name}: its texts are made to slow the reader down; no setting allows that"
                    )
                if not buf.more():
                    return self._events_cut()
            elif stop == SEPARATOR:
                fresh = self._separator(buf.base + max(int(table.st[WHERE]), buf.at))
            elif self._repair():
                fresh = False
            else:
                return False

    def _separator(self, place: int) -> bool:
        """Deal with what stands where one comma should; returns whether an event may follow without another."""
        buf = self._buf
        if self._strict:
            raise self._corrupt(place, "two events are not separated by one comma")
        c = self._peek()
        if c == ord("{"):
            self._health.repaired[salvage.COMMAS] += 1
            return True
        if c == ord(","):
            buf.at += 1
            following = self._peek()
            if following in (ord(","), ord("]"), ord("{")):
                self._health.repaired[salvage.COMMAS] += following != ord("{")
                return following == ord("{")
        self._drop_junk(place)
        return True

    def _drop_junk(self, place: int) -> None:
        """Skip what is neither event nor comma up to the next event, or to the end of the list."""
        buf = self._buf
        start = buf.offset
        for raw, final in buf.growing(self._limits.max_event_bytes):
            match = salvage.at_list_end(salvage.NEXT_EVENT.search(raw), final)
            if match:
                break
        else:
            self._bounded("the text between two events")
        if salvage.OTHER_WRITER.search(raw[: match.start() if match else len(raw)]):
            raise self._several_writers(place)
        self._health.dropped["pieces of text between events"] += 1
        self._health.note(f"text that is no event skipped at byte {start:,}")
        buf.at = buf.at + match.start() if match else buf.end

    def _repair(self) -> bool:
        """Take the event at the cursor through the slow rungs; False where the file ends inside it."""
        buf, table = self._buf, self._doc.table
        place = buf.base + int(table.st[WHERE])
        if self._strict:
            raise self._corrupt(place, "an event is not valid JSON")
        while self._peek() == ord(","):
            buf.at += 1
        for raw, final in buf.growing(self._limits.max_event_bytes):
            stop = salvage.event_end(raw, final)
            if stop:
                break
        else:
            self._bounded("one event")
        if salvage.OTHER_WRITER.search(raw[: stop or len(raw)]):
            raise self._several_writers(place)
        if not stop:
            return self._events_cut()
        try:
            event, reasons = salvage.decode_event(raw[:stop])
            taken = table.add(salvage.encode_event(event), buf.offset)
        except salvage.Unreadable:
            taken, reasons = False, []
        if taken:
            self._health.repaired.update(sorted(set(reasons)))
        else:
            self._health.dropped["events that can't be read"] += 1
            self._health.note(f"an unreadable event dropped at byte {buf.offset:,}")
        buf.at += stop
        return True

    def _events_cut(self) -> bool:
        rest = self._buf.text(self._buf.at, self._buf.end).strip(b" \t\r\n,")
        if salvage.OTHER_WRITER.search(rest[1:]):
            raise self._several_writers(self._buf.offset)
        if rest:
            self._health.dropped["events cut off by the end of the file"] += 1
        self._buf.at = self._buf.end
        self._cut("inside the list of events")
        return False

    # -- what surrounds the walk ------------------------------------------------------------------------------------

    def _after_root(self) -> None:
        c = self._peek()
        if c == 0 or self._doc.truncated:
            return
        buf = self._buf
        rest = buf.text(buf.at, buf.at + (1 << 16))
        if c in (ord("{"), ord("[")):
            if not self._doc.has_events:
                raise NotATraceError(
                    f"{self._name}: JSON lines (one document a line), not a Kineto trace; give the profiler's own file"
                )
            raise self._several_writers(buf.offset)
        if self._strict:
            raise self._corrupt(buf.offset, "text after the end of the trace")
        if salvage.OTHER_WRITER.search(rest):
            raise self._several_writers(buf.offset)
        self._health.note(f"text after the end of the trace ignored (byte {buf.offset:,})")

    def _cut(self, where: str) -> None:
        if self._strict:
            raise self._corrupt(self._buf.offset, f"the file ends {where}")
        self._doc.truncated = True
        self._health.note(f"truncated: the file ends {where}; the readable prefix is used")

    def _imperfect(self, reason: str, what: str, offset: int) -> None:
        if self._strict:
            raise self._corrupt(offset, what)
        self._health.repaired[reason] += 1

    def _bounded(self, what: str) -> None:
        if self._buf.end - self._buf.at > self._limits.max_event_bytes:
            raise LimitError(
                f"{self._name}: {what} at byte {self._buf.offset:,} is longer than "
                f"{self._limits.max_event_bytes:,} bytes; raise max_event_bytes (--max-event-bytes)"
            )

    def _too_deep(self, offset: int) -> LimitError:
        return LimitError(
            f"{self._name}: nested deeper than {self._limits.max_depth} at byte {offset:,}; raise max_depth (--max-depth)"
        )

    def _corrupt(self, offset: int, what: str) -> CorruptTraceError:
        return CorruptTraceError(
            f"{self._name}: {what} at byte {offset:,}; read it without --strict to repair what can be repaired", offset
        )

    def _several_writers(self, offset: int) -> CorruptTraceError:
        return CorruptTraceError(
            f"{self._name}: a second trace header at byte {offset:,}: file is an interleaving of two writers; "
            "give each rank its own file",
            offset,
        )
