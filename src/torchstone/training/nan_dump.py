"""The files of a step with NaN or infinite numbers, and what `torchstone debug show` prints of them.

`nan_grad_step_N.pt` (torch.load) has what repeats the step: the batch, its rows, the random numbers, the config and
this rank's weights before the step. `debug/nan_debug_step_N.pkl` (pickle) has `parameters` and `gradients`: name ->
numpy array in fp32. Names are those of Transformers; of a sharded tensor a rank has its shard, and `offsets` says where
it begins. Rank N adds `_rankN` to the names of its files. The tensors of each take up to half of `debug.dump_limit`,
the bad ones first; `omitted` lists the others. No file has texts of the data, only ids.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchstone import __version__
from torchstone.atomic import free_path, temporary_path
from torchstone.checkpoint.save import hf_name
from torchstone.config.load import to_dict
from torchstone.config.schema import parse_memory
from torchstone.data.loader import StepBatch
from torchstone.errors import UsageError, first_line
from torchstone.models.model import Model
from torchstone.parallel.local_shards import TensorShard, local_shards
from torchstone.training.run import Run
from torchstone.wording import list_first

TENSOR_KINDS = ("parameters", "gradients", "model")
BATCH_KEYS = ("ids", "labels", "positions", "doc_ids")
HEADER_KEYS = ("step", "loss", "grad_norm", "rank", "layout", "bad_gradients", "first_bad_module", "rows", "omitted")
# With a later one numpy writes arrays in another form.
PICKLE_PROTOCOL = 4
# Bad gradients that `dump_lines` names.
MAX_SHOWN = 5


class Shards(NamedTuple):
    """A part of this rank's tensors by their Hugging Face names, and the names of the others."""

    chosen: dict[str, TensorShard]
    omitted: list[str]

    @property
    def offsets(self) -> dict[str, list[int]]:
        return {name: list(shard.offset) for name, shard in self.chosen.items() if not shard.is_full}


def copy_gradients(run: Run, bad: Iterable[str]) -> Shards:
    """The gradients of this rank, as far as the files have room for them, on the CPU in fp32."""
    tensors = ((name, p.grad) for name, p in run.model.trained_parameters() if p.grad is not None)
    return _copy(run.model, tensors, _limit(run) // 4, bad)


def write_dump(
    run: Run, header: dict[str, Any], batch: StepBatch, rng_states: Mapping[str, Tensor], gradients: Shards
) -> list[str]:
    """Writes this rank's files, and returns lines that say where they are, or why there are none."""
    if _limit(run) == 0:
        return ["No files are written (debug.dump_limit 0)"]
    suffix, root, step = _rank_suffix(run), run.output_dir, header["step"]
    try:
        header |= {"rank": run.ctx.rank, "layout": str(run.ctx.dims)}
        checkpoint = header | _checkpoint(run, header["bad_gradients"], batch, rng_states)
        path = _write(root / f"nan_grad_step_{step}{suffix}.pt", lambda file: torch.save(checkpoint, file))
        lines = [f"Checkpoint saved: {path}"]
        arrays = header | _arrays(run, header["bad_gradients"], gradients)
        path = _write(
            root / "debug" / f"nan_debug_step_{step}{suffix}.pkl",
            lambda file: pickle.dump(arrays, file, protocol=PICKLE_PROTOCOL),
        )
        return [*lines, f"Debug tensors saved: {path}"]
    except (OSError, RuntimeError, MemoryError) as error:
        # torch raises RuntimeError for a full disk.
        return [f"The tensors could not be written: {error}"]


def read_dump(path: Path) -> dict[str, Any]:
    """The content of one of the two files. It is not executed: only tensors, arrays and plain values are read."""
    hint = "dumps are nan_grad_step_N.pt and debug/nan_debug_step_N.pkl in the folder of a run"
    if not path.is_file():
        raise UsageError(f"{path} is {'a folder' if path.is_dir() else 'missing'}", hint)
    try:
        if path.suffix == ".pkl":
            with path.open("rb") as file:
                dump = _to_arrays(_Unpickler(file).load())
        else:
            dump = torch.load(path, map_location="cpu", weights_only=True)
        missing = [key for key in HEADER_KEYS if key not in dump]
    except Exception as error:
        # What a damaged file raises may be of any type.
        missing, reason = [], first_line(error).partition(". ")[0]
    else:
        if not missing:
            return dict(dump)
        reason = f"it has no {missing[0]!r}"
    raise UsageError(f"{path} is not a dump: {reason}", hint)


def summarize_dump(dump: dict[str, Any]) -> dict[str, Any]:
    """A dump for programs: statistics instead of tensors."""
    kinds = [kind for kind in TENSOR_KINDS if kind in dump]
    summary = {key: value for key, value in dump.items() if key not in (*TENSOR_KINDS, "batch", "rng_states")}
    # JSON has neither NaN nor infinity.
    summary |= {key: _finite_or_text(summary[key]) for key in ("loss", "grad_norm")}
    summary["tensors"] = {kind: [_statistics(name, values) for name, values in dump[kind].items()] for kind in kinds}
    if "batch" in dump:
        summary["batch"] = [list(each["ids"].shape) for each in dump["batch"]]
    return summary


def dump_lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people: every tensor that is not finite; the others only if all are finite."""
    bad_names, show_all = summary["bad_gradients"], not any(map(_is_bad, chain(*summary["tensors"].values())))
    lines = [
        f"step {summary['step']}, rank {summary['rank']} ({summary['layout']}): loss {summary['loss']}, "
        f"gradient norm {summary['grad_norm']}",
        f"first bad module: {summary['first_bad_module']}",
        f"bad gradients: {list_first(bad_names, MAX_SHOWN) or 'none'}",
        f"rows: {', '.join(f'{origin} ({length} tokens)' for origin, length in summary['rows'])}",
    ]
    if "batch" in summary:
        shapes = ", ".join(f"{rows} x {length}" for rows, length in summary["batch"])
        lines.append(f"micro-batches: {shapes}; {summary['loss_tokens']} loss tokens over all ranks")
    for kind, tensors in summary["tensors"].items():
        lines += ["", f"{kind}: {len(tensors)}, {sum(_is_bad(each) for each in tensors)} of them not finite"]
        shown = [each for each in tensors if show_all or _is_bad(each)]
        width = max((len(each["name"]) for each in shown), default=0)
        lines += [_tensor_line(each, width) for each in shown]
        if len(shown) < len(tensors):
            limits = [abs(each[key]) for each in tensors if not _is_bad(each) for key in ("min", "max") if each[key]]
            lines.append(f"  {len(tensors) - len(shown)} finite: |x| up to {max(limits, default=0.0):.3e}")
    lines.append("")
    lines += [
        f"{kind} that are not in the file: {', '.join(names)}" for kind, names in summary["omitted"].items() if names
    ]
    return lines


def _tensor_line(tensor: dict[str, Any], width: int) -> str:
    size = "x".join(map(str, tensor["shape"])) or "1"
    values = "no finite value"
    if tensor["min"] is not None:
        values = f"{tensor['min']:10.3e} to {tensor['max']:10.3e}, mean |x| {tensor['mean_abs']:.3e}"
    bad = f"  {tensor['nan']} NaN, {tensor['inf']} Inf" if _is_bad(tensor) else ""
    return f"  {tensor['name']:{width}}  {size:>13}  {values}{bad}"


class _Array:
    """Stands for an array while it is read: numpy's own class would take any dtype and buffer from the file."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, data = state
        # It refuses objects, whose data would be pointers. A copy can be written to, as torch expects it.
        array = np.frombuffer(data, dtype=np.dtype(dtype.name)).copy()
        self.array = array.reshape(shape, order="F" if is_fortran else "C")


class _Dtype:
    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and fields: those of this machine, and none."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in STAND_INS:
            return STAND_INS[name]
        raise pickle.UnpicklingError(f"it has a {module}.{name}, which is neither an array nor a plain value")


STAND_INS = {"ndarray": _Array, "dtype": _Dtype, "_reconstruct": lambda *_: _Array()}


def _to_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_arrays(each) for key, each in value.items()}
    return value.array if isinstance(value, _Array) else value


def _limit(run: Run) -> int:
    return parse_memory(run.config.debug.dump_limit) or 0


def _checkpoint(run: Run, bad: Iterable[str], batch: StepBatch, rng_states: Mapping[str, Tensor]) -> dict[str, Any]:
    weights = _choose(run.model, run.model.named_parameters(), _limit(run) // 2, bad)
    return {
        "version": __version__,
        "torch": str(torch.__version__),
        "config": to_dict(run.config),
        "first_sample": batch.first_sample,
        "loss_tokens": batch.loss_tokens,
        "batch": [{key: getattr(each, key).cpu() for key in BATCH_KEYS} for each in batch.micro_batches],
        "rng_states": list(rng_states.values()),
        "model": {name: shard.tensor.detach().cpu().clone() for name, shard in weights.chosen.items()},
        "offsets": weights.offsets,
        "omitted": {"model": weights.omitted},
    }


def _arrays(run: Run, bad: Iterable[str], gradients: Shards) -> dict[str, Any]:
    parameters = _copy(run.model, run.model.named_parameters(), _limit(run) // 4, bad)
    return {
        "parameters": {name: shard.tensor.numpy() for name, shard in parameters.chosen.items()},
        "gradients": {name: shard.tensor.numpy() for name, shard in gradients.chosen.items()},
        "offsets": parameters.offsets | gradients.offsets,
        "omitted": {"parameters": parameters.omitted, "gradients": gradients.omitted},
    }


def _choose(
    model: Model, tensors: Iterable[tuple[str, Tensor]], limit: int, first: Iterable[str], itemsize: int | None = None
) -> Shards:
    """The shards that fit into `limit` bytes, those named `first` and small ones before others."""
    shards = {hf_name(model, s.name): s for name, t in tensors for s in local_shards(model.decoder_config, name, t)}
    first, size, chosen = set(first), 0, dict[str, TensorShard]()
    for name in sorted(shards, key=lambda name: (name not in first, shards[name].tensor.numel())):
        tensor = shards[name].tensor
        bytes_ = tensor.numel() * (itemsize or tensor.itemsize)
        if size + bytes_ <= limit:
            chosen[name], size = shards[name], size + bytes_
    return Shards(chosen, [name for name in shards if name not in chosen])


def _copy(model: Model, tensors: Iterable[tuple[str, Tensor]], limit: int, first: Iterable[str]) -> Shards:
    """Copies on the CPU, in fp32, of the shards that `_choose` returns."""
    shards = _choose(model, tensors, limit, first, itemsize=4)
    copies = {
        name: replace(shard, tensor=shard.tensor.detach().to("cpu", torch.float32, copy=True))
        for name, shard in shards.chosen.items()
    }
    return shards._replace(chosen=copies)


def _write(path: Path, write: Callable[[IO[bytes]], Any]) -> Path:
    """Writes a new file: an earlier start, or another batch, may have left one for the same step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = free_path(path)
    partial = temporary_path(path, "partial")
    try:
        with partial.open("wb") as file:
            write(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _finite_or_text(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _rank_suffix(run: Run) -> str:
    return "" if run.ctx.is_main else f"_rank{run.ctx.rank}"


def _statistics(name: str, values: np.ndarray | Tensor) -> dict[str, Any]:
    """`min`, `max` and `mean_abs` are those of the finite values; None if there are none."""
    tensor = torch.as_tensor(values).float()
    finite = tensor[tensor.isfinite()]
    result: dict[str, Any] = {"name": name, "shape": list(tensor.shape)}
    result |= {"nan": int(tensor.isnan().sum()), "inf": int(tensor.isinf().sum())}
    if not finite.numel():
        return result | {"min": None, "max": None, "mean_abs": None}
    mean = finite.abs().mean(dtype=torch.float64).item()
    return result | {"min": finite.min().item(), "max": finite.max().item(), "mean_abs": mean}


def _is_bad(statistics: dict[str, Any]) -> bool:
    return bool(statistics["nan"] or statistics["inf"])
