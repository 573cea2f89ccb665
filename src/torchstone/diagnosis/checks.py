"""The list of all checks, in the order in which they run: what later checks rely on comes first."""

from __future__ import annotations

from torchstone.diagnosis.adapter_checks import check_adapters
from torchstone.diagnosis.batch_checks import check_label_shift, check_loss_tokens, check_padding
from torchstone.diagnosis.check import Check
from torchstone.diagnosis.gradient_checks import check_frozen, check_gradients, check_reduction
from torchstone.diagnosis.kernel_checks import check_attention_kernel, check_fused_loss, check_mixed_precision
from torchstone.diagnosis.learning_checks import check_learning_rate, check_one_sample, check_small_batch
from torchstone.diagnosis.loss_checks import check_batch, check_loss
from torchstone.diagnosis.mask_checks import (
    check_end_of_turn,
    check_loss_mask,
    check_pretokenized_mask,
    check_prompt_boundary,
    check_stop_tokens,
    check_thinking,
)
from torchstone.diagnosis.model_checks import check_documents, check_evaluation, check_finite, check_saved_model
from torchstone.diagnosis.optimizer_checks import (
    check_dtypes,
    check_schedule,
    check_swallowed_updates,
    check_weight_decay,
)
from torchstone.diagnosis.order_checks import check_data_order
from torchstone.diagnosis.rank_checks import check_random_numbers, check_replicas
from torchstone.diagnosis.row_checks import (
    check_bad_rows,
    check_control_tokens,
    check_duplicates,
    check_garbled_text,
    check_long_rows,
    check_roles,
    check_validation_leak,
)
from torchstone.diagnosis.split_checks import check_accumulation, check_last_step, check_packing, check_world_size
from torchstone.diagnosis.tokenizer_checks import (
    check_double_bos,
    check_generation_prompt,
    check_id_range,
    check_model_tokenizer,
    check_pretokenized,
    check_round_trip,
    check_template_tokens,
    check_token_embeddings,
    check_unused_tokens,
)
from torchstone.diagnosis.transformers_check import check_transformers
from torchstone.diagnosis.update_check import check_update

# Most mistakes of users are in data, masks and templates, and no loss curve shows them: a model learns whatever it
# gets.
DATA_CHECKS: tuple[Check, ...] = (
    Check(
        "bad_rows", "data", "critical",
        "all rows are read and rendered",
        "Training stops at the first one, or is on other data than the files have.",
        check_bad_rows,
    ),
    Check(
        "label_shift", "data", "critical",
        "labels in rows of token ids are not shifted, and masked with -100",
        "The model learns to predict another position: the loss falls, but what it writes is broken.",
        check_label_shift,
    ),
    Check(
        "padding", "data", "critical",
        "rows of token ids do not end with trained padding",
        "The loss counts padding, and the model learns to write it.",
        check_padding,
    ),
    Check(
        "loss_tokens", "data", "critical",
        "samples have tokens to train on",
        "Training on nothing looks like training: it runs, and learns nothing.",
        check_loss_tokens,
    ),
    Check(
        "data_order", "data", "critical",
        "an epoch has every sample once, in a new order, and a resumed run goes on where it was",
        "Some samples are never seen, and others too often.",
        check_data_order,
    ),
    Check(
        "loss_mask", "data", "critical",
        "the answers are trained, and nothing else",
        "The model learns to write questions, or only a part of the answers.",
        check_loss_mask,
    ),
    Check(
        "end_of_turn", "data", "critical",
        "answers and texts end with a trained end token",
        "The model does not learn to stop.",
        check_end_of_turn,
    ),
    Check(
        "stop_tokens", "data", "critical",
        "generation stops at the tokens that end an answer",
        "The model writes on after its answer.",
        check_stop_tokens,
    ),
    Check(
        "prompt_boundary", "data", "major",
        "prompts have the same tokens in training and in generation",
        "The model is asked with tokens that it has not seen.",
        check_prompt_boundary,
    ),
    Check(
        "thinking", "data", "minor",
        "no empty block of reasoning is trained",
        "The model learns to leave out its reasoning.",
        check_thinking,
    ),
    Check(
        "double_bos", "data", "major",
        "texts begin with at most one BOS token",
        "The model is trained on a beginning that it does not get when it is used.",
        check_double_bos,
    ),
    Check(
        "template_tokens", "data", "critical",
        "special tokens of the chat template are tokens",
        "Turns begin and end with ordinary text, and nothing ends an answer.",
        check_template_tokens,
    ),
    Check(
        "generation_prompt", "data", "major",
        "the header of an answer is in the generation prompt",
        "The model learns to write the header, and is not prompted with it when it is used.",
        check_generation_prompt,
    ),
    Check(
        "control_tokens", "data", "major",
        "no message has a control token in its text",
        "A turn begins or ends in the middle of a message.",
        check_control_tokens,
    ),
    Check(
        "id_range", "data", "critical",
        "every id has an embedding",
        "The model cannot read the id, or reads another token.",
        check_id_range,
    ),
    Check(
        "model_tokenizer", "data", "critical",
        "the tokenizer is that of the model",
        "What the model knows is about other tokens.",
        check_model_tokenizer,
    ),
    Check(
        "pretokenized", "data", "critical",
        "ids of the data are from this tokenizer",
        "What the model knows is about other tokens.",
        check_pretokenized,
    ),
    Check(
        "pretokenized_mask", "data", "critical",
        "rows of ids train on the answers",
        "The model learns to write questions, or never learns how answers begin.",
        check_pretokenized_mask,
    ),
    Check(
        "round_trip", "data", "critical",
        "the tokens of a row have its text, and no other",
        "The model is trained on other texts than the files have, and can write nothing that its tokens do not have.",
        check_round_trip,
    ),
    Check(
        "unused_tokens", "data", "minor",
        "tokens that were added occur in the data",
        "Their embeddings stay as they were initialized.",
        check_unused_tokens,
    ),
    Check(
        "token_embeddings", "data", "major",
        "special tokens in the data have embeddings of their own",
        "The model cannot tell these tokens apart.",
        check_token_embeddings,
    ),
    Check(
        "duplicates", "data", "major",
        "rows differ",
        "What is repeated is learned by heart.",
        check_duplicates,
    ),
    Check(
        "roles", "data", "critical",
        "conversations begin with a question and end with an answer",
        "The model learns to ask instead of to answer.",
        check_roles,
    ),
    Check(
        "validation_leak", "data", "critical",
        "no validation row is a training row",
        "The validation loss is too good, and chooses the wrong checkpoint.",
        check_validation_leak,
    ),
    Check(
        "long_rows", "data", "major",
        "nearly all rows are used, and no answer is cut",
        "The model is trained on another mixture than the files have, or on answers without an end.",
        check_long_rows,
    ),
    Check(
        "garbled_text", "data", "minor",
        "texts were decoded and escaped once",
        "The model learns to write what was broken.",
        check_garbled_text,
    ),
)  # fmt: skip

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
        "parameters, gradients and moments have the dtypes of training.precision; the forward pass uses the updated "
        "weights",
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
