"""Turns the operators of one layer, with their recorded dimensions, into its widths: heads, keys, MLP, gate, experts.

What stands before attention makes queries, keys and values, in one product or in three; the first product behind it is
the output's. Of the rest those that read the hidden width go up, as wide as the MLP or, gated, twice (in one product or
two), and the last one comes back down. A router's product is narrower than anything that it routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scaletrace.extrapolate.kernels import Shape, Work

GROUPED = "_grouped_mm"
TOLERANCE = 0.02
"""Share of a layer's weights by which those of the recognised family may miss those that its products read."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A forward operator: its name without namespace, and its shape."""

    name: str
    shape: Shape

    @property
    def is_product(self) -> bool:
        """One matrix, not a batch of activations; experts' grouped matrices count too."""
        return self.shape.work is Work.MATMUL and (self.shape.batch == 1 or self.is_grouped)

    @property
    def is_grouped(self) -> bool:
        return self.name.endswith(GROUPED)

    @property
    def mixes(self) -> bool:
        """Attention, fused, or as a product of activations with activations."""
        return self.shape.work is Work.ATTENTION or (
            self.shape.work is Work.MATMUL and self.shape.batch > 1 and not self.is_grouped
        )

    @property
    def weights(self) -> float:
        """Elements of the matrices that a product reads."""
        return self.shape.batch * self.shape.columns * self.shape.depth if self.is_product else 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """One layer of the whole model. `weights`: of all its products, what one rank lacks of them included.

    tokens of a micro batch on one rank; samples 0 and seq 0: no attention tells them
    heads, key_heads: 0 where none tells
    """

    hidden: int
    tokens: int
    samples: int
    seq: int
    heads: int
    key_heads: int
    width: int
    is_gated: bool
    experts: int
    experts_per_token: int
    element_bytes: float
    weights: float


def block_of(operators: Sequence[Operator], tp: int = 1, ep: int = 1) -> Block | None:
    """The block that these forward operators of one layer (in order, of one of `tp` and `ep` ranks) make.

    None where no matrix product has recorded dimensions.
    """
    products = [one for one in operators if one.is_product]
    plain = [one.shape for one in products if not one.is_grouped]
    if not plain:
        return None
    hidden = int(min(max(s.columns for s in plain), plain[0].depth))
    tokens = plain[0].rows
    # An operator whose dimensions are not (samples, heads, tokens, head size) tells no length and no heads.
    fused = [one.shape for one in operators if one.shape.work is Work.ATTENTION and one.shape.depth > 1]
    attention = fused[0] if fused else None
    seq = int(attention.rows) if attention else 0
    samples = max(1, int(tokens // seq)) if seq else 0
    heads = int(attention.batch / samples) * tp if attention else 0
    heads = heads if heads and hidden % heads == 0 else 0
    shared = attention.queries_per_key if attention else 1.0
    keys = round(heads / shared) if heads and shared > 1 else 0
    mlp = _mlp(operators)
    grouped = [one for one in mlp if one.is_grouped]
    width, up = _widths([one.shape for one in grouped or mlp], hidden, tp)
    held = round(grouped[0].shape.batch) if grouped else 1
    active = round(sum(one.shape.rows * one.shape.batch for one in grouped[:1]) / max(1.0, tokens)) if grouped else 1
    experts = held * ep if grouped else 1
    weights = sum(one.weights * (ep if one.is_grouped else 1) for one in products if not _routes(one, grouped)) * tp
    return Block(
        hidden, int(tokens), samples, seq, heads, keys if keys and heads % keys == 0 else 0, width,
        up >= 1.5 * width, experts, min(max(1, active), experts), plain[0].element_bytes, weights,
    )  # fmt: skip


def _mlp(operators: Sequence[Operator]) -> list[Operator]:
    """The products behind attention's output, or all where there is no attention."""
    mixing = [at for at, one in enumerate(operators) if one.mixes]
    after = [one for one in operators[(mixing[-1] + 1 if mixing else 0) :] if one.is_product]
    return after[1:] if mixing and len(after) > 1 else after if not mixing else []


def _widths(mlp: Sequence[Shape], hidden: int, tp: int) -> tuple[int, float]:
    """(the MLP's width, columns of all that goes up to it) over all tensor ranks."""
    downs = [s for s in mlp if s.columns == hidden and s.depth * tp != hidden] or [
        s for s in mlp if s.columns == hidden
    ]
    if not downs:
        most = max((max(s.columns, s.depth) for s in mlp), default=4.0 * hidden / tp)
        return int(most) * tp, most * tp
    down = downs[-1]
    ups = [s.columns for s in mlp[: list(mlp).index(down)] if s.depth == hidden and s.columns >= down.depth]
    return int(down.depth) * tp, sum(ups) * tp


def _routes(one: Operator, grouped: Sequence[Operator]) -> bool:
    """Whether a product tells tokens their experts: it has a column for each."""
    held = grouped[0].shape.batch if grouped else 0.0
    return bool(grouped) and not one.is_grouped and one.shape.columns <= max(held, 1.0) * 64 < one.shape.depth
