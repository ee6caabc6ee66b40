"""Turns Lumos figure 7 (GPT-3 15B on H100) into scale-out predictions of step time and of its four-way breakdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.validation.result import Gate, Result, worst
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, Scored, Table, calibrate, read_table
from scaletrace.extrapolate.described.collectives import GroupShape, all_gather_s
from scaletrace.extrapolate.described.constants import device
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.described.spread import straggle

H100 = device("h100")
MODEL = Model("gpt3-15b", "gpt", 48, 6144, 48, seq=2048)
FITTED_PIPELINES = 2
"""Two lengths of pipeline tell how many micro batches there are, which the source does not say."""

PARTS = ("exposed compute", "overlapped", "exposed communication", "other")
_BREAKDOWN = re.compile(r"ms=\(([\d., ]+)\); Lumos")


def results(tables: Path) -> list[Result]:
    """Rows of one (tp, pp) from their smallest dp up, from `scaling_points.csv`; other pipelines are reported."""
    table = [row for row in read_table(tables, "scaling_points.csv") if row["source_id"] == "lumos_f7"]
    fit, held, further = _split(table)
    scored, parts = [], []
    for row, breakdown in held:
        base = fit[_shape(row.config)]
        prediction = calibrate(partial(_scaled, row.config), [base])
        scored.append(row.scored(_label(row.config), sum(prediction), base.measured))
        parts.append((_label(row.config), prediction, breakdown))
    beyond = _pipelines(fit, further)
    gates = [
        Gate(
            "lumos",
            "scale-out by data parallelism",
            worst([row.error for row in scored]),
            5,
            4.2,
            baseline=f"unchanged {worst([row.baseline_error for row in scored]):.1f} %; its own 4.2 %",
        ),
        Gate("lumos", "four-way breakdown, worst part in percent of the step", _worst_part(parts), 10, 5),
    ]
    if beyond:
        gates.append(
            Gate(
                "lumos",
                "scale-out by pipeline stages",
                worst([row.error for row in beyond]),
                5,
                4.2,
                reported_only=True,
                reason="micro batches are not published; they follow from two bubbles that also hold other waits",
            )
        )
    lines = tuple(
        (label, *(f"{1e3 * ours:.0f} / {1e3 * theirs:.0f}" for ours, theirs in zip(prediction, measured, strict=True)))
        for label, prediction, measured in parts
    )
    table_ = ("Breakdown, predicted / measured, ms", ("layout", *PARTS), lines)
    fitted = tuple(_label(row.config) for row in fit.values())
    title = "Lumos figure 7, GPT-3 15B, H100"
    return [Result("lumos", title, "step time, s", fitted, (*scored, *beyond), tuple(gates), tables=(table_,))]


def _split(
    table: Table,
) -> tuple[dict[tuple[int, int], FitRow], list[tuple[HeldOutRow, list[float]]], list[HeldOutRow]]:
    """The smallest dp of the two shortest pipelines of each tp is fitted, their larger dp held out; longer ones further."""
    shapes = sorted({_shape(Config.of(row)) for row in table})
    short = {shape for shape in shapes if sum(tp == shape[0] and pp < shape[1] for tp, pp in shapes) < FITTED_PIPELINES}
    fit: dict[tuple[int, int], FitRow] = {}
    held, further = [], []
    for row in sorted(table, key=lambda row: (float(row["gpus"]), float(row["dp"]))):
        config, seconds = Config.of(row), float(row["step_time_s"])
        shape = _shape(config)
        if shape in fit:
            held.append((HeldOutRow(config, seconds), _breakdown(row)))
        elif shape in short:
            fit[shape] = FitRow(config, seconds, tuple(zip(PARTS, _breakdown(row), strict=True)))
        else:
            further.append(HeldOutRow(config, seconds))
    return fit, held, further


def _scaled(to: Config, rows: Sequence[FitRow]) -> tuple[float, float, float, float]:
    return scale_out(rows[0], to)


def scale_out(base: FitRow, to: Config) -> tuple[float, float, float, float]:
    """The four parts at another dp, in seconds: compute stays, the data-parallel collectives grow, hidden and not alike."""
    exposed, overlapped, communication, other = (base.evidence(part) for part in PARTS)
    slowest = straggle(H100.spread, to.whole("gpus")) / straggle(H100.spread, base.config.whole("gpus"))
    compute = (exposed + overlapped) * slowest
    traffic = _traffic_s(base.config)
    more = _traffic_s(to) - traffic
    # What of the traffic was hidden grows hidden; the rest of the growth is exposed.
    hidden = min(compute, overlapped + more * min(1.0, overlapped / traffic))
    left = max(0.0, more - (hidden - overlapped))
    return compute - hidden, hidden, communication + left, other


def _traffic_s(config: Config) -> float:
    """Gradient reduction (fp32) and parameter gather (bf16) of one rank's parameters."""
    tp, pp = config.whole("tp"), config.whole("pp")
    group = GroupShape(config.whole("dp"), max(1, H100.gpus_per_node // tp))
    held = MODEL.parameters / (tp * pp)
    return all_gather_s(H100, 4 * held, group) + all_gather_s(H100, 2 * held, group)


def _pipelines(fit: dict[tuple[int, int], FitRow], further: Sequence[HeldOutRow]) -> list[Scored]:
    """Longer pipelines at the same work a GPU: the bubble is (p - 1) / m of the compute, m from two fitted rows."""
    if len(fit) < 2 or not further:
        return []
    micro_batches = calibrate(_micro_batches, fit.values())
    scored = []
    for row in further:
        base = max(fit.values(), key=lambda known: known.config.whole("pp"))
        busy = base.evidence(PARTS[0]) + base.evidence(PARTS[1])
        longer = (row.config.whole("pp") - base.config.whole("pp")) / micro_batches * busy
        scored.append(row.scored(_label(row.config), base.measured + longer, base.measured))
    return scored


def _micro_batches(rows: Sequence[FitRow]) -> float:
    """Micro batches from the exposed communication of two pipelines: the bubble grows with p - 1, the traffic falls."""
    short, long = sorted(rows, key=lambda row: row.config.whole("pp"))[:2]
    share = short.config.whole("pp") / long.config.whole("pp")
    grown = long.evidence(PARTS[2]) - share * short.evidence(PARTS[2])
    busy = [row.evidence(PARTS[0]) + row.evidence(PARTS[1]) for row in (short, long)]
    slots = (long.config.whole("pp") - 1) * busy[1] - share * (short.config.whole("pp") - 1) * busy[0]
    return max(1.0, slots / grown)


def _worst_part(parts: Sequence[tuple[str, tuple[float, ...], list[float]]]) -> float:
    return 100 * max(
        abs(ours - theirs) / sum(measured)
        for _, prediction, measured in parts
        for ours, theirs in zip(prediction, measured, strict=True)
    )


def _breakdown(row: dict[str, str]) -> list[float]:
    """Seconds of the four parts, from the notes of the row."""
    found = _BREAKDOWN.search(row["notes"])
    return [float(value) / 1e3 for value in found.group(1).split(",")] if found else [float("nan")] * 4


def _shape(config: Config) -> tuple[int, int]:
    return config.whole("tp"), config.whole("pp")


def _label(config: Config) -> str:
    return f"TP{config.whole('tp')} PP{config.whole('pp')} DP{config.whole('dp')}"
