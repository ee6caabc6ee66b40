"""Turns a what-if into the content of `whatif --json`: the step before and after, where time goes, and the new path."""

from __future__ import annotations

from typing import Any

from scaletrace.parse.build import Built
from scaletrace.replay.accuracy import step_errors
from scaletrace.replay.breakdown import breakdown
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.result import path_json
from scaletrace.replay.timeline import Timeline
from scaletrace.replay.whatif import WhatIf


def whatif_parts(built: Built, found: WhatIf) -> dict[str, Any]:
    """steps: each with before_ns and after_ns; makespans; breakdown and critical path of the changed job.

    is_bound: whether the gain is the most that the change can bring (overlap=ideal) instead of a prediction
    """
    before = {e.step: e for e in _steps(built, found.before)}
    return {
        "rules": [_rule(found, rule.text) for rule in found.rules],
        "steps": [
            {
                "step": e.step,
                "measured_ns": e.measured_ns,
                "before_ns": before[e.step].replayed_ns,
                "after_ns": e.replayed_ns,
            }
            for e in _steps(built, found.after)
        ],
        "before_ns": found.before.makespan_ns,
        "after_ns": found.after.makespan_ns,
        "change_ns": found.change_ns,
        "is_bound": found.is_bound,
        "speedup": found.speedup if found.after.makespan_ns else None,
        "breakdown_before": _parts(found.before),
        "breakdown": _parts(found.after),
        "critical_path": path_json(critical_path(found.after)),
        "notes": list(found.notes),
    }


def _rule(found: WhatIf, text: str) -> dict[str, Any]:
    """How many nodes a rule touched, and of a delay to take out how much there was, over all ranks and steps."""
    out: dict[str, Any] = {"rule": text, "changed_nodes": found.changed[text]}
    if text in found.removed:
        one = found.removed[text]
        out |= {"asked_ns": one.asked_ns, "taken_ns": one.total_ns, "taken_from_ns": dict(one.taken_ns)}
    return out


def _steps(built: Built, timeline: Timeline) -> list[Any]:
    return step_errors(built.graph, built.measured, timeline)


def _parts(timeline: Timeline) -> dict[str, Any]:
    return {str(part.rank): part.to_json() for part in breakdown(timeline)}
