"""Mistakes of real trainers, each a small patch of the package that a test plants.

A bug is a context manager, so that a test plants it in its own process, or on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from torchstone.checkpoint import save
from torchstone.data import loader
from torchstone.data.collate import PADDING_DOC_ID, MicroBatch
from torchstone.data.encode import Encoder
from torchstone.data.loader import RunData, StepBatch
from torchstone.data.template import ChatTemplate
from torchstone.models import attention, decoder, families
from torchstone.models.decoder import Block
from torchstone.models.model import Model
from torchstone.models.rope import Rope
from torchstone.optim import build
from torchstone.optim.adamw import AdamW
from torchstone.parallel import build as parallel_build
from torchstone.parallel import fsdp, runner
from torchstone.parallel.runner import Runner, micro_batch_loss
from torchstone.training import loop, setup, step
from torchstone.tuning.lora import LoraFactors

Bug = Callable[[], AbstractContextManager[Any]]


def mean_per_micro_batch() -> Any:
    """The loss of each micro-batch is averaged, and then the averages: the accumulation bug of many trainers."""

    def forward_backward(self: Runner, batches: Sequence[MicroBatch], loss_tokens: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            count = max(1, batch.get_counts().loss_tokens)
            loss = micro_batch_loss(self.model.module, *self._inputs(batch)) / count / len(batches)
            loss.backward()
            total += loss.detach()
        return total * loss_tokens

    return patch.object(Runner, "forward_backward", forward_backward)


def last_step_dropped() -> Any:
    """An epoch ends with its last full step."""
    original = RunData.batches

    def batches(self: RunData, *args: Any, **kwargs: Any) -> Iterator[StepBatch]:
        size = self.batch_sizes.global_batch_size
        return (batch for batch in original(self, *args, **kwargs) if batch.samples == size)

    return patch.object(RunData, "batches", batches)


def last_step_divided_by_a_full_one() -> Any:
    """Every micro-step counts as one of a full step, as where the loss is divided by a constant number of them."""
    original = RunData.step_batch

    def step_batch(self: RunData, samples: Any, indices: np.ndarray, *args: Any) -> StepBatch:
        batch = original(self, samples, indices, *args)
        full = -(-self.batch_sizes.global_batch_size // (self.batch_sizes.micro_batch_rows or 1))
        return replace(batch, loss_tokens=batch.loss_tokens * full // len(batch.micro_batches))

    return patch.object(RunData, "step_batch", step_batch)


def mean_per_rank() -> Any:
    """Every rank divides by its own loss tokens, and the ranks are averaged."""
    original = RunData.step_batch

    def step_batch(self: RunData, samples: Any, indices: Any, first: int, dp_rank: int = 0, dp: int = 1) -> StepBatch:
        batch = original(self, samples, indices, first, dp_rank, dp)
        own = sum(micro_batch.get_counts().loss_tokens for micro_batch in batch.micro_batches)
        return replace(batch, loss_tokens=max(1, own * dp))

    return patch.object(RunData, "step_batch", step_batch)


def labels_shifted_twice() -> Any:
    """The collation shifts labels, and the loss shifts them again."""
    return _change_micro_batches(lambda batch, _: _shift(batch))


def labels_shifted_twice_in_the_loss() -> Any:
    def shifted_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        return original(logits_BTV[:, :-1], labels_BT[:, 1:])

    original = runner.token_loss_sum
    return patch.object(runner, "token_loss_sum", shifted_sum)


def labels_on_padding() -> Any:
    """Padding has the pad token as its label: the wrong id is ignored in the loss."""

    def pad(batch: MicroBatch, pad_id: int) -> MicroBatch:
        return batch._replace(labels=torch.where(batch.doc_ids == PADDING_DOC_ID, pad_id, batch.labels), counts=None)

    return _change_micro_batches(pad)


def pad_id_left_out_of_the_loss() -> Any:
    """Targets with the id of the pad token are left out, though it is also the token that ends a turn."""
    original, collate, pad_ids = runner.token_loss_sum, loader.collate, [0]

    def without_pad(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        return original(logits_BTV, labels_BT.masked_fill(labels_BT == pad_ids[-1], -100))

    def remember(rows: Any, pad_id: int, shapes: Any) -> MicroBatch:
        pad_ids.append(pad_id)
        return collate(rows, pad_id, shapes)

    return _together(patch.object(runner, "token_loss_sum", without_pad), patch.object(loader, "collate", remember))


def loss_mask_inverted() -> Any:
    """The prompt is trained, and the answer masked."""
    original = Encoder._loss_mask
    return patch.object(Encoder, "_loss_mask", lambda *args: ~original(*args))


def end_of_turn_masked() -> Any:
    """The span to train on ends before the token that ends the answer."""
    original = ChatTemplate._span

    def span(*args: Any) -> tuple[int, int]:
        start, end = original(*args)
        return start, end - len("<|end|>")

    return patch.object(ChatTemplate, "_span", span)


def documents_see_each_other() -> Any:
    """Attention gets no document ids."""
    original = Runner._inputs

    def inputs(self: Runner, batch: MicroBatch) -> Any:
        ids, positions, _, *rest = original(self, batch)
        return ids, positions, None, *rest

    return patch.object(Runner, "_inputs", inputs)


def later_tokens_are_seen() -> Any:
    original = attention.build_attn_mask

    def both_ways(query: Tensor, key: Tensor, window: int | None) -> Tensor:
        return original(query, key, window) | (query[:, :, None] == key[:, None, :])[:, None]

    return patch.object(attention, "build_attn_mask", both_ways)


def head_lost_on_save() -> Any:
    """The checkpoint says that the head is tied, and leaves it out."""
    original = save.full_unfused_parameters

    def write_config(hf_config: dict[str, Any], *args: Any) -> None:
        config(hf_config | {"tie_word_embeddings": True}, *args)

    config = save.write_hf_config
    tensors = patch.object(
        save, "full_unfused_parameters",
        lambda model: {name: tensor for name, tensor in original(model).items() if name != "head.weight"},
    )  # fmt: skip
    return _together(tensors, patch.object(save, "write_hf_config", write_config))


def rope_scaling_forgotten() -> Any:
    original = families.Family.decoder_config

    def without_scaling(self: Any, hf_config: dict[str, Any]) -> Any:
        config = original(self, hf_config)
        layers = [
            replace(
                layer,
                rope=layer.rope and Rope(layer.rope.rope_theta, partial_rotary_factor=layer.rope.partial_rotary_factor),
            )
            for layer in config.layers
        ]
        return replace(config, layers=tuple(layers))

    return patch.object(families.Family, "decoder_config", without_scaling)


def sliding_windows_ignored() -> Any:
    original = families.Family.decoder_config

    def without_windows(self: families.Family, *args: Any) -> Any:
        config = original(self, *args)
        return replace(config, layers=tuple(replace(layer, window=None) for layer in config.layers))

    return patch.object(families.Family, "decoder_config", without_windows)


def same_data_on_all_ranks() -> Any:
    """Every rank takes the rows of rank 0."""
    original = RunData.step_batch

    def step_batch(self: RunData, samples: Any, indices: Any, first: int, dp_rank: int = 0, dp: int = 1) -> StepBatch:
        return original(self, samples, indices, first, 0, dp)

    return patch.object(RunData, "step_batch", step_batch)


def samples_dropped_above_rank_0() -> Any:
    """All ranks but the first lose the last row of each micro-batch."""
    original = RunData.step_batch

    def step_batch(self: RunData, samples: Any, indices: Any, first: int, dp_rank: int = 0, dp: int = 1) -> StepBatch:
        batch = original(self, samples, indices, first, dp_rank, dp)
        if dp_rank > 0:
            batch.micro_batches = [_without_last_row(each) for each in batch.micro_batches]
        return batch

    return patch.object(RunData, "step_batch", step_batch)


def schedule_advances_per_micro_step() -> Any:
    """The scheduler is stepped with every micro-batch."""
    original, start = loop.lr_at_step, loop._start_step
    micro_steps = [1]

    def start_step(run: Any, batch: StepBatch, *args: Any) -> Any:
        micro_steps[0] = len(batch.micro_batches)
        return start(run, batch, *args)

    return _together(
        patch.object(loop, "_start_step", start_step),
        patch.object(loop, "lr_at_step", lambda n, total, optim: original(n * micro_steps[0], total, optim)),
    )


def weight_decay_on_norms() -> Any:
    return patch.object(build, "parameter_kind", lambda name, parameter, kinds: kinds.get(name, "matrix"))


def bf16_reduction() -> Any:
    """FSDP2 reduces in bf16; a single process adds micro-batches in bf16."""
    original = fsdp.mixed_precision_policy

    def policy(precision: str) -> Any:
        return replace(original(precision), reduce_dtype=torch.bfloat16)

    forward_backward = Runner.forward_backward

    def in_bf16(self: Runner, batches: Sequence[MicroBatch], loss_tokens: int) -> Tensor:
        if self.ctx.world_size > 1:
            return forward_backward(self, batches, loss_tokens)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            total += forward_backward(self, [batch], loss_tokens)
            for _, parameter in self.model.trained_parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.bfloat16().to(parameter.grad.dtype)
        return total

    return _together(
        patch.object(parallel_build, "mixed_precision_policy", policy),
        patch.object(Runner, "forward_backward", in_bf16),
    )


def same_seed_on_all_ranks() -> Any:
    manual_seed = torch.manual_seed
    return patch.object(setup.torch, "manual_seed", lambda seed: manual_seed(0))


def gradients_not_reduced() -> Any:
    """The model is never wrapped: every rank trains on its own rows."""
    return patch.object(parallel_build, "apply_fsdp", lambda *args: None)


def norm_not_reduced_over_tp() -> Any:
    """Each tp rank keeps its part of the gradient of the first norm."""
    forward_backward = Runner.forward_backward

    def keep_part(self: Runner, *args: Any) -> Tensor:
        loss = forward_backward(self, *args)
        gradient = self.model.module.layers["0"].attention_norm.weight.grad
        gradient.to_local().mul_(1 + self.ctx.tp_rank)
        return loss

    return patch.object(Runner, "forward_backward", keep_part)


def frozen_layer() -> Any:
    """The second layer does not pass gradients to its own weights."""
    original = Block.__init__

    def init(self: Block, config: Any, layer_spec: Any, layer_idx: int, *args: Any) -> None:
        original(self, config, layer_spec, layer_idx, *args)
        if layer_idx == 1:
            self.requires_grad_(False)

    return patch.object(Block, "__init__", init)


def detached_layer() -> Any:
    """What the attention of a layer returns is cut off from the loss."""
    original = decoder.Attention.forward

    def forward(self: decoder.Attention, *args: Any, **kwargs: Any) -> Tensor:
        out = original(self, *args, **kwargs)
        return out.detach() if self.layer_idx == 1 else out

    return patch.object(decoder.Attention, "forward", forward)


def detached_residual() -> Any:
    """The forward pass is right, but no gradient passes the residual connection of attention."""

    def forward(self: Block, x_BTD: Tensor, inputs: Any, kv_cache: Any = None) -> Tensor:
        x_BTD = x_BTD.detach() + self.attention(self.attention_norm(x_BTD), inputs, kv_cache)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))

    return patch.object(Block, "forward", forward)


def only_the_first_batch_is_validated() -> Any:
    original = RunData.validation_batches
    return patch.object(RunData, "validation_batches", lambda *args: islice(original(*args), 1))


def the_same_samples_in_every_step() -> Any:
    original = RunData.batches

    def batches(self: RunData, *args: Any, **kwargs: Any) -> Iterator[StepBatch]:
        first = None
        for batch in original(self, *args, **kwargs):
            first = first or batch
            yield first if batch.samples == first.samples else batch

    return patch.object(RunData, "batches", batches)


def adapters_scaled_by_a_quarter() -> Any:
    original = LoraFactors.__init__

    def init(self: LoraFactors, linear: Any, spec: Any, *args: Any) -> None:
        original(self, linear, spec._replace(scale=spec.scale / 4), *args)

    return patch.object(LoraFactors, "__init__", init)


def dropout_never_drops() -> Any:
    def train(self: Model, mode: bool = True) -> None:
        for part in self.model_parts:
            part.train(False)

    return patch.object(Model, "train", train)


def copies_of_norms_are_never_refreshed() -> Any:
    def update_copies(self: AdamW) -> None:
        for master, copy in self.copies.items():
            if master.dim() > 1:
                copy.copy_(master)

    return patch.object(AdamW, "update_copies", torch.no_grad()(update_copies))


def dropout_in_evaluation() -> Any:
    """Modules stay in training mode."""

    def train(self: Model, mode: bool = True) -> None:
        for part in self.model_parts:
            part.train(True)

    return patch.object(Model, "train", train)


def no_master_weights() -> Any:
    """bf16 weights are updated in bf16."""
    return patch.dict(fsdp.PARAM_DTYPE, {"bf16": torch.bfloat16})


def wrong_chunked_loss() -> Any:
    """The last chunk of tokens is left out."""
    from torchstone.diagnosis import kernel_checks

    original = kernel_checks.chunked_loss_sum

    def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, **kwargs: Any) -> Tensor:
        count = labels.shape[1] // chunk_tokens * chunk_tokens
        return original(hidden[:, :count], weight, labels[:, :count], chunk_tokens, **kwargs)

    return patch.object(kernel_checks, "chunked_loss_sum", chunked)


def update_never_applied() -> Any:
    """The optimizer steps, but the weights that are computed with stay."""
    return patch.object(step.AdamW, "clip_and_step", lambda self, coefficient: None)


def _change_micro_batches(change: Callable[[MicroBatch, int], MicroBatch]) -> Any:
    original = loader.collate
    return patch.object(loader, "collate", lambda rows, pad_id, shapes: change(original(rows, pad_id, shapes), pad_id))


def _shift(batch: MicroBatch) -> MicroBatch:
    labels, doc_ids = batch.labels.roll(-1, dims=1), batch.doc_ids
    is_same = doc_ids == doc_ids.roll(-1, dims=1)
    is_same[:, -1] = False
    return batch._replace(labels=torch.where(is_same, labels, -100), counts=None)


def _without_last_row(batch: MicroBatch) -> MicroBatch:
    if len(batch.ids) == 1:
        return batch
    ids, labels, positions, doc_ids = (tensor[:-1] for tensor in batch.tensors)
    return MicroBatch(ids, labels, positions, doc_ids)


@contextmanager
def _together(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield
