"""Turns MLPerf Training logs of GPT-3 175B and Llama 3.1 405B on H100 into predictions from the smallest run alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.validation.result import Gate, Result, line, worst
from benchmarks.validation.rows import Config, FitRow, HeldOutRow, Table, calibrate, read_table
from scaletrace.extrapolate.described.constants import device
from scaletrace.extrapolate.described.jobs import Job, Layout, pipeline_job
from scaletrace.extrapolate.described.models import Model, load_model
from scaletrace.extrapolate.described.spread import jitter_width_s

H100 = device("h100")
CHANNELS = 8
"""The submitted configurations cap the data-parallel communicators at 8 CTAs."""

GPT3 = load_model("gpt3-175b")
LLAMA = dataclasses.replace(load_model("llama3-405b"), vocab=32000)
"""MLPerf trains 405B with a 32,000-token vocabulary."""


GATED_ROUNDS = {"gpt3": "v3.1", "llama31_405b": "v5.0"}
"""The rounds that the gates speak of; other rounds run other software and are reported, each from its own smallest run."""


def results(tables: Path) -> list[Result]:
    """Both models on H100, round by round, from `mlperf_training_steps.csv`; rows of unclear configuration left out."""
    cases = {
        "gpt3": ("mlperf_175b", "MLPerf GPT-3 175B, H100", GPT3, 2.0, (3.0, 2.0)),
        "llama31_405b": ("mlperf_405b", "MLPerf Llama 3.1 405B, H100", LLAMA, 1.0, (5.0, 3.0)),
    }
    rounds: dict[tuple[str, str], Table] = {}
    for row in read_table(tables, "mlperf_training_steps.csv"):
        if is_clear(row) and row["benchmark"] in cases:
            rounds.setdefault((row["benchmark"], row["round"]), []).append(row)
    found = []
    for (benchmark, name), table in sorted(rounds.items()):
        source, title, model, gathered_bytes, bounds = cases[benchmark]
        gated = GATED_ROUNDS[benchmark] == name
        if len({row["gpus"] for row in table}) < 2:
            continue
        if not gated:
            source, title = f"{source}_{name}", f"{title}, round {name}"
        result = _result(source, title, table, model, gathered_bytes, bounds)
        found.append(result if gated else _reported(result))
    return found


def is_clear(row: Mapping[str, str]) -> bool:
    """Whether a row on H100 has a step time and states its layout."""
    stated = row["step_median_s"] and row["vpp"] and row["grad_accum"] and row["config_ambiguous"] != "True"
    return bool(stated) and "H100" in row["accelerator"]


def _reported(result: Result) -> Result:
    """The same result with gates that are only reported."""
    reason = "another round of the same benchmark, with other software than the gated one"
    gates = tuple(dataclasses.replace(gate, reported_only=True, reason=reason) for gate in result.gates)
    return dataclasses.replace(result, gates=gates)


def layout_of(config: Config, gathered_bytes: float) -> Layout:
    """The layout that the submitted script states."""
    tp, pp, cp = config.whole("tp", 1), config.whole("pp", 1), config.whole("cp", 1)
    return Layout(
        dp=config.whole("gpus") // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        chunks=config.whole("vpp", 1),
        micro_batch=config.whole("mbs", 1),
        micro_batches=config.whole("grad_accum", 1),
        gathered_bytes=gathered_bytes,
        fp8_layers=True,
        channels=CHANNELS,
    )


def split(table: Table) -> tuple[list[FitRow], list[HeldOutRow]]:
    """The smallest run (fewest GPUs) is fitted; every other is held out."""
    ordered = sorted(table, key=lambda row: (int(float(row["gpus"])), -float(row["grad_accum"])))
    first, rest = ordered[0], ordered[1:]
    width = float(first["step_p95_s"]) - float(first["step_p05_s"])
    fit = FitRow(Config.of(first), float(first["step_median_s"]), (("jitter_width_s", width),))
    return [fit], [HeldOutRow(Config.of(row), float(row["step_median_s"])) for row in rest]


def _result(
    source: str, title: str, table: Table, model: Model, gathered_bytes: float, bounds: tuple[float, float]
) -> Result:
    fit, held = split(table)

    def job(config: Config) -> Job:
        return pipeline_job(model, layout_of(config, gathered_bytes), H100)

    def unit(rows: Sequence[FitRow]) -> float:
        return job(rows[0].config).unit_for(rows[0].measured)

    unit_s = calibrate(unit, fit)
    base = fit[0]
    scored, micro_batches = [], []
    for row in held:
        micro_batches.append(row.config.number("grad_accum"))
        predicted = job(row.config).step_s(unit_s)
        scored.append(row.scored(_label(row.config), predicted, _bubble_alone(base, row.config)))
    errors = [row.error for row in scored]
    baseline = f"bubble alone {min(row.baseline_error for row in scored):+.1%}"
    gates = [Gate(source, "every other run", worst(errors), *bounds, baseline=baseline)]
    m = [base.config.number("grad_accum"), *micro_batches]
    measured = line(m, [base.measured, *(row.measured for row in scored)])
    predicted_line = line(m, [base.measured, *(row.predicted for row in scored)])
    off = 100 * abs(predicted_line[1] / measured[1] - 1)
    is_gpt3 = model is GPT3
    unexplained = "" if is_gpt3 else "0.18 s at 8,192 GPUs are not explained, as much as that run's jitter is wide"
    gates.append(
        Gate(
            source,
            "intercept of the line over micro batches",
            off,
            15,
            15,
            reason=unexplained,
            reported_only=not is_gpt3,
        )
    )
    gates.append(_jitter_gate(source, base, table, is_gpt3))
    notes = (
        f"One number fitted: a layer's forward, {1e3 * unit_s:.4f} ms.",
        f"Measured line {measured[0]:.5f} m + {measured[1]:.4f} s, predicted {predicted_line[0]:.5f} m + {predicted_line[1]:.4f} s.",
        f"Structural facts: {CHANNELS} NCCL channels on the data-parallel group, bf16 gradients, "
        + f"{'bf16' if gathered_bytes == 2 else 'FP8'} parameter gather, head in bf16.",
    )
    return Result(source, title, "step time, s", (_label(base.config),), tuple(scored), tuple(gates), notes)


def _jitter_gate(source: str, base: FitRow, table: Table, gated: bool) -> Gate:
    """Largest factor between the predicted and the measured width of p05 to p95."""
    held = [
        HeldOutRow(Config.of(row), float(row["step_p95_s"]) - float(row["step_p05_s"]))
        for row in table
        if int(float(row["gpus"])) > base.config.whole("gpus")
    ]
    factors = []
    for row in held:
        width = jitter_width_s(base.evidence("jitter_width_s"), base.config.whole("gpus"), row.config.whole("gpus"))
        shown = row.scored(_label(row.config), width)
        factors.append(max(shown.predicted / shown.measured, shown.measured / shown.predicted))
    reason = "" if gated else "no law from the smallest run: its own width is the second widest of the table"
    return Gate(
        source, "width of the jitter, factor", max(factors), 2, 1.5, unit="×", reason=reason, reported_only=not gated
    )


def _bubble_alone(base: FitRow, config: Config) -> float:
    """The naive rule: time in proportion to m + (p - 1) / v."""

    def slots(of: Config) -> float:
        return of.number("grad_accum") + (of.number("pp") - 1) / of.number("vpp")

    return base.measured * slots(config) / slots(base.config)


def _label(config: Config) -> str:
    return f"{config.whole('gpus')} GPUs, m = {config.whole('grad_accum')}, {config.text('submitter')}"
