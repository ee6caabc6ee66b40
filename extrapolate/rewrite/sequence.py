"""Turns a state into one with longer samples, or with its samples' tokens spread over context-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

from scaletrace.errors import UsageError
from scaletrace.extrapolate.rewrite.batch import more_tokens
from scaletrace.extrapolate.rewrite.state import State, told


def resize_sequence(state: State, tokens: int) -> State:
    """`tokens` in each sample: attention grows with their square, everything else in proportion.

    Causal attention does half of the square at any length, so its ratio is the same.
    """
    if tokens < 1:
        raise UsageError(f"a sample has at least one token, not {tokens}")
    factor = tokens / state.layout.seq
    out = more_tokens(state, rows=factor, batch=1.0, queries=factor, keys=factor)
    return replace(out, layout=replace(state.layout, seq=tokens))


def spread_context(state: State, degree: int) -> State:
    """Tokens of each sample over `degree` context ranks: queries are divided, keys and values gathered from all.

    The exchange of keys and values itself is not inserted into a graph that has none; the health report says so.
    Raises UsageError where the tokens do not divide in two causal halves a rank.
    """
    old = state.layout.cp
    if degree < 1 or (degree > 1 and state.layout.seq % (2 * degree)):
        raise UsageError(
            f"cp={degree} needs a multiple of {2 * degree} tokens a sample, and there are {state.layout.seq}"
        )
    factor = old / degree
    out = more_tokens(state, rows=factor, batch=1.0, queries=factor, keys=1.0)
    if old == 1 and degree > 1:
        out = told(out, "The exchange of keys and values of context parallelism is not in the graph, only its compute.")
    return replace(out, layout=replace(state.layout, cp=degree))
