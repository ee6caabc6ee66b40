"""Turns a state into one whose experts lie on another number of ranks, with the imbalance of the new split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, recosted, told


def spread_experts(state: State, degree: int, tokens_by_expert: Sequence[float] = ()) -> State:
    """Experts over `degree` ranks: what each rank sends stays, its peers change; the fullest rank sets the pace.

    tokens_by_expert  observed tokens of each expert; without them the experts count as even, and that is said
    Raises UsageError where the trace has no expert group or the experts do not divide.
    """
    groups = state.graph.groups
    own = [index for index, group in enumerate(groups) if group.axis == "ep"]
    if not own:
        raise UsageError("the trace has no expert-parallel group to change; record the job with ep > 1")
    old = groups[own[0]].size
    if degree < 1 or (tokens_by_expert and len(tokens_by_expert) % degree):
        raise UsageError(f"ep={degree} does not divide {len(tokens_by_expert)} experts")
    changed = [replace(group, size=degree) if group.axis == "ep" else group for group in groups]
    out = recosted(state, state.graph.collectives, changed)
    if tokens_by_expert:
        ratio = imbalance(tokens_by_expert, degree) / imbalance(tokens_by_expert, old)
        exact = out.anatomy.exact_ns.copy()
        of_ep = np.array([axis_of_item(item, groups) == "ep" for item in out.graph.collectives] + [False], np.bool_)
        exact[of_ep[out.graph.instance]] *= ratio
        out = replace(out, anatomy=replace(out.anatomy, exact_ns=exact)).with_durations()
    else:
        out = told(out, guess="expert loads taken as even, since the trace does not tell them")
    return replace(out, layout=replace(state.layout, ep=degree))


def imbalance(tokens_by_expert: Sequence[float], degree: int) -> float:
    """Tokens of the fullest of `degree` ranks over their mean, experts placed in blocks; 1.0 = even.

    Raises UsageError where the experts do not divide or there are no tokens.
    """
    loads = np.array(tokens_by_expert, float)
    if not len(loads) or len(loads) % degree or loads.sum() <= 0 or (loads < 0).any():
        raise UsageError(f"{len(loads)} experts with {loads.sum():g} tokens can't be spread over {degree} ranks")
    by_rank = loads.reshape(degree, -1).sum(axis=1)
    return float(by_rank.max() / by_rank.mean())
