"""Kernel names become classes by rules in one file that a user can extend; unknown names are listed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from scaletrace.errors import InputError
from scaletrace.parse.events import Events
from scaletrace.parse.health import Health
from scaletrace.parse.kernels import (
    classes_of,
    classify,
    communication_candidates,
    default_rules,
    list_unknown,
    load_rules,
)
from scaletrace.parse.reader import read_file

EXAMPLES = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication/nccl",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "communication/nccl",
    "NCCLDEVKERNEL_ALLGATHER": "communication/nccl",
    "void vendor::my_ncclDevKernel_Generic_1": "communication/nccl",
    "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)": "communication/nccl",
    "void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*)": "communication/deep_ep",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": "communication/custom",
    "nvshmemi_barrier_all_on_stream": "communication/nvshmem",
    "two_shot_all_reduce_kernel_inplace": "communication/custom",
    "volta_sgemm_128x64_tn": "matmul",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "matmul",
    "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32": "matmul",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_nn_align8>": "matmul",
    "void deep_gemm::fp8_gemm_kernel<4096u, 7168u>": "matmul",
    "std::enable_if<true, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>": "matmul",
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>": "convolution",
    "sm90_xmma_wgrad_indexed_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc": "convolution",
    "void cutlass::device_kernel<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2, 2, 2>>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>": "norm",
    "_rms_norm_fwd_fused": "norm",
    "triton_red_fused__fused_rms_norm__unsafe_view_add_cat_mul_3": "norm",
    "triton_poi_fused__to_copy_t_8": "elementwise",
    "triton_red_fused__to_copy_mean_pow_0": "reduction",
    "triton_per_fused__flash_attn_backward__unsafe_view_mul_sum_view_10": "reduction",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, sum_functor>>": "reduction",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>": "softmax",
    "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_per_row_1": "embedding",
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>": "optimizer",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>": "copy",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "memset",
    "grouped_topk_kernel": "routing",
    "_per_token_group_quant_fp8": "quantize",
    "void convert_kernel<float>": "elementwise",
    "frobnicate_v2": "unknown",
    "void at::native::(anonymous namespace)::foo<lambda()#1>": "unknown",
}


@pytest.mark.parametrize(("name", "label"), EXAMPLES.items())
def test_names_from_real_traces_find_their_class(name: str, label: str) -> None:
    """Any case, any prefix; what no rule knows stays unknown."""
    rules = default_rules()

    assert label == rules.labels[classify([name])[0]]


def test_a_family_covers_its_members() -> None:
    """communication stands for all kinds of it."""
    rules = default_rules()

    labels = {rules.labels[code] for code in rules.codes_of("communication")}
    assert {"communication/nccl", "communication/deep_ep", "communication/nvshmem"} < labels
    assert all(label.startswith("communication/") for label in labels)


def test_rules_of_the_user_come_first(tmp_path: Path) -> None:
    """A file of one's own adds classes and overrides those that ship."""
    path = tmp_path / "mine.yaml"
    path.write_text("rules:\n  - class: communication/ours\n    any: ['^frob', 'sgemm']\n")
    rules = load_rules([path])

    found = [rules.labels[code] for code in classify(["frobnicate_v2", "volta_sgemm", "nvjet_x"], rules)]
    assert ["communication/ours", "communication/ours", "matmul"] == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules: [", "not valid YAML"),
        ("- a", "expected `rules:`"),
        ("rules:\n  - class: x\n", "rule 1 is not of this form"),
        ("rules:\n  - class: x\n    any: ['(']\n", r"rule 1: '\(' is not a regular expression"),
    ],
)
def test_malformed_rules_are_refused_with_their_place(tmp_path: Path, text: str, words: str) -> None:
    """The message names the file and the rule."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        load_rules([path])


def table(*rows: tuple[str, str, int]) -> Events:
    """A table of (category, name, duration) on one stream."""
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": 1000 * k, "dur": dur, "args": {"stream": 7}}
        for k, (cat, name, dur) in enumerate(rows)
    ]
    return read_file(io.BytesIO(json.dumps({"traceEvents": events}).encode())).events


def test_copies_and_sets_go_by_category_and_host_rows_have_no_class() -> None:
    """A memcpy is a copy whatever it is called; an op named gemm is no kernel."""
    events = table(
        ("gpu_memcpy", "Memcpy HtoD", 1), ("gpu_memset", "x", 1), ("cpu_op", "gemm", 1), ("kernel", "gemm", 1)
    )

    labels = [default_rules().labels[code] for code in classes_of(events)]
    assert ["copy", "memset", "unknown", "matmul"] == labels


def test_unknown_kernels_are_named_longest_first() -> None:
    """Nothing is put into a class silently; what looks like communication is said to."""
    events = table(("kernel", "foo", 5), ("kernel", "bar_combine", 50), ("kernel", "foo", 5), ("kernel", "gemm", 900))
    health = Health()
    list_unknown(events, health)

    assert {"kernels without a class": 3} == health.guessed
    assert (
        "kernel names without a class (2): bar_combine, foo; add rules with a file like kernels.yaml" == health.notes[0]
    )
    assert ["bar_combine"] == communication_candidates(events)
