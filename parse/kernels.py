"""Turns names of device work into classes (matmul, attention, communication/nccl, …) by rules that stand in one file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from scaletrace.errors import InputError
from scaletrace.parse.cats import COPY_CATS, DEVICE_CATS, KERNEL_CATS, SET_CATS
from scaletrace.parse.events import ByteArray, Events
from scaletrace.parse.health import Health
from scaletrace.parse.literals import compiled
from scaletrace.parse.small import parse_yaml, read_small

UNKNOWN = 0
"""Code of a name that no rule matches."""
MOST_CLASSES = 256
"""A class of an event is held in one byte."""

_CANDIDATE = re.compile(
    r"all.?(reduce|gather|to.?all)|reduce.?scatter|broadcast_?kernel|send.?recv|\bcomm|dispatch|combine|p2p|peer",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Rules:
    """Ordered rules. `labels[code]` is the name of a class; labels[0] is "unknown"."""

    labels: tuple[str, ...]
    patterns: tuple[tuple[int, re.Pattern[str]], ...]

    def code(self, name: str) -> int:
        """Class of one name, 0 where no rule matches."""
        for code, pattern in self.patterns:
            if pattern.search(name):
                return code
        return UNKNOWN

    def codes_of(self, family: str) -> tuple[int, ...]:
        """Codes of a class and its families: "communication" covers communication/nccl and the others."""
        return tuple(
            code for code, label in enumerate(self.labels) if label == family or label.startswith(f"{family}/")
        )


def load_rules(paths: Sequence[str | Path] = ()) -> Rules:
    """The rules that ship, with those of the user's files in front. Raises InputError for a malformed file."""
    rules: list[tuple[str, list[str]]] = []
    for path in paths:
        rules += _parse(read_small(path, "give a YAML file with kernel rules"), str(path))
    return _compile([*rules, *_shipped()])


@cache
def default_rules() -> Rules:
    """The rules that ship with the package."""
    return _compile(_shipped())


def _shipped() -> list[tuple[str, list[str]]]:
    resource = files("scaletrace.parse").joinpath("kernels.yaml")
    return _parse(resource.read_text(), "kernels.yaml")


def _parse(text: str, source: str) -> list[tuple[str, list[str]]]:
    wanted = "expected `rules:` with a list of `class: NAME` and `any: [PATTERN, …]`"
    shape = f"{source}: {wanted}"
    document = parse_yaml(text, source, wanted)
    if not isinstance(document, dict) or not isinstance(document.get("rules"), list):
        raise InputError(shape)
    out: list[tuple[str, list[str]]] = []
    for number, rule in enumerate(document["rules"], 1):
        if (
            not isinstance(rule, dict)
            or not isinstance(rule.get("class"), str)
            or not isinstance(rule.get("any"), list)
        ):
            raise InputError(f"{shape}; rule {number} is not of this form")
        for pattern in rule["any"]:
            compiled(str(pattern), f"{source}: rule {number}", error=InputError)
        together = "|".join(f"(?:{pattern})" for pattern in rule["any"])
        compiled(together, f"{source}: rule {number}, its patterns together", error=InputError)
        out.append((rule["class"], [str(pattern) for pattern in rule["any"]]))
    return out


def _compile(rules: Sequence[tuple[str, list[str]]]) -> Rules:
    labels = ("unknown", *dict.fromkeys(label for label, _ in rules))
    if len(labels) > MOST_CLASSES:
        raise InputError(f"kernel rules: {len(labels):,} classes; use {MOST_CLASSES} at most")
    patterns = [
        (labels.index(label), re.compile("|".join(f"(?:{pattern})" for pattern in any_of), re.IGNORECASE))
        for label, any_of in rules
        if any_of
    ]
    return Rules(labels, tuple(patterns))


def classify(names: Sequence[str], rules: Rules | None = None) -> ByteArray:
    """uint8[len(names)]: class code of each name, an index into `rules.labels`; UNKNOWN where no rule matches."""
    rules = default_rules() if rules is None else rules
    return np.array([rules.code(name) for name in names], np.uint8)


def classes_of(events: Events, rules: Rules | None = None) -> ByteArray:
    """uint8[n]: class of each device record; UNKNOWN for all other rows. Copies and sets go by their category."""
    rules = default_rules() if rules is None else rules
    out = np.zeros(len(events), np.uint8)
    work = np.flatnonzero(events.in_cats(*DEVICE_CATS))
    if len(work):
        names, where = np.unique(events.name[work], return_inverse=True)
        out[work] = classify([events.strings[code] for code in names.tolist()], rules)[where]
    for label, cats in (("copy", COPY_CATS), ("memset", SET_CATS)):
        if label in rules.labels:
            out[events.in_cats(*cats)] = rules.labels.index(label)
    return out


def communication_candidates(events: Events, rules: Rules | None = None) -> list[str]:
    """Names of unclassified kernels that look like communication, for the user to confirm by a rule."""
    return [name for name in _unknown(events, rules) if _CANDIDATE.search(name)]


def list_unknown(events: Events, health: Health, rules: Rules | None = None) -> None:
    """Count the kernels without a class and name the ones that take most time."""
    names = _unknown(events, rules)
    if not names:
        return
    health.guessed["kernels without a class"] += sum(count for count, _ in names.values())
    shown = ", ".join(name if len(name) <= 60 else f"{name[:57]}…" for name in list(names)[:5])
    health.note(f"kernel names without a class ({len(names)}): {shown}; add rules with a file like kernels.yaml")
    likely = [name for name in names if _CANDIDATE.search(name)]
    if likely:
        health.note(f"these may be communication: {', '.join(name[:60] for name in likely[:5])}")


def _unknown(events: Events, rules: Rules | None) -> dict[str, tuple[int, int]]:
    """{name: (count, ns)} of kernels without a class, the longest in sum first."""
    kernels = np.flatnonzero(events.in_cats(*KERNEL_CATS))
    rows = kernels[classes_of(events, rules)[kernels] == UNKNOWN]
    codes, where, counts = np.unique(events.name[rows], return_inverse=True, return_counts=True)
    if not len(codes):
        return {}
    total = np.bincount(where, weights=events.dur_ns[rows].astype(np.float64)).astype(np.int64)
    order = np.lexsort((codes, -total))
    return {events.strings[int(codes[k])]: (int(counts[k]), int(total[k])) for k in order}
