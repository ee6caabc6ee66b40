"""The tables of a search: 80 columns whatever the layouts are called, and what each number is."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from scaletrace.view.layouts import degrees, schedule, search_tables, verdict

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
    assert 3 == sum("12.3 s" in line and "Fastest" not in line for line in lines)
    assert 2 == sum(line.lstrip().startswith("2 ") for line in lines)
    assert any("Fastest by the estimate" in line for line in lines)


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
    """Memory as the reason is shown with what would be needed, and what tells it from a row of the same degrees."""
    layout = {"tp": 8, "dp": 2, "pp": 2, "mbs": 2, "microbatches": 4, "recompute": "full"}
    doc = answer(too_large={"layout": layout, "memory_bytes": 1.82e11, "step_time_s": 9.0})

    told = (
        "too large: dp=2,tp=8,pp=2 (2×4, 1F1B, recompute full) would take 9 s a step by the estimate but needs 182 GB"
    )
    assert told in " ".join(" ".join(shown(doc)).split())


def test_the_headline_names_the_winner_by_replay() -> None:
    """First by replay, how much it gains on the measured layout, and how many may be as fast."""
    own = row({"fsdp": 8}, rewritten_step_time_s=5.0, as_measured=True, behind=0.25, within_error=False)
    close = row({"tp": 8}, rewritten_step_time_s=4.1, behind=0.025, within_error=True)
    doc = answer(best=row({"dp": 8}, rewritten_step_time_s=4.0), next=[close, own])
    kept = answer(best=row({"fsdp": 8}, rewritten_step_time_s=4.0, as_measured=True), next=[close])
    alone = answer(best=row({"dp": 8}, rewritten_step_time_s=4.0), next=[])

    assert (
        "Fastest by replay: dp=8, 4 s a step, 20.0 % less than as measured, of 3 layouts replayed; 1 within its error"
    ) == verdict(doc)
    assert "Fastest by replay: fsdp=8 as measured, 4 s a step; the other one replayed is not faster" == verdict(kept)
    assert "dp=8 takes 4 s a step by replay; no other layout was replayed" == verdict(alone)
    assert "*3 fsdp=8" in "\n".join(shown(doc))


def test_layouts_within_the_error_are_not_said_to_lose() -> None:
    """What an estimate can't tell apart says so; what only the replay shows is not explained by the estimate's terms."""
    first = row({"dp": 8}, rewritten_step_time_s=12.0)
    seen = row({"tp": 8}, rewritten_step_time_s=24.0, behind=1.0, within_error=False, reasons=["optimizer +0.1 ms"])
    same = row({"cp": 8}, rewritten_step_time_s=12.01, behind=0.001, within_error=True)
    open_ = row(
        {"fsdp": 8},
        behind=None,
        behind_range=[-0.05, 0.12],
        within_error=True,
        reasons=["optimizer +0.3 ms"],
        why_not_rewritten="zero",
    )
    other = open_ | {"layout": {"pp": 8}}
    band = {"low": 0.9, "high": 2.0, "confirmed": 3}
    text = " ".join(" ".join(shown(answer(best=first, next=[seen, same, open_, other], estimate_error=band))).split())

    assert "seen in the replay, not in the estimate" in text and "optimizer +0.1 ms" not in text
    assert "as fast by replay" in text and "may be faster (estimate only)" in text
    assert "-5 to +12 %" in text
    assert "replayed steps are 0.90 to 2.00 times the estimate (3 replayed)" in text
    assert "not rewritten, 4, 5: zero" in text


def test_rates_without_room_move_to_the_second_table() -> None:
    """Cost, tokens a second and MFU are shown wherever they fit, in this order, never beyond 80 columns."""
    rates = {"tokens_per_s_per_gpu": 1234.0, "mfu": 0.412, "money_per_million_tokens": 0.523}
    short, long = (row({"dp": 8}, **rates), row(LONG, **rates))
    first = shown(answer(best=short, next=[]))
    lines = shown(answer(best=long, next=[long | {"behind": 0.1, "reasons": []}]))

    assert any("cost/Mtok" in line and "tok/s/GPU" in line and "MFU" in line for line in first)
    assert any("behind" in line and "MFU" in line for line in lines)
    assert max(map(len, first + lines)) <= 80


def test_layouts_and_schedules_are_short() -> None:
    """Only degrees that are used, and schedules under the names people say."""
    assert ("dp=1", "fsdp=64,tp=8,zero=1") == (degrees({}), degrees({"tp": 8, "fsdp": 64, "zero": 1}))
    assert ("–", "1F1B", "interleaved ×2") == (
        schedule({}), schedule({"pp": 2}), schedule({"pp": 2, "schedule": "Interleaved1F1B", "chunks": 2}),
    )  # fmt: skip


def test_what_was_not_searched_and_what_terms_mean_is_said() -> None:
    """Pipelines that layers don't divide by are counted, and only terms that are shown are explained."""
    told = " ".join(" ".join(shown(answer(uneven_pp=[4, 8]))).split())

    assert "2 pipeline degrees are not searched (pp=4, 8): layers don't divide evenly" in told
    assert "gradient and weight traffic: what data ranks exchange" in told
    assert "pipeline bubble:" not in told and "not searched" not in " ".join(shown(answer()))


def test_layouts_that_are_alike_since_the_host_sets_the_pace_say_so() -> None:
    """Where most of every replay's critical path is the host's work, another layout gains nothing, and that is said."""
    rows = [row({axis: 8}, rewritten_step_time_s=0.044, host_share_of_path=0.9) for axis in ("dp", "fsdp")]
    doc = answer(best=rows[0], next=[rows[1] | {"behind": 0.0, "within_error": True}])
    busy = answer(best=rows[0], next=[rows[1] | {"behind": 0.0, "within_error": True, "host_share_of_path": 0.2}])

    assert "the host sets the pace: its work is 90.0 %" in " ".join(" ".join(shown(doc)).split())
    assert "the host sets the pace" not in " ".join(shown(busy))
