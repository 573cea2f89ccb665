"""MFU, and the profile of a run: which kernel is of which kind, what is written, and that training does not notice."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hooks import on
from tiny import write_rows
from torchstone import api, cli
from torchstone.config import load_config
from torchstone.errors import UsageError
from torchstone.models.decoder import DecoderConfig, LayerSpec
from torchstone.models.families import FAMILIES, new_hf_config
from torchstone.observe.kernel_times import KINDS, kernel_kind, kernel_table, read_trace
from torchstone.observe.metrics import read_metrics
from torchstone.observe.mfu import flops_per_token, matmul_parameters, peak_flops
from torchstone.training.run import Callback, Run

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
# Names that torch.profiler reports on an H200 and on a CPU.
KERNELS = {
    "matmul": [
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_sm90_tss_128x256_64x4_2x1_v_badd_coopA_NTN",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 6, 6, false>(cublasGemmSmallNParams<float>)",
        "triton_tem_fused_mm_2", "aten::mm", "aten::addmm", "aten::linear", "aten::_scaled_mm",
    ],
    "attention": [
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensorptrbf16",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128>>(Flash_fwd_params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "triton_tem_fused_flex_attention_0", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_softmax",
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false, false>(int)",
    ],
    "loss": [
        "triton_red_fused__to_copy_arange_eq_exp_logsumexp_mul_ne_scalar_tensor_sub_where_0",
        "triton_red_fused__log_softmax_nll_loss_forward_1", "liger_cross_entropy_kernel",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
        "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, true, false>(float*, float const*)",
        "aten::_log_softmax_backward_data", "aten::nll_loss_forward",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<c10::BFloat16, NormType::L2, float>>",
        "adamw_k", "aten::_fused_adamw_", "aten::_foreach_norm", "triton_for_fused_0",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<OpaqueType<2u>, unsigned int, 3, 128>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<2>, at::native::(anonymous namespace)::Copy<c10::BFloat16, float>>",
        "triton_poi_fused__to_copy_3", "triton_poi_fused_clone_transpose_view_12", "aten::copy_",
        "aten::_foreach_copy_",
    ],
    "communication": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl:_reduce_scatter_base",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "c10d::allreduce_",
        "gloo:all_reduce",
    ],
    "other": [
        "triton_poi_fused__unsafe_view_cat_mul_silu_silu_backward_split_view_0", "swiglu_b",
        "triton_poi_fused_add_cat_mul_neg_slice_transpose_view_2", "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "triton_per_fused__to_copy__unsafe_view_add_div_expand_mul_pow_sum_view_1",
        "void at::native::(anonymous namespace)::sum_and_scatter<c10::BFloat16, int>(long*, c10::BFloat16*)",
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>",
        "aten::mul",
    ],
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 128256, "width": 2048, "depth": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "mlp_width": 8192,
    "max_positions": 131072, "rope_theta": 500000.0,
}  # fmt: skip


def decoder_config(**changes: Any) -> DecoderConfig:
    return FAMILIES["llama"].decoder_config(new_hf_config("llama", **(LLAMA_1B | {"tied": True} | changes)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_kernel(kind: str) -> None:
    assert {name: kernel_kind(name) for name in KERNELS[kind]} == dict.fromkeys(KERNELS[kind], kind)


def write_trace(path: Path, events: list[tuple[Any, ...]]) -> Path:
    """A Chrome trace of (category, name, start, duration) or (..., arguments)."""
    keys = ("cat", "name", "ts", "dur", "args")
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "X", "tid": 1} | dict(zip(keys, e, strict=False)) for e in events]}, file)
    return path


class TestKernelTimes:
    def test_on_a_gpu_kernels_count_and_overlapping_ones_are_busy_once(self, tmp_path: Path) -> None:
        trace = write_trace(tmp_path / "trace.json.gz", [
            ("cpu_op", "aten::mm", 0, 900), ("user_annotation", "Optimizer.step#AdamW.step", 0, 1000),
            ("gpu_user_annotation", "ProfilerStep#1", 0, 1000), ("kernel", "nvjet_sm90_tst", 100, 400),
            ("kernel", "ncclDevKernel_AllGather", 300, 400), ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 800, 100),
        ])  # fmt: skip
        times = read_trace(trace)
        kinds = {kind: time for kind, time in times.by_kind().items() if time}
        assert kinds == {"matmul": 400, "communication": 400, "copies": 100}
        assert times.busy == 700
        table = kernel_table(times, 3, 4, 2e-3)
        assert table.splitlines()[0] == "profile of steps 3 to 4: 1.0 ms a step"
        assert re.search(r"^matmul +0\.20 +20\.0 % +0$", table, re.MULTILINE)
        assert re.search(r"^idle +0\.65 +65\.0 %", table, re.MULTILINE)

    def test_on_a_cpu_an_operation_counts_without_those_that_it_calls(self, tmp_path: Path) -> None:
        trace = write_trace(tmp_path / "trace.json.gz", [
            ("cpu_op", "aten::linear", 0, 100), ("cpu_op", "aten::addmm", 10, 80), ("cpu_op", "aten::copy_", 20, 30),
            ("cpu_op", "aten::mul", 200, 50), ("python_function", "step", 0, 1000),
            # Autograd's node waits for other ranks after its operation.
            ("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 195, 400),
            ("cpu_op", "MulBackward0", 196, 99),
        ])  # fmt: skip
        times = read_trace(trace)
        assert {kernel.name: time for kernel, time in times.by_kernel.items()} == {
            "aten::linear": 20, "aten::addmm": 50, "aten::copy_": 30, "aten::mul": 50
        }  # fmt: skip
        assert times.busy == 150

    def test_what_the_optimizer_starts_is_the_optimizers(self, tmp_path: Path) -> None:
        on_cpu = write_trace(tmp_path / "cpu.json.gz", [
            ("user_annotation", "optimizer", 100, 100), ("cpu_op", "aten::addmm", 10, 20),
            ("cpu_op", "aten::addmm", 110, 30), ("cpu_op", "c10d::allreduce_", 150, 5),
        ])  # fmt: skip
        assert read_trace(on_cpu).by_kind() | {"other": 0} == dict.fromkeys(KINDS, 0) | {
            "matmul": 20, "optimizer": 30, "communication": 5
        }  # fmt: skip
        # Kernels run later than they are launched.
        on_gpu = write_trace(tmp_path / "gpu.json.gz", [
            ("user_annotation", "optimizer", 100, 100),
            ("cuda_runtime", "cudaLaunchKernel", 20, 5, {"correlation": 7}),
            ("cuda_driver", "cuLaunchKernelEx", 120, 5, {"correlation": 8}),
            ("kernel", "nvjet_sm90_tst", 130, 40, {"correlation": 7}),
            ("kernel", "nvjet_sm90_tst", 400, 60, {"correlation": 8}),
        ])  # fmt: skip
        kinds = read_trace(on_gpu).by_kind()
        assert (kinds["matmul"], kinds["optimizer"]) == (40, 60)


class TestProfileOfARun:
    def train(self, overrides: dict[str, Any]) -> tuple[list[dict[str, Any]], Path]:
        api.train(load_config(overrides=overrides))
        folder = Path(overrides["output_dir"])
        return read_metrics(folder / "metrics.jsonl"), folder

    def test_a_profiled_run_has_the_same_losses_and_a_trace_and_a_table(
        self, settings: Settings, tmp_path: Path
    ) -> None:
        plain, _ = self.train(settings(output_dir=str(tmp_path / "plain")))
        lines, folder = self.train(settings(observe__profile="2"))
        assert [(x["loss"], x["grad_norm"]) for x in lines] == [(x["loss"], x["grad_norm"]) for x in plain]
        times = read_trace(folder / "profile/steps-3-4.json.gz").by_kind()
        assert all(times[kind] > 0 for kind in ("matmul", "attention", "loss", "optimizer", "other")), times
        table = (folder / "profile/steps-3-4.txt").read_text()
        assert [row.split()[0] for row in table.splitlines()[2:10]] == [*KINDS, "idle"]
        assert table.splitlines()[1] in (folder / "logs/rank-0.log").read_text(), "the console shows it"

    def test_a_range_and_a_run_that_ends_within_it(self, settings: Settings) -> None:
        _, folder = self.train(settings(observe__profile="1-9", training__max_steps=2, data__validation_split=0.2))
        assert sorted(path.name for path in (folder / "profile").iterdir()) == ["steps-1-2.json.gz", "steps-1-2.txt"]
        log = (folder / "logs/rank-0.log").read_text()
        assert re.search(r"profile of steps 1 to 2: [\d.]+ ms a step, with 1 validation and 1 save$", log, re.MULTILINE)
        assert "WARNING | steps 3 to 9 were not profiled: the run ended before them" in log

    def test_a_resumed_run_profiles_the_steps_that_are_left_of_the_range(self, settings: Settings) -> None:
        self.train(settings(training__max_steps=3))
        _, folder = self.train(settings(training__max_steps=6, observe__profile="2-5"))
        assert (folder / "profile/steps-4-5.txt").read_text().startswith("profile of steps 4 to 5: ")

    def test_matrix_products_of_muon_are_the_optimizers(self, settings: Settings) -> None:
        _, folder = self.train(settings(observe__profile="2-3", optim__name="muon"))
        times = read_trace(folder / "profile/steps-2-3.json.gz").by_kernel
        assert any(kernel.kind == "optimizer" and "addmm" in kernel.name for kernel in times)

    def test_a_run_that_ends_before_says_so(self, settings: Settings) -> None:
        _, folder = self.train(settings(observe__profile="3", training__max_steps=2))
        assert not (folder / "profile").exists()
        warning = "WARNING | steps 3 to 5 are not profiled: this run goes from step 1 to 2"
        assert (folder / "logs/rank-0.log").read_text().count(warning) == 1

    def test_a_profile_that_cannot_be_written_does_not_end_the_run(
        self, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/profile").write_text("in the way")
        assert api.train(overrides=settings(observe__profile="2-3", observe__console="lines")).step == 6
        assert "the profile could not be written: " in capsys.readouterr().err

    def test_an_error_ends_the_profiler(self, settings: Settings, tmp_path: Path) -> None:
        class Fail(Callback):
            def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
                raise ValueError("stop here")

        with pytest.raises(ValueError, match="stop here"):
            api.train(load_config(overrides=settings(observe__profile="1-3")), callbacks=[Fail()])
        with torch.profiler.profile() as profiler:
            torch.ones(2).mul(2)
        assert any(event.name == "aten::mul" for event in profiler.events())

    def test_the_flag_is_the_config_key(self, settings: Settings, run_main: Command) -> None:
        code, _, err = run_main(cli.main, "torchstone", "train", "--debug", "--profile", "3", "--observe.profile", "4")
        assert (code, "--profile and --observe.profile are the same setting" in err) == (2, True)
        code, out, _ = run_main(cli.main, "torchstone", "train", "--debug", "--profile", "10-12", "--print-config")
        assert (code, json.loads(out)["observe"]["profile"]) == (0, "10-12")
        assert load_config(overrides=settings(observe__profile=3)).observe.profile == "3"
        for text in ("0", "0-3", "12-10", "3:5", "all", 3.5, True):
            with pytest.raises(UsageError, match=re.escape(f"observe.profile '{text}' is neither")):
                api.train(overrides=settings(observe__profile=text))


class TestMfu:
    def test_flops_are_those_of_torchtitan(self) -> None:
        """`get_dense_model_nparams_and_flops` of torchtitan 0.2.2 for an untied model of these sizes."""
        untied = decoder_config(tied=False)
        layer = 2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192 + 2 * 2048
        head = 128256 * 2048
        assert matmul_parameters(untied) == 16 * layer + 2048 + head
        assert flops_per_token(untied, 4096) == 6 * (16 * layer + 2048 + head) + 6 * 16 * 32 * (2 * 64) * 4096
        # A tied head multiplies every token as well.
        assert matmul_parameters(decoder_config(tied=True)) == matmul_parameters(untied)

    def test_a_window_bounds_the_attention(self) -> None:
        plain = decoder_config()
        windowed = DecoderConfig(**(vars(plain) | {"layers": (LayerSpec(window=128), *plain.layers[1:])}))
        assert flops_per_token(plain, 4096) - flops_per_token(windowed, 4096) == 12 * 32 * 64 * (4096 - 128)
        assert flops_per_token(plain, 100) == flops_per_token(windowed, 100)

    @pytest.mark.parametrize(
        ("name", "tflops"),
        [
            ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H20", 148),
            ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10G", None), ("NVIDIA L40S", 362), ("NVIDIA L4", 121),
            ("NVIDIA B200", 2250), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GB200", None),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None),
            ("Tesla T4", None),
        ],
    )  # fmt: skip
    def test_the_peak_of_a_gpu_follows_from_its_name(self, name: str, tflops: float | None) -> None:
        assert peak_flops(name) == (None if tflops is None else tflops * 1e12)
        for precision in ("fp8", "fp8-pure"):
            assert peak_flops(name, precision) == (None if tflops is None else 2 * tflops * 1e12)

    @pytest.mark.parametrize("packing", [True, False])
    def test_the_attention_of_a_document_counts_by_its_own_length(
        self, settings: Settings, tmp_path: Path, packing: bool
    ) -> None:
        lengths = [2, 7, 30, 31]
        path = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1] * n, "labels": [1] * n} for n in lengths])
        configs = []
        overrides = settings(data__path=str(path), data__packing=packing, training__max_steps=1)
        keep_config = on(start=lambda run: configs.append(run.model.decoder_config))
        api.train(overrides=overrides | {"observe.peak_tflops": 0.25}, callbacks=[keep_config])
        (line,) = read_metrics(Path(overrides["output_dir"]) / "metrics.jsonl")
        flops = sum(n * flops_per_token(configs[0], n) for n in lengths)
        assert line["mfu"] == pytest.approx(flops / line["step_s"] / 0.25e12)

    def test_the_mfu_of_a_cpu_is_unknown(self, settings: Settings) -> None:
        api.train(overrides=settings(training__max_steps=1))
        assert read_metrics(Path(settings()["output_dir"]) / "metrics.jsonl")[0]["mfu"] is None
