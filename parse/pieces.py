"""Turns a path, URL or stream, compressed or not, into pieces of plain bytes of bounded size."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

from scaletrace.errors import CorruptTraceError, InputError, LimitError
from scaletrace.parse.limits import Limits

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class _Inflater(Protocol):
    """The part of zlib's decompressor that is used."""

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes: ...


class Damage:
    """What went wrong while decompressing; empty where nothing did."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason = ""


@contextmanager
def opened(source: str | Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """The source as a binary stream; URLs such as s3://bucket/rank0.json.gz go through fsspec."""
    if not isinstance(source, str | Path):
        yield source
        return
    try:
        stream: Any
        if "://" in str(source):
            import fsspec

            stream = fsspec.open(str(source), "rb", compression=None).open()
        else:
            stream = open(source, "rb")  # noqa: SIM115
    except (OSError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{source}: {reason}; give a folder of Kineto files or one file") from error
    try:
        yield stream
    except OSError as error:
        raise InputError(f"{source}: {error.strerror or error} while reading") from error
    finally:
        stream.close()


def pieces(stream: IO[bytes], name: str, limits: Limits, damage: Damage) -> Iterator[bytes]:
    """Decompressed pieces of at most `limits.piece_bytes`; a cut or corrupt end is put into `damage`, not raised."""
    head = stream.read(4)
    if head[:2] == GZIP:
        parts = _gunzip(stream, head, limits, damage)
    elif head == ZSTD:
        parts = _unzstd(stream, head, limits, damage)
    else:
        parts = _plain(stream, head, limits)
    total = 0
    for raw_bytes, part in parts:
        total += len(part)
        if total > limits.max_bytes:
            raise LimitError(
                f"{name}: more than {limits.max_bytes:,} bytes after decompression; raise max_bytes (--max-bytes)"
            )
        if total > limits.ratio_floor_bytes and total > raw_bytes * limits.max_ratio:
            raise LimitError(
                f"{name}: expands more than {limits.max_ratio}-fold ({raw_bytes:,} bytes to over {total:,}), "
                "which looks like a decompression bomb; raise max_ratio (--max-ratio) if it is not"
            )
        if part:
            yield part


def checked_utf8(parts: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The same pieces; raises CorruptTraceError at the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for part in parts:
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(part)
        except UnicodeDecodeError as error:
            offset = done - pending + error.start
            raise CorruptTraceError(
                f"{name}: invalid UTF-8 at byte {offset:,}; read it without --strict", offset
            ) from error
        done += len(part)
        yield part


def _plain(stream: IO[bytes], head: bytes, limits: Limits) -> Iterator[tuple[int, bytes]]:
    yield len(head), head
    raw_bytes = len(head)
    while part := stream.read(limits.piece_bytes):
        raw_bytes += len(part)
        yield raw_bytes, part


def _gunzip(stream: IO[bytes], head: bytes, limits: Limits, damage: Damage) -> Iterator[tuple[int, bytes]]:
    raw_bytes, data = len(head), head
    member = zlib.decompressobj(31)
    while True:
        before = member.copy()
        try:
            out = member.decompress(data, limits.piece_bytes)
        except zlib.error as error:
            damage.reason = f"gzip data damaged ({error})"
            yield raw_bytes, _prefix(before, data, limits.piece_bytes)
            return
        yield raw_bytes, out
        data = member.unconsumed_tail
        if member.eof:
            data = member.unused_data.lstrip(b"\0")
            member = zlib.decompressobj(31)
            finished = True
        else:
            finished = False
        if not data or (finished and len(data) < 18):
            more = stream.read(1 << 18)
            raw_bytes += len(more)
            data += more
            if not more:
                if not finished and not (out and len(out) == limits.piece_bytes):
                    damage.reason = "gzip data ends early"
                    return
                if finished:
                    return


def _prefix(member: _Inflater, data: bytes, limit: int) -> bytes:
    """What can be decompressed of damaged data before the damage."""
    parts: list[bytes] = []
    total = 0
    try:
        for at in range(len(data)):
            parts.append(member.decompress(data[at : at + 1], limit))
            total += len(parts[-1])
            if total > limit:
                break
    except zlib.error:
        pass  # the caller has noted the damage
    return b"".join(parts)


def _unzstd(stream: IO[bytes], head: bytes, limits: Limits, damage: Damage) -> Iterator[tuple[int, bytes]]:
    import zstandard

    source = _Counted(stream, head)
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        cast(IO[bytes], source), read_across_frames=True
    )
    while True:
        try:
            out = reader.read(limits.piece_bytes)
        except zstandard.ZstdError as error:
            damage.reason = f"zstd data damaged ({error})"
            return
        if not out:
            return
        yield source.raw_bytes, out


class _Counted:
    """A stream with `head` put back in front, which counts what was read."""

    __slots__ = ("_head", "_stream", "raw_bytes")

    def __init__(self, stream: IO[bytes], head: bytes) -> None:
        self._head, self._stream, self.raw_bytes = head, stream, 0

    def read(self, size: int = -1) -> bytes:
        if self._head:
            part, self._head = self._head, b""
        else:
            part = self._stream.read(size)
        self.raw_bytes += len(part)
        return part
