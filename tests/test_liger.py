"""Which of Liger's kernels are chosen and where they go; and the fused loss around a stand-in for its kernel.

The kernels themselves run on a GPU only: tests/gpu_tests/test_liger_kernels.py.
"""

from __future__ import annotations

import sys
from functools import partial
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
from tiny_families import CASES, SHAPES, make_model
from torchstone.data.collate import MicroBatch
from torchstone.errors import UsageError
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.loss.fused import fused_loss_sum
from torchstone.models import liger
from torchstone.models.decoder import MLP, Attention, Decoder, RMSNorm
from torchstone.models.execution import Execution
from torchstone.models.liger import apply_liger, apply_liger_to_fallback, choose_liger
from torchstone.models.opening import load_model
from torchstone.models.weights import read_shape
from torchstone.parallel.running import micro_loss

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALL = ("norm", "rope", "mlp", "loss")
# What a family does not get, whatever its shape.
WITHOUT = {"gpt2": {"norm", "rope", "mlp"}}
WITHOUT_BY_SHAPE = {("phi3", "partial"): {"rope"}}


class PlainLoss(torch.autograd.Function):
    """Liger's fused linear cross-entropy in plain torch, with its way of looking at the features alone."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, features: Tensor, weight: Tensor, target: Tensor, bias: None, ce_weight: None, ignore_index: int,
        z_loss: float, smoothing: float, reduction: str, softcap: float | None, keep_z_loss: bool, accum: torch.dtype,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert (bias, ce_weight, z_loss, smoothing, keep_z_loss) == (None, None, 0.0, 0.0, False)
        assert (ignore_index, reduction, accum) == (-100, "sum", torch.float32)
        assert features.dim() == 2
        with torch.enable_grad():
            x, w = features.detach().requires_grad_(), weight.detach().requires_grad_()
            logits = (x @ w.T).float()
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
        if features.requires_grad:
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
        """In place, as Liger's is, and as it does by the left half of the tables alone."""
        assert cos.dim() == sin.dim() == 3
        cos, sin = (table[:, None, :, : table.shape[-1] // 2] for table in (cos, sin))
        with torch.no_grad():
            for x in (q, k):
                assert x.transpose(1, 2).is_contiguous()
                left, right = (half.to(cos.dtype) for half in x.chunk(2, dim=-1))
                x.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))
        return q, k


class PlainRMSNorm(nn.Module):
    """Its forward alone is used, bound to the modules of a Transformers model."""

    def forward(self, x: Tensor) -> Tensor:
        return PlainNorm.apply(x, self.weight, self.variance_epsilon, 0.0, "llama", self.in_place)


class PlainPhi3MLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def patch_phi3(rope: bool = True, rms_norm: bool = True, swiglu: bool = True, model: Any = None) -> None:
    """As Liger patches: the instance, and the modelling file with it."""
    from transformers.models.phi3 import modeling_phi3

    assert not rope, "this would change all models"
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
    """Stand-ins where Liger's kernels would be, in plain torch."""
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
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    real = liger.find_spec
    monkeypatch.setattr(liger, "find_spec", lambda name: None if name == "liger_kernel" else real(name))


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins run on a CPU."""
    monkeypatch.setattr(liger, "_why_not_here", lambda device: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, str], Path] = {}

    def folder(case: tuple[str, str]) -> Path:
        if case not in made:
            made[case] = make_model(tmp_path_factory.mktemp("model"), *case)
        return made[case]

    return folder


def shape(folder: Path) -> Any:
    return read_shape(folder)[2]


def some_rows(vocabulary: int = 96, packed: bool = True) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (2, 12), generator=generator)
    labels = torch.where(torch.rand(2, 12, generator=generator) < 0.6, ids.roll(-1, 1), -100)
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    docs = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    return MicroBatch(ids, labels, positions if packed else torch.arange(12).expand(2, 12), docs)


def hooks(decoder: Decoder) -> list[Any]:
    found = [part.kernel for part in decoder.modules() if isinstance(part, RMSNorm | MLP)]
    found += [part.turn_kernel for part in decoder.modules() if isinstance(part, Attention)]
    return [*found, getattr(decoder, "fused_loss", None)]


class TestChoice:
    def test_nothing_asked_for_is_nothing_said(self, folders: Any) -> None:
        choice = choose_liger((), shape(folders(("llama", "grouped"))), "none", CPU)
        assert (choice.kernels, choice.notes) == ((), [])

    @pytest.mark.usefixtures("absent")
    def test_auto_without_the_package_chooses_nothing_and_says_so(self, folders: Any) -> None:
        choice = choose_liger(("auto",), shape(folders(("llama", "grouped"))), "none", CUDA)
        assert choice.kernels == ()
        assert choice.notes == ["liger: none (the package liger-kernel is not installed)"]

    @pytest.mark.usefixtures("absent")
    @pytest.mark.parametrize("kernel", ALL)
    def test_by_name_without_the_package_is_refused(self, kernel: str, folders: Any) -> None:
        with pytest.raises(UsageError, match="liger-kernel is not installed") as caught:
            choose_liger((kernel,), shape(folders(("llama", "grouped"))), "none", CUDA)
        assert caught.value.exit_code == 2

    @pytest.mark.usefixtures("installed")
    def test_on_a_cpu_auto_chooses_nothing_and_a_name_is_refused(self, folders: Any) -> None:
        config = shape(folders(("llama", "grouped")))
        assert choose_liger(("auto",), config, "none", CPU).notes == [
            "liger: none (its kernels run on CUDA devices, not on cpu)"
        ]
        with pytest.raises(UsageError, match="model.liger norm: its kernels run on CUDA devices"):
            choose_liger(("norm",), config, "none", CPU)

    @pytest.mark.usefixtures("installed")
    def test_a_version_that_is_too_old_is_told(self, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        config = shape(folders(("llama", "grouped")))
        monkeypatch.setattr(liger, "version", lambda name: "0.6.4")
        assert "0.6.4 is too old" in choose_liger(("auto",), config, "none", CUDA).reason

        def nightly(name: str) -> str:
            raise PackageNotFoundError(name)

        monkeypatch.setattr(liger, "version", nightly)
        assert choose_liger(("auto",), config, "none", CUDA).kernels == ALL

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
    def test_auto_takes_what_the_family_can_have(self, case: tuple[str, str], folders: Any) -> None:
        without = WITHOUT.get(case[0], set()) | WITHOUT_BY_SHAPE.get(case, set())
        choice = choose_liger(("auto",), shape(folders(case)), "none", CUDA)
        assert choice.kernels == tuple(kernel for kernel in ALL if kernel not in without)
        assert all(kernel in choice.reason for kernel in without)

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize(
        ("case", "kernel", "reason"),
        [
            (("gpt2", "plain"), "norm", "layer norms"),
            (("gpt2", "plain"), "rope", "no rotary positions"),
            (("gpt2", "plain"), "mlp", "not gated"),
            (("phi3", "partial"), "rope", "only a part of each head turns"),
        ],
    )
    def test_what_a_family_cannot_have_is_refused_by_name(
        self, case: tuple[str, str], kernel: str, reason: str, folders: Any
    ) -> None:
        with pytest.raises(UsageError, match=reason) as caught:
            choose_liger((kernel, "loss"), shape(folders(case)), "none", CUDA)
        assert caught.value.exit_code == 2
        assert "loss" in (caught.value.hint or "")

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize("compile", ["block", "whole"])
    def test_with_compile_only_the_loss_is_left(self, compile: Any, folders: Any) -> None:
        config = shape(folders(("llama", "grouped")))
        choice = choose_liger(("auto",), config, compile, CUDA)
        assert choice.kernels == ("loss",)
        assert "not norm, rope, mlp: model.compile" in choice.reason
        assert choose_liger(("loss",), config, compile, CUDA).kernels == ("loss",)
        for kernel in ("norm", "rope", "mlp"):
            with pytest.raises(UsageError, match="model.compile"):
                choose_liger((kernel,), config, compile, CUDA)

    @pytest.mark.usefixtures("installed")
    def test_a_small_vocabulary_is_left_to_plain_torch_unless_asked_for(self, folders: Any, tmp_path: Path) -> None:
        config = shape(make_model(tmp_path, "llama", vocab_size=32))
        assert "loss" not in choose_liger(("auto",), config, "none", CUDA).kernels
        assert choose_liger(("auto", "loss"), config, "none", CUDA).kernels == ALL
        assert choose_liger(("loss",), config, "none", CUDA).kernels == ("loss",)

    @pytest.mark.usefixtures("installed")
    def test_names_are_taken_in_one_order(self, folders: Any) -> None:
        choice = choose_liger(("mlp", "norm"), shape(folders(("gemma2", "caps"))), "none", CUDA)
        assert choice.notes == ["liger: norm, mlp (as asked for)"]


class TestNative:
    @pytest.mark.usefixtures("absent")
    def test_a_model_without_the_package_is_as_it_was_and_says_so(self, folders: Any) -> None:
        model = load_model(folders(("llama", "grouped")), CPU, execution=Execution(liger=("auto",)))
        assert model.notes[-1] == "liger: none (the package liger-kernel is not installed)"
        assert hooks(model.module) == [None] * len(hooks(model.module))

    def test_nothing_is_said_where_nothing_is_asked(self, folders: Any) -> None:
        model = load_model(folders(("llama", "grouped")), CPU)
        assert not [note for note in model.notes if note.startswith("liger")]
        assert hooks(model.module) == [None] * len(hooks(model.module))

    @pytest.mark.usefixtures("installed", "anywhere")
    @pytest.mark.parametrize("case", [(family, next(iter(shapes))) for family, shapes in SHAPES.items()], ids="-".join)
    def test_every_part_gets_its_kernel_with_the_right_settings(self, case: tuple[str, str], folders: Any) -> None:
        """The stand-ins compute what Liger documents, so a wrong offset, casting or table would be seen."""
        plain = load_model(folders(case), CPU, execution=Execution(implementation="native"))
        with_kernels = load_model(folders(case), CPU, execution=Execution(implementation="native", liger=("auto",)))
        wanted = choose_liger(("auto",), plain.module.config, "none", CPU).kernels
        parts = [part for part in with_kernels.module.modules() if isinstance(part, RMSNorm)]
        assert all((part.kernel is not None) == ("norm" in wanted) for part in parts)
        batch = some_rows()
        for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
            with torch.no_grad():
                ours, theirs = (
                    model.module.to(dtype)(batch.ids, batch.positions, batch.doc_ids).float()
                    for model in (with_kernels, plain)
                )
            assert ((ours - theirs).norm() / theirs.norm()).item() <= limit

    @pytest.mark.usefixtures("installed", "anywhere")
    def test_another_decoder_gets_none(self, folders: Any) -> None:
        first, second = (load_model(folders(("llama", "grouped")), CPU).module for _ in range(2))
        apply_liger(first, ALL)
        assert None not in hooks(first)
        assert hooks(second) == [None] * len(hooks(second))

    @pytest.mark.usefixtures("installed", "anywhere")
    @pytest.mark.parametrize("fused", [(), ("qkv", "gate_up")], ids=["separate", "fused"])
    def test_the_kernel_turns_copies_and_not_what_others_keep(self, fused: Any, folders: Any) -> None:
        model = load_model(folders(("llama", "grouped")), CPU, execution=Execution(liger=("rope",), fused=fused))
        kept: list[tuple[Tensor, Tensor]] = []
        attention = model.module.layers["0"].attention
        projection = attention.wqkv if fused else attention.wq
        projection.register_forward_hook(lambda part, args, out: kept.append((out, out.clone())))
        batch = some_rows()
        with torch.no_grad():
            model.module(batch.ids, batch.positions, batch.doc_ids)
        assert torch.equal(*kept[0])


@pytest.mark.usefixtures("installed")
class TestLoss:
    @pytest.mark.parametrize("softcap", [None, 3.0])
    @pytest.mark.parametrize("divisor", [1.0, 3.0])
    def test_the_fused_loss_is_the_sum_of_the_token_losses(self, softcap: float | None, divisor: float) -> None:
        torch.manual_seed(0)
        features, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
        labels = torch.tensor([[1, -100, 3, 10, -100], [-100, 0, 2, 2, 7]])
        logits = features @ weight.T / divisor
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        wanted = token_loss_sum(logits, labels)
        got = fused_loss_sum(features, weight, labels, softcap, divisor)
        assert got.item() == pytest.approx(wanted.item(), rel=1e-6)
        theirs = torch.autograd.grad(wanted / 7, (features, weight))
        ours = torch.autograd.grad(got / 7, (features, weight))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_a_head_on_frozen_features_still_gets_its_gradient(self) -> None:
        features, weight = torch.randn(1, 4, 8), torch.randn(11, 8, requires_grad=True)
        labels = torch.tensor([[1, 2, 3, -100]])
        (wanted,) = torch.autograd.grad(token_loss_sum(features @ weight.T, labels), weight)
        (got,) = torch.autograd.grad(fused_loss_sum(features, weight, labels), weight)
        torch.testing.assert_close(got, wanted)

    def test_no_token_that_counts_is_exactly_zero(self) -> None:
        features, weight = torch.randn(1, 4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
        loss = fused_loss_sum(features, weight, torch.full((1, 4), -100))
        assert loss.item() == 0.0
        assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (features, weight)))

    @pytest.mark.usefixtures("anywhere")
    @pytest.mark.parametrize(
        "case", [("llama", "tied"), ("granite", "multipliers"), ("gemma2", "caps"), ("gpt2", "plain")], ids="-".join
    )
    @pytest.mark.parametrize("packed", [True, False])
    def test_a_step_uses_it_where_the_decoder_has_one(
        self, case: tuple[str, str], packed: bool, folders: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = load_model(folders(case), CPU).module
        fused = load_model(folders(case), CPU, execution=Execution(liger=("loss",))).module
        assert isinstance(fused.fused_loss, partial)
        batch = some_rows(packed=packed)
        inputs = batch.ids, batch.positions, batch.doc_ids if packed else None, batch.labels
        wanted = micro_loss(plain, *inputs)
        monkeypatch.setattr(Decoder, "logits", None)
        got = micro_loss(fused, *inputs)
        assert got.item() == pytest.approx(wanted.item(), rel=1e-6)
        for loss in (got, wanted):
            (loss / 9).backward()
        for (name, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + ZERO_LIMIT, name
        with torch.no_grad():
            assert micro_loss(fused, *inputs).item() == pytest.approx(wanted.item(), rel=1e-6)


class TestFallback:
    def load(self, folder: Path, *wanted: str) -> Any:
        return load_model(folder, CPU, execution=Execution(implementation="fallback", liger=wanted))

    @pytest.mark.usefixtures("absent")
    def test_without_the_package_auto_chooses_nothing_and_a_name_is_refused(self, folders: Any) -> None:
        folder = folders(("phi3", "plain"))
        assert self.load(folder, "auto").notes[-1] == "liger: none (the package liger-kernel is not installed)"
        with pytest.raises(UsageError, match="not installed") as caught:
            self.load(folder, "norm")
        assert caught.value.exit_code == 2

    @pytest.mark.usefixtures("installed", "anywhere")
    def test_a_model_type_that_liger_does_not_know(self, folders: Any) -> None:
        folder = folders(("gpt2", "plain"))
        note = self.load(folder, "auto").notes[-1]
        assert note.startswith("liger: none (not norm, mlp: Liger does not know the model type gpt2")
        with pytest.raises(UsageError, match="does not know the model type gpt2"):
            self.load(folder, "mlp")

    @pytest.mark.usefixtures("installed", "anywhere")
    @pytest.mark.parametrize("kernel", ["rope", "loss"])
    def test_what_would_change_other_models_is_refused(self, kernel: str, folders: Any) -> None:
        with pytest.raises(UsageError, match=f"model.liger {kernel}: "):
            self.load(folders(("phi3", "plain")), kernel)

    @pytest.mark.usefixtures("installed", "anywhere")
    def test_this_model_is_patched_and_no_other(self, folders: Any) -> None:
        from transformers.models.phi3 import modeling_phi3

        names = dict(vars(modeling_phi3))
        plain = self.load(folders(("phi3", "plain")))
        patched = self.load(folders(("phi3", "plain")), "auto")
        assert patched.notes[-1].startswith("liger: norm, mlp (not rope: ")
        layer = patched.module.hf.model.layers[0]
        assert layer.mlp.forward.__func__ is PlainPhi3MLP.forward
        assert layer.input_layernorm.forward.__func__ is PlainRMSNorm.forward
        assert layer.input_layernorm.in_place is False
        assert all(part.training for part in patched.module.modules())
        assert dict(vars(modeling_phi3)) == names
        after = self.load(folders(("phi3", "plain")))
        for other in (plain, after):
            parts = other.module.hf.modules()
            assert not [part for part in parts if "forward" in vars(part) or type(part).__name__.startswith("Plain")]
        batch = some_rows()
        with torch.no_grad():
            ours, theirs = (m.module(batch.ids, batch.positions, batch.doc_ids) for m in (patched, after))
        assert ((ours - theirs).norm() / theirs.norm()).item() <= 1e-6

    @pytest.mark.usefixtures("installed", "anywhere")
    def test_a_patch_that_computes_something_else_is_taken_back(self, tmp_path: Path) -> None:
        """Liger goes by the name of the model: an activation that its kernel has not would become another."""
        folder = make_model(tmp_path, "phi3", "plain", hidden_act="relu")
        model = self.load(folder, "auto")
        assert model.notes[-1].startswith("liger: norm (")
        assert "model.layers.0.mlp gives something else than the original" in model.notes[-1]
        assert not [
            part for part in model.module.hf.modules() if type(part).__name__ == "Phi3MLP" and "forward" in vars(part)
        ]
        with pytest.raises(UsageError, match="gives something else"):
            self.load(folder, "mlp")

    def test_nothing_asked_for_is_nothing_done(self, folders: Any) -> None:
        hf = self.load(folders(("phi3", "plain"))).module.hf
        assert apply_liger_to_fallback(hf, ()).notes == []
