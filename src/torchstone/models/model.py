"""A model to train: a module that maps ids to logits, and its Hugging Face configuration.

`NativeModel` is the decoder of this package; `FallbackModel` wraps any other causal model of Transformers. Both have
the same interface. What a user should know about a model is collected: the values of settings that may be `auto`, and
why, in `choices`, the rest in `notes` and `warnings`. The caller logs them.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from torchstone.models.choice import AS_REQUESTED, Choice
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.models.execution import (
    ExecutionOptions,
    Implementation,
    apply_activation_checkpointing,
    apply_chunked_loss,
    check_fallback_execution,
    choose_attention,
    choose_compile,
    choose_fused,
    choose_loss,
    choose_recompute,
    compile_decoder,
)
from torchstone.models.fallback.module import FallbackModule
from torchstone.models.families import FAMILIES, Family
from torchstone.models.generate import TokenCallback, generate
from torchstone.models.liger import LigerChoice, apply_liger, apply_liger_to_fallback, choose_liger
from torchstone.models.master_weights import MasterWeights
from torchstone.models.sizing import describe, parameter_count
from torchstone.tuning.lora import is_adapter_parameter
from torchstone.tuning.plan import TuningPlan
from torchstone.tuning.quantize import QuantizedLinear

GENERATION_CONFIG = "generation_config.json"
# Embeddings grow to a multiple of this, which matmul kernels prefer.
VOCAB_MULTIPLE = 8
MEAN_CHUNK = 1024
IN_FALLBACK = "in the Transformers fallback"
SPECIAL_TOKEN_KEYS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass
class Model(ABC):
    """`hf_config` is config.json as it will be written; `generation_config` is generation_config.json as bytes."""

    implementation: ClassVar[Implementation]
    module: nn.Module
    hf_config: dict[str, Any]
    generation_config: bytes | None = None
    # By config key.
    choices: dict[str, Choice] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # Set if the module computes with copies of them.
    master_weights: MasterWeights | None = None
    # What is trained; None: everything.
    tuning: TuningPlan | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_positions(self) -> int | None: ...

    @property
    @abstractmethod
    def padding_idx(self) -> int | None:
        """The token whose embedding gets no gradient: the folder's pad_token_id, as in Transformers."""

    @padding_idx.setter
    @abstractmethod
    def padding_idx(self, idx: int | None) -> None: ...

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """The parameters of the whole model, not only of this rank's part, without adapters."""

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def length_error(self, max_length: int) -> str | None:
        """Why rows of up to `max_length` tokens cannot be computed, or None."""

    @abstractmethod
    def packing_error(self, max_length: int) -> str | None:
        """Why a row may not hold several documents of up to `max_length` tokens, or None."""

    @abstractmethod
    def apply_execution(self, execution: ExecutionOptions) -> None:
        """Applies activation checkpointing, Liger kernels and torch.compile to the module."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        on_tokens: TokenCallback | None = None,
    ) -> list[list[int]]:
        """Returns the new tokens of each prompt, up to the first stop token (excluded). Temperature 0 is greedy.

        `on_tokens` gets the new token of each row after every step, -1 for a row that has ended. The fallback generates
        one row at a time and passes that row's token alone.
        """

    @property
    def decoder_config(self) -> DecoderConfig | None:
        """None for the fallback."""
        return None

    @property
    def model_parts(self) -> Sequence[nn.Module]:
        """The modules of this process: one, unless it holds several pipeline stages."""
        return [self.module]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process by their names in the full model: those that the optimizer updates."""
        if self.master_weights is not None:
            yield from self.master_weights.parameters.items()
            return
        for part in self.model_parts:
            yield from part.named_parameters()

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (each for each in self.named_parameters() if each[1].requires_grad)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters that the optimizer updates; of any, if it updates none in this pipeline stage."""
        parameters = [*self.trained_parameters(), *self.named_parameters()]
        return parameters[0][1].dtype

    @property
    def device(self) -> torch.device:
        return next(self.named_parameters())[1].device

    def use_master_weights(self, dtype: torch.dtype) -> None:
        """Makes the module compute in `dtype`, and keeps its parameters for the optimizer."""
        self.master_weights = MasterWeights(self.module, dtype)

    def train(self, mode: bool = True) -> None:
        for part in self.model_parts:
            part.train(mode)

    def clear_gradients(self) -> None:
        """Also clears those that the optimizer does not know: of frozen parameters, and of copies of master weights."""
        for part in self.model_parts:
            part.zero_grad(set_to_none=True)
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def parameter_kinds(self) -> dict[str, str]:
        """Maps parameter names to `embed` or `head`; other parameters are left out. A tied head counts as embedding."""
        return {"tok_embed.weight": "embed", "pos_embed.weight": "embed", "head.weight": "head"}

    def align_special_tokens(self, special_ids: Mapping[str, int | None], stop_ids: Sequence[int] = ()) -> list[str]:
        """Makes the special tokens those of a tokenizer, and returns a line for every change."""
        changes, old_eos = [], self.hf_config.get("eos_token_id")
        for key in SPECIAL_TOKEN_KEYS:
            new, old = special_ids.get(key), self.hf_config.get(key)
            if new is None or new == old or (isinstance(old, list) and new in old):
                continue
            self._set_special_id(key, new)
            changes.append(f"{key}: {'none' if old is None else old} in the model is now {new}, as in the tokenizer")
        keep_stops = old_eos == self.hf_config.get("eos_token_id")
        return changes + self._align_generation_config(special_ids, stop_ids, keep_stops)

    def _align_generation_config(
        self, special_ids: Mapping[str, int | None], stop_ids: Sequence[int], keep_stops: bool
    ) -> list[str]:
        """Puts the tokenizer's ids and all stop tokens into generation_config.json; the rest of it stays the same."""
        if self.generation_config is None:
            return []
        try:
            settings = json.loads(self.generation_config)
            stops = settings.get("eos_token_id")
        except (ValueError, AttributeError, RecursionError):
            self.generation_config = None
            self.warnings.append(f"{GENERATION_CONFIG} is not a JSON object; it will be rewritten")
            return []
        stops = [] if stops is None or not keep_stops else stops if isinstance(stops, list) else [stops]
        # With another tokenizer a stop token's id may have become BOS, with which every text begins.
        stops = [stop for stop in stops if stop in stop_ids or stop != special_ids.get("bos_token_id")]
        keys = [key for key in ("pad_token_id", "bos_token_id") if key in settings and special_ids.get(key) is not None]
        values: dict[str, Any] = {key: special_ids[key] for key in keys}
        stops = [*stops, *(stop for stop in stop_ids if stop not in stops)]
        if stops and (stops != settings.get("eos_token_id") and stops != [settings.get("eos_token_id")]):
            values["eos_token_id"] = stops[0] if len(stops) == 1 else stops
        changes = {key: value for key, value in values.items() if settings.get(key) != value}
        if changes:
            self.generation_config = json.dumps(settings | changes, indent=2).encode() + b"\n"
        return [f"{GENERATION_CONFIG}: {key} {settings.get(key)} is now {value}" for key, value in changes.items()]

    def _set_special_id(self, key: str, value: int) -> None:
        self.hf_config[key] = value


@dataclass
class NativeModel(Model):
    """The decoder of this package. `decoders` are this process's pipeline stages."""

    implementation: ClassVar[Implementation] = "native"
    module: Decoder
    family: Family = FAMILIES["llama"]
    decoders: list[Decoder] = field(default_factory=list)
    # Tokens of a chunk of the chunked loss, set by `apply_execution`.
    chunk_tokens: int | None = None

    @property
    def model_parts(self) -> Sequence[Decoder]:
        return self.decoders or [self.module]

    @property
    def decoder_config(self) -> DecoderConfig:
        return self.module.config

    def parameter_kinds(self) -> dict[str, str]:
        # At the end of a pipeline, a tied head is a replica of the embedding and gets the same weight decay.
        return super().parameter_kinds() | ({"head.weight": "embed"} if self.module.config.tied else {})

    @property
    def vocab_size(self) -> int:
        return self.module.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.module.config.max_positions

    @property
    def padding_idx(self) -> int | None:
        return self.module.config.padding_idx

    @padding_idx.setter
    def padding_idx(self, idx: int | None) -> None:
        for part in self.model_parts:
            part.config = replace(part.config, padding_idx=idx)
            if part.has_embedding:
                # A vocabulary-parallel embedding keeps it under a different name (parallel/tensor_parallel.py).
                name = "global_padding_idx" if hasattr(part.tok_embed, "global_padding_idx") else "padding_idx"
                setattr(part.tok_embed, name, idx)

    @property
    def parameter_count(self) -> int:
        return parameter_count(self.module.config)

    def describe(self) -> str:
        return f"{self.hf_config['model_type']}, native: {describe(self.module.config)}"

    def length_error(self, max_length: int) -> str | None:
        if self.module.config.has_learned_positions and max_length > self.max_positions:
            return f"the model has {self.max_positions} positions"
        return None

    def packing_error(self, max_length: int) -> str | None:
        return self.module.config.packing_error(max_length)

    def apply_execution(self, execution: ExecutionOptions) -> None:
        parameter = next(self.module.parameters())
        dtype = self.module.compute_dtype or parameter.dtype
        plan = choose_execution(self.module.config, execution, parameter.device, dtype)
        self.choices, self.chunk_tokens = plan.choices, plan.chunk_tokens
        self.notes += plan.liger.notes
        recompute, compile_ = plan.choices["model.recompute"].value, plan.choices["model.compile"].value
        if execution.fp8 is not None and compile_ == "none":
            self.warnings.append(
                "FP8 without model.compile is slower than bf16: every cast is a kernel of its own; add --model.compile "
                "block"
            )
        options = None if execution.fp8 is None else execution.fp8.compile_options
        for part in self.model_parts:
            if self.chunk_tokens is not None:
                apply_chunked_loss(part, self.chunk_tokens)
            apply_liger(part, plan.liger.kernels)
            apply_activation_checkpointing(part, recompute)
            compile_decoder(part, compile_, has_fixed_length=execution.has_fixed_length, options=options)

    def generate(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return generate(self.module, *args, **kwargs)


@dataclass
class FallbackModel(Model):
    """Any other causal model, computed by Transformers."""

    implementation: ClassVar[Implementation] = "fallback"
    module: FallbackModule
    # What rounding has lost of an adapter that was merged into it, by parameter.
    merge_errors: dict[str, float] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.module.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.module.max_positions

    @property
    def padding_idx(self) -> int | None:
        return getattr(self.module.hf.get_input_embeddings(), "padding_idx", None)

    @padding_idx.setter
    def padding_idx(self, idx: int | None) -> None:
        self.module.hf.get_input_embeddings().padding_idx = idx

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for name, shape in self.parameter_shapes.items() if not is_adapter_parameter(name))

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters and of quantized weights, which are no parameters any more."""
        quantized = {
            f"{name}.weight": linear.shape
            for name, linear in self.module.named_modules()
            if isinstance(linear, QuantizedLinear)
        }
        return {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters()} | quantized

    def describe(self) -> str:
        return f"{self.parameter_count / 1e6:.2f}M parameters, {type(self.module.hf).__name__} of Transformers"

    def length_error(self, max_length: int) -> str | None:
        return self.module.length_error(max_length)

    def packing_error(self, max_length: int) -> str | None:
        return self.module.packing_error

    def apply_execution(self, execution: ExecutionOptions) -> None:
        check_fallback_execution(execution)
        attention = Choice(self.module.hf.config._attn_implementation, IN_FALLBACK)
        self.choices |= {"model.attention": attention} | choose_fallback_execution(execution)
        if self.choices["model.recompute"].value == "full":
            self.module.enable_activation_checkpointing()
        self.notes += apply_liger_to_fallback(self.module.hf, execution.liger).notes

    def generate(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return self.module.generate(*args, **kwargs)

    def parameter_kinds(self) -> dict[str, str]:
        head = self.module.hf.get_output_embeddings()
        kinds = {} if head is None else {id(parameter): "head" for parameter in head.parameters()}
        # Learned positions are embeddings as well.
        embeddings = [submodule for submodule in self.module.modules() if isinstance(submodule, nn.Embedding)]
        kinds |= {id(embedding.weight): "embed" for embedding in embeddings}
        return {name: kinds[id(p)] for name, p in self.module.named_parameters() if id(p) in kinds}

    def _set_special_id(self, key: str, value: int) -> None:
        super()._set_special_id(key, value)
        setattr(self.module.hf.config, key, value)


class ExecutionPlan(NamedTuple):
    """How a native model runs on a device. `choices` are by config key."""

    choices: dict[str, Choice]
    # Tokens of a chunk of the chunked loss.
    chunk_tokens: int | None
    liger: LigerChoice


def choose_execution(
    config: DecoderConfig, execution: ExecutionOptions, device: torch.device, dtype: torch.dtype
) -> ExecutionPlan:
    """The values chosen for settings that may be `auto`. Raises UsageError for what cannot run."""
    attention, compile_ = choose_attention(config, execution, device, dtype), choose_compile(execution, device)
    liger = choose_liger(execution.liger, config, compile_.value, device, execution.tp, execution.loss)
    loss, chunk_tokens = Choice("liger", AS_REQUESTED), None
    if "loss" not in liger.kernels:
        loss, chunk_tokens = choose_loss(config, execution, device, dtype)
    choices = {
        "model.attention": attention,
        "model.loss": loss,
        "model.recompute": choose_recompute(execution, compile_.value),
        "model.compile": compile_,
        "model.fused": choose_fused(execution),
    }
    return ExecutionPlan(choices, chunk_tokens, liger)


def choose_fallback_execution(execution: ExecutionOptions) -> dict[str, Choice]:
    """The values chosen in the fallback, without attention, which Transformers chooses at load."""
    is_full = execution.recompute == "full"
    return {
        "model.loss": Choice("full", "the Transformers fallback computes all logits"),
        "model.recompute": Choice("full", execution.recompute_reason) if is_full else Choice("none", IN_FALLBACK),
        "model.compile": Choice("none", IN_FALLBACK),
    }


def padded_vocab_size(tokenizer_size: int) -> int:
    return -(-tokenizer_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def resize_warning(tokenizer_size: int, old: int, new: int) -> str:
    return (
        f"the tokenizer has {tokenizer_size} tokens, the model has {old} embeddings: resized to {new}; new ones are "
        "the mean of the old"
    )


def mean_embedding(chunks: Iterable[Tensor]) -> Tensor:
    """The mean over dim 0 of all chunks, summed in fp64."""
    count, total = 0, torch.zeros(())
    for chunk in chunks:
        count, total = count + len(chunk), total + chunk.double().sum(dim=0)
    return (total / count).float()
