"""Turns a device and a fabric into the data-movement limits of frontier training: utilization over training FLOP.

The model is Erdil & Schneider-Joseph's (arXiv 2411.01137) with a latency term. Training FLOP C fixes a model and a
batch: N = sqrt(C/120) parameters, D = 20 N tokens, batch B = 2048² (C/1e25)^b tokens, L = 120 (C/1e25)^d blocks of two
linear layers w × 5w. The smallest cluster that finishes in time is searched over pipeline, data and two tensor degrees
and the number of micro batches; utilization is C over what that cluster could have computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster

FloatArray = npt.NDArray[np.float64]

QUARTER_YEAR_S = 0.25 * 365.25 * 86400
REFERENCE_FLOP = 1e25
REFERENCE_BATCH_TOKENS = 2048.0**2
REFERENCE_BLOCKS = 120.0
WIDENING = 5.0
TOKENS_PER_PARAMETER = 20.0
LINEAR_SHARE_OF_PLATEAU = 0.8
"""Scaling counts as linear down to this share of the plateau."""

SERIAL_STEPS_PER_BLOCK = 4
"""Communication steps on the critical path of a block: two linear layers, forward and backward."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the model knows of hardware. `flop8_s` counts 8-bit FLOP; wider words cost in proportion.

    inside_Bps, beyond_Bps  network bytes a second and device, sent and received, inside a domain and beyond it
    domain                  devices in one domain (0: the fabric is flat, at inside_Bps)
    latency_s               of one collective; launch_s what a serial step costs besides (the wall only)
    in_network              whether the fabric reduces: an all-reduce then moves 2 (p - 1) n / p words, 3 otherwise
    """

    name: str
    flop8_s: float
    dram_Bps: float
    inside_Bps: float
    beyond_Bps: float
    domain: int = 8
    latency_s: float = 2.7e-6
    launch_s: float = 5.8e-6
    in_network: bool = True

    @property
    def step_latency_s(self) -> float:
        """One serial communication step at the wall."""
        return self.latency_s + self.launch_s


H100 = Machine("H100 SXM", 1979e12, 3.352e12, 900e9, 50e9)
A100 = Machine("A100 SXM", 623.7e12, 1.555e12, 600e9, 25e9)


def machine_of(cluster: Cluster) -> Machine:
    """A cluster of the catalog as this model sees it: its device, its NVLink domain, and its network beyond."""
    device = cluster.device
    if cluster.backend != "nccl":
        raise UsageError(f"cluster {cluster.name}: the limits are those of GPUs, not of {cluster.backend}")
    beyond = cluster.tiers[1].bandwidth_Bps if len(cluster.tiers) > 1 else cluster.tiers[0].bandwidth_Bps
    return Machine(
        name=device.name,
        flop8_s=device.fp8_flops or 2 * device.bf16_flops,
        dram_Bps=device.memory_Bps,
        inside_Bps=2 * cluster.tiers[0].bandwidth_Bps,
        beyond_Bps=beyond,
        domain=cluster.node_size,
    )


@dataclass(frozen=True, slots=True)
class Training:
    """How training scales with FLOP, and the run's limits.

    utilization      share of a device's rates that kernels reach; the plateau of the curve
    word_bytes       bytes an element
    batch_exponent   growth of the batch with C; depth_exponent of the number of blocks
    width_over_depth factor on the width at the same parameters (depth shrinks by its square)
    sparsity         total over active parameters of a mixture of experts (1 = dense)
    """

    run_s: float = QUARTER_YEAR_S
    utilization: float = 0.70
    word_bytes: float = 2.0
    batch_exponent: float = 1 / 6
    depth_exponent: float = 1 / 6
    width_over_depth: float = 1.0
    sparsity: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise UsageError(f"utilization is {self.utilization}; it must lie in (0, 1]")
        for name in ("run_s", "word_bytes", "width_over_depth"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        for name in ("batch_exponent", "depth_exponent"):
            if not -1 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must lie between -1 and 1")
        if not 1 <= self.sparsity < math.inf:
            raise UsageError(f"sparsity is {self.sparsity}; total over active parameters is at least 1")

    def parameters(self, flop: float) -> float:
        """Active parameters."""
        return math.sqrt(flop / (6 * TOKENS_PER_PARAMETER))

    def batch_tokens(self, flop: float) -> float:
        return REFERENCE_BATCH_TOKENS * float((flop / REFERENCE_FLOP) ** self.batch_exponent)

    def blocks(self, flop: float) -> float:
        deep = REFERENCE_BLOCKS * float((flop / REFERENCE_FLOP) ** self.depth_exponent)
        return max(1.0, deep / self.width_over_depth**2)

    def batches(self, flop: float) -> float:
        return TOKENS_PER_PARAMETER * self.parameters(flop) / self.batch_tokens(flop)


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of parallelism; real numbers in the continuous search, powers of two in the other."""

    pp: float
    dp: float
    tp_hidden: float
    tp_residual: float
    micro_batches: float

    @property
    def devices(self) -> float:
        return self.pp * self.dp * self.tp_hidden * self.tp_residual


@dataclass(frozen=True, slots=True)
class LimitPoint:
    """One training size: utilization 0 … 1 (0 where no cluster finishes in time) and the degrees that reach it."""

    flop: float
    utilization: float
    degrees: Degrees


@dataclass(frozen=True, slots=True)
class Limits:
    """The curve, the end of linear scaling, and the latency wall (both in training FLOP)."""

    machine: Machine
    training: Training
    curve: tuple[LimitPoint, ...]
    linear_until_flop: float
    wall_flop: float


def batch_seconds(machine: Machine, training: Training, flop: float, degrees: FloatArray) -> FloatArray:
    """Seconds of one batch for each column of `degrees` (rows: pp, dp, tp_hidden, tp_residual, micro batches).

    Per phase the slowest of compute, memory and network counts; the collectives' latencies add to it.
    """
    pp, micro = degrees[0], degrees[4]
    step, reduction = _layer_resources(machine, training, flop, degrees)
    layers = 2 * training.blocks(flop)
    boundary = (step + reduction).max(0)
    sustained = ((layers / pp - 1) * (micro * step + reduction)).max(0)
    without = ((micro - 1) * step).max(0)
    bubble = (2 * (pp - 1) * step).max(0)
    latency = 2 * machine.latency_s * (layers / pp * micro + 2 * (pp - 1))
    seconds: FloatArray = boundary + sustained + without + bubble + latency
    return seconds


def layer_seconds(machine: Machine, training: Training, flop: float, degrees: FloatArray) -> tuple[float, float]:
    """Seconds of one linear layer and micro batch (forward and backward, without latency) and of its reduction."""
    step, reduction = _layer_resources(machine, training, flop, degrees)
    return float(step.max(0)[0]), float(reduction.max(0)[0])


def _layer_resources(
    machine: Machine, training: Training, flop: float, degrees: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds of (compute, memory, network) of one linear layer and micro batch, and of its end-of-batch reduction."""
    _, dp, hidden, residual, micro = degrees
    word, reached = training.word_bytes, training.utilization
    width = math.sqrt(training.parameters(flop) / (2 * WIDENING * training.blocks(flop)))
    weights = width / residual * (WIDENING * width / hidden)
    tokens = training.batch_tokens(flop) / micro / dp
    compute = 6 * weights * tokens * word / (reached * machine.flop8_s)
    # Experts are spread over data ranks as far as these go, and reduced over the ranks that hold the same ones.
    spread = np.minimum(dp, training.sparsity)
    held, replicas = weights * training.sparsity / spread, dp / spread
    memory = 4 * held * word / (reached * machine.dram_Bps)
    network = _all_reduce_s(machine, word * width / residual * tokens, hidden, np.ones_like(hidden))
    network = network + _all_reduce_s(machine, word * WIDENING * width / hidden * tokens, residual, hidden)
    network = network + _exchange_s(machine, word * width / residual * tokens, spread, hidden * residual)
    words = (2 if machine.in_network else 3) * (replicas - 1) / replicas * held
    written = words * word / (reached * machine.dram_Bps)
    across = _all_reduce_s(machine, word * held, replicas, hidden * residual * spread)
    return np.stack([compute, memory, network]), np.stack([np.zeros_like(dp), written, across])


def _exchange_s(machine: Machine, size_bytes: FloatArray, experts: FloatArray, inner: FloatArray) -> FloatArray:
    """Tokens to their experts and back in forward and backward, half a block's share for each of its two layers."""
    moved = 2 * size_bytes * (experts - 1) / experts
    if not machine.domain:
        return moved / machine.inside_Bps
    within = np.clip(machine.domain / inner, 1, experts)
    outside = (experts - within) / np.maximum(experts - 1, 1e-12)
    out: FloatArray = moved * np.where(
        experts > 1, outside / machine.beyond_Bps + (1 - outside) / machine.inside_Bps, 0.0
    )
    return out


def _all_reduce_s(machine: Machine, size_bytes: FloatArray, ranks: FloatArray, inner: FloatArray) -> FloatArray:
    """All-reduce over `ranks` whose neighbours are `inner` devices apart: inside the domain first, then beyond it."""
    moved = 2.0 if machine.in_network else 3.0

    def words(size: FloatArray, p: FloatArray) -> FloatArray:
        out: FloatArray = moved * (p - 1) * size / p
        return out

    if not machine.domain:
        return words(size_bytes, ranks) / machine.inside_Bps
    local = np.clip(machine.domain / inner, 1, ranks)
    inside = words(size_bytes, local) / machine.inside_Bps
    return inside + words(size_bytes / local, ranks / local) / machine.beyond_Bps


def utilization(
    machine: Machine, flop: float, training: Training | None = None, *, powers_of_two: bool = False
) -> LimitPoint:
    """The smallest cluster that trains `flop` in time, and what share of its peak that uses."""
    training = training or Training()
    if not 0 < flop < math.inf:
        raise UsageError(f"training FLOP is {flop}; give a positive number such as 2e28")
    rate = machine.flop8_s / training.word_bytes
    logs = _search(machine, training, flop, powers_of_two)
    found = Degrees(*(float(2.0**value) for value in logs))
    seconds = float(batch_seconds(machine, training, flop, 2.0 ** logs[:, None])[0]) * training.batches(flop)
    if seconds > 1.01 * training.run_s:
        return LimitPoint(flop, 0.0, found)
    # Real degrees fill the run exactly; powers of two finish early, and only the time used counts.
    used_s = seconds if powers_of_two else training.run_s
    return LimitPoint(flop, flop / (found.devices * rate * used_s), found)


_GENERATIONS = 260
_POPULATION = 120
_PENALTY = 50.0


def _search(machine: Machine, training: Training, flop: float, powers_of_two: bool) -> FloatArray:
    """log2 of the degrees of the smallest cluster in time, by differential evolution with a fixed seed.

    Powers of two are tried one and all.
    """
    top = np.array([math.log2(training.blocks(flop)), 24.0, 16.0, 16.0, 24.0])
    if powers_of_two:
        axes = np.meshgrid(*(np.arange(0.0, math.floor(limit) + 1, 1.0) for limit in top), indexing="ij")
        grid = np.stack([axis.ravel() for axis in axes])
        exact: FloatArray = grid[:, int(np.argmin(_objective(machine, training, flop, grid, True)))]
        return exact
    random = np.random.default_rng(0)
    people = random.random((5, _POPULATION)) * top[:, None]
    worth = _objective(machine, training, flop, people, False)
    for _ in range(_GENERATIONS):
        best = people[:, [int(np.argmin(worth))]]
        a, b = (people[:, random.permutation(_POPULATION)] for _ in range(2))
        scale = random.uniform(0.5, 1.0, _POPULATION)
        trial = people + 0.6 * (best - people) + scale * (a - b)
        keep = random.random((5, _POPULATION)) > 0.8
        trial = np.clip(np.where(keep, people, trial), 0.0, top[:, None])
        tried = _objective(machine, training, flop, trial, False)
        better = tried < worth
        people[:, better], worth[better] = trial[:, better], tried[better]
    chosen: FloatArray = people[:, int(np.argmin(worth))]
    return chosen


def _objective(machine: Machine, training: Training, flop: float, logs: FloatArray, powers_of_two: bool) -> FloatArray:
    """log2 of the devices (of device-seconds for powers of two), plus a penalty for what is overrun."""
    seconds = batch_seconds(machine, training, flop, 2.0**logs) * training.batches(flop)
    late = np.maximum(0, np.log2(seconds / training.run_s))
    stages, dp, _, _, micro = logs
    wrong = np.maximum(0, stages - math.log2(training.blocks(flop))) + np.maximum(0, stages - micro)
    wrong = wrong + np.maximum(0, micro + dp - math.log2(training.batch_tokens(flop)))
    spent = np.log2(seconds) if powers_of_two else 0.0
    total: FloatArray = logs[:4].sum(0) + spent + _PENALTY * (late + wrong)
    return total


def wall_flop(machine: Machine, training: Training | None = None, *, step_latency_s: float | None = None) -> float:
    """Training FLOP at which the serial communication steps alone fill the run: (D/B) · L · 4 · α = T.

    With equal exponents of batch and depth this is C = 120 (T · 2048² / (4 α · 20 · 120))², so C ∝ (T/α)².
    """
    training = training or Training()
    alpha = machine.step_latency_s if step_latency_s is None else step_latency_s
    if alpha <= 0:
        return math.inf

    def run_s(log_flop: float) -> float:
        flop = 10**log_flop
        return training.batches(flop) * training.blocks(flop) * SERIAL_STEPS_PER_BLOCK * alpha

    low, high = 15.0, 60.0
    if run_s(high) < training.run_s:
        return math.inf
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if run_s(middle) < training.run_s else (low, middle)
    return float(10**high)


def linear_until_flop(machine: Machine, training: Training | None = None) -> float:
    """Training FLOP at which utilization falls to 0.8 of its plateau (infinite where it does not below 1e36)."""
    training = training or Training()
    wanted = LINEAR_SHARE_OF_PLATEAU * training.utilization
    low, high = 22.0, 36.0
    if utilization(machine, 10**high, training).utilization > wanted:
        return math.inf
    for _ in range(14):
        middle = (low + high) / 2
        above = utilization(machine, 10**middle, training).utilization > wanted
        low, high = (middle, high) if above else (low, middle)
    return float(10 ** ((low + high) / 2))


def limits(
    machine: Machine, training: Training | None = None, flops: Sequence[float] = (), *, powers_of_two: bool = False
) -> Limits:
    """The curve at `flops` (default 1e24 to 1e32, two a decade) with its two limits."""
    training = training or Training()
    chosen = tuple(flops) or tuple(float(10 ** (24 + i / 2)) for i in range(17))
    curve = tuple(utilization(machine, flop, training, powers_of_two=powers_of_two) for flop in chosen)
    return Limits(machine, training, curve, linear_until_flop(machine, training), wall_flop(machine, training))


def what_ifs(machine: Machine, training: Training | None = None) -> dict[str, tuple[Machine, Training]]:
    """The paper's questions as changed inputs: bandwidth, latency, domain, batch, width and depth, sparsity."""
    base = training or Training()
    return {
        "as it is": (machine, base),
        "network × 2 beyond the domain": (replace(machine, beyond_Bps=2 * machine.beyond_Bps), base),
        "network × 4 beyond the domain": (replace(machine, beyond_Bps=4 * machine.beyond_Bps), base),
        "memory × 2": (replace(machine, dram_Bps=2 * machine.dram_Bps), base),
        "latency / 2": (replace(machine, latency_s=machine.latency_s / 2, launch_s=machine.launch_s / 2), base),
        "domain of 72": (replace(machine, domain=72), base),
        "one flat domain": (replace(machine, domain=0), base),
        "batch ∝ C^1/3": (machine, replace(base, batch_exponent=1 / 3)),
        "batch constant": (machine, replace(base, batch_exponent=0.0)),
        "wider, quarter of the depth": (machine, replace(base, width_over_depth=2.0)),
        "depth constant": (machine, replace(base, depth_exponent=0.0)),
        "8-bit words": (machine, replace(base, word_bytes=1.0)),
        "sparse, 8 × the parameters": (machine, replace(base, sparsity=8.0)),
    }
