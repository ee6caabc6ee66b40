"""Turns a layer's shapes into seconds on a device: tensor-core waves, bytes of the element-wise kernels, launches, host.

forward = waves of the matrix products + attention products + bytes / HBM + launches + tensor-parallel messages,
or the host's time to issue it, whichever is longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scaletrace.extrapolate.described.collectives import GroupShape, all_reduce_s, all_to_all_s
from scaletrace.extrapolate.described.constants import Device, KernelCosts
from scaletrace.extrapolate.described.models import Model

TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75))
"""Output tiles of a matrix product (rows, columns, share of the largest tile's rate), largest first (CUTLASS's usual)."""

QUANTISATION = 0.5
"""Share of the last wave's idle SMs that stays lost: libraries split the inner dimension or pick odd tiles to fill it."""

ATTENTION_SHARE = 0.5
"""Rate of batched attention products over that of large matrix products: their inner dimension is one head (64, 128)."""

FORWARD_LAUNCHES = 10
"""Kernels of a layer's forward whose launch gap shows; the backward has twice as many."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of a forward and of a backward (without recomputation), and of the forward's attention core alone."""

    forward_s: float
    backward_s: float
    attention_s: float = 0.0


def gemm_s(m: float, n: float, k: float, device: Device, share: float, fp8: bool = False) -> float:
    """One matrix product m × n × k: waves of tiles over the SMs, the best of the usual tiles."""
    peak = device.fp8_flop_s if fp8 else device.bf16_flop_s
    best = math.inf
    for rows, columns, rate in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        full = tiles / device.sm_count
        waves = full + QUANTISATION * (math.ceil(full) - full) if full > 1 else 1.0
        best = min(best, waves * device.sm_count * 2.0 * rows * columns * k / (peak * share * rate))
    return best


def layer_s(
    model: Model, device: Device, costs: KernelCosts, micro_batch: int, tp: int = 1, cp: int = 1, ep: int = 1
) -> Pass:
    """One layer of one micro batch on one of tp ranks, its tensor- and expert-parallel messages included."""
    tokens = micro_batch * model.seq / cp
    hbm = device.hbm_share * device.hbm_Bps
    products = sum(gemm_s(tokens * share, n, k, device, costs.gemm_share) for share, n, k in _products(model, tp))
    attention = 4.0 * tokens * model.seq * model.hidden / tp / (device.bf16_flop_s * costs.gemm_share * ATTENTION_SHARE)
    products += attention
    scores = micro_batch * model.heads / tp * model.seq * model.seq / cp * costs.score_bytes / hbm
    # Half of the traffic per hidden element lies between the split products, half outside, whole on every rank.
    split = 1 / tp if costs.sequence_parallel else 0.5 + 0.5 / tp
    bytes_s = scores + tokens * model.hidden * costs.hidden_bytes * split / hbm
    messages = 2 * all_reduce_s(device, tokens * model.hidden * 2, GroupShape(tp, device.gpus_per_node))
    if model.experts > 1 and ep > 1:
        routed = tokens * model.experts_per_token * model.hidden * 2
        messages += 2 * all_to_all_s(device, routed, GroupShape(ep, max(1, device.gpus_per_node // tp)))
    launches = FORWARD_LAUNCHES * costs.launch_s
    host = costs.host_s + (costs.host_tp_s if tp > 1 else 0.0)
    forward = products + bytes_s / 3 + launches + messages
    backward = 2 * products + 2 * bytes_s / 3 + 2 * launches + messages
    return Pass(max(forward, host), max(backward, host), attention + scores / 3)


def head_s(model: Model, device: Device, costs: KernelCosts, micro_batch: int, tp: int = 1, cp: int = 1) -> Pass:
    """Language-model head and loss of one micro batch."""
    tokens = micro_batch * model.seq / cp
    columns = model.vocab / tp
    product = gemm_s(tokens, columns, model.hidden, device, costs.gemm_share)
    bytes_s = tokens * columns * costs.logit_bytes / (device.hbm_share * device.hbm_Bps)
    return Pass(product + bytes_s / 3, 2 * product + 2 * bytes_s / 3)


def _products(model: Model, tp: int) -> list[tuple[float, float, float]]:
    """(share of the tokens, columns, inner dimension) of a layer's matrix products; experts see their tokens evenly."""
    width = model.mlp_width / tp
    up = width * (model.mlp_matrices - 1)
    routed = float(model.experts_per_token)
    return [
        (1.0, (model.hidden + 2 * model.kv_width) / tp, model.hidden),
        (1.0, model.hidden, model.hidden / tp),
        (routed, up, model.hidden),
        (routed, model.hidden, width),
    ]
