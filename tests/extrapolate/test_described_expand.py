"""Expanded jobs: bytes, counts and groups of what each rank issues, against the description."""

from __future__ import annotations

import re
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
    PlannedRange,
)
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.schedules import SCHEDULES

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


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,microbatches=4",
        "pp=2,chunks=2,microbatches=4",
        "pp=4,microbatches=8,dp=2",
        "pp=4,microbatches=8,schedule=GPipe",
        "pp=4,microbatches=8,schedule=zb1p",
        "pp=2,chunks=2,microbatches=4,schedule=BFS",
        "pp=2,chunks=2,microbatches=4,schedule=zbv",
        "pp=2,chunks=2,microbatches=4,schedule=dualpipe",
    ],
)
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


def test_experts_are_grouped_products_of_their_rank() -> None:
    """Each rank multiplies the tokens of its own experts, as many matrices as it holds, forward and backward."""
    moe = Model("moe", "moe", 2, 512, 8, ffn=512, vocab=1024, seq=512, tied=False, experts=8, experts_per_token=2)
    kernels = [item for item in flat(expand(describe("fsdp=4,ep=4", moe), 0)) if isinstance(item, PlannedKernel)]
    grouped = [kernel for kernel in kernels if kernel.op == "aten::_grouped_mm"]
    forward = [kernel.shapes for kernel in grouped if kernel.tag]

    assert 2 * (2 + 4) == len(grouped)
    assert [((1024, 512), (2, 512, 1024), (2,)), ((1024, 512), (2, 512, 512), (2,))] == forward[:2]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_does_the_same_work_in_another_order(schedule: str) -> None:
    """Kernels, messages and reductions add up to those of one stage without a pipeline, whatever the order."""
    chunks = {"GPipe": 1, "1F1B": 1}.get(schedule, 2)
    described = describe(f"pp=2,microbatches=4,chunks={chunks},schedule={schedule},dp=2")
    whole = describe("microbatches=4,dp=2")
    ranks = distinct_ranks(described.layout)

    def compute_s(of: Described, rank: int) -> float:
        kernels = [item for item in flat(expand(of, rank)) if isinstance(item, PlannedKernel)]
        return sum(kernel.seconds for kernel in kernels if "adam" not in kernel.op)

    reduced = sum(i.in_elements for rank in ranks for i in collectives(described, rank, "dp") if i.kind == "all_reduce")
    sent = [i for rank in ranks for i in collectives(described, rank, "pp") if i.kind == "send"]
    borders = 2 * chunks - 1 - (1 if described.program.rank_of_stage == (0, 1, 1, 0) else 0)

    assert sum(compute_s(described, rank) for rank in ranks) == pytest.approx(compute_s(whole, 0))
    assert reduced == sum(i.in_elements for i in collectives(whole, 0, "dp") if i.kind == "all_reduce")
    assert 2 * 4 * borders == len(sent)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_zero_bubble_schedules_part_the_backward(schedule: str) -> None:
    """Gradients of inputs and of weights are actions of their own, named as PyTorch's runtime names them."""
    chunks = 1 if schedule == "InterleavedZeroBubble" else 2
    items = expand(describe(f"pp=2,microbatches=4,chunks={chunks},schedule={schedule}"), 0)
    names = [item.name for item in items if isinstance(item, PlannedRange)]
    parts = {name[-2] for name in names if re.fullmatch(r"PP:\d+[FBIW]\d", name)}

    assert {"F", "I", "W"} <= parts


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
