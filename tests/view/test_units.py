"""Numbers and names as people read them."""

import pytest

from scaletrace.view import units


@pytest.mark.parametrize(
    ("ns", "expected"),
    [(0, "0 ns"), (999, "999 ns"), (1_234_567, "1.23 ms"), (31_200_000, "31.2 ms"), (5 * 10**9, "5 s"), (None, "–")],
)
def test_durations_keep_three_digits_and_a_fitting_unit(ns: int | None, expected: str) -> None:
    """Nanoseconds become the unit that leaves few digits, and a missing time is a dash."""
    assert expected == units.duration(ns)


def test_missing_and_infinite_numbers_are_dashes() -> None:
    """None, NaN and infinity never print as a number."""
    shown = [units.percent(None), units.size(float("nan")), units.rate(float("inf")), units.number(None)]
    expected = ["–"] * 4

    assert expected == shown


def test_sizes_rates_and_fractions_use_their_own_units() -> None:
    """Bytes are binary, links decimal, fractions percent."""
    shown = [units.size(65536), units.rate(25e9), units.percent(0.0312), units.percent(-0.002, signed=True)]
    expected = ["65.5 kB", "25 GB/s", "3.1 %", "-0.20 %"]

    assert expected == shown


def test_clean_shows_control_characters_as_escapes() -> None:
    """Terminal escapes, NUL, bidi overrides and lone surrogates lose their power but stay visible."""
    expected = r"\x1b[31mred\x00\u202e\ud800"

    assert expected == units.clean("\x1b[31mred\x00\u202e\ud800")


def test_clean_cuts_long_names_and_says_so() -> None:
    """A name of ten thousand characters keeps its beginning and its length."""
    expected = "a" * 4096 + "… (10,000 characters)"

    assert expected == units.clean("a" * 10_000)


def test_shorten_keeps_both_ends() -> None:
    """Kernel names differ at both ends, so the middle is cut."""
    expected = "void kerne…1024>"

    assert expected == units.shorten("void kernel_template<float, int, 1024>", 16)
