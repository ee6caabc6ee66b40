"""Turns the questions of Fernandez et al. (arXiv 2411.13055) into runs of this model, and into docs/papers/fernandez.md.

python -P benchmarks/papers/fernandez.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

import numpy as np

from scaletrace.extrapolate.described.constants import Device, costs_on
from scaletrace.extrapolate.described.jobs import Job, Layout, pipeline_job, sharded_job
from scaletrace.extrapolate.described.kernels import head_s, layer_s
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.described.spread import straggle
from scaletrace.extrapolate.energy import PowerModel
from scaletrace.extrapolate.overlap import union

SEQUENCES = 2
"""Sequences a GPU and step in weak scaling (effective local batch 2, as the paper is remembered)."""

PUBLISHED_MFU = 0.4077
PUBLISHED_LOSS = -0.3722
PUBLISHED_POWER = -0.0587
BASE_GPUS, LARGE_GPUS = 128, 2048
BLOCKING = ("tensor parallel", "send")
"""Labels of operations of the compute lane that are messages."""
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
    # Collectives of the communication lane, and the messages that the compute lane waits for.
    held = np.arange(len(times.end_s)) >= lanes[1]
    held[: lanes[1]] = [label.startswith(BLOCKING) for label in job.program.labels[: lanes[1]]]
    held[lanes[2] :] = False
    low, high = union(
        np.rint(times.start_s[held] * 1e9).astype(np.int64), np.rint(times.end_s[held] * 1e9).astype(np.int64)
    )
    busy = float((high - low).sum()) / 1e9
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


def at_context(model: Model, on: Device, gpus: int, seq: int) -> Run:
    """The tokens of a GPU's step in sequences of `seq`, modelled without calibration."""
    costs, long = costs_on(on), replace(model, seq=seq)
    sequences = max(1, SEQUENCES * model.seq // seq)
    layer, head = layer_s(long, on, costs, sequences), head_s(long, on, costs, sequences)
    unit_s = long.layers * (layer.forward_s + layer.backward_s) + head.forward_s + head.backward_s
    return run(fsdp(long, on, gpus, sequences=sequences), long, unit_s, sequences * seq)


def watts(on: Device, point: Run) -> float:
    """Modelled power of one GPU."""
    return PowerModel().power_W(on.power_W, point.compute_rate, point.communication_share)


def fits(model: Model, on: Device, gpus: int) -> bool:
    """Whether the sharded states of training (weights, gradients, fp32 master and moments) and two gathered layers fit."""
    states = STATE_BYTES * model.parameters / gpus
    return states + 2 * 2 * model.layer_parameters + 2 * model.embedding_parameters < 0.95 * on.hbm_bytes


STATE_BYTES = 18
"""bf16 weights (2), fp32 gradients (4), fp32 master and two moments (12), a parameter."""


def without_attention(model: Model, on: Device, base_mfu: float) -> float:
    """The change from 128 to 2,048 GPUs if the base MFU counts 6 FLOP a parameter and no attention."""
    share = 6.0 * model.parameters * model.seq / model.step_flop(model.seq)
    return loss(model, on, base_mfu / share)


def main(argv: Sequence[str] = ()) -> None:
    from benchmarks.papers.fernandez_page import page
    from scaletrace.cli.extrapolate import read_prices

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--price", default="", help="money per GPU-hour or a price table: adds the cost of tokens")
    price = options.parse_args(argv).price
    prices = read_prices(price) if price else None
    folder = ROOT / "docs" / "papers"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in page(prices).items():
        (folder / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {folder.relative_to(ROOT) / name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
