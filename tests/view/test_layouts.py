"""The tables of a search: 80 columns whatever the layouts are called, and what each number is."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from scaletrace.view.layouts import degrees, schedule, search_tables

LONG = {
    "dp": 16, "fsdp": 1024, "tp": 16, "pp": 64, "cp": 16, "ep": 8, "mbs": 8, "microbatches": 1024, "seq": 131072,
    "schedule": "Interleaved1F1B", "chunks": 10, "sp": 1, "recompute": "full", "zero": 1,
}  # fmt: skip


def row(layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A layout's entry in the answer."""
    return {"layout": layout, "step_time_s": 12.345, "bubble_fraction": 0.1234, "memory_bytes": 6.5e10, **more}


def answer(**more: Any) -> dict[str, Any]:
    """An answer with a best layout and two behind it."""
    reasons = ["gradient and weight traffic +12345.6 ms", "recomputed activations +9999.9 ms"]
    return {
        "gpus": 1_000_000, "model": "llama3-405b", "cluster": "gb200_nvl72", "compute": "measured and stretched",
        "best": row(LONG), "next": [row(LONG, behind=0.0123, reasons=reasons), row({"dp": 8}, behind=3.0, reasons=[])],
        "candidates": 26010, "evaluated": 100, "discarded": {"slower than the best": 90}, "memory_limit_bytes": 7.6e10,
        "too_large": None, "health": {"notes": []}, **more,
    }  # fmt: skip


def shown(doc: dict[str, Any]) -> list[str]:
    """The lines at 80 columns."""
    target = io.StringIO()
    console = Console(file=target, width=80, highlight=False)
    for part in search_tables(doc):
        console.print(part)
    return target.getvalue().splitlines()


def test_tables_keep_to_80_columns_and_one_line_a_layout() -> None:
    """Long layouts and reasons are cut, never wrapped: each layout is one line in either table."""
    lines = shown(answer())

    assert max(map(len, lines)) <= 80
    assert 3 == sum("12.3 s" in line for line in lines)
    assert 2 == sum(line.lstrip().startswith("2 ") for line in lines)
    assert any("best" in line for line in lines)


def test_a_rewritten_step_stands_beside_the_estimate_and_is_explained() -> None:
    """The column and its meaning appear where there is one; why there is none for a layout is said."""
    plain = "\n".join(shown(answer()))
    doc = answer(best=row(LONG, rewritten_step_time_s=11.1, why_not_rewritten=None))
    doc["next"][1]["why_not_rewritten"] = "32 layers can't be cut into 5 equal stages"
    told = " ".join(" ".join(shown(doc)).split())

    assert "rewritten" not in plain
    assert "11.1 s" in told and "the measured graph made into that layout and replayed" in told
    assert "not rewritten, 3: 32 layers can't be cut" in told


def test_what_is_faster_but_too_large_is_named() -> None:
    """Memory as the reason is shown with what would be needed."""
    doc = answer(too_large={"layout": {"tp": 8, "dp": 2}, "memory_bytes": 1.82e11, "step_time_s": 9.0})

    assert "too large: dp=2,tp=8 would take 9 s a step but needs 182 GB" in " ".join(shown(doc))


def test_layouts_and_schedules_are_short() -> None:
    """Only degrees that are used, and schedules under the names people say."""
    assert ("dp=1", "fsdp=64,tp=8,zero=1") == (degrees({}), degrees({"tp": 8, "fsdp": 64, "zero": 1}))
    assert ("–", "1F1B", "interleaved ×2") == (
        schedule({}), schedule({"pp": 2}), schedule({"pp": 2, "schedule": "Interleaved1F1B", "chunks": 2}),
    )  # fmt: skip
