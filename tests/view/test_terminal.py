"""The tables that the commands print, from their JSON answers."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from scaletrace.view import terminal

REPLAY: dict[str, Any] = {
    "steps": [{"step": 10, "measured_ns": 31_234_567, "replayed_ns": 31_300_000, "error": 0.0021}],
    "mean_abs_error": 0.0021,
    "breakdown": {
        "0": {
            "compute_ns": 20,
            "exposed_comm_ns": 10,
            "overlapped_comm_ns": 5,
            "memory_ns": 0,
            "host_ns": 5,
            "stall_ns": 0,
            "idle_ns": 5,
            "wall_ns": 40,
        }
    },
    "collectives": [
        {
            "axis": "dp",
            "kind": "all_reduce",
            "group_size": 8,
            "bytes": 2**26,
            "count": 30,
            "wait_ns": 10**7,
            "transfer_ns": 10**8,
            "busbw_Bps": 2.3e11,
        }
    ],
    "stragglers": [{"rank": 3, "caused_wait_ns": 52_000_000}, {"rank": 0, "caused_wait_ns": 0}],
    "critical_path": {
        "length_ns": 31_300_000,
        "share": {"compute": 0.6, "communication": 0.4},
        "segments": [{"rank": 3, "lane": "stream 7", "name": "gemm", "kind": "kernel", "start_ns": 0, "dur_ns": 7000}],
    },
    "health": {"guessed": {"axes from strides": 3}, "notes": ["rank 2 is missing"]},
}


def printed(*parts: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_headline_names_length_error_path_and_straggler() -> None:
    """The first sentence answers how long, how close, what sets it and who is late."""
    expected = (
        "1 step of 31.2 ms; replayed within 0.21 %; the critical path is 60.0 % compute; "
        "rank 3 kept each of the others waiting 52 ms a step."
    )

    assert expected == terminal.replay_headline(REPLAY)


def test_headline_and_rows_are_both_true() -> None:
    """Several steps are told from one to the next, one step on a rank and over all; a line says what a row is."""
    rows = [{"step": n, "measured_ns": ns, "replayed_ns": ns, "error": 0.0} for n, ns in ((1, 75), (2, 45), (3, 43))]
    several = {"steps": rows, "step_time_ns": {"measured": 44}}
    one = {"steps": rows[:1], "step_time_ns": {"measured": 60}}
    window = {"steps": [{**rows[0], "step": -1}], "step_time_ns": {"measured": 75}}

    assert "3 steps, 44 ns from one to the next." == terminal.replay_headline(several)
    assert "1 step of 60 ns on a rank (75 ns over all ranks)." == terminal.replay_headline(one)
    assert "No step is marked, the window takes 75 ns." == terminal.replay_headline(window)
    assert "A row runs from the end of the step before" in printed(*terminal.replay_tables(several))


def _late(rank: int, waited: int, shorter: int, **more: object) -> dict[str, object]:
    each = {"caused_wait_ns": waited * 2, "each_waited_ns": waited, "cause": "", "ends_last": False, "then_rank": None}
    return {"rank": rank, "shorter_by_ns": shorter, **each, **more}


@pytest.mark.parametrize(
    ("ranks", "steps", "expected"),
    [
        ([_late(1, 5, 10), _late(0, 7, 0)], 2, "No rank stands out."),
        (
            [_late(1, 80, 4, cause="launches later", then_rank=2), _late(2, 0, 0)],
            2,
            (
                "Rank 1 launches later, the others wait 80 ns a step for it on average; at its peers' pace the job would gain "
                "only 2 ns a step, as rank 2 is nearly as late."
            ),
        ),
        (
            [_late(7, 80, 0, cause="launches later", then_rank=7), _late(2, 0, 0)],
            2,
            (
                "Rank 7 launches later, the others wait 80 ns a step for it on average; at its peers' pace the job would gain "
                "nothing, as more than slow work makes it late (a late start, or work the others lack)."
            ),
        ),
        (
            [_late(3, 80, 100, cause="computes longer", then_rank=0), _late(2, 0, 0)],
            2,
            (
                "Rank 3 computes longer, the others wait 80 ns a step for it on average; at its peers' pace the job would gain "
                "50 ns a step."
            ),
        ),
        (
            [_late(2, 0, 100, ends_last=True), _late(3, 80, 40, cause="computes longer")],
            1,
            (
                "Rank 3 computes longer, the others wait 80 ns a step for it on average; rank 2 costs most, 100 ns a step: "
                "nobody waits for it, but its work behind the last collective ends the window; one step says little about "
                "which rank is slow."
            ),
        ),
        (
            [_late(2, 0, 100), _late(3, 5, 4)],
            2,
            "Rank 2 costs 50 ns a step: nobody waits for it in a collective, but work that follows from its own does.",
        ),
    ],
)
def test_headline_tells_who_was_waited_for_from_who_costs(
    ranks: list[dict[str, object]], steps: int, expected: str
) -> None:
    """No rank is named for which nobody waited without the reason why it costs time."""
    rows = [{"step": n, "measured_ns": 500, "replayed_ns": 500, "error": 0.0} for n in range(steps)]
    doc = {"steps": rows, "stragglers": ranks, "critical_path": {"length_ns": 1000}}
    said = terminal.replay_headline(doc).split("; ", 1)[1]

    assert expected == said[0].upper() + said[1:]


@pytest.mark.parametrize(
    ("doubt", "expected"),
    [
        (0, "80 ns a step for it on average;"),
        (39, "80 ns a step for it on average;"),
        (40, "on average (±40 ns, as clocks of hosts are known no better: another rank may be late);"),
        (None, "on average (clocks of hosts can't be compared, so another rank may be late);"),
    ],
)
def test_headline_says_where_clocks_leave_open_who_was_late(doubt: int | None, expected: str) -> None:
    """From a doubt on that is as wide, on both sides together, as the wait."""
    late = _late(3, 80, 100, cause="computes longer") | {"clock_doubt_ns": doubt}
    rows = [{"step": n, "measured_ns": 500, "replayed_ns": 500, "error": 0.0} for n in range(2)]

    assert expected in terminal.replay_headline(
        {"steps": rows, "stragglers": [late], "critical_path": {"length_ns": 1000}}
    )


def test_replay_prints_every_part_within_80_columns() -> None:
    """All tables of the answer are there and no line is wider than a terminal."""
    text = printed(*terminal.replay_tables(REPLAY))
    expected = 80

    assert expected >= max(len(line) for line in text.splitlines())
    for word in ("31.3 ms", "all_reduce", "230 GB/s", "stream 7", "3 axes from strides", "rank 2 is missing"):
        assert word in text


def test_missing_parts_are_left_out_and_missing_values_are_dashes() -> None:
    """A document without a part prints nothing for it, and None never prints as zero."""
    text = printed(*terminal.replay_tables({"steps": [{"step": 1, "measured_ns": 5000, "replayed_ns": None}]}))

    assert "Collectives" not in text
    assert "   1     5 µs        –     –" in text


def test_overlap_counts_as_a_part_only_where_the_parts_then_still_fit_the_wall() -> None:
    """Overlapped communication hides under compute in one convention and is a part of the wall in the other."""
    hidden = [key for key, *_ in terminal.drawn_parts({"compute_ns": 10, "overlapped_comm_ns": 4, "wall_ns": 10})]
    part = [key for key, *_ in terminal.drawn_parts({"compute_ns": 6, "overlapped_comm_ns": 4, "wall_ns": 10})]
    expected = [False, True]

    assert expected == ["overlapped_comm_ns" in hidden, "overlapped_comm_ns" in part]


def test_many_ranks_are_summarised() -> None:
    """Of 500 ranks the first ones and the most exposed ones are shown, and the table says so."""
    part = {"compute_ns": 5, "exposed_comm_ns": 5, "wall_ns": 10}
    doc = {"breakdown": {str(rank): {**part, "exposed_comm_ns": rank} for rank in range(500)}}
    text = printed(terminal.breakdown_table(doc))

    assert "16 of 500 ranks shown" in text
    assert " 499" in text


def test_bar_widths_add_up() -> None:
    """Rounding is carried from part to part, so a bar is exactly as wide as asked."""
    expected = 20

    assert expected == len(terminal.bar([(1, "red", "x"), (1, "blue", "y"), (1, "green", "z")], 20))


def test_sparkline_scales_and_leaves_gaps() -> None:
    """The lowest value is the lowest block, the highest the full one, a missing one a space."""
    expected = "▁▄ █"

    assert expected == terminal.sparkline([1.0, 1.5, None, 2.0]).replace("▅", "▄")


def test_markup_and_escapes_in_names_are_shown_as_text() -> None:
    """A kernel called [red] or holding an escape sequence can't colour or move the terminal."""
    segment = {"rank": 0, "lane": "a", "name": "[red]x[/red]\x1b[2J", "kind": "kernel", "dur_ns": 1}
    text = printed(terminal.path_table({"critical_path": {"length_ns": 1, "segments": [segment]}}))

    assert r"[red]x[/red]\x1b[2J" in text


def test_curve_shows_band_knee_and_plot() -> None:
    """A scaling curve prints its points, its knee and one line of plot."""
    points = [
        {
            "gpus": gpus,
            "layout": {"fsdp": gpus, "tp": 1},
            "step_time_s": {"low": 0.09, "p50": 0.1 * factor, "high": 0.11},
            "mfu": 0.4,
            "exposed_comm_fraction": 0.1,
            "dominant": "compute",
            "provenance": "extrapolated",
        }
        for gpus, factor in ((8, 1.0), (64, 1.2), (512, 2.0))
    ]
    text = printed(terminal.curve_table({"points": points, "knee_gpus": 64, "comm_dominates_gpus": None}))

    assert "Scaling bends at 64 GPUs; communication dominates at none of these sizes." in text
    grid = {"points": points, "knee_gpus": 64, "knee_range_gpus": [32, 64], "evaluated_to_gpus": 131_072}
    ranged = " ".join(printed(terminal.curve_table(grid)).split())
    assert "Scaling bends between 32 and 64 GPUs; communication dominates at no size up to 131,072 GPUs." in ranged
    assert "±10 %" in text and "512 200 ms" in text
    assert "step time  ▁▂█  100 ms to 200 ms" in text


def test_layouts_are_a_column_where_a_size_has_several_and_a_line_elsewhere() -> None:
    """Two layouts of one size need to be told apart; else a line says which degrees grow and which stay."""
    points = [{"gpus": 8, "layout": {"fsdp": 8}}, {"gpus": 8, "layout": {"tp": 8}}]

    assert "fsdp=8" in printed(terminal.curve_table({"points": points}))
    assert "\nlayout     fsdp=8\n" in printed(terminal.curve_table({"points": points[:1]}))
    grown = [{"gpus": 2 * n, "layout": {"dp": n, "tp": 2}} for n in (1, 6)]
    assert "\nlayout     dp 1, 6; at every size tp=2\n" in printed(terminal.curve_table({"points": grown}))


def test_a_band_that_tells_nothing_is_a_question_mark_with_its_reason() -> None:
    """So is an MFU that its FLOP do not carry: a dash, and why."""
    step = {"low": 0.9, "p50": 1.0, "high": 1.1}
    points = [
        {"gpus": 2, "step_time_s": step, "unknown": {}},
        {"gpus": 8, "step_time_s": step, "unknown": {"step_time_band": "no data axis", "mfu": "few FLOP"}},
    ]
    text = printed(terminal.curve_table({"points": points}))

    assert {"2 1 s ±10 %", "8 1 s ?"} < {" ".join(line.split()) for line in text.splitlines()}
    assert "band ?: no data axis" in text and "MFU –: few FLOP" in text


@pytest.mark.parametrize(
    ("several", "one"),
    [
        ("axes of groups inferred from their use", "axis of groups inferred from their use"),
        ("waits released before the recorded end", "wait released before the recorded end"),
        ("optimizer states taken to be fp32", "optimizer state taken to be fp32"),
        ("launches without GPU records", "launch without GPU records"),
        ("kernel times without a measured anchor", "kernel time without a measured anchor"),
        ("groups assumed to hold all ranks", "group assumed to hold all ranks"),
    ],
)
def test_one_is_said_in_the_singular(several: str, one: str) -> None:
    """A count of one names one thing."""
    assert one == terminal.one_of(several)


def test_columns_without_a_value_are_left_out() -> None:
    """A curve without tokens or memory spends no room on them; one value is enough to show the column."""
    points: list[dict[str, Any]] = [{"gpus": 8, "step_time_s": 0.1}, {"gpus": 16, "step_time_s": 0.1}]
    without = printed(terminal.points_table(points))
    points[1]["memory_bytes"] = 2**30
    text = printed(terminal.points_table(points))

    assert "memory" not in without
    assert "memory" in text and "1.07 GB" in text and "–" in text
