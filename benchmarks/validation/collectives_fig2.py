"""Turns Fernandez figure 2 (NCCL all-reduce, 4 to 512 nodes) into a fit on 4 to 16 nodes and predictions of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.validation.result import Gate, Result, mean_abs
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, Scored, Table, calibrate, read_table
from scaletrace.extrapolate.calibrate import Evidence
from scaletrace.extrapolate.calibrate import calibrate as fit_costs
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import Calibration, collective_seconds

SMALLEST = 16 * 2**20 - 1
LARGEST_FITTED_NODES = 16
CLUSTER = replace(Cluster.load("dgx_h100"), nvls=False)
READING_ERROR_GBPS = 3.0
"""The figure was digitised to ±3 GB/s of bus bandwidth."""


def results(tables: Path) -> list[Result]:
    """All-reduce times, from `collectives.csv`."""
    rows = [row for row in read_table(tables, "collectives.csv") if row["source_id"] == "fernandez_fig2"]
    table = [row for row in rows if float(row["size_bytes"]) >= SMALLEST]
    outliers = _outliers(rows)
    fit = [
        FitRow(Config.of(row), float(row["time_us"]))
        for row in table
        if int(float(row["nodes"])) <= LARGEST_FITTED_NODES
    ]
    held = [
        HeldOutRow(Config.of(row), float(row["time_us"]))
        for row in table
        if int(float(row["nodes"])) > LARGEST_FITTED_NODES
    ]
    law = calibrate(_fit, fit)
    flat = calibrate(lambda rows: _flat(rows), fit)
    scored = [
        row.scored(_label(row.config), 1e6 * _seconds(law, row.config), flat * _size_mb(row.config)) for row in held
    ]
    kept = [row for row in scored if row.label not in outliers]
    bare = 100 * max(abs(row.error) for row in scored)
    net = 100 * max(max(0.0, abs(row.error) - _reading_error(row)) for row in kept)
    naive = f"constant bus bandwidth {mean_abs([row.baseline_error for row in scored]):.0f} % mean"
    gates = (
        Gate("fernandez_fig2", "every size from 16 MiB, beyond the reading error", net, 10, 5, baseline=naive),
        Gate("fernandez_fig2", "mean", mean_abs([row.error for row in scored]), 10, 5, baseline=naive),
    )
    notes = [
        "Cost model and calibration are those of `extrapolate` (tuner's form, multipliers fitted on 4 to 16 nodes), without NVLS.",
        f"Worst without any allowance {bare:.1f} %, mean {mean_abs([row.error for row in scored]):.1f} %.",
    ]
    notes += [
        f"Outlier of the source, not gated: {label}, off its own neighbours in size by over 10 %." for label in outliers
    ]
    fitted = (f"{len(fit)} points of 4, 8 and 16 nodes from 16 MiB up",)
    title = "Fernandez figure 2, NCCL all-reduce on H100"
    return [Result("fernandez_fig2", title, "time, µs", fitted, tuple(scored), gates, tuple(notes))]


def _seconds(law: Calibration, config: Config) -> float:
    """The tool's own cost of this collective."""
    return collective_seconds(
        "all_reduce", config.number("size_bytes"), config.whole("gpus"), CLUSTER, calibration=law
    ).seconds


def _fit(rows: Sequence[FitRow]) -> Calibration:
    """The tool's own calibration from measured transfers (extrapolate/calibrate.py)."""
    return fit_costs(
        [
            Evidence("all_reduce", row.config.number("size_bytes"), row.config.whole("gpus"), row.measured / 1e6)
            for row in rows
        ],
        CLUSTER,
    )


def _flat(rows: Sequence[FitRow]) -> float:
    """Microseconds a MB of the largest messages: what one bus bandwidth for all says."""
    largest = max(rows, key=lambda row: row.config.number("size_bytes"))
    return largest.measured / _size_mb(largest.config)


def _size_mb(config: Config) -> float:
    return config.number("size_bytes") / 1e6


def _reading_error(row: Scored) -> float:
    """Relative error that ±3 GB/s of reading leaves in this point."""
    size_mb = float(row.label.split(", ")[1].split(" ")[0]) * 1.048576
    busbw_GBps = 2 * size_mb / 1e3 / (row.measured / 1e6)
    return READING_ERROR_GBPS / busbw_GBps


def _label(config: Config) -> str:
    return f"{config.whole('nodes')} nodes, {round(config.number('size_bytes') / 2**20)} MiB"


def _outliers(rows: Table) -> list[str]:
    """Points more than 10 % off the geometric mean of their neighbours in size (half and double) at the same nodes."""
    times = {(int(float(row["nodes"])), round(float(row["size_bytes"]) / 2**20)): float(row["time_us"]) for row in rows}
    found = []
    for (nodes, size), time in times.items():
        around = times.get((nodes, size // 2)), times.get((nodes, size * 2))
        if size >= 16 and around[0] and around[1] and abs(time / math.sqrt(around[0] * around[1]) - 1) > 0.10:
            found.append(f"{nodes} nodes, {size} MiB")
    return [label for label in found if int(label.split()[0]) > LARGEST_FITTED_NODES]
