"""Turns a state into one with longer or shorter samples."""

from __future__ import annotations

from dataclasses import replace

from scaletrace.errors import UsageError
from scaletrace.extrapolate.rewrite.batch import more_tokens, token_stretch
from scaletrace.extrapolate.rewrite.state import State


def resize_sequence(state: State, tokens: int) -> State:
    """`tokens` in each sample: attention grows with their square, everything else in proportion.

    Causal attention does half of the square at any length, so its ratio is the same.
    Raises UsageError for a length that context ranks could not divide into two causal halves each.
    """
    if tokens < 1:
        raise UsageError(f"a sample has at least one token, not {tokens}")
    if state.layout.cp > 1 and tokens % (2 * state.layout.cp):
        raise UsageError(f"{tokens} tokens a sample can't be cut into 2 × {state.layout.cp} pieces for context ranks")
    factor = tokens / state.layout.seq
    out = more_tokens(state, factor, token_stretch(state, factor, queries=factor, keys=factor))
    return replace(out, layout=replace(state.layout, seq=tokens))
