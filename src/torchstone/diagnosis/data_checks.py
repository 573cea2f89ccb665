"""The list of the checks of the data, in the order in which they run.

Most mistakes of users are in data, masks and templates, and no loss curve shows them: a model learns whatever it gets.
"""

from __future__ import annotations

from torchstone.diagnosis.batch_checks import check_label_shift, check_loss_tokens, check_padding
from torchstone.diagnosis.check import Check
from torchstone.diagnosis.mask_checks import (
    check_end_of_turn,
    check_loss_mask,
    check_pretokenized_mask,
    check_prompt_boundary,
    check_stop_tokens,
    check_thinking,
)
from torchstone.diagnosis.order_checks import check_data_order
from torchstone.diagnosis.row_checks import (
    check_bad_rows,
    check_control_tokens,
    check_duplicates,
    check_garbled_text,
    check_long_rows,
    check_roles,
    check_validation_leak,
)
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
