"""Turns the calibrated tables into other splits of fitted and predicted rows, to show how far the errors depend on the choice.

The gates fit each family of runs on its smallest. Here any other run of it is fitted instead and all the rest predicted,
smaller ones too; and the one fitted constant of a device (λ) is found from other pairs of runs, or shifted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common import table
from benchmarks.validation import internevo, megascale, mlperf, mosaic, ptdp
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, calibrate, read_table
from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.constants import Device, device
from scaletrace.extrapolate.described.jobs import Job, pipeline_job
from scaletrace.extrapolate.described.lanes import solve_increasing
from scaletrace.extrapolate.described.models import Model

LARGEST_LOSS = 1.1
"""λ of 1 + μ would stop kernels altogether beside a collective."""

SHIFTS = (0.5, 0.8, 1.25, 1.5)
"""Factors on λ, to see what hangs on it."""


@dataclass(frozen=True, slots=True)
class Family:
    """Runs that share one calibrated number, smallest first; what is measured is the step in seconds.

    work  the compute of a run in units of the calibrated number
    """

    source: str
    label: str
    on: Device
    rows: tuple[tuple[Config, float], ...]
    job_of: Callable[[Config, Device], Job]
    work: Callable[[Config], float]

    def unit(self, row: FitRow, on: Device) -> float:
        """The calibrated number from one run."""
        config = row.config
        return calibrate(lambda rows: self.job_of(config, on).unit_for(rows[0].measured) / self.work(config), [row])

    def step_s(self, config: Config, unit: float, on: Device) -> float:
        return self.job_of(config, on).step_s(unit * self.work(config))

    def errors(self, fitted: int, on: Device | None = None) -> list[float]:
        """Relative errors of all other runs with the number of run `fitted`; [] where that run can't be calibrated on."""
        chosen = on or self.on
        try:
            unit = self.unit(FitRow(*self.rows[fitted]), chosen)
        except UsageError:
            return []
        held = [HeldOutRow(*row) for i, row in enumerate(self.rows) if i != fitted]
        return [row.scored("", self.step_s(row.config, unit, chosen)).error for row in held]


def _one(_: Config) -> float:
    return 1.0


def families(tables: Path) -> list[Family]:
    """All families of the calibrated tables with at least two runs."""
    points = read_table(tables, "scaling_points.csv")
    found = [*_mlperf(tables), *_internevo(points), *_mosaic(points), *_megascale(points), *_ptdp(points)]
    return [
        dataclasses.replace(family, job_of=lru_cache(maxsize=128)(family.job_of))
        for family in found
        if len(family.rows) > 1
    ]


Rows = list[dict[str, str]]


def _sorted(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: float(row["gpus"]))


def _mlperf(tables: Path) -> list[Family]:
    out = []
    for benchmark, name in mlperf.GATED_ROUNDS.items():
        source, model, gathered = {
            "gpt3": ("MLPerf 175B", mlperf.GPT3, 2.0),
            "llama31_405b": ("MLPerf 405B", mlperf.LLAMA, 1.0),
        }[benchmark]
        rows = [
            row
            for row in read_table(tables, "mlperf_training_steps.csv")
            if mlperf.is_clear(row) and (row["benchmark"], row["round"]) == (benchmark, name)
        ]
        runs = tuple((Config.of(row), float(row["step_median_s"])) for row in _sorted(rows))

        def job_of(config: Config, on: Device, model: Model = model, gathered: float = gathered) -> Job:
            return pipeline_job(model, mlperf.layout_of(config, gathered), on)

        out.append(Family(source, name, mlperf.H100, runs, job_of, _one))
    return out


def _internevo(points: Rows) -> list[Family]:
    groups: dict[tuple[str, ...], Rows] = {}
    for row in points:
        if row["source_id"] == "internevo" and internevo.is_counted(row):
            where = "local" if "within" in row["sharding"] else "global"
            key = (row["tp"] or "1", where, row["act_ckpt"])
            groups.setdefault(key, []).append(internevo.facts(row))
    out = []
    for (tp, where, again), rows in groups.items():
        runs = []
        for row in _sorted(rows):
            config = Config.of(row)
            runs.append((config, internevo.tokens_per_gpu(config) / float(row["tokens_per_s_per_gpu"])))
        label = f"TP{tp} {where}{', recomputed' if again.lower() == 'true' else ''}"
        out.append(Family("InternEvo", label, internevo.A100_4X100G, tuple(runs), internevo.job_of, _one))
    return out


def _mosaic(points: Rows) -> list[Family]:
    out = []
    table_ = mosaic.counted(points)
    for source, accelerator, name, smallest in mosaic.DEVICES:
        for model, rows in mosaic.by_model(table_, accelerator, smallest).items():
            runs = []
            for row in rows:
                config = Config.of(row)
                runs.append((config, mosaic.tokens(config) / float(row["tokens_per_s_per_gpu"])))
            out.append(Family(source, model, device(name), _without_outliers(runs), mosaic.job_of, mosaic.tokens))
    return out


def _without_outliers(runs: Sequence[tuple[Config, float]]) -> tuple[tuple[Config, float], ...]:
    """Runs but for those more than 10 % off both neighbours while these agree within 3 %, as on the page."""
    steps = [step / mosaic.tokens(config) for config, step in runs]
    out = {
        i
        for i in range(1, len(steps) - 1)
        if abs(steps[i + 1] / steps[i - 1] - 1) < 0.03
        and min(abs(steps[i] / steps[i - 1] - 1), abs(steps[i] / steps[i + 1] - 1)) > 0.10
    }
    return tuple(run for i, run in enumerate(runs) if i not in out)


def _megascale(points: Rows) -> list[Family]:
    groups: dict[tuple[str, str], Rows] = {}
    for row in points:
        if row["source_id"] == "megascale_t2":
            groups.setdefault((row["framework"], row["gbs_sequences"]), []).append(row)
    out = []
    for (system, batch), rows in groups.items():
        runs = tuple((Config.of(row), float(row["step_time_s"])) for row in _sorted(rows))
        out.append(
            Family("MegaScale", f"{system}, batch {float(batch):.0f}", megascale.A100, runs, megascale.job_of, _one)
        )
    return out


def _ptdp(points: Rows) -> list[Family]:
    out = []
    rows = [row for row in points if row["source_id"] == "ptdp_t2" and row["model"] in ptdp.MODELS]
    for name in ptdp.MODELS:
        mine = _sorted([row for row in rows if row["model"] == name and row["parallelism"] != "ZeRO-3"])
        runs = []
        for row in mine:
            config = Config.of(row)
            runs.append((config, ptdp.flop_per_gpu(config) / (float(row["tflops_per_gpu"]) * 1e12)))
        out.append(Family("PTD-P", name, ptdp.A100, tuple(runs), ptdp.pipeline_of, _one))
    return out


def _summary(errors: Sequence[float]) -> str:
    """Mean and worst magnitude in percent."""
    if not errors:
        return "-"
    magnitudes = 100 * np.abs(errors)
    return f"{magnitudes.mean():.1f} / {magnitudes.max():.1f}"


def by_fitted_row(found: Sequence[Family]) -> str:
    """A table: for each source the mean and worst error when the smallest, second, … largest run of a family is fitted."""
    heads = ("source", "families", "smallest (as gated)", "second", "middle", "largest", "any run from any other")
    lines = []
    for source in dict.fromkeys(family.source for family in found):
        own = [family for family in found if family.source == source]
        picks: list[Callable[[int], int]] = [lambda n: 0, lambda n: 1, lambda n: n // 2, lambda n: n - 1]
        cells = [_summary([e for family in own for e in family.errors(pick(len(family.rows)))]) for pick in picks]
        everyone = [e for family in own for i in range(len(family.rows)) for e in family.errors(i)]
        lines.append((source, len(own), *cells, _summary(everyone)))
    return table(heads, lines)


def loss_from(family: Family, small: int, large: int) -> float | None:
    """λ that makes the larger run follow from the smaller one; None where none from 0 to LARGEST_LOSS does."""
    (config, step_s), (other, target_s) = family.rows[small], family.rows[large]

    def ratio(value: float) -> float:
        if value > LARGEST_LOSS:
            return 1.0 + value
        on = dataclasses.replace(family.on, overlap_loss=value)
        return family.step_s(other, family.unit(FitRow(config, step_s), on), on) / target_s

    try:
        found = solve_increasing(ratio, 1.0, guess=LARGEST_LOSS, tolerance=1e-4)
    except UsageError:
        return None
    return found if found < LARGEST_LOSS else None


def _median(values: Sequence[float]) -> str:
    return (
        f"{np.median(values):.2f} ({min(values):.2f} to {max(values):.2f}, {len(values)} pairs)" if values else "none"
    )


def losses_found(found: Sequence[Family]) -> str:
    """A table: λ of neighbouring sizes of each source whose traffic overlaps, beside the constant."""
    lines = []
    for source in dict.fromkeys(family.source for family in found):
        own = [family for family in found if family.source == source and "Megatron" not in family.label]
        pairs = [(family, i, j) for family in own for i, j in pairwise(range(len(family.rows)))]
        values = [value for family, i, j in pairs if (value := loss_from(family, i, j)) is not None]
        if source != "PTD-P" and own:
            lines.append(
                (
                    source,
                    f"{own[0].on.overlap_loss:.3f}",
                    _median(values),
                    f"{len(pairs) - len(values)} of {len(pairs)}",
                )
            )
    return table(("source", "λ used", "λ of neighbouring sizes: median, range", "pairs that no λ explains"), lines)


def by_loss(found: Sequence[Family]) -> str:
    """A table: mean and worst error with λ shifted."""
    lines = []
    for source in dict.fromkeys(family.source for family in found):
        own = [family for family in found if family.source == source]
        cells = []
        for factor in (1.0, *SHIFTS):
            errors = []
            for family in own:
                on = dataclasses.replace(family.on, overlap_loss=family.on.overlap_loss * factor)
                errors += family.errors(0, on)
            cells.append(_summary(errors))
        lines.append((source, *cells))
    return table(("source", "λ", *(f"λ × {factor:g}" for factor in SHIFTS)), lines)


def section(tables: Path) -> str:
    """The part of the accuracy page on other splits."""
    found = families(tables)
    return _TEXT.format(rows=by_fitted_row(found), losses=losses_found(found), shifts=by_loss(found))


_TEXT = """## How the errors move with other splits

Mean / worst error of step time in percent, over all runs of a family but the fitted one (the rows that fixed λ included here,
sources' outliers left out). A family is a model, a layout or a system whose runs share one calibrated number.

{rows}

The gates fit the smallest run; any other choice is as fair a test, and what moves between the columns is how much the
verdict owes to that choice. InternEvo, Mosaic on A100 and MegaScale pass their gates by little, and fail them by as little with
other fitted runs. Fitting a larger run and predicting smaller ones shows the same misses with the other sign.

λ, the only number of a device that was fitted for these tables, found from every pair of neighbouring sizes instead of the one
pair that fixed it:

{losses}

Neighbouring sizes differ by a percent or two, as much as their own noise, so single pairs scatter; the medians say whether
the constant is typical. For H100 three sources give it again. For A100 they do not: its tables hardly depend on λ, as the next
table shows, so that number is known to a factor of two at best. And what the errors are (fitted on the smallest run) if λ is wrong:

{shifts}"""
