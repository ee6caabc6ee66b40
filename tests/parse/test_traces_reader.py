"""All public traces load with the catalogue's event counts, and agree with a plain reading of the same JSON."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from scaletrace.errors import NotATraceError
from scaletrace.parse.reader import read_file
from scaletrace.parse.scan_keys import DENSE, INT, KINDS, LABEL, PRODUCT, REAL, TEXT

BIG = 20_000_000


def catalogue(shared_data: Path) -> list[dict[str, Any]]:
    """One entry a distinct file, counts and kind included."""
    entries = json.loads((shared_data / "traces" / "catalog.json").read_text())
    return list(
        {entry["file"]: entry for entry in entries if (shared_data / "traces" / entry["file"]).is_file()}.values()
    )


def check(shared_data: Path, entries: list[dict[str, Any]]) -> None:
    """Traces have their counts; what the catalogue calls something else is refused as no trace."""
    wrong = []
    for entry in entries:
        path = shared_data / "traces" / entry["file"]
        try:
            counted: Any = read_file(path).records
        except NotATraceError:
            counted = "no trace"
        expected = entry["n_events"] if entry["kind"] in ("kineto", "chrome", "chrome_list") else "no trace"
        if counted != expected:
            wrong.append((entry["file"], expected, counted))

    assert [] == wrong


def test_small_traces_have_the_catalogued_counts(shared_data: Path) -> None:
    """Every generation and vendor in the set, files up to 3 MB."""
    check(shared_data, [entry for entry in catalogue(shared_data) if entry["bytes_uncompressed"] < 3_000_000])


def test_large_traces_have_the_catalogued_counts(shared_data: Path) -> None:
    """The rest, up to 87 MB."""
    check(shared_data, [entry for entry in catalogue(shared_data) if entry["bytes_uncompressed"] >= 3_000_000])


def plain_arguments(args: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The wanted arguments of one event as the table should hold them."""
    out: list[tuple[str, Any]] = []
    for key, kind in KINDS.items():
        value = args.get({"grid_size": "grid", "block_size": "block"}.get(key, key))
        if value is None and key == "Ev Idx":
            value = args.get("Profiler Event Index")
        if value is None or key in DENSE or kind == LABEL:
            continue
        if kind == TEXT:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            out.append((key, text))
        elif kind == INT and isinstance(value, int):
            out.append((key, int(value)))
        elif kind == PRODUCT and isinstance(value, list):
            out.append((key, math.prod(value)))
        elif kind == REAL and isinstance(value, int | Decimal):
            out.append((key, float(value)))
    return tuple(sorted(out))


def plain_table(path: Path) -> Counter[Any]:
    """The events by the standard decoder, in exact decimals."""
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, parse_float=Decimal)
    rows = document if isinstance(document, list) else document["traceEvents"]
    base = 0 if isinstance(document, list) else int(document.get("baseTimeNanoseconds") or 0)

    def ns(value: Any) -> int:
        return int((Decimal(value) * 1000).to_integral_value())

    out: Counter[Any] = Counter()
    for row in rows:
        if row["ph"] in "Mstf":
            continue
        args = row.get("args") or {}
        external = args.get("External id", args.get("external id"))
        ids = [args.get("correlation"), external, args.get("stream"), args.get("device")]
        lane = tuple("" if row.get(key) is None else row[key] for key in ("pid", "tid"))
        plain = (row["ph"], row.get("cat") or "", row["name"], *lane, base + ns(row["ts"]), ns(row.get("dur") or 0))
        out[(*plain, *(value if isinstance(value, int) else -1 for value in ids), plain_arguments(args))] += 1
    return out


def our_table(path: Path) -> Counter[Any]:
    """The same from the event table."""
    events = read_file(path).events
    args: list[list[tuple[str, Any]]] = [[] for _ in range(len(events))]
    for key, arg in events.args.items():
        for row, value in zip(arg.rows.tolist(), arg.values.tolist(), strict=True):
            args[row].append((key, events.strings[value] if arg.is_text else value))
    out: Counter[Any] = Counter()
    for k in range(len(events)):
        lane = events.lanes[events.lane[k]]
        plain = (chr(events.ph[k]), events.cats[events.cat[k]], events.name_of(k), lane.pid, lane.tid)
        numbers = (events.ts_ns, events.dur_ns, events.correlation, events.external_id, events.stream, events.device)
        out[(*plain, *(int(column[k]) for column in numbers), tuple(sorted(args[k])))] += 1
    return out


@pytest.mark.parametrize(
    "name",
    [
        "misc-pytorch_kineto/gpu_metrics_input.json",
        "misc-pytorch_kineto/alt1__gpu_metrics_expected.json",
        "misc-pytorch_kineto/after_fix_trace.json",
        "misc-pytorch_benchmark/trace.json",
        "misc-pytorch_PiPPy/local_test_forward_hf_bert.json",
        "misc-facebookresearch_HolisticTraceAnalysis/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        "misc-ROCm_aorta/smci350-zts-gtu-c6-25_200691.1758927066581847260.pt.trace.json",
        "hta_critical_path/event_sync_trace.json.gz",
        "misc-sidnb13_torch-profiling-tutorial/dc3b0e7228dd_851.1752215573993169006.pt.trace.json.gz",
        "torchrec2_v100/node01_85866.1698107929560561434.pt.trace.json.gz",
        "lightllm8_h200-logs-run1/node01_3090494.1743406976912802812.pt.trace.json.gz",
        "../gloo/pp_1f1b_w2/rank0.json.gz",
    ],
)
def test_the_table_equals_a_plain_reading(shared_data: Path, name: str) -> None:
    """Every column of every event, against the standard decoder with exact decimals."""
    path = shared_data / "traces" / name
    if not path.is_file():
        pytest.skip(f"{name} is not in this copy of the data")

    assert plain_table(path) == our_table(path)
