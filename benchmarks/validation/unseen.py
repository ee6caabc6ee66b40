"""Turns tables that no gate uses, and that no part of the model was chosen on, into predictions: reported, not gated.

Each family of runs is calibrated on its smallest as elsewhere. The sources print less than the gated ones; what had to be
assumed of a job (data types, virtual stages) stands beside it and was not varied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.validation import mosaic
from benchmarks.validation.result import Gate, Result, mean_abs
from benchmarks.validation.robustness import Family
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, Scored, read_table
from scaletrace.extrapolate.described.constants import Device, device
from scaletrace.extrapolate.described.jobs import Job, Layout, pipeline_job, sharded_job
from scaletrace.extrapolate.described.models import load_model

LLAMA_8B = dataclasses.replace(load_model("llama3-8b"), seq=8192)
LLAMA_405B = load_model("llama3-405b")
MINGPT_175B = load_model("gpt3-175b")
ASSUMED = (
    "torchtitan: FSDP2 gathers bf16, or one byte an element with float8, and reduces in fp32.",
    "Llama 3: 126 layers on 16 stages in eight virtual stages each (one layer a chunk), ZeRO-2 traffic hidden.",
    "minGPT: bf16 gathers and reductions, full checkpointing, 2 Tb/s a node.",
)

Row = Mapping[str, str]


def results(tables: Path) -> list[Result]:
    """All families with at least two sizes, from `scaling_points.csv`; nothing where the sources are absent."""
    points = read_table(tables, "scaling_points.csv")
    families = [*_torchtitan(points), *_llama3(points), *_mingpt(points), *_mosaic_small(points)]
    scored: list[Scored] = []
    fitted = []
    for family in families:
        if len(family.rows) < 2:
            continue
        first = FitRow(*family.rows[0])
        unit = family.unit(first, family.on)
        fitted.append(f"{family.label}, {first.config.whole('gpus')} GPUs")
        for config, step_s in family.rows[1:]:
            held = HeldOutRow(config, step_s)
            naive = first.measured * _share(config) / _share(first.config)
            label = f"{family.label}, {config.whole('gpus')} GPUs"
            scored.append(held.scored(label, family.step_s(config, unit, family.on), naive))
    if not scored:
        return []
    gate = Gate(
        "unseen",
        "mean over tables that no gate uses",
        mean_abs([row.error for row in scored]),
        5,
        3,
        baseline=f"constant throughput a GPU {mean_abs([row.baseline_error for row in scored]):.1f} %",
        reason="no bound was set before these were looked at",
        reported_only=True,
    )
    title = "Tables that no gate uses"
    return [Result("unseen", title, "step time, s", tuple(fitted), tuple(scored), (gate,), ASSUMED)]


def _share(config: Config) -> float:
    """Sequences of a GPU and step, to which constant throughput is in proportion."""
    batch = config.number("gbs_sequences")
    return batch / config.number("gpus") if math.isfinite(batch) else 1.0


def _family(
    source: str,
    label: str,
    on: Device,
    rows: Sequence[Row],
    job_of: Callable[[Config, Device], Job],
    step_s: Callable[[Row], float],
) -> Family:
    ordered = sorted(rows, key=lambda row: float(row["gpus"]))
    runs = tuple((Config.of(row), step_s(row)) for row in ordered)
    return Family(source, f"{source}, {label}", on, runs, job_of, lambda config: 1.0)


def _torchtitan(points: Sequence[Row]) -> list[Family]:
    """Llama 3.1 8B under FSDP2: eager, compiled, and compiled with float8."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in points:
        if row["source_id"] in ("torchtitan", "torchtitan_h200") and row["parallelism"] == "FSDP2":
            kind = "eager" if row["notes"].startswith("eager") else "compiled"
            groups.setdefault((row["source_id"], f"{kind}, {row['precision'].split()[0]}"), []).append(row)

    def job_of(config: Config, on: Device) -> Job:
        gathered = 1 if "float8" in config.text("precision") else 2
        layout = Layout(
            dp=config.whole("gpus"), micro_batch=config.whole("mbs"), gathered_bytes=gathered, gradient_bytes=4
        )
        return sharded_job(LLAMA_8B, layout, on)

    return [
        _family(
            source,
            f"8B {kind}",
            device("h200" if source.endswith("h200") else "h100"),
            rows,
            job_of,
            lambda row: float(row["mbs"]) * LLAMA_8B.seq / float(row["tokens_per_s_per_gpu"]),
        )
        for (source, kind), rows in groups.items()
    ]


def _llama3(points: Sequence[Row]) -> list[Family]:
    """Llama 3 405B at two sizes and one global batch."""
    rows = [row for row in points if row["source_id"] == "llama3_t4" and row["seq_len"].startswith("8192")]

    def job_of(config: Config, on: Device) -> Job:
        dp = config.whole("dp")
        layout = Layout(
            dp=dp,
            tp=config.whole("tp"),
            pp=config.whole("pp"),
            chunks=8,
            micro_batches=config.whole("gbs_sequences") // dp,
        )
        return pipeline_job(LLAMA_405B, layout, on)

    def step_s(row: Row) -> float:
        flop = LLAMA_405B.step_flop(float(row["gbs_sequences"]) * LLAMA_405B.seq)
        return flop / (float(row["gpus"]) * float(row["tflops_per_gpu"]) * 1e12)

    return [_family("Llama 3", "405B", device("h100"), rows, job_of, step_s)]


def _mingpt(points: Sequence[Row]) -> list[Family]:
    """minGPT 175B under FSDP with one sequence a GPU."""
    rows = [row for row in points if row["source_id"] == "fsdp_paper" and row["mbs"] in ("1", "1.0")]

    def job_of(config: Config, on: Device) -> Job:
        layout = Layout(dp=config.whole("gpus"), micro_batch=config.whole("mbs"), recompute="full")
        return sharded_job(MINGPT_175B, layout, on)

    def step_s(row: Row) -> float:
        return MINGPT_175B.step_flop(float(row["mbs"]) * MINGPT_175B.seq) / (float(row["tflops_per_gpu"]) * 1e12)

    return [_family("FSDP paper", "minGPT 175B", device("a100").with_nics(250e9), rows, job_of, step_s)]


def _mosaic_small(points: Sequence[Row]) -> list[Family]:
    """Mosaic's H100 runs below the sizes that the gate counts."""
    table = mosaic.counted([dict(row) for row in points])
    small = [row for row in table if float(row["gpus"]) < 128]
    return [
        dataclasses.replace(
            _family(
                "Mosaic H100",
                name,
                device("h100"),
                rows,
                mosaic.job_of,
                lambda row: mosaic.tokens(Config.of(row)) / float(row["tokens_per_s_per_gpu"]),
            ),
            work=mosaic.tokens,
        )
        for name, rows in mosaic.by_model(small, "h100_80gb", 16).items()
    ]
