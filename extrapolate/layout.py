"""Turns `fsdp=64,tp=8,pp=4` into the degrees of the parallel axes, and groups of a graph into the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from scaletrace.errors import UsageError
from scaletrace.parse.graph import Graph

AXES = ("dp", "fsdp", "tp", "pp", "ep", "cp")
DATA_AXES = ("dp", "fsdp")
"""Axes along which every rank does the same work on other samples; `world` and unnamed groups count as dp."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of the parallel axes (1 = not used) and what goes with them (0 or "" = as measured)."""

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

    def __post_init__(self) -> None:
        wrong = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) < 1]
        wrong += [f"{name}={getattr(self, name)}" for name in ("mbs", "microbatches", "seq") if getattr(self, name) < 0]
        if wrong:
            raise UsageError(f"degrees of a layout are at least 1: {', '.join(wrong)}")

    @property
    def ranks(self) -> int:
        """Ranks of the whole job; experts live on data ranks, so ep doesn't multiply."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp

    @staticmethod
    def parse(text: str) -> Layout:
        """Read `axis=degree,…`; raises UsageError that names the wrong part."""
        known = {field.name: field.type for field in fields(Layout)}
        values: dict[str, int | str] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            if name not in known:
                raise UsageError(f"layout: no axis {name!r} in {part!r}; known: {', '.join(known)}")
            if name in values:
                raise UsageError(f"layout: {name} is given twice in {text!r}")
            if name != "schedule" and not value.isdigit():
                raise UsageError(f"layout: {part!r} needs a whole number, as in {name}=8")
            values[name] = value if name == "schedule" else int(value)
        return replace(Layout(), **values)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, int | str]:
        """Only what differs from the default, as docs/cli.md shows layouts."""
        default = Layout()
        return {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }


def axis_of(axis: str) -> str:
    """The layout's axis for a group's: unnamed and world-wide groups belong to the data axis."""
    return axis if axis in AXES else "dp"


def measured_layout(graph: Graph, ranks: int) -> Layout:
    """Degrees that the graph's groups show; what is left of `ranks` belongs to the data axis.

    Where several groups have one axis, the largest used by a collective counts. A world-wide group (for a loss or a
    norm) is no axis of its own.
    """
    used = {c.group for c in graph.collectives if c.group >= 0} or set(range(len(graph.groups)))
    degrees: dict[str, int] = {}
    for index in used:
        group = graph.groups[index]
        if group.axis in AXES:
            degrees[group.axis] = max(degrees.get(group.axis, 1), group.size)
    if degrees.get("dp", 1) >= ranks > 1 and any(axis != "dp" for axis in degrees):
        degrees.pop("dp")
    known = Layout(**degrees)
    missing = ranks // known.ranks if known.ranks and ranks % known.ranks == 0 else 1
    if missing == 1:
        return known
    axis = "fsdp" if "fsdp" in degrees and "dp" not in degrees else "dp"
    return replace(known, **{"dp" if axis == "fsdp" else axis: known.dp * missing})


def scaled(layout: Layout, ranks: int, asked: Layout | None = None) -> Layout:
    """The measured layout stretched to `ranks` along its data axis, or `asked` if given, which must fit `ranks`.

    With both dp and fsdp in use (HSDP) the replicas grow and the shard groups keep their size.
    """
    if asked is not None:
        if asked.ranks == ranks:
            return asked
        rest = replace(asked, dp=1)
        if ranks % rest.ranks == 0 and asked.dp == 1:
            return replace(asked, dp=ranks // rest.ranks)
        raise UsageError(f"layout {_text(asked)} has {asked.ranks} ranks, which doesn't fit {ranks}")
    axis = "fsdp" if layout.fsdp > 1 and layout.dp == 1 else "dp"
    others = layout.ranks // getattr(layout, axis)
    if ranks % others:
        raise UsageError(f"{ranks} ranks can't hold layout {_text(layout)}: they must be a multiple of {others}")
    return replace(layout, **{axis: ranks // others})


def _text(layout: Layout) -> str:
    return ",".join(f"{name}={value}" for name, value in layout.to_json().items()) or "dp=1"


def degrees(layout: Layout) -> Mapping[str, int]:
    return {axis: getattr(layout, axis) for axis in AXES}
