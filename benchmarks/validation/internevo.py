"""Turns InternEvo's throughputs of a 7B model on A100 into predictions of ZeRO-1 over the node and over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from benchmarks.validation.result import Gate, Result, mean_abs, worst
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, Scored, calibrate, read_table
from scaletrace.extrapolate.described.constants import Device, device
from scaletrace.extrapolate.described.jobs import Job, Layout, owned_job
from scaletrace.extrapolate.described.lanes import solve_increasing
from scaletrace.extrapolate.described.models import Model

MODEL = Model("internlm-7b", "llama", 32, 4096, 32, ffn=11008, vocab=103168, seq=2048, tied=False)
TENSORS = 32 * 9 + 3
"""Whole tensors that the optimizer deals out: nine a layer, embedding, norm and head."""

A100_4X100G = device("a100").with_nics(4 * 12.5e9)
"""The source's nodes: 8 A100 and four 100 Gb/s RoCE ports."""


def results(tables: Path) -> list[Result]:
    """The throughput table (both layouts, both shardings), from `scaling_points.csv`."""
    fit, held = [], []
    for row in read_table(tables, "scaling_points.csv"):
        if row["source_id"] != "internevo" or not is_counted(row):
            continue
        row = facts(row)
        local = "within" in row["sharding"]
        smallest = local and int(float(row["gpus"])) == 8
        fixes_loss = local and _group(Config.of(row)) == FIXES_LOSS and int(float(row["gpus"])) == 16
        if smallest or fixes_loss:
            fit.append(FitRow(Config.of(row), float(row["tokens_per_s_per_gpu"])))
        else:
            held.append(HeldOutRow(Config.of(row), float(row["tokens_per_s_per_gpu"])))
    return [_result(fit, held)]


FIXES_LOSS = (1, "none")
"""TP1 without recomputation, node-local, fixes λ with its two smallest sizes."""


def facts(row: dict[str, str]) -> dict[str, str]:
    """The columns of a row, with the micro batches that the source keeps in its notes made one of them."""
    return {**row, "micro_batches": "4" if "micro_num=4" in row["notes"] else "1"}


def is_counted(row: dict[str, str]) -> bool:
    """The throughput table, and of the FLOPS table what it does not repeat: the runs with recomputation."""
    return row["table_or_figure"] == "Throughput Measurement" or row["act_ckpt"].lower() == "true"


def _group(config: Config) -> tuple[int, str]:
    """Runs that share their kernels, and so one calibrated number: tensor parallelism and recomputation."""
    return config.whole("tp", 1), "full" if config.text("act_ckpt").lower() == "true" else "none"


def job_of(config: Config, on: Device) -> Job:
    """The described step of one row; weight 1 is the compute of the whole step."""
    tp = config.whole("tp", 1)
    dp = config.whole("gpus") // tp
    local = "within" in config.text("sharding")
    owners = min(dp, on.gpus_per_node // tp if local else TENSORS)
    layout = Layout(
        dp=dp,
        tp=tp,
        micro_batch=config.whole("mbs"),
        micro_batches=config.whole("micro_batches"),
        recompute=_group(config)[1],
    )
    return owned_job(MODEL, layout, on, owners, local)


def tokens_per_gpu(config: Config) -> float:
    return config.number("gbs_sequences") * config.number("seq_len") / config.number("gpus")


def unit(rows: Sequence[FitRow], on: Device) -> float:
    """Compute seconds of the step, from one measured throughput."""
    row = rows[0]
    return job_of(row.config, on).unit_for(tokens_per_gpu(row.config) / row.measured)


def fit_overlap_loss(rows: Sequence[FitRow], on: Device) -> float:
    """λ of the device from TP1, node-local, 8 and 16 GPUs."""
    small, large = sorted(rows, key=lambda row: row.config.whole("gpus"))

    def step_ratio(value: float) -> float:
        tuned = dataclasses.replace(on, overlap_loss=value)
        step = job_of(large.config, tuned).step_s(unit([small], tuned))
        return step / (tokens_per_gpu(small.config) / small.measured)

    return solve_increasing(step_ratio, small.measured / large.measured, guess=0.3)


def _result(fit: Sequence[FitRow], held: Sequence[HeldOutRow]) -> Result:
    on = A100_4X100G
    smallest = {_group(row.config): row for row in fit if row.config.whole("gpus") == 8}
    units = {group: calibrate(lambda rows: unit(rows, on), [row]) for group, row in smallest.items()}
    pair = [row for row in fit if _group(row.config) == FIXES_LOSS]
    scored = []
    for row in held:
        group = _group(row.config)
        predicted = tokens_per_gpu(row.config) / job_of(row.config, on).step_s(units[group])
        scored.append(row.scored(_label(row.config), predicted, smallest[group].measured))
    errors = [row.error for row in scored]
    naive = f"flat throughput {max(row.baseline_error for row in scored):+.0%}"
    wrong, pairs = _order(scored)
    gates = (
        Gate("internevo", "every point", worst(errors), 9, 5, baseline=naive),
        Gate("internevo", "mean", mean_abs(errors), 3, 2, baseline=naive),
        Gate("internevo", f"wrong order among {pairs} pairs measured more than 3 % apart", wrong, 0, 0, unit="pairs"),
    )
    notes = [f"Whole tensors have owners: {TENSORS} of them, one reduction and one broadcast an owner."]
    if len(pair) == 2:
        found = calibrate(lambda rows: fit_overlap_loss(rows, on), pair)
        notes.append(f"λ found again from TP1 local at 8 and 16: {found:.3f}; constants.py has {on.overlap_loss}.")
    return Result(
        "internevo",
        "InternEvo 7B, A100, 4 × 100 Gb/s a node",
        "tokens/s/GPU",
        tuple(_label(row.config) for row in fit),
        tuple(scored),
        gates,
        tuple(notes),
    )


def _order(scored: Sequence[Scored]) -> tuple[int, int]:
    """Pairs of layouts at one size that are predicted in the wrong order, of those measured more than 3 % apart.

    Runs with recomputation are of another table of the source and not compared with the rest.
    """
    scored = [row for row in scored if not row.label.endswith("recomputed")]
    wrong = pairs = 0
    for one, other in combinations(scored, 2):
        if one.label.split(",")[0] != other.label.split(",")[0]:
            continue
        if abs(one.measured / other.measured - 1) <= 0.03:
            continue
        pairs += 1
        wrong += (one.measured > other.measured) != (one.predicted > other.predicted)
    return wrong, pairs


def _label(config: Config) -> str:
    where = "local" if "within" in config.text("sharding") else "global"
    again = ", recomputed" if _group(config)[1] == "full" else ""
    return f"{config.whole('gpus')} GPUs, TP{config.whole('tp')} {where}{again}"
