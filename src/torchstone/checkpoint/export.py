"""One command from a checkpoint to a Hugging Face folder, proven by loading it back.

The proof is Transformers' own: the folder is loaded with AutoModelForCausalLM, every tensor compared bit for bit with
what was meant to be written, and the logits of a fixed text with ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchstone.atomic import new_folder
from torchstone.checkpoint.load import resolve_model_folder
from torchstone.checkpoint.save import write_model_folder
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.weights import Model, load_model, weight_files

LOGITS_LIMIT = 1e-5


def export_model(source: str, target: Path, dtype: str = "float32", verify: bool = True) -> dict[str, Any]:
    """Writes `source` (run, checkpoint or folder) to `target`; returns what was written and measured."""
    folder = resolve_model_folder(source)
    if target.is_file():
        raise UsageError(f"{target} is a file", "export into a new folder")
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} exists and is not empty", "export into a new folder")
    model = load_model(folder, "sdpa", torch.device("cpu"), getattr(torch, dtype))
    tokenizer = load_tokenizer(folder)
    with new_folder(target) as work:
        write_model_folder(model, tokenizer, work)
        difference = verify_folder(work, model, tokenizer) if verify else None
    return {
        "source": str(folder),
        "folder": str(target),
        "parameters": sum(p.numel() for p in model.decoder.parameters()),
        "dtype": dtype,
        "bytes": sum(file.stat().st_size for file in weight_files(target)),
        "verified": verify,
        "max_logit_difference": difference,
    }


@torch.no_grad()
def verify_folder(folder: Path, model: Model, tokenizer: Tokenizer) -> float:
    """Loads `folder` in Transformers; the largest difference of a logit in fp32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype="auto").eval()
    state = theirs.state_dict()
    for name, parameter in model.decoder.named_parameters():
        if not torch.equal(state[model.family.theirs(name)], parameter):
            raise CheckpointError(f"{folder}: Transformers reads another {model.family.theirs(name)} than was written")
    ids = torch.tensor([tokenizer.encode("The quick brown fox jumps over the lazy dog.")[:64]])
    positions = torch.arange(ids.shape[1])[None]
    ours = model.decoder.float()(ids, positions)
    difference = (theirs.float()(ids).logits - ours).abs().max().item()
    if not difference <= LOGITS_LIMIT:
        raise CheckpointError(f"{folder}: Transformers' logits differ from ours by {difference:.2e}")
    return difference
