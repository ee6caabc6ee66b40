"""Turns a number of layers into the layers of each pipeline chunk."""

from __future__ import annotations

from scaletrace.errors import UsageError


def layers_by_chunk(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk in model order: equal, and where they don't divide, the first and last are short first."""
    each = -(-layers // chunks)
    counts = [each] * chunks
    short, left, right = each * chunks - layers, 0, chunks - 1
    for i in range(short):
        if i % 2 == 0:
            counts[left] -= 1
            left += 1
        else:
            counts[right] -= 1
            right -= 1
    if min(counts) < 0 or sum(counts) != layers:
        raise UsageError(f"{layers} layers can't be cut into {chunks} chunks")
    return tuple(counts)


def layers_by_cost(layers: int, chunks: int, head: float) -> tuple[int, ...]:
    """Layers of each chunk when the last also carries `head` layers' worth of work and all are to be equal."""
    last = max(0, round((layers + head) / chunks - head)) if chunks > 1 else layers
    each, more = divmod(layers - last, max(1, chunks - 1))
    return (*(each + (i < more) for i in range(chunks - 1)), last)
