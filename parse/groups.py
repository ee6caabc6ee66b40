"""Turns what the ranks say about their process groups into one list of Groups, each with its members and its axis."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scaletrace.errors import InputError
from scaletrace.parse.events import MISSING, Events
from scaletrace.parse.health import Health
from scaletrace.parse.job import Group, RankTrace
from scaletrace.parse.limits import MOST_RANKS
from scaletrace.parse.literals import compiled, whole
from scaletrace.parse.small import read_yaml

AXES = ("dp", "fsdp", "tp", "pp", "ep", "cp", "world")
_NUMBERS = re.compile(r"-?\d+")
FORWARD_PER_PASS = 2
"""All-reduces before a step's backward pass from which on they count as a layer's: one is a loss or a buffer's."""

# DeviceMesh ("mesh_tp"), torchtitan ("dp_shard_cp"), Megatron ("TENSOR_MODEL_PARALLEL_GROUP"), DeepSpeed ("ep_size_4")
_DESCRIPTIONS: tuple[tuple[str, str], ...] = (
    (r"dp_shard_(mod|in)_ep|expert_data|expert_dp|edp", "fsdp"),
    (r"expert_tensor|etp", "tp"),
    (r"expert|(^|_)ep(_|$)|moe", "ep"),
    (r"dp_shard|shard|fsdp|zero", "fsdp"),
    (r"tensor|(^|_)tp(_|$)", "tp"),
    (r"pipeline|(^|_)pp(_|$)|stage|embedding", "pp"),
    (r"dp_replicate|replicate|data_parallel|(^|_)dp(_|$)|ddp", "dp"),
    (r"context|sequence|(^|_)(cp|sp)(_|$)|ulysses|ring", "cp"),
)


@dataclass(frozen=True, slots=True)
class Said:
    """One group as one rank names it; `restored` where its list of members was cut and had to be completed."""

    name: str
    description: str
    members: tuple[int, ...]
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of the job, and which one a rank means by a name or a list of members."""

    groups: tuple[Group, ...]
    by_name: Mapping[tuple[int, str], int]
    by_members: Mapping[tuple[int, ...], int]

    def of(self, rank: int, name: str | None, members: tuple[int, ...] = ()) -> int:
        """Group id, -1 where nothing fits."""
        if name is not None and (found := self.by_name.get((rank, name))) is not None:
            return found
        return self.by_members.get(members, -1)

    def of_rank(self, rank: int) -> list[Group]:
        """The groups of more than one member that `rank` belongs to, in the order of their creation."""
        return [group for group in self.groups if group.size > 1 and rank in group.members]


def restore_members(text: str, size: int = MISSING, start: int = MISSING, stride: int = MISSING) -> tuple[int, ...]:
    """The members behind "Process Group Ranks", which Kineto cuts after 30 entries; () where they can't be known.

    A cut list is continued from `start` and `stride`, or from its own regular beginning, to `size` members.
    """
    head, cut, tail = text.partition("...")
    listed = [int(n) for n in _NUMBERS.findall(head)]
    if not cut and (size in (MISSING, len(listed)) or not listed):
        return tuple(listed)
    if start < 0 or stride <= 0:
        gaps = set(np.diff(listed).tolist())
        if len(gaps) != 1:
            return ()
        start, stride = listed[0], gaps.pop()
    if size > MOST_RANKS or start > MOST_RANKS or stride > MOST_RANKS:
        return ()
    members = tuple(range(start, start + stride * size, stride)) if size > 0 else ()
    last = [int(n) for n in _NUMBERS.findall(tail)]
    agrees = members[: len(listed)] == tuple(listed) and (not last or members[-1:] == (last[-1],))
    return members if agrees else ()


def from_header(header: Mapping[str, Any]) -> list[Said]:
    """Groups of `distributedInfo.pg_config`; its ranks are a list, or a text in on-demand traces."""
    info = header.get("distributedInfo")
    configs = info.get("pg_config") if isinstance(info, Mapping) else None
    said: list[Said] = []
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, Mapping):
            continue
        ranks, size = config.get("ranks"), config.get("pg_size")
        if isinstance(ranks, str):
            members = restore_members(ranks, size if isinstance(size, int) else MISSING)
        else:
            members = tuple(r for r in ranks if isinstance(r, int)) if isinstance(ranks, list) else ()
        name = config.get("pg_name", config.get("uid", ""))
        said.append(Said(str(name), str(config.get("pg_desc", "")), members, isinstance(ranks, str) and "..." in ranks))
    return said


def from_events(events: Events, health: Health) -> list[Said]:
    """Groups that the communication records of one rank name, each once."""
    ranks = events.args.get("Process Group Ranks")
    if ranks is None or not ranks.is_text or not len(ranks.rows):
        return []
    rows = ranks.rows
    columns = np.column_stack(
        [
            ranks.values.astype(np.int64),
            *(events.texts(key)[rows].astype(np.int64) for key in ("Process Group Name", "Process Group Description")),
            *(events.ints(key)[rows] for key in ("Group size", "Global rank start", "Global rank stride")),
        ]
    )
    said: list[Said] = []
    for text, name, description, size, start, stride in np.unique(columns, axis=0).tolist():
        listed = events.strings[text]
        members = restore_members(listed, size, start, stride)
        if not members:
            if "..." in listed:
                health.unmatched["groups whose list of members is cut and can't be completed"] += 1
            continue
        called = events.strings[name] if name >= 0 else ""
        said.append(Said(called, events.strings[description] if description >= 0 else "", members, "..." in listed))
    return said


def build_groups(said: Mapping[int, Sequence[Said]], world_size: int, health: Health) -> Groups:
    """One group for each (name, members) over all ranks, in the order of their creation.

    Where the ranks call one group by different names (name counters can differ), the k-th group with the same members
    and description on one rank is taken for the k-th on the others.
    """
    full: dict[tuple[int, str], Said] = {}
    for rank in sorted(said):
        for one in said[rank]:
            key = (rank, one.name)
            if one.members and (key not in full or (full[key].restored and not one.restored)):
                full[key] = one
    for one in {(s.name, s.members): s for s in full.values()}.values():
        if one.restored:
            health.repaired["group members restored from a cut list"] += 1
    named: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for (rank, name), one in full.items():
        named[(name, one.members)].append(rank)
    merged = _merge_names(named, full)
    keys = sorted(set(merged.values()), key=lambda key: (_order(key[0]), key[1]))
    ids = {key: i for i, key in enumerate(keys)}
    text: dict[tuple[str, tuple[int, ...]], str] = {}
    for (_, name), one in sorted(full.items()):
        text.setdefault(merged[(name, one.members)], one.description)
    groups = [Group(i, name, text[(name, members)], members) for (name, members), i in ids.items()]
    by_name = {(rank, name): ids[merged[(name, one.members)]] for (rank, name), one in full.items()}
    if world_size > 1 and not any(group.size == world_size for group in groups):
        groups.append(Group(len(groups), "", "all ranks (assumed)", tuple(range(world_size)), confidence=0.5))
        health.guessed["groups assumed to hold all ranks"] += 1
    by_members: dict[tuple[int, ...], int] = {}
    for group in groups:
        by_members.setdefault(group.members, group.id)
    return Groups(tuple(groups), by_name, by_members)


def _order(name: str) -> tuple[int, str]:
    number = whole(name)
    return (2**31, name) if number is None else (number, "")


def _merge_names(
    named: Mapping[tuple[str, tuple[int, ...]], list[int]], full: Mapping[tuple[int, str], Said]
) -> dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
    """Map each (name, members) to the one that stands for it."""
    out = {key: key for key in named}
    ranks = {rank for rank, _ in full}
    alike: dict[tuple[tuple[int, ...], str], list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for key, knowers in named.items():
        present = ranks.intersection(key[1])
        if set(knowers) != present:
            alike[(key[1], full[(knowers[0], key[0])].description)].append(key)
    for keys in alike.values():
        per_rank: dict[int, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        for key in sorted(keys, key=lambda k: _order(k[0])):
            for rank in named[key]:
                per_rank[rank].append(key)
        if len({len(own) for own in per_rank.values()}) != 1 or len(per_rank) < 2:
            continue
        for position in zip(*(per_rank[rank] for rank in sorted(per_rank)), strict=True):
            for key in position:
                out[key] = position[0]
    return out


# ---------------------------------------------------------------- axes


@dataclass(slots=True)
class Use:
    """How a group was used: how often each kind, how much of it through functional collectives, which annotations.

    passes    steps of its ranks in which operators were recorded
    reduced   all-reduces of more than a few values in those steps;  forward: those before the step's first backward
              operator (all of them where a trace with operators has no backward pass)
    alike     of the forward ones as many as have the most common size
    """

    kinds: Counter[str] = field(default_factory=Counter)
    functional: int = 0
    wrappers: set[str] = field(default_factory=set)
    passes: int = 0
    reduced: int = 0
    forward: int = 0
    alike: int = 0

    @property
    def reduces_activations(self) -> bool:
        """Whether equal all-reduces recur in the forward pass, as partial sums do and gradients never."""
        recurs = self.forward >= FORWARD_PER_PASS * max(1, self.passes) and self.forward >= self.reduced / 5
        return self.passes > 0 and recurs and self.alike >= self.forward / 2


def axis_from_description(description: str) -> str:
    """Axis that a group description names, "" where it names none."""
    text = description.lower()
    for pattern, axis in _DESCRIPTIONS:
        if re.search(pattern, text):
            return axis
    return ""


def name_axes(groups: Sequence[Group], uses: Mapping[int, Use], world_size: int, health: Health) -> tuple[Group, ...]:
    """Every group with its axis: from its description where that says so, else inferred with a confidence below 1."""
    out = []
    for group in groups:
        axis = axis_from_description(group.description)
        if axis:
            out.append(replace(group, axis=axis))
            continue
        use = uses.get(group.id, Use())
        axis, confidence = infer_axis(group, use, world_size)
        beside = any(
            other.id != group.id
            and other.size > 1
            and (other.size < world_size or axis_from_description(other.description))
            for other in groups
        )
        if beside and group.size == world_size and not {"all_gather", "reduce_scatter"} & set(use.kinds):
            axis, confidence = "world", min(confidence, 0.9) if use.kinds else 1.0
        if axis and confidence < 1:
            health.guessed["axes of groups inferred from their use"] += 1
        out.append(replace(group, axis=axis, confidence=min(confidence, group.confidence)))
    return tuple(out)


def infer_axis(group: Group, use: Use, world_size: int) -> tuple[str, float]:
    """(axis, confidence) from stride, size and the mix of collectives.

    Only sends and receives make a pipeline; all-to-all carries tokens to experts; parameters are gathered and
    gradients scattered in FSDP; all-reduces are tensor parallel when equal ones recur before the backward pass, data
    parallel when DDP or the layout (far apart) says so, and tensor parallel when they come from functional collectives
    or between neighbours.
    """
    kinds = {kind for kind, count in use.kinds.items() if count and kind != "barrier"}
    whole = group.size == world_size
    if group.size == 1 or not kinds:
        return ("world", 1.0) if whole else ("", 1.0)
    if kinds <= {"send", "recv"}:
        return "pp", 0.9
    if "FSDP" in use.wrappers and {"all_gather", "reduce_scatter"} & kinds:
        return "fsdp", 0.95
    if use.reduces_activations and not {"all_gather", "reduce_scatter", "all_to_all"} & kinds:
        return "tp", 0.85
    if "DDP" in use.wrappers and "all_reduce" in kinds and use.functional == 0:
        return "dp", 0.95
    if "all_to_all" in kinds:
        return ("ep", 0.6) if kinds <= {"all_to_all", "all_gather", "reduce_scatter"} else ("ep", 0.4)
    if {"all_gather", "reduce_scatter"} <= kinds:
        if use.functional:
            return "tp", 0.6
        return "fsdp", 0.7 if whole or group.stride > 1 else 0.5
    if "all_reduce" in kinds:
        if use.functional:
            return "tp", 0.8
        return ("dp", 0.6) if whole or group.stride > 1 else ("tp", 0.5)
    return ("world", 0.4) if whole else ("", 0.0)


def override_axes(groups: Sequence[Group], path: Path) -> tuple[Group, ...]:
    """Axes from a YAML file: a list `groups` of entries with `axis` and what selects the group.

    A selector is any of name, description (a regular expression), members, stride, size; all given ones must fit.
    Raises InputError where the file can't be used.
    """
    loaded = read_yaml(path, "give a YAML file that names the axes of groups")
    entries = loaded.get("groups") if isinstance(loaded, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: expected a list `groups` of entries such as {{size: 8, stride: 1, axis: tp}}")
    out = list(groups)
    for entry in entries:
        if entry.get("axis") not in AXES:
            raise InputError(f"{path}: axis {entry.get('axis')!r} is none of {', '.join(AXES)}")
        for i, group in enumerate(out):
            if _selects(entry, group, path):
                out[i] = replace(group, axis=entry["axis"], confidence=1.0)
    return tuple(out)


def _selects(entry: Mapping[str, Any], group: Group, path: Path) -> bool:
    known = {"axis", "name", "description", "members", "stride", "size"}
    if unknown := set(entry) - known:
        raise InputError(
            f"{path}: {sorted(map(str, unknown))} select nothing; use {', '.join(sorted(known - {'axis'}))}"
        )
    pattern = compiled(str(entry.get("description", "")), f"{path}: description", error=InputError)
    return (
        ("name" not in entry or str(entry["name"]) == group.name)
        and ("description" not in entry or pattern.search(group.description) is not None)
        and ("members" not in entry or entry["members"] == list(group.members))
        and ("stride" not in entry or entry["stride"] == group.stride)
        and ("size" not in entry or entry["size"] == group.size)
    )


def said_by(trace: RankTrace, health: Health) -> list[Said]:
    """Everything one rank says about groups, its header first."""
    return [*from_header(trace.header), *from_events(trace.events, health)]
