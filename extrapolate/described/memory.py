"""Turns a model and a layout into the bytes that the fullest rank needs, from the sizes of what training keeps."""

from __future__ import annotations

import math

from scaletrace.extrapolate.described.jobs import Layout
from scaletrace.extrapolate.described.models import Model

WEIGHT_AND_GRADIENT_BYTES = 8
"""bf16 weights (2), bf16 gradients (2) and their fp32 accumulation (4)."""

OPTIMIZER_BYTES = 12
"""fp32 master weights and two moments."""

LOGIT_BYTES = 8
"""Logits in bf16, in fp32, and the gradient of the loss in bf16."""


def memory_bytes(model: Model, layout: Layout) -> float:
    """Weights, gradients, optimizer, and the activations of the micro batches in flight on the first stage.

    Activations a token and layer: 16 bytes per hidden element (inputs of norms and products, query, key, value,
    attention output) and 8 per element of the gated MLP's width, in bf16, split by tensor and sequence parallelism.
    """
    held = model.parameters / (layout.tp * layout.pp)
    owners = layout.dp * layout.cp if layout.sharded_optimizer else 1
    states = held * (WEIGHT_AND_GRADIENT_BYTES + OPTIMIZER_BYTES / owners)
    tokens = layout.micro_batch * model.seq / layout.cp
    layers = math.ceil(model.layers / layout.pp)
    in_flight = min(layout.pp, layout.micro_batches)
    per_layer = (
        tokens * 2 * model.hidden if layout.recompute == "full" else tokens * (16 * model.hidden + 8 * model.mlp_width)
    )
    logits = tokens * model.vocab / layout.tp * LOGIT_BYTES
    return states + per_layer / layout.tp * layers * in_flight + logits
