"""Turns a device's generation into what overlap costs: the one place of λ, κ and μ, with their derivation.

While a collective is resident on a GPU, kernels beside it advance at 1 / (1 + κ), and it advances at 1 / (1 + μ) beside
kernels. A collective of one second that hides wholly so costs λ = κ (1 + μ) / (1 + κ) seconds of compute.

λ   fitted, one number a device, from two runs of one model at two sizes each, which are scored nowhere
    (benchmarks/validation, typed `FitRow`; tests find them again): H100 0.603 from MPT-1B under FSDP, 128 → 256 GPUs
    (MosaicML); A100 0.217 from InternLM-7B, TP1, node-local ZeRO-1, 8 → 16 GPUs (InternEvo). In proportion to the
    channels (SMs held) where a job caps them.
μ   0.19: the mean slowdown reported for overlapped work (arXiv 2507.03114), used here for collectives.
NCCL_CHANNELS   24: grid of the NCCL kernels in the public 8 × H100 trace.

Both are rates: what spends the share f of its run beside neighbours takes 1 / (1 - f κ / (1 + κ)) times as long as alone.
A trace that ran a kernel with and without a collective beside it tells its own κ, and its own μ where it moved the same
bytes with and without kernels beside them (overlap.py); these are the priors.
"""

from __future__ import annotations

from scaletrace.jit import jit

OVERLAP_LOSS = {"hopper": 0.603, "ampere": 0.217}
"""λ by generation of the device."""

STANDS_IN = "ampere"
"""Whose λ a generation without one takes."""

SOURCES = {
    "hopper": "λ 0.603 of MosaicML llm-foundry, 1B FSDP, 128 to 256 H100 (two rows; extrapolate/interference.py)",
    "ampere": "λ 0.217 of InternEvo 7B, TP1 node-local, 8 to 16 A100 (two rows; extrapolate/interference.py)",
}
COLLECTIVE_SLOWDOWN = 0.19
NCCL_CHANNELS = 24


def overlap_loss(generation: str) -> float:
    """λ of a generation of GPUs, of A100 where none is known."""
    return OVERLAP_LOSS.get(generation, OVERLAP_LOSS[STANDS_IN])


def kernel_slowdown(loss: float, collective_slowdown: float = COLLECTIVE_SLOWDOWN) -> float:
    """κ that makes a wholly hidden collective cost `loss`."""
    return loss / (1 + collective_slowdown - loss)


def loss_of(kappa: float, collective_slowdown: float = COLLECTIVE_SLOWDOWN) -> float:
    """λ of kernels that are slower by κ: seconds of compute lost a second of hidden collective."""
    return kappa * (1 + collective_slowdown) / (1 + kappa)


@jit
def lost(beside: float, slowdown: float) -> float:
    """What a kernel or transfer gets less done for spending the share `beside` of its run next to others that slow it.

    slowdown  their κ or μ. The share of its run that it would take alone is 1 minus the sum over all kinds of neighbours.
    """
    return beside * slowdown / (1.0 + slowdown)


def prior(generation: str) -> tuple[float, str]:
    """(κ, where it is from) for a device of a generation."""
    known = generation in OVERLAP_LOSS
    source = SOURCES[generation] if known else f"as A100, nothing published for it; {SOURCES[STANDS_IN]}"
    return kernel_slowdown(overlap_loss(generation)), source
