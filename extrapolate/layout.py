"""Turns text such as `fsdp=64,tp=8,pp=4` into a checked Layout, and the groups of a graph into the layout it ran with.

Ranks are numbered as PyTorch's meshes and Megatron do: tp varies fastest, then cp, fsdp, dp, and pp slowest. Experts
take their ranks from the data axes as in torchtitan, so ep does not multiply the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from scaletrace.errors import UsageError
from scaletrace.extrapolate.rewrite import schedules
from scaletrace.parse.graph import Graph, GraphGroup

AXES = ("dp", "fsdp", "tp", "pp", "ep", "cp")
DATA_AXES = ("dp", "fsdp")
"""Axes along which every rank does the same work on other samples; `world` and unnamed groups count as dp."""
MESH = ("tp", "cp", "fsdp", "dp", "pp")
"""Axes that multiply to the world, innermost first."""
RECOMPUTE = ("none", "selective", "full", "off")
PRECISIONS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
"""Bytes of an element, by the names that `grads` takes."""
EXCHANGES = ("all_gather", "ring", "gather_scatter")
"""How keys and values of context ranks meet: gathered once (PyTorch's default), sent from rank to rank, or gathered one
by one with their gradients scattered (flex attention, Llama 3)."""
VOCABULARIES = ("whole", "gathered", "loss")
"""What `vocab` takes: embedding and head whole on each tensor rank, or slices of them by vocabulary."""
OPEN_SIZES = ("mbs", "microbatches", "seq", "layers", "hidden")
"""Sizes that a layout may leave as they were measured."""
LARGEST = 999_999_999
"""No degree, size or number of samples is larger; beyond it a number is a slip of the pen."""
_ALIASES = {
    "micro_batch": "mbs",
    "m": "microbatches",
    "micro_batches": "microbatches",
    "vpp": "chunks",
    "virtual": "chunks",
    "sequence": "seq",
    "dp_replicate": "dp",
    "dp_shard": "fsdp",
    "checkpointing": "recompute",
    "ac": "recompute",
    "width": "hidden",
    "depth": "layers",
    "gradients": "grads",
    "rotate": "exchange",
    "vocabulary": "vocab",
}


@dataclass(frozen=True, slots=True)
class Span:
    """The groups along an axis by shape: `size` members, `stride` apart, `count` such groups in the world."""

    size: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is cut over ranks (degrees, 1 = not used), and what else decides its time and memory.

    dp, fsdp          dp replicates, fsdp shards parameters, gradients and optimizer states
    mbs               samples a rank takes in one micro batch; 0 = as measured
    microbatches      micro batches of one step on one pipeline; 0 = as measured
    seq               tokens a sample; 0 = as measured
    schedule, chunks  pipeline schedule (PyTorch's name, "" = as measured or 1F1B) and stages a rank
    sp                sequence parallelism beside tp: norms and residuals split over tensor ranks
    recompute         "selective" (attention only) or "full" activation checkpointing; "none" = as measured; "off", in
                      text also recompute=none, takes a measured one away
    zero              0 … 3: what plain dp ranks shard among them (1 optimizer, 2 gradients, 3 parameters)
    layers, hidden    depth and width of the model; 0 = as measured
    vocab             how tensor ranks share embedding and head: "whole" on each, "gathered" (slices of the vocabulary,
                      logits gathered) or "loss" (slices up to the loss); "" = as measured
    exchange          how context ranks exchange keys and values (one of EXCHANGES); "" = as measured or all_gather
    grads             precision in which gradients are reduced ("fp32", "bf16", "fp16", "fp8"); "" = as measured
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    mbs: int = 0
    microbatches: int = 0
    seq: int = 0
    schedule: str = ""
    chunks: int = 1
    sp: bool = False
    recompute: str = "none"
    zero: int = 0
    layers: int = 0
    hidden: int = 0
    grads: str = ""
    exchange: str = ""
    vocab: str = ""

    def __post_init__(self) -> None:
        wrong = [f"{axis}={getattr(self, axis)}" for axis in (*AXES, "chunks") if getattr(self, axis) < 1]
        wrong += [f"{name}={getattr(self, name)}" for name in OPEN_SIZES if getattr(self, name) < 0]
        if wrong:
            raise UsageError(f"degrees of a layout are at least 1: {', '.join(wrong)}")
        data = self.fsdp * self.dp * self.cp
        if data > 1 and data % self.ep:  # a layout that leaves the data ranks open takes as many as the size gives
            raise UsageError(
                f"layout: ep={self.ep} must divide the data ranks dp × fsdp × cp = "
                f"{self.dp} × {self.fsdp} × {self.cp} = {self.dp * self.fsdp * self.cp}"
            )
        if self.recompute not in RECOMPUTE:
            raise UsageError(f"layout: recompute={self.recompute} must be one of {', '.join(RECOMPUTE)}")
        if self.exchange and self.exchange not in EXCHANGES:
            raise UsageError(f"layout: exchange={self.exchange} must be one of {', '.join(EXCHANGES)}")
        if self.grads and self.grads not in PRECISIONS:
            raise UsageError(f"layout: grads={self.grads} must be one of {', '.join(PRECISIONS)}")
        if self.vocab and self.vocab not in VOCABULARIES:
            raise UsageError(f"layout: vocab={self.vocab} must be one of {', '.join(VOCABULARIES)}")
        if self.vocab in VOCABULARIES[1:] and self.tp == 1:
            raise UsageError(f"layout: vocab={self.vocab} splits the vocabulary over tensor ranks, and tp is 1")
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"layout: zero={self.zero} must be 0, 1, 2 or 3")
        if self.sp and self.tp == 1:
            raise UsageError("layout: sp=1 splits the sequence over tensor ranks, and tp is 1; leave it out")
        if self.pp == 1 and self.chunks > 1:
            raise UsageError(f"layout: chunks={self.chunks} needs a pipeline, and pp is 1")
        if self.schedule:
            object.__setattr__(self, "schedule", schedules.canonical(self.schedule))
        if self.pp > 1 and self.microbatches:
            schedules.check(self.pipeline_schedule, self.pp, self.microbatches, self.chunks)

    @staticmethod
    def parse(text: str) -> Layout:
        """Read `axis=degree,…`; axes left out are 1. Raises UsageError that names the wrong part."""
        known = {field.name: field for field in fields(Layout)}
        values: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.replace(" ", ",").split(","))):
            name, _, value = part.partition("=")
            name = _ALIASES.get(name.strip().lower(), name.strip().lower())
            if name not in known:
                raise UsageError(f"layout: no axis {name!r} in {part!r}; known: {', '.join(known)}")
            if name in values:
                raise UsageError(f"layout: {name} is given twice in {text!r}")
            values[name] = _value(name, value.strip(), part)
        return Layout(**values)

    @property
    def ranks(self) -> int:
        """Ranks of the whole job; experts live on data ranks, so ep doesn't multiply."""
        return prod(getattr(self, axis) for axis in MESH)

    @property
    def data_ranks(self) -> int:
        """Ranks that take different samples."""
        return self.dp * self.fsdp

    @property
    def shards(self) -> int:
        """Ranks over which the optimizer states of one tensor and pipeline slice are spread."""
        return self.fsdp * self.cp * (self.dp if self.zero else 1)

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def pipeline_schedule(self) -> str:
        """The schedule, or the usual one for the number of chunks where the layout leaves it open."""
        return self.schedule or ("1F1B" if self.chunks == 1 else "Interleaved1F1B")

    def span(self, axis: str) -> Span:
        """The groups along one axis; "data" is dp × fsdp, "shard" what FSDP spreads over (fsdp × cp)."""
        if axis == "ep":
            return Span(self.ep, self.tp * self.cp, self.ranks // self.ep)
        parts = {"data": ("fsdp", "dp"), "shard": ("cp", "fsdp")}.get(axis, (axis,))
        if any(part not in MESH for part in parts):
            raise UsageError(f"a layout has no axis {axis!r}; one of {', '.join(AXES)}, data, shard")
        size = prod(getattr(self, part) for part in parts)
        stride = prod(getattr(self, inner) for inner in MESH[: MESH.index(parts[0])])
        return Span(size, stride, self.ranks // size)

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Where a rank stands on each axis of MESH."""
        if not 0 <= rank < self.ranks:
            raise UsageError(f"rank {rank} is not in a world of {self.ranks}")
        out = {}
        for axis in MESH:
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return out

    def members(self, axis: str, rank: int) -> range:
        """The ranks of `rank`'s group along one axis of MESH."""
        span = self.span(axis)
        first = rank - self.coordinates(rank)[axis] * span.stride
        return range(first, first + span.size * span.stride, span.stride)

    def over(self, base: Layout) -> Layout:
        """This layout with everything that it leaves open taken from `base`."""
        names = [name for name in (*OPEN_SIZES, "schedule", "grads", "exchange") if not getattr(self, name)]
        names += ["recompute"] if self.recompute == "none" else []
        names += ["vocab"] if not self.vocab and self.tp > 1 else []
        return replace(self, **{name: getattr(base, name) for name in names})

    def to_json(self) -> dict[str, int | str]:
        """Only what differs from the default, as docs/cli.md shows layouts."""
        default = Layout()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: int(value) if isinstance(value, bool) else value
            for name, value in values.items()
            if value != getattr(default, name)
        }

    def __str__(self) -> str:
        """As `parse` reads it; what has its default is left out."""
        return ",".join(f"{name}={value}" for name, value in self.to_json().items()) or "dp=1"


def _value(name: str, value: str, part: str) -> Any:
    if name == "recompute" and value == "none":
        return "off"  # who writes it wants none; the field's own "none" leaves it as measured
    if name in ("schedule", "recompute", "grads", "vocab", "exchange"):
        return value
    if name == "sp" and value.lower() in ("0", "1", "true", "false", "yes", "no"):
        return value.lower() in ("1", "true", "yes")
    if name == "sp":
        raise UsageError(f"layout: {part!r} must be 0 or 1, as in sp=1")
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"layout: {part!r} needs a whole number written in digits alone, as in {name}=8")
    if len(value.lstrip("0")) > len(str(LARGEST)):
        raise UsageError(f"layout: {part!r} is too large; no degree or size is above {LARGEST:,}")
    return int(value)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def axis_of(axis: str) -> str:
    """The layout's axis for a group's: unnamed and world-wide groups belong to the data axis."""
    return axis if axis in AXES else "dp"


def measured_layout(graph: Graph, ranks: int) -> Layout:
    """Degrees that the graph's groups show; what is left of `ranks` belongs to the data axis.

    Where several groups have one axis, the largest used by a collective counts. A world-wide group (for a loss or a
    norm) is no axis of its own, nor are the groups of ranks that hold the same experts.
    """
    used = {c.group for c in graph.collectives if c.group >= 0} or set(range(len(graph.groups)))
    every = [graph.groups[index] for index in sorted(used)]
    found = [group for group in every if group.axis in AXES]
    experts = max((group for group in found if group.axis == "ep"), key=lambda group: group.size, default=None)
    degrees: dict[str, int] = {}
    for group in found:
        if group.axis != "ep" and not (experts and _of_same_experts(group, experts, every)):
            degrees[group.axis] = max(degrees.get(group.axis, 1), group.size)
    if degrees.get("dp", 1) >= ranks > 1 and any(axis != "dp" for axis in degrees):
        degrees.pop("dp")
    # Parameters are sharded over fsdp × cp, so that group counts the context ranks too where it is one with them.
    cp, wide = degrees.get("cp", 1), degrees.get("fsdp", 1)
    if cp > 1 and wide % cp == 0 and prod(size for axis, size in degrees.items() if axis != "ep") > ranks:
        degrees["fsdp"] = wide // cp
    known = Layout(**degrees)  # type: ignore[arg-type]
    missing = ranks // known.ranks if known.ranks and ranks % known.ranks == 0 else 1
    known = replace(known, dp=known.dp * missing) if missing > 1 else known
    degree = experts.size if experts else 1
    return replace(known, ep=degree) if known.data_ranks * known.cp % degree == 0 else known


def renamed(groups: Sequence[GraphGroup], layout: Layout) -> tuple[tuple[GraphGroup, ...], list[str]]:
    """Groups whose axis the layout says is not in use, under the one axis that it has as many ranks on instead.

    Axes are inferred from what groups do, which can't tell some apart: keys and values of context ranks travel by
    all-to-all as tokens of experts do. An axis that another group has already is not given twice.
    Returns the groups, and what was renamed in words.
    """
    out, said = list(groups), []
    shown = {group.axis for group in groups if group.size > 1 and group.size == getattr(layout, group.axis, 0)}
    for index, group in enumerate(groups):
        if group.size < 2 or group.axis not in AXES or getattr(layout, group.axis) > 1:
            continue
        fits = [axis for axis in MESH if axis not in shown and getattr(layout, axis) == group.size]
        if len(fits) == 1:
            out[index] = replace(group, axis=fits[0])
            said.append(f"Groups of {group.size} taken for {group.axis} are {fits[0]}, as the layout says.")
    return tuple(out), sorted(set(said))


def _of_same_experts(group: GraphGroup, experts: GraphGroup, others: Sequence[GraphGroup]) -> bool:
    """Whether a data group joins every ep-th rank of a larger data group: they hold the same experts."""
    if group.axis not in DATA_AXES or experts.size < 2 or group.stride != experts.stride * experts.size:
        return False
    return any(
        other.axis in (group.axis, "dp", "ep", "world") and other.size >= group.size * experts.size for other in others
    )


def scaled(layout: Layout, ranks: int, asked: Layout | None = None) -> Layout:
    """The measured layout stretched to `ranks` along its data axis, or `asked` if given, which must fit `ranks`.

    With both dp and fsdp in use (HSDP) the replicas grow and the shard groups keep their size.
    """
    if asked is not None:
        if asked.ranks == ranks and asked.data_ranks * asked.cp % asked.ep == 0:
            return asked
        rest = replace(asked, dp=1)
        if ranks % rest.ranks == 0 and asked.dp == 1:
            return replace(asked, dp=ranks // rest.ranks)
        raise UsageError(f"layout {asked} has {asked.ranks} ranks, which doesn't fit {ranks}")
    axis = "fsdp" if layout.fsdp > 1 and layout.dp == 1 else "dp"
    others = layout.ranks // getattr(layout, axis)
    if ranks % others:
        raise UsageError(f"{ranks} ranks can't hold layout {layout}: they must be a multiple of {others}")
    return replace(layout, fsdp=ranks // others) if axis == "fsdp" else replace(layout, dp=ranks // others)


def degrees(layout: Layout) -> Mapping[str, int]:
    """Degree of every axis."""
    return {axis: getattr(layout, axis) for axis in AXES}
