"""Which passes of a pipeline gather weights, and which stages find gradients: PyTorch's own lowering, and small cases."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from scaletrace.extrapolate.rewrite.fetches import fetches
from scaletrace.extrapolate.rewrite.schedules import build


@pytest.mark.parametrize(
    ("schedule", "chunks", "lost"),
    [("1F1B", 1, []), ("DualPipeV", 2, []), ("ZBVZeroBubble", 2, [7]), ("InterleavedZeroBubble", 2, [7]),
     ("InterleavedZeroBubble", 1, [3])],
)  # fmt: skip
def test_split_backwards_find_no_weights_that_forward_gave_away(schedule: str, chunks: int, lost: list[int]) -> None:
    """Stages all of whose input backwards follow a forward scatter nothing, unless weights stay gathered."""
    program = build(schedule, 4, 8, chunks)

    for resharded, expected in ((True, lost), (False, [])):
        found = set().union(*(fetches(program, rank, resharded).finds for rank in range(4)))

        assert expected == [stage for stage in range(program.stages) if stage not in found]


def test_forwards_gather_again_and_backwards_only_what_was_given_away() -> None:
    """1F1B on the last of two ranks: with resharding each pass follows one that gave weights away or kept them."""
    program = build("1F1B", 2, 3)

    assert {"1F0", "1B0", "1B1", "1B2"} == {str(action) for action in fetches(program, 1, True).passes}
    assert {"1F0"} == {str(action) for action in fetches(program, 1, False).passes}


def lowered(name: str, p: int, m: int, v: int, rank: int) -> Counter[int]:
    """Gathers of each stage under PyTorch's own lowering, where forwards reshard and backwards do not."""
    from torch.distributed.pipelining.schedules import _add_unshard_reshard

    from tests.extrapolate.test_schedules import pytorch_order

    actions: list[Any] = _add_unshard_reshard([a for a in pytorch_order(name, p, m, v)[rank] if a is not None])
    out: Counter[int] = Counter()
    gathered: set[int] = set()
    for action in (part for a in actions for part in (a.sub_actions or (a,))):
        stage, kind = action.stage_index, action.computation_type.value
        passes = kind in ("F", "B") or (kind == "I" and stage) or (kind == "W" and not stage)
        if kind == "RESHARD":
            gathered.discard(stage)
        elif kind == "UNSHARD" or passes:
            out[stage] += stage not in gathered
            gathered.add(stage)
            if kind == "F":
                gathered.discard(stage)
    return out


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [(name, p, m, v) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
     for p, m in ((2, 4), (4, 8)) for v in (1, 2, 3, 4, 6)]
    + [("ZBVZeroBubble", 4, 8, 2), ("DualPipeV", 4, 8, 2), ("DualPipeV", 4, 13, 2)],
)  # fmt: skip
def test_stages_are_fetched_as_often_as_pytorch_lowers_them(name: str, p: int, m: int, v: int) -> None:
    """A rank of more than three stages gives some away and fetches them again, on every rank."""
    program = build(name, p, m, v)
    for rank in range(p):
        assert lowered(name, p, m, v, rank) == Counter(action.stage for action in fetches(program, rank, True).passes)
