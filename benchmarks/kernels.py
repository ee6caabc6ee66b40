"""Turns kernels that public traces hold at several shapes into the error of predicting one shape's time from another's.

For every trace and kind of operator each ordered pair of shapes is one prediction: the measured median of the first,
stretched by the shape models of kernels.py, by the plain ratio of FLOP, and by that of the bytes moved, against the
measured median of the second.

    python -P benchmarks/kernels.py ../shared/data
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.errors import ScaletraceError
from scaletrace.extrapolate.base import guess_cluster
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work, anchored, ceilings_seen, classify, latency_s, shape_of
from scaletrace.parse.cats import KERNEL_CATS, OP_CATS
from scaletrace.parse.job import RankTrace
from scaletrace.parse.load import load

LEAST = 3
"""A median of fewer kernels is left out."""
SHORTEST_S = 2e-6
"""Kernels and operators that take less say more of the profiler than of the work."""
NEAR = 16.0
"""Pairs whose work differs by more are left out: no layout asks for such a step."""
Times = dict[tuple[str, float], dict[Shape, float]]
"""(operator, bytes an element) → shape → median seconds."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Ratios predicted / measured of all pairs, by how they were predicted."""

    model: list[float]
    flop: list[float]
    moved: list[float]


def measured(rank: RankTrace) -> Times:
    """Median times of a rank's kernels by the operator that launched them; of operators themselves without a device."""
    events = rank.events
    dims = events.in_cats(*OP_CATS) & (events.texts("Input Dims") >= 0)
    kernels = np.flatnonzero(events.in_cats(*KERNEL_CATS) & (events.external_id >= 0))
    samples: dict[tuple[str, float], dict[Shape, list[float]]] = {}
    total: dict[int, float] = {}
    if len(kernels):
        row_of = dict(zip(events.external_id[dims].tolist(), np.flatnonzero(dims).tolist(), strict=True))
        for kernel in kernels.tolist():
            row = row_of.get(int(events.external_id[kernel]))
            if row is not None:  # an operator's kernels together do its work
                total[row] = total.get(row, 0.0) + float(events.dur_ns[kernel]) * 1e-9
    else:
        total = {int(row): float(events.dur_ns[row]) * 1e-9 for row in np.flatnonzero(dims)}
    for row, seconds in total.items():
        name = events.name_of(row)
        shape = shape_of(name, events.text("Input Dims", row), events.text("Input type", row))
        if (
            shape is None
            or not shape.flop
            or classify(name) in (Work.OTHER, Work.OPTIMIZER, Work.COPY)
            or "Backward" in name
        ):
            continue
        samples.setdefault((name, shape.element_bytes), {}).setdefault(shape, []).append(seconds)
    out: Times = {}
    for kind, by_shape in samples.items():
        medians = {s: float(np.median(t)) for s, t in by_shape.items() if len(t) >= LEAST}
        out[kind] = {shape: time for shape, time in medians.items() if time >= SHORTEST_S}
    return {kind: by_shape for kind, by_shape in out.items() if len(by_shape) > 1}


def errors(times: Times, ceilings: Ceilings) -> dict[Work, Errors]:
    """Every ordered pair of shapes of one kind as a prediction."""
    out: dict[Work, Errors] = {}
    for (name, _), by_shape in times.items():
        found = out.setdefault(classify(name), Errors([], [], []))
        for (old, there), (new, here) in permutations(by_shape.items(), 2):
            if not 1 / NEAR <= new.flop / old.flop <= NEAR:
                continue
            latent_s = latency_s(there, old, ceilings)
            found.model.append(anchored(there, old, new, ceilings, latent_s=latent_s) / here)
            found.flop.append(there * new.flop / old.flop / here)
            found.moved.append(there * new.bytes_moved / old.bytes_moved / here)
    return out


def typical(ratios: list[float]) -> str:
    """Median and nine tenths of |predicted / measured − 1|, as factors where they are large."""
    if not ratios:
        return "-"
    off = np.exp(np.abs(np.log(np.array(ratios))))
    return f"{np.median(off) - 1:.0%} ({np.quantile(off, 0.9) - 1:.0%})"


def captures(root: Path) -> Iterator[tuple[str, RankTrace, Ceilings | None]]:
    """(name, first rank, ceilings of its device in the catalog) of all that can be read."""
    for folder in sorted(p for part in ("traces", "gloo") for p in (root / part).glob("*") if p.is_dir()):
        files = [folder] if not folder.name.startswith(("misc", "param")) else sorted(folder.rglob("*.json*"))
        for path in files:
            try:
                job = load(path)
            except ScaletraceError:
                continue
            if job.ranks:
                named = job.ranks[0].header.get("deviceProperties")
                device = guess_cluster(job).device if named else None
                yield path.relative_to(root).as_posix()[:40], job.ranks[0], Ceilings.of(device) if device else None


def main() -> None:
    """Print and keep the table."""
    options = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    options.add_argument("data", type=Path, help="folder with traces/ and gloo/")
    root = options.parse_args().data
    rows, all_of = [], {}
    for name, rank, ceilings in captures(root):
        times = measured(rank)
        if not times:
            continue
        own = ceilings or ceilings_seen(
            [shape for by_shape in times.values() for shape in by_shape],
            [time for by_shape in times.values() for time in by_shape.values()],
        )
        for work, found in sorted(errors(times, own).items(), key=lambda item: item[0].value):
            if found.model:
                rows.append(
                    [name, work.value, len(found.model), *(typical(r) for r in (found.model, found.flop, found.moved))]
                )
            joined = all_of.setdefault(work, Errors([], [], []))
            for mine, theirs in ((joined.model, found.model), (joined.flop, found.flop), (joined.moved, found.moved)):
                mine.extend(theirs)
    for work, found in sorted(all_of.items(), key=lambda item: item[0].value):
        rows.append(
            ["all", work.value, len(found.model), *(typical(r) for r in (found.model, found.flop, found.moved))]
        )
    columns = ["trace", "kind", "pairs", "shape model", "FLOP ratio", "bytes ratio"]
    note = "Each cell: typical error of a pair (and of the worst tenth), as the factor by which prediction and measurement differ."
    print(write_result("kernels", "One shape of a kernel predicted from another", f"{table(columns, rows)}\n\n{note}"))


if __name__ == "__main__":
    main()
