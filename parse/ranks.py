"""Turns a path into the files that form a job: what each file is, whose it is, and which capture it belongs to.

Only the beginning of a file is read (and, for a plain one, its end), so a folder of large files costs as much as a
folder of small ones. Content decides first, names second, and a regular expression of the caller before both.
"""

from __future__ import annotations

import glob
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scaletrace.errors import InputError, UsageError
from scaletrace.parse.events import Events
from scaletrace.parse.groups import restore_members
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, SYNCHRONISING
from scaletrace.parse.limits import MOST_RANKS
from scaletrace.parse.literals import compiled, whole
from scaletrace.parse.members import kind_of
from scaletrace.parse.peek import EMPTY, HAS_PID, SUFFIXES, Found, read_head, sniff

SEVERAL_HEADERS = "file name (after “rank”), since several headers state the same rank"


@dataclass(frozen=True, slots=True)
class Capture:
    """Files of one recording of one job: at most one per rank. `name` is its folder (and attempt or cycle)."""

    name: str
    files: tuple[Found, ...]
    sidecars: tuple[Found, ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(f.rank for f in self.files if f.rank is not None))

    @property
    def world_size(self) -> int | None:
        """What the files or the manifest say; None where neither does."""
        said = [f.world_size for f in self.files if f.world_size]
        expected = _ranks_in(self.manifest.get("ranks"), "expected")
        return max([*said, len(expected) or 0]) or None

    @property
    def complete(self) -> bool:
        """Every rank of the world has a file; where nothing states a size, the ranks are 0 … n-1."""
        size = self.world_size
        return len(self.ranks) == size if size else self.ranks == tuple(range(len(self.files)))


def _ranks_in(value: Any, key: str) -> list[int]:
    """Ranks under `key` of a manifest's `ranks`, written as a list or as a count."""
    inner = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(inner, int) and not isinstance(inner, bool):
        return list(range(min(inner, MOST_RANKS)))
    return [r for r in inner if isinstance(r, int)] if isinstance(inner, list) else []


# ---------------------------------------------------------------- which files are there


def list_files(source: str | Path | Sequence[str | Path]) -> tuple[Path, list[Path]]:
    """The root folder and the files with a JSON ending below `source` (a folder, file, glob, or several of them)."""
    if not isinstance(source, str | Path):
        found = [path for one in source for path in list_files(one)[1]]
        if not found:
            raise InputError("no files given; name a folder of Kineto files or the files themselves")
        root = Path(*_common([path.parent for path in found]))
        return root, sorted(set(found))
    if not str(source):
        raise InputError("the path is empty; give a folder of Kineto files, one file or a glob")
    path = Path(source)
    if path.is_dir():
        return path, sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
    if path.is_file():
        return path.parent, [path]
    if path.exists():
        raise InputError(f"{path}: neither a file nor a folder; give a folder of Kineto files, one file or a glob")
    hits = sorted(Path(hit) for hit in glob.glob(str(source), recursive=True)) if glob.has_magic(str(source)) else []
    if not hits:
        raise InputError(f"{path}: no such file or folder; give a folder of Kineto files, one file or a glob")
    return list_files(hits)


def _counted(kinds: Mapping[str, int]) -> str:
    """What was found instead of traces, in words."""
    return ", ".join(f"{n} of kind {kind!r}" for kind, n in sorted(kinds.items())) or "no JSON files"


def _common(folders: Sequence[Path]) -> tuple[str, ...]:
    parts = [folder.parts for folder in folders]
    shared = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return tuple(shared) or (".",)


# ---------------------------------------------------------------- whose is it


_LABELLED = re.compile(r"(?:^|[^a-z])(?:global[_-]?)?(?:rank|r)[_-]?(\d+)(?![0-9])", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


def _stem(path: Path) -> str:
    return re.sub(r"(\.pt)?(\.trace)?\.json(\.gz|\.zst)?$", "", path.name)


def ranks_from_names(paths: Sequence[Path]) -> tuple[list[int | None], str]:
    """Ranks read from the file names of one capture, and the rule that gave them ("" where names do not tell).

    A number after "rank" or "r" wins. Otherwise the standing-alone number that differs in every name; names that end
    in host and process id, as dynolog and the TensorBoard handler write them, hold no rank.
    Raises UsageError when two numbers qualify.
    """
    if (labelled := _labelled(paths)) is not None:
        return list(labelled), "file name (after “rank”)"
    if len(paths) < 2 or any(HAS_PID.search(path.name) for path in paths):
        return [None] * len(paths), ""
    columns = _number_columns([_stem(path) for path in paths])
    varying = [column for column in columns if len(set(column)) == len(paths)]
    if not varying:
        return [None] * len(paths), ""
    if len(varying) > 1:
        shown = " or ".join(str(sorted(column)[:4]) for column in varying)
        raise UsageError(
            f"{paths[0].parent}: {shown} in the file names could be the ranks; say which with --rank-regex '…(\\d+)…'"
        )
    return list(varying[0]), "the only number that differs in every file name"


def _labelled(paths: Sequence[Path]) -> list[int] | None:
    """The number after "rank" or "r" in each name, where every name has one and no two are equal."""
    found = [_LABELLED.search(_stem(path)) for path in paths]
    ranks = [int(hit[1]) for hit in found if hit]
    return ranks if len(ranks) == len(paths) and len(set(ranks)) == len(ranks) else None


def _number_columns(stems: Sequence[str]) -> list[list[int]]:
    """Numbers that stand alone (not glued to letters, as in node02), by their position counted from the end."""
    rows: list[list[int]] = []
    for stem in stems:
        rows.append([int(n[0]) for n in _NUMBER.finditer(stem) if n.start() == 0 or not stem[n.start() - 1].isalpha()])
    depth = min(len(row) for row in rows)
    return [[row[-1 - i] for row in rows] for i in range(depth)]


def rank_in_events(events: Events) -> tuple[int, int] | None:
    """(rank, size of the default group, or 0) that the communication records state; None where they do not.

    "Rank" is the own position in the group for every collective without a root, so it names the global rank where the
    group's members are listed. Records that contradict each other state nothing.
    """
    arg = events.args.get("Rank")
    if arg is None or arg.is_text:
        return None
    rows = arg.rows[events.named("record_param_comms")[arg.rows]]
    names = ("Collective name", "Process Group Ranks", "Process Group Description")
    texts = [events.texts(key)[rows] for key in names]
    numbers = [events.ints(key)[rows] for key in ("Rank", "Group size", "Global rank start", "Global rank stride")]
    found: set[int] = set()
    world = 0
    for name, listed, said, rank, size, start, stride in np.unique(
        np.column_stack([*texts, *numbers]), axis=0
    ).tolist():
        if name < 0 or listed < 0 or KINDS[kind_of(events.strings[name])] not in SYNCHRONISING:
            continue
        members = restore_members(events.strings[listed], size, start, stride)
        if 0 <= rank < len(members):
            found.add(members[rank])
            world = max(world, size if said >= 0 and events.strings[said] == "default_pg" else 0)
    return (found.pop(), world) if len(found) == 1 else None


def _by_regex(files: Sequence[Found], rank_regex: str) -> list[Found]:
    pattern = compiled(rank_regex, "--rank-regex")
    if pattern.groups != 1:
        raise UsageError(
            f"--rank-regex {rank_regex!r} needs exactly one group, around the rank: for example 'r(\\d+)_'"
        )
    out = []
    for file in files:
        hit = pattern.search(file.path.name) or pattern.search(str(file.path))
        rank = whole(hit[1]) if hit is not None else None
        if rank is None:
            raise UsageError(f"{file.path}: --rank-regex {rank_regex!r} finds no rank in this name")
        out.append(replace(file, rank=rank, rank_rule="--rank-regex"))
    return out


# ---------------------------------------------------------------- captures


def discover(
    source: str | Path | Sequence[str | Path], health: Health, rank_regex: str | None = None, strict: bool = False
) -> dict[str, Capture]:
    """All captures below `source` by name, in the order in which they were recorded.

    Files that are no traces are listed in `health`; nothing but heads and tails is read.
    Raises InputError when no trace is found (and, if strict, for an empty file), UsageError when names are ambiguous.
    """
    root, paths = list_files(source)
    found = [sniff(path) for path in paths]
    for file in found:
        if strict and file.kind == "other" and file.why == EMPTY:
            raise InputError(f"{file.path}: the file is empty; record this rank again, or read without --strict")
        if file.kind in ("other", "execution trace"):
            health.dropped["files that are no Kineto traces"] += 1
            health.note(f"{_relative(file.path, root)}: skipped, {file.why}")
    traces = [file for file in found if file.kind == "kineto"]
    if not traces:
        seen = Counter(file.kind for file in found)
        raise InputError(
            f"{paths[0] if len(paths) == 1 else root}: no Kineto trace found ({_counted(seen)}); record one with `scaletrace collect`"
        )
    traces = _once(traces, root, health)
    if rank_regex is not None:
        traces = _by_regex(traces, rank_regex)
    folders: dict[Path, list[Found]] = defaultdict(list)
    for file in traces:
        folders[file.path.parent].append(file)
    captures: dict[str, Capture] = {}
    for folder in sorted(folders, key=lambda p: _natural(str(p))):
        name = _relative(folder, root)
        for suffix, files in _split(folders[folder], named=rank_regex is None):
            label = f"{name}{suffix}" if name != "." else suffix.lstrip(":") or "."
            captures[label] = Capture(label, tuple(files), *_beside(folder, found))
    return dict(sorted(captures.items(), key=lambda kv: (min(f.first_ns for f in kv[1].files), _natural(kv[0]))))


def _once(traces: Sequence[Found], root: Path, health: Health) -> list[Found]:
    """Each trace once: rank0.json beside its own rank0.json.gz is one file in two packings; the plain one is kept."""
    kept: dict[Path, Found] = {}
    out = []
    for file in sorted(traces, key=lambda f: (len(f.path.name), f.path.name)):
        first = kept.setdefault(file.path.with_name(re.sub(r"\.(gz|zst)$", "", file.path.name)), file)
        if first is file or read_head(first.path) != read_head(file.path):
            out.append(file)
            continue
        health.dropped["files that lie here in another packing too"] += 1
        health.note(f"{_relative(file.path, root)}: left out, {first.path.name} holds the same recording")
    return sorted(out, key=lambda f: f.path)


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def _beside(folder: Path, found: Sequence[Found]) -> tuple[tuple[Found, ...], dict[str, Any]]:
    """Flight-recorder dumps and the manifest of a folder, which may also lie in its `fr` folder or one level up."""
    near = {folder, folder / "fr", folder.parent, folder.parent / "fr"}
    dumps = [file for file in found if file.kind == "flight recorder" and file.path.parent in near]
    own = [file for file in dumps if file.path.parent in (folder, folder / "fr")]
    for place in (folder, folder.parent):
        path = place / "manifest.json"
        if path.is_file():
            try:
                loaded = json.loads(path.read_bytes())
            except (ValueError, RecursionError):
                continue
            if isinstance(loaded, dict):
                return tuple(own or dumps), loaded
    return tuple(own or dumps), {}


def _split(files: list[Found], named: bool) -> list[tuple[str, list[Found]]]:
    """Divide the traces of one folder into captures with at most one file a rank."""
    unknown = [file for file in files if file.rank is None]
    if unknown and named:
        ranks, rule = ranks_from_names([file.path for file in unknown])
        taken = {file.rank for file in files}
        if rule and not taken.intersection(ranks):
            renamed = {f.path: replace(f, rank=r, rank_rule=rule) for f, r in zip(unknown, ranks, strict=True)}
            files = [renamed.get(file.path, file) for file in files]
    files = _told_apart(files) if named else files
    by_rank = Counter(file.rank for file in files if file.rank is not None)
    if not by_rank or max(by_rank.values()) == 1:
        return [("", files)]
    return _repeated(files)


def _told_apart(files: list[Found]) -> list[Found]:
    """Where several files state one rank but every name holds another number after "rank", the names are right."""
    stated = [file.rank for file in files]
    ranks = _labelled([file.path for file in files])
    if len(set(stated)) == len(stated) or ranks is None:
        return files
    return [replace(file, rank=rank, rank_rule=SEVERAL_HEADERS) for file, rank in zip(files, ranks, strict=True)]


def _repeated(files: list[Found]) -> list[tuple[str, list[Found]]]:
    """Several files for one rank: the same text around the numbers is one series of captures.

    Within a series a number that ranks share (a step, a cycle, an attempt) tells captures apart; where there is none,
    the k-th newest file of each rank belongs to the k-th newest capture.
    """
    series: dict[str, list[Found]] = defaultdict(list)
    for file in files:
        series[_NUMBER.sub("#", _stem(file.path))].append(file)
    out: list[tuple[str, list[Found]]] = []
    for shape in sorted(series):
        tag = f":{shape}" if len(series) > 1 else ":"
        parts = _by_shared_number(series[shape]) or _by_time(series[shape])
        out += [(f"{tag}{name}", part) for name, part in parts] if len(parts) > 1 else [(tag, parts[0][1])]
    return out


def _by_shared_number(files: list[Found]) -> list[tuple[str, list[Found]]]:
    """Captures by the first number in the names that leaves one file a rank and is shared by several ranks."""
    numbers = [[int(n) for n in _NUMBER.findall(_stem(file.path))] for file in files]
    for column in range(len(numbers[0])):
        parts: dict[int, list[Found]] = defaultdict(list)
        for file, row in zip(files, numbers, strict=True):
            parts[row[column]].append(file)
        alone = all(len({file.rank for file in part}) == len(part) for part in parts.values())
        if alone and 1 < len(parts) < len(files):
            return [(f"#{value}", parts[value]) for value in sorted(parts)]
    return []


def _by_time(files: list[Found]) -> list[tuple[str, list[Found]]]:
    rows: dict[int | None, list[Found]] = defaultdict(list)
    for file in sorted(files, key=lambda f: (f.first_ns, _natural(f.path.name))):
        rows[file.rank].append(file)
    depth = max(len(row) for row in rows.values())
    # counted from the newest, so that a rank that began late still pairs with its peers
    return [
        (f"#{k}", [row[len(row) - depth + k] for row in rows.values() if len(row) - depth + k >= 0])
        for k in range(depth)
    ]


def choose(captures: Mapping[str, Capture], wanted: str | None, health: Health) -> Capture:
    """The capture to load: the one asked for, else the newest complete one, else the newest with most ranks."""
    if wanted is not None:
        hits = [c for name, c in captures.items() if name == wanted or name.rsplit("/", 1)[-1] == wanted]
        if len(hits) != 1:
            raise UsageError(f"capture {wanted!r} is not here; there are: {', '.join(captures)}")
        return hits[0]
    if len(captures) == 1:
        return next(iter(captures.values()))
    newest = list(captures.values())[::-1]
    complete = [capture for capture in newest if capture.complete]
    best = complete[0] if complete else max(newest, key=lambda c: len(c.files))
    rule = "newest complete one" if complete else "none is complete; this one has most ranks"
    health.guessed["captures chosen among several"] += 1
    health.note(
        f"{len(captures)} captures ({', '.join(captures)}): {best.name} used ({rule}); --capture NAME takes another"
    )
    return best
