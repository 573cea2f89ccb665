"""One command from a checkpoint of any layout to a Hugging Face folder, proven by loading it back.

Tensors go from file to file one at a time, so a model need not fit in memory to be written; the proof loads it.

The proof is Transformers' own: the folder is loaded with AutoModelForCausalLM, every tensor compared bit for bit with
what was meant to be written, and the logits of a fixed text with ours.
"""

from __future__ import annotations

import math
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from torchstone.atomic import new_folder
from torchstone.checkpoint.load import resolve_model_folder
from torchstone.checkpoint.save import write_beside
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.decoder import Decoder
from torchstone.models.execution import Execution
from torchstone.models.model import GENERATION_FILE, Model, Native, write_config
from torchstone.models.opening import load_model, open_pieces, why_not_native
from torchstone.models.slices import WEIGHTS, slice_files
from torchstone.models.tensor_files import TensorFile
from torchstone.models.weights import read_shape, stream_weights, weight_files

CPU = torch.device("cpu")
# Of the largest logit, or of one where all are smaller.
LOGITS_LIMIT = 1e-5


def export_model(
    source: str, target: Path, dtype: str = "auto", verify: bool = True, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Writes `source` (run, checkpoint of any layout, or folder) to `target`; returns what was written and measured."""
    folder = resolve_model_folder(source)
    if target.is_file():
        raise UsageError(f"{target} is a file", "export into a new folder")
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} exists and is not empty", "export into a new folder")
    execution = Execution(trust_remote_code=trust_remote_code)
    numbers = stored_dtype(folder) if dtype == "auto" else getattr(torch, dtype)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    native = why_not_native(folder, execution) is None
    with new_folder(target) as work:
        if native:
            _stream(folder, numbers, work)
        else:
            load_model(folder, CPU, numbers, execution).save(work)
        write_beside(tokenizer, work)
        files = [TensorFile(path) for path in weight_files(work)]
        difference = None
        if verify:
            model = load_model(folder, CPU, numbers, execution)
            difference = verify_folder(work, model, tokenizer, trust_remote_code)
    return {
        "source": str(folder),
        "folder": str(target),
        "parameters": sum(math.prod(file.shape(name)) for file in files for name in file.names),
        "dtype": str(numbers).removeprefix("torch."),
        "bytes": sum(file.stat().st_size for file in weight_files(target)),
        "verified": verify,
        "max_logit_difference": difference,
    }


def _stream(folder: Path, dtype: torch.dtype, target: Path) -> None:
    """Puts a native model's files together from those of a folder, however they are cut; a tensor at a time."""
    hf_config, family, config = read_shape(folder)
    with torch.device("meta"):
        shapes = {name: tuple(piece.shape) for name, piece in Decoder(config).pieces().items()}
    stream_weights(open_pieces(folder, family, config), family, shapes, dtype, target)
    write_config(hf_config, family, dtype, target)
    if (folder / GENERATION_FILE).is_file():
        (target / GENERATION_FILE).write_bytes((folder / GENERATION_FILE).read_bytes())


def stored_dtype(folder: Path) -> torch.dtype:
    """The narrowest type of numbers that holds every tensor of a folder exactly."""
    files = [TensorFile(path) for path in slice_files(folder, WEIGHTS) or weight_files(folder)]
    found = {file.dtype(name) for file in files for name in file.names if file.dtype(name).is_floating_point}
    if any(dtype.itemsize == 1 for dtype in found):
        # Torch promotes no eight-bit numbers.
        found = {torch.float32, *(dtype for dtype in found if dtype.itemsize > 1)}
    return reduce(torch.promote_types, found) if found else torch.float32


@torch.no_grad()
def verify_folder(folder: Path, model: Model, tokenizer: Tokenizer, trust_remote_code: bool = False) -> float:
    """Loads `folder` in Transformers; the largest difference of a logit in fp32 (fp64 where the weights are)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Transformers' other kernels leave out soft caps.
    attention = {"attn_implementation": "eager"} if model.hf_config.get("attn_logit_softcapping") else {}
    tensors = model.disk_tensors()
    wide = reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()}, torch.float32)
    # Transformers keeps some constants (Gemma's scale of embeddings) rounded to the numbers it was loaded in. The
    # decoder keeps none, so it is compared with a model that was loaded wide. To widen is exact.
    numbers = wide if isinstance(model, Native) else "auto"
    trusted = trust_remote_code and not isinstance(model, Native)
    theirs = AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, dtype=numbers, trust_remote_code=trusted, **attention
    ).eval()
    state = theirs.state_dict()
    for name, tensor in tensors.items():
        if not torch.equal(state[name], tensor.to(state[name].dtype)):
            if tensor.isnan().any():
                raise CheckpointError(f"{name} holds numbers that are none (NaN): there is nothing to compare")
            raise CheckpointError(f"{folder}: Transformers reads another {name} than was written")
    # A folder may have a tokenizer with more tokens than the model has rows.
    encoded = tokenizer.encode("The quick brown fox jumps over the lazy dog.")[:64]
    ids = torch.tensor([[min(token, model.vocab_size - 1) for token in encoded]])
    positions = torch.arange(ids.shape[1])[None]
    ours = model.module.eval().to(wide)(ids, positions)
    wanted = theirs.to(wide)(ids).logits
    difference = (wanted - ours).abs().max().item()
    if not difference <= LOGITS_LIMIT * max(1.0, wanted.abs().max().item()):
        raise CheckpointError(f"{folder}: Transformers' logits differ from ours by {difference:.2e}")
    return difference
