"""Turns the raw files of a spool into the capture folder: compressed, named, in the manifest, and uploaded if asked.

Runs outside the job: in a thread of the launcher at low priority, or as `python -m scaletrace.collect.upload SETTINGS`
for a recording without a launcher. What a rank wrote is taken only when its member record, which it writes last, is
there; so a rank that was killed leaves nothing.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from scaletrace.collect.manifest import NAME, merge, read
from scaletrace.collect.settings import Settings

CHUNK = 1 << 20
ZSTD_LEVEL, GZIP_LEVEL = 3, 1


@dataclass(slots=True)
class Packed:
    """What was packed so far: ranks by window, and what went wrong."""

    ranks: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def spool_of(settings: Settings) -> Path:
    """Where the ranks of this recording leave their raw files."""
    return Path(settings.spool or os.path.join(settings.folder, ".spool"))


def pack(settings: Settings, packed: Packed) -> None:
    """Pack all ranks whose member record is in the spool now; problems become notes, and the raw file stays."""
    spool = spool_of(settings)
    for path in sorted(spool.rglob("member_rank*.json")):
        window = str(path.parent.relative_to(spool))
        target = Path(settings.folder) / ("" if window == "main" else window)
        try:
            record = _pack_rank(path, target, settings.compression)
            merge(target, [record], packed.notes)
            path.unlink()
        except (OSError, ValueError, KeyError) as error:
            packed.notes.append(f"{path.name}: not packed: {error!r}; the raw files stay in {path.parent}")
            path.replace(path.with_suffix(".failed"))
            continue
        packed.ranks.setdefault(str(target), []).append(record["rank"])
        if settings.upload:
            _upload(settings, target, record, packed)


def _pack_rank(path: Path, target: Path, compression: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_bytes())
    target.mkdir(parents=True, exist_ok=True)
    for kind, method in (("trace", compression), ("sidecar", "gzip")):
        name = record["files"].get(kind)
        if name:
            record["files"][kind] = compress(path.parent / name, target, method).name
    return record


def compress(source: Path, target: Path, method: str) -> Path:
    """`source` compressed into the folder `target`, under a temporary name until it is complete; the source goes.

    Raises OSError where the disk is full; nothing is left of the target then.
    """
    zstd = _zstd() if method in ("auto", "zstd") else None
    final = target / (source.name + (".zst" if zstd else ".gz"))
    part = target / f".{final.name}.{os.getpid()}.part"
    try:
        with source.open("rb") as raw, part.open("wb") as file:
            if zstd:
                zstd.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).copy_stream(raw, file)
            else:
                _gzip(raw, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, final)
    finally:
        part.unlink(missing_ok=True)
    source.unlink()
    return final


def _gzip(raw: BinaryIO, file: BinaryIO) -> None:
    with gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=file, mtime=0) as stream:
        shutil.copyfileobj(raw, stream, CHUNK)


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


def _upload(settings: Settings, target: Path, record: dict[str, Any], packed: Packed) -> None:
    """Copy one rank's files and the manifest to the URL; what fails stays local and is noted."""
    try:
        import fsspec
    except ImportError:
        packed.notes.append(f"not uploaded: fsspec is not installed; the capture is in {settings.folder}")
        return
    base = Path(settings.folder)
    names = [name for name in record["files"].values() if name] + [NAME]
    for name in names:
        url = "/".join((settings.upload.rstrip("/"), *(target / name).relative_to(base).parts))
        try:
            with (target / name).open("rb") as source, fsspec.open(url, "wb", auto_mkdir=True) as sink:
                shutil.copyfileobj(source, sink, CHUNK)
        except Exception as error:  # noqa: BLE001  (storage back ends raise whatever they like)
            packed.notes.append(f"{name}: not uploaded to {url}: {error!r}; it stays in {target}")


def finish(settings: Settings, packed: Packed, dead: Sequence[int] = ()) -> None:
    """After the job: pack what is left, take away temporary files of processes that are gone, write the last notes."""
    pack(settings, packed)
    spool = spool_of(settings)
    for path in leftovers(spool):
        path.unlink(missing_ok=True)
    for folder in {*packed.ranks, *([settings.folder] if read(Path(settings.folder)) else [])}:
        with suppress(OSError):
            merge(Path(folder), [], packed.notes)
    if not any(path.is_file() for path in spool.rglob("*")):
        shutil.rmtree(spool, ignore_errors=True)


def leftovers(spool: Path) -> Iterator[Path]:
    """Temporary files, and raw files without a member record: their writers were killed half way."""
    for path in sorted(spool.rglob("*")):
        if not path.is_file() or path.suffix == ".failed":
            continue
        stem = path.name.partition(".")[0].removeprefix("fr_")
        failed = any(path.parent.glob(f"member_{stem}*.failed"))
        if path.name.endswith(".part") or not failed:
            yield path


def deliver_detached(settings: Settings) -> None:
    """Pack in a process of its own that outlives this one and never holds it up."""
    command = [sys.executable, "-m", "scaletrace.collect.upload", settings.to_json()]
    environment = {key: value for key, value in os.environ.items() if key != "SCALETRACE_COLLECT"}
    root = str(Path(__file__).resolve().parent.parent)
    subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        cwd=root if os.path.isdir(root) else None,
    )


def main() -> None:
    """Pack the spool of the settings on the command line, once, at low priority."""
    with suppress(OSError):
        os.nice(10)
    settings = Settings.from_json(sys.argv[1])
    pack(settings, Packed())
    spool = spool_of(settings)
    with suppress(OSError):  # not empty: another window is on its way
        for folder in sorted(spool.rglob("*"), reverse=True):
            folder.rmdir()
        spool.rmdir()


if __name__ == "__main__":
    main()
