"""LoRA against PEFT: logits, training and files, both ways. Then layouts, runs, merging, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import parity
from exact_runs import StopAt, assert_same_run
from hooks import on
from layouts import CPU
from selection import the_rest
from sides import MAX_NORM, WEIGHT_DECAY, make_batch
from steps import train_step
from tiny_families import make_model
from torchstone import api
from torchstone.checkpoint.adapter_folder import (
    base_name,
    read_adapter_config,
    write_adapter,
    write_adapter_config,
)
from torchstone.checkpoint.model_folder import decoder_shapes, load_model
from torchstone.checkpoint.weight_names import FALLBACK_NAMES, WEIGHT_NAMES
from torchstone.config.schema import OptimConfig
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.execution import DEFAULT_EXECUTION, ExecutionOptions
from torchstone.models.model import Model
from torchstone.observe.metrics import read_metrics
from torchstone.observe.mfu import flops_per_token
from torchstone.optim.build import build_optimizer
from torchstone.parallel.runner import Runner
from torchstone.testing import launch_procs
from torchstone.training.run import Run
from torchstone.tuning.lora import MergedTensors, merge_adapters, unmerge_adapters
from torchstone.tuning.osft import MergedOsft
from tuned import (
    LAYOUTS,
    PROCESSES,
    assert_same_steps,
    gradients_of_rank,
    load_ours,
    make_fallback,
    open_peft_adapter,
    run_steps,
    train_and_resume,
    train_on_rank,
)

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
# With what PEFT stores in another way: phi3 and gpt2 have one linear for q, k and v, gpt2's are transposed.
FAMILIES = {"llama": "tied", "qwen3": "head size", "gemma3_text": "alternating", "phi3": "", "gpt2": ""}
# Those with a linear for each projection, so that both sides train the same parameters.
UNFUSED = {"llama": "tied", "qwen3": "head size", "granite": "multipliers"}
VARIANTS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
LOGITS_LIMIT = 1e-5


def load_peft(folder: Path, seed: int = 0, **settings: Any) -> PeftModel:
    """A model with an adapter that changes it; B is not zero."""
    attention = {"attn_implementation": "eager"} if "gemma" in folder.name else {}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention)
    config = LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | settings))
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.rand(parameter.shape, generator=generator)
        elif "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def family_folder(tmp_path: Path, family: str) -> Path:
    return make_model(tmp_path / family, family, (FAMILIES | UNFUSED)[family])


def logits_of(model: Model | PeftModel) -> Tensor:
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if isinstance(model, Model):
            return model.module.eval()(ids, torch.arange(12).expand_as(ids))
        return model(ids).logits


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert (logits - expected).abs().max() <= LOGITS_LIMIT * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
class TestLogits:
    def test_of_an_adapter_of_peft_and_back(self, family: str, variant: str, tmp_path: Path) -> None:
        folder = family_folder(tmp_path, family)
        theirs = load_peft(folder, **VARIANTS[variant])
        theirs.save_pretrained(tmp_path / "theirs")
        ours, expected = load_ours(folder, tmp_path / "theirs"), logits_of(theirs)
        with theirs.disable_adapter():
            assert (logits_of(theirs) - expected).abs().max() > 0.1, "the adapter changes nothing"
        assert_close(logits_of(ours), expected)
        (tmp_path / "ours").mkdir()
        adapter = open_peft_adapter(folder, tmp_path / "theirs")
        names = WEIGHT_NAMES[ours.hf_config["model_type"]]
        assert not write_adapter(tmp_path / "ours", adapter, names, ours.decoder_config.tied)
        attention = {"attn_implementation": "eager"} if "gemma" in family else {}
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention)
        assert_close(logits_of(PeftModel.from_pretrained(base, tmp_path / "ours").eval()), expected)
        # Read again, projections have the rank they had, although those of one stored linear are stacked there.
        again = open_peft_adapter(folder, tmp_path / "ours").adapter
        assert {name: spec.rank for name, spec in again.linears.items()} == dict.fromkeys(adapter.adapter.linears, 4)

    def test_of_merged_and_unmerged_weights(self, family: str, variant: str, tmp_path: Path) -> None:
        folder = family_folder(tmp_path, family)
        load_peft(folder, **VARIANTS[variant]).save_pretrained(tmp_path / "theirs")
        ours = load_ours(folder, tmp_path / "theirs")
        unmerged, weights = logits_of(ours), {name: p.clone() for name, p in ours.module.named_parameters()}
        merged = merge_adapters(ours.module)
        assert 0 < max(each.error for each in merged) < 1e-6
        assert_close(logits_of(ours), unmerged)
        assert len(list(ours.module.parameters())) < len(weights), "the adapters are gone"
        unmerge_adapters(merged)
        assert all(torch.equal(p, weights[name]) for name, p in ours.module.named_parameters())
        assert torch.equal(logits_of(ours), unmerged)


class LoraSide:
    """Our step on the protocol's micro-batches; tensors are by PEFT's names."""

    def __init__(self, folder: Path, adapter: Path, execution: ExecutionOptions = DEFAULT_EXECUTION) -> None:
        self.model = load_ours(folder, adapter, execution=execution)
        self.gradients: dict[str, Tensor] = {}
        self.names = WEIGHT_NAMES.get(self.model.hf_config["model_type"], FALLBACK_NAMES)
        self.rebuild_optimizer()

    def rebuild_optimizer(self) -> None:
        """Call it if the model is another one."""
        settings = parity.FREE_RUNNING
        self.lr = settings["lr"]
        optim = OptimConfig(
            learning_rate=self.lr, betas=settings["betas"], eps=settings["eps"], weight_decay=WEIGHT_DECAY
        )
        self.optimizer = build_optimizer(self.model.trained_parameters(), optim, self.model.parameter_kinds())
        self.optimizer.register_step_pre_hook(lambda *_: self._keep_gradients())

    def _keep_gradients(self) -> None:
        self.gradients = {self._peft_name(name): p.grad.clone() for name, p in self.model.trained_parameters()}

    def step(self, micro_batches: parity.MicroBatches) -> parity.StepValues:
        runner = Runner(self.model, CPU, True)
        result = train_step(runner, self.optimizer, make_batch(micro_batches), 1, self.lr, MAX_NORM)
        return parity.StepValues(result.loss, result.grad_norm, self.gradients)

    def weights(self) -> dict[str, Tensor]:
        return {self._peft_name(name): p.detach().clone() for name, p in self.model.trained_parameters()}

    def _peft_name(self, name: str) -> str:
        linear, _, kind = name.partition(".adapters.default.")
        module = next(iter(self.names.stored_tensors([f"{linear}.weight"]))).removesuffix(".weight")
        kind = "lora_magnitude_vector" if kind == "magnitude" else kind
        return f"base_model.model.{module}.{kind}.default.weight"


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *((family, "lora") for family in (*UNFUSED, "fallback")),
        ("llama", "dora"),
        *(pytest.param(family, "dora", marks=the_rest) for family in ("qwen3", "granite", "fallback")),
    ],
)
def test_twenty_steps_equal_those_of_peft(family: str, variant: str, tmp_path: Path) -> None:
    folder = make_fallback(tmp_path / "neox") if family == "fallback" else family_folder(tmp_path, family)
    theirs = load_peft(folder, **VARIANTS[variant])
    theirs.save_pretrained(tmp_path / "theirs")
    settings = {key: parity.FREE_RUNNING[key] for key in ("lr", "betas", "eps")}
    optimizer = parity.reference_adamw(theirs, WEIGHT_DECAY, **settings)
    reference, ours = parity.Reference(theirs, optimizer, MAX_NORM), LoraSide(folder, tmp_path / "theirs")
    frozen = {name: p.clone() for name, p in ours.model.module.named_parameters() if not p.requires_grad}
    steps = parity.random_batches(20, theirs.config.vocab_size, seed=0)
    # Both sides begin with the same factors, so gradients are compared in the first step.
    parity.assert_step_locked(reference, ours.step, lambda _: None, steps[:1])
    parity.assert_free_running(reference, ours.step, ours.weights, steps[1:])
    assert all(torch.equal(p, frozen[n]) for n, p in ours.model.module.named_parameters() if n in frozen)
    assert len(ours.optimizer.state) == len(ours.weights()), "only what is trained has moments"


@pytest.mark.parametrize("processes", PROCESSES)
def test_every_layout_computes_the_same(processes: int, tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = make_model(tmp_path / "llama", "llama", "tied", num_hidden_layers=4)
    tokenizer.save(folder)
    load_peft(folder, use_dora=processes == 2).save_pretrained(tmp_path / "adapter")
    steps = parity.random_batches(2, 40, seed=0)
    expected = run_steps(Runner(load_ours(folder, tmp_path / "adapter"), CPU, True), steps)
    ranks = launch_procs(
        gradients_of_rank, processes, LAYOUTS[processes], str(folder), str(tmp_path / "adapter"), steps, timeout=300
    )
    assert_same_steps(ranks, expected, LAYOUTS[processes])
    for number, layout in enumerate(LAYOUTS[processes]):
        api.export(tmp_path / str(number), tmp_path / f"{number}-exported", verify=False)
        exported = open_peft_adapter(folder, tmp_path / f"{number}-exported").factors
        for name, offset, values in (shard for results in ranks for shard in results[number]["weights"]):
            slices = tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))
            assert torch.equal(exported[name][slices], values), (layout, name)


@pytest.fixture
def lora_settings(base_run: Path, settings: Settings) -> Settings:
    def make(**changes: Any) -> dict[str, Any]:
        values = settings(
            **({"tuning__method": "lora", "tuning__lora_rank": 4, "optim__learning_rate": 1e-2} | changes)
        )
        for key in ("model.depth", "model.width", "model.heads", "model.tokenizer"):
            del values[key]
        return {"model.path": str(base_run)} | values

    return make


class TestRuns:
    def test_a_checkpoint_is_an_adapter_of_peft(self, lora_settings: Settings, base_run: Path, tmp_path: Path) -> None:
        before = (base_run / "model.safetensors").read_bytes()
        result = api.train(overrides=lora_settings())
        assert (base_run / "model.safetensors").read_bytes() == before
        checkpoint = result.checkpoint
        assert checkpoint is not None
        assert not (checkpoint / "model.safetensors").exists()
        tensors = load_file(checkpoint / "adapter_model.safetensors")
        assert all(tensors[name].abs().max() > 1e-3 for name in tensors if "lora_B" in name), "B is trained"
        config = json.loads((checkpoint / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(base_run))
        base = AutoModelForCausalLM.from_pretrained(base_run, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, checkpoint).eval()
        assert_close(logits_of(load_ours(base_run, checkpoint)), logits_of(theirs))
        # Opened as a model, the adapter is merged.
        assert_close(logits_of(load_model(checkpoint, CPU)), logits_of(theirs))

    @pytest.mark.parametrize(("dropout", "processes"), [(0.0, 1), (0.2, 1), (0.2, 2)])
    def test_resume_is_exact(self, dropout: float, processes: int, lora_settings: Settings) -> None:
        values = lora_settings(tuning__lora_dropout=dropout, tuning__modules_to_save=["embed_tokens"])
        if processes == 1:
            train_and_resume(values)
        else:
            launch_procs(train_and_resume, processes, values | {"parallel.tp": 2, "training.batch_size": 4})
        assert_same_run(*(f"{values['output_dir']}-{name}" for name in ("whole", "parts")), 6)

    def test_settings_are_those_of_peft(self, lora_settings: Settings, tmp_path: Path) -> None:
        runs: list[Run] = []
        targets = [r".*layers\.1\..*(q|up)_proj"]
        changes = {"lora_alpha": 7.0, "lora_rslora": True, "lora_dora": True, "lora_targets": targets}
        values = lora_settings(tuning__modules_to_save=["norm"], **{f"tuning__{k}": v for k, v in changes.items()})
        checkpoint = api.train(overrides=values, callbacks=[on(start=runs.append)]).checkpoint
        assert checkpoint is not None
        config = read_adapter_config(checkpoint)
        assert [config[key] for key in ("r", "lora_alpha", "use_rslora", "use_dora")] == [4, 7, True, True]
        assert config["target_modules"] == ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"]
        model = runs[0].model
        assert model.tuning is not None
        assert model.decoder_config is not None
        counts = model.tuning.count_parameters(decoder_shapes(model.decoder_config))
        assert sum(counts.values()) == sum(parameter.numel() for _, parameter in model.trained_parameters())
        assert api.export(checkpoint, tmp_path / "adapter")["verified"]
        # Training starts from the model as it is: magnitudes are the norms of its rows.
        plain = lora_settings(training__max_steps=1) | {"output_dir": str(tmp_path / "plain")}
        api.train(overrides=plain)
        losses = [read_metrics(Path(each["output_dir"]) / "metrics.jsonl")[0]["loss"] for each in (values, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)

    def test_a_pipeline_stage_without_adapters(self, lora_settings: Settings, tmp_path: Path) -> None:
        runs = {layer: lora_settings(tuning__lora_targets=[rf".*layers\.{layer}\..*"]) for layer in (0, 1)}
        pipelines = []
        for layer, values in runs.items():
            values["output_dir"] = str(tmp_path / f"one-{layer}")
            api.train(overrides=values)
            pipelines.append(values | {"output_dir": str(tmp_path / f"pp-{layer}")})
            pipelines[-1] |= {"parallel.pp": 2, "training.batch_size": 2}
        # The last step is one of a run that is resumed.
        launch_procs(train_on_rank, 2, *(each | {"training.max_steps": n} for each in pipelines for n in (5, 6)))
        for layer in runs:
            lines = [read_metrics(tmp_path / f"{name}-{layer}" / "metrics.jsonl") for name in ("one", "pp")]
            # The learning rate depends on the number of steps.
            losses = [[line["loss"] for line in each][:2] for each in lines]
            assert losses[1] == pytest.approx(losses[0], rel=1e-5)
            assert len(lines[1]) == 6
            assert api.export(tmp_path / f"pp-{layer}", tmp_path / f"adapter-{layer}")["verified"]

    def test_a_trained_embedding_is_resumed_beside_a_copy_of_the_head(
        self, lora_settings: Settings, base_run: Path, tmp_path: Path
    ) -> None:
        """Some files have a copy of a tied head. It equals the embedding of the model, not the one that was trained."""
        base = tmp_path / "base"
        shutil.copytree(base_run, base, ignore=shutil.ignore_patterns("manifest.json"))
        weights = load_file(base / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, base / "model.safetensors", {"format": "pt"})
        values = lora_settings(tuning__modules_to_save=["embed_tokens"]) | {"model.path": str(base)}
        api.train(overrides=values, callbacks=[StopAt(3)])
        assert api.train(overrides=values).step == 6

    def test_export_and_merge(
        self, lora_settings: Settings, base_run: Path, tmp_path: Path, torchstone: Command
    ) -> None:
        values = lora_settings(tuning__modules_to_save=["lm_head"])
        api.train(overrides=values)
        adapter = api.export(values["output_dir"], tmp_path / "adapter")
        assert adapter["verified"]
        assert adapter["max_logit_difference"] <= LOGITS_LIMIT
        _, out, _ = torchstone("export", values["output_dir"], tmp_path / "unverified", "--no-verify")
        assert "verified: False\n" in out
        assert "warnings" not in out, "there are none"
        model = api.export(values["output_dir"], tmp_path / "model", merge=True)
        assert model["verified"]
        assert 0 < model["merge_error"] < 1e-5
        written = load_file(tmp_path / "model/model.safetensors")
        assert model["merge_error_in"] in written
        # The head is tied: it is trained, and still tied in what is written.
        assert "lm_head.weight" not in written
        base = AutoModelForCausalLM.from_pretrained(base_run, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        assert_close(logits_of(merged), logits_of(theirs))
        head = theirs.get_base_model().get_output_embeddings().modules_to_save["default"].weight
        assert torch.equal(merged.get_output_embeddings().weight, head)
        assert not torch.equal(head, load_file(base_run / "model.safetensors")["model.embed_tokens.weight"])
        in_bf16 = api.export(values["output_dir"], tmp_path / "bf16", dtype="bfloat16", merge=True)
        assert 1e-4 < in_bf16["merge_error"] < 1, "bf16 loses more than fp32, and says so"

    @pytest.mark.parametrize(
        ("target", "module"),
        [
            ("norm", "model.norm"),
            (r".*layers\.1\.input_layernorm", "model.layers.1.input_layernorm"),
            # Also one of the linears with adapters: as in PEFT, it is trained as it is.
            (r".*layers\.0\.mlp\.down_proj", "model.layers.0.mlp.down_proj"),
        ],
    )
    def test_modules_to_save_are_the_same_in_peft(
        self, target: str, module: str, lora_settings: Settings, base_run: Path, tmp_path: Path
    ) -> None:
        values = lora_settings(tuning__modules_to_save=[target], tuning__lora_targets=["down_proj"])
        api.train(overrides=values)
        api.export(values["output_dir"], tmp_path / "adapter")
        api.export(values["output_dir"], tmp_path / "model", merge=True)
        tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
        assert f"base_model.model.{module}.lora_A.weight" not in tensors
        base = AutoModelForCausalLM.from_pretrained(base_run, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        wrapped = [name for name, each in theirs.named_modules() if isinstance(each, ModulesToSaveWrapper)]
        assert wrapped == [f"base_model.model.{module}"]
        trained = load_file(tmp_path / "model/model.safetensors")[f"{module}.weight"]
        assert torch.equal(trained, tensors[f"base_model.model.{module}.weight"])
        assert not torch.equal(trained, load_file(base_run / "model.safetensors")[f"{module}.weight"])
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        assert_close(logits_of(merged), logits_of(theirs))

    def test_an_adapter_is_not_merged_into_other_weights(
        self, lora_settings: Settings, base_run: Path, tmp_path: Path
    ) -> None:
        base = tmp_path / "base"
        shutil.copytree(base_run, base, ignore=shutil.ignore_patterns("manifest.json"))
        values = lora_settings() | {"model.path": str(base)}
        api.train(overrides=values)
        weights = load_file(base / "model.safetensors")
        weights["model.layers.1.mlp.down_proj.weight"] *= 1.01
        save_file(weights, base / "model.safetensors", {"format": "pt"})
        for use in (
            lambda: api.export(values["output_dir"], tmp_path / "out", merge=True),
            lambda: api.train(overrides=values | {"training.max_steps": 8}),
            lambda: api.train(
                overrides=lora_settings()
                | {"tuning.adapter": values["output_dir"], "tuning.lora_rank": 16}
                | {"model.path": str(base), "output_dir": str(tmp_path / "next")}
            ),
        ):
            with pytest.raises(CheckpointError, match="trained on other weights"):
                use()

    def test_an_adapter_is_continued(
        self, lora_settings: Settings, base_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # The head is tied. PEFT trains copies of both modules, which are equal at the start.
        load_peft(base_run, modules_to_save=["embed_tokens", "lm_head"]).save_pretrained(tmp_path / "theirs")
        values = lora_settings(training__max_steps=1, optim__learning_rate=0.0, optim__warmup_ratio=0.0)
        values |= {"tuning.adapter": str(tmp_path / "theirs"), "tuning.lora_rank": 16}
        checkpoint = api.train(overrides=values | {"observe.console": "lines"}).checkpoint
        assert checkpoint is not None
        assert f"continuing the adapter {tmp_path / 'theirs'}, with its own rank, alpha" in capsys.readouterr().err
        theirs, ours = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "theirs", checkpoint))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        # What a run started with is a part of it.
        more = values | {"training.max_steps": 2}
        with pytest.raises(CheckpointError, match="tuning.frozen_adapters none is now {'style': "):
            api.train(overrides=more | {"tuning.frozen_adapters": f"style={tmp_path / 'theirs'}"})
        with pytest.raises(CheckpointError, match=r"tuning.adapter .* is now none") as caught:
            api.train(overrides={key: value for key, value in more.items() if key != "tuning.adapter"})
        # Following the hint works; a run of another kind would merge it.
        assert f"in a new run: --tuning.adapter {checkpoint} --model.path MODEL --output-dir" in str(caught.value)
        full = {"tuning.method": "full", "model.path": str(checkpoint), "output_dir": str(tmp_path / "full")}
        common = {key: value for key, value in values.items() if not key.startswith("tuning.")}
        api.train(overrides=common | full | {"observe.console": "lines"})
        assert f"{checkpoint} has only what was tuned of {base_run}: both are merged" in capsys.readouterr().err
        # Neither run goes on with the method of the other.
        with pytest.raises(CheckpointError, match=r"tuning.method full is now lora\n.*--output-dir NEW"):
            api.train(overrides=more | {"output_dir": full["output_dir"]})
        with pytest.raises(CheckpointError, match=r"tuning.method lora is now full\n.*--output-dir NEW"):
            api.train(overrides=common | full | {"model.path": str(base_run), "output_dir": values["output_dir"]})

    @pytest.mark.parametrize("processes", [1, 2])
    def test_frozen_adapters_are_active(
        self, processes: int, lora_settings: Settings, base_run: Path, tmp_path: Path
    ) -> None:
        load_peft(base_run, seed=1, target_modules=["q_proj", "down_proj"]).save_pretrained(tmp_path / "style")
        load_peft(base_run, seed=2, r=2).save_pretrained(tmp_path / "facts")
        values = lora_settings()
        values["tuning.frozen_adapters"] = f"style={tmp_path / 'style'},facts={tmp_path / 'facts'}"
        if processes > 1:
            values |= {"parallel.tp": 2, "training.batch_size": 4}
        launch_procs(train_on_rank, processes, values, timeout=120)
        # The first step, before the new adapter changes anything, is one of the model with both merged.
        merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_run), tmp_path / "style", "style")
        merged.load_adapter(tmp_path / "facts", "facts")
        shutil.copytree(base_run, tmp_path / "merged", ignore=shutil.ignore_patterns("manifest.json"))
        merged.merge_and_unload(adapter_names=["style", "facts"]).save_pretrained(tmp_path / "merged")
        start = lora_settings(training__max_steps=1, model__path=str(tmp_path / "merged"))
        start["output_dir"] = str(tmp_path / "start")
        api.train(overrides=start)
        runs = (Path(values["output_dir"]), tmp_path / "start")
        first, expected = (read_metrics(run / "metrics.jsonl")[0]["loss"] for run in runs)
        assert first == pytest.approx(expected, rel=1e-5)
        adapter = api.export(values["output_dir"], tmp_path / "adapter")
        assert adapter["verified"]
        assert adapter["max_logit_difference"] <= LOGITS_LIMIT
        for name in ("style", "facts"):
            given, kept = (
                load_file(folder / name / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "adapter")
            )
            assert all(torch.equal(given[key], kept[key]) for key in given), "they are frozen"
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_run), tmp_path / "adapter")
        for name in ("style", "facts"):
            theirs.load_adapter(tmp_path / "adapter" / name, name)
        theirs.base_model.set_adapter(["default", "style", "facts"])
        # Resumed, and opened as a model, with the frozen adapters that its checkpoint has.
        shutil.rmtree(tmp_path / "style")
        result = api.train(overrides=values | {"training.max_steps": 7, "parallel.tp": 1, "training.batch_size": 8})
        assert result.step == 7
        api.export(tmp_path / "adapter", tmp_path / "model", merge=True)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        assert_close(logits_of(merged), logits_of(theirs.eval()))

    def test_projections_of_one_stored_linear_have_their_own_a(
        self, settings: Settings, tmp_path: Path, tokenizer_dir: Path
    ) -> None:
        """phi3 stores q, k and v as one linear, for which PEFT has one A. Stacking ours is exact; their mean warns."""
        folder = make_model(tmp_path / "phi3", "phi3", vocab_size=512)
        values = settings(tuning__method="lora", tuning__lora_rank=4, optim__learning_rate=1e-2)
        for key in ("model.depth", "model.width", "model.heads"):
            del values[key]
        api.train(overrides=values | {"model.path": str(folder)})
        exact = api.export(values["output_dir"], tmp_path / "exact")
        assert exact["warnings"] == []
        assert exact["max_logit_difference"] <= LOGITS_LIMIT
        config = json.loads((tmp_path / "exact/adapter_config.json").read_text())
        assert set(config["rank_pattern"].values()) | {config["r"]} == {4, 8, 12}
        mean = api.export(values["output_dir"], tmp_path / "mean", average_lora_a=True)
        assert len(mean["warnings"]) == 2 * 3, "qkv_proj and gate_up_proj of three layers"
        assert "the mean of the A of 3 projections changes the update by" in mean["warnings"][1]
        assert mean["max_logit_difference"] > 1e-4
        assert not mean["verified"], "it is not what was trained"
        means, exacts = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("mean", "exact"))
        name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"
        torch.testing.assert_close(means[name], exacts[name].view(3, 4, -1).mean(dim=0))

    def test_the_fallback_in_one_and_two_processes(self, settings: Settings, tmp_path: Path) -> None:
        folder = make_fallback(tmp_path / "neox")
        values = settings(
            tuning__method="lora", tuning__lora_rank=4, optim__learning_rate=1e-2, model__path=str(folder)
        )
        for key in ("model.depth", "model.width", "model.heads"):
            del values[key]
        api.train(overrides=values)
        one, two = values["output_dir"], str(tmp_path / "two")
        launch_procs(train_on_rank, 2, values | {"output_dir": two, "training.batch_size": 2}, timeout=120)
        losses = [[line["loss"] for line in read_metrics(Path(run) / "metrics.jsonl")] for run in (one, two)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        adapter = api.export(two, tmp_path / "adapter")
        assert adapter["verified"]
        assert adapter["max_logit_difference"] <= LOGITS_LIMIT
        tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
        assert all(tensors[name].abs().max() > 1e-3 for name in tensors if "lora_B" in name), "B is trained"
        merged = api.export(two, tmp_path / "model", merge=True)
        assert merged["verified"]
        assert 0 < merged["merge_error"] < 1e-5
        assert merged["merge_error_in"] in load_file(tmp_path / "model/model.safetensors")
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
        assert_close(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()), logits_of(theirs))

    def test_the_learning_rate_of_b(self, lora_settings: Settings) -> None:
        groups: list[dict[str, Any]] = []
        values = lora_settings(tuning__lora_plus_ratio=8.0, training__max_steps=1, optim__warmup_ratio=0.0)
        api.train(overrides=values, callbacks=[on(start=lambda run: groups.extend(run.optimizer.param_groups))])
        rates = {tuple(p.shape): group["lr"] for group in groups for p in group["params"]}
        assert rates[32, 4] == pytest.approx(8 * rates[4, 32])


@pytest.mark.parametrize("method", ["lora", "osft"])
@pytest.mark.parametrize("implementation", ["native", "fallback"])
def test_a_wrong_merge_is_not_verified(
    method: str, implementation: str, settings: Settings, base_run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """What is written is compared with the model that was trained, not only with another merged one."""
    folder = base_run if implementation == "native" else make_fallback(tmp_path / "neox")
    values = settings(tuning__method=method, model__path=str(folder), optim__learning_rate=1e-2, training__max_steps=2)
    for key in ("model.depth", "model.width", "model.heads"):
        del values[key]
    api.train(overrides=values)
    merge = {"merge": True} if method == "lora" else {}
    assert api.export(values["output_dir"], tmp_path / "right", **merge)["verified"]
    for source in (MergedTensors, MergedOsft):
        monkeypatch.setattr(source, "read_into", lambda self, *arguments: self.base.read_into(*arguments))
    with pytest.raises(CheckpointError, match="differ from those of the model that was trained"):
        api.export(values["output_dir"], tmp_path / "wrong", **merge)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning.lora_targets": ["q_proj", "w_proj"]}, "w_proj selects nothing"),
        ({"tuning.lora_targets": ["(q_proj"]}, "is not a regular expression"),
        ({"tuning.modules_to_save": ["classifier"]}, "classifier selects nothing"),
        (
            {"tuning.modules_to_save": ["q_proj", "v_proj"], "tuning.lora_targets": ["q_proj"]},
            "tuning.modules_to_save trains all of tuning.lora_targets as they are",
        ),
        ({"tuning.method": "full"}, "tuning.lora_rank is for LoRA"),
        ({"model.tokenizer": "larger"}, "and with adapters they cannot be resized"),
        ({"tuning.adapter": "somewhere"}, "both tuning.lora_rank and tuning.adapter are set"),
        ({"model.fused": ["qkv"]}, "model.fused does not work with tuning.method lora"),
        ({"tuning.frozen_adapters": "style"}, "tuning.frozen_adapters must be a mapping, not 'style'"),
        ({"tuning.frozen_adapters": "default=a"}, "an adapter cannot be called 'default'"),
        ({"tuning.frozen_adapters": "training=a"}, "an adapter cannot be called 'training'"),
        ({"tuning.frozen_adapters": f"{'x' * 300}=a"}, "use another name, of at most 100 characters"),
        ({"tuning.frozen_adapters": "style=saved"}, "has modules of the model (modules_to_save) besides its factors"),
        ({"tuning.frozen_adapters": "style=dora"}, "an adapter with DoRA cannot be active with others"),
        ({"optim.name": "muon"}, "optim.name muon does not work with tuning.method lora"),
        (
            {"training.precision": "fp8", "tuning.quantize_base": "int8"},
            "training.precision fp8 does not work with tuning.quantize_base",
        ),
        ({"model.path": None, "model.depth": 2}, "tuning.method lora tunes an existing model"),
    ],
)
def test_what_is_refused(
    changes: dict[str, Any], message: str, lora_settings: Settings, tokenizer_dir: Path, tmp_path: Path
) -> None:
    values = lora_settings() | changes
    if "tuning.frozen_adapters" in changes:
        settings = {"dora": {"use_dora": True}, "saved": {"modules_to_save": ["embed_tokens", "lm_head"]}}
        name, _, path = changes["tuning.frozen_adapters"].partition("=")
        if path in settings:
            load_peft(Path(values["model.path"]), **settings[path]).save_pretrained(tmp_path / path)
            values["tuning.frozen_adapters"] = f"{name}={tmp_path / path}"
    if "model.tokenizer" in changes:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        tokenizer.add_tokens([f"<new-{n}>" for n in range(64)])
        tokenizer.save_pretrained(tmp_path / "larger")
        values["model.tokenizer"] = str(tmp_path / "larger")
    if values["model.path"] is None:
        values["model.tokenizer"] = str(tokenizer_dir)
    with pytest.raises(UsageError, match=re.escape(message)):
        api.train(overrides=values)


def test_a_model_without_linears_is_refused(settings: Settings, tmp_path: Path) -> None:
    """Those of openai-gpt are Conv1D, which the fallback does not adapt."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = AutoConfig.for_model("openai-gpt", vocab_size=448, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt")
    values = settings(tuning__method="lora", model__path=str(tmp_path / "gpt"))
    for key in ("model.depth", "model.width", "model.heads"):
        del values[key]
    with pytest.raises(UsageError, match=r"tuning.lora_targets: the model has no nn.Linear in its blocks"):
        api.train(overrides=values)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({}, {"peft_type": "IA3"}, "only LORA can be read"),
        ({}, {"bias": "all"}, "bias 'all' is not supported"),
        ({}, {"init_lora_weights": "pissa"}, "has changed the weights of the base model"),
        ({}, {"use_dora": True}, "lacks a factor"),
        ({"modules_to_save": ["embed_tokens"]}, {}, "embedding and head of the adapter differ"),
        ({"target_modules": ["q_proj", "lm_head"]}, {}, "the adapter has factors of lm_head, but the blocks of"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, {}, "has factors of model.embed_tokens, but the blocks of"),
    ],
)
def test_adapters_that_cannot_be_read(
    settings: dict[str, Any], changes: dict[str, Any], message: str, base_run: Path, tmp_path: Path
) -> None:
    load_peft(base_run, **settings).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises((UsageError, CheckpointError), match=message):
        open_peft_adapter(base_run, tmp_path / "theirs")


def test_values_that_are_not_finite_are_refused(base_run: Path, tmp_path: Path) -> None:
    load_peft(base_run).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors[next(iter(tensors))][0, 0] = torch.nan
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors have NaN or infinite values\n  base_model\.model\."):
        open_peft_adapter(base_run, tmp_path)


def test_the_head_of_the_fallback_has_no_factors(tmp_path: Path) -> None:
    folder = make_fallback(tmp_path / "neox")
    load_peft(folder, target_modules=["query_key_value", "lm_head"]).save_pretrained(tmp_path / "theirs")
    with pytest.raises(UsageError, match="the adapter has factors of lm_head"):
        open_peft_adapter(folder, tmp_path / "theirs")


def test_a_linear_has_factors_or_is_saved_whole(base_run: Path, tmp_path: Path) -> None:
    load_peft(base_run).save_pretrained(tmp_path / "theirs")
    path, name = tmp_path / "theirs/adapter_model.safetensors", "model.layers.1.self_attn.q_proj.weight"
    weight = load_file(base_run / "model.safetensors")[name]
    save_file(load_file(path) | {f"base_model.model.{name}": weight}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="factors and the whole weight of layers.1.attention.wq"):
        open_peft_adapter(base_run, tmp_path / "theirs")


def test_a_base_on_the_hub_has_a_name_and_a_revision(base_run: Path, tmp_path: Path) -> None:
    load_peft(base_run).save_pretrained(tmp_path / "theirs")
    adapter = open_peft_adapter(base_run, tmp_path / "theirs").adapter
    write_adapter_config(tmp_path, adapter, WEIGHT_NAMES["llama"], [], "org/name@abc123")
    config = read_adapter_config(tmp_path)
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", "abc123")
    assert base_name(config) == "org/name@abc123"


def test_frozen_parameters_count_less_in_the_mfu(base_run: Path) -> None:
    config = load_model(base_run, CPU).decoder_config
    assert config is not None
    full, frozen = (flops_per_token(config, 0.0, trained_share) for trained_share in (1.0, 0.0))
    assert frozen == full * 4 / 6
