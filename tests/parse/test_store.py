"""A job saved as Arrow files comes back equal, mapped instead of read."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.errors import InputError, UsageError
from scaletrace.parse.events import Events
from scaletrace.parse.health import Health
from scaletrace.parse.job import Clock, Collectives, Group, Job, RankTrace, Step
from scaletrace.parse.reader import read_file
from scaletrace.parse.store import is_saved, load_job, save_job


def events(count: int = 5) -> Events:
    """A table with texts, integers, reals, 64-bit ids and flows."""
    rows: list[dict[str, Any]] = [
        {"ph": "X", "cat": "kernel", "name": f"k é {n % 3}", "pid": 0, "tid": f"s{n}", "ts": n, "dur": 2,
         "args": {"stream": 7, "Comms Id": 2**64 - 1, "dtype": "Float", "blocks per SM": 0.5, "cbid": n}}
        for n in range(count)
    ]  # fmt: skip
    rows.append({"ph": "s", "id": 3, "pid": 0, "tid": "s0", "ts": 1, "cat": "ac2g", "name": "ac2g"})
    return read_file(io.BytesIO(json.dumps({"traceEvents": rows if count else []}).encode())).events


def collectives(count: int) -> Collectives:
    """`count` members with distinct numbers in each column."""
    types = {"rank": np.int32, "event": np.int32, "host_event": np.int32, "group": np.int32, "kind": np.uint8}
    columns: dict[str, Any] = {
        item.name: np.arange(count, dtype=types.get(item.name, np.int64)) + k
        for k, item in enumerate(fields(Collectives))
        if item.name not in ("rung", "unmatched")
    }
    columns["matched"] = np.arange(count) % 2 == 0
    return Collectives(**columns, rung="metadata", unmatched=2)


def job(count: int = 5) -> Job:
    """A job of two ranks that uses every field."""
    health = Health(notes=["a note"])
    health.repaired["names"] += 2
    rank = RankTrace(
        rank=0,
        world_size=2,
        events=events(count),
        source="rank0.json",
        header={"distributedInfo": {"rank": 0, "pg_config": [{"ranks": [0, 1]}]}, "big": 2**70},
        steps=(Step(1, 5, 9), Step(2, 9, 12, complete=False)),
        sidecar={"entries": []},
        health=health,
    )
    return Job(
        ranks=(rank, replace(rank, rank=1, sidecar=None)),
        world_size=2,
        groups=(Group(0, "0", "default_pg", (0, 1), "dp", 0.5),),
        collectives=collectives(count),
        clocks={0: Clock(0, 0, 0), 1: Clock(5, 3, 7, 0.25, "matched")},
        health=health,
        source="folder",
        manifest={"world_size": 2, "nested": {"list": [1, 2]}},
    )


def plain(value: Any) -> Any:
    """A dataclass as nested lists and dicts, with the type of every array."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return value


@pytest.mark.parametrize("count", [0, 5])
def test_a_saved_job_comes_back_equal(tmp_path: Path, count: int) -> None:
    """Every field, type and text; empty tables too. Saving again overwrites."""
    saved = job(count)
    save_job(saved, tmp_path / "job")
    save_job(saved, tmp_path / "job")
    loaded = load_job(tmp_path / "job")

    assert plain(saved) == plain(loaded)


def test_columns_are_views_of_the_files(tmp_path: Path) -> None:
    """Nothing is copied: the arrays are read-only maps."""
    loaded = load_job(save_job(job(), tmp_path / "job"))

    columns = (loaded.ranks[0].events.ts_ns, loaded.ranks[0].events.name, loaded.collectives.start_ns)
    assert [False] * 3 == [column.flags.writeable for column in columns]
    assert [False] * 3 == [column.flags.owndata for column in columns]


def test_event_files_can_be_read_by_pandas(tmp_path: Path) -> None:
    """One row an event, names as categories."""
    from pyarrow import feather

    save_job(job(), tmp_path / "job")
    frame = feather.read_feather(tmp_path / "job" / "rank_00000" / "events.arrow")

    assert (5, "k é 0", 1000) == (len(frame), frame["name"][0], frame["ts_ns"][1])


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    """A trace folder is never written into by accident."""
    (tmp_path / "rank0.json").write_text("{}")
    with pytest.raises(UsageError, match="is no saved job"):
        save_job(job(), tmp_path)
    assert not is_saved(tmp_path)


@pytest.mark.parametrize("fault", ["missing", "version", "cut", "not json", "no column"])
def test_damage_is_an_input_error(tmp_path: Path, fault: str) -> None:
    """Whatever is missing or cut, the message says what to do."""
    root = save_job(job(), tmp_path / "job")
    text = (root / "job.json").read_text()
    if fault == "missing":
        (root / "rank_00001" / "events.arrow").unlink()
    elif fault == "version":
        (root / "job.json").write_text(text.replace("scaletrace/job/1", "scaletrace/job/99"))
    elif fault == "cut":
        path = root / "rank_00000" / "events.arrow"
        path.write_bytes(path.read_bytes()[:200])
    elif fault == "not json":
        (root / "job.json").write_text(text[: len(text) // 2])
    else:
        (root / "collectives.arrow").write_bytes((root / "rank_00000" / "flows.arrow").read_bytes())
    with pytest.raises(InputError, match="load the traces again"):
        load_job(root)
