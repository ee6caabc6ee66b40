"""Kernel shape models: classes, shapes read from operators, and the ratios between shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrace.extrapolate.catalog import load_device
from scaletrace.extrapolate.kernels import (
    Ceilings,
    Shape,
    Work,
    anchored,
    ceilings_seen,
    classify,
    latency_s,
    ratio,
    ratio_error,
    seconds,
    shape_of,
    work_seconds,
)

H100 = Ceilings.of(load_device("H100 SXM"))
CPU = Ceilings(flops=5e10, memory_Bps=1e10)


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("aten::mm", Work.MATMUL),
        ("aten::linear", Work.MATMUL),
        ("autograd::engine::evaluate_function: AddmmBackward0", Work.MATMUL),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", Work.MATMUL),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256x64", Work.MATMUL),
        ("flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", Work.ATTENTION),
        ("aten::_scaled_dot_product_flash_attention", Work.ATTENTION),
        ("aten::native_layer_norm", Work.NORM),
        ("void at::native::vectorized_elementwise_kernel<4, GeluFunctor>", Work.ELEMENTWISE),
        ("Optimizer.step#AdamW.step", Work.OPTIMIZER),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", Work.OPTIMIZER),
        ("aten::embedding", Work.EMBEDDING),
        ("aten::cross_entropy_loss", Work.LOSS),
        ("Memcpy DtoD (Device -> Device)", Work.COPY),
        ("my_op", Work.OTHER),
    ],
)
def test_names_are_classified(name: str, work: Work) -> None:
    """Operators, autograd nodes and kernels of both vendors fall into the class with their shape model."""
    assert work is classify(name)


@pytest.mark.parametrize(
    ("name", "dims", "types", "shape"),
    [
        ("aten::linear", "[[2,64,512],[2048,512],[2048]]", '["float","float","float"]',
         Shape(Work.MATMUL, 128, 2048, 512, element_bytes=4)),
        ("aten::mm", "[[128,512],[512,2048]]", '["c10::BFloat16","c10::BFloat16"]', Shape(Work.MATMUL, 128, 2048, 512)),
        ("own::mm", "[[128,512],[2048,512]]", '["c10::BFloat16"]', Shape(Work.MATMUL, 128, 2048, 512)),
        ("aten::addmm", "[[2048],[128,512],[512,2048],[],[]]", '["c10::Half"]', Shape(Work.MATMUL, 128, 2048, 512)),
        ("aten::bmm", "[[16,128,64],[16,64,128]]", None, Shape(Work.MATMUL, 128, 128, 64, 16, 4)),
        ("aten::_scaled_dot_product_flash_attention", "[[2,8,1024,64],[2,8,1024,64],[2,8,1024,64]]",
         '["c10::BFloat16"]', Shape(Work.ATTENTION, 1024, 1024, 64, 16)),
        ("aten::add", "[[8,64],[8,64],[]]", '["float"]',
         Shape(Work.ELEMENTWISE, 8, 64, element_bytes=4, tensors=3)),
        ("aten::mul", "[[1],[8,64]]", '["float","float"]', Shape(Work.ELEMENTWISE, 8, 64, element_bytes=4)),
        ("aten::_fused_adamw_", "[[[8,64],[64]],[[8,64],[64]],[]]", '["float","float"]',
         Shape(Work.OPTIMIZER, 2 * (8 * 64 + 64), 1, element_bytes=4, tensors=1)),
        ("aten::matmul", "[[2,8,128,64],[2,8,64,128]]", '["float"]', Shape(Work.MATMUL, 128, 128, 64, 16, 4)),
        ("aten::_grouped_mm", "[[4096,512],[8,512,2048],[8]]", '["c10::BFloat16"]',
         Shape(Work.MATMUL, 512, 2048, 512, 8)),
        ("aten::scaled_dot_product_attention", "[[2,8,1024,64],[2,2,1024,64],[2,2,1024,64]]", '["c10::BFloat16"]',
         Shape(Work.ATTENTION, 1024, 1024, 64, 16, queries_per_key=4)),
        ("aten::linear", None, None, None),
        ("aten::linear", "not json", None, None),
        ("aten::linear", '["x"]', None, None),
        ("aten::item", "[[]]", None, None),
    ],
)  # fmt: skip
def test_shapes_are_read_from_recorded_dimensions(name: str, dims: str, types: str, shape: Shape | None) -> None:
    """Leading dimensions count as rows, the first type sets the element size, and nothing is invented."""
    assert shape == shape_of(name, dims, types)


def test_large_products_scale_with_their_flop() -> None:
    """Eight times the work takes about eight times as long where the device is full."""
    shape = Shape(Work.MATMUL, 8192, 8192, 8192)

    assert ratio(shape, shape.scaled(rows=2, columns=2, depth=2), H100) == pytest.approx(8, rel=0.03)


def test_half_empty_waves_cost_a_whole_wave() -> None:
    """One tile more than fits the device costs a second wave; 132 tiles cost as much as 1 of the same depth."""
    full = Shape(Work.MATMUL, 128 * 132, 128, 512)
    over = Shape(Work.MATMUL, 128 * 133, 128, 512)

    assert ratio(full, over, Ceilings(H100.flops, 1e15, 132)) == pytest.approx(2)


def test_small_kernels_end_at_the_launch_floor() -> None:
    """Cutting a tiny elementwise kernel by eight gains next to nothing, which is how tensor parallelism gets stuck."""
    shape = Shape(Work.ELEMENTWISE, 64, 512)

    assert 0.9 < ratio(shape, shape.scaled(columns=1 / 8), H100) < 1


def test_attention_is_quadratic_in_the_sequence_and_linear_in_the_batch() -> None:
    """Twice the tokens of a long sequence cost four times, twice the samples twice."""
    shape = Shape(Work.ATTENTION, 8192, 8192, 128, 32, causal=True)

    assert ratio(shape, shape.scaled(rows=2, columns=2), H100) == pytest.approx(4, rel=0.02)
    assert ratio(shape, shape.scaled(batch=2), H100) == pytest.approx(2, rel=0.02)


def test_another_device_is_reached_by_the_ratio_of_its_ceilings() -> None:
    """A product that is bound by FLOP follows the FLOP, a norm the memory."""
    faster = Ceilings(H100.flops * 2, H100.memory_Bps * 3, H100.sms, H100.floor_s)
    product, norm = Shape(Work.MATMUL, 8192, 8192, 8192), Shape(Work.NORM, 65536, 8192)

    assert ratio(product, product, H100, faster) == pytest.approx(0.5, rel=0.01)
    assert ratio(norm, norm, H100, faster) == pytest.approx(1 / 3, rel=0.01)


SIZES = st.integers(1, 4096)


@given(SIZES, SIZES, SIZES, st.sampled_from([Work.MATMUL, Work.NORM, Work.ATTENTION, Work.OTHER]))
def test_an_unchanged_shape_keeps_its_time_and_more_work_never_takes_less(m: int, n: int, k: int, work: Work) -> None:
    """ratio(s, s) is exactly 1, and doubling the batch never makes a kernel faster."""
    shape = Shape(work, m, n, k)

    assert ratio(shape, shape, H100) == 1.0
    assert seconds(shape.scaled(batch=2), CPU) >= seconds(shape, CPU)


@given(SIZES, st.floats(1e-7, 1), st.sampled_from([0.25, 0.5, 2, 8]))
def test_a_stretched_time_comes_back(m: int, measured_s: float, factor: float) -> None:
    """Stretching there and back gives the measured time, however far the kernel is from its model or its floor."""
    old = Shape(Work.NORM, m, 1024)
    new = old.scaled(rows=factor)

    assert measured_s == pytest.approx(anchored(anchored(measured_s, old, new, H100), new, old, H100), rel=1e-9)


def test_a_kernel_slower_than_its_model_still_follows_its_work() -> None:
    """Ten milliseconds of a kernel that the model puts at one microsecond double with its rows; the floor does not."""
    shape = Shape(Work.ELEMENTWISE, 64, 512)

    assert 20e-3 == pytest.approx(anchored(10e-3, shape, shape.scaled(rows=2), H100), rel=1e-3)
    assert H100.floor_s == anchored(H100.floor_s, shape, shape.scaled(rows=2), H100)


def test_the_error_of_a_ratio_grows_with_the_stretch() -> None:
    """Nothing changed, no error; each doubling adds as much."""
    shape = Shape(Work.MATMUL, 1024, 1024, 1024)

    assert ratio_error(shape, shape) == 0
    assert ratio_error(shape, shape.scaled(rows=4, columns=0.5)) == pytest.approx(0.09)


def test_ceilings_come_from_the_kernels_themselves_where_the_device_is_unknown() -> None:
    """A device that runs products at 1 GFLOP/s and norms at 1 GB/s with 10 µs of overhead is found as such."""
    true = Ceilings(1e9, 1e9, 1, 1e-5)
    shapes = [Shape(Work.MATMUL, 2**i, 64, 64) for i in range(2, 14)] + [Shape(Work.NORM, 2**i, 64) for i in range(14)]
    actual = ceilings_seen(shapes, [seconds(shape, true) for shape in shapes])

    assert true.flops == pytest.approx(actual.flops, rel=0.1)
    assert true.memory_Bps == pytest.approx(actual.memory_Bps, rel=0.1)
    assert true.floor_s == pytest.approx(actual.floor_s, rel=0.1)


def test_no_kernel_measured_means_no_ceiling_that_binds() -> None:
    """Without evidence the rates are infinite and the floor is zero."""
    assert Ceilings(float("inf"), float("inf")) == ceilings_seen([], [])


def test_deep_products_of_few_tiles_are_cut_along_their_depth() -> None:
    """144 tiles on 132 multiprocessors take two waves if they are shallow, and little more than one if they are deep."""
    wide = Ceilings(H100.flops, 1e15, 132)
    shallow, deep = Shape(Work.MATMUL, 3072, 768, 512), Shape(Work.MATMUL, 3072, 768, 16384)

    assert 2 * 132 / 144 == pytest.approx(work_seconds(shallow, wide) / (shallow.flop / wide.flops))
    assert work_seconds(deep, wide) / (deep.flop / wide.flops) < 1.15


def test_what_a_kernel_waits_is_told_from_what_it_works() -> None:
    """Time beyond the model is latency where there is little work, work where there is much, and never more than it is."""
    small, large = Shape(Work.NORM, 8, 64), Shape(Work.NORM, 65536, 8192)
    much = 2 * seconds(large, H100)

    assert latency_s(10e-6, small, H100) == pytest.approx(8e-6, rel=0.01)
    assert 0 < latency_s(much, large, H100) < 0.01 * much
    assert 0 == latency_s(seconds(large, H100) / 2, large, H100) == latency_s(1.0, Shape(Work.COPY, 8, 64), H100)
    assert anchored(10e-6, small, small.scaled(rows=2), H100, latent_s=8e-6) == pytest.approx(10e-6, rel=0.01)


@given(SIZES, st.floats(1e-6, 1), st.sampled_from([0.25, 0.5, 2, 8]))
def test_a_stretched_time_with_latency_comes_back(m: int, measured_s: float, factor: float) -> None:
    """Stretching there and back gives the measured time, whatever part of it is latency."""
    old = Shape(Work.NORM, m, 1024)
    new, latent_s = old.scaled(rows=factor), latency_s(measured_s, old, H100)
    there = anchored(measured_s, old, new, H100, latent_s=latent_s)

    assert measured_s == pytest.approx(anchored(there, new, old, H100, latent_s=latent_s), rel=1e-9)
