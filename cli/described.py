"""Turns a described job into a program of the synthesizer, calibrated, and its plan into watts and money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrace.extrapolate.described.expand import expand, groups
from scaletrace.extrapolate.described.lanes import solve_increasing
from scaletrace.extrapolate.described.planned import (
    Described,
    Item,
    PlannedBackward,
    PlannedCollective,
    PlannedHost,
    PlannedKernel,
    PlannedModule,
    PlannedRange,
)
from scaletrace.extrapolate.energy import PowerModel, Prices, economy
from scaletrace.extrapolate.interference import NCCL_CHANNELS
from scaletrace.traces.synth import (
    Annotation,
    Backward,
    Collective,
    HostOp,
    Instruction,
    Kernel,
    Module,
    ProcessGroup,
    Schedule,
    Sync,
    SynthJob,
    Wait,
    plan,
)
from scaletrace.traces.synth.program import COMPUTE_STREAM

CALIBRATED = 1e-4


@dataclass(frozen=True, slots=True)
class Interference:
    """κ of kernels beside a collective with all channels (None: the device's, which falls with the channels), and μ of
    transfers beside kernels."""

    kernels: float | None = None
    collectives: float | None = None

    def beside(self, described: Described, channels: int = NCCL_CHANNELS) -> float:
        """κ of kernels beside a collective of so many channels."""
        if self.kernels is None:
            return described.device.kernel_slowdown(channels)
        return self.kernels

    def of_transfers(self, described: Described) -> float:
        return described.device.collective_slowdown if self.collectives is None else self.collectives


def calibrated(
    described: Described,
    ranks: Sequence[int],
    steps: int,
    target_s: float | None,
    interference: Interference,
    model: Mapping[str, float | str],
) -> tuple[float, SynthJob]:
    """The factor on kernel times that makes the written step last `target_s` (1 without), and the job with it."""
    items = {rank: expand(described, rank) for rank in ranks}

    def job(count: int, scale: float) -> SynthJob:
        return _job(described, items, count, scale, interference, model)

    if target_s is None:
        return 1.0, job(steps, 1.0)
    count = min(steps, 2)

    def step_s(scale: float) -> float:
        return plan(job(count, scale)).step_ns(count - 1) / 1e9

    scale = solve_increasing(step_s, target_s, guess=1.0, tolerance=CALIBRATED)
    return scale, job(steps, scale)


def _job(
    described: Described,
    items: Mapping[int, Sequence[Item]],
    steps: int,
    scale: float,
    interference: Interference,
    model: Mapping[str, float | str],
) -> SynthJob:
    found = [
        (axis, ProcessGroup(str(i), text, ranks)) for i, (axis, text, ranks) in enumerate(groups(described.layout))
    ]
    of_rank = {rank: {axis: group.name for axis, group in found if rank in group.ranks} for rank in items}
    convert = _Convert(described, scale, interference)
    return SynthJob(
        world_size=described.layout.ranks,
        groups=tuple(group for _, group in found),
        programs={rank: (*convert.all(own, of_rank[rank]), Sync()) for rank, own in items.items()},
        steps=steps,
        device=described.device.name,
        sm_count=described.device.sm_count,
        gpus_per_node=described.device.gpus_per_node,
        name=described.model.name,
        facts={"layout": str(described.layout), "kernel_scale": f"{scale:.6f}"},
        collective_slowdown=interference.of_transfers(described),
        model=model,
    )


@dataclass(frozen=True, slots=True)
class _Convert:
    """Planned items as instructions of the synthesizer; only compute takes the calibrated factor."""

    described: Described
    scale: float
    interference: Interference

    def all(self, items: Sequence[Item], group_of: Mapping[str, str]) -> tuple[Instruction, ...]:
        return tuple(self.one(item, group_of) for item in items)

    def one(self, item: Item, group_of: Mapping[str, str]) -> Instruction:
        if isinstance(item, PlannedKernel):
            return self.kernel(item)
        if isinstance(item, PlannedCollective):
            return Collective(
                item.kind,
                group_of[item.axis],
                round(item.seconds * 1e9),
                item.in_elements,
                item.out_elements,
                item.dtype,
                item.stream,
                item.peer,
                item.channels,
                self.interference.beside(self.described, item.channels),
                item.mark,
            )
        if isinstance(item, PlannedRange):
            return Annotation(item.name, self.all(item.body, group_of))
        if isinstance(item, PlannedBackward):
            return Backward(item.name, item.of, self.all(item.body, group_of))
        if isinstance(item, PlannedModule):
            return Module(item.name, self.all(item.body, group_of))
        if isinstance(item, PlannedHost):
            return HostOp(item.name, round(item.seconds * 1e9))
        return Wait(item.on, item.by or COMPUTE_STREAM, item.mark)

    def kernel(self, item: PlannedKernel) -> Kernel:
        return Kernel(
            item.name,
            round(item.seconds * self.scale * 1e9),
            item.op,
            blocks=item.blocks,
            shapes=item.shapes,
            outer=item.outer,
            outer_shapes=item.outer_shapes,
            tag=item.tag,
        )


def busy(timing: Schedule, step: int) -> tuple[float, float]:
    """(rate at which kernels advance, share of time with a collective resident) of one step, means over its ranks."""
    step_ns = timing.step_ns(step)
    rates, shares = [], []
    for own in timing.plans.values():
        calls = [call for call in own.calls if call.step == step]
        work = sum(call.what.dur_ns for call in calls if isinstance(call.what, Kernel))
        stays = sorted(
            (timing.start_ns[call.device], timing.end_ns[call.end])
            for call in calls
            if isinstance(call.what, Collective)
        )
        rates.append(min(1.0, work / step_ns))
        shares.append(min(1.0, _covered(stays) / step_ns))
    return sum(rates) / len(rates), sum(shares) / len(shares)


def _covered(intervals: Sequence[tuple[int, int]]) -> int:
    """Length of the union of sorted intervals."""
    total, reached = 0, 0
    for low, high in intervals:
        total += max(0, high - max(low, reached))
        reached = max(reached, high)
    return total


def bill(
    described: Described, timing: Schedule, step: int, tokens_per_s: float, prices: Prices | None
) -> dict[str, Any]:
    """Watts a GPU, tokens a joule and, with prices, the cost of a million tokens; null where the device's power is unknown."""
    device = described.device
    out: dict[str, Any] = dict.fromkeys(("power_W_per_gpu", "tokens_per_J", "money_per_million_tokens"))
    if device.power_W > 0:
        watts = PowerModel().power_W(device.power_W, *busy(timing, step))
        found = economy(tokens_per_s, watts, device.name, prices)
        return {
            "power_W_per_gpu": watts,
            "tokens_per_J": found.tokens_per_J,
            "money_per_million_tokens": found.money_per_million_tokens,
        }
    if prices is not None:
        out["money_per_million_tokens"] = 1e6 * prices.hour(device.name) / 3600 / tokens_per_s
    return out
