"""Turns a folder of traces, one per rank, into a Job: groups, matched collectives, aligned clocks, waits and health."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from scaletrace.errors import InputError
from scaletrace.parse import clocks as clock_tools
from scaletrace.parse.collectives import Table, join, match, members_of, uses
from scaletrace.parse.completeness import check_completeness
from scaletrace.parse.events import TIME_UNKNOWN
from scaletrace.parse.fetch import local
from scaletrace.parse.finish import finish
from scaletrace.parse.fused import split_ranks
from scaletrace.parse.groups import Said, build_groups, name_axes, override_axes, said_by
from scaletrace.parse.health import Health
from scaletrace.parse.job import SYNCHRONISING, Job, RankTrace
from scaletrace.parse.kernels import Rules, load_rules
from scaletrace.parse.limits import DEFAULT, MOST_RANKS, Limits
from scaletrace.parse.literals import compiled
from scaletrace.parse.manifest import bounds_in, expected_ranks, groups_in, hosts_in
from scaletrace.parse.many import read_many
from scaletrace.parse.match_pairs import one_way, pair_messages
from scaletrace.parse.members import KIND
from scaletrace.parse.one_job import refuse_several_jobs
from scaletrace.parse.peek import Found, rank_value
from scaletrace.parse.ranks import SEVERAL_HEADERS, Capture, choose, discover, rank_in_events
from scaletrace.parse.reader import TraceFile
from scaletrace.parse.sidecar import sidecars_by_rank
from scaletrace.parse.steps import find_steps
from scaletrace.parse.store import is_saved, load_job


def load(
    source: str | Path | Sequence[str | Path],
    *,
    strict: bool = False,
    workers: int | None = None,
    rank_regex: str | None = None,
    axes: Path | None = None,
    capture: str | None = None,
    step_annotation: str | None = None,
    patterns: Sequence[str] = (),
    memory_bytes: int | None = None,
    spool: str | Path | None = None,
    limits: Limits = DEFAULT,
    kernel_rules: Sequence[str | Path] = (),
    scheduler: str | None = None,
) -> Job:
    """Load a job from a folder, a file, a glob, a URL that fsspec reads, several files, or a folder of `Job.save`.

    strict           raise on the first damage or contradiction instead of counting it
    workers          threads that read files (default: one a core)
    rank_regex       regular expression with one group that finds the rank in a file name; overrides the content
    axes             YAML file that names the axes of groups
    capture          which capture, where there are several (default: the newest complete one)
    step_annotation  regular expression for the annotation that marks a step, where there is no ProfilerStep
    patterns         further regular expressions for kernels that communicate
    memory_bytes, spool  bound the memory of reading, as in `read_many`
    limits           what one file may cost at most
    kernel_rules     YAML files like parse/kernels.yaml whose rules go before those that ship
    scheduler        address of a Dask cluster whose workers read the files

    Raises InputError for what can't be used, UsageError where the caller has to decide, AlignmentError if strict and
    the clocks can't be reconciled.
    """
    for option, texts in (("patterns", patterns), ("step_annotation", filter(None, [step_annotation]))):
        _check_patterns(option, texts)
    if isinstance(source, str | Path) and is_saved(source):
        return load_job(source)
    health, rules = Health(), load_rules(kernel_rules) if kernel_rules else None
    with local(source) as here:
        captures = discover(here, health, rank_regex, strict)
        chosen = choose(captures, capture, health)
        how: dict[str, Any] = {
            "workers": workers,
            "memory_bytes": memory_bytes,
            "spool": spool,
            "limits": limits,
            "rules": rules,
            "scheduler": scheduler,
        }
        chosen, files = _with_events(*_split(*_read(chosen, health, strict, how)), health)
        traces = _ranks(chosen, files, health, step_annotation)
    refuse_several_jobs(traces)
    job = assemble(traces, health, strict=strict, patterns=patterns, rules=rules, manifest=chosen.manifest)
    if axes is not None:
        job = replace(job, groups=override_axes(job.groups, axes))
    where = str(source) if isinstance(source, str | Path) else ", ".join(str(one) for one in source)
    return replace(job, source=where, capture=chosen.name, captures={name: one.ranks for name, one in captures.items()})


def _check_patterns(option: str, texts: Iterable[str]) -> None:
    for text in texts:
        compiled(text, option)


def _read(chosen: Capture, health: Health, strict: bool, how: Mapping[str, Any]) -> tuple[Capture, list[TraceFile]]:
    """The files of a capture that can be read; one that can't costs its rank, not the job, unless `strict` or alone."""
    try:
        return chosen, read_many([found.path for found in chosen.files], strict=strict, **how)
    except InputError:
        if strict or len(chosen.files) == 1:
            raise
    kept: list[Found] = []
    files: list[TraceFile] = []
    broken: InputError | None = None
    for number, found in enumerate(chosen.files):
        spool = how["spool"] and Path(how["spool"]) / f"part_{number:05d}"
        try:
            files += read_many([found.path], **{**how, "spool": spool})
            kept.append(found)
        except InputError as error:
            broken = error
            health.dropped["files that can't be read"] += 1
            health.note(f"{error}; its rank is missing")
    if broken is not None and not kept:
        raise broken
    return replace(chosen, files=tuple(kept)), files


def _split(chosen: Capture, files: Sequence[TraceFile]) -> tuple[Capture, list[TraceFile]]:
    """The same with every file into which several ranks were merged replaced by its ranks."""
    found: list[Found] = []
    parts: list[TraceFile] = []
    for one, file in zip(chosen.files, files, strict=True):
        ranks = split_ranks(file)
        found += [one] if len(ranks) == 1 else [replace(one, rank=None, rank_rule="")] * len(ranks)
        parts += ranks
    return replace(chosen, files=tuple(found)), parts


def _with_events(chosen: Capture, files: list[TraceFile], health: Health) -> tuple[Capture, list[TraceFile]]:
    """The same without files that hold no event: such a rank took part, but its trace is missing. One alone is kept."""
    full = [len(file.events) > 0 for file in files]
    if all(full) or not any(full):
        return chosen, files
    for file, kept in zip(files, full, strict=True):
        if not kept:
            health.dropped["files without events"] += 1
            health.note(f"{file.source}: holds no events; its rank is missing")
    found = tuple(one for one, kept in zip(chosen.files, full, strict=True) if kept)
    return replace(chosen, files=found), [file for file, kept in zip(files, full, strict=True) if kept]


def _ranks(
    chosen: Capture, files: Sequence[TraceFile], health: Health, step_annotation: str | None
) -> tuple[RankTrace, ...]:
    """One RankTrace a file, sorted by rank; a file without a rank is rank 0 of 1 if it is alone."""
    said = [_rank_of(found, file, len(files)) for found, file in zip(chosen.files, files, strict=True)]
    numbers = [rank for rank, _, _ in said]
    if len(set(numbers)) != len(numbers):
        shown = ", ".join(f"{found.path.name}: {rank}" for found, rank in zip(chosen.files, numbers, strict=True))
        raise InputError(f"{chosen.name}: two files hold the same rank ({shown}); name the rank with --rank-regex")
    for rule in sorted({rule for _, rule, _ in said if rule != "distributedInfo"}):
        health.guessed["ranks not stated in the header"] += sum(r == rule for _, r, _ in said)
        health.note(f"ranks {sorted(rank for rank, r, _ in said if r == rule)} found by: {rule}")
    sidecars = sidecars_by_rank(chosen.sidecars, health)
    traces = []
    for found, file, (rank, rule, world) in zip(chosen.files, files, said, strict=True):
        steps = find_steps(file.events, file.health, step_annotation)
        host = file.header.get("host_name")
        traces.append(
            RankTrace(
                rank,
                world or None,
                file.events,
                file.source,
                file.header,
                rank_rule=rule,
                host=host if isinstance(host, str) else found.host,
                steps=steps,
                sidecar=sidecars.get(rank),
                health=file.health,
            )
        )
    return tuple(sorted(traces, key=lambda trace: trace.rank))


def _rank_of(found: Found, file: TraceFile, count: int) -> tuple[int, str, int]:
    """(rank, rule, world size or 0): what the caller said, then the header, then the records, then the name."""
    info = file.header.get("distributedInfo")
    stated = info if isinstance(info, Mapping) else {}
    world = rank_value(stated.get("world_size")) or found.world_size or 0
    if found.rank is not None and found.rank_rule in ("--rank-regex", "distributedInfo", SEVERAL_HEADERS):
        return found.rank, found.rank_rule, world
    if (rank := rank_value(stated.get("rank"))) is not None:
        return rank, "distributedInfo", world
    if (recorded := rank_in_events(file.events)) is not None:
        return recorded[0], "Rank of a collective without a root", world or recorded[1]
    if found.rank is not None:
        return found.rank, found.rank_rule, world
    if count == 1:
        return 0, "default, no rank in the file", world
    raise InputError(
        f"{found.path}: no rank in the file or its name; name it with --rank-regex '…(\\d+)…', or load one file alone"
    )


def assemble(
    traces: Sequence[RankTrace],
    health: Health,
    *,
    strict: bool = False,
    patterns: Sequence[str] = (),
    rules: Rules | None = None,
    manifest: Mapping[str, Any] = MappingProxyType({}),
) -> Job:
    """A Job from the traces of its ranks: groups, collectives, clocks, waits. Nothing is read from disk."""
    ranks = [trace.rank for trace in traces]
    for trace in traces:
        health.add(trace.health)
    _refuse_impossible(traces)
    said = {trace.rank: _possible(said_by(trace, health), health) for trace in traces}
    members = [rank for group in said.values() for one in group for rank in one.members]
    for rank in ranks:
        said[rank] += [group for group in groups_in(manifest) if rank in group.members]
    expected = expected_ranks(manifest)
    world = max([trace.world_size or 0 for trace in traces] + [rank + 1 for rank in (*ranks, *members, *expected)])
    stated = max(trace.world_size or 0 for trace in traces)
    if 0 < stated < world:
        health.note(f"the traces state a world of {stated}, but show ranks up to {world - 1}: taken for {world}")
    traces = check_completeness(traces, expected or tuple(range(world)), health)
    groups = build_groups(said, world, health)
    table = join([members_of(trace, groups, health, patterns, rules) for trace in traces], health)
    match(table, groups, ranks, health)
    aligned = _align(table, traces, health, strict=strict, manifest=manifest)
    for sentence in aligned.refused:
        health.unmatched["ranks whose clock can't be aligned"] += 1
        health.note(sentence)
    collectives = finish(table, groups, ranks, world, aligned.clocks, health)
    named = name_axes(groups.groups, uses(table, traces), world, health)
    return Job(
        tuple(traces),
        world,
        named,
        collectives,
        aligned.clocks,
        health,
        manifest=manifest,
        residual_ns=aligned.residual_ns,
    )


def _refuse_impossible(traces: Sequence[RankTrace]) -> None:
    """Ranks and world sizes that no job has are damage, and would cost memory by the rank."""
    for trace in traces:
        if not 0 <= trace.rank < MOST_RANKS or not 0 <= (trace.world_size or 0) <= MOST_RANKS:
            raise InputError(
                f"{trace.source}: rank {trace.rank} of {trace.world_size} is no job's; name the rank with --rank-regex"
            )


def _possible(groups: Sequence[Said], health: Health) -> list[Said]:
    """The groups whose members can exist; the others are counted."""
    kept = [group for group in groups if all(0 <= rank < MOST_RANKS for rank in group.members)]
    if len(kept) < len(groups):
        health.dropped["groups with impossible ranks"] += len(groups) - len(kept)
    return kept


def _align(
    table: Table, traces: Sequence[RankTrace], health: Health, *, strict: bool, manifest: Mapping[str, Any]
) -> clock_tools.Alignment:
    """Clocks from synchronising collectives and probes; messages are paired on them and bound what is still open."""
    ranks = [trace.rank for trace in traces]
    found = _synchronising(table, traces)
    hosts = [hosts_in(manifest).get(trace.rank, trace.host) for trace in traces]
    probes = bounds_in(manifest, ranks)
    window = max((_window_ns(trace) for trace in traces), default=0)
    aligned = clock_tools.align(found, ranks, hosts, probes, strict, window)
    pair_messages(table, aligned.clocks, health)
    if messages := one_way(table, ranks):
        closer = clock_tools.align(found, ranks, hosts, (*probes, *messages), False, window)
        # messages are paired by order, so they may narrow an interval but never refuse what collectives allow
        if len(closer.refused) <= len(aligned.refused):
            return closer
    return aligned


def _window_ns(trace: RankTrace) -> int:
    """From the first start to the last end of a rank."""
    known = trace.events.ts_ns != TIME_UNKNOWN
    if not known.any():
        return 0
    return int(trace.events.end_ns[known].max() - trace.events.ts_ns[known].min())


def _synchronising(table: Table, traces: Sequence[RankTrace]) -> clock_tools.Instances:
    """The members whose starts and ends bound each other's clocks: those that move a payload (or are a barrier)."""
    moves = (table.bytes_in != 0) | (table.kind == KIND["barrier"])
    synchronises = np.isin(table.kind, [KIND[kind] for kind in SYNCHRONISING])
    rows = np.flatnonzero(synchronises & moves & (table.event >= 0))
    ranks = np.array([trace.rank for trace in traces], np.int64)
    return clock_tools.Instances(
        np.searchsorted(ranks, table.rank[rows]),
        table.instance[rows],
        table.start_ns[rows],
        table.end_ns[rows],
        table.on_device[rows].astype(np.bool_),
    )
