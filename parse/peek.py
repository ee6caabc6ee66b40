"""Turns the beginning (and end) of a file into what it is and whose it is, without reading what lies between."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrace.errors import InputError
from scaletrace.parse.literals import whole
from scaletrace.parse.sniff import describe

SUFFIXES = (".json", ".json.gz", ".json.zst")
EMPTY = "empty"
_HEAD_BYTES = 64 * 1024
_HEAD_LIMIT = 16 * 1024 * 1024
_DECODER = json.JSONDecoder()
_HOST_PID = re.compile(r"^(?:libkineto_(?:trace|activities)_)?(?P<host>.+)_\d+(?:\.\d{13,}\.pt\.trace)?\.json")
_COUNTS = re.compile(r"(^|[^a-z])(step|steps|rank|iter|iteration|epoch|worker|cycle)$", re.IGNORECASE)
HAS_PID = re.compile(r"^libkineto_(trace|activities)_|\.\d{13,}\.pt\.trace\.json")


@dataclass(frozen=True, slots=True)
class Found:
    """One file: `kind` is "kineto", "flight recorder", "manifest", "execution trace" or "other" (with the reason)."""

    path: Path
    kind: str
    why: str = ""
    rank: int | None = None
    world_size: int | None = None
    rank_rule: str = ""
    host: str = ""
    first_ns: int = 0


def read_head(path: Path, size: int = _HEAD_BYTES) -> bytes:
    """The first `size` bytes of the text, decompressed; a damaged stream gives what could be read.

    Raises InputError when the file can't be opened.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic[:2] == b"\x1f\x8b":
                return _gzip_head(gzip.GzipFile(fileobj=file), size)
            if magic == b"\x28\xb5\x2f\xfd":
                return _zstd_head(file, size)
            return file.read(size)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give a folder of Kineto files or one file") from error


def _gzip_head(stream: gzip.GzipFile, size: int) -> bytes:
    parts: list[bytes] = []
    left = size
    try:
        while left > 0 and (part := stream.read1(min(left, 16384))):
            parts.append(part)
            left -= len(part)
    except (EOFError, OSError, zlib.error):
        pass  # the reader says what is lost; here the prefix is enough
    return b"".join(parts)


def _zstd_head(file: Any, size: int) -> bytes:
    import zstandard

    parts: list[bytes] = []
    left = size
    try:
        with zstandard.ZstdDecompressor().stream_reader(file) as stream:
            while left > 0 and (part := stream.read(min(left, 16384))):
                parts.append(part)
                left -= len(part)
    except zstandard.ZstdError:
        pass
    return b"".join(parts)


def _value(text: str, key: str) -> Any:
    """The JSON value after the first `"key":` of `text`, or None where it is absent, cut or broken."""
    found = re.search(rf'"{re.escape(key)}"\s*:\s*', text)
    if found is None:
        return None
    try:
        return _DECODER.raw_decode(text, found.end())[0]
    except (ValueError, RecursionError):
        return None


def _tail(path: Path) -> str:
    """The last bytes of a plain file; compressed ones have no cheap end."""
    with path.open("rb") as file:
        if file.read(2) in (b"\x1f\x8b", b"\x28\xb5"):
            return ""
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _HEAD_BYTES))
        return file.read().decode("utf-8", "replace")


def sniff(path: Path) -> Found:
    """Say what `path` is from its beginning (and end). Raises InputError when it can't be opened."""
    size = _HEAD_BYTES
    text = read_head(path, size).decode("utf-8", "replace")
    while '"traceEvents"' not in text and len(text) >= size and size < _HEAD_LIMIT and '"distributedInfo"' in text:
        size *= 4  # a world of thousands has lists of ranks longer than one read
        text = read_head(path, size).decode("utf-8", "replace")
    start = text.lstrip("\ufeff \t\r\n")
    if not start:
        return Found(path, "other", EMPTY)
    at = start.find('"traceEvents"')
    before = start if at < 0 else start[:at]
    if start.startswith("["):
        legacy = '"ph"' in start
        return Found(path, "kineto" if legacy else "other", "" if legacy else "a JSON list without events")
    if at < 0 or '"nodes"' in before:
        return _not_kineto(path, start)
    return _kineto(path, before, start[at:])


def _not_kineto(path: Path, text: str) -> Found:
    if '"entries"' in text and any(f'"{key}"' in text for key in ("pg_config", "pg_status", "comm_lib_version")):
        return Found(path, "flight recorder", rank=rank_value(_value(text, "rank")))
    if '"nodes"' in text and ("schema" in text or "ctrl_deps" in text):
        return Found(path, "execution trace", "a PyTorch or Chakra execution trace, not a Kineto trace")
    if path.name.startswith("manifest"):
        return Found(path, "manifest")
    look = describe(text.encode())
    if look.kind == "kineto":
        return Found(path, "kineto")
    return Found(path, "other", "no traceEvents in it" if look.readable else look.reason)


def rank_value(value: Any) -> int | None:
    """A rank or world size as a header states it (a number, or its digits), None for anything else."""
    if isinstance(value, str):
        value = whole(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _kineto(path: Path, before: str, events: str) -> Found:
    info = _value(before, "distributedInfo")
    base, host = _value(before, "baseTimeNanoseconds"), _value(before, "host_name")
    if info is None or base is None:
        tail = _tail(path)
        info = _value(tail, "distributedInfo") if info is None else info
        base = _value(tail, "baseTimeNanoseconds") if base is None else base
        host = _value(tail, "host_name") if host is None else host
    info = info if isinstance(info, Mapping) else {}
    first = re.search(r'"ts"\s*:\s*"?([0-9]{1,18})', events)
    rank = rank_value(info.get("rank"))
    return Found(
        path,
        "kineto",
        rank=rank,
        world_size=rank_value(info.get("world_size")),
        rank_rule="distributedInfo" if rank is not None else "",
        host=host if isinstance(host, str) else _host_in_name(path.name),
        first_ns=(base if isinstance(base, int) else 0) + (int(first[1]) * 1000 if first else 0),
    )


def _host_in_name(name: str) -> str:
    """Host in names of the form host_pid, as dynolog and the TensorBoard handler write them; "" in all others.

    A name chosen by the user may end in a number of something else, as worker0_step_12 does.
    """
    found = _HOST_PID.match(name) if HAS_PID.search(name) else None
    return found["host"] if found and not _COUNTS.search(found["host"]) else ""
