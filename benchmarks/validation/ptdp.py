"""Turns PTD-P's table 2 (3D parallelism and ZeRO-3 on A100) into predictions from each model's smallest run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.validation.result import Gate, Result, worst
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, Scored, Table, calibrate, read_table
from scaletrace.extrapolate.described.constants import Device, device
from scaletrace.extrapolate.described.jobs import Job, Layout, pipeline_job, sharded_job
from scaletrace.extrapolate.described.models import load_model

A100 = device("a100")
ONE_NIC_BPS = A100.nic_share * 25e9
"""Structural fact of the ZeRO-3 runs: a ring with one channel, so one 200 Gb/s NIC a node. Taken as input: the 384- and
640-GPU rows are compute-bound and carry no trace of it, and no row is fitted to it."""

MODELS = {"GPT 174.6B": load_model("gpt3-175b"), "GPT 529.6B": load_model("megatron-530b")}


def results(tables: Path) -> list[Result]:
    """PTD-P rows and ZeRO-3 rows, from `scaling_points.csv`."""
    table = [
        row
        for row in read_table(tables, "scaling_points.csv")
        if row["source_id"] == "ptdp_t2" and row["model"] in MODELS
    ]
    three_d = [row for row in table if row["parallelism"] != "ZeRO-3"]
    zero = [row for row in table if row["parallelism"] == "ZeRO-3"]
    return [_three_d(three_d), _zero3(zero)]


def pipeline_of(config: Config, on: Device = A100) -> Job:
    """Megatron's 2021 step: full recomputation, gradients all-reduced in fp16 after the flush, no sharded optimizer."""
    layout = Layout(
        dp=config.whole("dp"),
        tp=config.whole("tp"),
        pp=config.whole("pp"),
        micro_batch=config.whole("mbs"),
        micro_batches=config.whole("gbs_sequences") // (config.whole("dp") * config.whole("mbs")),
        recompute="full",
        overlapped=False,
        sharded_optimizer=False,
    )
    return pipeline_job(MODELS[config.text("model")], layout, on)


def zero3_of(config: Config) -> Job:
    """DeepSpeed's ZeRO-3 step: fp32 gradient reduction, one NIC a node."""
    layout = Layout(
        dp=config.whole("gpus"),
        micro_batch=config.whole("mbs"),
        recompute="full",
        gradient_bytes=4,
        nic_cap_Bps=ONE_NIC_BPS,
    )
    return sharded_job(MODELS[config.text("model")], layout, A100)


def split(table: Table) -> tuple[dict[str, FitRow], list[HeldOutRow]]:
    """Each model's smallest run is fitted; what is measured is TFLOP/s a GPU, as printed."""
    fit, held = {}, []
    for name in MODELS:
        own = sorted((row for row in table if row["model"] == name), key=lambda row: int(float(row["gpus"])))
        if own:
            fit[name] = FitRow(Config.of(own[0]), float(own[0]["tflops_per_gpu"]))
            held += [HeldOutRow(Config.of(row), float(row["tflops_per_gpu"])) for row in own[1:]]
    return fit, held


def flop_per_gpu(config: Config) -> float:
    """FLOP that the paper counts for one step and GPU: 96 B s l h² (1 + s/6h + V/16lh), recomputation included."""
    model = MODELS[config.text("model")]
    h, layers, s = model.hidden, model.layers, model.seq
    tokens = config.number("gbs_sequences") * s
    per_token = 96.0 * layers * h * h * (1 + s / (6 * h) + model.vocab / (16 * layers * h))
    return tokens * per_token / config.number("gpus")


def _predict(
    fit: dict[str, FitRow],
    held: Sequence[HeldOutRow],
    job_of: Callable[[Config], Job],
    work: Callable[[Config], float],
    naive: Callable[[FitRow, Config], float],
) -> list[Scored]:
    """`work` is the compute of a step in units of the calibrated weight (1 where the job counts its own)."""

    def unit(rows: Sequence[FitRow]) -> float:
        config = rows[0].config
        return job_of(config).unit_for(flop_per_gpu(config) / (rows[0].measured * 1e12)) / work(config)

    units = {name: calibrate(unit, [row]) for name, row in fit.items()}
    scored = []
    for row in held:
        name = row.config.text("model")
        step_s = job_of(row.config).step_s(units[name] * work(row.config))
        label = f"{name}, {row.config.whole('gpus')} GPUs"
        scored.append(row.scored(label, flop_per_gpu(row.config) / step_s / 1e12, naive(fit[name], row.config)))
    return scored


def _three_d(table: Table) -> Result:
    def bubble_alone(base: FitRow, config: Config) -> float:
        def efficiency(of: Config) -> float:
            m = of.number("gbs_sequences") / of.number("dp")
            return m / (m + of.number("pp") - 1)

        return base.measured * efficiency(config) / efficiency(base.config)

    fit, held = split(table)
    scored = _predict(fit, held, pipeline_of, lambda config: 1.0, bubble_alone)
    baseline = f"bubble alone {worst([row.baseline_error for row in scored]):.1f} %"
    gate = Gate("ptdp", "PTD-P rows", worst([row.error for row in scored]), 2, 1.5, baseline=baseline)
    return Result("ptdp", "PTD-P, A100, 3D parallelism", "TFLOP/s/GPU", _labels(fit), tuple(scored), (gate,))


def _zero3(table: Table) -> Result:
    fit, held = split(table)

    def tokens(config: Config) -> float:
        return config.number("gbs_sequences") / config.number("gpus")

    scored = _predict(fit, held, zero3_of, tokens, lambda base, config: base.measured)
    baseline = f"constant TFLOP/s {max(row.baseline_error for row in scored):+.0%}"
    gate = Gate(
        "ptdp_zero3",
        "ZeRO-3 rows, channel count given",
        worst([row.error for row in scored]),
        15,
        10,
        baseline=baseline,
    )
    drops = [row.predicted / fit[row.label.split(",")[0]].measured for row in scored]
    collapse = Gate(
        "ptdp_zero3", "collapse shown: highest predicted share of the smallest run's rate", 100 * max(drops), 80, 75
    )
    notes = (
        "Given, not fitted: one 200 Gb/s NIC a node. With all eight, the prediction keeps the smallest run's rate.",
    )
    return Result(
        "ptdp_zero3", "PTD-P table 2, ZeRO-3, A100", "TFLOP/s/GPU", _labels(fit), tuple(scored), (gate, collapse), notes
    )


def _labels(fit: dict[str, FitRow]) -> tuple[str, ...]:
    return tuple(f"{name}, {row.config.whole('gpus')} GPUs" for name, row in fit.items())
