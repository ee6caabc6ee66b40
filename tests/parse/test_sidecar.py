"""Flight-recorder dumps: whose they are, where they lie, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from scaletrace.parse.load import load
from tests.parse.jobs import host, write

DUMP = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}


@pytest.mark.parametrize("place", ["fr_rank1.json", "fr_rank00001.json.gz", "fr/rank1.json", "fr/rank_1.json.gz"])
def test_dumps_are_found_beside_the_traces(tmp_path: Path, place: str) -> None:
    """In the folder or in its fr folder, plain or compressed."""
    write(tmp_path, {r: [host("aten::mm", 1, 1)] for r in (0, 1)})
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(DUMP).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    job = load(tmp_path)

    assert [None, DUMP] == [trace.sidecar for trace in job.ranks]


def test_the_rank_in_a_dump_beats_its_name(tmp_path: Path) -> None:
    """The collector writes the rank into the dump."""
    write(tmp_path, {r: [host("aten::mm", 1, 1)] for r in (0, 1)})
    (tmp_path / "dump7.json").write_text(json.dumps({"rank": 0, **DUMP}))

    assert [True, False] == [trace.sidecar is not None for trace in load(tmp_path).ranks]


def test_a_broken_dump_is_counted_not_fatal(tmp_path: Path) -> None:
    """The job loads without it."""
    write(tmp_path, {0: [host("aten::mm", 1, 1)]})
    (tmp_path / "fr_rank0.json").write_text('{"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": [')
    job = load(tmp_path)

    assert job.ranks[0].sidecar is None
    assert job.health.dropped["flight-recorder dumps that can't be read"] == 1
