"""Turns a Job into a folder of Arrow files and back; loading maps the files, so that the second look is instant.

job.json                 schema, scalars, groups, clocks, health, and per rank its header, steps and health
collectives.arrow        one row per member
job_arrays.arrow         other arrays of the job, one list a column
rank_00000/events.arrow  one row per event, names and categories dictionary-encoded: pandas and polars read it too
rank_00000/args.arrow    each argument as two lists, its rows and its values
rank_00000/flows.arrow   one row per flow arrow
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from scaletrace.errors import InputError, UsageError
from scaletrace.parse.events import Arg, CodeArray, Events, Flows, Lane
from scaletrace.parse.health import Health
from scaletrace.parse.job import Clock, Collectives, Group, Job, RankTrace, Step

SCHEMA = "scaletrace/job/1"

_NUMBERS = ("ph", "lane", "ts_ns", "dur_ns", "correlation", "external_id", "stream", "device")
_OWN = {"ranks", "groups", "collectives", "clocks", "health"}
_KINDS = ("repaired", "clipped", "dropped", "guessed", "unmatched")


def is_saved(folder: str | Path) -> bool:
    """Whether `folder` was written by `save_job`."""
    try:
        head = (Path(folder) / "job.json").read_bytes()[:200]
    except OSError:
        return False
    return b'"scaletrace/job/' in head


def save_job(job: Job, folder: str | Path) -> Path:
    """Write `job` to `folder`, which is made if needed. Raises UsageError where something else lies in it already."""
    root = Path(folder)
    if root.exists() and not is_saved(root) and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(f"{root}: exists and is no saved job; name a new or empty folder")
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "job.json").unlink(missing_ok=True)  # until the end the folder is no saved job
        for rank in job.ranks:
            save_events(rank.events, root / f"rank_{rank.rank:05d}")
        arrays = _arrays(job.collectives)
        _write(pa.table({name: pa.array(_plain(array)) for name, array in arrays.items()}), root / "collectives.arrow")
        others = {name: value for name, value in _fields(job).items() if isinstance(value, np.ndarray)}
        _write(pa.table({name: _as_list(array) for name, array in others.items()}), root / "job_arrays.arrow")
        text = json.dumps(_job_json(job), default=_jsonable)
        (root / "job.json").write_text(text)
    except OSError as error:
        raise InputError(f"{root}: {error.strerror or error}; name a folder that can be written") from error
    return root


def load_job(folder: str | Path) -> Job:
    """The job that `save_job` wrote to `folder`. Arrays are read-only views of the mapped files.

    Raises InputError where the folder holds no saved job, or one of another version, or files are missing or damaged.
    """
    root = Path(folder)
    try:
        document = json.loads((root / "job.json").read_text())
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise InputError(f"{root}: not a job of schema {SCHEMA}; load the traces again and save them")
        return _job(document, root)
    except (OSError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException) as error:
        raise InputError(f"{root}: no readable saved job ({error}); load the traces again and save them") from error


def _fields(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in fields(value)}


def _arrays(value: Any) -> dict[str, npt.NDArray[Any]]:
    return {name: item for name, item in _fields(value).items() if isinstance(item, np.ndarray)}


def _plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Booleans as bytes, since Arrow packs them into bits, which can't be mapped."""
    return np.ascontiguousarray(array.view(np.uint8) if array.dtype == np.bool_ else array)


def _as_list(array: npt.NDArray[Any]) -> pa.Array:
    values = pa.array(_plain(array))
    return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} can't be saved")


# -- writing ---------------------------------------------------------------------------------------------------------


def _write(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    part.replace(path)


def save_events(events: Events, folder: Path) -> None:
    """Write one table to three Arrow files in `folder`."""
    columns = {name: pa.array(_plain(getattr(events, name))) for name in _NUMBERS}
    columns["cat"] = _dictionary(events.cat, events.cats)
    columns["name"] = _dictionary(events.name, events.strings)
    lanes = [[lane.pid, lane.tid, lane.name, lane.process] for lane in events.lanes]
    table = pa.table(columns).replace_schema_metadata({"lanes": json.dumps(lanes)})
    _write(table, folder / "events.arrow")
    args = {
        f"{part}:{key}": _as_list(getattr(arg, part)) for key, arg in events.args.items() for part in ("rows", "values")
    }
    text_keys = [key for key, arg in events.args.items() if arg.is_text]
    _write(pa.table(args).replace_schema_metadata({"texts": json.dumps(text_keys)}), folder / "args.arrow")
    flows = pa.table({name: pa.array(_plain(getattr(events.flows, name))) for name in Flows.__slots__})
    _write(flows, folder / "flows.arrow")


def _dictionary(codes: CodeArray, texts: tuple[str, ...]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(texts, pa.large_string()))


def _job_json(job: Job) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "job": {
            name: value
            for name, value in _fields(job).items()
            if name not in _OWN and not isinstance(value, np.ndarray)
        },
        "groups": [_fields(group) for group in job.groups],
        "clocks": [[rank, _fields(clock)] for rank, clock in job.clocks.items()],
        "health": job.health.to_json(),
        "collectives": {
            name: value for name, value in _fields(job.collectives).items() if not isinstance(value, np.ndarray)
        },
        "bools": {
            "collectives": [name for name, array in _arrays(job.collectives).items() if array.dtype == np.bool_],
            "job": [name for name, array in _arrays(job).items() if array.dtype == np.bool_],
        },
        "ranks": [_rank_json(rank) for rank in job.ranks],
    }


def _rank_json(rank: RankTrace) -> dict[str, Any]:
    kept = {name: value for name, value in _fields(rank).items() if name not in ("events", "steps", "health")}
    return {**kept, "steps": [_fields(step) for step in rank.steps], "health": rank.health.to_json()}


# -- reading ---------------------------------------------------------------------------------------------------------


def _map(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """A column as a view of the file."""
    column = table.column(name)
    if column.num_chunks == 0:
        return np.zeros(0, column.type.to_pandas_dtype())
    if column.num_chunks > 1:
        raise ValueError(f"column {name} is in pieces")
    return np.asarray(column.chunk(0).to_numpy(zero_copy_only=True))


def _list(table: pa.Table, name: str) -> npt.NDArray[Any]:
    return np.asarray(table.column(name).chunk(0).values.to_numpy(zero_copy_only=True))


def _job(document: dict[str, Any], root: Path) -> Job:
    members = _map(root / "collectives.arrow")
    bools = document["bools"]
    columns: dict[str, Any] = {name: _column(members, name) for name in members.column_names}
    columns = {name: array.view(np.bool_) if name in bools["collectives"] else array for name, array in columns.items()}
    arrays = _map(root / "job_arrays.arrow")
    others: dict[str, Any] = {name: _list(arrays, name) for name in arrays.column_names}
    others = {name: array.view(np.bool_) if name in bools["job"] else array for name, array in others.items()}
    scalars = {name: _tuples(value) for name, value in document["job"].items()}
    return Job(
        ranks=tuple(_rank(rank, root) for rank in document["ranks"]),
        groups=tuple(Group(**{**group, "members": tuple(group["members"])}) for group in document["groups"]),
        collectives=Collectives(**columns, **document["collectives"]),
        clocks={int(rank): Clock(**clock) for rank, clock in document["clocks"]},
        health=_health(document["health"]),
        **others,
        **scalars,
    )


def _tuples(value: Any) -> Any:
    """Lists directly in a value or in its mapping become tuples again."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict):
        return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
    return value


def _health(document: dict[str, Any]) -> Health:
    return Health(**{kind: Counter(document[kind]) for kind in _KINDS}, notes=list(document["notes"]))


def _rank(document: dict[str, Any], root: Path) -> RankTrace:
    return RankTrace(
        **{
            **document,
            "events": map_events(root / f"rank_{document['rank']:05d}"),
            "steps": tuple(Step(**step) for step in document["steps"]),
            "health": _health(document["health"]),
        }
    )


def map_events(folder: Path) -> Events:
    """The table that `save_events` wrote, as views of its files."""
    table, args, flows = (_map(folder / f"{name}.arrow") for name in ("events", "args", "flows"))
    texts = set(json.loads(args.schema.metadata[b"texts"]))
    keys = [name.removeprefix("rows:") for name in args.column_names if name.startswith("rows:")]
    cat, cats = _encoded(table, "cat")
    name, strings = _encoded(table, "name")
    flow = {key: _column(flows, key) for key in flows.column_names}
    flow["is_start"] = flow["is_start"].view(np.bool_)
    return Events(
        **{key: _column(table, key) for key in _NUMBERS},
        cat=cat,
        name=name,
        strings=strings,
        cats=cats,
        lanes=tuple(Lane(*lane) for lane in json.loads(table.schema.metadata[b"lanes"])),
        args={key: Arg(_list(args, f"rows:{key}"), _list(args, f"values:{key}"), key in texts) for key in keys},
        flows=Flows(**flow),
    )


def _encoded(table: pa.Table, name: str) -> tuple[CodeArray, tuple[str, ...]]:
    if table.column(name).num_chunks == 0:
        return np.zeros(0, np.int32), ()
    chunk = table.column(name).chunk(0)
    return np.asarray(chunk.indices.to_numpy(zero_copy_only=True)), tuple(chunk.dictionary.to_pylist())
