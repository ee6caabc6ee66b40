"""Memory: activations, what schedules hold alive, sharded states, and measured peaks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.models import Model, load_model
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.memory import (
    FRAGMENTATION,
    StateBytes,
    alive,
    held_by_rank,
    layer_activation_bytes,
    measured_peak_bytes,
    peak_memory,
    rank_memory,
    rank_parameters,
    stretch_peaks,
)
from scaletrace.extrapolate.rewrite.schedules import build
from scaletrace.parse.events import Arg, Events, Lane

GPT = Model("gpt", "gpt", layers=48, hidden=6144, heads=64, vocab=51200, seq=2048)


@pytest.mark.parametrize(
    ("layout", "bytes_per_sbh"),
    [
        ("tp=1", 34.0),
        ("tp=8", 10 + 24 / 8),
        ("tp=8,sp=1", 34 / 8),
        ("tp=8,recompute=full", 2.0),
        ("tp=8,sp=1,recompute=full", 2 / 8),
    ],
)
def test_activations_of_a_gpt_layer_are_korthikantis(layout: str, bytes_per_sbh: float) -> None:
    """Table 2 of 2205.05198 without the attention scores, which a fused kernel does not keep."""
    tokens = 4 * 2048
    actual = layer_activation_bytes(GPT, Layout.parse(layout), tokens, 2048)

    assert bytes_per_sbh == pytest.approx(actual / (tokens * GPT.hidden))


def test_schedules_hold_as_many_micro_batches_as_their_order_says() -> None:
    """GPipe holds all, 1F1B one for each stage behind, interleaved its warm-up and one, ZBV one row of the V."""
    assert alive(build("GPipe", 4, 8)) == (8, 8, 8, 8)
    assert alive(build("1F1B", 4, 8)) == (4, 3, 2, 1)
    assert alive(build("Interleaved1F1B", 4, 8, 2)) == (11, 9, 7, 5)
    assert alive(build("ZBVZeroBubble", 4, 8, 2)) == (8, 8, 8, 8)


@pytest.mark.parametrize(("schedule", "chunks"), [
    ("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("Interleaved1F1B", 2), ("Interleaved1F1B", 5), ("InterleavedZeroBubble", 2),
    ("InterleavedZeroBubble", 4), ("ZBVZeroBubble", 2), ("DualPipeV", 2),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_what_is_held_is_told_without_all_micro_batches(schedule: str, chunks: int, ranks: int) -> None:
    """However many there are, the ranks hold what the whole order of actions says."""
    counts = [ranks * k for k in (1, 2, 3, 5, 9, 16, 24)] + [ranks + 1, 10 * ranks + 1]
    seen = 0
    for count in counts:
        try:
            program = build(schedule, ranks, count, chunks)
        except UsageError:
            continue
        seen += 1
        assert (alive(program), program.rank_of_stage[-1]) == held_by_rank(schedule, ranks, count, chunks)
    assert seen >= 5


def test_states_are_spread_over_the_axes_that_shard_them() -> None:
    """FSDP spreads all three states, ZeRO-1 the optimizer alone, plain DP nothing."""
    base = "mbs=1,seq=2048,microbatches=1"
    plain, zero, fsdp = (rank_memory(GPT, Layout.parse(f"{axes},{base}")) for axes in ("dp=8", "dp=8,zero=1", "fsdp=8"))

    assert GPT.parameters == pytest.approx(plain.weights / 2, rel=0.001)
    assert plain.weights == zero.weights == fsdp.weights * 8
    assert plain.gradients == zero.gradients == fsdp.gradients * 8
    assert plain.optimizer == zero.optimizer * 8 == fsdp.optimizer * 8
    assert plain.gathered == 0
    assert fsdp.gathered > 0


def test_experts_are_spread_over_their_axis() -> None:
    """Expert weights divide by ep, the rest does not."""
    moe = load_model("mixtral-8x7b")
    whole = rank_parameters(moe, Layout())
    spread = rank_parameters(moe, Layout(fsdp=8, ep=8))

    assert moe.layers * 7 * moe.expert_parameters == pytest.approx(whole - spread)


def test_the_fullest_rank_of_a_pipeline_is_found() -> None:
    """With 1F1B the first stage holds most micro batches, so it decides."""
    layout = Layout.parse("tp=8,pp=8,sp=1,mbs=1,microbatches=32,seq=2048")

    assert rank_memory(GPT, layout, 0).total == peak_memory(GPT, layout).total
    mask = 2048 * GPT.hidden / 8
    assert rank_memory(GPT, layout, 0).activations == 8 * (rank_memory(GPT, layout, 7).activations + mask)


@pytest.mark.parametrize(
    ("layout", "fused", "activations"),
    [
        # L · 34 sbh and sbh for the mask behind the embedding, with sbh = 2048 · 6144 = 12,582,912
        ("tp=1", True, 48 * 34 * 12_582_912 + 12_582_912),
        # 5 a s / h = 106.67 more sbh a layer where scores are kept
        ("tp=1", False, 48 * (34 * 12_582_912 + 5 * 64 * 2048 * 2048) + 12_582_912),
        ("tp=1,recompute=selective", False, 48 * 34 * 12_582_912 + 12_582_912),
        # each layer's input, and of one layer that runs again all else (its input, 2 sbh of the 34, is among them)
        ("tp=1,recompute=full", True, 48 * 2 * 12_582_912 + 12_582_912 + 32 * 12_582_912),
        ("tp=8,sp=1,recompute=full", True, (48 * 2 + 1 + 32) * 1_572_864),
        # sbh · (10 + 24 / t) without, 34 sbh / t with sequence parallelism
        ("tp=8", True, 48 * 13 * 12_582_912 + 12_582_912),
        ("tp=8,sp=1", True, 48 * 34 * 1_572_864 + 1_572_864),
        # the first of p stages holds p micro batches of L / p layers: as much as the whole without a pipeline
        ("tp=8,sp=1,pp=8,microbatches=32", True, 48 * 34 * 1_572_864 + 8 * 1_572_864),
        ("tp=8,sp=1,pp=8,microbatches=4", True, 24 * 34 * 1_572_864 + 4 * 1_572_864),
        ("tp=8,sp=1,pp=8,microbatches=32,schedule=GPipe", True, 32 * 6 * 34 * 1_572_864 + 32 * 1_572_864),
        # interleaved: 1 + (p - 1) / (p m) as much, here 31 / 24
        ("tp=8,sp=1,pp=8,chunks=3,microbatches=32", True, 62 * 34 * 1_572_864 + 16_252_928),
        ("tp=8,sp=1,pp=8,microbatches=32,recompute=full", True, (48 * 2 + 8 + 32) * 1_572_864),
        ("cp=4", True, (48 * 34 + 1) * 12_582_912 // 4),
    ],
)
def test_activations_of_the_first_rank_are_korthikantis(layout: str, fused: bool, activations: int) -> None:
    """Equations 1 to 6 of 2205.05198 for 48 layers of width 6144 at 2,048 tokens, worked out by hand."""
    base = Layout.parse(layout)
    asked = replace(base, mbs=1, seq=2048, microbatches=base.microbatches or 1)

    assert activations == rank_memory(GPT, asked, 0, StateBytes(fused=fused)).activations


def test_checkpointing_the_only_layer_takes_no_more_than_keeping_it() -> None:
    """What runs again is all that was kept: one layer gains nothing by it, and loses nothing."""
    one, layout = replace(GPT, layers=1), Layout.parse("dp=2,mbs=1,microbatches=1,seq=2048")
    full = rank_memory(one, replace(layout, recompute="full"), 0).activations

    assert rank_memory(one, layout, 0).activations == full


@pytest.mark.parametrize(("schedule", "rank"), [("1F1B", 3), ("ZBVZeroBubble", 0)])
def test_the_head_is_where_the_last_stage_is(schedule: str, rank: int) -> None:
    """Inputs of norm and head 4 sbh, logits in two types and their gradient 8 sbv, on one rank; a V brings it back to the first."""
    chunks = 2 if schedule == "ZBVZeroBubble" else 1
    layout = Layout(pp=4, chunks=chunks, schedule=schedule, mbs=1, seq=2048, microbatches=8)
    logits = [rank_memory(GPT, layout, each).logits for each in range(4)]
    expected = [4 * 12_582_912 + 8 * 2048 * 51200 if each == rank else 0 for each in range(4)]
    tied = 51200 * 6144

    assert expected == logits
    assert tied == rank_parameters(GPT, layout, rank) - rank_parameters(GPT, layout, 1)


def test_published_configurations_fit_and_their_neighbours_do_not() -> None:
    """GPT-3 175B on 64 H100s of 80 GB fits as TP8 PP8 with a sharded optimizer, and not as TP8 alone."""
    gpt = load_model("gpt3-175b")
    rest = "mbs=1,microbatches=32,seq=2048,sp=1,zero=1"

    assert peak_memory(gpt, Layout.parse(f"tp=8,pp=8,dp=8,{rest}")).total < 80e9
    assert peak_memory(gpt, Layout.parse(f"tp=8,dp=8,{rest}")).total > 80e9


def test_memory_without_batch_is_refused() -> None:
    """A layout that leaves the batch open has no activations to count."""
    with pytest.raises(UsageError, match="needs mbs, seq and microbatches"):
        rank_memory(GPT, Layout())


def test_measured_peaks_stretch_to_another_schedule(shared_data: Path) -> None:
    """From the peaks of PP8 (Primus, GB), those with two chunks a rank follow within 3 % on every rank."""
    folder = shared_data / "traces" / "primus_pp8"

    def peaks(prefix: str) -> np.ndarray:
        steps = [json.loads((folder / f"{prefix}pp_rank_{rank}.json").read_text()) for rank in range(8)]
        return np.array([max(step["memory"] for step in rank.values()) for rank in steps])

    actual = np.array(stretch_peaks(peaks("").tolist(), build("1F1B", 8, 16), build("Interleaved1F1B", 8, 16, 2)))

    assert np.abs(actual / peaks("pp8_vpp2__") - 1).max() < 0.03


def test_peaks_of_a_schedule_that_holds_the_same_everywhere_tell_nothing() -> None:
    """GPipe holds all micro batches on every rank, so the slope is unknown and that is said."""
    with pytest.raises(UsageError, match="different numbers of micro batches"):
        stretch_peaks([4.0] * 4, build("GPipe", 4, 8), build("1F1B", 4, 8))


def test_peaks_are_read_from_memory_events() -> None:
    """The largest total of each accelerator counts; host memory does not."""
    zeros = np.zeros(4, np.int32)
    rows = np.arange(4, dtype=np.int32)
    columns = {
        "Total Allocated": [100, 700, 300, 9000],
        "Device Type": [1, 1, 1, 0],
        "Device Id": [0, 0, 1, -1],
    }
    events = Events(
        np.full(4, ord("i"), np.uint8), zeros, zeros, zeros, *(np.zeros(4, np.int64) for _ in range(6)),
        ("[memory]",), ("cpu_instant_event",), (Lane(0, 0),),
        {key: Arg(rows, np.array(values, np.int64)) for key, values in columns.items()},
    )  # fmt: skip
    expected = {0: 700, 1: 300}

    assert expected == measured_peak_bytes(events)


def test_unfused_attention_keeps_its_scores() -> None:
    """5 a s² b more in half precision with dropout (2205.05198), nothing of it with selective checkpointing."""
    tokens = 2048.0
    fused, unfused, again = (
        layer_activation_bytes(GPT, Layout.parse(layout), tokens, 2048, fused=kept)
        for layout, kept in (("tp=1", True), ("tp=1", False), ("tp=1,recompute=selective", False))
    )

    assert 5 * GPT.heads * 2048 * 2048 == pytest.approx(unfused - fused)
    assert fused == again


def test_single_precision_keeps_no_second_copy_of_the_weights() -> None:
    """Moments alone in fp32 training, moments and a master copy in mixed precision."""
    assert (4.0, 8.0) == (StateBytes.of(4.0).weight, StateBytes.of(4.0).optimizer)
    assert (2.0, 12.0) == (StateBytes.of(2.0).weight, StateBytes.of(2.0).optimizer)


def test_a_measured_peak_scales_the_tensors_alone() -> None:
    """States and the rest follow it, and the allocator's waste with them; buffers and context are in no peak."""
    memory = rank_memory(GPT, Layout.parse("tp=8,sp=1,mbs=1,microbatches=1,seq=2048"))
    scaled = memory.scaled(1.0, 1.25)

    assert memory.states == scaled.states
    assert 1.25 * (memory.tensors - memory.states) == pytest.approx(scaled.tensors - scaled.states)
    assert (memory.buffers, memory.reserved) == (scaled.buffers, scaled.reserved)
    assert FRAGMENTATION * scaled.tensors == pytest.approx(scaled.fragmentation)


def test_a_resized_model_keeps_the_size_of_its_heads() -> None:
    """Twice the width has twice the heads, keys and MLP; a width that no whole number of heads fills is refused."""
    llama = Model("llama", "llama", layers=4, hidden=512, heads=8, ffn=1408, kv_heads=2)
    wide = llama.resized(layers=6, hidden=1024)

    assert (6, 1024, 16, 2816, 4) == (wide.layers, wide.hidden, wide.heads, wide.ffn, wide.kv_heads)
    assert llama == llama.resized()
    with pytest.raises(UsageError, match="no multiple of the 64 of each head"):
        llama.resized(hidden=600)
