"""Turns vTrain's and Korthikanti's Megatron runs on A100 into uncalibrated predictions from one set of kernel costs.

The costs (constants.MEGATRON_A100) are fitted once, on vTrain's 2-GPU runs without a pipeline and on Korthikanti's 22B
and 175B; all other rows of both sources are predictions of step time without any number of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.validation.result import Gate, Result, mean_abs, rank_correlation, worst
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, Scored, calibrate, read_table
from benchmarks.validation.simplex import FloatArray, minimise
from scaletrace.extrapolate.described.constants import MEGATRON_A100, KernelCosts, device
from scaletrace.extrapolate.described.jobs import Job, Layout, pipeline_job
from scaletrace.extrapolate.described.models import Model

A100 = device("a100")
VOCAB = 51200
SINGLE = {
    "gpus": "# GPUs",
    "gbs_sequences": "global batch",
    "mbs": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "seq_len": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
LARGEST_FITTED = 200
"""Korthikanti's models up to this many billion parameters are fitted."""


def results(tables: Path) -> list[Result]:
    """vTrain on one node and on many, and Korthikanti."""
    single, many, korthikanti = vtrain_single(tables), vtrain_many(tables), korthikanti_rows(tables)
    fit = [*single[0], *korthikanti[0]]
    found = f"Kernel costs fitted on {len(fit)} rows; tests refit them and compare with constants.py."
    return [
        _vtrain("vtrain_single", "vTrain, one A100 node", single[1], len(single[0]), found),
        _vtrain("vtrain_many", "vTrain, 64 to 512 A100", many, 0, found),
        _korthikanti(*korthikanti),
    ]


def vtrain_single(tables: Path) -> tuple[list[FitRow], list[HeldOutRow]]:
    """vTrain's single-node sweep: 2-GPU rows without a pipeline are fitted, all others held out."""
    fit, held = [], []
    for row in read_table(tables, "vtrain_single_node.csv"):
        named = {ours: row[theirs] for ours, theirs in SINGLE.items()} | {"act_ckpt": "full"}
        seconds = float(row["iteration time (ms)"]) / 1e3
        if (int(float(named["gpus"])), int(float(named["pp"]))) == (2, 1):
            fit.append(FitRow(Config.of(named), seconds))
        else:
            held.append(HeldOutRow(Config.of(named), seconds))
    return fit, held


def vtrain_many(tables: Path) -> list[HeldOutRow]:
    """vTrain's multi-node rows, all held out."""
    rows = [row for row in read_table(tables, "scaling_points.csv") if row["source_id"] == "vtrain_multi"]
    return [HeldOutRow(Config.of(row | {"act_ckpt": "full"}), float(row["step_time_s"])) for row in rows]


def korthikanti_rows(tables: Path) -> tuple[list[FitRow], list[HeldOutRow]]:
    """Korthikanti's table 5: models up to 175B are fitted, 530B and 1T held out."""
    fit, held = [], []
    for row in read_table(tables, "scaling_points.csv"):
        if row["source_id"] != "korthikanti_t5":
            continue
        if float(row["params_B"]) <= LARGEST_FITTED:
            fit.append(FitRow(Config.of(row), float(row["step_time_s"])))
        else:
            held.append(HeldOutRow(Config.of(row), float(row["step_time_s"])))
    return fit, held


def job_of(config: Config, costs: KernelCosts = MEGATRON_A100) -> Job:
    """The described step of one row, its weights in modelled seconds."""
    selective = "selective" in config.text("act_ckpt")
    model = Model(
        config.text("model") or "vtrain",
        "gpt",
        config.whole("layers"),
        config.whole("hidden"),
        config.whole("heads"),
        vocab=VOCAB,
        seq=config.whole("seq_len"),
    )
    dp, mbs = config.whole("dp", 1), config.whole("mbs", 1)
    layout = Layout(
        dp=dp,
        tp=config.whole("tp", 1),
        pp=config.whole("pp", 1),
        chunks=config.whole("vpp", 1),
        micro_batch=mbs,
        micro_batches=max(1, config.whole("gbs_sequences") // (dp * mbs)),
        recompute="selective" if selective else "full",
        overlapped=False,
        sharded_optimizer=False,
    )
    return pipeline_job(model, layout, A100, dataclasses.replace(costs, sequence_parallel=selective))


def fit_costs(rows: Sequence[FitRow], rounds: int = 300) -> KernelCosts:
    """Kernel costs that fit both sources with equal weight (mean squared log error of each)."""
    vtrain = [row for row in rows if not row.config.text("params_B")]
    korthikanti = [row for row in rows if row.config.text("params_B")]

    def costs(point: FloatArray) -> KernelCosts:
        gemm, score, hidden, logit, launch, host, host_tp = (float(value) for value in np.exp(point))
        return KernelCosts(gemm, score, hidden, logit, launch, host, host_tp)

    def error(rows: Sequence[FitRow], point: FloatArray) -> float:
        steps = [job_of(row.config, costs(point)).step_s(1.0) for row in rows]
        return float(np.mean(np.log([step / row.measured for step, row in zip(steps, rows, strict=True)]) ** 2))

    def total(point: FloatArray) -> float:
        return error(vtrain, point) + error(korthikanti, point)

    start = np.log([0.8, 40.0, 50.0, 50.0, 1e-5, 1e-3, 1e-4])
    return costs(minimise(total, start, rounds=rounds))


def refit(tables: Path, rounds: int = 300) -> KernelCosts:
    """The constants of constants.py, found again from the rows that may be fitted."""
    return calibrate(lambda rows: fit_costs(rows, rounds), [*vtrain_single(tables)[0], *korthikanti_rows(tables)[0]])


def _score(held: Sequence[HeldOutRow]) -> list[Scored]:
    scored = []
    for row in held:
        config = row.config
        naive = _one_mfu(config)
        label = (
            f"{config.text('model') or 'h' + config.text('hidden')} L{config.whole('layers')} "
            f"TP{config.whole('tp')} DP{config.whole('dp')} PP{config.whole('pp')} mbs {config.whole('mbs')}"
        )
        scored.append(row.scored(label, job_of(config).step_s(1.0), naive))
    return scored


def _one_mfu(config: Config) -> float:
    """The naive rule: FLOP with recomputation at 80 % of peak, spread over all GPUs, and the bubble."""
    h, layers, s = config.number("hidden"), config.number("layers"), config.number("seq_len")
    flop = 8 * config.number("gbs_sequences") * s * (12 * layers * h * h + VOCAB * h)
    m = config.number("gbs_sequences") / config.number("dp") / config.number("mbs")
    bubble = 1 + (config.number("pp") - 1) / m
    return flop / (config.number("gpus") * 0.8 * A100.bf16_flop_s) * bubble


def _vtrain(source: str, title: str, held: Sequence[HeldOutRow], fitted: int, note: str) -> Result:
    scored = _score(held)
    errors = [row.error for row in scored]
    own = "its own model 8.37 %" if source == "vtrain_single" else "its own model 14.73 %"
    naive = f"80 % of peak and the bubble {mean_abs([row.baseline_error for row in scored]):.0f} %; {own}"
    correlation = rank_correlation([row.measured for row in scored], [row.predicted for row in scored])
    gates = (
        Gate(source, "mean absolute error", mean_abs(errors), 12, 8, baseline=naive),
        Gate(source, "rank correlation", correlation, 0.95, 0.98, unit="", at_least=True),
    )
    rows = (f"{fitted} rows with 2 GPUs and no pipeline",) if fitted else ()
    notes = (note, f"Worst row {worst(errors):.0f} % off, mean signed {100 * float(np.mean(errors)):+.1f} %.")
    return Result(source, title, "step time, s", rows, tuple(scored), gates, notes)


def _korthikanti(fit: Sequence[FitRow], held: Sequence[HeldOutRow]) -> Result:
    scored = []
    for row in held:
        label = f"{row.config.text('model')}, {row.config.text('act_ckpt')}"
        scored.append(row.scored(label, job_of(row.config).step_s(1.0), _one_rate(fit, row.config)))
    naive = f"one rate from 175B {worst([row.baseline_error for row in scored]):.0f} %"
    gate = Gate("korthikanti", "530B and 1T", worst([row.error for row in scored]), 5, 3, baseline=naive)
    fitted = tuple(f"{row.config.text('model')}, {row.config.text('act_ckpt')}" for row in fit)
    notes = ("The same kernel costs as vTrain's: no constant of this table's own.",)
    title = "Korthikanti et al., A100, TP8"
    return Result("korthikanti", title, "step time, s", fitted, tuple(scored), (gate,), notes)


def _one_rate(fit: Sequence[FitRow], config: Config) -> float:
    """The naive rule: parameters × tokens a GPU at the rate of the largest fitted run with the same recomputation."""
    same = [row for row in fit if row.config.text("act_ckpt") == config.text("act_ckpt")]
    base = max(same, key=lambda row: row.config.number("params_B"))

    def work(of: Config) -> float:
        return of.number("params_B") * of.number("gbs_sequences") / of.number("gpus")

    return base.measured * work(config) / work(base.config)
