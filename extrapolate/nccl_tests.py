"""Turns the output of nccl-tests and rccl-tests into evidence: tables of any version, their JSON reports, CSV.

The columns of a table differ by version (root came later, error became #wrong, an in-place half may stand alone) and
times of 100 ms and more are printed without a decimal point. What identifies a time is therefore not its place but
what it says: bytes / time is the algorithm bandwidth beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.calibrate import Evidence
from scaletrace.parse.health import Health

KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "sendrecv": "send",
}
"""Programs that the cost model has a collective for, by their name without separators; the others are counted."""
BUS_FACTOR: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
}
"""Bus over algorithm bandwidth as nccl-tests prints them (doc/PERFORMANCE.md)."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROGRAM = re.compile(r"([a-z_]{1,40})_perf(?:_mpi)?(?![a-z])", re.IGNORECASE)
_DEVICE = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)")
_ROW = re.compile(
    r"(?<![\w.])(\d+)\s+(\d+)\s+((?:u?int|char|half|float|double|bfloat|bf|fp|f8)\w*)\s+(\S.*)$", re.IGNORECASE
)
_BLANK = re.compile(r"\s*")
LARGEST_FILE = 1 << 26
"""Characters; a run of 40 sizes is 10 kB long."""
LONGEST_LINE = 4096
"""No line of a table is longer; what is longer (a log, a binary) is not searched."""
_ROUNDING = 0.006
"""Half a unit of the second decimal, in which bandwidths are printed, and a little."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: what it measured, and on what it stands.

    kind is a value of KINDS, "" where nothing names it, or the program's own name where the cost model has no such
    collective; listed counts the ranks that the run itself lists and hosts the machines they are on, 0 where it doesn't;
    wrong counts wrong results.
    """

    kind: str
    size_bytes: float
    time_us: float = math.nan
    algbw: float = math.nan
    busbw: float = math.nan
    wrong: float = 0.0
    redop: str = ""
    listed: int = 0
    hosts: int = 0
    cpu: bool = False


def read_nccl_tests(text: str, ranks: int, name: str = "nccl-tests output") -> tuple[list[Evidence], Health]:
    """Evidence from one file over `ranks` ranks, and what of it could not be used, counted by reason.

    The collective is named by the program's own line, by the row, or else by `name` (all_reduce.txt). Times are those
    out of place where both are there. Raises InputError, naming `name` and the remedy, where no row can be used.
    """
    if ranks < 2:
        raise UsageError(f"{name}: measurements over {ranks} ranks say nothing of transfers; at least 2 are needed")
    health = Health()
    named = _kind_of(name)
    rows = 0
    found: list[Evidence] = []
    for row in _rows(text.lstrip("\ufeff")):
        rows += 1
        if not row.kind:
            row = replace(row, kind=named if named in BUS_FACTOR else _kind_by_bandwidth(row, ranks, health))
        reason = _unusable(row, ranks)
        if reason:
            health.dropped[f"rows of nccl-tests output {reason}"] += 1
        elif row.size_bytes > 0:
            per_node = ranks // row.hosts if row.hosts and row.listed == ranks and ranks % row.hosts == 0 else None
            found.append(Evidence(row.kind, row.size_bytes, ranks, row.time_us * 1e-6, per_node=per_node))
    if not found:
        raise InputError(_nothing(name, rows, ranks, health))
    return found, health


def _nothing(name: str, rows: int, ranks: int, health: Health) -> str:
    """Why a file gave nothing, in one sentence with the remedy."""
    if not rows:
        return f"{name}: no row of an nccl-tests table found (a row holds bytes, count, type and a time in µs)"
    if not health.dropped:
        return f"{name}: all rows are of 0 bytes; measure larger messages (nccl-tests -b 8 -e 1G -f 2)"
    reason, count = health.dropped.most_common(1)[0]
    remedy = ""
    if "not named" in reason:
        remedy = "; keep the line that names the program, or name the file after it, as all_reduce.txt"
    elif "other ranks" in reason or "bandwidth" in reason:
        remedy = f"; check that {ranks} is how many ranks ran (RANKS:FILE) and that the collective is the right one"
    return f"{name}: nothing to use: {count} {reason}{remedy}"


def _unusable(row: Row, ranks: int) -> str:
    """Why a row is no evidence, "" where it is."""
    if not row.kind:
        return "whose collective is not named"
    if row.kind not in BUS_FACTOR:
        return f"of {row.kind}, which has no cost model of its own"
    if row.cpu:
        return "with CPU time (-C), not the time of the transfer"
    if row.size_bytes == 0:
        return ""
    if not (math.isfinite(row.time_us) and row.time_us > 0):
        return "without a readable time"
    if not (math.isfinite(row.size_bytes) and row.size_bytes > 0):
        return "without a readable size"
    if row.wrong > 0:
        return "with wrong results"
    if row.algbw >= 1 and abs(row.size_bytes / row.time_us / 1e3 / row.algbw - 1) > 0.1:
        return "whose time and bandwidth disagree"
    if row.listed and row.listed != ranks:
        return f"of runs over other ranks: {row.listed}, not {ranks}"
    expected = BUS_FACTOR[row.kind](ranks)
    if row.algbw >= 1 and math.isfinite(row.busbw) and abs(row.busbw / row.algbw - expected) > 0.05 * expected + 0.01:
        return f"whose bus bandwidth isn't that of {row.kind} over {ranks} ranks"
    return ""


def _kind_of(text: str) -> str:
    """The kind that a program, a column or a file is named after; the bare name where the cost model has none."""
    word = re.sub(r"[^a-z]", "", re.split(r"[\\/]", text)[-1].lower())
    # Longest first: reduce_scatter is not reduce, and alltoallv not alltoall.
    for program in ("alltoallv", "hypercube", *sorted(KINDS, key=len, reverse=True), "gather", "scatter"):
        if program in word:
            return KINDS.get(program, program)
    return ""


def _kind_by_bandwidth(row: Row, ranks: int, health: Health) -> str:
    """Old versions don't name their program; an operation and bus over algorithm bandwidth may tell it."""
    if not row.algbw >= 1 or row.redop in ("", "none") or ranks < 3:
        return ""
    ratio = row.busbw / row.algbw
    near = [kind for kind in ("all_reduce", "reduce_scatter", "reduce") if abs(ratio - BUS_FACTOR[kind](ranks)) < 0.03]
    if len(near) != 1:
        return ""
    health.guessed["collectives of nccl-tests rows, from their bandwidths"] += 1
    return near[0]


def _rows(text: str) -> Iterator[Row]:
    """Rows of whichever form the text has."""
    documents = _documents(text) or _documents(re.sub(r":\s*N/A\b", ":null", text))
    if documents:
        for run in documents:
            if _is_report(run):
                yield from _report_rows(run)
        yield from _flat_rows([_lowered(each) for each in documents if not _is_report(each)])
        return
    lines = [line for line in _ANSI.sub("", text).splitlines() if len(line) <= LONGEST_LINE]
    header = next((at for at, line in enumerate(lines) if _csv_header(line)), None)
    if header is None:
        yield from _table_rows(lines)
    else:
        yield from _flat_rows(_csv_values(lines[header:]))


def _table_rows(lines: list[str]) -> Iterator[Row]:
    """Rows of printed tables, with whatever a launcher put before each line and between them."""
    kind, cpu, cut = "", False, False
    listed: dict[str, dict[str, str]] = {}
    for line in lines:
        program = _PROGRAM.search(line)
        if program:
            kind = _kind_of(program[1])
        device = _DEVICE.search(line)
        if device:
            listed.setdefault(device[2] or "0", {})[device[1]] = device[3]
        elif "minBytes" in line:
            listed, cut = {}, False
        # A list of more ranks than fit its buffer ends in dots.
        cut |= bool(listed) and line.rstrip().endswith("...")
        if "algbw" in line:
            cpu = "cputime" in line
        row = _ROW.search(line)
        if row:
            listed_ranks, hosts = (0, 0) if cut else _alike(listed.values())
            found = _table_row(float(row[1]), row[4].split())
            yield replace(found, kind=kind, cpu=cpu, listed=listed_ranks, hosts=hosts)


def _alike(groups: Iterable[Mapping[str, str]]) -> tuple[int, int]:
    """Ranks and hosts of each of the groups that run side by side (rank: host), 0 where they differ or none is listed."""
    shapes = {(len(group), len(set(group.values()))) for group in groups}
    return shapes.pop() if len(shapes) == 1 else (0, 0)


def _table_row(size: float, tokens: list[str]) -> Row:
    """The first three tokens in which bytes / time is the bandwidth that follows it: out of place comes first."""
    redop = tokens[0] if tokens[0].isalpha() else ""
    numbers = [_number(token) for token in tokens]
    for at in range(len(tokens) - 2):
        time_us, algbw, busbw = numbers[at : at + 3]
        if not (time_us > 0 and algbw >= 0 and busbw >= 0):
            continue
        expected = size / time_us / 1e3
        # Times of 10 s and more are printed with two digits (1.2e+07).
        coarse = "e" in tokens[at]
        if size == 0 or abs(algbw - expected) <= _ROUNDING + (0.06 if coarse else 0.01) * expected:
            time_us = size / algbw / 1e3 if coarse and algbw > 0 else time_us
            after = tokens[at + 3] if at + 3 < len(tokens) else ""
            return Row("", size, time_us, algbw, busbw, float(after) if after.isdigit() else 0.0, redop)
    return Row("", size, redop=redop)


def _number(value: Any) -> float:
    """The number that a token or a JSON value holds, NaN where it holds none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _documents(text: str) -> list[Mapping[str, Any]]:
    """The JSON objects that the text consists of, one after the other or in lists; none where it isn't JSON."""
    decoder, out = json.JSONDecoder(), []
    at = _BLANK.match(text).end()  # type: ignore[union-attr]
    if not text.startswith(("{", "["), at):
        return []
    try:
        while at < len(text):
            document, end = decoder.raw_decode(text, at)
            out += document if isinstance(document, list) else [document]
            at = _BLANK.match(text, end).end()  # type: ignore[union-attr]
    except (json.JSONDecodeError, RecursionError):
        return []
    return [each for each in out if isinstance(each, Mapping)]


def _is_report(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("results"), list)


def _lowered(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).strip().lower(): value for key, value in values.items()}


def _report_rows(document: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of one run that nccl-tests wrote with --json: its program stands in `args`, its ranks in `devices`."""
    arguments, config = document.get("args"), document.get("config")
    program = next((word for word in arguments if "_perf" in str(word)), "") if isinstance(arguments, list) else ""
    devices = config.get("devices") if isinstance(config, Mapping) else None
    groups: dict[str, dict[str, str]] = {}
    for at, device in enumerate(devices if isinstance(devices, list) else ()):
        if isinstance(device, Mapping):
            group = groups.setdefault(str(device.get("group")), {})
            group[str(device.get("rank", at))] = str(device.get("hostname", ""))
    # Without MPI a report lists its first device only, so that a single one tells nothing.
    listed, hosts = _alike(groups.values())
    for result in document["results"]:
        if isinstance(result, Mapping):
            row = _nested_row(result, _kind_of(str(program)))
            yield replace(row, listed=listed, hosts=hosts) if listed > 1 else row


def _nested_row(result: Mapping[str, Any], kind: str) -> Row:
    """One result of a JSON report: out of place, or in place where that alone was measured."""
    halves = [half for key in ("out_of_place", "in_place") if isinstance(half := result.get(key), Mapping)]
    size, redop = _number(result.get("size")), str(result.get("redop") or "")
    if not halves:
        return Row(kind, size, redop=redop)
    half = halves[0]
    wrong = _number(half.get("nwrong"))
    return Row(
        kind, size, _number(half.get("time", half.get("cpu_time"))), _number(half.get("alg_bw")),
        _number(half.get("bus_bw")), wrong if wrong > 0 else 0.0, redop, cpu="cpu_time" in half,
    )  # fmt: skip


ALIASES = {
    "size": ("size", "size_bytes", "bytes", "nbytes", "size(b)", "size (b)", "message_size"),
    "time": ("time", "time_us", "time(us)", "time (us)", "out_of_place_time", "oop_time", "latency_us", "cputime"),
    "name": ("collective", "name", "kind", "operation", "test"),
    "ranks": ("ranks", "nranks", "gpus", "world_size"),
    "algbw": ("algbw", "alg_bw", "algbw_gbps", "algbw(gb/s)"),
    "busbw": ("busbw", "bus_bw", "busbw_gbps", "busbw(gb/s)"),
    "wrong": ("#wrong", "wrong", "nwrong"),
    "inplace": ("inplace", "in_place"),
    "redop": ("redop", "op"),
}


def _cells(line: str) -> list[str]:
    return [word.strip().strip('"') for word in line.split(",")]


def _csv_header(line: str) -> bool:
    """Whether a line names comma-separated columns, a size and a time among them."""
    names = [word.lower() for word in _cells(line)]
    return len(names) > 1 and all(any(alias in names for alias in ALIASES[key]) for key in ("size", "time"))


def _csv_values(lines: list[str]) -> list[dict[str, Any]]:
    """What the lines below a header hold: rccl-tests -Z csv, and tables that users made of one."""
    names = [word.lower() for word in _cells(lines[0])]
    # rccl-tests writes the number of nodes into every row and forgets to name it.
    at = names.index("ranks") if "ranks" in names else 0
    longer = [*names[:at], "nodes", *names[at:]] if at else names
    rows = [_cells(line) for line in lines[1:] if line.strip()]
    return [
        dict(zip(longer if len(values) == len(longer) else names, values, strict=False))
        for values in rows
        if [word.lower() for word in values] != names
    ]


def _flat_rows(found: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Rows with named columns; those in place count only where none is out of place."""

    def get(values: Mapping[str, Any], key: str) -> Any:
        return next((values[alias] for alias in ALIASES[key] if alias in values), None)

    inside = [str(get(values, "inplace")).lower() in ("1", "true") for values in found]
    for values, in_place in zip(found, inside, strict=True):
        if get(values, "size") is None or (in_place and not all(inside)):
            continue
        wrong, ranks = _number(get(values, "wrong")), _number(get(values, "ranks"))
        yield Row(
            _kind_of(str(get(values, "name") or "")), _number(get(values, "size")), _number(get(values, "time")),
            _number(get(values, "algbw")), _number(get(values, "busbw")), wrong if wrong > 0 else 0.0,
            str(get(values, "redop") or ""), int(ranks) if 1 < ranks < math.inf else 0, cpu="cputime" in values,
        )  # fmt: skip
