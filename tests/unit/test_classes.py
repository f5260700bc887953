import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from pasta_otel.errors import InputError
from pasta_otel.gpu.classes import CLASSES, KernelClasses, demangle, load_rules, short_name, template_head
from pasta_otel.gpu.cupti.recording import read_recording

FIXTURES = Path(__file__).parents[1] / "fixtures"
SAMPLES = [
    FIXTURES / "samples" / name
    for name in ("facebookresearch+HolisticTraceAnalysis", "pytorch+kineto", "AMD-AGI+TraceLens")
]


def kernel_events(path):
    """Return name and duration of each GPU kernel of a Kineto trace; none for other files."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    events = document.get("traceEvents", []) if isinstance(document, dict) else document
    events = [event for event in events if isinstance(event, dict)]
    return [(event["name"], event["dur"]) for event in events if str(event.get("cat", "")).lower() == "kernel"]


TRACES = sorted(path for folder in SAMPLES for path in folder.glob("*.json*") if kernel_events(path))


NAMES = {
    "attention": [
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true>(Flash_fwd_params)",
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)",
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "void vllm::paged_attention_v2_kernel<unsigned short, 128, 16>(float*, float*)",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>(Params)",
        "void vllm::rotary_embedding_kernel<c10::Half, true>(long const*, c10::Half*)",
    ],
    "gemm": [
        "nvjet_sm90_hsh_64x8_64x16_2x4_h_bz_bias_TNT",
        "ampere_sgemm_128x64_nn",
        "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x64x32_stage3_warpsize2x2x1_tensor16x8x16_kernel",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_nn_align1>(cutlass_80_simt_sgemm_64x64_8x5::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>(cublasLt::cublasSplitKParams<float>)",
        "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false, false>()",
        "triton_tem_fused_addmm_0",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN",
        "void marlin::Marlin<256, 1, 8, 8, 4, 8>(int4 const*, int4 const*)",
    ],
    "conv": [
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>()",
        "sm90_xmma_wgrad_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_kernel",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>()",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(cudnn::ops::nchw2nhwc_params_t<float>)",
    ],
    "norm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
        "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float)",
        "void at::native::batch_norm_transform_input_kernel<float, float, float, true, int>()",
        "void vllm::rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>()",
        "void at::native::(anonymous namespace)::ComputeInternalGradientsCUDAKernel<float>(long)",
        "void at::native::(anonymous namespace)::ComputeFusedParamsCUDAKernel<float>(long)",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>()",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<float, 2, 128, 1>()",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdam>()",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>()",
        "triton_poi_fused_add_cos_sin_0",
        "void at::native::(anonymous namespace)::upsample_nearest2d_out_frame<float>(float const*)",
        "cupy_multiply__float32_float_float32",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(float)",
        "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::DeviceScanPolicy<int>>()",
        "triton_per_fused_native_layer_norm_backward_3".replace("native_layer_norm_", ""),
        "void at::native::(anonymous namespace)::max_pool_forward_nhwc<float, float>()",
    ],
    "collective": [
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage<c10::Half, 2>(vllm::RankData*)",
    ],
    "sampling": [
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024>(float*)",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>()",
        "void at::native::(anonymous namespace)::sampleMultinomialOnce<float, float>(long*)",
    ],
    "kvcache": ["void vllm::reshape_and_cache_flash_kernel<unsigned short, unsigned short>(unsigned short const*)"],
    "other": ["my_own_thing", "double"],
}


@pytest.mark.parametrize(("wanted", "name"), [(wanted, name) for wanted, names in NAMES.items() for name in names])
def test_a_name_has_its_class(wanted, name):
    assert KernelClasses()(name) == wanted


def test_a_mangled_name_has_the_class_of_its_readable_form():
    mangled = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_7MeanOpsIffffEEjfLi4ELi4EEEEEvT1_"
    assert demangle(mangled).startswith("void at::native::reduce_kernel<512, 1,")
    assert KernelClasses()(mangled) == "reduction"
    assert short_name(mangled) == "at::native::reduce_kernel"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name[:40])
def test_at_least_95_percent_of_the_gpu_time_of_public_traces_has_a_class(path):
    classes, spent = KernelClasses(), Counter()
    for name, duration in kernel_events(path):
        spent[classes(name)] += duration
    assert spent.total() > 0
    assert spent["other"] <= 0.05 * spent.total()


def test_there_are_public_traces_of_nvidia_and_amd_gpus():
    assert len(TRACES) >= 12


@pytest.mark.parametrize(
    ("recording", "wanted"),
    [
        ("h200-cuda13.0.cupti.gz", {"gemm", "attention", "elementwise", "norm"}),
        ("h200-cuda13.0-t2.cupti.gz", {"gemm", "elementwise", "norm", "reduction"}),
    ],
)
def test_every_gpu_kernel_recorded_on_the_h200_has_a_class(recording, wanted):
    names = read_recording(FIXTURES / "cupti" / recording).names.values()
    assert {KernelClasses()(name.decode()) for name in names} == wanted


def test_the_table_uses_known_classes_and_names_a_source_for_each():
    rules = load_rules()
    assert {rule.name for rule in rules} == set(CLASSES) - {"memcpy", "memset", "other"}
    assert all(rule.source for rule in rules)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("- {class: gem, source: x, patterns: [a]}", r"\[0\]\.class: unknown class 'gem'"),
        ("- {class: gemm, patterns: [a]}", r"\[0\]: a class needs"),
        ("- {class: gemm, source: x, patterns: ['(']}", r"\[0\]\.patterns: not a regular expression"),
        ("nothing", "expected a list"),
    ],
)
def test_a_wrong_table_is_refused_with_the_place(text, place):
    with pytest.raises(InputError, match=place):
        load_rules(text, "mine.yaml")


def test_a_parameters_type_says_nothing_about_the_class():
    assert template_head("void mine<4>(cutlass::Params, int (*)(int))") == "void mine<4>"
    assert KernelClasses()("void mine<4>(attention_params)") == "other"
    assert template_head("plain") == "plain"
