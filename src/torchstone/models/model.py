"""A model to train: a module that turns ids into logits, together with what its folder says of it.

Two kinds answer alike. `Native` is the decoder of this package; `Transformers` wraps any other causal model as
Transformers computes it. What they have to say when they are opened (which attention and why, what of config.json is
not computed) is in `notes` and `warnings`, for whoever opens them to print.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchstone.models.decoder import Decoder
from torchstone.models.execution import (
    Execution,
    Implementation,
    check_fallback_execution,
    compile_model,
    recompute_activations,
)
from torchstone.models.fallback import Fallback, save_fallback, whole_state
from torchstone.models.families import FAMILIES, Family
from torchstone.models.generate import generate
from torchstone.models.liger import apply_liger, apply_liger_to_fallback, choose_liger
from torchstone.models.sizing import describe
from torchstone.models.sliced_files import Slice, write_slices
from torchstone.models.slices import WEIGHTS, is_counted, piece_names, slice_file, slices_of
from torchstone.models.weights import disk_tensors, save_weights

GENERATION_FILE = "generation_config.json"
# A tokenizer with more tokens than the model has rows gets rows up to a multiple of this.
ROWS = 8
# New rows are the mean of the old, of which so many are read at once.
ROWS_AT_A_TIME = 1024
MARKS = ("pad_token_id", "bos_token_id", "eos_token_id")


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
    def save(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """config.json, the weights, and what came with them. Of several ranks, each writes slices of its own where it
        can, and the first the rest; all of them have to call it."""

    @abstractmethod
    def disk_tensors(self) -> dict[str, Tensor]:
        """The weights by their names on disk."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The modules that this process holds of it: one, unless it has several stages of a pipeline."""
        return [self.module]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this process; names are those of the whole model."""
        for part in self.parts:
            yield from part.named_parameters()

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    def slices_of(self, name: str, tensor: Tensor) -> list[Slice]:
        """A tensor shaped and laid out like parameter `name`, as boxes of tensors whose names and shapes stay the same
        however the model runs; views."""
        return slices_of(None, name, tensor)

    def piece_names(self, name: str, tensor: Tensor) -> list[str]:
        """The tensors of which a parameter holds boxes, whether or not any of them is here."""
        return [name]

    def counts(self, name: str, tensor: Tensor) -> bool:
        """Whether this process is the one to count and save what it holds of a parameter."""
        return is_counted(None, name, tensor)

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
            said.append(resized(tokens, rows, self.vocab_size))
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
    stages: list[Decoder] = field(default_factory=list)

    @property
    def parts(self) -> Sequence[Decoder]:
        return self.stages or [self.module]

    def roles(self) -> dict[str, str]:
        # Where the head is the embedding, its copy at the end of a pipeline is trained as one.
        return super().roles() | ({"head.weight": "embed"} if self.module.config.tied else {})

    @property
    def vocab_size(self) -> int:
        return self.module.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.module.config.max_positions

    @property
    def padding_row(self) -> int | None:
        return self.module.config.padding_row

    @padding_row.setter
    def padding_row(self, row: int | None) -> None:
        for part in self.parts:
            part.config = replace(part.config, padding_row=row)
            if part.is_first:
                # Shared out by the vocabulary it is kept in another way (parallel/tensor.py).
                setattr(part.tok_embed, "frozen_row" if hasattr(part.tok_embed, "frozen_row") else "padding_idx", row)

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
        device = next(self.module.parameters()).device
        choice = choose_liger(execution.liger, self.module.config, execution.compile, device, execution.tp)
        self.notes += choice.notes
        if execution.recompute != "none":
            self.notes.append(f"recomputing: {execution.recompute}")
        if execution.compile != "none":
            self.notes.append(f"compiling: {execution.compile}; the first steps take longer")
        for part in self.parts:
            recompute_activations(part, execution.recompute)
            apply_liger(part, choice.kernels)
            compile_model(part, execution.compile)

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

    def save(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        if ranks > 1:
            boxes = [
                box for n, p in self.named_parameters() if self.counts(n, p) for box in self.slices_of(n, p.detach())
            ]
            write_slices(slice_file(folder, WEIGHTS, rank), boxes)
        if rank > 0:
            return
        write_config(self.hf_config, self.family, next(self.module.parameters()).dtype, folder)
        if ranks == 1:
            save_weights(self.pieces(), self.family, folder)
        if self.generation is not None:
            (folder / GENERATION_FILE).write_bytes(self.generation)

    def disk_tensors(self) -> dict[str, Tensor]:
        return disk_tensors(self.pieces(), self.family)

    def pieces(self) -> dict[str, Tensor]:
        """Every parameter by the name it has when nothing is fused; of a model that one process holds."""
        return {box.name: box.tensor for n, p in self.named_parameters() for box in self.slices_of(n, p.detach())}

    def slices_of(self, name: str, tensor: Tensor) -> list[Slice]:
        return slices_of(self.module.config, name, tensor)

    def piece_names(self, name: str, tensor: Tensor) -> list[str]:
        return piece_names(self.module.config, name, tensor)

    def counts(self, name: str, tensor: Tensor) -> bool:
        return is_counted(self.module.config, name, tensor)


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
        check_fallback_execution(execution)
        self.notes += apply_liger_to_fallback(self.module.hf, execution.liger).notes
        if execution.recompute == "full":
            self.module.checkpoint_activations()

    def _resize(self, rows: int) -> None:
        self.module.resize(rows)

    @property
    def _continue(self) -> Callable[..., list[list[int]]]:
        return self.module.generate

    def save(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        self.module.generation_config_file = self.generation
        save_fallback(self.module, folder, rank)

    def disk_tensors(self) -> dict[str, Tensor]:
        return whole_state(self.module.hf) or self.module.hf.state_dict()

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


def write_config(hf_config: dict[str, Any], family: Family, dtype: torch.dtype, folder: Path) -> None:
    """The config.json of a native model."""
    # The code that auto_map names did not run here, and is not in this folder.
    config = {key: value for key, value in hf_config.items() if key not in ("torch_dtype", "auto_map")}
    config |= {"dtype": str(dtype).removeprefix("torch."), "architectures": [family.architecture]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def rows_for(tokens: int) -> int:
    """Matrix units like multiples of eight."""
    return -(-tokens // ROWS) * ROWS


def resized(tokens: int, before: int, now: int) -> str:
    return (
        f"the tokenizer has {tokens} tokens, the model {before} rows: now {now}, the new ones beginning as the mean of "
        "the old"
    )


def mean_row(chunks: Iterable[Tensor]) -> Tensor:
    """The mean of all rows, summed in fp64, so that it does not matter in which order ranks see them."""
    count, total = 0, torch.zeros(())
    for rows in chunks:
        count, total = count + len(rows), total + rows.double().sum(dim=0)
    return (total / count).float()


@torch.no_grad()
def _grown(matrix: Tensor, rows: int) -> nn.Parameter:
    """`matrix` with new rows below it, each the mean of the old ones, taken in fp64."""
    new = matrix.new_empty((rows, *matrix.shape[1:]))
    new[: len(matrix)] = matrix
    new[len(matrix) :] = mean_row(matrix.split(ROWS_AT_A_TIME)).to(matrix.dtype)
    return nn.Parameter(new, requires_grad=matrix.requires_grad)
