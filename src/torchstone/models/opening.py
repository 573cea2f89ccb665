"""From a folder, or from a config.json that was just made, to a model that is ready to run.

What is wrong with a folder, or cannot be run here as asked for, is found before its weights are read (`check_folder`),
so that nobody waits for data to be tokenized first. Which implementation opens it, and why, is in the notes.

A `Builder` says where the parameters come to lie: whole on one device here, shared out over ranks in parallel/build.py.
They are then filled box by box from a source: files, slices that ranks have saved, or a seed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchstone.errors import CheckpointError
from torchstone.models.attention import Backend, Choice, choose
from torchstone.models.decoder import Decoder, DecoderConfig, Fusion, drawn
from torchstone.models.execution import AS_IT_COMES, Execution, check_compiler, check_fallback_execution
from torchstone.models.fallback import Fallback, check_fallback, load_fallback
from torchstone.models.families import FAMILIES, Family, dropout_note
from torchstone.models.liger import choose_liger
from torchstone.models.model import (
    GENERATION_FILE,
    ROWS_AT_A_TIME,
    Model,
    Native,
    Transformers,
    mean_row,
    resized,
    rows_for,
)
from torchstone.models.probing import WAYS
from torchstone.models.sliced_files import SlicedFiles
from torchstone.models.slices import EMBEDDING, HEAD, WEIGHTS, slice_files, slices_of
from torchstone.models.weights import Files, NotNative, Source, read_config, read_shape

# Spellings of older files that are still read, and what tools leave behind.
OLD_KEYS = ("rope_scaling", "rope_theta", "torch_dtype", "dtype", "partial_rotary_factor", "transformers_version")
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
             "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale",
             "mscale_all_dim", "truncate", "partial_rotary_factor")  # fmt: skip


class Builder:
    """Puts a model's parameters where they are to be: whole, on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.notes: list[str] = []

    def decoders(self, config: DecoderConfig, backend: Backend, fused: tuple[Fusion, ...]) -> list[Decoder]:
        """The parts of a decoder that are to be here, with room for their values."""
        with torch.device("meta"):
            decoder = Decoder(config, backend, fused).to(self.dtype)
        decoder.to_empty(device=self.device)
        decoder.tie()
        return [decoder]

    def fallback(self, module: Fallback) -> None:
        """What is to be done with a Transformers model that has its values."""


def new_model(
    hf_config: dict[str, Any],
    std: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    execution: Execution = AS_IT_COMES,
    builder: Builder | None = None,
) -> Native:
    """A model of the family and shape that `hf_config` describes, its weights drawn from `seed`."""
    family = FAMILIES[hf_config["model_type"]]
    # Padding is never trained on here, so that every row of a new model may learn.
    config = replace(family.read(hf_config), padding_row=None)
    choice = _choice(config, execution, device, dtype)
    builder = builder or Builder(device, dtype)
    parts = builder.decoders(config, choice.backend, execution.fused)
    fill(parts, Drawn(config, std, seed))
    model = Native(parts[0], hf_config, notes=[_said(choice), *builder.notes], family=family, stages=parts)
    model.execute(execution)
    return model


def load_model(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    execution: Execution = AS_IT_COMES,
    builder: Builder | None = None,
    tokens: int = 0,
) -> Model:
    """The model of a Hugging Face folder or a checkpoint, complete: every weight read, none left over. One with fewer
    rows than `tokens` gets rows for them."""
    builder = builder or Builder(device, dtype)
    why_not = why_not_native(folder, execution)
    if why_not is not None:
        module = load_fallback(folder, execution.attention, device, builder.dtype, execution.trust_remote_code)
        notes = [f"it runs in Transformers ({why_not})", f"attention: {module.hf.config._attn_implementation}"]
        if module.packs is not None:
            notes.append(f"packed documents are kept apart by {WAYS[module.packs]}, as was measured")
        model: Model = Transformers(
            module, read_config(folder), module.generation_config_file, notes=notes, warnings=module.notes
        )
        model.warnings += model.align(tokens, {})
        model.execute(execution)
        builder.fallback(module)
        model.notes += builder.notes
        return model
    model = _load_native(folder, device, dtype, execution, builder, tokens)
    model.execute(execution)
    return model


@torch.no_grad()
def fill(parts: Sequence[Decoder], source: Source) -> None:
    """Gives every parameter its values: those boxes of the whole model that are here, and no others."""
    for part in parts:
        for name, parameter in part.named_parameters():
            for box in slices_of(part.config, name, parameter.detach()):
                source.read_into(box.name, box.tensor, box.offset)


class Drawn:
    """A new model's values. All of a piece is drawn and what is wanted kept: so they are the same in any layout."""

    def __init__(self, config: DecoderConfig, std: float, seed: int) -> None:
        self.config, self.std, self.seed = config, std, seed
        with torch.device("meta"):
            self.shapes = {name: piece.shape for name, piece in Decoder(config).pieces().items()}

    def read_into(self, piece: str, target: Tensor, offset: Sequence[int]) -> None:
        whole = drawn(self.config, piece, self.shapes[piece], self.std, self.seed)
        target.copy_(whole[tuple(slice(at, at + size) for at, size in zip(offset, target.shape, strict=True))])


class Grown:
    """A source whose embedding and head have more rows than it holds: each of those is the mean of the old."""

    def __init__(self, source: Source, old_rows: int) -> None:
        self.source, self.old_rows = source, old_rows
        self._means: dict[tuple[str, torch.dtype], Tensor] = {}

    def read_into(self, piece: str, target: Tensor, offset: Sequence[int]) -> None:
        if piece not in (EMBEDDING, HEAD):
            self.source.read_into(piece, target, offset)
            return
        old = min(max(0, self.old_rows - offset[0]), len(target))
        if old:
            self.source.read_into(piece, target[:old], offset)
        if old < len(target):
            target[old:] = self._mean(piece, target).to(target)

    def _mean(self, piece: str, like: Tensor) -> Tensor:
        if (piece, like.dtype) not in self._means:
            chunks = range(0, self.old_rows, ROWS_AT_A_TIME)
            self._means[piece, like.dtype] = mean_row(self._rows(piece, at, like) for at in chunks)
        return self._means[piece, like.dtype]

    def _rows(self, piece: str, at: int, like: Tensor) -> Tensor:
        rows = like.new_empty((min(ROWS_AT_A_TIME, self.old_rows - at), like.shape[1]), device="cpu")
        self.source.read_into(piece, rows, (at, 0))
        return rows


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
    """Refuses a folder that does not hold a model, whole and to be run so, before weights or data are read."""
    if why_not_native(folder, execution) is not None:
        check_fallback(folder, execution.trust_remote_code)
        check_fallback_execution(execution)
    else:
        _, family, config = read_shape(folder)
        open_pieces(folder, family, config)
        _check_native_execution(config, device, dtype, execution)


def open_pieces(folder: Path, family: Family, config: DecoderConfig) -> Files | SlicedFiles:
    """The weights of a folder, found and checked by name and shape; none is read. A checkpoint of several ranks has
    them in slices."""
    with torch.device("meta"):
        decoder = Decoder(config)
    saved = slice_files(folder, WEIGHTS)
    if not saved:
        return Files(folder, family, decoder)
    files = SlicedFiles(saved)
    wanted = {name: tuple(piece.shape) for name, piece in decoder.pieces().items()}
    found = {name: tuple(files.shape(name)) for name in files.names}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise CheckpointError(f"{folder}: the weights do not fit config.json", f"see {', '.join(wrong[:8])}")
    return files


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
    choose_liger(execution.liger, config, execution.compile, device, execution.tp)
    if execution.compile != "none":
        check_compiler(device)


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


def _load_native(
    folder: Path, device: torch.device, dtype: torch.dtype, execution: Execution, builder: Builder, tokens: int
) -> Native:
    hf_config, family, config = read_shape(folder)
    choice = _choice(config, execution, device, dtype)
    files = open_pieces(folder, family, config)
    source: Source = files
    note = dropout_note(hf_config)
    warnings = [] if note is None else [note]
    if tokens > config.vocab_size:
        source, rows = Grown(source, config.vocab_size), rows_for(tokens)
        warnings.append(resized(tokens, config.vocab_size, rows))
        config, hf_config["vocab_size"] = replace(config, vocab_size=rows), rows
    parts = builder.decoders(config, choice.backend, execution.fused)
    fill(parts, source)
    if isinstance(files, Files):
        _check_head_copies(files, parts)
    generation = (folder / GENERATION_FILE).read_bytes() if (folder / GENERATION_FILE).is_file() else None
    if _own_code(hf_config):
        warnings.append(f"config.json names code of its own ({_own_code(hf_config)}), which is not run")
    return Native(
        parts[0],
        hf_config,
        generation,
        notes=[_said(choice), *builder.notes],
        warnings=warnings + _misspelt(hf_config),
        family=family,
        stages=parts,
    )


def _check_head_copies(files: Files, parts: Sequence[Decoder]) -> None:
    """Each process looks at the rows of the embedding that it has; new ones are in no file."""
    for part in parts:
        if part.is_first and part.config.tied:
            for box in slices_of(part.config, EMBEDDING, part.tok_embed.weight.detach()):
                old = max(0, files.shape(EMBEDDING)[0] - box.offset[0])
                files.check_head_copies(box.tensor[:old], box.offset)


def _said(choice: Choice) -> str:
    return f"attention: {choice.backend} ({choice.reason})"


def _choice(config: DecoderConfig, execution: Execution, device: torch.device, dtype: torch.dtype) -> Choice:
    return choose(
        execution.attention, execution.packed, config.window, config.attention_softcap, config.head_size, device, dtype
    )
