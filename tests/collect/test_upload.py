"""Raw files of ranks are packed only when they are complete, and what can't be packed is kept and said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from scaletrace.collect.settings import Settings
from scaletrace.collect.upload import Packed, compress, finish, pack
from tests.collect.test_manifest import record

TRACE = b'{"traceEvents": []}'


def spool(tmp_path: Path, *ranks: int) -> Settings:
    raw = tmp_path / "spool" / "main"
    raw.mkdir(parents=True)
    for rank in ranks:
        files = {"trace": f"rank{rank:05d}_of00004.json", "sidecar": f"fr_rank{rank:05d}.json"}
        (raw / files["trace"]).write_bytes(TRACE)
        (raw / files["sidecar"]).write_bytes(b"{}")
        (raw / f"member_rank{rank:05d}_of00004.json").write_text(json.dumps(record(rank, files=files)))
    return Settings(folder=str(tmp_path / "capture"), spool=str(tmp_path / "spool"))


def test_a_reported_rank_is_packed(tmp_path: Path) -> None:
    """Trace and sidecar are compressed under their names, the manifest lists them, and the spool is empty."""
    settings, packed = spool(tmp_path, 2), Packed()
    pack(settings, packed)
    finish(settings, packed)
    names = ["fr_rank00002.json.gz", "manifest.json", "rank00002_of00004.json.zst"]
    assert names == sorted(path.name for path in (tmp_path / "capture").iterdir())
    assert TRACE == zstandard.ZstdDecompressor().decompress((tmp_path / "capture" / names[2]).read_bytes(), 100)
    assert not (tmp_path / "spool").exists()


def test_a_rank_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    """A raw file without a member record, or a temporary one, is half of something: it goes."""
    settings, packed = spool(tmp_path), Packed()
    (tmp_path / "spool" / "main" / "rank00001_of00004.json").write_bytes(TRACE)
    (tmp_path / "spool" / "main" / ".rank00002_of00004.json.17.part").write_bytes(TRACE[:5])
    finish(settings, packed)
    assert not (tmp_path / "spool").exists()
    assert not (tmp_path / "capture").exists()


def test_what_cannot_be_packed_stays(tmp_path: Path) -> None:
    """Where the target folder can't be made, the raw files stay and a note says where they are."""
    settings, packed = spool(tmp_path, 0), Packed()
    (tmp_path / "capture").write_text("in the way")
    finish(settings, packed)
    assert (tmp_path / "spool" / "main" / "rank00000_of00004.json").read_bytes() == TRACE
    assert any("not packed" in note and str(tmp_path / "spool") in note for note in packed.notes)


def test_the_capture_is_copied_to_a_url(tmp_path: Path) -> None:
    """Every file of the rank and the manifest arrive at the target; the local capture stays."""
    settings, packed = spool(tmp_path, 0), Packed()
    target = tmp_path / "far" / "run"
    settings = Settings(folder=settings.folder, spool=settings.spool, upload=target.as_uri())
    pack(settings, packed)
    local = {path.name: path.read_bytes() for path in (tmp_path / "capture").iterdir()}
    assert [] == packed.notes
    assert local == {path.name: path.read_bytes() for path in target.iterdir()}


@pytest.mark.parametrize(("method", "suffix"), [("gzip", ".gz"), ("zstd", ".zst")])
def test_compression(tmp_path: Path, method: str, suffix: str) -> None:
    """Both methods give back the bytes, the same file each time, and take the raw one away."""
    source = tmp_path / "rank00000_of00001.json"
    source.write_bytes(TRACE * 1000)
    packed = compress(source, tmp_path, method)
    assert [f"rank00000_of00001.json{suffix}"] == [path.name for path in tmp_path.iterdir()]
    unpack = gzip.decompress if method == "gzip" else zstandard.ZstdDecompressor().decompressobj().decompress
    assert TRACE * 1000 == unpack(packed.read_bytes())
