"""What a file is, told from its beginning, and why it is not read if it is not a Kineto trace."""

from __future__ import annotations

import gzip
import io
import json

import pytest

from scaletrace.errors import NotATraceError
from scaletrace.parse.reader import read_file
from scaletrace.parse.sniff import describe


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b'{"schemaVersion": 1, "traceEvents": [', "kineto"),
        (b'{"traceName": "x", "deviceProperties": [', "kineto"),
        (b'\xef\xbb\xbf [{"ph": "X"}]', "kineto"),
        (b'{"schema": "1.1.0-chakra.0.0.4", "pid": 1, "nodes": [', "execution trace"),
        (b'{"version": "2.9", "pg_config": {}, "entries": [', "flight recorder"),
        (b'{"ph": "X", "name": "a"}\n{"ph": "X", "name": "b"}\n', "json lines"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "lfs"),
        (b"\x0a\x2c\x08\x01\x00\x12\x00", "pftrace"),
        (b"PK\x03\x04rest", "zip"),
        (b"SQLite format 3\x00", "sqlite"),
        (b"x" * 257 + b"ustar", "tar"),
        (b"   \n", "empty"),
        (b"<html>", "other"),
    ],
)
def test_the_kind_is_told_from_the_beginning(head: bytes, kind: str) -> None:
    """Each kind of file that lies beside traces has its own word."""
    assert kind == describe(head).kind


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"schema": "1.0.1", "pid": 1, "nodes": []}), "execution trace"),
        (json.dumps({"version": "2.9", "pg_status": {}, "entries": []}), "flight-recorder"),
        (json.dumps({"a": 1}) + "\n" + json.dumps({"a": 2}), "JSON lines"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("\x0a\x08\x00\x01", "not read yet"),
        ("[[1, 2], [3, 4]]", "without trace events"),
        ("42", "not JSON"),
        ("", "empty"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_no_trace_is_refused_by_name(text: str, words: str, packed: bool) -> None:
    """The error says what the file is; compression does not hide it."""
    raw = text.encode()
    with pytest.raises(NotATraceError, match=words):
        read_file(io.BytesIO(gzip.compress(raw) if packed else raw))
