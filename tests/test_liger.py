"""Which of Liger's kernels are chosen and where they are used, with stand-ins for the kernels in plain torch.

The kernels themselves need a GPU: tests/gpu_tests/test_liger_kernels.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity import ZERO_LIMIT
from selection import the_rest
from tiny_families import CASES, SHAPES, VOCABULARY, make_model
from torchstone.checkpoint.model_folder import load_model, read_model_config
from torchstone.data.collate import MicroBatch
from torchstone.errors import UsageError
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.loss.fused import fused_loss_sum
from torchstone.models import liger
from torchstone.models.decoder import MLP, Attention, Decoder, DecoderConfig, RMSNorm
from torchstone.models.execution import ExecutionOptions
from torchstone.models.liger import apply_liger, choose_liger
from torchstone.parallel.runner import micro_batch_loss

Case = tuple[str, str]
FolderOf = Callable[[Case], Path]
ConfigOf = Callable[[Case], DecoderConfig]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALL = ("norm", "rope", "mlp", "loss")
LLAMA, PHI3, GPT2 = ("llama", "grouped"), ("phi3", "plain"), ("gpt2", "plain")
# The kernels that a family, or one shape of it, cannot use.
UNUSABLE = {"gpt2": {"norm", "rope", "mlp"}}
UNUSABLE_BY_SHAPE = {("phi3", "partial"): {"rope"}}
# RMSNorm after rounding; with 1 + weight and gelu; in fp32; layer norms.
VARIED = ("llama", "gemma2", "olmo2", "gpt2")


class PlainLoss(torch.autograd.Function):
    """Liger's fused linear cross-entropy in plain torch. Like Liger's, it checks only `hidden` for requires_grad."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: None, ce_weight: None, ignore_index: int,
        z_loss: float, smoothing: float, reduction: str, softcap: float | None, keep_z_loss: bool, accum: torch.dtype,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert (bias, ce_weight, z_loss, smoothing, keep_z_loss) == (None, None, 0.0, 0.0, False)
        assert (ignore_index, reduction, accum) == (-100, "sum", torch.float32)
        assert hidden.dim() == 2
        with torch.enable_grad():
            x, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            logits = (x @ w.T).float()
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
        if hidden.requires_grad:
            ctx.save_for_backward(*torch.autograd.grad(loss, (x, w)))
        return loss.detach(), None

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if not ctx.saved_tensors:
            return (None,) * 12
        x, w = ctx.saved_tensors
        return (x * upstream, w * upstream, *(None,) * 10)


class PlainSiLUMul:
    @staticmethod
    def apply(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class PlainGELUMul:
    @staticmethod
    def apply(gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


class PlainNorm:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Tensor:
        assert not in_place
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        if casting == "llama":
            return normed.to(x.dtype) * (offset + weight)
        return (normed * (offset + weight.float())).to(x.dtype)


class PlainRope:
    @staticmethod
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """In place, and with the left half of cos and sin only, as Liger's is."""
        assert cos.dim() == sin.dim() == 3
        cos, sin = (each[:, None, :, : each.shape[-1] // 2] for each in (cos, sin))
        with torch.no_grad():
            for x in (q, k):
                assert x.transpose(1, 2).is_contiguous()
                left, right = (half.to(cos.dtype) for half in x.chunk(2, dim=-1))
                x.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))
        return q, k


class PlainRMSNorm(nn.Module):
    """Only its forward is used, bound to the modules of a Transformers model."""

    def forward(self, x: Tensor) -> Tensor:
        return PlainNorm.apply(x, self.weight, self.variance_epsilon, 0.0, "llama", self.in_place)


class PlainPhi3MLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def patch_phi3(rope: bool = True, rms_norm: bool = True, swiglu: bool = True, model: Any = None) -> None:
    """Patches the model and, like Liger, the classes of its modeling file."""
    from transformers.models.phi3 import modeling_phi3

    assert not rope, "Liger's rope patch changes all models"
    if rms_norm:
        modeling_phi3.Phi3RMSNorm = PlainRMSNorm
    if swiglu:
        modeling_phi3.Phi3MLP = PlainPhi3MLP
    for part in model.modules():
        if rms_norm and "norm" in type(part).__name__.lower() and hasattr(part, "variance_epsilon"):
            part.in_place = True
            vars(part)["forward"] = PlainRMSNorm.forward.__get__(part)
        if swiglu and type(part).__name__ == "Phi3MLP":
            vars(part)["forward"] = PlainPhi3MLP.forward.__get__(part)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins where Liger's kernels would be."""
    contents: dict[str, dict[str, Any]] = {
        "triton": {},
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": PlainNorm},
        "liger_kernel.ops.rope": {"LigerRopeFunction": PlainRope},
        "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": PlainSiLUMul},
        "liger_kernel.ops.geglu": {"LigerGELUMulFunction": PlainGELUMul},
        "liger_kernel.ops.fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyFunction": PlainLoss},
        "liger_kernel.transformers": {},
        "liger_kernel.transformers.monkey_patch": {"MODEL_TYPE_TO_APPLY_LIGER_FN": {"phi3": patch_phi3}},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(liger, "version", lambda name: "0.8.5")


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "find_spec", lambda name: None)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins run on a CPU."""
    monkeypatch.setattr(liger, "_unavailable", lambda device: None)


@pytest.fixture(scope="module")
def config_of(folder_of: FolderOf) -> ConfigOf:
    return lambda case: read_model_config(folder_of(case))[2]


def make_batch(packed: bool = True) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 12), generator=generator)
    labels = torch.where(torch.rand(2, 12, generator=generator) < 0.6, ids.roll(-1, 1), -100)
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    doc_ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    return MicroBatch(ids, labels, positions if packed else torch.arange(12).expand(2, 12), doc_ids)


def kernels_in(decoder: Decoder) -> list[Any]:
    """The kernel attribute of every part, None where it has no kernel."""
    kernels = [part.kernel for part in decoder.modules() if isinstance(part, RMSNorm | MLP)]
    kernels += [part.rotary_kernel for part in decoder.modules() if isinstance(part, Attention)]
    return [*kernels, getattr(decoder, "fused_loss", None)]


class TestChoice:
    @pytest.mark.usefixtures("not_installed")
    def test_without_the_package_auto_chooses_nothing_and_a_name_is_refused(self, config_of: ConfigOf) -> None:
        choice = choose_liger(("auto",), config_of(LLAMA), "none", CUDA)
        assert choice.kernels == ()
        assert choice.notes == ["liger: none (the package liger-kernel is not installed)"]
        for kernel in ALL:
            with pytest.raises(UsageError, match="liger-kernel is not installed") as caught:
                choose_liger((kernel,), config_of(LLAMA), "none", CUDA)
            assert caught.value.exit_code == 2

    @pytest.mark.usefixtures("installed")
    def test_on_a_cpu_auto_chooses_nothing_and_a_name_is_refused(self, config_of: ConfigOf) -> None:
        assert choose_liger(("auto",), config_of(LLAMA), "none", CPU).notes == [
            "liger: none (its kernels run on CUDA devices, not on cpu)"
        ]
        with pytest.raises(UsageError, match="model.liger norm: its kernels run on CUDA devices"):
            choose_liger(("norm",), config_of(LLAMA), "none", CPU)

    @pytest.mark.usefixtures("installed")
    def test_an_old_version_is_not_used(self, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(liger, "version", lambda name: "0.6.4")
        assert "0.6.4 is too old" in choose_liger(("auto",), config_of(LLAMA), "none", CUDA).reason

        def nightly_build(name: str) -> str:
            raise PackageNotFoundError(name)

        monkeypatch.setattr(liger, "version", nightly_build)
        assert choose_liger(("auto",), config_of(LLAMA), "none", CUDA).kernels == ALL[:3]

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize("case", CASES, ids="-".join)
    def test_auto_chooses_all_kernels_that_the_family_can_use(self, case: Case, config_of: ConfigOf) -> None:
        # The loss has a chunked implementation of ours, which is faster.
        unusable = UNUSABLE.get(case[0], set()) | UNUSABLE_BY_SHAPE.get(case, set()) | {"loss"}
        choice = choose_liger(("auto",), config_of(case), "none", CUDA)
        assert choice.kernels == tuple(kernel for kernel in ALL if kernel not in unusable)
        assert all(kernel in choice.reason for kernel in unusable)

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize(
        ("case", "kernel", "reason"),
        [
            (GPT2, "norm", "layer norms"),
            (GPT2, "rope", "no RoPE"),
            (GPT2, "mlp", "not gated"),
            (("phi3", "partial"), "rope", "only part of each head rotates"),
        ],
    )
    def test_a_named_kernel_that_the_family_cannot_use_is_refused(
        self, case: Case, kernel: str, reason: str, config_of: ConfigOf
    ) -> None:
        with pytest.raises(UsageError, match=reason) as caught:
            choose_liger((kernel, "loss"), config_of(case), "none", CUDA)
        assert caught.value.exit_code == 2
        assert "loss" in (caught.value.hint or "")

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize("compile", ["block", "whole"])
    def test_with_compile_only_the_loss_can_be_used(self, compile: Any, config_of: ConfigOf) -> None:
        choice = choose_liger(("auto",), config_of(LLAMA), compile, CUDA)
        assert choice.kernels == ()
        assert "not norm, rope, mlp: model.compile" in choice.reason
        assert choose_liger(("loss",), config_of(LLAMA), compile, CUDA).kernels == ("loss",)
        for kernel in ("norm", "rope", "mlp"):
            with pytest.raises(UsageError, match="model.compile"):
                choose_liger((kernel,), config_of(LLAMA), compile, CUDA)

    @pytest.mark.usefixtures("installed")
    def test_the_fused_loss_is_used_only_if_requested(self, config_of: ConfigOf) -> None:
        config = config_of(LLAMA)
        assert "loss" not in choose_liger(("auto",), config, "none", CUDA).kernels
        assert choose_liger(("auto", "loss"), config, "none", CUDA).kernels == ALL
        assert choose_liger(("loss",), config, "none", CUDA).kernels == ("loss",)

    @pytest.mark.usefixtures("installed")
    def test_the_order_of_names_does_not_matter(self, config_of: ConfigOf) -> None:
        choice = choose_liger(("mlp", "norm"), config_of(("gemma2", "caps")), "none", CUDA)
        assert choice.notes == ["liger: norm, mlp (as requested)"]


class TestNative:
    def test_without_kernels_a_decoder_is_unchanged(self, folder_of: FolderOf) -> None:
        model = load_model(folder_of(LLAMA), CPU, execution=ExecutionOptions(liger=("auto",)))
        assert "liger: none (its kernels run on CUDA devices, not on cpu)" in model.notes
        assert set(kernels_in(model.module)) == {None}
        model = load_model(folder_of(LLAMA), CPU)
        assert not [note for note in model.notes if note.startswith("liger")]
        assert set(kernels_in(model.module)) == {None}

    @pytest.mark.usefixtures("installed", "on_cpu")
    @pytest.mark.parametrize(
        "case",
        [
            pytest.param((family, next(iter(shapes))), marks=() if family in VARIED else the_rest)
            for family, shapes in SHAPES.items()
        ],
        ids="-".join,
    )
    def test_kernels_get_the_settings_of_the_family(self, case: Case, folder_of: FolderOf) -> None:
        """The stand-ins compute what Liger documents, so a wrong offset, casting or cos and sin would be seen."""
        plain = load_model(folder_of(case), CPU, execution=ExecutionOptions(implementation="native"))
        fast = load_model(folder_of(case), CPU, execution=ExecutionOptions(implementation="native", liger=("auto",)))
        kernels = choose_liger(("auto",), plain.module.config, "none", CPU).kernels
        norms = [part for part in fast.module.modules() if isinstance(part, RMSNorm)]
        assert all((part.kernel is not None) == ("norm" in kernels) for part in norms)
        batch = make_batch()
        for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
            with torch.no_grad():
                logits, expected = (
                    model.module.to(dtype)(batch.ids, batch.positions, batch.doc_ids).float() for model in (fast, plain)
                )
            assert ((logits - expected).norm() / expected.norm()).item() <= limit

    @pytest.mark.usefixtures("installed", "on_cpu")
    def test_another_decoder_gets_no_kernels(self, folder_of: FolderOf) -> None:
        first, second = (load_model(folder_of(LLAMA), CPU).module for _ in range(2))
        apply_liger(first, ALL)
        assert None not in kernels_in(first)
        assert set(kernels_in(second)) == {None}

    @pytest.mark.usefixtures("installed", "on_cpu")
    @pytest.mark.parametrize("fused", [(), ("qkv", "gate_up")], ids=["separate", "fused"])
    def test_the_rope_kernel_rotates_a_copy(self, fused: Any, folder_of: FolderOf) -> None:
        model = load_model(folder_of(LLAMA), CPU, execution=ExecutionOptions(liger=("rope",), fused=fused))
        outputs: list[tuple[Tensor, Tensor]] = []
        attention = model.module.layers["0"].attention
        projection = attention.wqkv if fused else attention.wq
        projection.register_forward_hook(lambda part, args, out: outputs.append((out, out.clone())))
        batch = make_batch()
        with torch.no_grad():
            model.module(batch.ids, batch.positions, batch.doc_ids)
        assert torch.equal(*outputs[0])


@pytest.mark.usefixtures("installed")
class TestLoss:
    @pytest.mark.parametrize("softcap", [None, 3.0])
    @pytest.mark.parametrize("divisor", [1.0, 3.0])
    def test_the_fused_loss_is_the_sum_of_the_token_losses(self, softcap: float | None, divisor: float) -> None:
        torch.manual_seed(0)
        hidden, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
        labels = torch.tensor([[1, -100, 3, 10, -100], [-100, 0, 2, 2, 7]])
        logits = hidden @ weight.T / divisor
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        expected = token_loss_sum(logits, labels)
        loss = fused_loss_sum(hidden, weight, labels, softcap, divisor)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        gradients, expected_gradients = (torch.autograd.grad(each / 7, (hidden, weight)) for each in (loss, expected))
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-6)

    def test_a_head_on_frozen_hidden_states_gets_its_gradient(self) -> None:
        hidden, weight = torch.randn(1, 4, 8), torch.randn(11, 8, requires_grad=True)
        labels = torch.tensor([[1, 2, 3, -100]])
        gradient = torch.autograd.grad(fused_loss_sum(hidden, weight, labels), weight)
        torch.testing.assert_close(gradient, torch.autograd.grad(token_loss_sum(hidden @ weight.T, labels), weight))

    def test_without_a_loss_token_loss_and_gradients_are_zero(self) -> None:
        hidden, weight = torch.randn(1, 4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
        loss = fused_loss_sum(hidden, weight, torch.full((1, 4), -100))
        assert loss.item() == 0.0
        assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight)))

    @pytest.mark.usefixtures("on_cpu")
    @pytest.mark.parametrize(
        "case", [("llama", "tied"), ("granite", "multipliers"), ("gemma2", "caps"), GPT2], ids="-".join
    )
    @pytest.mark.parametrize("packed", [True, False])
    def test_a_step_with_the_fused_loss_never_has_logits(
        self, case: Case, packed: bool, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = load_model(folder_of(case), CPU).module
        fused = load_model(folder_of(case), CPU, execution=ExecutionOptions(liger=("loss",))).module
        batch = make_batch(packed)
        inputs = batch.ids, batch.positions, batch.doc_ids if packed else None, batch.labels
        expected = micro_batch_loss(plain, *inputs)
        monkeypatch.setattr(Decoder, "compute_logits", None)
        loss = micro_batch_loss(fused, *inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for each in (loss, expected):
            (each / 9).backward()
        for (name, parameter), reference in zip(fused.named_parameters(), plain.parameters(), strict=True):
            difference = (parameter.grad - reference.grad).norm()
            assert difference <= 1e-5 * reference.grad.norm() + ZERO_LIMIT, name
        with torch.no_grad():
            assert micro_batch_loss(fused, *inputs).item() == pytest.approx(expected.item(), rel=1e-6)


class TestFallback:
    def load(self, folder: Path, *kernels: str) -> Any:
        return load_model(folder, CPU, execution=ExecutionOptions(implementation="fallback", liger=kernels))

    def test_on_a_cpu_auto_chooses_nothing_and_a_name_is_refused(self, folder_of: FolderOf) -> None:
        note = "liger: none (its kernels run on CUDA devices, not on cpu)"
        assert self.load(folder_of(PHI3), "auto").notes[-1] == note
        with pytest.raises(UsageError, match="not on cpu") as caught:
            self.load(folder_of(PHI3), "norm")
        assert caught.value.exit_code == 2

    @pytest.mark.usefixtures("installed", "on_cpu")
    def test_a_model_type_without_a_patch(self, folder_of: FolderOf) -> None:
        note = self.load(folder_of(GPT2), "auto").notes[-1]
        assert note.startswith("liger: none (not norm, mlp: Liger has no patch for model_type gpt2")
        with pytest.raises(UsageError, match="Liger has no patch for model_type gpt2"):
            self.load(folder_of(GPT2), "mlp")

    @pytest.mark.usefixtures("installed", "on_cpu")
    @pytest.mark.parametrize("kernel", ["rope", "loss"])
    def test_a_kernel_that_would_change_other_models_is_refused(self, kernel: str, folder_of: FolderOf) -> None:
        with pytest.raises(UsageError, match=f"model.liger {kernel}: "):
            self.load(folder_of(PHI3), kernel)

    @pytest.mark.usefixtures("installed", "on_cpu")
    def test_only_this_model_is_patched(self, folder_of: FolderOf) -> None:
        from transformers.models.phi3 import modeling_phi3

        names = dict(vars(modeling_phi3))
        before, patched = self.load(folder_of(PHI3)), self.load(folder_of(PHI3), "auto")
        assert patched.notes[-1].startswith("liger: norm, mlp (not rope: ")
        layer = patched.module.hf.model.layers[0]
        assert layer.mlp.forward.__func__ is PlainPhi3MLP.forward
        assert layer.input_layernorm.forward.__func__ is PlainRMSNorm.forward
        assert layer.input_layernorm.in_place is False
        assert all(part.training for part in patched.module.modules())
        assert dict(vars(modeling_phi3)) == names
        after = self.load(folder_of(PHI3))
        for other in (before, after):
            parts = other.module.hf.modules()
            assert not [part for part in parts if "forward" in vars(part) or type(part).__name__.startswith("Plain")]
        batch = make_batch()
        with torch.no_grad():
            logits, expected = (m.module(batch.ids, batch.positions, batch.doc_ids) for m in (patched, after))
        assert ((logits - expected).norm() / expected.norm()).item() <= 1e-6

    @pytest.mark.usefixtures("installed", "on_cpu")
    def test_a_patch_that_changes_the_result_is_undone(self, tmp_path: Path) -> None:
        """Liger's patches go by the model's name: an activation that its kernel lacks would become another one."""
        folder = make_model(tmp_path, "phi3", "plain", hidden_act="relu")
        model = self.load(folder, "auto")
        assert model.notes[-1].startswith("liger: norm (")
        assert "Liger's model.layers.0.mlp differs from the original" in model.notes[-1]
        mlps = [part for part in model.module.hf.modules() if type(part).__name__ == "Phi3MLP"]
        assert not [part for part in mlps if "forward" in vars(part)]
        with pytest.raises(UsageError, match="differs from the original"):
            self.load(folder, "mlp")
