"""Power, tokens a joule and money a token."""

from __future__ import annotations

import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.energy import PowerModel, Prices, economy, money_per_million_tokens


def test_power_is_idle_plus_what_kernels_and_collectives_add() -> None:
    """Shares of TDP add up and stop at it."""
    model = PowerModel(idle=0.1, compute=0.6, communication=0.3)

    assert 70.0 == pytest.approx(model.power_W(700, 0.0, 0.0))
    assert 700 * (0.1 + 0.3 + 0.06) == pytest.approx(model.power_W(700, 0.5, 0.2))
    assert 700.0 == model.power_W(700, 1.0, 1.0)


def test_power_falls_far_less_than_throughput_when_collectives_take_over() -> None:
    """A GPU that computes at 63 % of its rate with a collective resident most of the time still draws over 85 %."""
    model = PowerModel()
    full, bound = model.power_W(700, 0.887, 0.213), model.power_W(700, 0.559, 0.834)

    assert 0.85 < bound / full < 1.0
    assert bound / full - 1 == pytest.approx(-0.0587, abs=0.005)


def test_shares_outside_their_range_and_an_unknown_tdp_are_refused() -> None:
    """The message names the value."""
    with pytest.raises(UsageError, match=r"compute rate is 1\.2"):
        PowerModel().power_W(700, 1.2, 0)
    with pytest.raises(UsageError, match="power is not known"):
        PowerModel().power_W(0, 0.5, 0)


def test_cost_of_a_million_tokens_is_hours_and_energy() -> None:
    """At 1,000 tokens/s an hour at 3.60 costs 1.00 a million tokens; 1 kW at 0.36 a kWh adds 0.10."""
    prices = Prices({"h100": 3.60}, kwh=0.36)

    found = economy(1000, 1000, "h100", prices)

    assert 1.10 == pytest.approx(found.money_per_million_tokens)
    assert 1.0 == found.tokens_per_J


def test_without_prices_there_is_no_cost_and_an_unknown_device_is_named() -> None:
    """Missing is never zero."""
    assert economy(1000, 500).money_per_million_tokens is None
    with pytest.raises(UsageError, match="no price for 'b200'; the price table has h100"):
        economy(1000, 500, "b200", Prices({"h100": 2.0}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.5, Prices({"*": 2.5})),
        ({"H100 SXM": 2.5, "B200 SXM": 4}, Prices({"H100 SXM": 2.5, "B200 SXM": 4.0})),
        ({"gpu_hour": {"H100 SXM": 2.5}, "kwh": 0.1, "overhead": 1.3}, Prices({"H100 SXM": 2.5}, 0.1, 1.3)),
        ({"H100 SXM": 2.5, "kwh": 0.1}, Prices({"H100 SXM": 2.5}, 0.1)),
    ],
)
def test_prices_are_a_number_or_a_table(value: object, expected: Prices) -> None:
    """One price for every device, or names of devices, with energy beside them if it is to be paid."""
    assert expected == Prices.parse(value)


@pytest.mark.parametrize(
    "wrong", ["much", None, -1, float("nan"), True, {}, {"kwh": 1}, {"H100": "2"}, {"gpu_hour": {"H100": 2}, "kWh": 1}]
)
def test_what_is_no_price_is_refused(wrong: object) -> None:
    """The message names the table and the entry."""
    with pytest.raises(UsageError, match=r"prices\.yaml"):
        Prices.parse(wrong, "prices.yaml")


def test_one_price_holds_for_any_device_and_names_in_any_case() -> None:
    """A user needn't know how the catalog writes a name."""
    assert 2.5 == Prices.parse(2.5).hour("H100 SXM") == Prices.parse({"h100 sxm": 2.5}).hour("H100 SXM")


def test_energy_that_costs_needs_power() -> None:
    """Without a known power the hours alone are no answer where the kWh has a price."""
    paid, free = Prices({"*": 3.6}, kwh=0.1), Prices({"*": 3.6})

    assert (None, "energy has a price, and the power of X is not known") == money_per_million_tokens(
        10.0, None, "X", paid
    )
    assert (pytest.approx(100.0), "") == money_per_million_tokens(10.0, None, "X", free)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1 << 40_000, True, "x" * 9000, [1]], ids=range(7))
def test_what_is_no_price_is_said_in_a_line(value: object) -> None:
    """Neither a number that no float holds nor a text of any length gets through to the reader."""
    with pytest.raises(UsageError, match=r"^t.yaml: A is .{1,90}; a price is a number from 0"):
        Prices.parse({"A": value}, "t.yaml")
