"""Does the model compute what Transformers computes from the same folder, forward and backward?

If not, Transformers' model is changed as known mistakes would change it. The one with which both agree is the cause.
The backward passes are compared in the gradient of the embedding, which every layer passes on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.checkpoint.load import is_tuned_folder, resolve_model_folder
from torchstone.checkpoint.save import save_model
from torchstone.checkpoint.shard_files import WEIGHTS, shard_files
from torchstone.checkpoint.transformers_folder import capture_warnings
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.checked_step import step_tokens
from torchstone.diagnosis.kernel_checks import blocks
from torchstone.diagnosis.loss_checks import agreement
from torchstone.diagnosis.reference import compute_logits
from torchstone.diagnosis.restore import zeroed_adapters
from torchstone.diagnosis.session import Diagnosis, on_first_rank
from torchstone.models.model import NativeModel

# Relative to the largest logit. In fp32 deep models differ by 1e-5.
LOGITS_LIMIT = 1e-4
# Relative to the gradient's norm.
GRADIENT_LIMIT = 1e-3
MAX_DOCUMENTS, MAX_TOKENS = 3, 512
# One document is made longer than the sliding window, unless it would have more tokens than this many steps.
WINDOW_STEPS, BEYOND_WINDOW = 30, 16
# Longer than any document.
NO_WINDOW = 1 << 30
# A layer's output is another one from here on, relative to its norm.
LAYER_LIMIT = 1e-3
# (config.json) -> the same without what a loader may forget, or None if there is nothing of it.
ConfigChange = Callable[[Any], Any]


def check_transformers(diagnosis: Diagnosis) -> Finding:
    plain, config = diagnosis.reference_run, diagnosis.config
    tuning = config.tuning
    if tuning.quantize_base != "none":
        raise SkipCheck("tuning.quantize_base: the weights are not those of the folder")
    if tuning.adapter is not None or tuning.frozen_adapters:
        raise SkipCheck("the model has adapters; torchstone export compares them with PEFT")
    if config.model.path is None:
        folder = diagnosis.folder / "new-model"
        if diagnosis.ctx.is_main:
            folder.mkdir()
            save_model(plain.model, folder)
    else:
        folder = resolve_model_folder(config.model.path, trust_remote_code=config.model.trust_remote_code)
        if is_tuned_folder(folder) or shard_files(folder, WEIGHTS):
            raise SkipCheck(f"{folder} is for Transformers only after torchstone export")
    with zeroed_adapters(plain):
        return on_first_rank(diagnosis.ctx, lambda: Comparison(diagnosis, folder).find())


class Comparison:
    """The model of `reference_run` and Transformers' model of `folder`, on a few documents."""

    def __init__(self, diagnosis: Diagnosis, folder: Path) -> None:
        self.diagnosis, self.folder, self.model = diagnosis, folder, diagnosis.reference_run.model
        hf_config = self._read_config()
        vocabulary = hf_config.get_text_config().vocab_size
        documents = [document.ids[:MAX_TOKENS] for document in diagnosis.documents if document.ids.max() < vocabulary]
        if not documents:
            raise SkipCheck("the documents have tokens that the model of the folder does not know")
        # Transformers' dynamic RoPE keeps the frequencies of the longest document so far.
        self.documents = sorted(documents[:MAX_DOCUMENTS], key=len)
        self.longest = self.documents[-1]
        self.missed_window = self._reach_window(getattr(hf_config.get_text_config(), "sliding_window", None))
        self.vocabulary = vocabulary
        self.ours = self._logits(lambda ids: compute_logits(self.model.module, ids, diagnosis.device))

    def find(self) -> Finding:
        hf = self._load(self._read_config())
        error = self._error(hf)
        values = {"error": error, "limit": LOGITS_LIMIT}
        is_right = error <= LOGITS_LIMIT
        text = (
            f"logits of {len(self.documents)} documents and those of {type(hf).__name__} {agreement(is_right, error)}"
        )
        if self.missed_window is not None:
            text += f" (no document is longer than the sliding window of {self.missed_window} tokens)"
        if not is_right:
            cause, source = self._find_mistake() or self._first_layer(hf)
            return Finding(
                "fail", text, f"{LOGITS_LIMIT:g}", cause, f"{self.folder / 'config.json'}: {source}",
                "do not train on it: the model is not the one that was pretrained", values,
            )  # fmt: skip
        values |= {"gradient_error": (error := self._gradient_error(hf)), "gradient_limit": GRADIENT_LIMIT}
        is_right, limit = error <= GRADIENT_LIMIT, f"{LOGITS_LIMIT:g}, gradient {GRADIENT_LIMIT:g}"
        text = f"{text}, the gradients of the embedding {agreement(is_right, error)}"
        finding = Finding("pass", text, limit, values=values)
        if is_right:
            return finding
        return finding.with_cause(
            "the logits are right, but not the backward pass: a part of the gradient is lost or changed between the "
            "loss and the embedding",
            "models/decoder.py, or kernels that were registered for it",
            "look for .detach(), .data and torch.no_grad() in the forward pass, and at custom backward functions",
        )

    def _reach_window(self, window: int | None) -> int | None:
        """Makes one document longer than the sliding window, which is returned if that would take too long."""
        if not window or len(self.documents[-1]) > window:
            return None
        if window + BEYOND_WINDOW > max(MAX_TOKENS, WINDOW_STEPS * step_tokens(self.diagnosis.run)):
            return window
        self.documents.append(np.resize(np.concatenate(self.documents), window + BEYOND_WINDOW))
        return None

    def _gradient_error(self, hf: nn.Module) -> float:
        ids = self.longest
        if len(ids) < 2:
            return 0.0
        targets = torch.from_numpy(ids[1:].astype(np.int64)).to(self.diagnosis.device)
        module: Any = self.model.module
        ours = module.tok_embed if isinstance(self.model, NativeModel) else module.hf.get_input_embeddings()
        theirs: Any = hf.get_input_embeddings()

        def gradient(weight: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
            with torch.enable_grad(), trainable(weight):
                loss = F.cross_entropy(compute()[:-1, : self.vocabulary].float(), targets)
                return torch.autograd.grad(loss, weight)[0][: self.vocabulary].double()

        right = gradient(theirs.weight, lambda: hf(input_ids=self._ids(ids), use_cache=False).logits[0])
        actual = gradient(ours.weight, lambda: compute_logits(module, ids, self.diagnosis.device))
        error = ((actual - right).norm() / right.norm().clamp(min=1e-30)).item()
        return error if math.isfinite(error) else math.inf

    def _find_mistake(self) -> tuple[str, str] | None:
        """What Transformers must forget to agree with our model, and the key of config.json."""
        for cause, key, change in MISTAKES:
            changed = change(copy.deepcopy(self._read_config()))
            if changed is not None and self._error(self._load(changed)) <= LOGITS_LIMIT:
                return cause, key
        if isinstance(self.model, NativeModel) and not self.model.module.config.tied:
            decoder = self.model.module
            if torch.equal(decoder.head.weight, decoder.tok_embed.weight):
                return "the head has the weights of the embedding, though it is not tied", "tie_word_embeddings"
        return None

    @torch.no_grad()
    def _first_layer(self, hf: nn.Module) -> tuple[str, str]:
        """Where the two models begin to differ, on the document that differs most."""
        if not isinstance(self.model, NativeModel):
            return "the weights, or what is done with them, differ from those of the folder", "all keys"
        ids = self.documents[int(np.argmax(self._errors(hf)))]
        outputs: list[Tensor] = []
        modules = [self.model.module.tok_embed, *blocks(self.diagnosis.reference_run)]
        hooks = [module.register_forward_hook(lambda _, __, output: outputs.append(output)) for module in modules]
        compute_logits(self.model.module, ids, self.diagnosis.device)
        for hook in hooks:
            hook.remove()
        theirs = hf(input_ids=self._ids(ids), output_hidden_states=True).hidden_states
        # Embeddings may be scaled after the lookup, and the last of Transformers' states is after the norm.
        for layer in range(1, len(modules) - 1):
            if (outputs[layer] - theirs[layer]).norm() > LAYER_LIMIT * theirs[layer].norm():
                return f"the models differ from layer {layer - 1} on", "what describes this layer"
        return "the layers agree; the last layer, the last norm or the head differs", "what describes the head"

    def _read_config(self) -> Any:
        from transformers import AutoConfig

        trust = self.diagnosis.config.model.trust_remote_code
        with capture_warnings():
            return AutoConfig.from_pretrained(str(self.folder), local_files_only=True, trust_remote_code=trust)

    def _load(self, hf_config: Any) -> nn.Module:
        from transformers import AutoModelForCausalLM

        with capture_warnings():
            hf = AutoModelForCausalLM.from_pretrained(
                str(self.folder), config=hf_config, local_files_only=True, dtype=torch.float32,
                trust_remote_code=self.diagnosis.config.model.trust_remote_code, attn_implementation="eager",
            )  # fmt: skip
        return hf.to(self.diagnosis.device).eval()

    def _error(self, hf: nn.Module) -> float:
        errors = self._errors(hf)
        return max(errors) if all(map(math.isfinite, errors)) else math.inf

    def _errors(self, hf: nn.Module) -> list[float]:
        """The largest error of the logits of each document, relative to the largest logit."""
        theirs = self._logits(lambda ids: hf(input_ids=self._ids(ids), use_cache=False).logits[0])
        scale = max(1.0, *(logits.abs().max().item() for logits in theirs))
        return [(a - b).abs().max().item() / scale for a, b in zip(self.ours, theirs, strict=True)]

    def _ids(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64))[None].to(self.diagnosis.device)

    @torch.no_grad()
    def _logits(self, compute: Callable[[np.ndarray], Tensor]) -> list[Tensor]:
        # A resized embedding has more tokens than the folder.
        return [compute(ids)[:, : self.vocabulary].float() for ids in self.documents]


@contextmanager
def trainable(weight: nn.Parameter) -> Iterator[None]:
    """The weight gets a gradient within the context, also if it is frozen."""
    was_trained = weight.requires_grad
    weight.requires_grad_(True)
    try:
        yield
    finally:
        weight.requires_grad_(was_trained)


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """The RoPE parameters of a config: one dictionary, or one for each kind of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or ([parameters] if parameters else [])


def _without_rope_scaling(config: Any) -> Any:
    scaled = [rope for rope in _ropes(config) if rope.get("rope_type", "default") != "default"]
    for rope in scaled:
        kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        rope.clear()
        rope.update(kept | {"rope_type": "default"})
    return config if scaled else None


def _with_default_theta(config: Any) -> Any:
    others = [rope for rope in _ropes(config) if rope.get("rope_theta", 10000.0) != 10000.0]
    for rope in others:
        rope["rope_theta"] = 10000.0
    return config if others else None


def _without_windows(config: Any) -> Any:
    text = config.get_text_config()
    if getattr(text, "sliding_window", None) is None:
        return None
    text.sliding_window = NO_WINDOW
    return config


def _without_softcaps(config: Any) -> Any:
    text = config.get_text_config()
    keys = [k for k in ("attn_logit_softcapping", "final_logit_softcapping") if getattr(text, k, None) is not None]
    for key in keys:
        setattr(text, key, None)
    return config if keys else None


MISTAKES: Sequence[tuple[str, str, ConfigChange]] = (
    ("RoPE scaling is not applied: angles are those of the unscaled RoPE", "rope_parameters", _without_rope_scaling),
    ("the base of RoPE is 10000 instead of that of the folder", "rope_theta", _with_default_theta),
    ("sliding windows are not applied: all layers see the whole document", "sliding_window", _without_windows),
    ("soft caps are not applied", "attn_logit_softcapping, final_logit_softcapping", _without_softcaps),
)  # fmt: skip
