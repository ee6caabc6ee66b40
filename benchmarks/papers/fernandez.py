"""Turns the questions of Fernandez et al. (arXiv 2411.13055) into tables, plots and a page: docs/papers/fernandez.md.

python -P benchmarks/papers/fernandez.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.common import environment, table
from benchmarks.validation.svg import plot
from scaletrace.extrapolate.described.constants import Device, costs_on, device
from scaletrace.extrapolate.described.jobs import Job, Layout, pipeline_job, sharded_job
from scaletrace.extrapolate.described.kernels import head_s, layer_s
from scaletrace.extrapolate.described.models import Model, load_model
from scaletrace.extrapolate.described.spread import straggle
from scaletrace.extrapolate.energy import PowerModel

SEQUENCES = 2
"""Sequences a GPU and step in weak scaling (effective local batch 2, as the paper is remembered)."""

PUBLISHED_MFU = 0.4077
PUBLISHED_LOSS = -0.3722
PUBLISHED_POWER = -0.0587
BASE_GPUS, LARGE_GPUS = 128, 2048
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BASES = (0.40, PUBLISHED_MFU, 0.45, 0.50)


@dataclass(frozen=True, slots=True)
class Run:
    """One configuration: tokens a second and GPU, MFU, and how busy the GPU is with kernels and with collectives."""

    tokens_per_s: float
    mfu: float
    compute_rate: float
    communication_share: float


def fsdp(model: Model, on: Device, gpus: int, tp: int = 1, sequences: float = SEQUENCES) -> Job:
    """FSDP over gpus / tp ranks with bf16 reduction, `sequences` a GPU; weight 1 is the compute of one GPU's step."""
    layout = Layout(dp=gpus // tp, tp=tp, micro_batch=max(1, round(sequences * tp)), gradient_bytes=2)
    return sharded_job(model, layout, on)


@lru_cache(maxsize=256)
def compute_s(model: Model, on: Device, base_mfu: float) -> float:
    """Compute seconds of a GPU's step that give `base_mfu` under FSDP on 128 GPUs."""
    return fsdp(model, on, BASE_GPUS).unit_for(model.step_flop(SEQUENCES * model.seq) / (base_mfu * on.bf16_flop_s))


def run(job: Job, model: Model, unit_s: float, tokens: float) -> Run:
    """Time one job of which each GPU handles `tokens`."""
    slow = unit_s * straggle(job.device.spread, job.world)
    times = job.times(slow)
    step_s = times.makespan_s
    lanes = job.program.lane_ptr
    busy = float((times.end_s - times.start_s)[lanes[1] : lanes[2]].sum())
    weight = float(job.program.weight[lanes[0] : lanes[1]].sum())
    mfu = model.step_flop(tokens) / step_s / job.device.bf16_flop_s
    return Run(tokens / step_s, mfu, min(1.0, slow * weight / step_s), min(1.0, busy / step_s))


def weak(model: Model, on: Device, base_mfu: float, gpus: int, tp: int = 1) -> Run:
    """Weak scaling under FSDP with tensor parallelism `tp`, calibrated to `base_mfu` at 128 GPUs without it."""
    tokens = SEQUENCES * model.seq
    return run(fsdp(model, on, gpus, tp), model, compute_s(model, on, base_mfu), tokens)


def loss(model: Model, on: Device, base_mfu: float) -> float:
    """Change in throughput a GPU from 128 to 2,048."""
    return weak(model, on, base_mfu, LARGE_GPUS).tokens_per_s / weak(model, on, base_mfu, BASE_GPUS).tokens_per_s - 1


def with_stages(model: Model, on: Device, base_mfu: float, gpus: int, pp: int) -> Run:
    """Pipeline of `pp` stages, sharded optimizer, one sequence a micro batch, the same tokens a GPU."""
    layout = Layout(dp=gpus // pp, pp=pp, micro_batches=SEQUENCES * pp)
    layer_s_each = compute_s(model, on, base_mfu) / (SEQUENCES * 3 * (model.layers + model.head_in_layers))
    job = pipeline_job(model, layout, on)
    return run(job, model, layer_s_each, SEQUENCES * model.seq)


def modelled_mfu(model: Model, on: Device, gpus: int) -> float:
    """MFU without any calibration: the device's kernel costs (constants.py) under FSDP."""
    costs = costs_on(on)
    layer, head = layer_s(model, on, costs, SEQUENCES), head_s(model, on, costs, SEQUENCES)
    unit_s = model.layers * (layer.forward_s + layer.backward_s) + head.forward_s + head.backward_s
    return run(fsdp(model, on, gpus), model, unit_s, SEQUENCES * model.seq).mfu


def strong(model: Model, on: Device, base_mfu: float, gpus: int, batch: int) -> Run:
    """A fixed global batch of sequences; below one sequence a GPU the batch is cut by context."""
    share = batch / gpus
    unit_s = compute_s(model, on, base_mfu) * share / SEQUENCES
    return run(fsdp(model, on, gpus, sequences=max(1.0, share)), model, unit_s, share * model.seq)


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _weak_table(model: Model, on: Device) -> tuple[str, str]:
    rows, curves = [], {}
    for base in BASES:
        start = weak(model, on, base, BASE_GPUS).tokens_per_s
        points = [(gpus, weak(model, on, base, gpus)) for gpus in SCALES]
        rows.append([f"{base:.2%}", *(_percent(point.tokens_per_s / start - 1) for _, point in points)])
        curves[f"base MFU {base:.1%}"] = [(float(gpus), point.tokens_per_s) for gpus, point in points]
    text = table(["base MFU at 128", *map(str, SCALES)], rows)
    return text, plot("Llama-2 7B, FSDP, H100, weak scaling", "GPUs", "tokens/s a GPU", curves, log_x=True)


def _degree_table(model: Model, on: Device, base: float) -> tuple[str, str]:
    rows, curves = [], {}
    for gpus in SCALES[1:]:
        plain = weak(model, on, base, gpus).tokens_per_s
        tensor = [weak(model, on, base, gpus, tp).tokens_per_s / plain - 1 for tp in (2, 4, 8, 16)]
        stages = [with_stages(model, on, base, gpus, pp).tokens_per_s / plain - 1 for pp in (2, 4, 8, 16)]
        rows.append([gpus, *map(_percent, tensor), *map(_percent, stages)])
        if gpus >= BASE_GPUS:
            curves[f"{gpus} GPUs"] = [(1.0, 0.0), *zip((2.0, 4.0, 8.0, 16.0), (100 * t for t in tensor), strict=True)]
    heads = ["GPUs", "TP2", "TP4", "TP8", "TP16", "PP2", "PP4", "PP8", "PP16"]
    picture = plot(
        "Tensor parallelism against plain FSDP", "tensor-parallel degree", "tokens/s, % over FSDP", curves, log_x=True
    )
    return table(heads, rows), picture


def _size_table(on: Device) -> str:
    rows = []
    for name in ("llama2-1b", "llama2-7b", "llama2-13b", "llama2-70b"):
        model = load_model(name)
        points = [weak(model, on, PUBLISHED_MFU, gpus) for gpus in (128, 512, 2048)]
        cells = [f"{point.tokens_per_s:,.0f} ({point.mfu:.1%})" for point in points]
        rows.append([name, *cells, _percent(points[-1].tokens_per_s / points[0].tokens_per_s - 1)])
    return table(["model", "128: tokens/s (MFU)", "512", "2,048", "128 → 2,048"], rows)


def _device_table(model: Model) -> str:
    rows = []
    for name in ("v100", "a100", "h100"):
        on = device(name)
        rows.append([on.name, *(f"{modelled_mfu(model, on, gpus):.1%}" for gpus in (8, 128, 512, 2048))])
    return table(["device", "8", "128", "512", "2,048"], rows)


def _context_table(model: Model, on: Device) -> str:
    costs = costs_on(on)
    rows = []
    for seq in (1024, 2048, 4096, 8192, 16384, 32768):
        long = replace(model, seq=seq)
        sequences = max(1, SEQUENCES * model.seq // seq)
        layer, head = layer_s(long, on, costs, sequences), head_s(long, on, costs, sequences)
        unit_s = long.layers * (layer.forward_s + layer.backward_s) + head.forward_s + head.backward_s
        cells = []
        for gpus in (128, 2048):
            point = run(fsdp(long, on, gpus, sequences=sequences), long, unit_s, sequences * seq)
            cells.append(f"{point.tokens_per_s:,.0f} ({point.mfu:.1%})")
        rows.append([seq, sequences, *cells])
    return table(["context", "sequences a GPU", "128: tokens/s (MFU)", "2,048"], rows)


def _power_table(model: Model, on: Device, base: float) -> tuple[str, float]:
    power = PowerModel()
    rows, drawn = [], []
    for gpus in SCALES:
        point = weak(model, on, base, gpus)
        watts = power.power_W(on.power_W, point.compute_rate, point.communication_share)
        drawn.append(watts)
        rows.append([gpus, f"{point.tokens_per_s:,.0f}", f"{watts:.0f}", f"{point.tokens_per_s / watts:.1f}"])
    fall = drawn[SCALES.index(LARGE_GPUS)] / drawn[SCALES.index(BASE_GPUS)] - 1
    return table(["GPUs", "tokens/s a GPU", "W a GPU", "tokens a joule"], rows), fall


def claims(model: Model, on: Device) -> list[tuple[str, str, str]]:
    """(headline claim, how it is known, what this project says) for the page."""
    losses = [loss(model, on, base) for base in BASES]
    _, fall = _power_table(model, on, PUBLISHED_MFU)
    at = {tp: [weak(model, on, PUBLISHED_MFU, g, tp).tokens_per_s / weak(model, on, PUBLISHED_MFU, g).tokens_per_s - 1
               for g in (BASE_GPUS, LARGE_GPUS)] for tp in (2, 4)}  # fmt: skip
    a100, h100 = modelled_mfu(model, device("a100"), BASE_GPUS), modelled_mfu(model, on, BASE_GPUS)
    share = [weak(model, on, PUBLISHED_MFU, gpus).communication_share for gpus in (128, 2048)]
    weakest = strong(model, on, PUBLISHED_MFU, 256, 32).mfu
    return [
        (
            "throughput a GPU -37.22 % from 128 to 2,048 H100",
            "stated in a summary",
            f"{_percent(min(losses))} to {_percent(max(losses))} for a base MFU of 40 to 50 %; {_percent(losses[1])} at 40.77 %",
        ),
        ("power a GPU -5.87 %", "stated in a summary", f"{_percent(fall)} (the power model's two shares are fitted to this)"),
        ("MFU 59.67 % on A100, 40.77 % on H100", "stated in a summary", f"{a100:.1%} and {h100:.1%}, modelled, uncalibrated"),
        (
            "TP of degree 2 to 4 becomes preferable at scale",
            "stated in a summary",
            f"TP2 {_percent(at[2][0])} at 128, {_percent(at[2][1])} at 2,048; TP4 {_percent(at[4][0])}, {_percent(at[4][1])}",
        ),
        (
            "beyond about 128 H100 FSDP is communication bound",
            "stated in a post",
            f"a collective is resident {share[0]:.0%} of the step at 128 and {share[1]:.0%} at 2,048",
        ),
        (
            "more GPUs at a fixed batch only marginally improve throughput",
            "quoted in reviews",
            f"batch 32: MFU {strong(model, on, PUBLISHED_MFU, 16, 32).mfu:.1%} on 2 nodes, {weakest:.1%} on 32",
        ),
        ("TP 2 to 4 at 2,048 gains about 52.6 %", "from memory, unverified", f"{_percent(max(at[2][1], at[4][1]))}"),
    ]  # fmt: skip


_PAGE = """# Fernandez et al.: hardware scaling and its diminishing returns

What this project says of the questions of arXiv 2411.13055, beside what is publicly known of its answers.
Written by `python -P benchmarks/papers/fernandez.py` ({made}).

Only the abstract, reviews and summaries of the paper were at hand, so each claim stands at the strength of its source.
MFU counts attention (6 N + 12 L h s FLOP a token). Constants are those of `extrapolate/described/constants.py`;
the one number calibrated here is the base MFU at 128 GPUs, which the paper does not print for that size.

## Headline claims

{claims}

## Weak scaling, Llama-2 7B, FSDP on H100, two sequences of 4,096 a GPU

Throughput a GPU against 128 GPUs.

{weak}

![weak scaling](fernandez-weak.svg)

The loss follows from ring latency, which is linear in ranks: at 2,048 each gather takes about 10.8 ms, 9.7 ms of it latency.
Below about 512 GPUs gathers hide but slow the kernels beside them; above, they no longer hide.

## Tensor and pipeline parallelism against plain FSDP (base MFU {mfu})

{degrees}

![tensor parallelism](fernandez-degrees.svg)

TP16 spans two nodes, so that every layer's messages cross the network.

## Strong scaling, fixed global batch of sequences: MFU

{strong}

## Model sizes (each calibrated to {mfu} at 128)

{sizes}

## Devices, modelled MFU of Llama-2 7B (no calibration)

{devices}

The order is that of compute against network: the slower device hides its messages better.
V100 has no fitted overlap constant; A100's stands in.

## Context length (modelled, the same tokens a GPU)

{contexts}

## Power and tokens a joule (base MFU {mfu})

{power}

The shares of the power model are fitted to the paper's own pair (see `extrapolate/energy.py`), so the fall from 128 to 2,048
is no prediction; that tokens a joule fall nearly as fast as tokens a second is what follows.
"""


def page() -> dict[str, str]:
    """File name → text of the page and its plots."""
    model, on = load_model("llama2-7b"), device("h100")
    weak_text, weak_plot = _weak_table(model, on)
    degree_text, degree_plot = _degree_table(model, on, PUBLISHED_MFU)
    strong_rows = [
        [gpus, *(f"{strong(model, on, PUBLISHED_MFU, gpus, batch).mfu:.1%}" for batch in (32, 256, 1024))]
        for gpus in (16, 32, 64, 128, 256)
    ]
    power_text, _ = _power_table(model, on, PUBLISHED_MFU)
    made = ", ".join(f"{key} {value}" for key, value in environment().items())
    text = _PAGE.format(
        made=made,
        mfu=f"{PUBLISHED_MFU:.2%}",
        claims=table(["claim", "source", "this project"], claims(model, on)),
        weak=weak_text,
        degrees=degree_text,
        strong=table(["GPUs", "batch 32", "batch 256", "batch 1,024"], strong_rows),
        sizes=_size_table(on),
        devices=_device_table(model),
        contexts=_context_table(model, on),
        power=power_text,
    )
    return {"fernandez.md": text, "fernandez-weak.svg": weak_plot, "fernandez-degrees.svg": degree_plot}


def main(argv: Sequence[str] = ()) -> None:
    folder = ROOT / "docs" / "papers"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in page().items():
        (folder / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {folder.relative_to(ROOT) / name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
