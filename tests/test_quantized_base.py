"""Adapters of models whose frozen linears are in 4 or 8 bits: against PEFT and bitsandbytes, merging, runs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import parity
from exact_runs import StopAt, assert_same_run
from layouts import CPU
from sides import MAX_NORM, WEIGHT_DECAY
from test_lora import LoraSide, assert_close, logits_of
from test_start import make_sparse_llama
from tiny_families import make_model
from torchstone import api
from torchstone.checkpoint.model_folder import load_model, read_base_model_info
from torchstone.checkpoint.tensor_files import read_shapes
from torchstone.config.load import load_config
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import UsageError
from torchstone.models.model import Model
from torchstone.observe.metrics import read_metrics
from torchstone.testing import launch_procs
from torchstone.training import checks
from torchstone.tuning.plan import LoraPlan
from torchstone.tuning.quantize import BaseQuantization, QuantizedLinear, dequantize, quantize, quantize_linears
from tuned import make_fallback, open_peft_adapter, train_on_rank

bitsandbytes = pytest.importorskip("bitsandbytes")
Settings = Callable[..., dict[str, Any]]
KINDS = ("nf4", "int8")


def dequantized(kind: str, weight: Tensor) -> Tensor:
    """What a weight is after bitsandbytes has quantized it."""
    functional = bitsandbytes.functional
    if kind == "int8":
        values, scales, _ = functional.int8_vectorwise_quant(weight.half())
        return functional.int8_vectorwise_dequant(values, scales).to(weight.dtype)
    # In rows of one block: on a CPU it dequantizes wrong values if a row ends within a block.
    blocks = nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    values = functional.dequantize_4bit(*functional.quantize_4bit(blocks, compress_statistics=True, quant_type="nf4"))
    return values.flatten()[: weight.numel()].view(weight.shape)


def quantized_folder(folder: Path, kind: str, target: Path) -> Path:
    """A copy of a model whose linears have the values that they have after quantizing."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, linear in model.named_modules():
            if isinstance(linear, nn.Linear) and ".layers." in name:
                linear.weight.copy_(dequantized(kind, linear.weight))
    model.save_pretrained(target)
    return target


def make_peft(folder: Path, adapter: Path) -> PeftModel:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(adapter)
    return model.eval()


def load_quantized(folder: Path, adapter: Path, kind: Any, device: torch.device = CPU) -> Model:
    info, tensors = read_base_model_info(folder), open_peft_adapter(folder, adapter)
    plan = LoraPlan(
        frozenset(), tensors, "base", "", tensors.adapter, tensors.frozen, 0, frozenset(info.linears),
        BaseQuantization(kind, torch.float32, device.type),
    )  # fmt: skip
    return load_model(folder, device, tuning=plan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(48, 96), (7, 33), (64, 64)])
def test_values_are_those_of_bitsandbytes(kind: Any, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = dequantize(kind, quantize(kind, weight), shape, torch.float32)
    torch.testing.assert_close(ours, dequantized(kind, weight), rtol=2e-3 if kind == "int8" else 0, atol=0)
    assert 0.001 < (ours - weight).norm() / weight.norm() < (0.15 if kind == "nf4" else 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_added_before_rounding(kind: Any) -> None:
    """As in the model that is not quantized; its gradient is the same, too."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 48, dtype=torch.bfloat16))
    weight = torch.randn(48, 64, generator=generator).bfloat16()
    quantize_linears(module, {"0"}, BaseQuantization(kind, torch.bfloat16, "cpu"))
    (linear,) = module
    assert isinstance(linear, QuantizedLinear)
    linear.load(weight)
    nn.init.normal_(linear.bias, generator=generator)
    x, dy = (torch.randn(2, 5, size, generator=generator).bfloat16() for size in (64, 48))
    bias = linear.bias.detach().requires_grad_()
    expected = nn.functional.linear(x, linear.weight, bias)
    output = module(x)
    assert torch.equal(output, expected)
    output.backward(dy)
    expected.backward(dy)
    assert torch.equal(linear.bias.grad, bias.grad)


class TestAgainstPeft:
    def test_logits_of_its_4_bit_linears(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        folder = make_model(tmp_path / "llama", "llama", "tied", **sizes)
        theirs = make_peft(folder, tmp_path / "adapter")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, linear in list(model.named_modules()):
            if isinstance(linear, nn.Linear) and ".layers." in name:
                four_bit = bitsandbytes.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                four_bit.weight = bitsandbytes.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                )
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, four_bit.to("cpu"))
        # In evaluation it has another kernel on a CPU, which needs a package of its own.
        ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
        expected = PeftModel.from_pretrained(model, tmp_path / "adapter").train()(ids).logits.detach()
        assert (expected - logits_of(theirs)).abs().max() > 0.01, "nothing is quantized"
        assert_close(logits_of(load_quantized(folder, tmp_path / "adapter", "nf4")), expected)

    @pytest.mark.parametrize("kind", KINDS)
    def test_twenty_steps(self, kind: str, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "llama", "llama", "tied")
        theirs = make_peft(quantized_folder(folder, kind, tmp_path / "dequantized"), tmp_path / "adapter")
        ours = LoraSide(folder, tmp_path / "adapter")
        ours.model = load_quantized(folder, tmp_path / "adapter", kind)
        ours.rebuild_optimizer()
        assert sum(isinstance(module, QuantizedLinear) for module in ours.model.module.modules()) == 7 * 3
        settings = {key: parity.FREE_RUNNING[key] for key in ("lr", "betas", "eps")}
        reference = parity.Reference(theirs, parity.reference_adamw(theirs, WEIGHT_DECAY, **settings), MAX_NORM)
        steps = parity.random_batches(20, theirs.config.vocab_size, seed=0)
        parity.assert_free_running(reference, ours.step, ours.weights, steps)


@pytest.fixture
def lora_settings(base_run: Path, settings: Settings) -> Settings:
    def make(**changes: Any) -> dict[str, Any]:
        lora = {"tuning__method": "lora", "tuning__lora_rank": 4, "optim__learning_rate": 1e-2}
        values = settings(**(lora | {"tuning__quantize_base": "nf4"} | changes))
        for key in ("model.depth", "model.width", "model.heads", "model.tokenizer"):
            del values[key]
        return {"model.path": str(base_run)} | values

    return make


class TestRuns:
    def test_an_adapter_is_merged_into_what_was_trained(
        self, lora_settings: Settings, base_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Not into the weights of the files."""
        checkpoint = api.train(overrides=lora_settings() | {"observe.console": "lines"}).checkpoint
        assert checkpoint is not None
        assert "M is in float32, the linears of the blocks in nf4" in capsys.readouterr().err
        adapter = api.export(checkpoint, tmp_path / "adapter")
        assert adapter["verified"]
        merged = api.export(checkpoint, tmp_path / "merged", merge=True)
        assert merged["verified"]
        assert merged["warnings"] == []
        folder = quantized_folder(base_run, "nf4", tmp_path / "dequantized")
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
        assert_close(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()), expected)
        assert_close(logits_of(load_model(checkpoint, CPU)), expected)
        base = AutoModelForCausalLM.from_pretrained(base_run, dtype=torch.float32)
        other = logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
        assert (other - expected).abs().max() > 1e-3

    def test_what_a_gpu_has_quantized_is_merged_on_a_cpu_with_a_warning(
        self, lora_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rounding differs. An adapter that was exported before has the record, too."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(BaseQuantization, "__str__", lambda self: f"{self.name}/cuda")
        checkpoint = api.train(overrides=lora_settings(training__max_steps=1)).checkpoint
        assert checkpoint is not None
        api.export(checkpoint, tmp_path / "adapter")
        for number, source in enumerate([checkpoint, tmp_path / "adapter"]):
            (warning,) = api.export(source, tmp_path / f"merged-{number}", merge=True)["warnings"]
            assert "trained on weights in nf4 that a GPU had rounded" in warning

    def test_resume_is_exact(self, lora_settings: Settings) -> None:
        def values(name: str) -> dict[str, Any]:
            made = lora_settings()
            return made | {"output_dir": f"{made['output_dir']}-{name}"}

        api.train(overrides=values("whole"))
        api.train(overrides=values("parts"), callbacks=[StopAt(3)])
        api.train(overrides=values("parts"))
        assert_same_run(values("whole")["output_dir"], values("parts")["output_dir"], 6)

    def test_dora_starts_from_the_quantized_model(
        self, lora_settings: Settings, base_run: Path, tmp_path: Path
    ) -> None:
        folder = quantized_folder(base_run, "nf4", tmp_path / "dequantized")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(base_run / name, folder)
        losses = []
        for changes in ({"tuning.lora_dora": True}, {"tuning.quantize_base": "none", "model.path": str(folder)}):
            run = tmp_path / str(len(losses))
            api.train(overrides=lora_settings(training__max_steps=1) | {"output_dir": str(run)} | changes)
            losses.append(read_metrics(run / "metrics.jsonl")[0]["loss"])
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)

    def test_two_processes(self, lora_settings: Settings, tmp_path: Path) -> None:
        values = lora_settings()
        api.train(overrides=values)
        layouts: dict[str, dict[str, Any]] = {"dp": {}, "pp": {"parallel.pp": 2}}
        runs = {
            name: values | {"output_dir": str(tmp_path / name), "training.batch_size": 2} | parallel
            for name, parallel in layouts.items()
        }
        launch_procs(train_on_rank, 2, *runs.values(), timeout=120)
        for name, two in runs.items():
            lines = [read_metrics(Path(run) / "metrics.jsonl") for run in (values["output_dir"], two["output_dir"])]
            losses = [[line["loss"] for line in each] for each in lines]
            assert losses[1] == pytest.approx(losses[0], rel=1e-5)
            assert api.export(two["output_dir"], tmp_path / f"{name}-model", merge=True)["verified"]

    def test_the_fallback(self, settings: Settings, tmp_path: Path) -> None:
        folder = make_fallback(tmp_path / "neox")
        values = settings(
            tuning__method="lora", tuning__lora_rank=4, tuning__quantize_base="nf4", model__path=str(folder)
        )
        for key in ("model.depth", "model.width", "model.heads"):
            del values[key]
        api.train(overrides=values)
        assert api.export(values["output_dir"], tmp_path / "merged", merge=True)["verified"]
        merged, base = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", folder))
        changed = [name for name, weight in base.items() if not torch.equal(weight, merged[name])]
        assert changed == [name for name in base if ".layers." in name and base[name].dim() == 2]

    def test_another_quantization_is_another_model(self, lora_settings: Settings, tmp_path: Path) -> None:
        values = lora_settings()
        checkpoint = api.train(overrides=values).checkpoint
        new = values | {"output_dir": str(tmp_path / "new"), "tuning.adapter": str(checkpoint)}
        del new["tuning.lora_rank"]
        with pytest.raises(UsageError, match="were quantized as nf4/float32, now None"):
            api.train(overrides=new | {"tuning.quantize_base": "none"})
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        api.train(overrides=new)

    def test_an_adapter_of_peft_is_continued(
        self, lora_settings: Settings, base_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """PEFT does not record how the weights were quantized."""
        make_peft(base_run, tmp_path / "peft")
        values = lora_settings(training__max_steps=1) | {"tuning.adapter": str(tmp_path / "peft")}
        del values["tuning.lora_rank"]
        api.train(overrides=values)
        assert "PEFT does not record whether an adapter was trained on quantized weights" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "size"), [("nf4", 0.515869140625), ("int8", 1.0)])
def test_the_memory_that_is_needed(
    kind: str, size: float, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the linears are neither in bf16 nor sharded, but split by a pipeline. Nothing is read."""
    folder, layers, width = tmp_path / "large", 8, 4096
    parameters = make_sparse_llama(folder, tokenizer, layers, width)
    shapes = {name: math.prod(shape) for name, shape in read_shapes(folder / "model.safetensors").items()}
    linears = sum(count for name, count in shapes.items() if "_proj" in name)
    assert sum(shapes.values()) == parameters
    values = {"model.path": str(folder), "data.path": "x", "output_dir": str(tmp_path / "run"), "system.device": "cpu"}
    values |= {"tuning.method": "lora", "training.precision": "bf16"}

    def text(world_size: int = 1, memory: int = 1, **changes: Any) -> str:
        monkeypatch.setattr(checks, "process_memory", lambda: memory)
        config = load_config(overrides=values | {"tuning.quantize_base": kind} | changes)
        return api.describe_defaults(config, world_size)

    rest, quantized = 2 * (parameters - linears), int(size * linears)
    assert f"need at least {(rest + quantized) / 2**30:,.1f} GiB" in text()
    assert f"need at least {(rest / 2 + quantized) / 2**30:,.1f} GiB" in text(2)
    assert f"need at least {(rest + quantized) / 2 / 2**30:,.1f} GiB" in text(2, **{"parallel.pp": 2})
    assert "need at least" not in text(memory=rest + quantized + 1)
    unquantized = {"tuning.quantize_base": "none"}
    assert "--tuning.quantize_base nf4" in text(memory=rest + quantized + 1, **unquantized)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.tp": 2}, "quantized weights are not sharded"),
        ({"tuning.method": "full", "tuning.lora_rank": 16}, "tuning.quantize_base is for LoRA"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, lora_settings: Settings) -> None:
    with pytest.raises(UsageError, match=message):
        api.train(overrides=lora_settings() | changes)
