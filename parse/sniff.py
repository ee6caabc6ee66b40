"""Turns the first bytes of a file into a verdict: a Kineto trace, or what else it is and why it is not read."""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Look:
    """What a file is. `kind` is one word, `reason` a sentence, `readable` whether the trace reader takes it."""

    kind: str
    reason: str
    readable: bool = False


_BINARY = (
    (b"PK\x03\x04", "zip", "a zip archive; unpack it"),
    (b"BZh", "bzip2", "bzip2 data; decompress it or use gzip or zstd"),
    (b"\xfd7zXZ", "xz", "xz data; decompress it or use gzip or zstd"),
    (b"\x89HDF", "hdf5", "an HDF5 file, not a trace"),
    (b"SQLite format 3", "sqlite", "an SQLite database (Nsight Systems export?); only Kineto JSON is read"),
    (b"\x1f\x8b", "gzip", "gzip data inside gzip data; decompress it once"),
)
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')


def describe(head: bytes) -> Look:
    """The verdict on decompressed `head`, the first few kilobytes of a file."""
    for magic, kind, reason in _BINARY:
        if head.startswith(magic):
            return Look(kind, reason)
    if head[257:262] == b"ustar":
        return Look("tar", "a tar archive; unpack it and give the folder")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        return Look("empty", "an empty file")
    if text.startswith(b"version https://git-lfs"):
        return Look("lfs", "a Git LFS pointer, not the file itself; run `git lfs pull`")
    if head[:1] == b"\x0a" and b"\0" in head[:256]:
        return Look("pftrace", "a Perfetto protobuf trace (.pftrace), which is not read yet; export Kineto JSON")
    if text[:1] not in (b"{", b"["):
        return Look("other", f"not JSON (starts with {text[:12]!r})")
    return _describe_json(text)


def _describe_json(text: bytes) -> Look:
    keys = [match.group(1) for match in _KEY.finditer(text)]
    top = set(keys)
    if b"traceEvents" in top or b"deviceProperties" in top or b"baseTimeNanoseconds" in top:
        return Look("kineto", "a Kineto trace", True)
    if b"schema" in top and (b"nodes" in top or b"chakra" in text[:400]):
        return Look("execution trace", "an execution trace (PyTorch/Chakra ET), not a Kineto trace; it is no rank")
    if b"entries" in top and top & {b"pg_config", b"pg_status", b"version", b"nccl_version"}:
        return Look("flight recorder", "a flight-recorder dump; it goes beside the rank's trace as a sidecar")
    if text[:1] == b"[" or b"schemaVersion" in top:
        return Look("kineto", "a list of events" if text[:1] == b"[" else "a Kineto trace", True)
    if keys and keys[0] in (b"ph", b"name", b"cat", b"ts", b"pid") and re.search(rb"\}\s*\n\s*\{", text):
        return Look("json lines", "JSON lines (one event a line), not a Kineto trace; give the profiler's own file")
    return Look("json", "JSON whose kind shows only further in", True)
