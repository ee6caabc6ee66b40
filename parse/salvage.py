"""Turns the text of one event that is not JSON into the event that its writer meant, and says what was wrong with it.

The last rung of the ladder: fast scanner, then the standard decoder, then this parser, event by event.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Self

EVENT_BOUNDARY = re.compile(rb'\}\s*,?\s*(?=\{\s*"(?:ph|name|cat|args|pid|tid|ts|dur|id)"\s*:)')
"""Between two events: the match ends at the next event's brace, its first byte is the last brace of this one."""

HEADER_KEYS = (
    "traceEvents|traceName|schemaVersion|deviceProperties|computeProperties|distributedInfo|baseTimeNanoseconds|"
    "displayTimeUnit|trace_id|group_trace_id|record_shapes|with_stack|with_flops|with_modules|profile_memory|"
    "host_name|cupti_version|cuda_runtime_version|cuda_driver_version|hip_runtime_version|hip_driver_version|"
    "INFO|WARNING|ERROR|username|nccl_version"
)
LIST_END = re.compile(rb'\}\s*\]\s*(?:,\s*"(?:' + HEADER_KEYS.encode() + rb')"\s*:|\}?\s*\Z)')
NEXT_EVENT = re.compile(
    rb'\{\s*"(?:ph|name|cat|args|pid|tid|ts|dur|id)"\s*:|\]\s*(?:,\s*"(?:' + HEADER_KEYS.encode() + rb')"\s*:|\}?\s*\Z)'
)
"""Where to go on after text that is no event: the next event's brace, or the bracket that ends the list."""
OTHER_WRITER = re.compile(rb'"(?:schemaVersion|deviceProperties|baseTimeNanoseconds|traceEvents|distributedInfo)"\s*:')

QUOTES, BARE, EMPTY, COMMAS, KEY_QUOTE, CONTROL = (
    "texts with unescaped quotes",
    "values that are not JSON (N/A, nan, inf)",
    "empty values",
    "missing or spare commas",
    "keys without a quote",
    "strings with raw control characters",
)
NAME_QUOTES = "event names with unescaped quotes"

_SPACE = re.compile(r"\s*")
_KEY = re.compile(r'"?([^"\x00-\x1f:{}\[\],]*)"\s*:\s*')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?=\s*[,}\]])")
_BARE = re.compile(r'[^\s,"{}\[\]][^,"{}\[\]\n]*')
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_CLOSES_VALUE = re.compile(r'\s*(?:\}|\]|,\s*(?:"|[\]}\-\d{\[]|true|false|null|$)|$)')
_NEXT_KEY = re.compile(r'\s*(?:\}|$|,\s*"[^"\n]{1,80}"\s*:|\s"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"\s*:)')
_MAX_DEPTH = 64


class Unreadable(ValueError):
    """The text is beyond repair."""


def decode_event(fragment: bytes) -> tuple[dict[str, Any], list[str]]:
    """(event, what was repaired) of the text of one object. Raises Unreadable."""
    text = fragment.decode("utf-8", "replace")
    try:
        event = json.loads(text, strict=False, parse_float=_Raw)
        reasons = [BARE] if re.search(r"\b(?:NaN|Infinity)\b", text) else []
    except (ValueError, RecursionError):
        parser = _Lenient(text)
        event = parser.value(0, 0)
        reasons = parser.reasons
    if not isinstance(event, dict) or not event:
        raise Unreadable("not an object")
    return event, reasons


def event_end(raw: bytes, final: bool) -> int:
    """Length of the broken event at the start of `raw`, 0 where its end is not in sight; `final`: nothing follows."""
    after = EVENT_BOUNDARY.search(raw)
    last = at_list_end(LIST_END.search(raw), final)
    return min((match.start() + 1 for match in (after, last) if match), default=0)


def at_list_end(match: re.Match[bytes] | None, final: bool) -> re.Match[bytes] | None:
    """The match, unless it leans on the end of the text although more text may follow."""
    leans = match is not None and match[0][-1:] != b":" and not final
    return None if leans else match


class _Lenient:
    """A forgiving reader of one JSON object. `at` moves forward only, so that it always ends."""

    __slots__ = ("at", "reasons", "text")

    def __init__(self, text: str) -> None:
        self.text, self.at, self.reasons = text, 0, list[str]()

    def _skip(self) -> str:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.text[self.at : self.at + 1]

    def value(self, depth: int, in_object: int, key: str = "") -> Any:
        c = self._skip()
        if depth > _MAX_DEPTH:
            raise Unreadable("nested too deep")
        if c == "{":
            return self._object(depth)
        if c == "[":
            return self._list(depth)
        if c == '"':
            return self._string(bool(in_object), key)
        if c in (",", "}", "]", ""):
            self.reasons.append(EMPTY)
            return None
        if match := _NUMBER.match(self.text, self.at):
            self.at = match.end()
            number = match.group()
            return int(number) if re.fullmatch(r"-?\d{1,40}", number) else _Raw(number)
        match = _BARE.match(self.text, self.at)
        if not match:
            raise Unreadable(f"unexpected {c!r}")
        self.at = match.end()
        word = match.group().strip()
        if word not in _WORDS:
            self.reasons.append(BARE)
        return _WORDS.get(word)

    def _object(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        self.at += 1
        while True:
            c = self._skip()
            if c == "}":
                self.at += 1
                return out
            if c == ",":
                self.at += 1
                if self._skip() in ("}", ","):
                    self.reasons.append(COMMAS)
                continue
            match = _KEY.match(self.text, self.at)
            if not match or not match.group(1):
                raise Unreadable("no key")
            if c != '"':
                self.reasons.append(KEY_QUOTE)
            self.at = match.end()
            out[match.group(1)] = self.value(depth + 1, 1, match.group(1))
            if self._skip() not in (",", "}"):
                self.reasons.append(COMMAS)

    def _list(self, depth: int) -> list[Any]:
        out: list[Any] = []
        self.at += 1
        while True:
            c = self._skip()
            if c == "]":
                self.at += 1
                return out
            if c == ",":
                self.at += 1
                if self._skip() in ("]", ","):
                    self.reasons.append(COMMAS)
                continue
            if c in ("}", ""):
                raise Unreadable("list without an end")
            out.append(self.value(depth + 1, 0))

    def _string(self, in_object: bool, key: str) -> str:
        """A string ends at the first quote that a comma and a key, a bracket or a brace follows."""
        closes = _NEXT_KEY if in_object else _CLOSES_VALUE
        start, quote, spare = self.at + 1, self.at, False
        while True:
            quote = self.text.find('"', quote + 1)
            if quote < 0:
                raise Unreadable("string without an end")
            back = quote
            while back > start and self.text[back - 1] == "\\":
                back -= 1
            if (quote - back) % 2 and not closes.match(self.text, quote + 1):
                continue
            if closes.match(self.text, quote + 1):
                break
            spare = True
        body = self.text[start:quote]
        self.at = quote + 1
        if spare:
            self.reasons.append(NAME_QUOTES if key == "name" else QUOTES)
            body = re.sub(r'(?<!\\)"', r"\"", body)
        try:
            return str(json.loads(f'"{body}"', strict=False))
        except ValueError:
            return body


class _Raw(float):
    """A decimal that keeps its text, so that re-encoding loses no digit."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __repr__(self) -> str:
        return self.text


def encode_event(event: dict[str, Any]) -> bytes:
    """The event as JSON that the fast scanner accepts; numbers that are not finite become null."""
    return _encode(event).encode()


def _encode(value: Any) -> str:
    if isinstance(value, _Raw):
        return value.text
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_encode(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_encode, value)) + "]"
    return json.dumps(value)
