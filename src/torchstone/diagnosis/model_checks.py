"""Is the model what its folder says, does it keep documents apart, and is what is saved what was trained?"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import torch

from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import save_model
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.isolation import LEAK_LIMIT, MASKS, measure_leak, short_documents
from torchstone.diagnosis.loss_checks import EXACT_LIMIT, measure_loss, relative
from torchstone.diagnosis.reference import Reference
from torchstone.diagnosis.restore import restored
from torchstone.diagnosis.session import Diagnosis
from torchstone.models.decoder import EMBEDDING, HEAD
from torchstone.models.execution import ExecutionOptions
from torchstone.models.model import Model, NativeModel
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.mesh import local_world_size
from torchstone.training.step import compute_gradients, validation_loss

# Merging an adapter rounds its weights.
MERGE_LIMIT = 1e-4
# A step that moves every weight visibly.
LEARNING_RATE = 1e-2
# By default a model of more bytes is not written to the disk.
MAX_SAVED_BYTES = 4 * 2**30


def check_evaluation(diagnosis: Diagnosis) -> Finding:
    """Validation as the training loop calls it, in the middle of training."""
    diagnosis.require("batch")
    right, exact = diagnosis.loss_sums.loss, diagnosis.exact
    exact.model.train()
    losses = [validation_loss(exact.runner, [diagnosis.batch(exact)])[0] for _ in range(2)]
    repeat, error = relative(losses[1], losses[0]), relative(losses[0], right)
    values = {"loss": losses[0], "again": losses[1], "expected": right, "error": error, "limit": EXACT_LIMIT}
    text = f"loss {losses[0]:.6f} and again {losses[1]:.6f}, by definition {right:.6f}"
    if max(repeat, error) <= EXACT_LIMIT:
        return Finding("pass", text, f"{EXACT_LIMIT:g}", values=values)
    source = "training/step.py: validation_loss, models/model.py: Model.train"
    if repeat > EXACT_LIMIT:
        cause, next_step = "dropout stays on while the model is evaluated", "call model.train(False) before validation"
    else:
        diagnosis.require("loss")
        cause, next_step = "the validation loss is not that of a step, which is right", "compare how both are divided"
    return Finding("fail", text, f"{EXACT_LIMIT:g}", cause, source, next_step, values)


def check_documents(diagnosis: Diagnosis) -> Finding:
    # The scales of FP8 depend on all tokens.
    run = diagnosis.exact if diagnosis.config.training.precision.startswith("fp8") else diagnosis.run
    leak = measure_leak(run, [document.ids for document in short_documents(diagnosis)])
    values = {**leak._asdict(), "limit": LEAK_LIMIT}
    where = "a packed row" if run.data.packed else "a micro-batch"
    text = (
        f"others of {where} change a document's loss by {max(leak.from_earlier, leak.from_later):.1e}, its own later "
        f"tokens by {leak.from_future:.1e}, its first one by {leak.from_itself:.1e}"
    )
    if not leak.is_large:
        return Finding("pass", text, f"{LEAK_LIMIT:g}", values=values)
    cause = leak.describe(run)
    if diagnosis.is_explained("loss") and diagnosis.failed["loss"].cause != cause:
        # Such as labels that are shifted across documents.
        diagnosis.require("loss")
    return Finding(
        "fail", text, f"{LEAK_LIMIT:g}", cause, MASKS,
        "see whether it passes with --data.packing false, and with --model.attention eager", values,
    )  # fmt: skip


def check_saved_model(diagnosis: Diagnosis) -> Finding:
    """Trains a step, saves, loads the files into one process, and compares weights and loss."""
    diagnosis.require("replicas")
    exact, ctx = diagnosis.exact, diagnosis.ctx
    if local_world_size() < ctx.world_size:
        raise SkipCheck("the ranks are on several machines, which may have no folder in common")
    size = 4 * exact.model.parameter_count
    if size > MAX_SAVED_BYTES and not diagnosis.is_full:
        raise SkipCheck(f"writing {size / 2**30:.0f} GiB takes long: --full")
    if ctx.any_rank(2 * size > shutil.disk_usage(diagnosis.folder).free):
        raise SkipCheck(f"{diagnosis.folder} has no room for {size / 2**30:.1f} GiB: set TMPDIR")
    folder = diagnosis.folder / "saved"
    folder.mkdir(exist_ok=True)
    with restored(exact):
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
    if error <= limit and not different:
        return Finding("pass", text, f"{limit:g}", values=values)
    cause = _why_lost(exact.model, reloaded, different)
    return Finding(
        "fail", text, f"{limit:g}", cause, "checkpoint/save.py: save_model, checkpoint/weight_names.py",
        "do not train before this is repaired: what you save is not what you train", values,
    )  # fmt: skip


def take_step(diagnosis: Diagnosis, learning_rate: float) -> None:
    """An update of `exact`, outside of a schedule."""
    exact = diagnosis.exact
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
    own, config = [], diagnosis.exact.model.decoder_config
    for name, parameter in diagnosis.exact.model.named_parameters():
        for shard in local_shards(config, name, parameter.detach()):
            if shard.name not in tensors or not torch.equal(tensors[shard.name][shard.index], shard.tensor):
                own.append(shard.name)
    return list(dict.fromkeys(name for names in diagnosis.ctx.all_gather_object(own) for name in names))


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
