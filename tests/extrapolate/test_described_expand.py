"""Expanded jobs: bytes, counts and groups of what each rank issues, against the description."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.constants import FLASH_H100, device
from scaletrace.extrapolate.described.expand import distinct_ranks, expand, groups
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.described.planned import (
    Described,
    Enclosing,
    Item,
    PlannedCollective,
    PlannedKernel,
)
from scaletrace.extrapolate.layout import Layout

MODEL = Model("tiny", "llama", 4, 512, 8, ffn=1408, vocab=1024, seq=512, tied=False)


def describe(layout: str, model: Model = MODEL) -> Described:
    """The tiny model on H100s."""
    return Described(model, Layout.parse(layout), device("h100"), FLASH_H100)


def flat(items: tuple[Item, ...]) -> Iterator[PlannedKernel | PlannedCollective]:
    """Kernels and collectives in order, ranges opened."""
    for item in items:
        if isinstance(item, Enclosing):
            yield from flat(item.body)
        elif isinstance(item, PlannedKernel | PlannedCollective):
            yield item


def collectives(described: Described, rank: int = 0, axis: str = "") -> list[PlannedCollective]:
    """Collectives of one rank, of one axis if given."""
    found = [item for item in flat(expand(described, rank)) if isinstance(item, PlannedCollective)]
    return [item for item in found if axis in ("", item.axis)]


def product_flop(described: Described, rank: int = 0) -> float:
    """FLOP of all matrix products that a rank launches, from their shapes."""
    kernels = [item for item in flat(expand(described, rank)) if isinstance(item, PlannedKernel)]
    return sum(2.0 * k.shapes[0][0] * k.shapes[0][1] * k.shapes[1][1] for k in kernels if k.op == "aten::mm")


@pytest.mark.parametrize("layout", ["fsdp=4,mbs=2", "tp=2,fsdp=2", "cp=2,fsdp=2", "dp=4,mbs=3"])
def test_matrix_products_do_the_models_work(layout: str) -> None:
    """Six FLOP a weight and token, divided over the ranks that share a token."""
    described = describe(layout)
    weights = MODEL.layers * MODEL.layer_matrices + MODEL.embedding_parameters
    shared = described.layout.tp

    assert product_flop(described) == pytest.approx(6.0 * weights * described.tokens / shared)


def test_recomputation_adds_a_forward_of_the_layers() -> None:
    """Eight FLOP a weight of the layers, six of the head."""
    plain, again = describe("fsdp=2"), describe("fsdp=2,recompute=full")
    layers = 2.0 * MODEL.layers * MODEL.layer_matrices * plain.tokens

    assert product_flop(again) - product_flop(plain) == pytest.approx(layers)


def test_sharded_parameters_are_gathered_twice_and_reduced_once_a_micro_batch() -> None:
    """Every layer's elements, padded to the group; the root once at each end."""
    found = collectives(describe("fsdp=4"), axis="shard")
    gathers = [item for item in found if item.kind == "all_gather"]
    scatters = [item for item in found if item.kind == "reduce_scatter"]
    layer = MODEL.layer_parameters

    assert (2 * 4 + 1, 4 + 1) == (len(gathers), len(scatters))
    assert {layer, 2 * MODEL.embedding_parameters} == {item.out_elements for item in gathers}
    assert all(4 * item.in_elements == item.out_elements for item in gathers)
    assert {"Float"} == {item.dtype for item in scatters}


def test_replicas_reduce_their_gradients_once_after_the_last_micro_batch() -> None:
    """Plain data parallelism: as many elements as layers, embedding and head have, whatever the micro batches."""
    for layout in ("dp=4", "dp=4,microbatches=3"):
        found = [item for item in collectives(describe(layout), axis="dp") if item.kind == "all_reduce"]

        held = MODEL.layers * MODEL.layer_parameters + 2 * MODEL.embedding_parameters
        assert held == sum(item.in_elements for item in found)


def test_tensor_parallelism_reduces_twice_a_layer_each_way() -> None:
    """Four all-reduces a layer, or as many scatters and gathers with sequence parallelism."""
    plain = collectives(describe("tp=2"), axis="tp")
    split = collectives(describe("tp=2,sp=1"), axis="tp")

    assert ["all_reduce"] * 16 == [item.kind for item in plain]
    assert (16, 16) == tuple(sum(i.kind == kind for i in split) for kind in ("reduce_scatter", "all_gather"))
    assert {MODEL.seq * MODEL.hidden} == {item.in_elements for item in plain}


@pytest.mark.parametrize("layout", ["pp=2,microbatches=4", "pp=2,chunks=2,microbatches=4", "pp=4,microbatches=8,dp=2"])
def test_every_message_has_its_other_side(layout: str) -> None:
    """Sends of one rank to another are as many as that one receives from it, and as large."""
    described = describe(layout)
    sent, received = {}, {}
    for rank in distinct_ranks(described.layout):
        for item in collectives(described, rank, "pp"):
            key = (rank, item.peer) if item.kind == "send" else (item.peer, rank)
            into = sent if item.kind == "send" else received
            into.setdefault(key, []).append(item.in_elements)

    assert sent
    assert sent == received


def test_experts_exchange_what_their_tokens_need() -> None:
    """Two all-to-alls a layer each way, of tokens × experts a token × hidden elements."""
    moe = Model("moe", "moe", 2, 512, 8, ffn=512, vocab=1024, seq=512, tied=False, experts=8, experts_per_token=2)
    found = collectives(describe("fsdp=4,ep=4", moe), axis="ep")

    assert [512 * 2 * 512] * 8 == [item.in_elements for item in found]


def test_groups_cover_the_world_once_along_each_axis() -> None:
    """Every rank is in exactly one group of each axis that is used, and the world comes first."""
    layout = Layout.parse("tp=2,fsdp=2,dp=2,pp=2,microbatches=2")
    found = groups(layout)

    assert ("world", "default_pg", tuple(range(16))) == found[0]
    for axis in ("tp", "shard", "dp", "pp"):
        members = sorted(rank for name, _, ranks in found if name == axis for rank in ranks)
        assert list(range(16)) == members


def test_one_rank_a_stage_is_distinct() -> None:
    """Tensor and data peers do the same work."""
    assert (0, 8, 16, 24) == distinct_ranks(Layout.parse("tp=2,fsdp=4,pp=4,microbatches=4"))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=3", "tp=3 does not divide heads 8"),
        ("pp=8,microbatches=8", "8 stages for the 4 layers"),
        ("fsdp=2,ep=2", "ep=2 does not divide the 1 experts"),
        ("dp=2,zero=3", "write that as fsdp"),
    ],
)
def test_descriptions_that_can_not_be_cut_are_refused(layout: str, message: str) -> None:
    """What does not divide, and what is not yet described."""
    with pytest.raises(UsageError, match=message):
        describe(layout)
