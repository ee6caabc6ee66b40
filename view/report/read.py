"""Reads numbers and texts out of JSON answers that may lack any of them: what is missing or of a wrong type is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrace.view import units

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Banded:
    """A number with its band; `low` and `high` are None where the document gives none."""

    low: float | None
    p50: float | None
    high: float | None


def num(value: Any) -> float | None:
    """A finite number, or the middle of a banded one, else None."""
    if isinstance(value, Mapping):
        value = value.get("p50")
    return float(value) if units.is_number(value) else None


def banded(value: Any) -> Banded:
    if isinstance(value, Mapping):
        return Banded(
            num(value.get("low", value.get("p5"))), num(value.get("p50")), num(value.get("high", value.get("p95")))
        )
    return Banded(None, num(value), None)


def rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list; anything else is no row."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def schema_of(doc: Document) -> str:
    """ "replay", "extrapolate", … from "scaletrace.replay/1"; "" where it says nothing."""
    return str(doc.get("schema", "")).removeprefix("scaletrace.").split("/", 1)[0]
