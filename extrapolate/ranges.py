"""Turns the named ranges of a step (frames of modules, annotations, compiled regions) into the layers that they name.

Among all names that occur several times, those are taken whose ranges hold most of the forward pass and hold alike
things; siblings of another name beside them (a dense layer among those with experts) are layers too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.repeats import ALIKE, SAME, STACK, same_length
from scaletrace.parse.events import Events, Int32Array, IntArray
from scaletrace.parse.job import Step

MODULE = "nn.Module: "
"""How Kineto names the Python frame of a module's call (`with_stack` or `with_modules`)."""
COVERED = 0.95
"""Names that hold this much of what the best one holds are as good."""
CLOSE = 0.8
"""Layers follow each other: less than a fifth of what stands between the first and the last is outside of them."""
_NOT = re.compile(
    r"^(ProfilerStep|nccl:|gloo:|mpi:|ucc:|c10d|FSDP::|Optimizer\.|PP:|(Forward|Backward) \d+$|enumerate\(DataLoader\)|"
    r"DistributedDataParallel\.forward|PyTorch Profiler|record_param_comms|Iteration )"
)
_WRAPPER = re.compile(r"Wrapper|FullySharded|FSDP|OptimizedModule|DataParallel|Checkpoint", re.IGNORECASE)
NUMBER = re.compile(r"(?:(?<=[._\s#:/\[(-])|(?<=[A-Za-z]))\d+(?=$|[^A-Za-z0-9])")
"""The number of an instance in a name: `Block_3`, `layers.3`, `layer3`, `block 3`; not the digits of a hash."""


@dataclass(frozen=True, slots=True)
class Range:
    """A named range over the forward operators [first, last); `parent` is the index of the one around it, -1 none."""

    name: str
    first: int
    last: int
    parent: int


@dataclass(frozen=True, slots=True)
class Named:
    """Layers by name: `spans` holds (first, last, unit) of every layer of every micro batch, in order.

    names, kinds: of each unit;  rule: the evidence
    """

    spans: tuple[tuple[int, int, int], ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    rule: str


def stem(name: str) -> str:
    """A name without the number of its instance: Block_3 → Block_#."""
    return NUMBER.sub("#", name)


def plain(name: str) -> str:
    """How a kind is shown: Block_# → Block, layers.# → layers."""
    return re.sub(r"[\s._:/#\[\](-]+$", "", name.replace("#", "")) or name


def find_ranges(events: Events, step: Step, starts_ns: IntArray) -> list[Range]:
    """Ranges of a step that hold forward operators, which begin at `starts_ns`; outer ones before those inside."""
    wanted = np.array([text.startswith(MODULE) for text in events.strings] + [False], np.bool_)
    notes = np.array([not _NOT.match(text) for text in events.strings] + [False], np.bool_)
    chosen = (events.in_cats("python_function") & wanted[events.name]) | (
        events.in_cats("user_annotation") & notes[events.name]
    )
    chosen &= (events.ts_ns >= step.start_ns) & (events.ts_ns < step.end_ns)
    rows = np.flatnonzero(chosen)
    rows = rows[np.lexsort((-events.dur_ns[rows], events.ts_ns[rows]))]
    first = np.searchsorted(starts_ns, events.ts_ns[rows])
    last = np.searchsorted(starts_ns, events.end_ns[rows])
    out: list[Range] = []
    open_: list[tuple[int, int, int]] = []
    for row, a, b in zip(rows.tolist(), first.tolist(), last.tolist(), strict=True):
        lane, end = int(events.lane[row]), int(events.end_ns[row])
        start = int(events.ts_ns[row])
        open_ = [item for item in open_ if item[1] > start]
        if b <= a:
            continue
        around = [item[2] for item in open_ if item[0] == lane and item[1] >= end]
        out.append(Range(events.name_of(row).removeprefix(MODULE), a, b, around[-1] if around else -1))
        open_.append((lane, end, len(out) - 1))
    return out


def named_layers(ranges: Sequence[Range], tokens: Int32Array, batch: Int32Array) -> Named | None:
    """The layers that a step's ranges name, None where no name is repeated over most of the forward pass.

    tokens, batch: int32[k] of the forward operators: what each is, and its micro batch
    """
    if not ranges or not len(tokens):
        return None
    number = int(batch[min(one.first for one in ranges)])
    mine = [at for at, one in enumerate(ranges) if batch[one.first] == number]
    stems = {at: stem(ranges[at].name) for at in range(len(ranges))}
    bags = _bags(ranges, mine, tokens)
    groups: dict[str, list[int]] = defaultdict(list)
    for at in mine:
        outer = ranges[at].parent
        while outer >= 0 and stems[outer] != stems[at]:
            outer = ranges[outer].parent
        if outer < 0:
            groups[stems[at]].append(at)
    total = int((batch == number).sum())
    for best in _candidates(ranges, groups, bags):
        chosen = sorted(_with_kin(ranges, best, groups, bags), key=lambda at: ranges[at].first)
        held = sum(ranges[at].last - ranges[at].first for at in chosen)
        through = ranges[chosen[-1]].last - ranges[chosen[0]].first
        if held >= STACK * total and held >= CLOSE * through:
            break
    else:
        return None
    kinds = _kinds(ranges, chosen, stems, bags)
    names = [ranges[at].name for at in chosen]
    distinct = len(set(names)) == len(names)
    units = names if distinct else [f"{plain(stems[at])} {i}" for i, at in enumerate(chosen)]
    spans = _everywhere(ranges, names, {stems[at] for at in chosen}, stems, batch, distinct)
    rule = "names of modules" if any(MODULE_LIKE.match(name) for name in names) else "annotations"
    return Named(tuple(spans), tuple(units), tuple(kinds), rule)


MODULE_LIKE = re.compile(r"^[A-Za-z_]\w*_\d+$")
"""What Kineto calls the instance of a module's class."""


def _bags(ranges: Sequence[Range], mine: Sequence[int], tokens: Int32Array) -> dict[int, npt.NDArray[np.float64]]:
    """Roots of the token counts of each range, of length one."""
    out = {}
    size = int(tokens.max()) + 1
    for at in mine:
        roots = np.sqrt(np.bincount(tokens[ranges[at].first : ranges[at].last], minlength=size).astype(np.float64))
        out[at] = roots / max(float(np.sqrt((roots**2).sum())), 1e-12)
    return out


def _candidates(
    ranges: Sequence[Range], groups: dict[str, list[int]], bags: dict[int, npt.NDArray[np.float64]]
) -> list[list[int]]:
    """The like instances of each name: those that explain most first, of equals the one with most instances."""
    found = []
    for name, group in groups.items():
        alike = _alike(group, bags)
        held = sum(ranges[at].last - ranges[at].first for at in alike)
        if len(alike) >= 2:
            found.append((held, len(alike), not _WRAPPER.search(name), alike))
    most_held = max((item[0] for item in found), default=0)
    good = [item for item in found if item[0] >= COVERED * most_held]
    good.sort(key=lambda item: (item[1], item[2], item[0]), reverse=True)
    rest = sorted((item for item in found if item[0] < COVERED * most_held), key=lambda item: item[0], reverse=True)
    return [item[3] for item in [*good, *rest]]


def _alike(group: list[int], bags: dict[int, npt.NDArray[np.float64]]) -> list[int]:
    """Those of a group that hold what another one of it holds."""
    if len(group) < 2:
        return []
    matrix = np.array([bags[at] for at in group])
    likeness = matrix @ matrix.T
    np.fill_diagonal(likeness, 0.0)
    return [at for at, most in zip(group, likeness.max(axis=1).tolist(), strict=True) if most >= ALIKE]


def _with_kin(
    ranges: Sequence[Range],
    best: list[int],
    groups: dict[str, list[int]],
    bags: dict[int, npt.NDArray[np.float64]],
) -> list[int]:
    """The layers, with those of other names that stand beside them under the same parent and hold alike things, and the
    stacks of other names under other parents (a decoder behind an encoder)."""
    parents = {ranges[at].parent for at in best}
    parent = Counter(ranges[at].parent for at in best).most_common(1)[0][0]
    out = list(best)

    def apart(at: int) -> bool:
        one = ranges[at]
        return all(one.last <= ranges[other].first or one.first >= ranges[other].last for other in out)

    for group in groups.values():
        for at in group:
            near = max(float(bags[at] @ bags[other]) for other in best)
            if ranges[at].parent == parent and near >= ALIKE and apart(at):
                out.append(at)
    for group in groups.values():
        alike = _alike(group, bags)
        if parents.isdisjoint(ranges[at].parent for at in alike) and all(apart(at) for at in alike):
            out += alike
    return out


def _kinds(
    ranges: Sequence[Range], chosen: Sequence[int], stems: dict[int, str], bags: dict[int, npt.NDArray[np.float64]]
) -> list[str]:
    """The kind of each layer: its name without number, told apart where layers of one name hold different things."""
    heads: list[tuple[str, int]] = []
    found = []
    length = {at: ranges[at].last - ranges[at].first for at in chosen}
    for at in chosen:
        for number, (name, head) in enumerate(heads):
            fits = same_length(np.array([length[head]], np.int64), length[at])[0]
            if name == stems[at] and fits and float(bags[at] @ bags[head]) >= SAME:
                found.append(number)
                break
        else:
            heads.append((stems[at], at))
            found.append(len(heads) - 1)
    several = Counter(name for name, _ in heads)
    labels = []
    for number, (name, _) in enumerate(heads):
        place = sum(other == name for other, _ in heads[:number])
        labels.append(f"{plain(name)} {'ABCDEFGHIJ'[place % 10]}" if several[name] > 1 else plain(name))
    return [labels[number] for number in found]


def _everywhere(
    ranges: Sequence[Range],
    names: Sequence[str],
    wanted: set[str],
    stems: dict[int, str],
    batch: Int32Array,
    distinct: bool,
) -> list[tuple[int, int, int]]:
    """(first, last, unit) of the layers in every micro batch: by name, or by order where all have one name."""
    unit_of = {name: unit for unit, name in enumerate(names)}
    exact: dict[int, list[int]] = defaultdict(list)
    loose: dict[int, list[int]] = defaultdict(list)
    for at, one in enumerate(ranges):
        outer = one.parent
        while outer >= 0 and stems[outer] not in wanted:
            outer = ranges[outer].parent
        if stems[at] in wanted and outer < 0:
            loose[int(batch[one.first])].append(at)
            if one.name in unit_of:
                exact[int(batch[one.first])].append(at)
    spans = []
    for number, every in loose.items():
        found = exact[number]
        by_name = distinct and len(found) >= len(names)
        if not by_name and len(found) != len(names):  # numbered through over micro batches: their order tells
            found = every
        for order, at in enumerate(sorted(found, key=lambda at: ranges[at].first)):
            unit = unit_of[ranges[at].name] if by_name else order
            if unit < len(names):
                spans.append((ranges[at].first, ranges[at].last, unit))
    return sorted(spans)
