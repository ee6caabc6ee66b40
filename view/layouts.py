"""Turns the JSON answer of `search` into Rich tables of at most 80 columns: the fastest layouts, and why others lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrace.view import units

Document = Mapping[str, Any]
Column = tuple[str, list[str]]
WIDTH = 80
_DEGREES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
_MEANINGS = {
    "gradient and weight traffic": "what data ranks exchange beyond the compute that hides it",
    "compute slowed beside hidden collectives": "kernels share the device with collectives that run beside them",
    "pipeline bubble": "stages wait for the first and last micro batches",
    "gathering of keys and values": "ranks of cp read each other's part of a sequence for attention",
    "host between operators": "the device waits for the next launch",
}
"""Terms of the estimate (search.NAMES) that their name alone does not explain."""
_SCHEDULES = {"Interleaved1F1B": "interleaved", "ZBVZeroBubble": "ZBV", "InterleavedZeroBubble": "interleaved ZB"}


def search_tables(doc: Document) -> list[RenderableType]:
    """Everything that `scaletrace search` prints; what is to be pasted must not be wrapped."""
    rows = [doc["best"], *doc["next"]]
    title = f"{units.number(doc['gpus'])} GPUs, {_source(doc)}"
    head = [Text(units.clean(title, 200), style="bold"), Text(verdict(doc), style="bold")]
    if doc.get("global_batch"):
        head.append(Text(_batch(doc)))
    table, left = _fastest(rows)
    out: list[RenderableType] = [Group(*head, table)]
    if len(rows) > 1:
        out.append(Group(Text("Beside the first", style="bold"), _reasons(rows, left)))
    lost = ", ".join(f"{units.number(count)} {reason}" for reason, count in doc["discarded"].items())
    limit = units.size(doc.get("memory_limit_bytes"))
    out.append(
        Text(
            f"{units.number(doc['candidates'])} candidates within {limit} a GPU, {units.number(doc['evaluated'])} costed"
            + (f"; {lost}" if lost else "")
        )
    )
    uneven = doc.get("uneven_pp") or ()
    if uneven:
        degree = "degree is" if len(uneven) == 1 else "degrees are"
        out.append(
            Text(
                f"{len(uneven)} pipeline {degree} not searched (pp={', '.join(map(str, uneven))}): layers don't divide evenly"
            )
        )
    big = doc.get("too_large")
    if big:
        need, step = units.size(big["memory_bytes"]), units.seconds(big["step_time_s"])
        out.append(
            Text(
                f"too large: {degrees(big['layout'])} ({_beside(big['layout'])}) would take {step} a step by the estimate but needs {need} a GPU"
            )
        )
    out += [Text(line) for line in _legend(doc, rows)]
    text = units.clean(doc["best"].get("layout_text") or units.MISSING, 400)
    out.append(Text(f"the first in full: {text}", no_wrap=True))
    if doc.get("go_on"):
        out.append(Text(f"go on with: {units.clean(doc['go_on'], 1000)}", no_wrap=True))
    elif doc["best"].get("rewritten_step_time_s") is not None:
        out.append(
            Text(
                "extrapolate does not make the first from this capture: it keeps weights sharded, or whole, as recorded"
            )
        )
    out += [Text(f"of the first: {units.clean(note, 600)}", style="yellow") for note in doc["best"].get("notes") or ()]
    out += [Text(f"not rewritten, {line}", style="yellow") for line in _not_rewritten(rows)]
    return out + [Text(f"note: {units.clean(note, 600)}", style="yellow") for note in doc["health"].get("notes") or ()]


def _source(doc: Document) -> str:
    """What was searched from, for which cluster."""
    if doc["model"] == "measured":
        return f"from a capture, for {doc['cluster']}, compute {doc['compute']}"
    return f"{doc['model']} on {doc['cluster']}, compute {doc['compute']}"


def _not_rewritten(rows: Sequence[Document]) -> list[str]:
    """Numbers of rows by the reason for which they were not replayed."""
    numbers: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 1):
        if row.get("why_not_rewritten"):
            numbers.setdefault(units.clean(row["why_not_rewritten"], 300), []).append(str(number))
    return [f"{', '.join(each)}: {why}" for why, each in numbers.items()]


def verdict(doc: Document) -> str:
    """Which layout is first and what that rests on, in one sentence."""
    rows = [doc["best"], *doc["next"]]
    first, known = rows[0], [row for row in rows if row.get("rewritten_step_time_s") is not None]
    name = degrees(first["layout"])
    if first not in known:
        close = sum(row.get("within_error") is True for row in rows[1:])
        beside = f"; {close} of the next are within its error" if close else ""
        return f"Fastest by the estimate: {name}, {units.seconds(first['step_time_s'])} a step, not replayed{beside}"
    step = units.seconds(first["rewritten_step_time_s"])
    if len(known) == 1:
        return f"{name} takes {step} a step by replay; no other layout was replayed"
    if first.get("as_measured"):
        others = "the other one replayed is" if len(known) == 2 else f"{len(known) - 1} others replayed are"
        return f"Fastest by replay: {name} as measured, {step} a step; {others} not faster"
    same = sum(row.get("within_error") is True for row in known[1:])
    own = next((row for row in known if row.get("as_measured")), None)
    gain = "" if own is None else f", {units.percent(own['behind'] / (1 + own['behind']))} less than as measured"
    equal = f"; {same} within its error" if same else ""
    return f"Fastest by replay: {name}, {step} a step{gain}, of {len(known)} layouts replayed{equal}"


def _batch(doc: Document) -> str:
    """The global batch that all layouts share."""
    batch = doc["global_batch"]
    each = f"{units.number(batch['samples_per_gpu'])} a GPU"
    why = {"--batch": f"as asked ({each})", "measured": f"{each} as measured"}.get(
        batch["source"], f"{each} by default"
    )
    samples, length = units.number(batch["samples"]), units.number(batch["tokens_per_sample"])
    return f"Global batch {samples} sample{'s'[: batch['samples'] != 1]} of {length} tokens: {why}"


def _legend(doc: Document, rows: Sequence[Document]) -> list[str]:
    """What the numbers are, and how far off the estimates are."""
    out = []
    if any(row.get("rewritten_step_time_s") is not None for row in rows):
        out.append(
            "step: estimate in closed form; rewritten: the measured graph made into that layout and replayed, which "
            "decides the order of those that have it; stragglers beyond those measured are left out (extrapolate adds them)"
        )
        if any(row.get("behind_range") for row in rows):
            out.append(
                "a range behind the first, and ~: from the estimate, as far off as estimates of the replayed rows are"
            )
    told = " ".join(reason for row in rows for reason in row.get("reasons") or ())
    out += [f"{name}: {meaning}" for name, meaning in _MEANINGS.items() if name in told]
    if any(row.get("as_measured") for row in rows):
        out.append("*: the measured layout, with more data ranks where the size is another")
    out += [sentence for sentence in (_pace(rows),) if sentence]
    band = doc.get("estimate_error")
    if band and band["confirmed"]:
        low, high = (f"{band[name]:.2f}" for name in ("low", "high"))
        out.append(
            f"error of the estimate: replayed steps are {low} to {high} times the estimate "
            f"({band['confirmed']} replayed); --confirm replays more"
        )
    elif band:
        low, high = (units.percent(band[name] - 1) for name in ("low", "high"))
        out.append(f"error of the estimate: steps of described jobs are {low} to {high} longer on most real stacks")
    elif doc.get("ordered_by"):
        out.append("error of the estimate: not known, since no layout was replayed")
    return out


PACED, ALIKE = 0.5, 0.03
"""From this share of the critical path on the host sets the pace; rows that are no further apart are called alike."""


def _pace(rows: Sequence[Document]) -> str:
    """That layouts are alike since the host sets the pace of all of them; "" where it does not."""
    alike = [row for row in rows if row.get("behind", 0.0) is not None and row.get("behind", 0.0) <= ALIKE]
    shares = [row["host_share_of_path"] for row in alike if row.get("host_share_of_path") is not None]
    if len(shares) < 2 or min(shares) < PACED:
        return ""
    return (
        f"the host sets the pace: its work is {units.percent(min(shares))} or more of the critical path of the {len(shares)} "
        "fastest layouts, which are alike for that; fewer or faster operators on the host gain more than another layout"
    )


def degrees(layout: Document) -> str:
    """The axes that multiply ranks, with what goes with them: fsdp=64,tp=8 sp,pp=4."""
    words = [f"{axis}={layout[axis]}" for axis in _DEGREES if layout.get(axis, 1) != 1]
    words += [f"zero={layout['zero']}"] if layout.get("zero") else []
    return ",".join(words) or "dp=1"


def _micro_batches(layout: Document) -> str:
    """Samples of a micro batch × micro batches of a step."""
    return f"{layout.get('mbs', 1)}×{layout.get('microbatches', 1)}"


def _beside(layout: Document) -> str:
    """What tells layouts of the same degrees apart, in a few words."""
    words = [_micro_batches(layout)]
    words += [schedule(layout)] if layout.get("pp", 1) != 1 else []
    words += [f"recompute {layout['recompute']}"] if layout.get("recompute", "none") != "none" else []
    return ", ".join(words)


def schedule(layout: Document) -> str:
    """How a pipeline runs: 1F1B, interleaved ×2, a dash without one."""
    if layout.get("pp", 1) == 1:
        return units.MISSING
    name = str(layout.get("schedule") or "1F1B")
    chunks = layout.get("chunks", 1)
    return _SCHEDULES.get(name, name) + (f" ×{chunks}" if chunks > 1 else "")


def _fastest(rows: Sequence[Document]) -> tuple[Table, list[Column]]:
    """A row a layout, without columns that all rows leave open; and the rates for which there was no room."""
    confirmed = any(row.get("rewritten_step_time_s") is not None for row in rows)
    again = any(row["layout"].get("recompute", "none") != "none" for row in rows)
    piped = any(row["layout"].get("pp", 1) != 1 for row in rows)
    columns = [("", True), ("layout", False), ("batch", True)]
    columns += [("schedule", False)] if piped else []
    columns += [("recompute", False)] if again else []
    columns += [("step", True)] + ([("rewritten", True)] if confirmed else []) + [("memory", True)]
    lines = []
    for number, row in enumerate(rows, 1):
        layout = row["layout"]
        cells = [_place(number, row), degrees(layout), _micro_batches(layout)]
        cells += [schedule(layout)] if piped else []
        cells += [str(layout.get("recompute", units.MISSING))] if again else []
        cells += [units.seconds(row["step_time_s"])]
        cells += [units.seconds(row.get("rewritten_step_time_s"))] if confirmed else []
        cells += [units.size(row["memory_bytes"])]
        lines.append(cells)
    left = _add_rates(rows, columns, lines)
    room = WIDTH - sum(_taken(columns, lines)) + _taken(columns, lines)[1]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for at, (name, right) in enumerate(columns):
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis",
                         max_width=max(8, room - 1) if at == 1 else None)  # fmt: skip
    for cells in lines:
        table.add_row(*(Text(cell) for cell in cells))
    return table, left


def _place(number: int, row: Document) -> str:
    return f"*{number}" if row.get("as_measured") else str(number)


def _taken(columns: Sequence[tuple[str, bool]], lines: Sequence[Sequence[str]]) -> list[int]:
    """Columns of the terminal that each column takes, with the space behind it."""
    return [max(len(name), *(len(line[at]) for line in lines)) + 1 for at, (name, _) in enumerate(columns)]


def _add_rates(rows: Sequence[Document], columns: list[tuple[str, bool]], lines: list[list[str]]) -> list[Column]:
    """Cost of a million tokens, tokens a second of one GPU and MFU where they are known; returns those without room."""
    left: list[Column] = []
    wanted = (
        ("cost/Mtok", [_money(row) for row in rows]),
        ("tok/s/GPU", [_about(row, units.number(row.get("tokens_per_s_per_gpu"))) for row in rows]),
        ("MFU", [_about(row, units.percent(row.get("mfu"))) for row in rows]),
    )
    for name, cells in wanted:
        width = max(len(name), *map(len, cells)) + 1
        if set(cells) == {units.MISSING}:
            continue
        if left or sum(_taken(columns, lines)) + width > WIDTH:
            left.append((name, cells))
            continue
        columns.append((name, True))
        for line, cell in zip(lines, cells, strict=True):
            line.append(cell)
    return left


def _money(row: Document) -> str:
    money = row.get("money_per_million_tokens")
    return units.MISSING if money is None else _about(row, f"{money:.3g}")


def _about(row: Document, cell: str) -> str:
    """The cell, marked where it follows from an estimate beside rows that were replayed."""
    estimated = row.get("behind_range") or row.get("compared_by", "") is None
    return f"~{cell}" if estimated and cell != units.MISSING else cell


def behind(row: Document) -> str:
    """How far a row is behind the first: a share, or from where to where where only its estimate is known."""
    apart = row.get("behind_range")
    if row.get("behind") is not None or not apart:
        return units.percent(row.get("behind"), signed=True)
    return f"{100 * apart[0]:+.0f} to {100 * apart[1]:+.0f} %"


def _reasons(rows: Sequence[Document], more: Sequence[Column]) -> Table:
    """How far each row is behind and why; `more` columns for which the first table had no room."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), width=WIDTH)
    for name in ("", "behind", "bubble", *(name for name, _ in more)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("because of, by the estimate", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, row in enumerate(rows, 1):
        apart = behind(row) if number > 1 else "first"
        why = _why(rows[0], row) if number > 1 else units.MISSING
        cells = [str(number), apart, units.percent(row["bubble_fraction"])]
        cells += [column[number - 1] for _, column in more] + [units.clean(why, 200)]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _why(first: Document, row: Document) -> str:
    """The terms of the estimate that a row is behind by, where they explain it at all."""
    why = "; ".join(row.get("reasons") or ()) or units.MISSING
    replayed = None not in (first.get("rewritten_step_time_s"), row.get("rewritten_step_time_s"))
    if row.get("within_error") and replayed:
        return "as fast by replay" if row["behind"] <= 0.005 else "within the error of stretched kernels"
    if row.get("behind") is None and row.get("compared_by", "") is None:
        return "not comparable: nothing like it was replayed"
    if row.get("within_error"):
        return f"{'may be faster (estimate only)' if row.get('behind_range') else 'maybe as fast'}: {why}"
    if replayed and row["step_time_s"] / first["step_time_s"] - 1 < row["behind"] / 2:
        return "seen in the replay, not in the estimate"
    return why
