"""Turns the runs of fernandez.py into the tables, plots and text of docs/papers/fernandez.md."""

from __future__ import annotations

from benchmarks.common import environment, table
from benchmarks.papers import fernandez as f
from benchmarks.papers.fernandez_claims import bus_GBps, claims, percent, rows
from benchmarks.validation.svg import plot
from scaletrace.extrapolate.described.constants import Device, device
from scaletrace.extrapolate.described.models import Model, load_model
from scaletrace.extrapolate.energy import Prices, economy

BASE = f.PUBLISHED_MFU
MODELS = ("llama2-1b", "llama2-7b", "llama2-13b", "llama2-70b")
DEGREES = (2, 4, 8, 16)
BATCHES = (32, 256, 1024, 4096)


def _weak(model: Model, on: Device) -> tuple[str, str]:
    lines, curves = [], {}
    for base in f.BASES:
        start = f.weak(model, on, base, f.BASE_GPUS).tokens_per_s
        points = [(gpus, f.weak(model, on, base, gpus)) for gpus in f.SCALES]
        lines.append([f"{base:.2%}", *(percent(point.tokens_per_s / start - 1) for _, point in points)])
        curves[f"base MFU {base:.1%}"] = [(float(gpus), point.tokens_per_s) for gpus, point in points]
    text = table(["base MFU at 128", *map(str, f.SCALES)], lines)
    return text, plot("Llama-2 7B, FSDP, H100, weak scaling", "GPUs", "tokens/s a GPU", curves, log_x=True)


def _degrees(model: Model, on: Device) -> tuple[str, str]:
    lines, curves = [], {}
    for gpus in f.SCALES:
        plain = f.weak(model, on, BASE, gpus).tokens_per_s
        tensor = {d: f.weak(model, on, BASE, gpus, d).tokens_per_s / plain - 1 for d in DEGREES if d <= gpus}
        stages = {d: f.with_stages(model, on, BASE, gpus, d).tokens_per_s / plain - 1 for d in DEGREES if d <= gpus}
        cells = [percent(of[d]) if d in of else "" for of in (tensor, stages) for d in DEGREES]
        lines.append([gpus, *cells])
        if gpus >= f.BASE_GPUS:
            curves[f"TP, {gpus}"] = [(1.0, 0.0), *((float(d), 100 * gain) for d, gain in tensor.items())]
            if gpus in (f.BASE_GPUS, f.LARGE_GPUS):
                curves[f"PP, {gpus}"] = [(1.0, 0.0), *((float(d), 100 * gain) for d, gain in stages.items())]
    heads = ["GPUs", *(f"TP{d}" for d in DEGREES), *(f"PP{d}" for d in DEGREES)]
    picture = plot(
        "Tensor and pipeline parallelism against plain FSDP", "degree", "tokens/s, % over FSDP", curves, log_x=True
    )
    return table(heads, lines), picture


def _strong(model: Model, on: Device) -> tuple[str, str]:
    lines, curves = [], {}
    for batch in BATCHES:
        points = [(gpus, f.strong(model, on, BASE, gpus, batch)) for gpus in f.SCALES]
        start = points[0][1].tokens_per_s * f.SCALES[0]
        cells = [f"{point.mfu:.1%} ({point.tokens_per_s * gpus / start:.1f} ×)" for gpus, point in points]
        lines.append([f"{batch:,}", *cells])
        curves[f"batch {batch:,}"] = [(float(gpus), point.tokens_per_s * gpus) for gpus, point in points]
    text = table(["batch", *map(str, f.SCALES)], lines)
    return text, plot(
        "Fixed global batch of sequences, FSDP, H100", "GPUs", "tokens/s in all", curves, log_x=True, log_y=True
    )


def _sizes(on: Device) -> tuple[str, str]:
    lines, curves = [], {}
    for name in MODELS:
        model = load_model(name)
        points = {gpus: f.weak(model, on, BASE, gpus) for gpus in f.SCALES if f.fits(model, on, gpus)}
        cells = [
            f"{points[gpus].tokens_per_s:,.0f} ({points[gpus].mfu:.1%})" if gpus in points else "does not fit"
            for gpus in f.SCALES
        ]
        change = points[f.LARGE_GPUS].tokens_per_s / points[f.BASE_GPUS].tokens_per_s - 1
        lines.append([name, *cells, percent(change)])
        curves[name] = [(float(gpus), 100 * point.mfu) for gpus, point in points.items()]
    text = table(["model", *map(str, f.SCALES), "128 → 2,048"], lines)
    return text, plot("Model sizes, FSDP, H100, weak scaling", "GPUs", "MFU, %", curves, log_x=True)


def _devices(model: Model) -> tuple[str, str]:
    lines, curves = [], {}
    for name in ("v100", "a100", "h100"):
        on = device(name)
        found = [f.modelled_mfu(model, on, gpus) for gpus in f.SCALES]
        lines.append([on.name, *(f"{mfu:.1%}" for mfu in found)])
        curves[on.name] = [(float(gpus), 100 * mfu) for gpus, mfu in zip(f.SCALES, found, strict=True)]
    text = table(["device", *map(str, f.SCALES)], lines)
    return text, plot("Llama-2 7B, FSDP, modelled", "GPUs", "MFU, %", curves, log_x=True)


def _contexts(model: Model, on: Device) -> tuple[str, str]:
    lines = []
    curves: dict[str, list[tuple[float, float]]] = {"128 GPUs": [], "2,048 GPUs": []}
    for seq in (1024, 2048, 4096, 8192, 16384, 32768):
        points = [f.at_context(model, on, gpus, seq) for gpus in (f.BASE_GPUS, f.LARGE_GPUS)]
        cells = [f"{point.tokens_per_s:,.0f} ({point.mfu:.1%})" for point in points]
        change = points[1].tokens_per_s / points[0].tokens_per_s - 1
        lines.append([seq, max(1, f.SEQUENCES * model.seq // seq), *cells, percent(change)])
        for curve, point in zip(curves.values(), points, strict=True):
            curve.append((float(seq), 100 * point.mfu))
    text = table(["context", "sequences a GPU", "128: tokens/s (MFU)", "2,048", "change"], lines)
    return text, plot("Context length, FSDP, H100, modelled", "tokens of context", "MFU, %", curves, log_x=True)


def _power(model: Model, on: Device, prices: Prices | None) -> tuple[str, str]:
    lines = []
    curves: dict[str, list[tuple[float, float]]] = {"tokens/s": [], "power": [], "tokens a joule": []}
    base = f.weak(model, on, BASE, f.SCALES[0])
    start = (base.tokens_per_s, f.watts(on, base), base.tokens_per_s / f.watts(on, base))
    for gpus in f.SCALES:
        point = f.weak(model, on, BASE, gpus)
        drawn = f.watts(on, point)
        now = (point.tokens_per_s, drawn, point.tokens_per_s / drawn)
        line = [
            gpus,
            f"{now[0]:,.0f}",
            f"{now[1]:.0f}",
            f"{now[2]:.1f}",
            f"{now[0] * gpus:,.0f}",
            f"{drawn * gpus / 1e3:,.1f}",
        ]
        if prices is not None:
            line.append(f"{economy(now[0], drawn, on.name, prices).money_per_million_tokens:.3f}")
        lines.append(line)
        for curve, value, first in zip(curves.values(), now, start, strict=True):
            curve.append((float(gpus), 100 * value / first))
    heads = ["GPUs", "tokens/s a GPU", "W a GPU", "tokens a joule", "tokens/s in all", "kW in all"]
    heads += ["money a million tokens"] if prices is not None else []
    return table(heads, lines), plot(
        "Throughput, power and efficiency a GPU", "GPUs", "% of 8 GPUs", curves, log_x=True
    )


def _large_or_many(on: Device) -> str:
    """2,048 GPUs as one job, or as many jobs that are as small as fit."""
    lines = []
    for name in MODELS:
        model = load_model(name)
        smallest = next(gpus for gpus in f.SCALES if f.fits(model, on, gpus))
        for gpus in dict.fromkeys((f.LARGE_GPUS, f.BASE_GPUS, smallest)):
            point = f.weak(model, on, BASE, gpus)
            drawn = f.watts(on, point)
            flop_J = point.mfu * on.bf16_flop_s / drawn / 1e9
            lines.append(
                [name, f.LARGE_GPUS // gpus, gpus, f"{point.mfu:.1%}", f"{drawn:.0f}",
                 f"{point.tokens_per_s / drawn:.1f}", f"{flop_J:,.0f}"]
            )  # fmt: skip
    return table(["model", "jobs", "GPUs a job", "MFU", "W a GPU", "tokens a joule", "GFLOP a joule"], lines)


def _collectives(on: Device) -> tuple[str, str]:
    nodes = (1, 4, 16, 64, 128, 256, 512)
    lines, curves = [], {}
    for kind, word in (("all_reduce", "AllReduce"), ("all_gather", "AllGather")):
        for power in (24, 28, 32):
            rates = [bus_GBps(on, kind, 2.0**power, count) for count in nodes]
            size = f"{2 ** (power - 20):,} MiB"
            lines.append([word, size, *(f"{rate:.0f}" for rate in rates)])
            curves[f"{word}, {size}"] = [(float(n), rate) for n, rate in zip(nodes, rates, strict=True)]
    text = table(["collective", "size", *(f"{n} nodes" for n in nodes)], lines)
    return text, plot("Bus bandwidth over nodes of 8 H100", "nodes", "GB/s", curves, log_x=True)


_PAGE = """# Fernandez et al.: hardware scaling and its diminishing returns

What this project says of the questions of arXiv 2411.13055, beside what is publicly known of its answers.
Written by `python -P benchmarks/papers/fernandez.py` ({made}).

Only the abstract, reviews and summaries of the paper were at hand, so each claim stands at the strength of its source.
MFU counts attention (6 N + 12 L h s FLOP a token) unless said otherwise.
Constants are those of `extrapolate/described/constants.py`; the one number calibrated here is the base MFU at 128 GPUs, which
the paper does not print for that size.

## Claims

Every claim of the public list, with what this model says. *Fitted* means that the number was used, so the row shows nothing;
*covered* that the question is answered below and no figure is known to compare with.

{claims}

## Weak scaling, Llama-2 7B, FSDP on H100, two sequences of 4,096 a GPU

Throughput a GPU against 128 GPUs.

{weak}

![weak scaling](fernandez-weak.svg)

The loss follows from ring latency, which is linear in ranks: at 2,048 each gather takes about 10.8 ms, 9.7 ms of it latency.
Below about 512 GPUs gathers hide but slow the kernels beside them; above, they no longer hide.

## Tensor and pipeline parallelism against plain FSDP (base MFU {mfu})

{degrees}

![tensor and pipeline parallelism](fernandez-degrees.svg)

TP16 spans two nodes, so that every layer's messages cross the network.

## Strong scaling, fixed global batch of sequences: MFU, and tokens a second in all against 8 GPUs

{strong}

![strong scaling](fernandez-strong.svg)

Below one sequence a GPU the batch is cut along the context, without the cost of exchanging keys and values.

## Model sizes (each calibrated to {mfu} at 128): tokens a second and GPU (MFU)

{sizes}

![model sizes](fernandez-sizes.svg)

## Devices, modelled MFU of Llama-2 7B (no calibration)

{devices}

![devices](fernandez-devices.svg)

The order is that of compute against network: the slower device hides its messages better.
V100 has no fitted overlap constant; A100's stands in.

## Context length (modelled, the same tokens a GPU)

{contexts}

![context length](fernandez-context.svg)

## Collectives over nodes: bus bandwidth, GB/s

{collectives}

![collectives](fernandez-collectives.svg)

## Power and tokens a joule (base MFU {mfu})

{power}

![power](fernandez-power.svg)

The shares of the power model are fitted to the paper's own pair (see `extrapolate/energy.py`), so the fall from 128 to 2,048
is no prediction; that tokens a joule fall nearly as fast as tokens a second is what follows.
The only other figure known is the power of runs with tensor parallelism (about 30 W a GPU more, from memory, unverified): that
row of the claims is an independent test, and the model brackets it at best. No other public table at hand prints power, so the model has no further independent test.

## One large job or many small ones, on 2,048 H100

{many}

Small jobs lose nothing to long rings: the same GPUs give more tokens a joule as several jobs, and the larger the model the less
it matters.
"""


def page(prices: Prices | None = None) -> dict[str, str]:
    """File name → text of the page and its plots; with prices the cost of tokens too."""
    model, on = load_model("llama2-7b"), device("h100")
    parts = {
        "weak": _weak(model, on),
        "degrees": _degrees(model, on),
        "strong": _strong(model, on),
        "sizes": _sizes(on),
        "devices": _devices(model),
        "context": _contexts(model, on),
        "power": _power(model, on, prices),
        "collectives": _collectives(on),
    }
    made = ", ".join(f"{key} {value}" for key, value in environment().items())
    text = _PAGE.format(
        made=made,
        mfu=f"{BASE:.2%}",
        claims=table(["claim", "source", "this project", "verdict"], rows(claims(model, on))),
        contexts=parts["context"][0],
        many=_large_or_many(on),
        **{name: shown for name, (shown, _) in parts.items() if name != "context"},
    )
    return {"fernandez.md": text} | {f"fernandez-{name}.svg": picture for name, (_, picture) in parts.items()}
