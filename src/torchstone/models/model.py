"""A model to train: a module that turns ids into logits, together with what its folder says of it.

Two kinds answer alike. `Native` is the decoder of this package; `Transformers` wraps any other causal model as
Transformers computes it. What they have to say when they are opened (which attention and why, what of config.json is
not computed) is in `notes` and `warnings`, for whoever opens them to print.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchstone.errors import UsageError
from torchstone.models.attention import Choice, choose
from torchstone.models.decoder import Decoder, DecoderConfig, Fusion, pieces_of
from torchstone.models.execution import Compile, Recompute, compile_model, recompute_activations
from torchstone.models.fallback import Fallback, check_fallback, load_fallback, save_fallback
from torchstone.models.families import FAMILIES, Family, dropout_note
from torchstone.models.generate import generate
from torchstone.models.liger import apply_liger, apply_liger_to_fallback, choose_liger
from torchstone.models.sizing import describe
from torchstone.models.weights import Files, NotNative, disk_tensors, read_config, read_shape, save_weights

Implementation = Literal["auto", "native", "fallback"]
GENERATION_FILE = "generation_config.json"
# A tokenizer with more tokens than the model has rows gets rows up to a multiple of this.
ROWS = 8
MARKS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Execution:
    """How a model is to be run; nothing here changes what it computes."""

    implementation: Implementation = "auto"
    attention: str = "auto"
    # Whether rows hold several documents: some kernels are better at that than others.
    packed: bool = False
    fused: tuple[Fusion, ...] = ()
    recompute: Recompute = "none"
    compile: Compile = "none"
    liger: tuple[str, ...] = ()
    trust_remote_code: bool = False


AS_IT_COMES = Execution()


@dataclass
class Model(ABC):
    """`hf_config` is config.json as it will be written; `generation`, generation_config.json where there was one."""

    module: nn.Module
    hf_config: dict[str, Any]
    generation: bytes | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_positions(self) -> int | None: ...

    @property
    @abstractmethod
    def fixed_positions(self) -> bool:
        """Whether a row longer than `max_positions` cannot be computed at all."""

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def why_not_packed(self, longest: int) -> str | None:
        """Why a row may not hold several documents of up to `longest` tokens, or None."""

    @abstractmethod
    def execute(self, execution: Execution) -> None:
        """Has the module recompute, use Liger's kernels and compile as asked for."""

    @abstractmethod
    def _resize(self, rows: int) -> None: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, up to (and without) the first stop token; at temperature 0 the likeliest."""
        return self._continue(prompts, max_new_tokens, stop_ids, temperature, generator)

    @property
    @abstractmethod
    def _continue(self) -> Callable[..., list[list[int]]]: ...

    @abstractmethod
    def save(self, folder: Path) -> None:
        """config.json, the weights, and what came with them."""

    @abstractmethod
    def disk_tensors(self) -> dict[str, Tensor]:
        """The weights by their names on disk."""

    def pieces_of(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """A tensor shaped like parameter `name`, by the names that stay the same however the model runs; views."""
        return [(name, tensor)]

    def roles(self) -> dict[str, str]:
        """Which parameters are embeddings (`embed`) and which the `head`; a tied head is the embedding."""
        return {"tok_embed.weight": "embed", "pos_embed.weight": "embed", "head.weight": "head"}

    def align(self, tokens: int, marks: Mapping[str, int | None]) -> list[str]:
        """Makes the model fit a tokenizer of `tokens` tokens with these special ids; says what was changed.

        New rows, up to a multiple of eight, begin as the mean of the old ones: a token that was never seen is then as
        likely as any, where random rows could make it the likeliest of all. Old rows stay as they are.
        """
        said, rows = [], self.vocab_size
        if tokens > rows:
            self._resize(rows_for(tokens))
            self.hf_config["vocab_size"] = self.vocab_size
            said.append(
                f"the tokenizer has {tokens} tokens, the model {rows} rows: now {self.vocab_size}, "
                "the new ones beginning as the mean of the old"
            )
        for key in MARKS:
            ours, theirs = marks.get(key), self.hf_config.get(key)
            if ours is None or ours == theirs or (isinstance(theirs, list) and ours in theirs):
                continue
            self._set_mark(key, ours)
            before = "had none" if theirs is None else f"had {theirs}"
            said.append(f"{key}: the model {before}, the tokenizer has {ours}; the model now has that")
            if theirs is not None and self.generation is not None:
                self.generation = None
                said.append(f"{GENERATION_FILE} of the model names other ids: it is written anew")
        return said

    def _set_mark(self, key: str, value: int) -> None:
        self.hf_config[key] = value


@dataclass
class Native(Model):
    """The decoder of this package."""

    module: Decoder
    family: Family = FAMILIES["llama"]

    @property
    def vocab_size(self) -> int:
        return self.module.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.module.config.max_positions

    @property
    def fixed_positions(self) -> bool:
        return self.module.config.learned_positions

    def describe(self) -> str:
        return describe(self.module.config)

    def why_not_packed(self, longest: int) -> str | None:
        return self.module.config.why_not_packed(longest)

    def execute(self, execution: Execution) -> None:
        recompute_activations(self.module, execution.recompute)
        device = self.module.tok_embed.weight.device
        choice = choose_liger(execution.liger, self.module.config, execution.compile, device)
        apply_liger(self.module, choice.kernels)
        self.notes += choice.notes
        compile_model(self.module, execution.compile)

    def _resize(self, rows: int) -> None:
        decoder = self.module
        decoder.tok_embed.weight = _grown(decoder.tok_embed.weight, rows)
        decoder.tok_embed.num_embeddings = decoder.head.out_features = rows
        if not decoder.config.tied:
            decoder.head.weight = _grown(decoder.head.weight, rows)
        decoder.config = replace(decoder.config, vocab_size=rows)
        decoder.tie()

    @property
    def _continue(self) -> Callable[..., list[list[int]]]:
        return partial(generate, self.module)

    def save(self, folder: Path) -> None:
        dtype = str(self.module.tok_embed.weight.dtype).removeprefix("torch.")
        config = {key: value for key, value in self.hf_config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_weights(self.module, self.family, folder)
        if self.generation is not None:
            (folder / GENERATION_FILE).write_bytes(self.generation)

    def disk_tensors(self) -> dict[str, Tensor]:
        return disk_tensors(self.module.pieces(), self.family)

    def pieces_of(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return pieces_of(self.module.config, name, tensor)


@dataclass
class Transformers(Model):
    """Any other causal model, as Transformers computes it."""

    module: Fallback

    @property
    def vocab_size(self) -> int:
        return self.module.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.module.max_positions

    @property
    def fixed_positions(self) -> bool:
        # Which models look positions up in a table is not written anywhere; the error names the row.
        return False

    def describe(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return f"{count / 1e6:.2f}M parameters, {type(self.module.hf).__name__} of Transformers"

    def why_not_packed(self, longest: int) -> str | None:
        return self.module.why_not_packed

    def execute(self, execution: Execution) -> None:
        if execution.recompute == "selective":
            raise UsageError(
                "model.recompute selective is for the native decoder, and this model runs in Transformers",
                "use --model.recompute full",
            )
        for key, value in (("compile", execution.compile != "none"), ("fused", bool(execution.fused))):
            if value:
                raise UsageError(f"model.{key} is for the native decoder, and this model runs in Transformers")
        self.notes += apply_liger_to_fallback(self.module.hf, execution.liger).notes
        if execution.recompute == "full":
            self.module.checkpoint_activations()

    def _resize(self, rows: int) -> None:
        self.module.resize(rows)

    @property
    def _continue(self) -> Callable[..., list[list[int]]]:
        return self.module.generate

    def save(self, folder: Path) -> None:
        self.module.generation_config_file = self.generation
        save_fallback(self.module, folder)

    def disk_tensors(self) -> dict[str, Tensor]:
        return self.module.hf.state_dict()

    def roles(self) -> dict[str, str]:
        head = self.module.hf.get_output_embeddings()
        roles = {} if head is None else {id(parameter): "head" for parameter in head.parameters()}
        # Positions that are looked up are embeddings as well.
        tables = [part for part in self.module.modules() if isinstance(part, nn.Embedding)]
        roles |= {id(table.weight): "embed" for table in tables}
        return {name: roles[id(p)] for name, p in self.module.named_parameters() if id(p) in roles}

    def _set_mark(self, key: str, value: int) -> None:
        super()._set_mark(key, value)
        setattr(self.module.hf.config, key, value)


def new_model(
    hf_config: dict[str, Any],
    std: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    execution: Execution = AS_IT_COMES,
) -> Native:
    """A model of the family and shape that `hf_config` describes, its weights drawn from `seed`."""
    family = FAMILIES[hf_config["model_type"]]
    config = family.read(hf_config)
    choice = _choice(config, execution, device, dtype)
    with device:
        decoder = Decoder(config, choice.backend, execution.fused)
    decoder.initialise(std, seed)
    model = Native(decoder.to(dtype), hf_config, notes=[_said(choice)], family=family)
    model.execute(execution)
    return model


def load_model(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32, execution: Execution = AS_IT_COMES
) -> Model:
    """The model of a Hugging Face folder, complete: every weight read, none left over."""
    why_not = why_not_native(folder, execution.implementation)
    if why_not is not None:
        module = load_fallback(folder, execution.attention, device, dtype, execution.trust_remote_code)
        said = f"it runs in Transformers ({why_not})"
        model: Model = Transformers(
            module, read_config(folder), module.generation_config_file, notes=[said], warnings=module.notes
        )
    else:
        model = _load_native(folder, device, dtype, execution)
    model.execute(execution)
    return model


def why_not_native(folder: Path, implementation: Implementation) -> str | None:
    """Why a folder's model is not to be computed by the decoder here; a folder that is no model's is refused."""
    if implementation == "fallback":
        read_config(folder)
        return "as asked for"
    try:
        read_shape(folder)
    except NotNative as error:
        if implementation == "native":
            raise
        return error.message
    return None


def check_folder(folder: Path, execution: Execution) -> None:
    """Refuses a folder whose config.json is not a model's that can be trained, before anything is read or tokenized."""
    if why_not_native(folder, execution.implementation) is not None:
        check_fallback(folder, execution.trust_remote_code)


def rows_for(tokens: int) -> int:
    """Matrix units like multiples of eight."""
    return -(-tokens // ROWS) * ROWS


def _load_native(folder: Path, device: torch.device, dtype: torch.dtype, execution: Execution) -> Native:
    hf_config, family, config = read_shape(folder)
    choice = _choice(config, execution, device, dtype)
    with torch.device("meta"):
        decoder = Decoder(config, choice.backend, execution.fused).to(dtype)
    files = Files(folder, family, decoder)
    decoder.to_empty(device=device)
    decoder.tie()
    files.load(decoder)
    generation = (folder / GENERATION_FILE).read_bytes() if (folder / GENERATION_FILE).is_file() else None
    note = dropout_note(hf_config)
    return Native(
        decoder,
        hf_config,
        generation,
        notes=[_said(choice)],
        warnings=[] if note is None else [note],
        family=family,
    )


def _said(choice: Choice) -> str:
    return f"attention: {choice.backend} ({choice.reason})"


def _choice(config: DecoderConfig, execution: Execution, device: torch.device, dtype: torch.dtype) -> Choice:
    return choose(
        execution.attention, execution.packed, config.window, config.attention_softcap, config.head_size, device, dtype
    )


@torch.no_grad()
def _grown(matrix: Tensor, rows: int) -> nn.Parameter:
    """`matrix` with new rows below it, each the mean of the old ones, taken in fp32."""
    new = matrix.new_empty((rows, *matrix.shape[1:]))
    new[: len(matrix)] = matrix
    new[len(matrix) :] = matrix.float().mean(dim=0).to(matrix.dtype)
    return nn.Parameter(new, requires_grad=matrix.requires_grad)
