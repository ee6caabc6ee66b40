"""Turns the member records of a capture's ranks into its one `manifest.json`.

A capture is a folder:

    manifest.json                     this document
    rank00003_of00008.json.zst|.gz    Kineto trace of rank 3, as torch.profiler exported it
    fr_rank00003.json.gz              flight-recorder sidecar of rank 3
    collect.log                       what the collector had to say, if anything

Schema `scaletrace.capture/1` (times in ns, unix; what is not known is absent):

    schema, scaletrace_version, created_ns, window          name of the sub-folder, "" for the only window
    job       command, world_size, backend, boundary (what ended a step), fake_world (0 for a real job), attempt
    ranks     expected (a count), present, traced, light (sidecar only), missing: lists of ranks; asked: the option
    steps     first, last, count: ProfilerStep#N of the traces; partial: ranks that ended early
    settings  shapes, stacks, memory
    layout    meshes: [{axes, shape, device}]
    groups    [{name, description, backend, start, stride, size}] or `ranks` in place of start and stride
    model     parameters, parameters_local, tokens_per_step, samples_per_step, flops_per_step, flops_source
    versions  python, system, torch, cuda, nccl, …
    hosts     [{name, boot_id, cpu, cpus, memory_bytes, devices, nics, ranks}]; equal boot ids share one clock
    clocks    [{rank, when, offset_ns, low_ns, high_ns, rtt_ns, samples, at_ns}]: own clock minus that of rank 0's host,
              for the ranks of all other hosts; the truth lies in [low_ns, high_ns]
    members   [{rank, host, pid, local_rank, rank_source, attempt, trace, sidecar, first_step, last_step, partial,
                boundaries_ns, unwatched, start_cost_ns, export_ns, probe_rtt_ns {before, after}, notes}]
              boundaries_ns: ends of the recorded steps; unwatched: {count, mean_ns, median_ns, spread_ns} of the steps
              before the window, from boundary to boundary, that no profiler watched (at most the last 63, without
              step 0; spread_ns is the distance of the quartiles)
    notes     what the collector had to say, and the failures of packing
    records   the members' records as written, only while ranks are missing, so that a later launcher can add its own

Several launchers of one job may write to one folder, so merging adds to what is there, under a lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from scaletrace import __version__
from scaletrace.collect.window import write_json

SCHEMA = "scaletrace.capture/1"
NAME = "manifest.json"
LOCK_S = 10.0

_MEMBER = (
    "rank",
    "local_rank",
    "rank_source",
    "attempt",
    "pid",
    "first_step",
    "last_step",
    "partial",
    "boundaries_ns",
    "unwatched",
    "start_cost_ns",
    "export_ns",
    "notes",
)


@contextmanager
def locked(folder: Path, limit_s: float = LOCK_S) -> Iterator[bool]:
    """Hold the folder's lock; False where it can't be had in time (a file system without locks), and we go on without."""
    path = folder / ".manifest.lock"
    deadline = time.monotonic() + limit_s
    held = None
    while held is None and time.monotonic() < deadline:
        held = _try_lock(path)
        if held is None:
            time.sleep(0.02)
    try:
        yield held is not None
    finally:
        if held is not None:
            path.unlink(missing_ok=True)
            held.close()


def _try_lock(path: Path) -> IO[str] | None:
    """The locked file, None where somebody else has it, or where it was taken away while we waited."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
            return file
    except OSError:
        pass  # held by another, or gone
    file.close()
    return None


def merge(folder: Path, records: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Add the member records to the manifest of `folder`, and give back the whole.

    Each record is what `Window` wrote, with `files` naming the packed files. Raises OSError where the folder can't be
    written.
    """
    with locked(folder):
        old = read(folder)
        if old and not records:
            document = {**old, "notes": sorted({*old["notes"], *notes})}
        else:
            document = build([*old.get("records", []), *records], [*old.get("notes", []), *notes])
        write_json(folder / NAME, document)
    return document


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder` with its members turned back into records; {} where there is none that can be read."""
    try:
        document = json.loads((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) and document.get("schema") == SCHEMA else {}


def build(records: Sequence[dict[str, Any]], notes: Sequence[str]) -> dict[str, Any]:
    """The manifest of these member records; of two records of one rank the later wins."""
    by_rank = {record["rank"]: record for record in records}
    members = [by_rank[rank] for rank in sorted(by_rank)]
    first = members[0] if members else {}
    world = max((record["world_size"] for record in members), default=0)
    traced = [record["rank"] for record in members if record["files"].get("trace")]
    job = dict(first.get("job", {}))
    said = [*notes, *(line for record in members for line in (*record.get("notes", []), *record["job"].get("log", [])))]
    missing = [] if job.get("fake_world") else sorted(set(range(world)) - set(by_rank))
    document = {
        "schema": SCHEMA,
        "scaletrace_version": __version__,
        "created_ns": time.time_ns(),
        "window": first.get("window", ""),
        "job": {
            "command": job.get("command", []),
            "world_size": world,
            "backend": next((g["backend"] for record in members for g in record["groups"]), ""),
            "boundary": job.get("boundary", ""),
            "fake_world": job.get("fake_world", 0),
            "attempt": first.get("attempt", 0),
        },
        "ranks": {
            "expected": 1 if job.get("fake_world") else world,
            "present": sorted(by_rank),
            "traced": traced,
            "light": [record["rank"] for record in members if not record["files"].get("trace")],
            "missing": missing,
            "asked": job.get("ranks_asked", "all"),
        },
        "steps": _steps(members),
        "settings": job.get("settings", {}),
        "layout": {"meshes": max((record["meshes"] for record in members), key=len, default=[])},
        "groups": _groups(members),
        "model": max((record["job"].get("model", {}) for record in members), key=len, default={}),
        "versions": first.get("versions", {}),
        "hosts": _hosts(members),
        "clocks": _clocks(members),
        "members": [_member(record) for record in members],
        "notes": sorted(set(said)),
    }
    return {**document, "records": members} if missing else document


def _member(record: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: record[key] for key in _MEMBER if record.get(key) is not None},
        "host": record["host"].get("name", ""),
        "probe_rtt_ns": {when: probe["rtt_ns"] for when, probe in record["clock"].items() if probe},
        **{key: name for key, name in record["files"].items() if name},
    }


def _steps(members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    full = [record for record in members if not record["partial"]]
    if not members:
        return {}
    first = max(record["first_step"] for record in full or members)
    last = min(record["last_step"] for record in full or members)
    partial = [record["rank"] for record in members if record["partial"]]
    return {"first": first, "last": last, "count": max(0, last - first + 1), "partial": partial}


def _groups(members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each distinct group once; names are counters of one process, so members tell groups apart."""
    found: dict[str, dict[str, Any]] = {}
    for record in members:
        for group in record["groups"]:
            key = json.dumps({k: v for k, v in group.items() if k != "name"}, sort_keys=True)
            found.setdefault(key, group)
    return list(found.values())


def _hosts(members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for record in members:
        host = found.setdefault(json.dumps(record["host"], sort_keys=True), {**record["host"], "ranks": []})
        host["ranks"].append(record["rank"])
    return list(found.values())


def _clocks(members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each probe for all ranks of its host; those of rank 0's host need none."""
    of_host: dict[str, list[dict[str, Any]]] = {}
    for record in members:
        probes = [{"when": when, **probe} for when, probe in record["clock"].items() if probe]
        of_host.setdefault(_clock_of(record), []).extend(probes)
    reference = _clock_of(members[0]) if members and members[0]["rank"] == 0 else None
    return [
        {"rank": record["rank"], **probe}
        for record in members
        if _clock_of(record) != reference
        for probe in of_host[_clock_of(record)]
    ]


def _clock_of(record: dict[str, Any]) -> str:
    """What ranks with one clock have in common."""
    return str(record["host"].get("boot_id") or record["host"].get("name", ""))
