"""Any causal model that Transformers can load, behind the native decoder's interface.

The native decoder knows some families; this module trains the rest as Transformers computes them. Nothing is taken on
trust: a folder is checked before it is loaded (transformers_folder.py), and the model is run on a few made-up tokens to
see that it is causal and how documents can be packed (probing.py); where no way of packing holds, `why_not_packed` says
why and packed rows are an error.

What it costs: Transformers' speed and memory (all logits at once; a [T, T] mask for packed rows), sdpa and eager
attention only, the probing at every load, and prompts continued one at a time.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchstone.errors import UsageError
from torchstone.loss.cross_entropy import IGNORED
from torchstone.models.probing import LIMITS, check_causal, find_packing, limits_of, rows_of, windows_of
from torchstone.models.transformers_folder import check_files, first_line, load_complete, notes_on, quiet, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_SIZE = "5GB"
MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")


class Fallback(nn.Module):
    """A Transformers model behind the native decoder's interface: forward(ids, positions, doc_ids) -> logits.

    `packs` is one of WAYS (probing.py), or None where rows may hold one document only.
    """

    def __init__(self, hf: PreTrainedModel, packs: str | None) -> None:
        super().__init__()
        self.hf = hf
        self.packs = packs
        self.why_not_packed = None if packs else "no way was found that keeps packed documents apart"
        self.notes: list[str] = []
        # Kept as it came: Transformers refuses to write back many a published generation_config.json.
        self.generation_config_file: bytes | None = None
        self._parameters_of_forward = inspect.signature(hf.forward).parameters
        hf.loss_function = sum_of_token_losses

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        """Without `doc_ids` every row is one sequence (padding, if any, on its right)."""
        if doc_ids_BT is None:
            return self._logits(ids_BT, None, self._running(positions_BT))
        if self.packs is None:
            raise ValueError(f"this model takes one document in a row: {self.why_not_packed}")
        if self.packs == "positions":
            _check_boundaries(positions_BT, doc_ids_BT)
        return self.packed(self.packs, ids_BT, positions_BT, doc_ids_BT)

    def packed(self, way: str, ids_BT: Tensor, positions_BT: Tensor, doc_ids_BT: Tensor) -> Tensor:
        """Logits of packed rows, the documents kept apart by this one of WAYS, whether or not it holds here."""
        return self._logits(ids_BT, packed_mask(self.hf, way, positions_BT, doc_ids_BT), positions_BT)

    @property
    def vocab_size(self) -> int:
        return int(self.hf.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.hf.get_input_embeddings().weight.device

    @property
    def max_positions(self) -> int | None:
        values = (getattr(self.hf.config.get_text_config(), key, None) for key in MAX_POSITIONS)
        return next((value for value in values if type(value) is int and value > 0), None)

    def why_not_rows(self, longest: int) -> str | None:
        """Why rows of up to `longest` tokens cannot be computed, or not by themselves."""
        config = self.hf.config.get_text_config()
        limit = length_of_plain_rope(config)
        if limit is not None and longest > limit:
            return (
                f"beyond {limit} tokens its rotary positions depend on the longest row of a batch in Transformers, so "
                "a row would not be what it is alone"
            )
        most = self.max_positions
        tables = [part.num_embeddings for part in self.hf.modules() if isinstance(part, nn.Embedding)]
        # Some leave a few rows free at the beginning.
        if most is not None and longest > most and any(most <= size <= most + 8 for size in tables):
            return f"the model has a table of {most} positions"
        return None

    def checkpoint_activations(self) -> None:
        """Activations of each layer are computed again in the backward pass instead of being kept."""
        name = type(self.hf).__name__
        if not self.hf.supports_gradient_checkpointing:
            raise UsageError(f"{name} cannot recompute activations: Transformers has no checkpointing for it")
        try:
            self.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except (ValueError, AttributeError, NotImplementedError) as error:
            raise UsageError(f"{name} cannot recompute activations: {first_line(error)}") from error

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, up to (and without) the first stop token. Temperature 0 takes the likeliest.

        The folder's generation_config.json has no say: no penalties, no top-k, no length but the one asked for.
        """
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("an empty prompt has nothing to continue")
        if max_new_tokens < 1:
            return [[] for _ in prompts]
        choose = _Choose(temperature, generator)
        with _evaluating(self), _generation_config(self.hf):
            return [self._continue(list(prompt), max_new_tokens, list(stop_ids), choose) for prompt in prompts]

    @torch.no_grad()
    def resize(self, rows: int) -> None:
        """Embedding and head get `rows` rows: the old ones untouched, each new one the mean of the old ones."""
        old = self.vocab_size
        if rows < old:
            raise ValueError(f"{rows} rows are fewer than the {old} that the embedding has")
        if rows == old:
            return
        head = self.hf.get_output_embeddings()
        old_of_head = 0 if head is None else head.weight.shape[0]
        padding = getattr(self.hf.get_input_embeddings(), "padding_idx", None)
        with _same_rng(self.device):
            self.hf.resize_token_embeddings(rows, mean_resizing=False)
        embedding, head = self.hf.get_input_embeddings(), self.hf.get_output_embeddings()
        embedding.padding_idx = padding
        _fill_with_mean(embedding.weight, old)
        if head is not None and head.weight is not embedding.weight:
            _fill_with_mean(head.weight, old_of_head)
        if getattr(head, "bias", None) is not None:
            _fill_with_mean(head.bias, old_of_head)

    def _takes(self, name: str) -> bool:
        return name in self._parameters_of_forward

    def _logits(self, ids_BT: Tensor, mask: Any, positions_BT: Tensor) -> Tensor:
        arguments = {"position_ids": positions_BT, "use_cache": False, "output_router_logits": False}
        arguments = {name: value for name, value in arguments.items() if self._takes(name)}
        if mask is not None:
            arguments["attention_mask"] = mask
        if self._takes("return_dict") or any(p.kind is p.VAR_KEYWORD for p in self._parameters_of_forward.values()):
            arguments["return_dict"] = True
        output = self.hf(input_ids=ids_BT, **arguments)
        return output[0] if isinstance(output, tuple) else output.logits

    def _running(self, positions_BT: Tensor) -> Tensor:
        """Positions that go on through the padding: a step back would cost Transformers a mask to tell documents.

        Where the padding would then run out of a table of positions, they stay as they are.
        """
        length = positions_BT.shape[1]
        if self.max_positions is not None and length > self.max_positions:
            return positions_BT
        return positions_BT[:, :1] + torch.arange(length, device=positions_BT.device)

    def _continue(self, prompt: list[int], max_new_tokens: int, stop_ids: list[int], choose: _Choose) -> list[int]:
        if self.hf.can_generate():
            new = self._continue_with_cache(prompt, max_new_tokens, stop_ids, choose)
        else:
            new = self._continue_anew(prompt, max_new_tokens, stop_ids, choose)
        end = next((place for place, token in enumerate(new) if token in stop_ids), len(new))
        return new[:end]

    def _continue_with_cache(self, prompt: list[int], count: int, stop_ids: list[int], choose: _Choose) -> list[int]:
        from transformers import GenerationConfig

        ids = torch.tensor([prompt], device=self.device)
        plain = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=stop_ids or None, pad_token_id=0)
        row = self.hf.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=plain, logits_processor=[choose.leave_one]
        )
        return row[0, len(prompt) :].tolist()

    def _continue_anew(self, prompt: list[int], count: int, stop_ids: list[int], choose: _Choose) -> list[int]:
        """For models without a cache: every token reads the whole text again."""
        ids = torch.tensor([prompt], device=self.device)
        for _ in range(count):
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            token = choose(self(ids, positions)[:, -1].float())
            ids = torch.cat((ids, token[:, None]), dim=1)
            if token.item() in stop_ids:
                break
        return ids[0, len(prompt) :].tolist()


def load_fallback(
    folder: Path, attention: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> Fallback:
    """The model of a local Hugging Face folder, complete and probed, in training mode; or an error that says why not.

    `attention` is auto, sdpa or eager. The random state is left as it was.
    """
    device = torch.device(device)
    if attention not in ("auto", "sdpa", "eager"):
        raise UsageError(
            f"attention {attention!r}: models that Torchstone knows only through Transformers take sdpa and eager",
            "use --model.attention auto",
        )
    if dtype not in LIMITS:
        raise UsageError(f"{dtype}: a Transformers model is loaded in {', '.join(map(str, LIMITS))}")
    folder = Path(folder)
    config = read_config(folder, trust_remote_code)
    check_files(folder)
    with _same_rng(device), quiet() as said:
        hf = load_complete(folder, config, attention, dtype, trust_remote_code).to(device)
        module = Fallback(hf, None)
        with torch.no_grad(), _evaluating(module):
            check_causal(module, folder)
            module.packs, module.why_not_packed = find_packing(module)
            module.notes = [*notes_on(config), *_loss_notes(module)]
            _keep_generation_config(module, folder)
    module.notes += [f"Transformers says: {line}" for line in dict.fromkeys(said)]
    module.train()
    return module


def check_fallback(folder: Path, trust_remote_code: bool = False) -> None:
    """Refuses a folder that `load_fallback` would, as far as can be told without reading its weights."""
    read_config(Path(folder), trust_remote_code)
    check_files(Path(folder))


def save_fallback(module: Fallback, folder: Path, rank: int = 0) -> None:
    """A folder that Transformers loads back bit for bit, with the model's own code where it came with some. One that is
    sharded is gathered by the first rank, on the CPU; all ranks have to take part."""
    folder = Path(folder)
    state = whole_state(module.hf, rank)
    if rank > 0:
        return
    with quiet():
        if module.generation_config_file is None:
            module.hf.save_pretrained(folder, max_shard_size=SHARD_SIZE, state_dict=state)
            return
        with _generation_config(module.hf):
            module.hf.save_pretrained(folder, max_shard_size=SHARD_SIZE, state_dict=state)
    (folder / "generation_config.json").write_bytes(module.generation_config_file)


def whole_state(hf: PreTrainedModel, rank: int = 0) -> dict[str, Tensor] | None:
    """The state dict of a sharded model, whole, on the first rank; None elsewhere, and where it is not sharded."""
    if not any(isinstance(parameter, DTensor) for parameter in hf.parameters()):
        return None
    whole: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}
    for name, tensor in hf.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            # One at a time, and a tied one once, so that it stays one.
            full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            gathered[id(tensor)] = full.cpu() if rank == 0 else full.new_empty(0)
        whole[name] = gathered[id(tensor)]
    return whole if rank == 0 else None


def sum_of_token_losses(
    logits: Tensor, labels: Tensor | None, *_: Any, shift_labels: Tensor | None = None, **__: Any
) -> Tensor:
    """What `hf(..., labels=labels)` returns here: the sum over the tokens, whatever Transformers would divide by."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("neither labels nor shift_labels")
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.flatten().to(logits.device)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets, ignore_index=IGNORED, reduction="sum")


def packed_mask(hf: PreTrainedModel, way: str, positions_BT: Tensor, doc_ids_BT: Tensor) -> Any:
    """Who sees whom in packed rows, in the form that `way` gives it to Transformers."""
    if way == "positions":
        return None
    config = hf.config.get_text_config()
    visible_BTT = same_document(doc_ids_BT)
    if way == "mask":
        return _as_attention_mask(hf, visible_BTT)
    if way == "window mask":
        return _as_attention_mask(hf, visible_BTT & _within(max(windows_of(config).values()), positions_BT))
    masks = {}
    for kind in set(config.layer_types):
        masks[kind] = visible_BTT
        if kind == "sliding_attention":
            masks[kind] = visible_BTT & _within(config.sliding_window, positions_BT)
        elif kind == "chunked_attention":
            chunks = positions_BT // config.attention_chunk_size
            masks[kind] = visible_BTT & (chunks[:, :, None] == chunks[:, None, :])
    return {kind: _as_attention_mask(hf, mask) for kind, mask in masks.items()}


def same_document(doc_ids_BT: Tensor) -> Tensor:
    """A token sees itself and what came before it in its own document, [B, T, T]."""
    T = doc_ids_BT.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=doc_ids_BT.device).tril()
    return (doc_ids_BT[:, :, None] == doc_ids_BT[:, None, :]) & causal


def _within(window: int, positions_BT: Tensor) -> Tensor:
    return positions_BT[:, :, None] - positions_BT[:, None, :] < window


def _as_attention_mask(hf: PreTrainedModel, visible_BTT: Tensor) -> Tensor:
    """Transformers hands a 4D mask to the kernel as it is: sdpa reads booleans, eager adds numbers."""
    visible = visible_BTT[:, None]
    if hf.config._attn_implementation == "sdpa":
        return visible
    dtype = hf.get_input_embeddings().weight.dtype
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def _check_boundaries(positions_BT: Tensor, doc_ids_BT: Tensor) -> None:
    """Where positions alone tell documents apart, a document that goes on counting would be seen by the next."""
    new_document = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    if bool((new_document & (positions_BT.diff(dim=1) == 1)).any()):
        raise ValueError("positions must start again with every document of a row")


def length_of_plain_rope(config: Any) -> int | None:
    """Up to how many tokens rotary positions that depend on a row's length do not; None where they never do."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    kinds = {value.get("rope_type", value.get("type")): value for value in nested}
    most = getattr(config, "max_position_embeddings", None)
    if "longrope" in kinds:
        own = kinds["longrope"].get("original_max_position_embeddings")
        return own or getattr(config, "original_max_position_embeddings", None) or most
    return most if "dynamic" in kinds else None


class _Choose:
    """The next token from logits [B, V]; also as a processor of Transformers' greedy search, which then agrees."""

    def __init__(self, temperature: float, generator: torch.Generator | None) -> None:
        self.temperature, self.generator = temperature, generator

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        probabilities = (logits.float() / self.temperature).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def leave_one(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, float("-inf")).scatter_(1, self(scores)[:, None], 0.0)


def _fill_with_mean(tensor: Tensor, old: int) -> None:
    tensor[old:] = tensor[:old].float().mean(dim=0).to(tensor.dtype)


@contextmanager
def _generation_config(hf: PreTrainedModel) -> Iterator[None]:
    """An empty one: generate() fills whatever its caller left open from the model's own."""
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
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _same_rng(device: torch.device) -> Any:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _keep_generation_config(module: Fallback, folder: Path) -> None:
    """As it lies in the folder; where config.json had it all, only what Transformers will agree to write."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        module.generation_config_file = (folder / "generation_config.json").read_bytes()
        return
    try:
        if module.hf.can_generate():
            module.hf.generation_config.validate(strict=True)
    except ValueError as error:
        module.hf.generation_config = GenerationConfig()
        module.notes.append(f"how to sample, as config.json has it, will not be saved: {first_line(error)}")


def _loss_notes(module: Fallback) -> list[str]:
    """Whether `hf(..., labels=...)` heeds the sum: some classes write their loss into their forward."""
    rows = rows_of([[9]], module)
    wanted = sum_of_token_losses(module(rows.ids, rows.positions), rows.ids)
    name = type(module.hf).__name__
    try:
        got = module.hf(input_ids=rows.ids, labels=rows.ids).loss
    except Exception as error:
        return [f"{name} computes no loss of its own ({type(error).__name__}); the loss here does not need it"]
    if got is None or not torch.allclose(got.float(), wanted, rtol=limits_of(module).same):
        return [f"{name} called with labels computes a loss of its own, not the sum of token losses used here"]
    return []
