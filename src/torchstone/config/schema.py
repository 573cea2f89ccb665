"""Every setting of a run: one frozen dataclass per section, and under each field the sentence that becomes its help.

A key exists here only if something reads it: an accepted key that changes nothing would be a lie. The type of a field
limits its values (`PositiveInt` is an integer from 1, `Fraction` is in [0, 1]); `RULES` limits combinations of values.
Files, the command line and Python all end up here (load.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal

from torchstone.errors import UsageError


@dataclass(frozen=True)
class Range:
    """The allowed range of a number; both ends are included unless `exclude_min` or `exclude_max` is set."""

    min: float
    max: float | None = None
    exclude_min: bool = False
    exclude_max: bool = False

    def contains(self, value: float) -> bool:
        above_min = value > self.min if self.exclude_min else value >= self.min
        if self.max is None:
            return above_min
        return above_min and (value < self.max if self.exclude_max else value <= self.max)

    def __str__(self) -> str:
        low = f"{'more than' if self.exclude_min else 'at least'} {self.min:g}"
        return low if self.max is None else f"{low} and {'less than' if self.exclude_max else 'at most'} {self.max:g}"


Device = Literal["auto", "cpu", "cuda"]
Format = Literal["auto", "tokens", "messages", "sharegpt", "alpaca", "prompt", "text", "document", "lines"]
# The keys of all row formats.
Column = Literal[
    "input_ids", "labels", "len", "messages", "conversations", "tools", "system", "unmask", "prompt", "completion",
    "instruction", "input", "output", "history", "text", "document",
]  # fmt: skip
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
FamilyName = Literal[
    "llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2", "gemma2", "gemma3_text", "phi3", "gpt2"
]
# Every integer is below 2^63. Values that are multiplied (sizes, batches, tokens, epochs) have a smaller maximum.
PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Depth = Annotated[int, Range(1, 2048)]
Size = Annotated[int, Range(1, 1e8)]
TokenCount = Annotated[int, Range(1, 1e16)]
PositiveFloat = Annotated[float, Range(0, exclude_min=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Weight = Annotated[float, Range(1e-9, 1e18)]
Epochs = Annotated[float, Range(1e-9, 1e9)]
Seconds = Annotated[float, Range(0, 1e8, exclude_min=True)]
Fraction = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, 1, exclude_max=True)]
# A file or a folder, for some keys also a name on the hub: never empty, and ~ is the home folder.
PathText = Annotated[str, "path"]
# The name of a validation set: letters, digits, _, - and dots.
SetName = Annotated[str, "name"]
# A number, or a range such as 10-12.
StepsText = Annotated[str, "steps"]
# Bytes, with or without a unit, such as 6GiB.
MemoryText = Annotated[str, "memory"]
ZeroStage = Annotated[int, Range(1, 3)]
ThreadCount = Annotated[int, Range(1, 1024)]
WorkerCount = Annotated[int, Range(0, 256)]


@dataclass(frozen=True)
class ModelConfig:
    path: PathText | None = None
    """Hugging Face folder, checkpoint, run, or model on the hub (org/name); without it, model.depth makes a new one."""

    tokenizer: PathText | None = None
    """Folder of the tokenizer, name on the hub (org/name), or demo:tokenizer; by default the one in model.path."""

    family: FamilyName = "llama"
    """Architecture of a new model."""

    depth: Depth | None = None
    """Layers of a new model; width, heads and initialization are derived from it and logged."""

    width: Size | None = None
    """Hidden size of a new model; by default 64 x depth."""

    heads: Size | None = None
    """Attention heads of a new model; by default width / 64 up to a width of 1024, and width / 128 above."""

    kv_heads: Size | None = None
    """Key/value heads of a new model; by default the same as heads."""

    mlp_width: Size | None = None
    """MLP width of a new model; by default 8/3 x width, rounded up to a multiple of 64 (gpt2: 4 x width)."""

    tied: bool = True
    """Tie the output head of a new model to its embedding."""

    rope_theta: PositiveFloat = 10000.0
    """RoPE base of a new model."""

    init_std: PositiveFloat | None = None
    """Standard deviation of a new model's initial weights; by default sqrt(2 / (5 x width))."""

    implementation: Literal["auto", "native", "fallback"] = "auto"
    """native is the decoder of this package, fallback is Transformers' own code; auto is native if possible."""

    trust_remote_code: bool = False
    """Run code from the folder of model.path, for models that are not in Transformers."""

    attention: Literal["auto", "sdpa", "flash", "flex", "eager", "flash-attn", "fa3", "fa4"] = "auto"
    """Attention kernel; auto selects the fastest one that separates packed documents, and logs it."""

    fused: tuple[Literal["auto", "qkv", "gate_up"], ...] = ("auto",)
    """Projections to fuse into one matrix: qkv, gate_up; auto is none. Saved files do not change."""

    recompute: Literal["auto", "none", "elementwise", "selective", "full"] = "auto"
    """Activation checkpointing: recompute each block (full), all but attention and half the matmuls (selective), or
    norms and gated activations (elementwise). auto is elementwise in compiled blocks, which costs almost no time; with
    training.batch_size auto it is more where larger micro-batches are then faster, or nothing else fits."""

    compile: Literal["auto", "none", "block", "whole"] = "auto"
    """torch.compile of each block, or of the whole model; auto is block on a GPU unless the run is too short."""

    loss: Literal["auto", "full", "chunked"] = "auto"
    """Head and loss: with all logits in memory (full), or for one chunk of tokens at a time (chunked); auto is chunked
    on CUDA and full on a CPU."""

    liger: tuple[Literal["auto", "norm", "rope", "mlp", "loss"], ...] = ()
    """Liger kernels: norm, rope, mlp, loss; auto selects those that are installed and useful, and logs them."""


@dataclass(frozen=True)
class DataConfig:
    path: tuple[PathText, ...] | None = None
    """Training data: a file (JSONL, CSV, text, parquet), folder, glob or hub:org/name; several with commas."""

    weights: tuple[Weight, ...] = ()
    """Relative share of the samples from each path; without weights every row is seen once per epoch."""

    format: tuple[Format, ...] = ("auto",)
    """Row format, one for all paths or one for each; auto detects it from the keys of the first row. lines: every line
    of a .txt file is a document, instead of the file."""

    columns: tuple[dict[Column, str], ...] = ()
    """Names of the data's columns, as prompt=question,completion=answer; one mapping for all paths or a list."""

    context_length: Size = 1024
    """Maximum sequence length in tokens; for packed text, the length of every row."""

    max_samples: PositiveInt | None = None
    """Number of rows to use from the start of each path; by default all."""

    packing: bool = True
    """Pack several documents or conversations into one row, separated by the attention mask; otherwise pad."""

    text_packing: Literal["stream", "best-fit"] = "stream"
    """Packed text: one stream of documents cut into rows, or complete documents placed by best fit."""

    chat_template: PathText | None = None
    """A file, or chatml, llama3, alpaca, plain; by default the tokenizer's own. It is saved with the model."""

    train_on: str = "assistant"
    """Messages to train on: roles (assistant,tool), the last answer (last), all, or by each message's flag (flag)."""

    on_bad_row: Literal["stop", "skip"] = "stop"
    """What to do with a row that cannot be read or trained on; skipped rows are counted and written to a file."""

    on_long_row: Literal["auto", "drop", "truncate", "split"] = "auto"
    """What to do with a row longer than context_length; auto splits text and drops other rows. Both are counted."""

    shuffle: bool = True
    """Draw samples in a random order, which depends only on training.seed and the epoch."""

    validation_path: tuple[PathText, ...] | dict[SetName, tuple[PathText, ...]] | None = None
    """Validation data, with the same choices as data.path, or demo:heldout; task_b=b.jsonl,task_a=a.jsonl are two sets
    with a loss each, and the first one decides checkpoint.save_best and training.patience."""

    validation_split: Fraction = 0.0
    """Share of data.path held out for validation, chosen by training.seed."""

    cache_dir: PathText = "cache/datasets"
    """Folder of the token cache; its entries are keyed by everything that decides their contents."""

    prepare_workers: WorkerCount | None = None
    """Processes that tokenize; by default one per core, and none for small files; 0 tokenizes in this process."""

    num_workers: WorkerCount = 1
    """Threads that build micro-batches ahead; 0 builds them in the training thread."""

    @property
    def validation_sets(self) -> dict[str, tuple[str, ...]]:
        """The paths of each validation set by its name, which is empty if there is only one without a name."""
        paths = self.validation_path or {}
        return paths if isinstance(paths, dict) else {"": paths}

    @property
    def validation_paths(self) -> tuple[str, ...]:
        """The paths of all validation sets."""
        return tuple(chain(*self.validation_sets.values()))


@dataclass(frozen=True)
class TrainingConfig:
    mode: Literal["epoch", "step", "token", "infinite"] | None = None
    """Which of max_epochs, max_steps, max_tokens must be set; infinite: none. The first limit reached ends the run."""

    max_steps: PositiveInt | None = None
    """Number of optimizer steps."""

    max_epochs: Epochs | None = None
    """Passes over the data; one if no limit is set."""

    max_tokens: TokenCount | None = None
    """Tokens to train on, without padding; the run ends with the step that reaches this number."""

    global_batch_size: Size | None = None
    """Samples per optimizer step: rows of context_length for packed text, rows of the data otherwise; by default 32
    with model.path."""

    batch_size: Size | Literal["auto"] | None = None
    """Rows per device and micro-step, except for packed conversations; auto finds the fastest size that fits (see
    auto_batch). By default auto on a GPU, and on a CPU 8 for text and 4 for conversations."""

    grad_accum_steps: Size | None = None
    """Micro-steps per optimizer step; by default derived from the batch sizes. If set, the global size is derived."""

    max_tokens_per_gpu: PositiveInt | None = None
    """Tokens per device and micro-step for packed conversations; by default found like batch_size on a GPU, and
    context_length on a CPU."""

    seed: NonNegativeInt = 0
    """Seed of the initialization, the order of the data and the validation split."""

    precision: Literal["auto", "fp32", "bf16", "bf16-pure", "fp8", "fp8-pure"] = "auto"
    """fp32, bf16 (bf16 compute; fp32 weights, reduction and moments), or bf16-pure (also bf16 weights and moments).
    fp8 and fp8-pure are the same two with the linears of the blocks in FP8, by torchao. auto is bf16 on a GPU that has
    it and fp32 on a CPU; a resumed run keeps its precision."""

    fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Scales of FP8: one for a tensor (tensorwise, the fastest), or one for each of its rows (rowwise, more exact)."""

    validate_every_steps: PositiveInt | None = None
    """Validate every n optimizer steps."""

    validate_every_epochs: Epochs | None = None
    """Validate every n epochs, such as 0.5."""

    validate_every_samples: PositiveInt | None = None
    """Validate every n samples."""

    validate_at_end: bool = True
    """Validate at the end of the run, if there is validation data."""

    patience: PositiveInt | None = None
    """Early stopping: end the run when n validations in a row have not improved on the best validation loss."""

    @property
    def micro_batch_rows(self) -> int | None:
        """`batch_size` if it is a number."""
        return self.batch_size if isinstance(self.batch_size, int) else None


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer: adamw, or muon for the matrices of the blocks and AdamW for everything else."""

    learning_rate: NonNegativeFloat = 3e-4
    """Peak learning rate of AdamW; by default 2e-5 with model.path, and 2e-4 with LoRA."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""

    eps: PositiveFloat = 1e-8
    """Epsilon in the denominator of AdamW."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of all parameters except those of optim.no_decay; by default 0 with model.path."""

    no_decay: tuple[str, ...] = ("norm", "bias", "embed")
    """Kinds of parameters without weight decay: norm, bias, embed, head, matrix."""

    muon_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of Muon; by default optim.learning_rate, which suits muon_adjust_lr_fn match_rms_adamw."""

    muon_momentum: Beta = 0.95
    """Decay rate of Muon's (Nesterov) momentum."""

    muon_adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of Muon's learning rate by a matrix's shape: 0.2 sqrt(max(rows, columns)), which gives updates the size of
    AdamW's, or (original) sqrt(max(1, rows / columns))."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Clip gradients to this global norm; 0 turns clipping off."""

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after warm-up: constant, linear or cosine decay, or warmup-stable-decay."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""

    warmup_ratio: Fraction = 0.0
    """Linear warm-up as a share of the run, instead of warmup_steps; by default 0.03 with model.path."""

    min_lr_ratio: Fraction = 0.0
    """Learning rate after the last step, as a share of the peak."""

    decay_steps: PositiveInt | None = None
    """Steps of the final decay of wsd; by default a fifth of the run."""


@dataclass(frozen=True)
class TuningConfig:
    method: Literal["full", "lora", "osft"] = "full"
    """What is trained: all parameters; low-rank adapters of frozen linears (LoRA), saved in PEFT's format; or the
    smallest singular directions of the linears (OSFT)."""

    lora_rank: Size = 16
    """Rank of the adapters (PEFT's r)."""

    lora_alpha: PositiveFloat | None = None
    """The adapters are multiplied by alpha / rank; by default alpha is 2 x rank."""

    lora_dropout: Beta = 0.0
    """Dropout of the adapters' input."""

    lora_targets: tuple[str, ...] = ("all-linear",)
    """Linears that get an adapter: ends of Hugging Face names (q_proj,v_proj), a regular expression, or all-linear,
    which is all but the head."""

    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained as they are, and saved with the adapter: ends of names, such as embed_tokens,lm_head."""

    lora_rslora: bool = False
    """Multiply the adapters by alpha / sqrt(rank) (rsLoRA)."""

    lora_dora: bool = False
    """Also train the length of every row of the adapted weights (DoRA)."""

    lora_plus_ratio: PositiveFloat | None = None
    """Learning rate of B, as a multiple of optim.learning_rate (LoRA+)."""

    adapter: PathText | None = None
    """PEFT adapter to continue: a folder, or a run. Rank, alpha, dropout and targets are its own."""

    frozen_adapters: dict[SetName, PathText] | None = None
    """PEFT adapters of the same model that are active in training, but not trained, as in style=runs/style."""

    quantize_base: Literal["none", "int8", "nf4"] = "none"
    """LoRA: keep the frozen linears of the blocks in 8 or 4 bits, by bitsandbytes (QLoRA)."""

    unfreeze_rank_ratio: Fraction = 0.25
    """OSFT: share of the singular directions of every target that is trained, those of the smallest singular values: 0
    trains nothing of the targets, 1 all of them."""

    osft_targets: tuple[str, ...] = ("all-linear",)
    """OSFT: linears whose largest singular directions are frozen, named as in lora_targets."""

    osft_train_rest: bool = False
    """OSFT: also train all other parameters: embeddings, norms, biases and head."""


@dataclass(frozen=True)
class ParallelConfig:
    dp_replicate: PositiveInt = 1
    """Replicas of the model; their gradients are summed."""

    dp_shard: PositiveInt | None = None
    """Ranks that shard one replica with FSDP2; by default all remaining ranks."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks, which shard every matrix; best within one machine."""

    pp: PositiveInt = 1
    """Pipeline-parallel ranks, which hold different layers."""

    zero: ZeroStage = 3
    """ZeRO stage: 1 shards moments, 2 also gradients, 3 also parameters; 1 and 2 gather all parameters in a step."""

    sequence: bool = True
    """Sequence parallelism with tp: shard norms and the residual stream along the sequence; saves memory."""

    reduce: Literal["auto", "each", "once"] = "auto"
    """Reduce gradients at each micro-step, or once per step, which keeps unsharded fp32 gradients; auto is once for
    zero 1, for replicas without shards and for pipelines, and each for zero 2 and 3."""

    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Pipeline schedule; interleaved has several stages per rank, a smaller bubble and more communication."""

    stages_per_rank: PositiveInt | None = None
    """Stages per rank with schedule interleaved; by default 2."""

    stage_layers: tuple[PositiveInt, ...] = ()
    """Layers of each pipeline stage; by default balanced, including the cost of the head."""


@dataclass(frozen=True)
class AutoBatchConfig:
    enabled: bool | None = None
    """Find the fastest micro-batch that fits, before the first step; by default on a GPU if training.batch_size,
    max_tokens_per_gpu and grad_accum_steps are not set and the run is not too short. The global batch is the same."""

    margin: Annotated[float, Range(0, 1, exclude_min=True)] = 0.85
    """Share of the device's memory that a step may take."""

    memory_limit: MemoryText | None = None
    """Memory that a rank may take, such as 8GiB; by default what is free on its GPU, or on a CPU its share of the
    machine's or container's free memory."""

    cache: bool = True
    """Keep what was measured in $TORCHSTONE_CACHE (by default ~/.cache/torchstone), for the next run of this kind."""

    time_limit: Seconds = 120.0
    """Seconds after which the search ends with the best size so far."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: PositiveInt | None = None
    """Save every n optimizer steps."""

    every_samples: PositiveInt | None = None
    """Save every n samples."""

    every_epochs: Epochs | None = None
    """Save every n epochs, such as 0.5."""

    every_minutes: NonNegativeFloat | None = None
    """Save every n minutes; by default 30 if no other interval is set; 0 turns it off."""

    at_end: bool = True
    """Save at the end of the run."""

    save_best: bool = False
    """Save after a validation with the best loss so far, and keep that checkpoint."""

    keep_last: PositiveInt | None = 2
    """Checkpoints to keep besides the best one and the one resumed from; null keeps all."""

    resume: PathText = "auto"
    """auto: newest complete checkpoint of output_dir; never: an error if there is one; or the path of a checkpoint,
    or of a run, which stands for its newest."""


@dataclass(frozen=True)
class ObserveConfig:
    log_every_steps: PositiveInt = 1
    """Steps between two console lines; metrics.jsonl has every step."""

    console: Literal["auto", "bar", "lines", "quiet"] = "auto"
    """Progress bar, a line per step, or warnings only; auto shows a bar on a terminal and lines elsewhere."""

    ranks: Literal["first", "all"] = "first"
    """Ranks whose lines are shown on the terminal; every rank has its own log in logs/rank-N.log."""

    sample_every_steps: PositiveInt | None = None
    """Let the model continue prompts every n steps; the texts are in the log and in samples.jsonl."""

    sample_prompts: tuple[str, ...] = ()
    """Prompts of the samples: questions if the data has conversations, otherwise texts; by default from the data."""

    sample_tokens: PositiveInt = 64
    """Maximum length of a sample in tokens."""

    peak_tflops: PositiveFloat | None = None
    """Dense TFLOP/s of one GPU in the precision of the run, for MFU; by default known from the GPU's name."""

    profile: StepsText | None = None
    """Steps to profile: n steps after the first two, or first-last; a trace and a table go to profile/."""


@dataclass(frozen=True)
class SystemConfig:
    device: Device = "auto"
    """Device; auto is CUDA if available."""

    device_id: NonNegativeInt | None = None
    """Index of the visible CUDA device for a single process; by default all of them, one process each."""

    threads: ThreadCount | None = None
    """CPU threads of torch; by default torch's own choice."""

    hang_timeout: Seconds = 1800.0
    """Seconds without progress after which a worker counts as hung and the run fails."""

    join_timeout: Seconds = 3600.0
    """Seconds that workers and nodes wait for each other when a run starts."""

    save_grace: Seconds = 300.0
    """With several processes: seconds that workers have to save after a stop signal, before they are killed."""


@dataclass(frozen=True)
class DebugConfig:
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """If a loss or gradient is NaN or infinite: stop with exit code 5; skip the batch, as if it were not in the data;
    or roll back to the last checkpoint and leave out the data since then."""

    on_spike: Literal["off", "warn", "stop", "skip", "rollback"] = "warn"
    """If a loss is far above the recent ones: stop, skip or rollback, as for on_nan; or warn and apply the update."""

    spike_threshold: Annotated[float, Range(1, 1e6)] = 10.0
    """How far above the median of the last 64 losses a spike is, in robust standard deviations."""

    max_bad_steps: NonNegativeInt = 3
    """How many batches in a row may be skipped, and how often a run may go back to one checkpoint, before it stops."""

    dump_limit: MemoryText = "100MiB"
    """Size of the tensors in the files that each rank writes for a NaN (see torchstone debug show); 0 writes none."""


@dataclass(frozen=True)
class Config:
    """The complete config of a run. `output_dir` is the only key outside a section that users set."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    auto_batch: AutoBatchConfig = field(default_factory=AutoBatchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    output_dir: PathText = "runs/train"
    """Folder of the run: config.json, metrics.jsonl, checkpoints, logs."""

    preset_batch_keys: tuple[str, ...] = ()
    """Batch sizes that a preset set: one that does not apply to the data is dropped, where a typed one is an error."""


SECTION_HELP = {
    "model": "the model",
    "data": "the data",
    "training": "length, batch sizes, precision, validation",
    "optim": "AdamW, Muon, learning-rate schedule, clipping",
    "tuning": "what is trained: everything, LoRA adapters, or a part of the linears (OSFT)",
    "parallel": "parallelism",
    "auto_batch": "automatic size of micro-batches",
    "checkpoint": "saving and resuming",
    "observe": "console output",
    "system": "devices and timeouts",
    "debug": "what happens at a NaN or a loss spike",
}

# Keys that describe a new model. With model.path only the tokenizer may be set: it replaces the model's own.
NEW_MODEL_KEYS = (
    "model.family", "model.depth", "model.width", "model.heads", "model.kv_heads", "model.mlp_width",
    "model.tied", "model.rope_theta", "model.init_std", "model.tokenizer",
)  # fmt: skip

# Defaults with model.path where they differ from those of a new model; docs/training.md says why.
FINE_TUNING_DEFAULTS = {"optim.learning_rate": 2e-5, "optim.weight_decay": 0.0, "optim.warmup_ratio": 0.03}
FINE_TUNING_BATCH_SIZE = 32
# Adapters need about ten times the learning rate of full fine-tuning.
LORA_LEARNING_RATE = 2e-4
OSFT_KEYS = ("unfreeze_rank_ratio", "osft_targets", "osft_train_rest")
LORA_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "lora_rslora", "lora_dora")
# LoRA settings that are not part of an adapter.
LORA_RUN_KEYS = ("lora_plus_ratio", "adapter", "frozen_adapters", "quantize_base")
# Sizes that apply to one kind of data: rows that hold several samples, or rows that hold one.
PRESET_BATCH_KEYS = ("training.batch_size", "training.grad_accum_steps", "training.max_tokens_per_gpu")

Purpose = Literal["train", "data", "plan"]
# Rows per device and micro-step if training.batch_size is not set.
DEFAULT_TEXT_ROWS, DEFAULT_CHAT_ROWS = 8, 4
# Minutes between two checkpoints if no interval is set.
DEFAULT_SAVE_MINUTES = 30.0
PARAMETER_KINDS = ("norm", "bias", "embed", "head", "matrix")


class InvalidConfigError(UsageError):
    """A combination of values that cannot work; `key` is the one to change."""

    def __init__(self, key: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.key = key


@dataclass(frozen=True)
class Rule:
    """A combination of values that is not allowed. Message and hint are formatted with `c`, the config."""

    key: str
    is_violated: Callable[[Config], bool]
    message: str
    hint: str | None = None
    # Preparing or inspecting data needs a tokenizer, but no model.
    only_for_training: bool = False
    # A plan needs no data.
    is_about_data: bool = False


def validate(config: Config, purpose: Purpose = "train") -> None:
    """Raises InvalidConfigError for the first violated rule."""
    for rule in RULES:
        is_skipped = (purpose == "data" and rule.only_for_training) or (purpose == "plan" and rule.is_about_data)
        if not is_skipped and rule.is_violated(config):
            hint = None if rule.hint is None else rule.hint.format(c=config)
            raise InvalidConfigError(rule.key, rule.message.format(c=config), hint)


def resolve_stages_per_rank(parallel: ParallelConfig) -> int:
    return parallel.stages_per_rank or (2 if parallel.schedule == "interleaved" else 1)


def parse_steps(text: str) -> tuple[int | None, int] | None:
    """`3` is (None, 3): three steps. `10-12` is (10, 12): the first and the last. None if it is neither."""
    match = re.fullmatch(r"(?:(\d{1,18})-)?(\d{1,18})", text.strip())
    if match is None:
        return None
    first, last = int(match[1]) if match[1] else None, int(match[2])
    return (first, last) if 1 <= (1 if first is None else first) <= last else None


def parse_memory(text: str) -> int | None:
    """The bytes of `6GiB`, `512 MiB`, `8GB` or a number of bytes; None if it is none of these."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None or (match[3] and not match[2]):
        return None
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))


def resolve_save_minutes(checkpoint: CheckpointConfig) -> float | None:
    """The minutes between two checkpoints; None if the clock does not decide."""
    if checkpoint.every_minutes is not None:
        return checkpoint.every_minutes or None
    intervals = (checkpoint.every_steps, checkpoint.every_samples, checkpoint.every_epochs)
    return DEFAULT_SAVE_MINUTES if intervals == (None, None, None) else None


def _new_model_rule(key: str) -> Rule:
    name = key.removeprefix("model.")
    return Rule(
        key,
        lambda c: c.model.path is not None and getattr(c.model, name) != getattr(ModelConfig, name),
        f"{key} is for a new model, but model.path loads an existing one",
        f"leave out {key} or model.path",
    )


def _validation_rule(section: str, name: str) -> Rule:
    return Rule(
        f"{section}.{name}",
        lambda c: (
            c.data.validation_path is None
            and c.data.validation_split == 0
            and getattr(getattr(c, section), name) not in (None, False)
        ),
        f"{section}.{name} is set, but there is no validation data",
        "add --data.validation_path FILE.jsonl or --data.validation_split 0.05",
    )


def _has_validation_interval(training: TrainingConfig) -> bool:
    return any((training.validate_every_steps, training.validate_every_epochs, training.validate_every_samples))


def _mode_rules(mode: str) -> list[Rule]:
    key = f"training.max_{mode}s"
    return [
        Rule(
            "training.mode",
            lambda c: c.training.mode == "infinite" and getattr(c.training, f"max_{mode}s") is not None,
            f"training.mode infinite never ends, but {key} is set",
            f"leave out {key} or training.mode",
        ),
        Rule(
            key,
            lambda c: c.training.mode == mode and getattr(c.training, f"max_{mode}s") is None,
            f"training.mode {mode} needs {key}",
            f"add --{key} N",
        ),
    ]


def _auto_batch_rule(name: str) -> Rule:
    return Rule(
        f"training.{name}",
        lambda c: c.training.batch_size == "auto" and getattr(c.training, name) is not None,
        f"training.{name} is set, but training.batch_size auto finds the size of micro-batches",
        "leave out one of them; --training.global_batch_size sets the samples of a step",
    )


def _pipeline_rule(name: str, is_set: Callable[[ParallelConfig], bool]) -> Rule:
    return Rule(
        f"parallel.{name}",
        lambda c: c.parallel.pp == 1 and is_set(c.parallel),
        f"parallel.{name} is for pipelines, but parallel.pp is 1",
        f"leave out parallel.{name}, or set --parallel.pp",
    )


def _muon_rule(name: str) -> Rule:
    return Rule(
        f"optim.{name}",
        lambda c: c.optim.name != "muon" and getattr(c.optim, name) != getattr(OptimConfig, name),
        f"optim.{name} is for Muon, but optim.name is {{c.optim.name}}",
        f"leave out optim.{name}, or set --optim.name muon",
    )


def _lora_rule(name: str) -> Rule:
    return Rule(
        f"tuning.{name}",
        lambda c: c.tuning.method != "lora" and getattr(c.tuning, name) != getattr(TuningConfig, name),
        f"tuning.{name} is for LoRA, but tuning.method is {{c.tuning.method}}",
        f"leave out tuning.{name}, or set --tuning.method lora",
    )


def _osft_rule(name: str) -> Rule:
    return Rule(
        f"tuning.{name}",
        lambda c: c.tuning.method != "osft" and getattr(c.tuning, name) != getattr(TuningConfig, name),
        f"tuning.{name} is for OSFT, but tuning.method is {{c.tuning.method}}",
        f"leave out tuning.{name}, or set --tuning.method osft",
    )


def _adapter_rule(name: str) -> Rule:
    return Rule(
        f"tuning.{name}",
        lambda c: c.tuning.adapter is not None and getattr(c.tuning, name) != getattr(TuningConfig, name),
        f"both tuning.{name} and tuning.adapter are set, but the adapter has its own",
        f"leave out tuning.{name}",
    )


def _sample_rule(name: str) -> Rule:
    return Rule(
        f"observe.{name}",
        lambda c: c.observe.sample_every_steps is None and getattr(c.observe, name) != getattr(ObserveConfig, name),
        f"observe.{name} has no effect: observe.sample_every_steps is not set",
        "add --observe.sample_every_steps 100",
    )


RULES = [
    Rule(
        "model.depth",
        lambda c: c.model.path is None and c.model.depth is None,
        "no model: neither model.path nor model.depth is set",
        "--model.path FOLDER starts from a Hugging Face model, --model.depth 4 makes a new one",
        only_for_training=True,
    ),
    *(_new_model_rule(key) for key in NEW_MODEL_KEYS if key != "model.tokenizer"),
    Rule(
        "model.tokenizer",
        lambda c: c.model.path is None and c.model.tokenizer is None,
        "no tokenizer: neither model.tokenizer nor model.path is set",
        "use --model.tokenizer FOLDER, or --model.tokenizer demo:tokenizer for the built-in one",
    ),
    Rule(
        "data.path",
        lambda c: not c.data.path,
        "no training data: data.path is not set",
        "use --data.path FILE.jsonl, or --data.path demo:corpus for the built-in corpus",
        is_about_data=True,
    ),
    Rule(
        "data.weights",
        lambda c: bool(c.data.weights) and len(c.data.weights) != len(c.data.path or ()),
        "data.weights {c.data.weights} and data.path {c.data.path} have different lengths",
        "give one weight per path",
    ),
    Rule(
        "data.format",
        lambda c: len(c.data.format) not in (1, len(c.data.path or ())),
        "data.format {c.data.format} and data.path {c.data.path} have different lengths",
        "give one format for all paths, or one per path",
    ),
    Rule(
        "data.columns",
        lambda c: any(
            len(c.data.columns) > 1 and len(c.data.columns) != len(paths)
            for paths in (c.data.path or (), c.data.validation_paths or c.data.columns)
        ),
        "data.columns {c.data.columns} does not have one mapping for each path of data.path and data.validation_path",
        "give one mapping for all paths, or one per path",
    ),
    Rule(
        "data.validation_split",
        lambda c: c.data.validation_path is not None and c.data.validation_split > 0,
        "both data.validation_path and data.validation_split are set",
        "leave out one of them",
    ),
    *(_validation_rule("training", f"validate_every_{unit}") for unit in ("steps", "epochs", "samples")),
    _validation_rule("checkpoint", "save_best"),
    Rule(
        "checkpoint.save_best",
        lambda c: c.checkpoint.save_best and not (_has_validation_interval(c.training) or c.training.validate_at_end),
        "checkpoint.save_best is set, but the run never validates",
        "leave out training.validate_at_end, or add --training.validate_every_steps N",
    ),
    _validation_rule("training", "patience"),
    Rule(
        "training.fp8_recipe",
        lambda c: c.training.fp8_recipe != "tensorwise" and not c.training.precision.startswith("fp8"),
        "training.fp8_recipe is set, but training.precision {c.training.precision} does not use FP8",
        "add --training.precision fp8, or leave out training.fp8_recipe",
    ),
    Rule(
        "training.precision",
        lambda c: c.training.precision.startswith("fp8") and c.parallel.tp > 1,
        "training.precision {c.training.precision} does not work with parallel.tp, which shards the linears",
        "leave out parallel.tp (--parallel.dp_shard and --parallel.pp work), or use --training.precision bf16",
    ),
    Rule(
        "training.patience",
        lambda c: c.training.patience is not None and not _has_validation_interval(c.training),
        "training.patience counts validations, but the only one is at the end of the run",
        "add --training.validate_every_steps N, or validate_every_epochs or validate_every_samples",
    ),
    Rule(
        "data.validation_split",
        lambda c: c.data.validation_split == 1,
        "data.validation_split 1 leaves no training data",
        "use a smaller share, such as 0.05",
    ),
    *(rule for mode in ("step", "epoch", "token") for rule in _mode_rules(mode)),
    Rule(
        "optim.schedule",
        lambda c: c.training.mode == "infinite" and c.optim.schedule != "constant",
        "training.mode infinite has no end, so optim.schedule {c.optim.schedule} cannot decay",
        "use --optim.schedule constant (warm-up still works)",
    ),
    Rule(
        "auto_batch.enabled",
        lambda c: c.auto_batch.enabled is False and c.training.batch_size == "auto",
        "training.batch_size is auto, but auto_batch.enabled is false",
        "leave out one of them",
    ),
    *(_auto_batch_rule(name) for name in ("max_tokens_per_gpu", "grad_accum_steps")),
    Rule(
        "auto_batch.memory_limit",
        lambda c: c.auto_batch.memory_limit is not None and (parse_memory(c.auto_batch.memory_limit) or 0) < 2**20,
        "auto_batch.memory_limit {c.auto_batch.memory_limit!r} is not a size in bytes of at least 1MiB",
        "use a unit, such as --auto_batch.memory_limit 8GiB",
    ),
    Rule(
        "debug.dump_limit",
        lambda c: parse_memory(c.debug.dump_limit) is None,
        "debug.dump_limit {c.debug.dump_limit!r} is not a size in bytes",
        "use a unit, such as --debug.dump_limit 1GiB, or 0 for no files",
    ),
    _pipeline_rule("stages_per_rank", lambda p: p.stages_per_rank is not None),
    _pipeline_rule("stage_layers", lambda p: bool(p.stage_layers)),
    _pipeline_rule("schedule", lambda p: p.schedule == "interleaved"),
    Rule(
        "parallel.stages_per_rank",
        lambda c: c.parallel.stages_per_rank not in (None, 1) and c.parallel.schedule != "interleaved",
        "parallel.schedule 1f1b has one stage per rank",
        "use --parallel.schedule interleaved",
    ),
    Rule(
        "parallel.stages_per_rank",
        lambda c: c.parallel.stages_per_rank == 1 and c.parallel.schedule == "interleaved",
        "parallel.schedule interleaved needs at least 2 stages per rank",
        "use --parallel.stages_per_rank 2",
    ),
    Rule(
        "parallel.stage_layers",
        lambda c: (
            bool(c.parallel.stage_layers)
            and len(c.parallel.stage_layers) != c.parallel.pp * resolve_stages_per_rank(c.parallel)
        ),
        "parallel.stage_layers {c.parallel.stage_layers} does not have one number per stage",
        "there are parallel.pp {c.parallel.pp} x stages_per_rank stages",
    ),
    Rule(
        "parallel.reduce",
        lambda c: c.parallel.reduce == "each" and c.parallel.pp > 1,
        "parallel.reduce each does not work with pipelines, which reduce gradients once per step",
        "leave out parallel.reduce",
    ),
    Rule(
        "optim.warmup_ratio",
        lambda c: c.optim.warmup_ratio > 0 and c.optim.warmup_steps > 0,
        "both optim.warmup_steps and optim.warmup_ratio are set",
        "leave out one of them",
    ),
    Rule(
        "optim.warmup_ratio",
        lambda c: c.optim.warmup_ratio > 0 and c.training.mode == "infinite",
        "optim.warmup_ratio needs a run with an end, but training.mode is infinite",
        "use --optim.warmup_steps N",
    ),
    Rule(
        "observe.sample_every_steps",
        lambda c: c.observe.sample_every_steps is not None and c.parallel.pp > 1,
        "observe.sample_every_steps does not work with pipelines, whose ranks hold only some of the layers",
        "leave it out; torchstone generate and torchstone chat read every checkpoint",
    ),
    *(_lora_rule(name) for name in (*LORA_KEYS, "modules_to_save", *LORA_RUN_KEYS)),
    *(_adapter_rule(name) for name in (*LORA_KEYS, "modules_to_save")),
    *(_osft_rule(name) for name in OSFT_KEYS),
    Rule(
        "tuning.quantize_base",
        lambda c: c.tuning.quantize_base != "none" and c.parallel.tp > 1,
        "tuning.quantize_base does not work with parallel.tp: quantized weights are not sharded",
        "use --parallel.pp, or data parallelism, which keeps all of them on every rank",
    ),
    Rule(
        "tuning.method",
        lambda c: c.tuning.method != "full" and c.model.path is None,
        "tuning.method {c.tuning.method} tunes an existing model, but model.path is not set",
        "add --model.path FOLDER",
        only_for_training=True,
    ),
    Rule(
        "model.fused",
        lambda c: c.tuning.method != "full" and c.model.fused != ("auto",) and bool(c.model.fused),
        "model.fused does not work with tuning.method {c.tuning.method}, which tunes single projections",
        "leave out model.fused",
    ),
    Rule(
        "training.precision",
        lambda c: c.tuning.method == "osft" and c.training.precision.startswith("fp8"),
        "training.precision {c.training.precision} does not work with OSFT, which multiplies by sums of factors",
        "use --training.precision bf16",
    ),
    Rule(
        "training.precision",
        lambda c: c.tuning.quantize_base != "none" and c.training.precision.startswith("fp8"),
        "training.precision {c.training.precision} does not work with tuning.quantize_base: both say how the frozen "
        "linears are multiplied",
        "leave out one of them",
    ),
    Rule(
        "training.precision",
        lambda c: c.tuning.method == "osft" and c.training.precision == "bf16-pure",
        "training.precision bf16-pure does not work with OSFT: in bf16 nothing stays orthogonal",
        "use --training.precision bf16, which keeps frozen weights in bf16, too",
    ),
    Rule(
        "optim.name",
        lambda c: c.tuning.method != "full" and c.optim.name == "muon",
        "optim.name muon does not work with tuning.method {c.tuning.method}: it orthogonalizes whole matrices, not "
        "their factors",
        "use --optim.name adamw",
    ),
    *(_sample_rule(name) for name in ("sample_prompts", "sample_tokens")),
    *(_muon_rule(name) for name in ("muon_learning_rate", "muon_momentum", "muon_adjust_lr_fn")),
    Rule(
        "optim.muon_learning_rate",
        lambda c: c.optim.muon_learning_rate is not None and c.optim.learning_rate == 0,
        "optim.muon_learning_rate follows the schedule of optim.learning_rate, which is 0",
        "leave it out, or set --optim.learning_rate to more than 0",
    ),
    Rule(
        "observe.profile",
        lambda c: c.observe.profile is not None and parse_steps(c.observe.profile) is None,
        "observe.profile {c.observe.profile!r} is neither a number of steps nor a range",
        "use --profile 3, or --profile 10-12 for steps 10 to 12",
    ),
    Rule(
        "optim.decay_steps",
        lambda c: c.optim.decay_steps is not None and c.optim.schedule != "wsd",
        "optim.decay_steps is for schedule wsd, not {c.optim.schedule}",
        "leave it out, or use --optim.schedule wsd",
    ),
    Rule(
        "optim.min_lr_ratio",
        lambda c: c.optim.min_lr_ratio > 0 and c.optim.schedule == "constant",
        "optim.min_lr_ratio is for schedules that decay, not constant",
        "leave it out, or use --optim.schedule cosine",
    ),
    Rule(
        "optim.no_decay",
        lambda c: not set(c.optim.no_decay) <= set(PARAMETER_KINDS),
        "optim.no_decay {c.optim.no_decay} has an unknown kind of parameter",
        f"the kinds are {', '.join(PARAMETER_KINDS)}",
    ),
]
