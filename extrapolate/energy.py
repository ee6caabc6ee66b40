"""Turns how busy a GPU is with kernels and with collectives into watts, tokens a joule and money a token.

    P = TDP · min(1, idle + compute · c + communication · x)

c is the rate at which kernels advance (1 = as without any collective, and never waiting), x the share of time with a
collective resident. `idle` is the draw of an H100 with a context and raised clocks, about 120 of 700 W. The other two
shares follow from the one published pair, Llama-2 7B under FSDP on 128 and 2,048 H100 (arXiv 2411.13055: power per GPU
-5.87 %; about 658 W at 128, from memory and unverified), with c and x of this project's own replay of those two runs.
They are therefore fitted to that pair and predict nothing about it; for other runs they say which way power goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaletrace.errors import UsageError

JOULES_PER_KWH = 3.6e6
ANY_DEVICE = "*"
"""Name in a price table that stands for every device."""


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Shares of TDP: what an idle but awake GPU draws, what kernels add at full rate, what a resident collective adds."""

    idle: float = 0.17
    compute: float = 0.79
    communication: float = 0.33

    def power_W(self, tdp_W: float, compute_rate: float, communication_share: float) -> float:
        """Mean power of one GPU. Raises UsageError for shares outside 0 … 1 or an unknown TDP."""
        if tdp_W <= 0:
            raise UsageError("the device's power is not known; give `power_W` in the cluster's YAML")
        for name, value in (("compute rate", compute_rate), ("communication share", communication_share)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name} is {value}; it is a share between 0 and 1")
        share = self.idle + self.compute * compute_rate + self.communication * communication_share
        return tdp_W * min(1.0, share)


@dataclass(frozen=True, slots=True)
class Prices:
    """A user's price table: money per GPU-hour by device name, and per kWh (0 where the hour includes it)."""

    gpu_hour: Mapping[str, float]
    kwh: float = 0.0
    overhead: float = 1.0
    """Power drawn by the site over power drawn by the GPUs (PUE and the rest of the node)."""

    def hour(self, device: str) -> float:
        """Price of one hour of `device`, in any case of letters; raises UsageError naming what the table has."""
        if ANY_DEVICE in self.gpu_hour:
            return self.gpu_hour[ANY_DEVICE]
        found = {name.casefold(): price for name, price in self.gpu_hour.items()}
        if device.casefold() not in found:
            known = ", ".join(self.gpu_hour) or "nothing"
            raise UsageError(f"no price for {device!r}; the price table has {known}")
        return found[device.casefold()]

    @staticmethod
    def parse(value: Any, where: str = "prices") -> Prices:
        """Prices from one number (money per GPU-hour of any device) or a table.

        A table maps names of devices to money per GPU-hour, either itself or under `gpu_hour`, beside which `kwh` and
        `overhead` may stand. Raises UsageError naming `where` and the entry that is wrong.
        """
        if not isinstance(value, Mapping):
            return Prices({ANY_DEVICE: _price(value, where, "the price")})
        nested = isinstance(value.get("gpu_hour"), Mapping)
        table = value["gpu_hour"] if nested else {k: v for k, v in value.items() if k not in ("kwh", "overhead")}
        unknown = set(value) - {"gpu_hour", "kwh", "overhead"} if nested else set()
        if unknown or not table:
            wrong = f"no {min(map(str, unknown))!r} in a price table" if unknown else "no device has a price"
            raise UsageError(
                f"{where}: {wrong}; give `gpu_hour: {{H100 SXM: 2.50}}`, and `kwh` and `overhead` if you like"
            )
        prices = {str(name): _price(price, where, str(name)) for name, price in table.items()}
        overhead = _price(value.get("overhead", 1.0), where, "overhead")
        return Prices(prices, _price(value.get("kwh", 0.0), where, "kwh"), overhead)


_HIGHEST_PRICE = 1e12


def _price(value: Any, where: str, name: str) -> float:
    """A number that a price can be."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
    if not 0 <= number <= _HIGHEST_PRICE:
        plain = isinstance(value, str | float | None) or (isinstance(value, int) and abs(value) < _HIGHEST_PRICE)
        shown = repr(value)[:80] if plain else "not one"
        raise UsageError(f"{where}: {name} is {shown}; a price is a number from 0 to {_HIGHEST_PRICE:g}")
    return float(number)


@dataclass(frozen=True, slots=True)
class Economy:
    """What one GPU's watts and hours buy."""

    power_W: float
    tokens_per_J: float
    money_per_million_tokens: float | None


def economy(tokens_per_s: float, power_W: float, device: str = "", prices: Prices | None = None) -> Economy:
    """Tokens a joule, and the cost of a million tokens where prices are given. All per GPU."""
    if tokens_per_s <= 0 or power_W <= 0:
        raise UsageError(f"tokens/s {tokens_per_s} and power {power_W} W must be positive")
    cost = None
    if prices is not None:
        cost, _ = money_per_million_tokens(tokens_per_s, power_W, device, prices)
    return Economy(power_W, tokens_per_s / power_W, cost)


def money_per_million_tokens(
    tokens_per_s: float, power_W: float | None, device: str, prices: Prices
) -> tuple[float | None, str]:
    """(cost of a million tokens of one GPU, ""), or (None, the reason) where energy is to be paid and not known."""
    hours = prices.hour(device) / 3600 / tokens_per_s
    if not prices.kwh:
        return 1e6 * hours, ""
    if power_W is None:
        return None, f"energy has a price, and the power of {device} is not known"
    energy_kwh = power_W * prices.overhead / tokens_per_s / JOULES_PER_KWH
    return 1e6 * (hours + energy_kwh * prices.kwh), ""
