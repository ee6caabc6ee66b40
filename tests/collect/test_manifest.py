"""Member records of ranks become one manifest, whoever comes first."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from scaletrace.collect.facts import regular
from scaletrace.collect.manifest import build, merge


def record(rank: int, world: int = 4, **changes: Any) -> dict[str, Any]:
    host = f"node{rank // 2}"
    probe = (
        {"offset_ns": 5, "low_ns": 0, "high_ns": 10, "rtt_ns": 10, "samples": 3, "at_ns": 1} if rank % 2 == 0 else None
    )
    return {
        "window": "",
        "files": {"trace": f"rank{rank:05d}_of00004.json.zst", "sidecar": f"fr_rank{rank:05d}.json.gz"},
        "rank": rank,
        "world_size": world,
        "attempt": 0,
        "first_step": 5,
        "last_step": 7,
        "partial": False,
        "clock": {"before": probe, "after": None},
        "versions": {"torch": "2.13.0"},
        "host": {"name": host, "boot_id": host},
        "groups": [{"name": "0", "description": "default_pg", "backend": "gloo", "start": 0, "stride": 1, "size": 4}],
        "meshes": [],
        "notes": [],
        "job": {"command": ["train"], "boundary": "optimizer.step", "fake_world": 0, "log": []},
        **changes,
    }


def test_ranks_that_never_reported_are_missing() -> None:
    """Expected is what the ranks say the world is; the others are listed as missing, not left out."""
    ranks = build([record(3), record(0)], [])["ranks"]
    expected = {"expected": 4, "present": [0, 3], "traced": [0, 3], "light": [], "missing": [1, 2], "asked": "all"}
    assert expected == ranks


def test_a_light_rank_is_present_but_not_traced() -> None:
    """A rank with a sidecar only is light."""
    light = record(1, files={"trace": "", "sidecar": "fr_rank00001.json.gz"})
    expected = ([0], [1])
    ranks = build([record(0), light], [])["ranks"]
    assert expected == (ranks["traced"], ranks["light"])


def test_steps_are_those_that_all_have() -> None:
    """The window is what the complete ranks have in common; ranks that ended early are named."""
    early = record(1, last_step=5, partial=True)
    expected = {"first": 5, "last": 7, "count": 3, "partial": [1]}
    assert expected == build([record(0), early], [])["steps"]


def test_a_probe_counts_for_all_ranks_of_its_host() -> None:
    """Rank 2 probed for its host, so rank 3 has the same bounds; rank 0's host is the reference and has none."""
    clocks = build([record(rank) for rank in range(4)], [])["clocks"]
    expected = [(2, 0, 10), (3, 0, 10)]
    assert expected == [(probe["rank"], probe["low_ns"], probe["high_ns"]) for probe in clocks]


def test_two_launchers_fill_one_manifest(tmp_path: Path) -> None:
    """What the second launcher adds is added, and the records that only merging needs go when all are there."""
    merge(tmp_path, [record(0), record(1)], ["slow disk"])
    half = json.loads((tmp_path / "manifest.json").read_bytes())
    merge(tmp_path, [record(2), record(3)])
    whole = json.loads((tmp_path / "manifest.json").read_bytes())
    assert ([2, 3], [0, 1, 2, 3]) == (half["ranks"]["missing"], whole["ranks"]["present"])
    assert (True, False) == ("records" in half, "records" in whole)
    assert ["slow disk"] == whole["notes"]
    assert ["manifest.json"] == [path.name for path in tmp_path.iterdir()]


def test_many_writers_lose_nobody(tmp_path: Path) -> None:
    """Eight ranks that merge at the same moment, from processes of their own, all end up in the manifest."""
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(merge, tmp_path), [[record(rank, world=8)] for rank in range(8)]))
    expected = list(range(8))
    assert expected == json.loads((tmp_path / "manifest.json").read_bytes())["ranks"]["present"]


def test_notes_added_later_keep_the_rest(tmp_path: Path) -> None:
    """Adding a note to a complete manifest changes nothing else."""
    before = merge(tmp_path, [record(rank) for rank in range(4)])
    after = merge(tmp_path, [], ["not uploaded"])
    assert {**before, "notes": ["not uploaded"]} == after


def test_members_of_a_group() -> None:
    """Even spacing is written as start, stride and size, anything else as a list."""
    assert {"start": 1, "stride": 4, "size": 3} == regular([1, 5, 9])
    assert {"start": 7, "stride": 0, "size": 1} == regular([7])
    assert {"size": 3, "ranks": [0, 1, 5]} == regular([0, 1, 5])
