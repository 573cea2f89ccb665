"""The list of all checks, in the order in which they run: what later checks rely on comes first."""

from __future__ import annotations

from torchstone.diagnosis.adapter_checks import check_adapters
from torchstone.diagnosis.check import Check
from torchstone.diagnosis.data_checks import DATA_CHECKS
from torchstone.diagnosis.finite_check import check_finite
from torchstone.diagnosis.gradient_checks import check_frozen, check_gradients, check_reduction, check_replicas
from torchstone.diagnosis.kernel_checks import check_attention_kernel, check_fused_loss, check_mixed_precision
from torchstone.diagnosis.learning_checks import check_learning_rate, check_one_sample, check_small_batch
from torchstone.diagnosis.loss_checks import check_batch, check_loss
from torchstone.diagnosis.model_checks import check_documents, check_evaluation, check_saved_model
from torchstone.diagnosis.optimizer_checks import (
    check_dtypes,
    check_schedule,
    check_swallowed_updates,
    check_weight_decay,
)
from torchstone.diagnosis.rank_checks import check_random_numbers
from torchstone.diagnosis.split_checks import check_accumulation, check_last_step, check_packing, check_world_size
from torchstone.diagnosis.transformers_check import check_transformers
from torchstone.diagnosis.update_check import check_update

CHECKS: tuple[Check, ...] = (
    *DATA_CHECKS,
    Check(
        "finite", "model", "critical",
        "weights, loss and gradients are finite",
        "Nothing can be trained from NaN.",
        check_finite,
    ),
    Check(
        "batch", "step", "critical",
        "every document of a step is in one micro-batch of one rank, with its labels shifted once",
        "The model is trained on other data than the sampler drew: samples are lost, repeated or mislabelled.",
        check_batch,
    ),
    Check(
        "transformers", "model", "critical",
        "the model computes what Transformers computes from the same folder, forward and backward",
        "The model that you train is not the one that was pretrained, and what you save is not what others load.",
        check_transformers,
    ),
    Check(
        "loss", "step", "critical",
        "the loss of a step is the sum of its token losses divided by its loss tokens",
        "Some tokens count more than others, so something else is optimized than you think.",
        check_loss,
    ),
    Check(
        "adapters", "model", "critical",
        "an adapter adds alpha / rank x B A x, with dropout only in training",
        "The adapter does something else where it is loaded.",
        check_adapters,
    ),
    Check(
        "documents", "model", "critical",
        "no document sees another one, and no token a later one",
        "The model learns to rely on what it will not see when it is used.",
        check_documents,
    ),
    Check(
        "fused_loss", "step", "critical",
        "the chunked loss, and Liger's if it is used, are the cross-entropy of the logits",
        "A fast loss trains something else.",
        check_fused_loss,
    ),
    Check(
        "dtypes", "optimizer", "critical",
        "parameters, gradients and moments have the dtypes of training.precision; updated weights are computed with",
        "Small updates are lost to rounding.",
        check_dtypes,
    ),
    Check(
        "gradients", "backward", "critical",
        "the gradients are those of the loss, in every tensor, and so is their norm",
        "Updates go elsewhere than downhill.",
        check_gradients,
    ),
    Check(
        "frozen", "backward", "critical",
        "everything that should be trained gets a gradient",
        "A part of the model stays as it was.",
        check_frozen,
    ),
    Check(
        "reduction", "backward", "major",
        "gradients are summed in fp32 over micro-steps and ranks",
        "Small gradients are lost beside large ones.",
        check_reduction,
    ),
    Check(
        "replicas", "ranks", "critical",
        "ranks that hold the same shard have the same gradients, and the same weights after a step",
        "Ranks train different models, and one of them is saved.",
        check_replicas,
    ),
    Check(
        "packing", "step", "critical",
        "documents have the same loss and gradients packed in one row and in rows of their own",
        "Packing changes what is learned.",
        check_packing,
    ),
    Check(
        "accumulation", "step", "critical",
        "the number of micro-steps changes neither loss nor gradients",
        "The same settings train differently on a device with another memory.",
        check_accumulation,
    ),
    Check(
        "world_size", "step", "critical",
        "the number of ranks changes neither loss nor gradients",
        "The same settings train differently on another number of devices.",
        check_world_size,
    ),
    Check(
        "last_step", "step", "major",
        "the steps of an epoch have one sample after another, and the last, partial one has all that are left",
        "Samples at the end of an epoch are lost, or count more or less than others.",
        check_last_step,
    ),
    Check(
        "evaluation", "model", "major",
        "the validation loss is that of all its rows per token, and the same when it is computed again",
        "Validation is noisy or wrong, and the wrong checkpoint counts as the best.",
        check_evaluation,
    ),
    Check(
        "attention_kernel", "model", "critical",
        "the attention kernel computes what eager attention computes, also backward",
        "A kernel trains another model than the one that is evaluated.",
        check_attention_kernel,
    ),
    Check(
        "mixed_precision", "step", "major",
        "loss and gradients in the precision of the run are near those in fp32",
        "Rounding, or a kernel, changes what is learned.",
        check_mixed_precision,
    ),
    Check(
        "random_numbers", "ranks", "major",
        "ranks with different rows draw different random numbers, ranks with the same rows the same",
        "Dropout is weaker than configured, or differs within one model.",
        check_random_numbers,
    ),
    Check(
        "update", "optimizer", "critical",
        "an update is what AdamW makes of the clipped gradients",
        "Weights go elsewhere than the settings of the optimizer say.",
        check_update,
    ),
    Check(
        "weight_decay", "optimizer", "major",
        "weights decay as optim.weight_decay and optim.no_decay say, and no others",
        "Norms shrink, or nothing does.",
        check_weight_decay,
    ),
    Check(
        "schedule", "optimizer", "major",
        "the learning rate of each step is that of the schedule",
        "Warm-up and decay end too early or too late.",
        check_schedule,
    ),
    Check(
        "swallowed_updates", "optimizer", "minor",
        "updates at the peak learning rate change the weights",
        "Training stands still where updates are rounded away.",
        check_swallowed_updates,
    ),
    Check(
        "saved_model", "model", "critical",
        "the saved model, loaded again, is the trained one",
        "What you evaluate and publish is not what you trained.",
        check_saved_model,
    ),
    Check(
        "learning_rate", "learning", "major",
        "the learning rate is not far above the one at which the loss diverges",
        "The loss rises, or stays high.",
        check_learning_rate,
    ),
    Check(
        "one_sample", "learning", "critical",
        "the model overfits one sample",
        "Something between the loss and the weights is broken.",
        check_one_sample,
    ),
    Check(
        "small_batch", "learning", "critical",
        "the model overfits a few samples",
        "Samples disturb each other, or too little is trained.",
        check_small_batch,
    ),
)  # fmt: skip
