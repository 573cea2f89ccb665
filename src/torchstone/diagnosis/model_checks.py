"""Is the model finite, does it keep documents apart, is validation right, and is what is saved what was trained?"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace

import torch

from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import save_model
from torchstone.diagnosis.batch_contents import step_documents
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.checked_step import SelectedSamples, select_data
from torchstone.diagnosis.gradients import compute_step
from torchstone.diagnosis.isolation import LEAK_LIMIT, MASKS, measure_leak, short_documents
from torchstone.diagnosis.loss_checks import EXACT_LIMIT, measure_loss
from torchstone.diagnosis.reference import Reference, relative
from torchstone.diagnosis.restore import restore_after
from torchstone.diagnosis.session import Diagnosis
from torchstone.models.decoder import EMBEDDING, HEAD
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model, NativeModel
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import local_world_size
from torchstone.rng import get_rng_states
from torchstone.training.checks import WHAT_TO_TRY, merge_names, non_finite_names
from torchstone.training.loop import validate
from torchstone.training.replay import find_origin
from torchstone.training.step import compute_gradients

# Merging an adapter rounds its weights.
MERGE_LIMIT = 1e-4
# A step that moves every weight visibly.
LEARNING_RATE = 1e-2
# By default a model of more bytes is not written to the disk.
MAX_SAVED_BYTES = 4 * 2**30
MAX_NAMES = 3


def check_finite(diagnosis: Diagnosis) -> Finding:
    """If weights, loss or gradients are not finite, no other check of the model says anything."""
    run, limit = diagnosis.run, "all are finite"
    tensors = [(name, p.detach(), "") for name, p in run.model.named_parameters() if p.is_floating_point()]
    bad = non_finite_names(run.runner, tensors)
    values = {"bad_tensors": float(len(bad))}
    if bad:
        folder = run.config.model.path
        return Finding(
            "fail", f"{len(bad)} of {len(tensors)} tensors have NaN or Inf", limit,
            f"the weights that are loaded are not finite: {', '.join(bad[:MAX_NAMES])}",
            f"model.path {folder}" if folder is not None else "model.init_std",
            "use an earlier checkpoint, or load the model again from where it came from", values,
        )  # fmt: skip
    result = compute_step(diagnosis, run)
    values |= {"loss": result.loss, "grad_norm": result.grad_norm}
    text = f"{len(tensors)} tensors are finite, loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
    finding = Finding("pass", text, limit, values=values)
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return finding
    origin = find_origin(run.runner, diagnosis.batch(run), get_rng_states(diagnosis.device))
    if origin is None:
        cause = "numbers are finite when the step is repeated without torch.compile"
        return finding.with_cause(cause, "model.compile", WHAT_TO_TRY)
    cause = f"the first module that is not finite is {origin}"
    return finding.with_cause(cause, "training.precision, model.attention", WHAT_TO_TRY)


def check_evaluation(diagnosis: Diagnosis) -> Finding:
    """Validation by the training loop, in the middle of training, on samples of which the last batch has fewer."""
    diagnosis.require("batch")
    step, dp = diagnosis.step, diagnosis.ctx.dims.dp
    held_out = SelectedSamples(step.data.train, step.labelled[: len(step.labelled) // 2 + 1])
    size, rows = len(held_out) // 2 + 1, step.data.batch_sizes.micro_batch_rows
    data = select_data(step.data, SelectedSamples(step.data.train, step.indices), size, rows, dp)
    documents = step_documents(replace(data, train=held_out), range(len(held_out)))
    right = diagnosis.reference.losses(documents).loss
    with diagnosis.trial(diagnosis.fp32_run, replace(data, validation={"": held_out}), {}) as trial:
        trial.model.train()
        losses = [validate(trial) for _ in range(2)]
    repeat, error = relative(losses[1], losses[0]), relative(losses[0], right)
    values = {"loss": losses[0], "again": losses[1], "expected": right, "error": error, "limit": EXACT_LIMIT}
    batches = -(-len(held_out) // size)
    text = f"loss of {batches} batches {losses[0]:.6f} and again {losses[1]:.6f}, expected {right:.6f}"
    finding = Finding("pass", text, f"{EXACT_LIMIT:g}", values=values)
    if max(repeat, error) <= EXACT_LIMIT:
        return finding
    source = "training/loop.py: validate, training/step.py: validation_loss, models/model.py: Model.train"
    if repeat > EXACT_LIMIT:
        cause, next_step = "dropout stays on while the model is evaluated", "call model.train(False) before validation"
    else:
        diagnosis.require("loss")
        cause = "the validation loss is not the sum over all validation rows divided by their loss tokens"
        next_step = "compare its batches with the rows of data.validation_path or data.validation_split"
    return finding.with_cause(cause, source, next_step)


def check_documents(diagnosis: Diagnosis) -> Finding:
    # The scales of FP8 depend on all tokens.
    run = diagnosis.fp32_run if diagnosis.config.training.precision.startswith("fp8") else diagnosis.run
    documents = short_documents(diagnosis)
    leak = measure_leak(run, [document.ids for document in documents])
    if leak.from_itself <= LEAK_LIMIT:
        raise SkipCheck("the loss of a document does not depend on its first token, so it would not show a leak")
    values = {**leak._asdict(), "limit": LEAK_LIMIT}
    others = f"{max(leak.from_earlier, leak.from_later):.1e} when the other {len(documents) - 1} documents change, "
    text = (
        f"a document's loss changes by {others if len(documents) > 1 else ''}{leak.from_future:.1e} when its later "
        f"tokens change, {leak.from_itself:.1e} when its first token changes"
    )
    finding = Finding("pass", text, f"{LEAK_LIMIT:g}", values=values)
    if not leak.is_large:
        return finding
    cause = leak.describe(run)
    if diagnosis.is_loss_explained and diagnosis.failed["loss"].cause != cause:
        # Such as labels that are shifted across documents.
        diagnosis.require("loss")
    next_step = "see whether it passes with --data.packing false, and with --model.attention eager"
    return finding.with_cause(cause, MASKS, next_step)


def check_saved_model(diagnosis: Diagnosis) -> Finding:
    """Trains a step, saves, loads the files into one process, and compares weights and loss."""
    diagnosis.require("replicas")
    exact, ctx = diagnosis.fp32_run, diagnosis.ctx
    if local_world_size() < ctx.world_size:
        raise SkipCheck("the ranks are on several machines, which may have no folder in common")
    size = 4 * exact.model.parameter_count
    if size > MAX_SAVED_BYTES and not diagnosis.is_full:
        raise SkipCheck(f"writing {size / 2**30:.0f} GiB takes long: --full")
    if ctx.any_rank(2 * size > shutil.disk_usage(diagnosis.folder).free):
        raise SkipCheck(f"{diagnosis.folder} has no room for {size / 2**30:.1f} GiB: set TMPDIR")
    folder = diagnosis.folder / "saved"
    folder.mkdir(exist_ok=True)
    with restore_after(exact):
        take_step(diagnosis, LEARNING_RATE)
        loss = measure_loss(diagnosis, exact)
        save_model(exact.model, folder, ctx)
        ctx.barrier()
        execution = ExecutionOptions(implementation=exact.model.implementation, attention="eager", loss="full")
        reloaded = load_model(folder, diagnosis.device, execution=execution)
        reloaded.train(False)
        different = [] if exact.model.tuning is not None else _different_tensors(diagnosis, reloaded)
        again = Reference(reloaded, diagnosis.device, exact.data.pad_id, ctx).losses(diagnosis.documents).loss
    if not different:
        # The same weights: a difference would be that of another check.
        diagnosis.require("batch", "loss")
    error, limit = relative(again, loss), EXACT_LIMIT if exact.model.tuning is None else MERGE_LIMIT
    values = {"loss": loss, "reloaded_loss": again, "error": error, "limit": limit, "different": float(len(different))}
    text = f"after a step: loss {loss:.6f}, saved and loaded again {again:.6f}"
    finding = Finding("pass", text, f"{limit:g}", values=values)
    if error <= limit and not different:
        return finding
    return finding.with_cause(
        _why_lost(exact.model, reloaded, different),
        "checkpoint/save.py: save_model, checkpoint/weight_names.py",
        "do not train before this is repaired: what you save is not what you train",
    )


def take_step(diagnosis: Diagnosis, learning_rate: float) -> None:
    """Updates `fp32_run` once, outside of a schedule."""
    exact = diagnosis.fp32_run
    exact.optimizer.reset_state()
    exact.model.train(False)
    result = compute_gradients(exact.runner, diagnosis.batch(exact), 1)
    for group in exact.optimizer.param_groups:
        group["lr"] = learning_rate
    exact.optimizer.clip_and_step(torch.ones_like(result.sums[1]))
    exact.optimizer.zero_grad(set_to_none=True)


def _different_tensors(diagnosis: Diagnosis, reloaded: Model) -> list[str]:
    """The tensors whose bits are not those that some rank holds."""
    tensors = {name: parameter.detach() for name, parameter in reloaded.named_parameters()}
    own, config = [], diagnosis.fp32_run.model.decoder_config
    for name, parameter in diagnosis.fp32_run.model.named_parameters():
        for shard in local_shards(config, name, parameter.detach()):
            if shard.name not in tensors or not torch.equal(tensors[shard.name][shard.index], shard.tensor):
                own.append(shard.name)
    return merge_names(diagnosis.ctx, own)


def _why_lost(model: Model, reloaded: Model, different: Sequence[str]) -> str:
    if isinstance(model, NativeModel) and isinstance(reloaded, NativeModel):
        was_tied, is_tied = model.decoder_config.tied, reloaded.decoder_config.tied
        if was_tied != is_tied:
            then, now = ("tied", "not tied") if was_tied else ("not tied", "tied")
            return f"the head is {then} to the embedding in training, and {now} after loading: its weights are lost"
        weights = dict(reloaded.named_parameters())
        if not was_tied and HEAD in different and torch.equal(weights[HEAD], weights[EMBEDDING]):
            return "the head is not saved: after loading it is the embedding"
        if was_tied and different == [HEAD]:
            return "the head is tied in training, but saved as a tensor of its own"
    if different:
        names = ", ".join(different[:3])
        return f"{len(different)} tensors differ after loading, such as {names}"
    return "all tensors are the same, but the loaded model computes something else: see config.json in the saved folder"
