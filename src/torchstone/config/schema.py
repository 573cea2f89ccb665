"""Every setting of a run: one frozen dataclass a section, and under each field the sentence that is its help.

A key exists here only if something reads it: an accepted key that changes nothing would be a lie. What a value may be
is in its type (`Count` is a whole number from 1, `Fraction` lies in [0, 1]); what several values must be together is in
`check`. Files, the command line and Python all end here (load.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchstone.errors import UsageError


@dataclass(frozen=True)
class Range:
    """The numbers a field takes, both ends included unless `above` or `below` says that one is not."""

    low: float
    high: float | None = None
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        low_ok = value > self.low if self.above else value >= self.low
        return low_ok and (self.high is None or (value < self.high if self.below else value <= self.high))

    def __str__(self) -> str:
        low = f"{'more than' if self.above else 'at least'} {self.low:g}"
        return low if self.high is None else f"{low} and {'less than' if self.below else 'at most'} {self.high:g}"


Device = Literal["auto", "cpu", "cuda"]
Format = Literal["auto", "tokens", "messages", "sharegpt", "alpaca", "prompt", "text", "document"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
FamilyName = Literal[
    "llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2", "gemma2", "gemma3_text", "phi3", "gpt2"
]
Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, 1, below=True)]
Seed = Annotated[int, Range(0, 2**63, below=True)]
Zero = Annotated[int, Range(1, 3)]
Threads = Annotated[int, Range(1, 1024)]
Workers = Annotated[int, Range(0, 256)]


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = None
    """Hugging Face folder, checkpoint or run folder to start from; without it a new model is made from model.depth."""

    tokenizer: str | None = None
    """Folder of the tokenizer, or demo:tokenizer for the built-in one; by default the one in model.path."""

    family: FamilyName = "llama"
    """Architecture of a new model; a model from model.path keeps its own."""

    depth: Count | None = None
    """Layers of a new model; width, heads and initialisation follow from it and are printed."""

    width: Count | None = None
    """Hidden size of a new model; by default 64 x depth."""

    heads: Count | None = None
    """Attention heads of a new model; by default one per 64 of width up to 1024 and one per 128 beyond."""

    kv_heads: Count | None = None
    """Key/value heads of a new model; by default as many as heads."""

    mlp_width: Count | None = None
    """Inner size of the MLP of a new model; by default 8/3 of the width, rounded up to a multiple of 64."""

    tied: bool = True
    """Whether the output head of a new model is the embedding matrix."""

    rope_theta: Positive = 10000.0
    """Base of the rotary positions of a new model."""

    init_std: Positive | None = None
    """Standard deviation of a new model's matrices; by default sqrt(2 / (5 x width))."""

    implementation: Literal["auto", "native", "fallback"] = "auto"
    """The decoder of this package (native) or Transformers' own code (fallback); auto is native where it can be."""

    trust_remote_code: bool = False
    """Run code that lies in the folder of model.path, for models that Transformers does not know."""

    attention: Literal["auto", "sdpa", "flash", "flex", "eager", "flash-attn", "fa3"] = "auto"
    """Kernel of attention; auto takes the fastest that keeps documents apart here, and says which."""

    fused: tuple[Literal["qkv", "gate_up"], ...] = ()
    """Matrices that run as one, of: qkv, gate_up. Files keep the names of their family."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: compute again in the backward pass what is cheap (selective) or each block (full)."""

    compile: Literal["none", "block", "whole"] = "none"
    """torch.compile for each block, or for the whole model."""

    liger: tuple[Literal["auto", "norm", "rope", "mlp", "loss"], ...] = ()
    """Kernels of Liger, of: norm, rope, mlp, loss; auto takes those installed and useful here, and says which."""


@dataclass(frozen=True)
class DataConfig:
    path: tuple[str, ...] | None = None
    """What to train on: a file (JSONL, .gz, .zst, parquet), a folder, a glob, several with commas; or demo:corpus."""

    weights: tuple[Positive, ...] = ()
    """Shares of the samples that come from each path, in any unit; without them every row is seen once an epoch."""

    format: tuple[Format, ...] = ("auto",)
    """Shape of the rows, one for all paths or one for each; auto recognises it by the keys of the first row."""

    context_length: Count = 1024
    """Longest sequence in tokens; with text and packing, the length of every row."""

    max_samples: Count | None = None
    """Rows taken of each path, from its beginning; by default all."""

    packing: bool = True
    """Put several documents or conversations in one row, kept apart by attention; otherwise pad."""

    text_packing: Literal["stream", "best-fit"] = "stream"
    """Rows of packed text: cut from one long stream of documents, or whole documents where they fit best."""

    chat_template: str | None = None
    """A file, or chatml, llama3, alpaca, plain; by default the tokenizer's own template. It is saved with the model."""

    train_on: str = "assistant"
    """What of a conversation is trained: roles (assistant,tool), its last answer (last), all, or by message (flag)."""

    on_bad_row: Literal["stop", "skip"] = "stop"
    """What a row that cannot be read or trained on does; skipped rows are counted and kept in a quarantine file."""

    on_long_row: Literal["auto", "drop", "truncate", "split"] = "auto"
    """What becomes of a row longer than context_length, counted; auto splits text and drops the others."""

    shuffle: bool = True
    """Draw samples in a random order that depends on training.seed and the epoch alone."""

    validation_path: tuple[str, ...] | None = None
    """What to validate on, as data.path; or demo:heldout."""

    validation_split: Fraction = 0.0
    """Share of data.path held out for validation, chosen by training.seed; never trained on."""

    cache_dir: str = "cache/datasets"
    """Where the tokenized data is kept, keyed by everything that decides its contents."""

    prepare_workers: Workers | None = None
    """Processes that tokenize; by default one a core, none for small files; 0 tokenizes in this process."""

    num_workers: Workers = 1
    """Threads that build micro-batches ahead of the step; 0 builds them in the training thread."""


@dataclass(frozen=True)
class TrainingConfig:
    mode: Literal["epoch", "step", "token", "infinite"] | None = None
    """What ends the run; by default the limit that is given. Other limits, where given, end it too."""

    max_steps: Count | None = None
    """Optimizer steps after which the run ends."""

    max_epochs: Positive | None = None
    """Passes over the data after which the run ends; one where no limit at all is given."""

    max_tokens: Count | None = None
    """Tokens, padding not counted, after which the run ends (at the end of that step)."""

    global_batch_size: Count | None = None
    """Samples per optimizer step: rows of context_length for packed text, rows of the data otherwise."""

    batch_size: Count | None = None
    """Rows per device and micro-step where rows are not packed conversations; by default 8 for text, 4 for chat."""

    grad_accum_steps: Count | None = None
    """Micro-steps per optimizer step; follows from the batch sizes unless given, and then the global size follows."""

    max_tokens_per_gpu: Count | None = None
    """Tokens per device and micro-step where conversations are packed; by default context_length."""

    seed: Seed = 0
    """Seed of the initialisation, the order of the data and the validation split."""

    precision: Literal["fp32", "bf16", "bf16-pure"] = "fp32"
    """Numbers of weights and compute: fp32, bf16 (computed in bf16; weights, reduction and moments fp32), bf16-pure."""

    validate_every_steps: Count | None = None
    """Validate after every so many optimizer steps."""

    validate_every_epochs: Positive | None = None
    """Validate whenever so many passes over the data are complete."""

    validate_every_samples: Count | None = None
    """Validate whenever so many samples have been seen."""

    validate_at_end: bool = True
    """Validate once more when the run ends, where there is validation data."""


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: NotNegative = 3e-4
    """Peak learning rate of AdamW."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""

    eps: Positive = 1e-8
    """Term added to the denominator of AdamW."""

    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of the parameters that optim.no_decay does not name."""

    no_decay: tuple[str, ...] = ("norm", "bias", "embed")
    """Kinds of parameters without weight decay, of: norm, bias, embed, head, matrix."""

    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them as they are."""

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after warm-up: constant, linear or cosine decay, or warmup-stable-decay."""

    warmup_steps: Natural = 0
    """Steps over which the learning rate rises linearly from zero."""

    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the run as a share of the peak."""

    decay_steps: Count | None = None
    """Steps of the final decay of wsd; by default a fifth of the run."""


@dataclass(frozen=True)
class ParallelConfig:
    dp_replicate: Count = 1
    """Whole copies of the model, each on ranks of its own; gradients are summed over them."""

    dp_shard: Count | None = None
    """Ranks over which one copy is sharded by FSDP2; by default all that the other sizes leave."""

    tp: Count = 1
    """Ranks that share every matrix (tensor parallelism); best within one machine."""

    pp: Count = 1
    """Stages of layers, one after the other (pipeline parallelism)."""

    zero: Zero = 3
    """What dp_shard shards: 1 moments, 2 gradients too, 3 parameters too; 1 and 2 hold all parameters in a step."""

    sequence: bool = True
    """With tp, norms and the residual stream are shared out along the sequence too; the same numbers, less memory."""

    reduce: Literal["auto", "each", "once"] = "auto"
    """Gradients are reduced over ranks at each micro-step, or once a step, which keeps all of them whole in fp32; auto
    is once for zero 1, for copies alone and for pipelines, and each for zero 2 and 3."""

    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Order of a pipeline's work; interleaved gives each rank several stages, waits less and sends more."""

    stages_per_rank: Count | None = None
    """Stages of a rank with schedule interleaved; by default 2."""

    stage_layers: tuple[Count, ...] = ()
    """Layers of each stage, first to last; by default balanced, the head counting by its size."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: Count | None = None
    """Save after every so many optimizer steps."""

    every_samples: Count | None = None
    """Save whenever so many samples have been seen."""

    every_epochs: Positive | None = None
    """Save whenever so many passes over the data are complete."""

    at_end: bool = True
    """Save when the run ends."""

    save_best: bool = False
    """Save after a validation that is the best so far, and keep that checkpoint."""

    keep_last: Count | None = None
    """Newest checkpoints to keep beside the best one; by default all."""

    resume: str = "auto"
    """auto goes on from the newest whole checkpoint of output_dir, never refuses a used folder, a path names one."""


@dataclass(frozen=True)
class ObserveConfig:
    log_every_steps: Count = 1
    """Steps between two console lines; metrics.jsonl has every step."""

    console: Literal["auto", "bar", "lines", "quiet"] = "auto"
    """Progress bar, a line a step, or nothing but warnings; auto draws a bar on a terminal and lines elsewhere."""

    ranks: Literal["first", "all"] = "first"
    """Whose lines are shown where there are several processes; each has all of its own in logs/rank-N.log."""


@dataclass(frozen=True)
class SystemConfig:
    device: Device = "auto"
    """Where to train; auto takes CUDA where there is any."""

    device_id: Natural | None = None
    """The one of the visible CUDA devices to train on, in one process; by default all of them, a process each."""

    threads: Threads | None = None
    """CPU threads of torch; by default torch's own choice."""

    hang_timeout: Positive = 1800.0
    """Seconds without a sign of progress after which a worker is taken for hung, and the run for failed."""

    join_timeout: Positive = 3600.0
    """Seconds that workers and nodes wait for the others to be there when a run starts."""

    save_grace: Positive = 300.0
    """Seconds that workers have to save when a signal has asked the run to end; then they are killed."""


@dataclass(frozen=True)
class Config:
    """A whole run. `output_dir` is the one key outside a section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    system: SystemConfig = field(default_factory=SystemConfig)

    output_dir: str = "runs/train"
    """Folder of the run: config.json, metrics.jsonl, checkpoints."""


SECTION_HELP = {
    "model": "what is trained",
    "data": "what it is trained on",
    "training": "how long, in which batches, with which numbers",
    "optim": "AdamW, its schedule and clipping",
    "parallel": "how processes share the model and the batch",
    "checkpoint": "what is saved, and where to go on from",
    "observe": "what is shown",
    "system": "where it runs",
}

# What says how a new model looks, and so has no meaning beside model.path (whose tokenizer may be replaced).
NEW_MODEL_KEYS = (
    "model.family", "model.depth", "model.width", "model.heads", "model.kv_heads", "model.mlp_width",
    "model.tied", "model.rope_theta", "model.init_std", "model.tokenizer",
)  # fmt: skip

Job = Literal["train", "data"]
# Rows per device and micro-step where training.batch_size is not given.
ROWS_OF_TEXT, ROWS_OF_CHAT = 8, 4
DECAY_KINDS = ("norm", "bias", "embed", "head", "matrix")


class Impossible(UsageError):
    """Values that cannot stand together; `key` is the one to change, so that the message can say where it was set."""

    def __init__(self, key: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.key = key


def check(config: Config, job: Job = "train") -> None:
    """What a type cannot say: values that contradict each other. Looking at data needs a tokenizer, but no model."""
    model, data, training, optim = config.model, config.data, config.training, config.optim
    if model.path is None and model.depth is None and job == "train":
        raise Impossible(
            "model.depth", "nothing to train: neither model.path nor model.depth is set",
            "--model.path FOLDER starts from a Hugging Face model, --model.depth 4 makes a new one",
        )  # fmt: skip
    if model.path is not None:
        for key in NEW_MODEL_KEYS:
            name = key.removeprefix("model.")
            if getattr(model, name) != getattr(ModelConfig, name) and name != "tokenizer":
                raise Impossible(
                    key, f"{key} shapes a new model, but model.path loads one", f"leave out {key} or model.path"
                )
    if model.path is None and model.tokenizer is None:
        raise Impossible(
            "model.tokenizer", "no tokenizer: neither model.tokenizer nor model.path is set",
            "--model.tokenizer FOLDER, or --model.tokenizer demo:tokenizer for the built-in one",
        )  # fmt: skip
    if not data.path:
        raise Impossible(
            "data.path", "nothing to train on: data.path is not set",
            "--data.path FILE.jsonl, or --data.path demo:corpus for the built-in corpus",
        )  # fmt: skip
    if data.weights and len(data.weights) != len(data.path):
        raise Impossible(
            "data.weights", f"{len(data.weights)} data.weights for {len(data.path)} paths", "give one for each path"
        )
    if len(data.format) not in (1, len(data.path)):
        raise Impossible(
            "data.format", f"{len(data.format)} shapes in data.format for {len(data.path)} paths",
            "give one for all, or one for each path",
        )  # fmt: skip
    if data.validation_path is not None and data.validation_split > 0:
        raise Impossible(
            "data.validation_split", "both data.validation_path and data.validation_split are set", "keep one of them"
        )
    if data.validation_path is None and data.validation_split == 0:
        wanted = {
            f"training.{key}": getattr(training, key) for key in vars(training) if key.startswith("validate_every")
        }
        wanted["checkpoint.save_best"] = config.checkpoint.save_best or None
        for key, value in wanted.items():
            if value is not None:
                raise Impossible(
                    key, f"{key} is set, but there is nothing to validate on",
                    "add --data.validation_path FILE.jsonl or --data.validation_split 0.05",
                )  # fmt: skip
    if data.validation_split == 1:
        raise Impossible("data.validation_split", "data.validation_split 1 leaves nothing to train on")
    if not data.cache_dir:
        raise Impossible("data.cache_dir", "data.cache_dir is empty", "--data.cache_dir cache/datasets")
    if not config.output_dir:
        raise Impossible("output_dir", "output_dir is empty", "--output-dir runs/NAME")
    _check_limits(training, optim)
    _check_pipeline(config.parallel)
    if optim.decay_steps is not None and optim.schedule != "wsd":
        raise Impossible("optim.decay_steps", f"optim.decay_steps is for schedule wsd, not {optim.schedule}")
    if optim.min_lr_ratio > 0 and optim.schedule == "constant":
        raise Impossible("optim.min_lr_ratio", "optim.min_lr_ratio is for schedules that decay, not constant")
    unknown = [kind for kind in optim.no_decay if kind not in DECAY_KINDS]
    if unknown:
        raise Impossible(
            "optim.no_decay", f"optim.no_decay names unknown kinds: {', '.join(unknown)}",
            f"the kinds are {', '.join(DECAY_KINDS)}",
        )  # fmt: skip


def _check_pipeline(parallel: ParallelConfig) -> None:
    for name in ("stages_per_rank", "stage_layers"):
        if getattr(parallel, name) and parallel.pp == 1:
            raise Impossible(f"parallel.{name}", f"parallel.{name} is for pipelines, and parallel.pp is 1")
    if parallel.schedule == "interleaved" and parallel.pp == 1:
        raise Impossible("parallel.schedule", "parallel.schedule interleaved is for pipelines, and parallel.pp is 1")
    if parallel.stages_per_rank not in (None, 1) and parallel.schedule != "interleaved":
        raise Impossible(
            "parallel.stages_per_rank", "parallel.schedule 1f1b has one stage a rank",
            "use --parallel.schedule interleaved",
        )  # fmt: skip
    if parallel.stages_per_rank == 1 and parallel.schedule == "interleaved":
        raise Impossible("parallel.stages_per_rank", "parallel.schedule interleaved needs at least 2 stages a rank")
    stages = parallel.pp * stages_per_rank(parallel)
    if parallel.stage_layers and len(parallel.stage_layers) != stages:
        raise Impossible(
            "parallel.stage_layers", f"{len(parallel.stage_layers)} sizes for {stages} stages", "give one for each"
        )
    if parallel.reduce == "each" and parallel.pp > 1:
        raise Impossible("parallel.reduce", "with pipelines gradients are reduced once a step")


def stages_per_rank(parallel: ParallelConfig) -> int:
    return parallel.stages_per_rank or (2 if parallel.schedule == "interleaved" else 1)


def _check_limits(training: TrainingConfig, optim: OptimConfig) -> None:
    limits = {"step": training.max_steps, "epoch": training.max_epochs, "token": training.max_tokens}
    if training.mode == "infinite":
        given = [f"training.max_{mode}s" for mode, limit in limits.items() if limit is not None]
        if given:
            raise Impossible("training.mode", f"training.mode infinite never ends, but {', '.join(given)} is set")
        if optim.schedule != "constant":
            raise Impossible(
                "optim.schedule", f"training.mode infinite has no end for optim.schedule {optim.schedule} to decay to",
                "use --optim.schedule constant (warm-up still works)",
            )  # fmt: skip
    elif training.mode is not None and limits[training.mode] is None:
        key = f"training.max_{training.mode}s"
        raise Impossible(key, f"training.mode {training.mode} needs {key}", f"add --{key} N")
