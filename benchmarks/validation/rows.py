"""Turns rows of a published table into two types that can't be mixed up: rows to fit on, and rows to predict.

A `FitRow` shows its measurement; a `HeldOutRow` never does. Its measurement leaves it in one way only, as a `Scored`
row together with a prediction that has been made. So no parameter can be fitted to a row that is reported as predicted:
the calibrating code is given `FitRow`s, and a `HeldOutRow` has nothing to fit to.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

OUTCOMES = frozenset(
    {
        "tokens_per_s_per_gpu",
        "step_time_s",
        "tflops_per_gpu",
        "mfu_pct",
        "hfu_pct",
        "mem_GiB",
        "n_step_samples",
        "step_median_s",
        "step_p05_s",
        "step_p95_s",
        "mean_step_from_run_time_s",
        "steps_per_run",
        "run_seconds_median",
        "iteration time (ms)",
        "time_us",
        "busbw_GBps",
        "theoretical_utilization_pct",
        "notes",
    }
)
"""Columns that hold, or may hold, what was measured. `notes` is one: it carries breakdowns and days of training."""

Table = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Config:
    """What a row says about the job, without any outcome column."""

    columns: tuple[tuple[str, str], ...]

    @staticmethod
    def of(row: Mapping[str, str]) -> Config:
        return Config(tuple((key, value) for key, value in row.items() if key not in OUTCOMES))

    def text(self, key: str) -> str:
        return dict(self.columns).get(key) or ""

    def number(self, key: str, default: float = math.nan) -> float:
        value = self.text(key)
        return float(value) if value else default

    def whole(self, key: str, default: int = 0) -> int:
        value = self.text(key)
        return int(float(value)) if value else default


@dataclass(frozen=True, slots=True)
class FitRow:
    """A row whose measurement a calibration may use; it is never scored."""

    config: Config
    measured: float
    extra: tuple[tuple[str, float], ...] = ()

    def evidence(self, key: str) -> float:
        """A further measured number of this row (a width, a share of a breakdown)."""
        return dict(self.extra)[key]


class HeldOutRow:
    """A row that is predicted: it shows its configuration and keeps its measurement until a prediction exists."""

    __slots__ = ("__measured", "config")

    def __init__(self, config: Config, measured: float) -> None:
        self.config = config
        self.__measured = measured

    def scored(self, label: str, predicted: float, baseline: float = math.nan) -> Scored:
        """Reveal the measurement beside the prediction."""
        return Scored(label, self.__measured, predicted, baseline)


@dataclass(frozen=True, slots=True)
class Scored:
    """One prediction beside its measurement; `baseline` is what a naive rule predicts (NaN where there is none)."""

    label: str
    measured: float
    predicted: float
    baseline: float = math.nan

    @property
    def error(self) -> float:
        """Relative error of the prediction, signed."""
        return self.predicted / self.measured - 1

    @property
    def baseline_error(self) -> float:
        return self.baseline / self.measured - 1


P = TypeVar("P")


def calibrate(fit: Callable[[Sequence[FitRow]], P], rows: Iterable[FitRow]) -> P:
    """Call `fit` with rows that may be fitted; raises TypeError for anything else, so a held-out row can't slip in."""
    chosen = tuple(rows)
    for row in chosen:
        if not isinstance(row, FitRow):
            raise TypeError(f"a parameter may be fitted to FitRow only, not to {type(row).__name__}")
    return fit(chosen)


def tables_folder() -> Path | None:
    """The folder of published tables, or None where they are absent."""
    root = Path(os.environ.get("SCALETRACE_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
    folder = root / "numbers"
    return folder if folder.is_dir() else None


def read_table(folder: Path, name: str) -> Table:
    """All rows of one CSV file as text."""
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
