"""Invariants of matching and alignment: order, missing ranks, cut windows, skewed and drifting clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.parse.events import Arg, Events
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job, RankTrace
from scaletrace.parse.load import assemble, load
from scaletrace.parse.stragglers import straggler_summary

NCCL = (
    "traces/nanogpt8_h100",
    "traces/dlrm8_v100",
    "traces/megatron_tp2_v100",
    "traces/torchrec2_v100",
    "traces/torchrec4_v100-sst_long_a2a_optimizer_2-run1",
    "traces/torchrec4_v100-sst_long_a2a_optimizer_5-run1",
    "traces/torchrec4_v100-sst_long_a2a_optimizer_5_qcomm-run1",
)
GLOO = (
    "gloo/ddp_w2",
    "gloo/ddp_w4",
    "gloo/ddp_straggler_w2",
    "gloo/ddp_straggler_w4",
    "gloo/fsdp2_w2",
    "gloo/fsdp2_w4",
    "gloo/hsdp_w4",
    "gloo/tp_w4",
    "gloo/tp_dp_w4",
    "gloo/pp_1f1b_w2",
    "gloo/pp_1f1b_w4",
    "gloo/pp_gpipe_w2",
)
SKEWS_NS = (0, 5_000_000, -20_000_000, 123_000_000)

Member = tuple[int, int, int]


@cache
def loaded(folder: Path) -> Job:
    """Each job is read once; nothing changes it."""
    return load(folder)


def pairs(job: Job, rows: dict[int, np.ndarray[Any, Any]] | None = None) -> set[tuple[Member, Member]]:
    """All (member, member) of one instance, each as (rank, event, host event) in rows of the original trace."""
    c = job.collectives
    found: set[tuple[Member, Member]] = set()
    for instance in np.unique(c.instance).tolist():
        members: list[Member] = []
        for i in np.flatnonzero(c.instance == instance).tolist():
            rank, event, host = int(c.rank[i]), int(c.event[i]), int(c.host_event[i])
            if rows is not None:
                event, host = int(rows[rank][event]), int(rows[rank][host]) if host >= 0 else -1
            members.append((rank, event, host))
        found |= {(a, b) for a in members for b in members if a < b}
    return found


def subset(events: Events, keep: np.ndarray[Any, Any]) -> Events:
    """The events of the rows `keep` (ascending)."""
    place = np.full(len(events), -1, np.int64)
    place[keep] = np.arange(len(keep))
    args: dict[str, Arg] = {}
    for key in events.args:
        arg = events.args[key]
        stay = place[arg.rows] >= 0
        args[key] = replace(arg, rows=place[arg.rows][stay].astype(np.int32), values=arg.values[stay])
    names = ("ph", "cat", "name", "lane", "ts_ns", "dur_ns", "correlation", "external_id", "stream", "device")
    return replace(events, args=args, **{name: getattr(events, name)[keep] for name in names})


def cut(job: Job, counts: Sequence[int]) -> tuple[list[RankTrace], dict[int, np.ndarray[Any, Any]]]:
    """The traces without the first `counts[k]` collectives (their spans and host records) of the k-th rank."""
    traces, rows = [], {}
    c = job.collectives
    for trace, count in zip(job.ranks, counts, strict=True):
        mine = np.flatnonzero(c.rank == trace.rank)
        first = mine[np.argsort(trace.events.ts_ns[c.event[mine]], kind="stable")][:count]
        gone = np.concatenate([c.event[first], c.host_event[first][c.host_event[first] >= 0]])
        keep = np.setdiff1d(np.arange(len(trace.events)), gone)
        traces.append(replace(trace, events=subset(trace.events, keep), health=Health()))
        rows[trace.rank] = keep
    return traces, rows


def skewed(trace: RankTrace, skew_ns: int, ppm: float) -> RankTrace:
    """The trace as a host whose clock is off by `skew_ns` and drifts by `ppm` from its first event would have written it."""
    events = trace.events
    origin = int(events.ts_ns[events.ts_ns > 0].min())

    def moved(time: Any) -> Any:
        return time + skew_ns + np.rint((time - origin) * ppm / 1e6).astype(np.int64)

    steps = tuple(
        replace(s, start_ns=int(moved(np.int64(s.start_ns))), end_ns=int(moved(np.int64(s.end_ns))))
        for s in trace.steps
    )
    sidecar = trace.sidecar
    if sidecar is not None:
        entries = [{**e, "time_created_ns": int(moved(np.int64(e["time_created_ns"])))} for e in sidecar["entries"]]
        sidecar = {**sidecar, "entries": entries}
    start, end = moved(events.ts_ns), moved(events.end_ns)
    moved_events = replace(events, ts_ns=start, dur_ns=end - start)
    return replace(trace, host=f"host{trace.rank}", events=moved_events, steps=steps, sidecar=sidecar)


def again(job: Job, traces: Sequence[RankTrace]) -> Job:
    """The job put together anew from changed traces."""
    return assemble(traces, Health(), manifest=job.manifest)


@pytest.mark.parametrize("name", ["traces/nanogpt8_h100", "gloo/hsdp_w4"])
def test_the_order_of_files_changes_nothing(shared_data: Path, name: str) -> None:
    """A job loaded from its files in reverse order has the same pairs and clocks."""
    folder = shared_data / name
    forward = load(folder)
    backward = load(sorted(folder.rglob("*.json.gz"), reverse=True))

    assert pairs(forward) == pairs(backward)
    assert forward.clocks == backward.clocks


@pytest.mark.parametrize("name", [*NCCL, *GLOO])
def test_a_missing_rank_changes_no_pair_of_the_others(shared_data: Path, name: str) -> None:
    """Without any one rank, the pairs of the others are those of the whole job."""
    job = loaded(shared_data / name)
    whole = pairs(job)
    for gone in [trace.rank for trace in job.ranks][:: max(1, len(job.ranks) // 4)]:
        left = again(job, [trace for trace in job.ranks if trace.rank != gone])

        assert {p for p in whole if gone not in (p[0][0], p[1][0])} == pairs(left)


@pytest.mark.parametrize("name", [*NCCL, *GLOO])
@pytest.mark.parametrize("seed", [0, 1])
def test_cut_windows_change_only_the_counts(shared_data: Path, name: str, seed: int) -> None:
    """After cutting other numbers of leading collectives from each rank, every pair left is one of the whole job."""
    job = loaded(shared_data / name)
    counts = np.random.default_rng(seed).integers(0, 4, len(job.ranks)).tolist()
    traces, rows = cut(job, counts)
    whole = pairs(job)
    here = {(rank, int(row)) for rank, kept in rows.items() for row in kept}
    expected = {p for p in whole if all((m[0], m[1]) in here for m in p)}
    found = pairs(again(job, traces), rows)

    assert {tuple(m[:2] for m in p) for p in expected} == {tuple(m[:2] for m in p) for p in found}


@pytest.mark.parametrize("name", [*NCCL, *GLOO])
@pytest.mark.parametrize("ppm", [0.0, 50.0])
def test_skew_and_drift_stay_inside_the_interval(shared_data: Path, name: str, ppm: float) -> None:
    """Skews of 5, -20 and 123 ms and a drift of 50 ppm lie in each interval, and no pair and no verdict changes.

    Ranks with clocks of their own are on hosts of their own, here too.
    """
    job = loaded(shared_data / name)
    skews = [SKEWS_NS[k % 4] for k in range(len(job.ranks))]
    drifts = [ppm if k % 2 else 0.0 for k in range(len(job.ranks))]
    moved = again(job, [skewed(t, s, d) for t, s, d in zip(job.ranks, skews, drifts, strict=True)])
    apart = again(job, [skewed(trace, 0, 0.0) for trace in job.ranks])
    verdicts = {share.rank: share.cause for share in straggler_summary(apart)}

    for trace, skew, drift in zip(job.ranks, skews, drifts, strict=True):
        before, after = job.clocks[trace.rank], moved.clocks[trace.rank]
        gained = (int(trace.events.end_ns.max()) - int(trace.events.ts_ns[trace.events.ts_ns > 0].min())) * drift / 1e6
        # these files were not written by perfect clocks: what they say themselves is the truth without the skew
        truth = before.offset_ns if before.source == "ends of kernels" else 0
        assert after.low_ns <= skew + truth
        assert skew + truth + gained <= after.high_ns
    assert pairs(job) == pairs(moved)
    assert verdicts == {share.rank: share.cause for share in straggler_summary(moved)}


def test_gloo_works_without_sidecars(shared_data: Path) -> None:
    """Without flight-recorder dumps the pairs are the same, and that groups and turns were inferred is counted."""
    for name in GLOO:
        job = loaded(shared_data / name)
        bare = again(job, [replace(trace, sidecar=None) for trace in job.ranks])

        assert pairs(job) == pairs(bare), name
        if len({int(g) for g in job.collectives.group}) > 1:
            assert bare.health.guessed["gloo collectives whose group was inferred"] > 0, name


@pytest.mark.parametrize("name", ["gloo/ddp_w4", "gloo/hsdp_w4", "gloo/tp_dp_w4"])
def test_one_missing_sidecar_changes_no_pair(shared_data: Path, name: str) -> None:
    """A rank without its flight-recorder dump is matched by order with the others, which have theirs."""
    job = loaded(shared_data / name)
    traces = [replace(trace, sidecar=None) if trace.rank == 1 else trace for trace in job.ranks]

    assert pairs(job) == pairs(again(job, traces))
