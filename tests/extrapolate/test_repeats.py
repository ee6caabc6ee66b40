"""Stacks of layers in sequences: unlike layers, extra items, beginnings, and what is no stack."""

import numpy as np
import pytest

from scaletrace.extrapolate.repeats import Stack, alike, extent, find_stack

BLOCK = "norm qkv view attn view out add norm up gelu down add "
EXPERTS = "norm qkv view attn view out add norm router topk scatter up2 silu down2 gather add "


def found(words: str, want: int = 0, weight: list[float] | None = None) -> Stack | None:
    """The stack in a text of words; norms begin layers, attention stands in each once."""
    each = words.split()
    codes = {word: at for at, word in enumerate(dict.fromkeys(each))}
    return find_stack(
        np.array([codes[word] for word in each], np.int32),
        weight=np.array(weight) if weight else None,
        opens=np.array([word.startswith("norm") for word in each]),
        cores=np.array([word.startswith("attn") for word in each]),
        want=want,
    )


def layers(words: str) -> list[str]:
    """The layers as text, [] where there is no stack."""
    stack, each = found(words), words.split()
    if stack is None:
        return []
    return [" ".join(each[a:b]) for a, b in zip(stack.first.tolist(), stack.last.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("emb " + "norm lin gelu " * 3 + "loss", ["norm lin gelu"] * 3),
        ("emb " + "norm lin gelu " * 3 + "norm head loss", ["norm lin gelu"] * 3),
        ("emb " + BLOCK * 2 + "norm head loss", [BLOCK.strip()] * 2),
        ("emb add " + BLOCK * 3 + "norm head loss", [BLOCK.strip()] * 3),
        ("emb " + (BLOCK + EXPERTS) * 3 + "norm head loss", [BLOCK.strip(), EXPERTS.strip()] * 3),
        ("emb " + BLOCK + EXPERTS * 4 + "norm head loss", [BLOCK.strip()] + [EXPERTS.strip()] * 4),
        ("lin relu " * 4 + "lin2 loss", ["lin relu"] * 4),
    ],
)
def test_layers_begin_and_end_where_they_do(words: str, expected: list[str]) -> None:
    """Embedding, final norm and head stay outside, also where their items occur in layers too."""
    assert expected == layers(words)


def test_an_extra_kernel_hides_nothing() -> None:
    """One repetition with an item more is a layer of the same kind."""
    stack = found("emb " + BLOCK + BLOCK.replace("gelu", "fill gelu") + BLOCK + "stray " + BLOCK + "norm head loss")

    assert stack is not None
    assert [0, 0, 0, 0] == stack.kind.tolist()


def test_kinds_of_layers_are_told_apart() -> None:
    """Dense layers and layers with experts share their attention and are two kinds of one stack."""
    stack = found("emb " + (BLOCK + EXPERTS) * 3 + "norm head loss")

    assert stack is not None
    assert [0, 1, 0, 1, 0, 1] == stack.kind.tolist()
    assert [0] * 6 == stack.run.tolist()


@pytest.mark.parametrize(
    "words",
    [
        "",
        "a",
        "a b c d e f g h",
        "emb " + BLOCK + "norm head loss",
        "lookup view " + "lin relu " * 3 + "cat index bmm pad sort unique reduce lin relu lin loss sum mul",
    ],
    ids=["nothing", "one", "all different", "one block", "towers"],
)
def test_what_is_no_stack(words: str) -> None:
    """Halves of one block, and towers of products among other work, are no layers."""
    assert found(words) is None


def test_a_wanted_number_is_kept() -> None:
    """Asked for as many layers as the forward pass has, no other number comes out."""
    words = "loss " + "down up norm attn qkv norm " * 4 + "emb"

    assert found(words, want=3) is None
    stack = found(words, want=4)
    assert stack is not None and len(stack) == 4


def test_time_decides_what_a_stack_holds() -> None:
    """The same letters are a stack where they take most of the time, and none where they take little."""
    words = "emb " + BLOCK * 2 + "sort"
    count = len(words.split())

    assert found(words, weight=[1.0] * count) is not None
    assert found(words, weight=[1.0] * (count - 1) + [100.0]) is None


def test_a_common_beginning_survives_insertions() -> None:
    """Items in another order or in between do not end what two sequences share; other items do."""
    one, other = np.array([1, 2, 9, 3, 4, 5], np.int32), np.array([1, 2, 3, 4, 5, 6], np.int32)

    assert (6, 4) == extent(one, other)
    assert (0, 0) == extent(np.array([7], np.int32), np.array([8], np.int32))
    assert alike(one, one) == pytest.approx(1.0)
    assert 0.0 == alike(np.array([1], np.int32), np.array([2], np.int32))
