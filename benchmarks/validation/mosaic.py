"""Turns MosaicML's FSDP throughputs on H100 and A100 into losses predicted from each model's smallest run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks.validation.result import Gate, Result, worst
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, Scored, Table, calibrate, read_table
from scaletrace.extrapolate.described.constants import Device, device
from scaletrace.extrapolate.described.jobs import Job, Layout, sharded_job
from scaletrace.extrapolate.described.lanes import solve_increasing
from scaletrace.extrapolate.described.models import Model

VOCAB = 50368
SAME_MICRO_BATCH = 1.3
"""Rows whose micro batch differs from the fitted one by more than this factor run other kernels and are left out."""


def results(tables: Path) -> list[Result]:
    """H100 from 128 GPUs up and A100-40 from 16 GPUs up, from `scaling_points.csv`."""
    table = counted(read_table(tables, "scaling_points.csv"))
    return [
        _result(f"mosaic_{name.split('-')[0]}", title, table, accelerator, device(name), smallest)
        for title, accelerator, name, smallest in DEVICES
    ]


DEVICES = (("Mosaic FSDP, H100", "h100_80gb", "h100", 128), ("Mosaic FSDP, A100-40", "a100_40gb", "a100-40", 16))
"""Title, name in the source, name in constants.py, and smallest number of GPUs that counts."""


def counted(table: Table) -> Table:
    """The rows of this source that are comparable: sequences of 2,048 without gradient accumulation."""
    return [
        row
        for row in table
        if row["source_id"] == "mosaic" and row["seq_len"] in ("2048", "2048.0") and "grad_accum=1 " in row["notes"]
    ]


def by_model(table: Table, accelerator: str, smallest: int) -> dict[str, Table]:
    """Rows of each model on one device, smallest run first, without those of another micro batch than it."""
    rows = [facts(row) for row in table if row["accelerator"] == accelerator and int(float(row["gpus"])) >= smallest]
    out: dict[str, Table] = {}
    for row in sorted(rows, key=lambda row: int(float(row["gpus"]))):
        own = out.setdefault(row["model"], [])
        if not own or same_micro_batch(row, own[0]):
            own.append(row)
    return out


def same_micro_batch(row: dict[str, str], first: dict[str, str]) -> bool:
    factor = float(row["mbs"]) / float(first["mbs"])
    return 1 / SAME_MICRO_BATCH <= factor <= SAME_MICRO_BATCH


def facts(row: dict[str, str]) -> dict[str, str]:
    """The columns of a row, with the two settings that the source keeps in its notes made columns of their own."""
    return {**row, "pure": str("mp_mode=PURE" in row["notes"])}


def job_of(config: Config, on: Device) -> Job:
    """The described step of one row; weight 1 is the compute of the whole step."""
    model = Model(
        config.text("model"),
        "gpt",
        config.whole("layers"),
        config.whole("hidden"),
        config.whole("heads"),
        vocab=VOCAB,
        seq=config.whole("seq_len"),
    )
    layout = Layout(
        dp=config.whole("gpus"),
        micro_batch=config.whole("mbs"),
        recompute="full" if config.text("act_ckpt").lower() == "true" else "none",
        gradient_bytes=2 if config.text("pure") == "True" else 4,
    )
    regather = config.text("sharding") == "FULL_SHARD"
    return sharded_job(model, layout, on, regather, config.number("params_B") * 1e9)


def tokens(config: Config) -> float:
    return config.number("mbs") * config.number("seq_len")


def unit_per_token(rows: Sequence[FitRow], on: Device) -> float:
    """Compute seconds a token, from one measured throughput."""
    row = rows[0]
    return job_of(row.config, on).unit_for(tokens(row.config) / row.measured) / tokens(row.config)


def rate(config: Config, on: Device, token_s: float) -> float:
    """Predicted tokens a second and GPU."""
    return tokens(config) / job_of(config, on).step_s(token_s * tokens(config))


def fit_overlap_loss(rows: Sequence[FitRow], on: Device) -> float:
    """λ of a device from two runs of one model at two sizes: the value in constants.py, found again."""
    small, large = sorted(rows, key=lambda row: row.config.whole("gpus"))

    def loss(value: float) -> float:
        tuned = dataclasses.replace(on, overlap_loss=value)
        return small.measured / rate(large.config, tuned, unit_per_token([small], tuned))

    return solve_increasing(loss, small.measured / large.measured, guess=0.5)


def split(table: Table, accelerator: str, smallest: int) -> tuple[list[FitRow], list[HeldOutRow], int]:
    """Each model's smallest run is fitted, MPT-1B at 256 H100 fixes λ, the rest is held out; and how many were left out."""
    fit, held, left_out = [], [], 0
    rows = [facts(row) for row in table if row["accelerator"] == accelerator and int(float(row["gpus"])) >= smallest]
    for name in sorted({row["model"] for row in rows}):
        own = sorted((row for row in rows if row["model"] == name), key=lambda row: int(float(row["gpus"])))
        first = own[0]
        if len(own) < 2:
            left_out += len(own)
            continue
        fit.append(FitRow(Config.of(first), float(first["tokens_per_s_per_gpu"])))
        for row in own[1:]:
            if not same_micro_batch(row, first):
                left_out += 1
            elif name == "MPT-1b" and accelerator == "h100_80gb" and int(float(row["gpus"])) == 256:
                fit.append(FitRow(Config.of(row), float(row["tokens_per_s_per_gpu"])))
            else:
                held.append(HeldOutRow(Config.of(row), float(row["tokens_per_s_per_gpu"])))
    return fit, held, left_out


def _result(source: str, title: str, table: Table, accelerator: str, on: Device, smallest: int) -> Result:
    fit, held, left_out = split(table, accelerator, smallest)
    base: dict[str, FitRow] = {}
    for known in fit:
        name = known.config.text("model")
        base[name] = min(known, base.get(name, known), key=lambda one: one.config.whole("gpus"))
    per_token = {name: calibrate(lambda rows: unit_per_token(rows, on), [row]) for name, row in base.items()}
    scored = []
    for row in held:
        name = row.config.text("model")
        predicted = rate(row.config, on, per_token[name])
        scored.append(row.scored(f"{name}, {row.config.whole('gpus')} GPUs", predicted, base[name].measured))
    points = {row.label: _loss_points(row, base[row.label.split(",")[0]].measured) for row in scored}
    outliers = _outliers(scored, base)
    kept = {label: off for label, off in points.items() if label not in outliers}
    naive = max(abs(row.measured / base[row.label.split(",")[0]].measured - 1) for row in scored if row.label in kept)
    baseline = f"no loss at all: up to {100 * naive:.1f} points"
    gates = []
    if accelerator == "h100_80gb":
        small = [off for label, off in kept.items() if label.startswith(("MPT-1b", "MPT-7b"))]
        gates.append(Gate(source, "loss, every model", worst(list(kept.values())), 3, 2, "points", baseline))
        gates.append(Gate(source, "loss, 1B and 7B", worst(small), 2, 2, "points", baseline))
    else:
        gates.append(Gate(source, "loss from 16 GPUs", worst(list(kept.values())), 4, 2, "points", baseline))
    notes = [
        f"{left_out} rows left out: micro batch more than {SAME_MICRO_BATCH} × off the fitted run's, or one size only."
    ]
    if accelerator == "h100_80gb":
        pair = [row for row in fit if row.config.text("model") == "MPT-1b"]
        if len(pair) == 2:
            found = calibrate(lambda rows: fit_overlap_loss(rows, on), pair)
            notes.append(f"λ found again from MPT-1B at 128 and 256: {found:.3f}; constants.py has {on.overlap_loss}.")
    notes += [
        f"Outlier of the source, not gated: {label} (measured {points[label] * 100:+.1f} points off)."
        for label in outliers
    ]
    fitted = tuple(f"{row.config.text('model')}, {row.config.whole('gpus')} GPUs" for row in fit)
    return Result(source, title, "tokens/s/GPU", fitted, tuple(scored), tuple(gates), tuple(notes))


def _loss_points(row: Scored, base: float) -> float:
    """Predicted minus measured loss, as a fraction of the smallest run's throughput."""
    return (row.predicted - row.measured) / base


def _outliers(scored: Sequence[Scored], base: dict[str, FitRow]) -> list[str]:
    """Rows that lie more than 10 % off both measured neighbours of the same model while those agree within 3 %."""
    found = []
    for name, first in base.items():
        own = [row for row in scored if row.label.startswith(f"{name},")]
        series = [first.measured, *(row.measured for row in own)]
        for i, row in enumerate(own):
            if i + 2 >= len(series):
                continue
            before, here, after = series[i], series[i + 1], series[i + 2]
            if abs(after / before - 1) < 0.03 and min(abs(here / before - 1), abs(here / after - 1)) > 0.10:
                found.append(row.label)
    return found
