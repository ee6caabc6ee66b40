"""Described models, devices and collectives: sizes against published numbers, and what bad descriptions get."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.catalog import entry, names
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import collective_seconds
from scaletrace.extrapolate.described.collectives import (
    GroupShape,
    all_gather_s,
    all_reduce_s,
    broadcast_s,
    bus_Bps,
    gather_as_run_s,
    ring_latency_s,
)
from scaletrace.extrapolate.described.constants import costs_on, device, device_of
from scaletrace.extrapolate.described.jobs import Layout
from scaletrace.extrapolate.described.kernels import gemm_s, layer_s
from scaletrace.extrapolate.described.memory import memory_bytes
from scaletrace.extrapolate.described.models import Model, load_model, model_names
from scaletrace.extrapolate.described.spread import expected_maximum, jitter_width_s

PUBLISHED_B = {
    "gpt3-175b": 174.6,
    "llama2-7b": 6.74,
    "llama2-13b": 13.02,
    "llama2-70b": 68.98,
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.9,
    "megatron-22b": 22.07,
    "megatron-530b": 529.6,
    "megatron-1t": 1008.0,
    "mixtral-8x7b": 46.7,
}


@pytest.mark.parametrize("name", PUBLISHED_B)
def test_parameters_of_built_in_models_are_the_published_ones(name: str) -> None:
    """Counted from shapes, within 0.2 %."""
    assert load_model(name).parameters / 1e9 == pytest.approx(PUBLISHED_B[name], rel=0.002)


def test_every_model_of_the_catalog_can_be_described() -> None:
    """The catalog's names are understood, and its parameter counts agree within 2 %."""
    for name in names("models"):
        catalog = entry("models", name)

        assert load_model(name).parameters == pytest.approx(catalog["parameters"], rel=0.02), name
        assert (catalog["layers"], catalog["hidden"]) == (load_model(name).layers, load_model(name).hidden)


def test_step_flop_is_six_per_parameter_and_token_plus_attention() -> None:
    """6 N + 12 L h s FLOP a token, embeddings without a product left out."""
    model = load_model("llama2-7b")
    matrices = model.layers * model.layer_matrices + model.embedding_parameters

    assert model.step_flop(1000) == pytest.approx(1000 * (6 * matrices + 12 * 32 * 4096 * 4096))


def test_only_active_experts_count_as_work() -> None:
    """Mixtral holds 46.7 B parameters; a token meets the matrices of two experts a layer."""
    model = load_model("mixtral-8x7b")

    assert model.layer_matrices == model.attention_parameters + 2 * model.expert_parameters
    assert 8 == model.experts


def test_any_model_comes_from_yaml_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    """A file gives a model; an unknown key, a missing one and a wrong type are each said."""
    path = tmp_path / "tiny.yaml"
    path.write_text("family: llama\nlayers: 2\nhidden: 64\nheads: 4\nffn: 128\nvocab: 100\n")

    assert Model("tiny", "llama", 2, 64, 4, ffn=128, vocab=100) == load_model(str(path))

    for text, message in (
        ("family: llama\nlayers: 2\nhidden: 64\nheads: 4\ndepth: 3\n", "unknown key 'depth'"),
        ("family: llama\nlayers: 2\nhidden: 64\n", "heads is missing"),
        ("family: llama\nlayers: two\nhidden: 64\nheads: 4\n", "layers is 'two'; it must be int"),
        ("family: rnn\nlayers: 2\nhidden: 64\nheads: 4\n", "unknown family 'rnn'"),
        ("family: llama\nlayers: 2\nhidden: 63\nheads: 4\n", "hidden 63 is not a multiple of heads 4"),
        ("family: llama\nlayers: 0\nhidden: 64\nheads: 4\n", "layers is 0"),
        ("family: llama\nlayers: 2\n1: a\nx: b\n2001-01-01: c\n", "unknown key '1'"),
        (f"family: llama\nlayers: 0x{'f' * 9000}\nhidden: 64\nheads: 4\n", "layers is too large"),
        (f"family: llama\nlayers: {'x' * 9000}\nhidden: 64\nheads: 4\n", "layers is 'x{79}…; it must be int"),
        ("family: llama\nlayers: [1, 2]\nhidden: 64\nheads: 4\n", "layers is a list; it must be int"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            load_model(str(path))


def test_unreadable_models_and_unknown_names_say_what_to_do(tmp_path: Path) -> None:
    """Broken YAML, a list, a missing file and an unknown name."""
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1, 2")
    with pytest.raises(InputError, match="not valid YAML"):
        load_model(str(broken))
    broken.write_text("- 1\n")
    with pytest.raises(InputError, match="holds no mapping"):
        load_model(str(broken))
    with pytest.raises(InputError, match="No such file"):
        load_model(str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match=f"one of: {model_names()[0]}"):
        load_model("no-such-model")


def test_a_group_with_k_members_a_node_owns_k_nics() -> None:
    """TP4 leaves data-parallel groups two NICs a node (96 GB/s), TP8 one, FSDP is bound by NVLink (360 GB/s)."""
    h100 = device("h100")

    assert [96e9, 48e9, 360e9] == pytest.approx([bus_Bps(h100, GroupShape(64, k)) for k in (2, 1, 8)])
    assert bus_Bps(h100, GroupShape(64, 8, nic_cap_Bps=24e9)) == pytest.approx(24e9)


def test_ring_latency_over_a_thousand_ranks_is_the_tuners() -> None:
    """8.4 + 896 × 3.4 + 127 × 14 µs for 1,024 ranks on nodes of eight; broadcasts take one step more."""
    group = GroupShape(1024, 8)

    assert ring_latency_s(group) == pytest.approx(4832.8e-6)
    assert broadcast_s(device("h100"), 8, group) - 8 / 360e9 == pytest.approx(4846.8e-6)


def test_all_reduce_takes_the_tree_when_the_ring_is_all_latency() -> None:
    """A small all-reduce over many nodes grows with the logarithm of the nodes, an all-gather with the ranks."""
    h100 = device("h100")
    small = [all_reduce_s(h100, 1024, GroupShape(n, 8)) for n in (512, 4096)]
    rings = [all_gather_s(h100, 1024, GroupShape(n, 8)) for n in (512, 4096)]

    assert small[1] / small[0] < 1.4
    assert rings[1] / rings[0] == pytest.approx(8, rel=0.02)


def test_large_collectives_cost_what_the_cost_model_of_traces_says() -> None:
    """Described jobs and extrapolated traces agree on gathers and broadcasts of hundreds of MB, within 1.5 %."""
    h100, cluster = device("h100"), Cluster.load("dgx_h100")
    for ranks in (8, 64, 512, 2048):
        group = GroupShape(ranks, 8)
        for kind, cost in (("all_gather", gather_as_run_s), ("broadcast", broadcast_s)):
            described = cost(h100, 4e8, group)

            assert described == pytest.approx(collective_seconds(kind, 4e8, ranks, cluster).seconds, rel=0.015), kind


def test_a_group_of_one_costs_nothing() -> None:
    """No ranks, no message."""
    assert [0.0, 0.0, 0.0] == [
        cost(device("a100"), 1e9, GroupShape(1, 8)) for cost in (all_gather_s, all_reduce_s, broadcast_s)
    ]


def test_a_full_wave_reaches_its_share_of_peak_and_a_part_of_one_less() -> None:
    """A product of exactly one wave of 256 × 128 tiles runs at the share; one more tile costs a third of a wave more."""
    a100 = device("a100")
    full = gemm_s(256 * 108, 128, 4096, a100, 0.8)
    more = gemm_s(256 * 109, 128, 4096, a100, 0.8)

    assert full == pytest.approx(2 * 256 * 108 * 128 * 4096 / (312e12 * 0.8))
    assert 1.3 < more / full < 1.5


def test_small_layers_are_bound_by_the_host() -> None:
    """A tiny layer takes the host's time to issue it, whatever the device."""
    a100, costs = device("a100"), costs_on(device("a100"))
    tiny = Model("tiny", "gpt", 1, 256, 4, seq=128)

    assert costs.host_s == layer_s(tiny, a100, costs, 1).forward_s
    assert costs.host_s + costs.host_tp_s == layer_s(tiny, a100, costs, 1, tp=2).forward_s


def test_clusters_without_gpus_can_not_be_described() -> None:
    """A gloo cluster is refused, an unknown device is told what is known."""
    h100 = Cluster.load("dgx_h100")

    assert device("h100").nic_Bps == device_of(h100).nic_Bps
    with pytest.raises(UsageError, match="known: h100"):
        device("tpu")


def test_expected_maximum_of_normals_is_the_exact_integral() -> None:
    """1.42, 3.63 and 4.44 standard deviations at 8, 4,096 and 131,072; none for one rank."""
    assert [0.0, 1.424, 3.626, 4.443] == pytest.approx([expected_maximum(n) for n in (1, 8, 4096, 131072)], abs=0.002)


def test_jitter_grows_with_the_logarithm_of_the_gpus() -> None:
    """Twice the logarithm, twice the width."""
    assert jitter_width_s(0.04, 64, 4096) == pytest.approx(0.08)


def test_memory_falls_with_every_axis_that_splits_it() -> None:
    """Tensor, pipeline and sharded data ranks each lower the fullest rank's bytes."""
    model = load_model("llama3-8b")
    one = memory_bytes(model, Layout(dp=8, sharded_optimizer=False))

    assert memory_bytes(model, Layout(dp=8)) < one
    assert memory_bytes(model, Layout(dp=4, tp=2)) < memory_bytes(model, Layout(dp=8))
    assert memory_bytes(model, Layout(dp=4, pp=2, micro_batches=8)) < memory_bytes(model, Layout(dp=8))
    assert memory_bytes(model, Layout(dp=8, recompute="full")) < memory_bytes(model, Layout(dp=8))
