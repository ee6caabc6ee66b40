"""Turns a capture into one screen that says what is in it: ranks, steps, groups, collectives, clocks, health."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, exit_codes, out, print_json
from scaletrace.cli.reading import read_job, reads_captures

if TYPE_CHECKING:
    from rich.table import Table

    from scaletrace.parse.build import Built
    from scaletrace.parse.job import Job

_ROWS = 6


@reads_captures
def inspect(
    path: Annotated[str, typer.Argument(help="Capture: a folder, a file, a glob or a URL.")],
    save: Annotated[
        Path | None, typer.Option(help="Write what was read to this folder; every command reads it at once.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, no table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code tells.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Say what is in a capture: ranks, steps, groups, collectives, clocks, layers, who waits for whom, health.

    Example: scaletrace inspect runs/8gpu
    """
    with exit_codes(debug):
        job = read_job(path)
        if save is not None:
            job.save(save)
        answer = document("scaletrace.inspect/1", path, job.health.to_json(), **describe(job))
        if json_:
            print_json(answer)
        elif not quiet:
            show(answer)


def describe(job: Job, built: Built | None = None) -> dict[str, Any]:
    """The parts of the JSON answer (docs/cli.md), as plain values; `built`: the job's graph, where it is there already."""
    from scaletrace.extrapolate.shares import makeup
    from scaletrace.parse.profiler_cost import profiler_cost

    present = [trace.rank for trace in job.ranks]
    expected = sorted({*range(job.world_size), *present})
    if job.manifest.get("job", {}).get("fake_world"):
        expected = present
    steps: Counter[int] = Counter(step.number for trace in job.ranks for step in trace.steps if step.complete)
    return {
        "capture": job.capture,
        "captures": {name: list(ranks) for name, ranks in job.captures.items()},
        "backend": job.backend,
        **_hosts(job),
        "ranks": {
            "expected": len(expected),
            "present": present,
            "missing": [rank for rank in expected if rank not in set(present)],
            "found_by": dict(Counter(trace.rank_rule for trace in job.ranks)),
        },
        "steps": sorted(steps),
        "steps_not_on_every_rank": sorted(number for number, count in steps.items() if count < len(present)),
        "groups": _groups(job),
        "collectives": _collectives(job),
        "clocks": {str(rank): _clock(clock) for rank, clock in job.clocks.items()},
        "clock_residual_ns": _median(job.residual_ns),
        "layers": makeup(job).to_json(),
        "memory": _memory(job, built),
        "profiler_cost": cost.to_json() if (cost := profiler_cost(job)) else None,
        "stragglers": _stragglers(job),
    }


def _memory(job: Job, built: Built | None) -> dict[str, Any]:
    """What the fullest rank needs, as `extrapolate` says it; what its shapes say, and what its memory events say it took."""
    from scaletrace.errors import ScaletraceError
    from scaletrace.extrapolate.footprint import footprint_of_job
    from scaletrace.extrapolate.traced_memory import traced_memory
    from scaletrace.parse.build import build

    found = [(traced_memory(trace), trace.rank) for trace in job.ranks]
    if not found:
        return {}
    fullest, rank = max(found, key=lambda pair: (pair[0].measured, pair[0].predicted))
    told: dict[str, Any] = {"bytes": None, "source": None, "at_least_bytes": None}
    try:
        footprint = footprint_of_job(built or build(job))
        value, reason = footprint.at(footprint.layout)
        least = footprint.at_least(footprint.layout)[0] if value is None else None
        told |= {"bytes": value, "source": footprint.source if value else None, "at_least_bytes": least}
    except ScaletraceError as error:
        reason = str(error)
    return {**told, "why_not": reason or None, "rank": rank, **fullest.to_json()}


def _stragglers(job: Job) -> list[dict[str, Any]]:
    """Shares of every rank; each_waited_ns is the mean over the other ranks, as `replay` shows it."""
    from scaletrace.parse.stragglers import straggler_summary

    others = max(1, len(job.ranks) - 1)
    return [
        {name: getattr(share, name) for name in share.__slots__} | {"each_waited_ns": share.caused_wait_ns // others}
        for share in straggler_summary(job)
    ]


def _hosts(job: Job) -> dict[str, Any]:
    """Hosts that the traces or the manifest state; what file names suggest only where several ranks agree on one."""
    from scaletrace.parse.manifest import hosts_in

    told = {trace.rank: trace.header.get("host_name") for trace in job.ranks} | hosts_in(job.manifest)
    stated = {host for host in told.values() if isinstance(host, str) and host}
    if stated:
        return {"hosts": sorted(stated), "hosts_by": "traces"}
    guessed = {trace.host for trace in job.ranks if trace.host}
    if not guessed or len(guessed) == len(job.ranks) > 1:
        return {"hosts": [], "hosts_by": None}
    return {"hosts": sorted(guessed), "hosts_by": "file names"}


def _median(values: Any) -> int | None:
    import numpy as np

    return int(np.median(values)) if len(values) else None


def _clock(clock: Any) -> dict[str, Any]:
    from scaletrace.parse.clocks import UNBOUNDED

    known = clock.high_ns < UNBOUNDED and clock.low_ns > -UNBOUNDED
    return {
        "offset_ns": clock.offset_ns if clock.source != "unaligned" else None,
        "low_ns": clock.low_ns if known else None,
        "high_ns": clock.high_ns if known else None,
        "drift_ppm": clock.drift_ppm,
        "source": clock.source,
    }


def _groups(job: Job) -> list[dict[str, Any]]:
    """Groups of one shape as one entry; `count` says how many there are."""
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in job.groups:
        key = (group.axis, group.size, group.stride, group.description)
        entry = shapes.setdefault(
            key,
            {
                "axis": group.axis,
                "size": group.size,
                "stride": group.stride,
                "description": group.description,
                "confidence": group.confidence,
                "count": 0,
            },
        )
        entry["count"] += 1
        entry["confidence"] = min(entry["confidence"], group.confidence)
    return list(shapes.values())


def _collectives(job: Job) -> dict[str, Any]:
    import numpy as np

    from scaletrace.parse.build import only_group
    from scaletrace.parse.job import KINDS
    from scaletrace.parse.waits import bus_bandwidth, instances_of

    each = instances_of(job)
    c = job.collectives
    full = np.zeros(len(each), np.bool_)
    full[c.instance[c.matched]] = True
    group = [g if g >= 0 else only_group(job) for g in each.group.tolist()]
    axis = [job.groups[g].axis if g >= 0 else "" for g in group]
    size = [job.groups[g].size if g >= 0 else 0 for g in group]
    rows: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(zip(axis, each.kind.tolist(), size, each.bytes.tolist(), strict=True)):
        if full[i]:
            rows.setdefault(key, []).append(i)
    listed = []
    for (name, kind, members, moved), at in rows.items():
        known = each.transfer_ns[at] >= 0
        listed.append(
            {
                "axis": name,
                "kind": KINDS[kind],
                "group_size": members,
                "bytes": moved if moved >= 0 else None,
                "count": len(at),
                "wait_ns": int(each.wait_ns[at].sum()),
                "transfer_ns": int(each.transfer_ns[at][known].sum()) if known.any() else None,
                "transfer_at_most_ns": int(each.at_most_ns[at].sum()) if each.at_most_ns[at].min() >= 0 else None,
                "busbw_Bps": bus_bandwidth(KINDS[kind], members, each.bytes[at], each.transfer_ns[at]),
            }
        )
    listed.sort(key=lambda row: -((row["transfer_ns"] or row["transfer_at_most_ns"] or 0) + row["wait_ns"]))
    late = Counter(each.late_rank[full & (each.late_rank >= 0)].tolist())
    return {
        "matched": int(full.sum()),
        "unmatched": int((~full).sum()),
        "unmatched_members": c.unmatched,
        "rung": c.rung,
        "late_rank_counts": {str(rank): count for rank, count in late.most_common()},
        "by_kind": listed,
    }


def show(answer: dict[str, Any]) -> None:
    """The answer as one screen of 80 columns."""
    from rich.markup import escape

    ranks, collectives = answer["ranks"], answer["collectives"]
    missing = f", missing {_few(ranks['missing'])}" if ranks["missing"] else ""
    rules = ", ".join(ranks["found_by"])
    out.print(f"[bold]{escape(_plain(answer['input']))}[/]", soft_wrap=True)
    out.print(f"ranks    {len(ranks['present'])} of {ranks['expected']}{missing} (from {escape(rules)})")
    count = len(answer["steps"])
    steps = (
        f"{_few(answer['steps'])} ({count} step{'s' * (count != 1)})"
        if count
        else "none marked; the whole window counts"
    )
    by = " by file names" if answer["hosts_by"] == "file names" else ""
    hosts = f", {len(answer['hosts'])} host{'s' * (len(answer['hosts']) != 1)}{by}" if answer["hosts"] else ""
    out.print(f"steps    {steps}    backend {answer['backend'] or 'not stated'}{hosts}")
    if len(answer["captures"]) > 1:
        names = ", ".join(answer["captures"])
        out.print(f"captures {escape(_plain(names))}; this is {escape(_plain(answer['capture']))}")
    rung = f" by {collectives['rung']}" if collectives["rung"] else ""
    who = "not on all their ranks" if not ranks["missing"] else "not on all ranks present"
    out.print(f"matched  {collectives['matched']} collectives{rung}, {collectives['unmatched']} {who}")
    out.print(f"clocks   {_clock_line(answer)}")
    if answer["profiler_cost"]:
        out.print(
            f"profiler {answer['profiler_cost']['sentence']}",
            style="yellow" if answer["profiler_cost"]["large"] else None,
        )
    for table, about in (
        (_group_table(answer), ""),
        (_kind_table(answer), _OF_KINDS),
        (_rank_table(answer), _of_ranks(answer)),
        (_layer_table(answer), ""),
    ):
        if table.row_count:
            out.print(table)
            if about:
                out.print(about)
    if answer["layers"]["why_not"]:
        out.print(f"layers   none found: {answer['layers']['why_not']}", markup=False)
    memory = answer["memory"]
    if memory.get("measured_bytes"):
        of = f" ({memory['measured_of']})" if memory["measured_of"] != "device" else ""
        told = f"; from shapes {_bytes(memory['predicted_bytes'])}" if memory["predicted_bytes"] else ""
        out.print(f"memory   peak {_bytes(memory['measured_bytes'])} measured on rank {memory['rank']}{of}{told}")
    elif memory.get("bytes"):
        out.print(f"memory   {_bytes(round(memory['bytes']))} at the peak, {memory['source']}")
    elif memory.get("why_not"):
        out.print(f"memory   not known: {escape(_plain(memory['why_not']))}")
    health = _health_table(answer)
    if health.row_count:
        out.print(health)
    for note in answer["health"]["notes"][:_ROWS]:
        out.print(f"- {escape(_plain(note))}")
    if len(answer["health"]["notes"]) > _ROWS:
        out.print(f"- and {len(answer['health']['notes']) - _ROWS} more notes (--json shows all)")


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _few(numbers: list[int]) -> str:
    """Numbers as ranges: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown[:_ROWS]) + (", …" if len(shown) > _ROWS else "")


def _time(ns: int | None) -> str:
    from scaletrace.view import units

    return units.duration(ns)


def _bytes(count: int | None) -> str:
    from scaletrace.view import units

    return units.size(count)


def _clock_line(answer: dict[str, Any]) -> str:
    clocks = answer["clocks"].values()
    sources = ", ".join(f"{count} {source}" for source, count in Counter(c["source"] for c in clocks).most_common())
    offsets = [c["offset_ns"] for c in clocks if c["offset_ns"] is not None]
    widths = [(c["high_ns"] - c["low_ns"]) / 2 for c in clocks if c["low_ns"] is not None]
    line = f"{sources}; offsets {_time(min(offsets))} to {_time(max(offsets))}" if offsets else sources
    if widths and max(widths) > 0:
        line += f" ±{_time(round(max(widths)))}"
    residual = answer["clock_residual_ns"]
    return f"{line}, ends within {_time(residual)}" if residual is not None else line


def _table(*columns: tuple[str, bool]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, show_edge=False, width=80)
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", overflow="ellipsis", no_wrap=True)
    return table


def _group_table(answer: dict[str, Any]) -> Table:
    from rich.markup import escape

    table = _table(
        ("axis", False), ("groups", True), ("size", True), ("stride", True), ("sure", True), ("description", False)
    )
    for group in [group for group in answer["groups"] if group["size"] > 1][:_ROWS]:
        table.add_row(
            group["axis"] or "?",
            str(group["count"]),
            str(group["size"]),
            str(group["stride"]) if group["stride"] >= 0 else "irregular",
            f"{group['confidence']:.0%}",
            escape(_plain(group["description"])),
        )
    return table


_OF_KINDS = (
    "Measured, of collectives seen on all their ranks: waits summed over ranks, each transfer once. Replay lists all, as "
    "replayed, and sums transfers over ranks too."
)


def _of_ranks(answer: dict[str, Any]) -> str:
    """What the table on ranks measures, and that one step says little."""
    words = (
        "Who was waited for, in collectives within a pipeline stage; what the job would gain from a rank at its peers' "
        "pace is another question: see scaletrace replay."
    )
    few = len(answer["steps"]) == 1 and any(share["cause"] for share in answer["stragglers"])
    return words + " One step says little about which rank is slow." * few


def _kind_table(answer: dict[str, Any]) -> Table:
    from scaletrace.view import units

    table = _table(
        ("collective", False),
        ("axis", False),
        ("bytes", True),
        ("count", True),
        ("Σ wait", True),
        ("transfer", True),
        ("bus bw", True),
    )
    for row in answer["collectives"]["by_kind"][:_ROWS]:
        table.add_row(
            row["kind"],
            row["axis"] or "?",
            _bytes(row["bytes"]),
            str(row["count"]),
            _time(row["wait_ns"]),
            _transfer(row),
            units.rate(row["busbw_Bps"]),
        )
    return table


def _transfer(row: dict[str, Any]) -> str:
    """Measured, an upper bound where one rank alone was seen, or unknown."""
    if row["transfer_ns"] is not None or row["transfer_at_most_ns"] is None:
        return _time(row["transfer_ns"])
    return f"≤ {_time(row['transfer_at_most_ns'])}"


def _rank_table(answer: dict[str, Any]) -> Table:
    table = _table(
        ("rank", True), ("others wait (mean)", True), ("waits itself", True), ("computes", True), ("verdict", False)
    )
    shares = answer["stragglers"]
    each = "/step" if answer["steps"] else ""
    if len(shares) < 2 or not any(share["waited_ns"] for share in shares):
        return table
    named = [share for share in shares if share["cause"]]
    for share in (named + [share for share in shares if not share["cause"]])[: max(len(named), 3)][:_ROWS]:
        table.add_row(
            str(share["rank"]),
            f"{_time(share['each_waited_ns'])}{each}",
            f"{_time(share['waited_ns'])}{each}",
            f"{_time(share['compute_ns'])}{each}",
            share["cause"] or "-",
        )
    return table


def _layer_table(answer: dict[str, Any]) -> Table:
    """What the model is made of, and what each part takes of a step."""
    from rich.markup import escape

    found = answer["layers"]
    table = _table(
        (f"model (by {found['rule']})", False),
        ("layers", True),
        ("forward", True),
        ("backward", True),
        ("other", True),
        ("share", True),
    )
    if not found["found"]:
        return table
    for part in found["parts"]:
        times = [part["forward_ns"], part["backward_ns"], part["other_ns"]]
        if any(times):
            table.add_row(
                escape(_plain(part["name"])),
                str(part["count"]) if part["is_layer"] else "",
                *(_time(ns) if ns else "-" for ns in times),
                f"{part['share']:.1%}",
            )
    return table


def _health_table(answer: dict[str, Any]) -> Table:
    from rich.markup import escape

    table = _table(("health", False), ("count", True), ("what", False))
    table.columns[2].ratio = 1
    for kind in ("repaired", "clipped", "dropped", "guessed", "unmatched"):
        for reason, count in answer["health"][kind].items():
            if count:
                table.add_row(kind, f"{count:,}", escape(_plain(reason)))
    return table
