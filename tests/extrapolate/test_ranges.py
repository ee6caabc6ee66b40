"""Named ranges: which names are layers, siblings of other kinds, decoders behind encoders, and what is refused."""

import numpy as np
import pytest

from scaletrace.extrapolate.ranges import Range, named_layers, plain, stem


def named(ranges: list[Range], words: str, batch: list[int] | None = None) -> tuple[list[str], list[str]]:
    """(names, kinds) of the layers among ranges over operators given as words."""
    each = words.split()
    codes = {word: at for at, word in enumerate(dict.fromkeys(each))}
    tokens = np.array([codes[word] for word in each], np.int32)
    found = named_layers(ranges, tokens, np.array(batch or [0] * len(each), np.int32))
    return (list(found.names), list(found.kinds)) if found else ([], [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Block_3", "Block_#"),
        ("layers.3.attention", "layers.#.attention"),
        ("layer 12", "layer #"),
        ("layer7", "layer#"),
        ("Torch-Compiled Region: 1/0", "Torch-Compiled Region: #/#"),
        ("Conv2d_0", "Conv2d_#"),
        ("## Call CompiledFxGraph fbrs2abc ##", "## Call CompiledFxGraph fbrs2abc ##"),
    ],
)
def test_the_number_of_an_instance_is_left_out(name: str, expected: str) -> None:
    """What is left is the same for all instances, and digits of hashes stay."""
    assert expected == stem(name)


def test_a_kind_is_shown_without_its_number() -> None:
    """No dangling separator is left behind."""
    assert ("Block", "layers") == (plain("Block_#"), plain("layers.#"))


def test_outer_modules_that_hold_most_are_layers() -> None:
    """Blocks win over the linear layers in them and over the wrapper around all."""
    words = "emb norm lin act lin norm lin act lin head"
    ranges = [
        Range("Net_0", 0, 10, -1), Range("Embedding_0", 0, 1, 0),
        Range("Block_0", 1, 5, 0), Range("Linear_0", 2, 3, 2), Range("Linear_1", 4, 5, 2),
        Range("Block_1", 5, 9, 0), Range("Linear_2", 6, 7, 5), Range("Linear_3", 8, 9, 5), Range("Linear_4", 9, 10, 0),
    ]  # fmt: skip

    assert (["Block_0", "Block_1"], ["Block", "Block"]) == named(ranges, words)


def test_a_sibling_of_another_name_is_a_layer_too() -> None:
    """One dense layer among those with experts stands under the same parent and holds much of the same."""
    words = "emb n a m n a e e n a e e head"
    ranges = [
        Range("Net_0", 0, 13, -1), Range("Dense_0", 1, 4, 0), Range("Moe_0", 4, 8, 0), Range("Moe_1", 8, 12, 0),
    ]  # fmt: skip

    assert (["Dense_0", "Moe_0", "Moe_1"], ["Dense", "Moe", "Moe"]) == named(ranges, words)


def test_a_decoder_follows_its_encoder() -> None:
    """Stacks under two parents are both layers, each of its kind."""
    words = "emb a m a m c x a c x a head"
    ranges = [
        Range("Net_0", 0, 12, -1), Range("Encoder_0", 1, 5, 0), Range("EncLayer_0", 1, 3, 1), Range("EncLayer_1", 3, 5, 1),
        Range("Decoder_0", 5, 11, 0), Range("DecLayer_0", 5, 8, 4), Range("DecLayer_1", 8, 11, 4),
    ]  # fmt: skip

    assert ["EncLayer_0", "EncLayer_1", "DecLayer_0", "DecLayer_1"] == named(ranges, words)[0]


def test_parts_of_layers_are_none() -> None:
    """Ranges that leave much between them (sums and norms of one block) are no layers."""
    words = "a b c d e a b f g h"
    ranges = [Range("Add & Norm 1", 0, 2, -1), Range("Add & Norm 2", 5, 7, -1)]

    assert ([], []) == named(ranges, words)


def test_micro_batches_repeat_the_same_layers() -> None:
    """Accumulated micro batches run the same modules, which count once."""
    words = "n l n l n l n l"
    ranges = [Range(f"Block_{at}", start, start + 2, -1) for at, start in ((0, 0), (1, 2), (0, 4), (1, 6))]

    assert ["Block_0", "Block_1"] == named(ranges, words, [0, 0, 0, 0, 1, 1, 1, 1])[0]
