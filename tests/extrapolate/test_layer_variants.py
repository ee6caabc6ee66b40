"""Layers of models as users write them, recorded by torch's own profiler and read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.extrapolate.signatures import sections_of
from scaletrace.parse.load import load
from tests.extrapolate.recordings import recorded

CASES = {
    # what must be found: layers, kinds, evidence, micro batches
    "plain": (4, 1, "repeated operators", 1),
    "deep": (12, 1, "repeated operators", 1),
    "two": (2, 1, "repeated operators", 1),
    "one": (1, 1, "a single attention", 1),
    "without shapes": (4, 1, "repeated operators", 1),
    "accumulated": (3, 1, "repeated operators", 3),
    "named": (5, 1, "names of modules", 1),
    "named, accumulated": (3, 1, "names of modules", 2),
    "annotated": (4, 1, "annotations", 1),
    "checkpointed": (4, 1, "repeated operators", 1),
    "checkpointed, reentrant": (4, 1, "repeated operators", 1),
    "checkpointed, named": (4, 1, "names of modules", 1),
    "experts in turn": (6, 2, "repeated operators", 1),
    "experts in turn, named": (6, 2, "names of modules", 1),
    "first layer dense": (5, 2, "repeated operators", 1),
    "inference": (4, 1, "repeated operators", 1),
    "encoder and decoder": (5, 2, "names of modules", 1),
    "tower": (6, 1, "repeated operators", 1),
    "no layers": (0, 0, "nothing repeats", 1),
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace of every case."""
    return recorded(tmp_path_factory.mktemp("models"), *CASES)


@pytest.mark.parametrize("case", CASES)
def test_layers_are_found_however_a_model_is_written(recordings: Path, case: str) -> None:
    """Number, kinds, evidence and micro batches are those of the model that was recorded."""
    layers, kinds, rule, micro_batches = CASES[case]
    found = sections_of(load(recordings / f"{case}.json").ranks[0])

    assert (layers, rule, micro_batches) == (found.layers, found.rule, found.micro_batches)
    assert kinds == len({kind for kind in found.kind if kind})
    assert bool(found.why) == (layers == 0)


@pytest.mark.slow
def test_compiled_models_show_their_layers(tmp_path: Path) -> None:
    """A model compiled as a whole shows its layers by the operators inside the call, one compiled by blocks by the calls."""
    folder = recorded(tmp_path, "compiled", "compiled by blocks")
    whole, blocks = (sections_of(load(folder / f"{case}.json").ranks[0]) for case in ("compiled", "compiled by blocks"))

    assert (4, "repeated inner operators") == (whole.layers, whole.rule)
    assert (4, "repeated operators") == (blocks.layers, blocks.rule)
