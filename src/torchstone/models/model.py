"""A model to train: a module that turns ids into logits, together with what its folder says of it.

Two kinds answer alike. `Native` is the decoder of this package; `Transformers` wraps any other causal model as
Transformers computes it. What they have to say when they are opened (which attention and why, what of config.json is
not computed) is in `notes` and `warnings`, for whoever opens them to print.
"""

from __future__ import annotations

import difflib
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
from torchstone.models.execution import (
    Compile,
    Recompute,
    check_compiler,
    compile_model,
    recompute_activations,
)
from torchstone.models.fallback import Fallback, check_fallback, load_fallback, save_fallback
from torchstone.models.families import FAMILIES, Family, dropout_note
from torchstone.models.generate import generate
from torchstone.models.liger import apply_liger, apply_liger_to_fallback, choose_liger
from torchstone.models.probing import WAYS
from torchstone.models.sizing import describe
from torchstone.models.weights import Files, NotNative, disk_tensors, read_config, read_shape, save_weights

Implementation = Literal["auto", "native", "fallback"]
GENERATION_FILE = "generation_config.json"
# A tokenizer with more tokens than the model has rows gets rows up to a multiple of this.
ROWS = 8
# Spellings of older files that are still read, and what tools leave behind.
OLD_KEYS = ("rope_scaling", "rope_theta", "torch_dtype", "dtype", "partial_rotary_factor", "transformers_version")
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
             "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale",
             "mscale_all_dim", "truncate", "partial_rotary_factor")  # fmt: skip
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
    def padding_row(self) -> int | None:
        """The token whose embedding gets no gradient: pad_token_id of the folder it came from, as in Transformers."""

    @padding_row.setter
    @abstractmethod
    def padding_row(self, row: int | None) -> None: ...

    @abstractmethod
    def why_not_rows(self, longest: int) -> str | None:
        """Why rows of up to `longest` tokens cannot be computed, or None."""

    @property
    @abstractmethod
    def implementation(self) -> Implementation: ...

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

    def align(self, tokens: int, marks: Mapping[str, int | None], stops: Sequence[int] = ()) -> list[str]:
        """Makes the model fit a tokenizer of `tokens` tokens with these special ids, of which `stops` end a text or a
        turn; says what was changed.

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
        before = dict(self.hf_config)
        for key in MARKS:
            ours, theirs = marks.get(key), self.hf_config.get(key)
            if ours is None or ours == theirs or (isinstance(theirs, list) and ours in theirs):
                continue
            self._set_mark(key, ours)
            had = "none" if theirs is None else theirs
            said.append(f"{key}: the model had {had}, the tokenizer has {ours}; the model now has that")
        known = before.get("eos_token_id") == self.hf_config.get("eos_token_id")
        return said + self._align_generation(marks, stops, keep_ends=known)

    def _align_generation(self, marks: Mapping[str, int | None], stops: Sequence[int], keep_ends: bool) -> list[str]:
        """generation_config.json with the tokenizer's ids and every end of a turn; the rest of it is left as it is."""
        if self.generation is None:
            return []
        try:
            settings = json.loads(self.generation)
            ends = settings.get("eos_token_id")
        except (ValueError, AttributeError):
            self.generation = None
            return [f"{GENERATION_FILE} is not a readable JSON object: it is written anew"]
        ends = [] if ends is None or not keep_ends else ends if isinstance(ends, list) else [ends]
        named = [key for key in ("pad_token_id", "bos_token_id") if key in settings and marks.get(key) is not None]
        wanted: dict[str, Any] = {key: marks[key] for key in named}
        ends = [*ends, *(stop for stop in stops if stop not in ends)]
        if ends and (ends != settings.get("eos_token_id") and ends != [settings.get("eos_token_id")]):
            wanted["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        changed = {key: value for key, value in wanted.items() if settings.get(key) != value}
        if changed:
            self.generation = json.dumps(settings | changed, indent=2).encode() + b"\n"
        return [f"{GENERATION_FILE}: {key} was {settings.get(key)}, is {value}" for key, value in changed.items()]

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
    def padding_row(self) -> int | None:
        return self.module.tok_embed.padding_idx

    @padding_row.setter
    def padding_row(self, row: int | None) -> None:
        self.module.tok_embed.padding_idx = row

    def why_not_rows(self, longest: int) -> str | None:
        if self.module.config.learned_positions and longest > self.max_positions:
            return f"the model has {self.max_positions} positions"
        return None

    @property
    def implementation(self) -> Implementation:
        return "native"

    def describe(self) -> str:
        return f"{self.hf_config['model_type']}, native: {describe(self.module.config)}"

    def why_not_packed(self, longest: int) -> str | None:
        return self.module.config.why_not_packed(longest)

    def execute(self, execution: Execution) -> None:
        recompute_activations(self.module, execution.recompute)
        device = self.module.tok_embed.weight.device
        choice = choose_liger(execution.liger, self.module.config, execution.compile, device)
        apply_liger(self.module, choice.kernels)
        self.notes += choice.notes
        if execution.recompute != "none":
            self.notes.append(f"recomputing: {execution.recompute}")
        if execution.compile != "none":
            self.notes.append(f"compiling: {execution.compile}; the first steps take longer")
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
        # The code that auto_map names did not run here, and is not in this folder.
        config = {key: value for key, value in self.hf_config.items() if key not in ("torch_dtype", "auto_map")}
        config |= {"dtype": dtype, "architectures": [self.family.architecture]}
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
    def padding_row(self) -> int | None:
        return getattr(self.module.hf.get_input_embeddings(), "padding_idx", None)

    @padding_row.setter
    def padding_row(self, row: int | None) -> None:
        self.module.hf.get_input_embeddings().padding_idx = row

    def why_not_rows(self, longest: int) -> str | None:
        return self.module.why_not_rows(longest)

    @property
    def implementation(self) -> Implementation:
        return "fallback"

    def describe(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return f"{count / 1e6:.2f}M parameters, {type(self.module.hf).__name__} of Transformers"

    def why_not_packed(self, longest: int) -> str | None:
        return self.module.why_not_packed

    def execute(self, execution: Execution) -> None:
        _check_fallback_execution(execution)
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
    # Padding is never trained on here, so that every row of a new model may learn.
    config = replace(family.read(hf_config), padding_row=None)
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
    why_not = why_not_native(folder, execution)
    if why_not is not None:
        module = load_fallback(folder, execution.attention, device, dtype, execution.trust_remote_code)
        notes = [f"it runs in Transformers ({why_not})", f"attention: {module.hf.config._attn_implementation}"]
        if module.packs is not None:
            notes.append(f"packed documents are kept apart by {WAYS[module.packs]}, as was measured")
        model: Model = Transformers(
            module, read_config(folder), module.generation_config_file, notes=notes, warnings=module.notes
        )
    else:
        model = _load_native(folder, device, dtype, execution)
    model.execute(execution)
    return model


def why_not_native(folder: Path, execution: Execution) -> str | None:
    """Why a folder's model is not to be computed by the decoder here; a folder that is no model's is refused."""
    implementation, hf_config = execution.implementation, read_config(folder)
    if implementation == "fallback":
        return "as asked for"
    if implementation == "auto" and execution.trust_remote_code and _own_code(hf_config):
        return f"{_own_code(hf_config)} of its folder, which is trusted"
    if implementation == "auto" and _trained_by(folder) == "fallback":
        return "as the run that saved it"
    try:
        read_shape(folder)
    except NotNative as error:
        if implementation == "native":
            raise
        return error.message
    return None


def check_folder(folder: Path, device: torch.device, dtype: torch.dtype, execution: Execution = AS_IT_COMES) -> None:
    """Refuses a folder whose config.json is not a model's that can be run so, before weights or data are read."""
    if why_not_native(folder, execution) is not None:
        check_fallback(folder, execution.trust_remote_code)
        _check_fallback_execution(execution)
    else:
        _, _, config = read_shape(folder)
        _check_native_execution(config, device, dtype, execution)


def check_new(hf_config: dict[str, Any], device: torch.device, dtype: torch.dtype, execution: Execution) -> None:
    """The same for a model that is yet to be made."""
    config = FAMILIES[hf_config["model_type"]].read(hf_config)
    _check_native_execution(config, device, dtype, execution)


def _own_code(hf_config: dict[str, Any]) -> str | None:
    """The class that a folder brings along for a causal model."""
    named = hf_config.get("auto_map")
    return named.get("AutoModelForCausalLM") if isinstance(named, dict) else None


def _trained_by(folder: Path) -> str | None:
    """The implementation by which a checkpoint's run computed; None for other folders."""
    try:
        return json.loads((folder / "state.json").read_text()).get("implementation")
    except (OSError, ValueError, AttributeError):
        return None


def _check_native_execution(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype, execution: Execution
) -> None:
    _choice(config, execution, device, dtype)
    choose_liger(execution.liger, config, execution.compile, device)
    if execution.compile != "none":
        check_compiler(device)


def _check_fallback_execution(execution: Execution) -> None:
    asked = {
        "recompute selective": execution.recompute == "selective",
        "compile": execution.compile != "none",
        "fused": bool(execution.fused),
    }
    names = [f"model.{key}" for key, given in asked.items() if given]
    if names:
        verb = "are" if len(names) > 1 else "is"
        raise UsageError(
            f"{', '.join(names)} {verb} for the native decoder, and this model runs in Transformers",
            "leave it out; model.recompute full works in both",
        )


def rows_for(tokens: int) -> int:
    """Matrix units like multiples of eight."""
    return -(-tokens // ROWS) * ROWS


def _misspelt(hf_config: dict[str, Any]) -> list[str]:
    """Keys that Transformers does not know, but nearly: a typing error there changes a model without a word."""
    from transformers import AutoConfig

    own = AutoConfig.for_model(hf_config["model_type"]).to_dict()
    known = {*(key for key in own if not key.startswith("_")), *OLD_KEYS}
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling")
    pairs = [(key, known) for key in hf_config]
    if isinstance(rope, dict):
        pairs += [(key, set(ROPE_KEYS)) for key, value in rope.items() if not isinstance(value, dict)]
    found = []
    for key, names in pairs:
        near = difflib.get_close_matches(key, names, 1, cutoff=0.88) if key not in names else []
        if near:
            found.append(f"config.json: {key} is no key of this model, and has no effect (did you mean {near[0]}?)")
    return found


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
    warnings = [] if note is None else [note]
    if _own_code(hf_config):
        warnings.append(f"config.json names code of its own ({_own_code(hf_config)}), which is not run")
    return Native(
        decoder,
        hf_config,
        generation,
        notes=[_said(choice)],
        warnings=warnings + _misspelt(hf_config),
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
