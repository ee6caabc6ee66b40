"""Validation: a fit never sees what it predicts, gates judge as stated, and the shown tables hold their gates."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import validate
from benchmarks.validation import (
    internevo,
    lumos,
    megascale,
    megatron_a100,
    mlperf,
    mosaic,
    nanotron,
    ptdp,
    robustness,
    unseen,
)
from benchmarks.validation.report import gate_table, page
from benchmarks.validation.result import Gate, Result, Verdict, line, rank_correlation, worst
from benchmarks.validation.rows import OUTCOMES, Config, FitRow, HeldOutRow, Scored, calibrate, read_table
from benchmarks.validation.simplex import minimise
from benchmarks.validation.svg import plot
from scaletrace.extrapolate.described.constants import MEGATRON_A100, device

ROW = {"gpus": "8", "tp": "2", "step_time_s": "1.5", "notes": "secret 1.5", "mfu_pct": "40"}


@cache
def shown(module: ModuleType, tables: Path) -> tuple[Result, ...]:
    """The results of one source on the published tables, worked out once."""
    return tuple(module.results(tables))


@pytest.fixture
def tables(shared_data: Path) -> Path:
    """The folder of the published tables."""
    return shared_data / "numbers"


def test_a_configuration_carries_no_outcome() -> None:
    """Whatever was measured, and notes that may quote it, are left out of what a model sees."""
    config = Config.of(ROW)

    assert (("gpus", "8"), ("tp", "2")) == config.columns
    assert "" == config.text("step_time_s")
    assert math.isnan(config.number("mfu_pct"))


def test_a_held_out_row_gives_up_its_measurement_only_with_a_prediction() -> None:
    """No attribute shows it; `scored` does, beside the prediction."""
    row = HeldOutRow(Config.of(ROW), 1.5)

    assert not hasattr(row, "measured")
    assert not hasattr(row, "__dict__")
    assert Scored("a", 1.5, 1.8, 3.0) == row.scored("a", 1.8, 3.0)
    assert row.scored("a", 1.8).error == pytest.approx(0.2)


def test_no_parameter_can_be_fitted_to_a_held_out_row() -> None:
    """The calibrating function refuses anything but FitRow, before it is called."""
    called = []

    with pytest.raises(TypeError, match="FitRow only, not to HeldOutRow"):
        calibrate(called.append, [FitRow(Config.of(ROW), 1.0), HeldOutRow(Config.of(ROW), 1.5)])  # type: ignore[list-item]

    assert [] == called


@pytest.mark.parametrize(
    ("figure", "at_least", "verdict"),
    [
        (1.0, False, Verdict.GOAL),
        (2.5, False, Verdict.MET),
        (3.1, False, Verdict.MISSED),
        (math.nan, False, Verdict.MISSED),
        (3.1, True, Verdict.GOAL),
        (1.0, True, Verdict.MISSED),
    ],
)
def test_a_gate_judges_by_its_bounds(figure: float, at_least: bool, verdict: Verdict) -> None:
    """Goal, bound and miss, in both directions; a missing figure is a miss."""
    bound, goal = (2.0, 3.0) if at_least else (3.0, 2.0)

    assert verdict is Gate("s", "n", figure, bound, goal, at_least=at_least).verdict


def test_a_reported_gate_is_neither_met_nor_missed() -> None:
    """What is only reported says so, with its reason on the page."""
    gate = Gate("source", "name", 9.0, 3.0, 2.0, reason="not in the table", reported_only=True)
    text = page([Result("source", "Title", "s", (), (Scored("a", 1.0, 1.1),), (gate,))], "made here", 1.0)

    assert Verdict.REPORTED is gate.verdict
    assert "**source, name** (reported, 9 % against ≤ 3 %): not in the table." in text
    assert "| a | 1 | 1.1 | +10.0 % |" in text


def test_lines_correlations_and_worst_errors_are_what_they_say() -> None:
    """Small numbers by hand."""
    assert (2.0, 1.0) == pytest.approx(line([1, 2, 5], [3, 5, 11]))
    assert 1.0 == pytest.approx(rank_correlation([1, 2, 3], [10, 20, 21]))
    assert -1.0 == pytest.approx(rank_correlation([1, 2, 3], [3, 2, 1]))
    assert 25.0 == worst([0.1, -0.25])
    assert math.isnan(worst([]))


def test_the_simplex_finds_a_minimum() -> None:
    """The quadratic's minimum within its tolerance, the same point every time."""
    found = minimise(lambda p: float((p[0] - 3) ** 2 + 10 * (p[1] + 1) ** 2), [0.0, 0.0], rounds=300)

    assert [3.0, -1.0] == pytest.approx(found.tolist(), abs=1e-3)


def test_plots_are_text_and_leave_out_what_is_not_a_number() -> None:
    """One circle a finite point and one a series in the legend."""
    text = plot("t <1>", "x", "y", {"a": [(1, 1.0), (10, math.nan), (100, 2.0)], "empty": []}, log_x=True)

    assert 3 == text.count("<circle")
    assert "t &lt;1&gt;" in text
    assert "" == plot("t", "x", "y", {"empty": []})


def test_absent_tables_are_said_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a plain clone the command ends well and names the variable to set."""
    monkeypatch.setenv("SCALETRACE_DATA", str(tmp_path))

    assert 0 == validate.main([])
    assert "validation skipped" in capsys.readouterr().out


def test_each_split_fits_the_smallest_run_and_holds_out_the_rest(tables: Path) -> None:
    """No row is in both parts, and fitted rows are the smallest of their group."""
    table = [row for row in read_table(tables, "mlperf_training_steps.csv") if row["benchmark"] == "gpt3"]
    fit, held = mlperf.split(table)

    assert [512] == [row.config.whole("gpus") for row in fit]
    assert len(table) == len(fit) + len(held)
    assert not {row.config for row in fit} & {row.config for row in held}


@pytest.mark.parametrize("module", [mlperf, mosaic, internevo, ptdp, megascale, lumos])
def test_the_shown_rows_hold_their_gates(module: ModuleType, tables: Path) -> None:
    """Every gate of the small tables is met or only reported, and every source predicts something."""
    results = shown(module, tables)

    assert results
    for result in results:
        assert result.scored
        for gate in result.gates:
            assert gate.verdict is not Verdict.MISSED, f"{gate.source} {gate.name}: {gate.figure}"


def test_uncalibrated_megatron_runs_hold_their_gates(tables: Path) -> None:
    """vTrain on one node and on many, and Korthikanti, from one set of kernel costs."""
    for result in shown(megatron_a100, tables):
        for gate in result.gates:
            assert gate.verdict is not Verdict.MISSED, f"{gate.source} {gate.name}: {gate.figure}"


def test_predictions_beat_the_naive_rules(tables: Path) -> None:
    """The mean error is below that of scaling by the bubble or by nothing, source by source."""
    for result in [*shown(mlperf, tables), *shown(internevo, tables), *shown(megascale, tables)]:
        ours = sum(abs(row.error) for row in result.scored)

        assert ours < sum(abs(row.baseline_error) for row in result.scored), result.source


def test_overlap_losses_are_found_again_from_the_rows_that_fixed_them(tables: Path) -> None:
    """λ of H100 and A100 in constants.py is what their FitRows give, within 2 %."""
    rows = [
        mosaic.facts(row)
        for row in read_table(tables, "scaling_points.csv")
        if row["source_id"] == "mosaic" and row["seq_len"].startswith("2048") and "grad_accum=1 " in row["notes"]
    ]
    fit, _, _ = mosaic.split(rows, "h100_80gb", 128)
    pair = [row for row in fit if row.config.text("model") == "MPT-1b"]
    h100 = calibrate(lambda found: mosaic.fit_overlap_loss(found, device("h100")), pair)

    assert device("h100").overlap_loss == pytest.approx(h100, rel=0.02)
    note = next(note for note in shown(internevo, tables)[0].notes if note.startswith("λ found again"))
    assert device("a100").overlap_loss == pytest.approx(float(note.split(": ")[1].split(";")[0]), rel=0.02)


@pytest.mark.slow
def test_kernel_costs_are_found_again_from_the_rows_that_fixed_them(tables: Path) -> None:
    """A refit on the FitRows of both sources predicts as the constants do, within 1 %."""
    found = megatron_a100.refit(tables)
    fit, held = megatron_a100.vtrain_single(tables)

    assert found.gemm_share == pytest.approx(MEGATRON_A100.gemm_share, rel=0.05)
    for row in [*fit, *held][::40]:
        ours = megatron_a100.job_of(row.config).step_s(1.0)
        again = megatron_a100.job_of(row.config, found).step_s(1.0)
        assert ours == pytest.approx(again, rel=0.03)


def test_held_out_measurements_never_reach_the_model(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubling every held-out measurement of MLPerf changes errors and no prediction."""
    before = {row.label: row.predicted for result in shown(mlperf, tables) for row in result.scored}
    true_init = HeldOutRow.__init__
    monkeypatch.setattr(HeldOutRow, "__init__", lambda self, config, measured: true_init(self, config, 2 * measured))
    after = {row.label: row.predicted for result in mlperf.results(tables) for row in result.scored}

    assert before == after


def test_the_search_of_layouts_knows_its_memory(tables: Path) -> None:
    """80 B parameters fit on 32 H100 in few ways, and none of them keeps a whole model on a GPU."""
    model = nanotron.MODELS["Llama-like 80.0B"]
    found = nanotron.search(model, 32)

    assert 0 < len(found) < 12
    assert all(tp * pp >= 8 for _, tp, pp in found)
    assert list(found.values()) == sorted(found.values())


def test_tables_that_no_gate_uses_are_predicted_better_than_by_constant_throughput(tables: Path) -> None:
    """Several sources, each from its smallest run; the mean error is under 2 % and under the naive rule's."""
    result = shown(unseen, tables)[0]
    errors, naive = ([abs(getattr(row, name)) for row in result.scored] for name in ("error", "baseline_error"))

    assert len({row.label.split(",")[0] for row in result.scored}) >= 4
    assert sum(errors) / len(errors) < min(0.02, sum(naive) / len(naive))
    assert all(gate.verdict is Verdict.REPORTED for gate in result.gates)


def test_any_run_of_a_family_can_be_the_fitted_one_and_is_never_scored(tables: Path) -> None:
    """Mosaic on H100: each choice predicts the others within 3 %, as many as there are but one."""
    own = [family for family in robustness.families(tables) if family.source == "Mosaic FSDP, H100"]

    assert 3 == len(own)
    for family in own:
        for fitted in range(len(family.rows)):
            errors = family.errors(fitted)
            assert len(family.rows) - 1 == len(errors)
            assert 0.03 > max(map(abs, errors))


def test_other_pairs_of_sizes_give_the_overlap_loss_of_h100_again(tables: Path) -> None:
    """λ of MPT-7B from 128 to 256 GPUs, which fixed nothing, is within a tenth of the constant."""
    family = next(one for one in robustness.families(tables) if one.label == "MPT-7b" and "H100" in one.source)
    found = robustness.loss_from(family, 0, 1)

    assert found is not None
    assert found == pytest.approx(device("h100").overlap_loss, rel=0.1)


def test_a_shifted_overlap_loss_makes_h100_worse(tables: Path) -> None:
    """Half of λ doubles the worst error of Mosaic's H100 rows or more: the constant is not idle."""
    own = [family for family in robustness.families(tables) if family.source == "Mosaic FSDP, H100"]
    half = dataclasses.replace(device("h100"), overlap_loss=0.5 * device("h100").overlap_loss)
    mean, shifted = (
        sum(abs(error) for family in own for error in family.errors(0, on)) for on in (device("h100"), half)
    )

    assert shifted > 2 * mean


def test_gates_print_as_one_table() -> None:
    """Figure, bound, goal and verdict in one line each."""
    text = gate_table([Gate("s", "n", 1.234, 3, 2, baseline="naive 9 %")])

    assert "| s | n | 1.23 % | ≤ 3 % | ≤ 2 % | goal met | naive 9 % |" == text.splitlines()[-1]


def test_every_outcome_column_of_the_tables_is_known(tables: Path) -> None:
    """No table has a measured column that a configuration would show."""
    suspicious = ("time", "tflops", "mfu", "hfu", "busbw", "tokens_per", "median", "p05", "p95", "mem_GiB")
    for name in validate.FILES[:4]:
        for column in read_table(tables, name)[0]:
            if any(part in column for part in suspicious):
                assert column in OUTCOMES, f"{name}: {column}"


def test_frozen_types_can_not_be_changed() -> None:
    """A fitted row's measurement stays what the table says."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        FitRow(Config.of(ROW), 1.0).measured = 2.0  # type: ignore[misc]
