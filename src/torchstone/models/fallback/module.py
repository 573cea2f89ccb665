"""A Transformers model behind the native decoder's interface.

The native decoder knows some families; this module trains every other causal model as Transformers computes it. When
such a model is loaded (checkpoint/transformers_folder.py), it is run on a few random tokens to verify that it is
causal and to find a way to pack documents (probing.py). Where no way works, `packing_error` says why, and packed rows
are refused.

It has Transformers' speed and memory use (all logits at once, a [T, T] mask for packed rows), supports sdpa and eager
attention only, and generates one prompt at a time.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.errors import UsageError, first_line
from torchstone.loss.cross_entropy import IGNORE_INDEX
from torchstone.models.attention import build_attn_mask
from torchstone.models.fallback.probing import windows_of
from torchstone.models.generate import TokenCallback, sample_token
from torchstone.rng import fork_rng

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "seq_length",
)
# logits [B, V] -> the next tokens [B].
TokenSampler = Callable[[Tensor], Tensor]


class FallbackModule(nn.Module):
    """forward(ids, positions, doc_ids) -> logits, by a Transformers model.

    `packing_method` is one of PACKING_METHODS (probing.py), or None if a row may hold only one document.
    """

    def __init__(self, hf: PreTrainedModel, packing_method: str | None) -> None:
        super().__init__()
        self.hf = hf
        self.packing_method = packing_method
        self.packing_error = None if packing_method else "no method was found that separates packed documents"
        self.warnings: list[str] = []
        # The file's bytes: Transformers refuses to write many published generation_config.json files back.
        self.generation_config: bytes | None = None
        self._forward_parameters = inspect.signature(hf.forward).parameters
        hf.loss_function = hf_loss_function

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        """Without `doc_ids` every row is one sequence, with padding on the right if any."""
        if doc_ids_BT is None:
            return self._logits(ids_BT, None, self._continued_positions(positions_BT))
        if self.packing_method is None:
            raise ValueError(f"this model takes one document per row: {self.packing_error}")
        if self.packing_method == "positions":
            _check_boundaries(positions_BT, doc_ids_BT)
        return self.forward_packed(self.packing_method, ids_BT, positions_BT, doc_ids_BT)

    def forward_packed(self, method: str, ids_BT: Tensor, positions_BT: Tensor, doc_ids_BT: Tensor) -> Tensor:
        """Logits of packed rows by one of PACKING_METHODS, whether or not it works for this model."""
        return self._logits(ids_BT, packed_mask(self.hf, method, positions_BT, doc_ids_BT), positions_BT)

    @property
    def vocab_size(self) -> int:
        return int(self.hf.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.hf.get_input_embeddings().weight.device

    @property
    def max_positions(self) -> int | None:
        values = (getattr(self.hf.config.get_text_config(), key, None) for key in MAX_POSITION_KEYS)
        return next((value for value in values if type(value) is int and value > 0), None)

    def length_error(self, max_length: int) -> str | None:
        """Why rows of up to `max_length` tokens cannot be computed, or would depend on other rows of their batch."""
        rope_limit = fixed_rope_length(self.hf.config.get_text_config())
        if rope_limit is not None and max_length > rope_limit:
            return (
                f"beyond {rope_limit} tokens its RoPE depends on the longest row of the batch in Transformers, so a "
                "row's result would depend on its neighbors"
            )
        positions = self.max_positions
        sizes = [submodule.num_embeddings for submodule in self.hf.modules() if isinstance(submodule, nn.Embedding)]
        # Some models reserve a few position embeddings at the beginning.
        if positions is not None and max_length > positions and any(positions <= n <= positions + 8 for n in sizes):
            return f"the model has embeddings for {positions} positions"
        return None

    def enable_activation_checkpointing(self) -> None:
        name = type(self.hf).__name__
        if not self.hf.supports_gradient_checkpointing:
            raise UsageError(f"model.recompute: Transformers has no activation checkpointing for {name}")
        try:
            self.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except (ValueError, AttributeError, NotImplementedError) as error:
            raise UsageError(f"model.recompute: {name} cannot checkpoint activations: {first_line(error)}") from error

    @torch.no_grad()
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

        The folder's generation_config.json is not used: no penalties, no top-k, no other length limit.
        """
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("a prompt is empty")
        if max_new_tokens < 1:
            return [[] for _ in prompts]

        def sample(logits: Tensor) -> Tensor:
            tokens = sample_token(logits, temperature, generator, top_p, top_k)
            if on_tokens is not None:
                on_tokens([-1 if token in stop_ids else token for token in tokens.tolist()])
            return tokens

        with eval_mode(self), default_generation_config(self.hf):
            return [self._generate_one(list(prompt), max_new_tokens, list(stop_ids), sample) for prompt in prompts]

    @torch.no_grad()
    def resize_embeddings(self, vocab_size: int) -> None:
        """Grows embedding and head. Old embeddings stay the same; each new one is the mean of the old ones."""
        old = self.vocab_size
        if vocab_size < old:
            raise ValueError(f"cannot shrink the embedding from {old} to {vocab_size} embeddings")
        if vocab_size == old:
            return
        head = self.hf.get_output_embeddings()
        old_head = 0 if head is None else head.weight.shape[0]
        padding_idx = getattr(self.hf.get_input_embeddings(), "padding_idx", None)
        with fork_rng(self.device):
            self.hf.resize_token_embeddings(vocab_size, mean_resizing=False)
        embedding, head = self.hf.get_input_embeddings(), self.hf.get_output_embeddings()
        embedding.padding_idx = padding_idx
        _fill_with_mean(embedding.weight, old)
        if head is not None and head.weight is not embedding.weight:
            _fill_with_mean(head.weight, old_head)
        if getattr(head, "bias", None) is not None:
            _fill_with_mean(head.bias, old_head)

    def _accepts(self, name: str) -> bool:
        return name in self._forward_parameters

    def _logits(self, ids_BT: Tensor, mask: Any, positions_BT: Tensor) -> Tensor:
        arguments = {"position_ids": positions_BT, "use_cache": False, "output_router_logits": False}
        arguments = {name: value for name, value in arguments.items() if self._accepts(name)}
        if mask is not None:
            arguments["attention_mask"] = mask
        if self._accepts("return_dict") or any(p.kind is p.VAR_KEYWORD for p in self._forward_parameters.values()):
            arguments["return_dict"] = True
        output = self.hf(input_ids=ids_BT, **arguments)
        return output[0] if isinstance(output, tuple) else output.logits

    def _continued_positions(self, positions_BT: Tensor) -> Tensor:
        """Positions that keep counting through the padding: if they restarted, Transformers would build a packing mask.

        They stay as they are if the padding would exceed the model's maximum.
        """
        length = positions_BT.shape[1]
        if self.max_positions is not None and length > self.max_positions:
            return positions_BT
        return positions_BT[:, :1] + torch.arange(length, device=positions_BT.device)

    def _generate_one(
        self, prompt: list[int], max_new_tokens: int, stop_ids: list[int], sample: TokenSampler
    ) -> list[int]:
        if self.hf.can_generate():
            tokens = self._generate_with_cache(prompt, max_new_tokens, stop_ids, sample)
        else:
            tokens = self._generate_without_cache(prompt, max_new_tokens, stop_ids, sample)
        end = next((index for index, token in enumerate(tokens) if token in stop_ids), len(tokens))
        return tokens[:end]

    def _generate_with_cache(
        self, prompt: list[int], max_new_tokens: int, stop_ids: list[int], sample: TokenSampler
    ) -> list[int]:
        from transformers import GenerationConfig

        def keep_sampled_token(input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, float("-inf")).scatter_(1, sample(scores.float())[:, None], 0.0)

        ids = torch.tensor([prompt], device=self.device)
        greedy = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stop_ids or None, pad_token_id=0
        )
        row = self.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy,
            logits_processor=[keep_sampled_token],
        )
        return row[0, len(prompt) :].tolist()

    def _generate_without_cache(
        self, prompt: list[int], max_new_tokens: int, stop_ids: list[int], sample: TokenSampler
    ) -> list[int]:
        """Recomputes the complete sequence for every token."""
        ids = torch.tensor([prompt], device=self.device)
        for _ in range(max_new_tokens):
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            token = sample(self(ids, positions)[:, -1].float())
            ids = torch.cat((ids, token[:, None]), dim=1)
            if token.item() in stop_ids:
                break
        return ids[0, len(prompt) :].tolist()


def hf_loss_function(
    logits: Tensor, labels: Tensor | None, *_: Any, shift_labels: Tensor | None = None, **__: Any
) -> Tensor:
    """The loss that `hf(..., labels=labels)` uses here: the sum over tokens, not Transformers' mean."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("neither labels nor shift_labels is given")
        shift_labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    targets = shift_labels.flatten().to(logits.device)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


def packed_mask(hf: PreTrainedModel, method: str, positions_BT: Tensor, doc_ids_BT: Tensor) -> Any:
    """The attention mask of packed rows, in the form that `method` passes to Transformers."""
    if method == "positions":
        return None
    config = hf.config.get_text_config()
    visible_B1TT = build_attn_mask(doc_ids_BT, doc_ids_BT, window=None)
    if method == "mask":
        return _as_attention_mask(hf, visible_B1TT)
    if method == "window mask":
        return _as_attention_mask(hf, visible_B1TT & _within(max(windows_of(config).values()), positions_BT))
    masks = {}
    for layer_type in set(config.layer_types):
        masks[layer_type] = visible_B1TT
        if layer_type == "sliding_attention":
            masks[layer_type] = visible_B1TT & _within(config.sliding_window, positions_BT)
        elif layer_type == "chunked_attention":
            chunks = positions_BT // config.attention_chunk_size
            masks[layer_type] = visible_B1TT & (chunks[:, :, None] == chunks[:, None, :])[:, None]
    return {layer_type: _as_attention_mask(hf, mask) for layer_type, mask in masks.items()}


def fixed_rope_length(config: Any) -> int | None:
    """The longest row whose RoPE does not depend on row lengths; None if RoPE never depends on them."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    by_type = {value.get("rope_type", value.get("type")): value for value in nested}
    max_positions = getattr(config, "max_position_embeddings", None)
    if "longrope" in by_type:
        own = by_type["longrope"].get("original_max_position_embeddings")
        return own or getattr(config, "original_max_position_embeddings", None) or max_positions
    return max_positions if "dynamic" in by_type else None


@contextmanager
def default_generation_config(hf: PreTrainedModel) -> Iterator[None]:
    """Replaces the model's generation config with the defaults: generate() takes every unset option from it."""
    from transformers import GenerationConfig

    if not hf.can_generate():
        yield
        return
    own = hf.generation_config
    hf.generation_config = GenerationConfig()
    try:
        yield
    finally:
        hf.generation_config = own


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def _within(window: int, positions_BT: Tensor) -> Tensor:
    return (positions_BT[:, :, None] - positions_BT[:, None, :] < window)[:, None]


def _as_attention_mask(hf: PreTrainedModel, visible_B1TT: Tensor) -> Tensor:
    """Transformers passes a 4D mask to the kernel as it is: sdpa takes booleans, eager adds the mask to the scores."""
    if hf.config._attn_implementation == "sdpa":
        return visible_B1TT
    dtype = hf.get_input_embeddings().weight.dtype
    return torch.zeros_like(visible_B1TT, dtype=dtype).masked_fill(~visible_B1TT, torch.finfo(dtype).min)


def _check_boundaries(positions_BT: Tensor, doc_ids_BT: Tensor) -> None:
    """Raises unless positions restart with every document: otherwise the next document would see the one before."""
    is_new_document = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    if bool((is_new_document & (positions_BT.diff(dim=1) == 1)).any()):
        raise ValueError("positions must restart with every document of a row")


def _fill_with_mean(tensor: Tensor, old: int) -> None:
    tensor[old:] = tensor[:old].float().mean(dim=0).to(tensor.dtype)
