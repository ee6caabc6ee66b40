"""Turns a what-if into the content of `whatif --json`: the step before and after, where time goes, and the new path."""

from __future__ import annotations

from typing import Any

from scaletrace.parse.build import Built
from scaletrace.replay.accuracy import StepError, step_errors
from scaletrace.replay.breakdown import breakdown, step_breakdown
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.result import path_json
from scaletrace.replay.steps import step_window
from scaletrace.replay.timeline import Timeline
from scaletrace.replay.whatif import WhatIf


def whatif_parts(built: Built, found: WhatIf) -> dict[str, Any]:
    """The step time and its parts before and after; steps: each with before_ns and after_ns; makespans; breakdown and
    critical path of the changed job.

    is_bound: whether the gain is the most that the change can bring (overlap=ideal) instead of a prediction
    """
    before = {e.step: e for e in _steps(built, found.before)}
    after = _steps(built, found.after)
    step_before, step_after = step_breakdown(found.before), step_breakdown(found.after)
    return {
        "rules": [_rule(found, rule.text) for rule in found.rules],
        "steps": [
            {
                "step": e.step,
                "measured_ns": e.measured_ns,
                "before_ns": before[e.step].replayed_ns,
                "after_ns": e.replayed_ns,
            }
            for e in after
        ],
        "step_time_ns": {
            "measured": round(step_window(built.graph, built.measured.start_ns, built.measured.end_ns).mean_ns),
            "before": _step_ns(found.before),
            "after": _step_ns(found.after),
        },
        "step_breakdown_before": step_before,
        "step_breakdown": step_after,
        "before_ns": found.before.makespan_ns,
        "after_ns": found.after.makespan_ns,
        "change_ns": found.change_ns,
        "is_bound": found.is_bound,
        "speedup": found.speedup if found.after.makespan_ns else None,
        "breakdown_before": _parts(found.before),
        "breakdown": _parts(found.after),
        "critical_path": path_json(critical_path(found.after)),
        "notes": [*found.notes, *_shifted(before, after, found), *_still_exposed(found, step_before, step_after)],
    }


def _still_exposed(found: WhatIf, before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Why communication is as exposed as before although nothing waits for it; nothing where it is less."""
    was, now = (parts.get("exposed_comm_ns", 0.0) for parts in (before, after))
    if not found.is_bound or not now or now < was:
        return []
    path = critical_path(found.after)
    share, by_rank = path.shares(), path.time_by("rank")
    kind = max(share, key=lambda key: share[key])
    paced = f" (most of it of rank {next(iter(by_rank))})" if by_rank else ""
    said = (
        f"Communication is as exposed as before although nothing waits for it, which is no error: {share[kind]:.1%} of the "
        f"critical path is {kind}{paced}, and overlap does not shorten that. Collectives begin sooner on the ranks that "
        "are not late, and stay there until the last one arrives."
    )
    return [said]


LONGER = 0.02
"""A step that gets longer by this share in a shorter window is explained."""


def _shifted(before: dict[int, StepError], after: list[StepError], found: WhatIf) -> list[str]:
    """Why steps get longer where the window gets shorter; nothing where none does."""
    steps = [e.step for e in after if e.replayed_ns > (1 + LONGER) * before[e.step].replayed_ns]
    if not steps or found.change_ns >= 0:
        return []
    path = critical_path(found.after).time_by("rank")
    rank = max(path, key=lambda key: path[key]) if path else ""
    paced = f"; rank {rank} sets the pace now" if rank else ""
    names = ", ".join(str(step) for step in steps[:8]) + (", …" if len(steps) > 8 else "")
    said = (
        f"Step{'s' * (len(steps) > 1)} {names} get{'s' * (len(steps) == 1)} longer because the steps before end earlier, "
        f"while what else bounds the window moves less{paced}. The gain is that of the whole window, not of a step."
    )
    return [said]


def _rule(found: WhatIf, text: str) -> dict[str, Any]:
    """How many nodes a rule touched, and of a delay to take out how much there was, over all ranks and steps."""
    out: dict[str, Any] = {"rule": text, "changed_nodes": found.changed[text]}
    if text in found.removed:
        one = found.removed[text]
        out |= {"asked_ns": one.asked_ns, "taken_ns": one.total_ns, "taken_from_ns": dict(one.taken_ns)}
    return out


def _steps(built: Built, timeline: Timeline) -> list[StepError]:
    return step_errors(built.graph, built.measured, timeline)


def _step_ns(timeline: Timeline) -> int:
    return round(step_window(timeline.graph, timeline.start_ns, timeline.end_ns).mean_ns)


def _parts(timeline: Timeline) -> dict[str, Any]:
    return {str(part.rank): part.to_json() for part in breakdown(timeline)}
