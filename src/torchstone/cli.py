"""The commands. Torch is imported inside a command only, so that `--help` answers in a blink.

Every key of the config is a flag (`--optim.learning_rate 1e-4`); they are taken out of the command line before the
rest is parsed, because their names and types live in the schema, not here.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, validators

from torchstone import __version__, post, signals
from torchstone.atomic import write_text
from torchstone.config.help import config_table
from torchstone.config.load import Layers, key_named, read_layers, resolve, split_flags, to_dict
from torchstone.config.schema import Config, Device, Dtype, Job, SystemConfig
from torchstone.errors import NumbersError, TorchstoneError, UsageError
from torchstone.launch import kubernetes, slurm
from torchstone.launch.kubernetes import KubernetesJob
from torchstone.launch.slurm import SlurmJob

if TYPE_CHECKING:
    from torchstone.launch import starting

app = App(
    name="torchstone",
    version=__version__,
    help="Pretrain and fine-tune language models, and prove that the numbers are right.",
    # Rendering markdown would take a quarter of the time that --help takes.
    help_format="plaintext",
    result_action="return_value",
)
tokenizer = App(name="tokenizer", help="Make tokenizers.", help_format="plaintext")
app.command(tokenizer)
launch = App(
    name="launch",
    help="Write, and submit, what a cluster needs to run a config.",
    help_format="plaintext",
    # No --empty-setup and the like.
    default_parameter=Parameter(negative_iterable=()),
)
app.command(launch)
# The `--section.key VALUE` flags of this call, and what makes a config of all that was said.
flags: list[tuple[str, str]] = []
resolver: Callable[[Layers, Job], Config] = resolve
# Whether the process ends with the command: then a signal that comes late does not change how.
is_program = False

JsonFlag = Annotated[bool, Parameter(name="--json", negative="")]
AtLeastOne = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Natural = Annotated[int, Parameter(validator=validators.Number(gte=0))]
TAKE_KEYS = ("train", "prepare", "inspect-data", "launch")
KEYS = "Every config key is a flag too: --section.key VALUE. torchstone train --help-keys lists them all."


def program() -> None:
    """`torchstone`, as a process of its own: once its work is done, nothing more is to be heard."""
    global is_program
    is_program = True
    main()


def main(words: list[str] | None = None, resolve_with: Callable[[Layers, Job], Config] = resolve) -> None:
    """Runs a command and ends with its exit code; an error for people is a message, not a traceback.

    The words are those of the process unless given; `resolve_with` may put defaults below the settings (stages.py).
    """
    global resolver
    resolver = resolve_with
    rest, flags[:] = sys.argv[1:] if words is None else words, []
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its number, not a traceback.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        if rest[:1] in (["train"], ["doctor"]):
            post.HERE.take()
        if rest[:1] and rest[0] in TAKE_KEYS:
            rest, flags[:] = split_flags(rest)
        app(rest, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _fail(UsageError(str(error).strip(), _hint(rest)))
    except TorchstoneError as error:
        _fail(error)
    except BrokenPipeError as error:
        if _is_one_of_several():
            _crash(error)
        # Whoever read our output has gone; nothing more can be said to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        # A folder that is a file, a disk that is full or read-only: the user's to mend, not ours.
        if error.filename is None and error.errno != errno.ENOSPC:
            if _is_one_of_several():
                _crash(error)
            raise
        _fail(UsageError(f"{error.filename or 'writing'}: {error.strerror}"))
    except KeyboardInterrupt:
        post.tell("interrupted")
        _leave(130)
    except Exception as error:
        if not _is_one_of_several():
            raise
        _crash(error)


@app.command(help_epilogue=KEYS)
def train(
    config: Path | None = None,
    /,
    *,
    preset: str | None = None,
    debug: bool = False,
    output_dir: str | None = None,
    max_steps: str | None = None,
    nproc: AtLeastOne | None = None,
    gpus: str | None = None,
    nnodes: str | None = None,
    node_rank: Natural | None = None,
    rdzv_endpoint: str | None = None,
    max_restarts: Natural | None = None,
    print_config: bool = False,
    help_keys: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train a model; start again with the same words to go on where it stopped.

    Args:
        config: JSON (comments allowed), YAML or TOML file.
        preset: demo, demo-chat, debug or production; the file and the flags change it.
        debug: The same as --preset debug.
        output_dir: Folder of the run.
        max_steps: Optimizer steps after which the run ends.
        nproc: Processes to start on this machine; each takes a GPU where there are any.
        gpus: GPUs of this machine, a process each: all, 0,3, or auto:2 for the two least loaded. By default all.
        nnodes: Machines that train together, each with this command; 1:4 for as many as come.
        node_rank: Number of this machine, from 0.
        rdzv_endpoint: host:port of machine 0, where they meet.
        max_restarts: How often to start the workers again, from the last checkpoint, when one fails.
        print_config: Show what would run, as JSON, and stop.
        help_keys: List every config key with its meaning and default, and stop.
    """
    if help_keys:
        sys.stdout.write(config_table() + "\n")
        return
    if debug and preset not in (None, "debug"):
        raise UsageError(f"--debug is --preset debug, but --preset {preset} is given too")
    settings = _settings(config, "debug" if debug else preset, output_dir, max_steps)
    if print_config:
        _print_json(to_dict(settings))
        return
    from torchstone.launch import starting

    wishes = starting.Wishes(nproc, gpus, nnodes, node_rank, rdzv_endpoint, max_restarts)
    plan = starting.plan(wishes, settings.system, os.environ)
    if plan is not None:
        _start(settings, plan)
        return
    if post.HERE.launched:
        post.HERE.keep_log(post.log_file(_logs(settings), int(os.environ["RANK"])))
    with signals.listening(last=is_program):
        post.enter("importing torch")
        from torchstone import api

        outcome = api.train(settings)
    if outcome.checkpoint is not None and os.environ.get("RANK", "0") == "0":
        post.tell(f"done: step {outcome.step}, {outcome.checkpoint}")
    if _is_one_of_several():
        # Libraries with threads of their own may crash a process that is taken down in good order, after all is done.
        api.leave_group()
        _leave(0)


@app.command(help_epilogue=KEYS)
def prepare(
    config: Path | None = None,
    /,
    *,
    preset: str | None = None,
    processes: AtLeastOne | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokenize the data of a config into the cache and stop.

    Args:
        config: JSON, YAML or TOML file.
        preset: demo, demo-chat, debug or production.
        processes: Check first that the parallel sizes fit so many processes, and the model.
        as_json: Print what was found as JSON.
    """
    settings = _settings(config, preset, None, None, "data" if processes is None else "train")
    from torchstone import api

    if processes is not None:
        api.check_layout(settings, processes)
    found = api.prepare(settings)
    _show(found, as_json)


@app.command(help_epilogue=KEYS)
def inspect_data(
    config: Path | None = None,
    /,
    *,
    preset: str | None = None,
    rows: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 5,
    tokens: AtLeastOne = 400,
    html: Path | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Show rows with the tokens that are trained on, counts and lengths, and what would be dropped and why.

    Args:
        config: JSON, YAML or TOML file; --data.path FILE and --model.tokenizer FOLDER are enough.
        preset: demo, demo-chat, debug or production.
        rows: Rows to show of each source.
        tokens: Tokens to show of each row, from its beginning and its end.
        html: Write a page to this file as well.
        as_json: Print JSON, unrounded, and nothing else.
    """
    settings = _settings(config, preset, None, None, "data")
    from torchstone import api
    from torchstone.data.inspect import html_page, show_console

    found = api.inspect_data(settings, rows=rows, tokens=tokens)
    if html is not None:
        html.write_text(html_page(found), encoding="utf-8")
        sys.stderr.write(f"wrote {html}\n")
    if as_json:
        _print_json(found)
    elif html is None:
        show_console(found, sys.stdout.write, colour=sys.stdout.isatty())


@tokenizer.command(name="train")
def tokenizer_train(
    folder: Path,
    /,
    *,
    data: str,
    vocab_size: AtLeastOne = 32768,
    special: str = "",
    chat_template: str = "chatml",
    pattern: Literal["gpt2", "gpt4", "gpt4o", "qwen2"] = "gpt4",
    min_frequency: AtLeastOne = 2,
    max_bytes: AtLeastOne | None = None,
    skip_bad_rows: bool = False,
    cache_dir: str = "cache/datasets",
    as_json: JsonFlag = False,
) -> None:
    """Make a byte-level BPE tokenizer from texts or conversations, as a Hugging Face folder.

    Args:
        folder: The new folder.
        data: Files, folders or globs, separated by commas; or demo:corpus.
        vocab_size: Tokens, special ones included.
        special: More special tokens, separated by commas.
        chat_template: A file, or chatml, llama3, alpaca, plain, none; the tokens it writes become special.
        pattern: How texts are cut into words.
        min_frequency: How often two tokens must meet to become one.
        max_bytes: Stop reading after so much text.
        skip_bad_rows: Leave out rows that cannot be read, instead of stopping.
        cache_dir: Where built-in data is kept.
        as_json: Print what was measured as JSON.
    """
    from torchstone import api

    found = api.train_tokenizer(
        [name for name in data.split(",") if name], folder, vocab_size,
        [token for token in special.split(",") if token], None if chat_template == "none" else chat_template,
        pattern, min_frequency, max_bytes, skip_bad_rows, cache_dir, quiet=as_json,
    )  # fmt: skip
    _show(found if as_json else _flat(found), as_json)


@launch.command(name="slurm", help_epilogue=KEYS)
def launch_slurm(
    job: Annotated[SlurmJob, Parameter(name="*")],
    *,
    output: Path | None = None,
    submit: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write a batch script that trains a config on SLURM, saves before its time is over and queues itself again.

    Args:
        output: File to write; without it the script is printed, or submitted as NAME.sbatch.
        submit: Hand the file to sbatch and print the number of the job.
    """
    file = output or (Path(f"{job.name}.sbatch") if submit else None)
    _write(job.text(_keys_for_train(job.config)), file)
    if submit and file is not None:
        sys.stdout.write(slurm.submit(file) + "\n")


@launch.command(name="kubernetes", help_epilogue=KEYS)
def launch_kubernetes(
    job: Annotated[KubernetesJob, Parameter(name="*")],
    *,
    output: Path | None = None,
    submit: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write a manifest that trains a config on Kubernetes: a TrainJob of Kubeflow Trainer, and the config.

    Args:
        output: File to write; without it the manifest is printed, or submitted as NAME.yaml.
        submit: Hand the file to kubectl.
    """
    file = output or (Path(f"{job.name}.yaml") if submit else None)
    _write(job.text(_keys_for_train(job.config)), file)
    if submit and file is not None:
        sys.stdout.write(kubernetes.submit(file) + "\n")


@app.command
def doctor(
    *,
    nproc: AtLeastOne | None = None,
    gpus: str | None = None,
    nnodes: str | None = None,
    node_rank: Natural | None = None,
    rdzv_endpoint: str | None = None,
    device: Device = "auto",
    limit: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 60.0,
    as_json: JsonFlag = False,
) -> None:
    """Check that all processes of a launch reach each other, with the right values, and how fast.

    Args:
        nproc: Processes to start on this machine; each takes a GPU where there are any.
        gpus: GPUs of this machine, a process each: all, 0,3, or auto:2 for the two least loaded. By default all.
        nnodes: Machines to check together, each with this command.
        node_rank: Number of this machine, from 0.
        rdzv_endpoint: host:port of machine 0, where they meet.
        device: auto, cpu or cuda.
        limit: Seconds that one collective may take before the ranks that do not answer are named.
        as_json: Print JSON, unrounded, and nothing else.
    """
    from torchstone.launch import local, starting

    system = SystemConfig(device=device, join_timeout=limit)
    plan = starting.plan(starting.Wishes(nproc, gpus, nnodes, node_rank, rdzv_endpoint), system, os.environ)
    if plan is not None:
        words = ["doctor", "--limit", str(limit), "--device", device, *(["--json"] if as_json else [])]
        command = [sys.executable, "-m", "torchstone.cli", *words]
        sys.exit(local.run_workers(plan.launch(command, system, None), last=is_program))
    from torchstone import api

    found = api.doctor(device, limit, quiet=as_json)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps(found["json"], indent=2) + "\n" if as_json else found["text"])
        sys.stdout.flush()
    if found["json"]["errors"]:
        raise NumbersError("\n".join(found["json"]["errors"]))


@app.command
def evaluate(
    source: str,
    /,
    *,
    data: str,
    questions: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None,
    context_length: AtLeastOne | None = None,
    device: Device = "auto",
    cache_dir: str = "cache/datasets",
    trust_remote_code: bool = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure the loss of a model over a data file and, for conversations, how many answers are right word for word.

    Args:
        source: A run, a checkpoint or a Hugging Face folder.
        data: A file, folder or glob, or demo:corpus, demo:chat, demo:heldout.
        questions: How many rows to answer; all by default, 0 for none.
        context_length: Longest row in tokens; by default 1024, or as many as the model has positions.
        device: auto, cpu or cuda.
        cache_dir: Where tokenized data is kept.
        trust_remote_code: Run code that lies in the model's folder.
        as_json: Print JSON, unrounded, and nothing else.
    """
    from torchstone import api

    found = api.evaluate(source, data, questions, context_length, device, cache_dir, as_json, trust_remote_code)
    examples = found.get("examples", [])
    _show({key: value for key, value in found.items() if as_json or key != "examples"}, as_json)
    if not as_json:
        for example in examples[:4]:
            right = "right" if example["answer"].strip() == example["wanted"].strip() else f"not {example['wanted']!r}"
            sys.stdout.write(f"  {example['question']}  ->  {example['answer']}  ({right})\n")


@app.command
def export(
    source: str,
    target: Path,
    /,
    *,
    dtype: Dtype = "auto",
    verify: bool = True,
    trust_remote_code: bool = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a Hugging Face folder and prove it by loading it in Transformers.

    Args:
        source: A run (its best checkpoint, else its newest), a checkpoint or a folder.
        target: The new folder.
        dtype: float32, bfloat16 or float16; auto keeps the source's.
        verify: Load the folder in Transformers and compare weights and logits.
        trust_remote_code: Run code that lies in the model's folder.
        as_json: Print what was written and measured as JSON.
    """
    from torchstone import api

    _show(api.export(source, target, dtype, verify, trust_remote_code), as_json)


@app.command
def chat(
    source: str,
    /,
    *,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    max_new_tokens: AtLeastOne = 256,
    device: Device = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Talk to a model that was trained on conversations; an empty line or Ctrl-D ends, /new forgets what was said.

    Args:
        source: A run, a checkpoint or a Hugging Face folder.
        prompt: Ask this once, print the answer and stop.
        max_new_tokens: Longest answer in tokens.
        device: auto, cpu or cuda.
        trust_remote_code: Run code that lies in the model's folder.
    """
    from torchstone import api

    partner = api.Chat(source, max_new_tokens, device, trust_remote_code)
    if prompt is not None:
        sys.stdout.write(partner.ask(prompt) + "\n")
        return
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        try:
            line = sys.stdin.readline().strip()
        except UnicodeDecodeError as error:
            raise UsageError(f"the question is not UTF-8: {error}") from None
        if not line:
            return
        if line == "/new":
            partner.reset()
        else:
            sys.stdout.write(partner.ask(line) + "\n")
            sys.stdout.flush()


def _settings(
    config: Path | None, preset: str | None, output_dir: str | None, max_steps: str | None, job: Job = "train"
) -> Config:
    pairs: list[tuple[str, Any]] = list(flags)
    pairs += [("output_dir", output_dir)] if output_dir is not None else []
    pairs += [("max_steps", max_steps)] if max_steps is not None else []
    return resolver(read_layers(config, preset, pairs), job)


def _start(settings: Config, plan: starting.Plan) -> None:
    """The same command in several processes, once what only one needs to do is done: checked, and tokenized."""
    from torchstone.launch import local

    text, logs = json.dumps(to_dict(settings), indent=2), _logs(settings)
    command = [sys.executable, "-m", "torchstone.cli"]
    with tempfile.TemporaryDirectory(prefix="torchstone-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(text)
        checked = [] if plan.world_size is None else ["--processes", str(plan.world_size)]
        code = local.prepare([*command, "prepare", str(file), *checked])
    if code == 0:
        # Beside the logs: what lies in /tmp may be gone when workers are started again, weeks later.
        logs.mkdir(parents=True, exist_ok=True)
        write_text(logs / "config.json", text)
        words = [*command, "train", str(logs / "config.json")]
        code = local.run_workers(plan.launch(words, settings.system, logs), last=is_program)
    if code:
        sys.exit(code)


def _keys_for_train(config: Path) -> list[str]:
    """The config keys of this call as words for `torchstone train`, once the config is known to be right with them."""
    _settings(config, None, None, None)
    return [f"--{key}={value}" for key, value in flags]


def _write(text: str, file: Path | None) -> None:
    if file is None:
        sys.stdout.write(text)
        return
    write_text(file, text)
    sys.stderr.write(f"wrote {file}\n")


def _hint(words: list[str]) -> str:
    """Where to look; for `--learning-rate` and the like, the key that was meant."""
    for word in words:
        key = key_named(word.removeprefix("--").partition("=")[0]) if word.startswith("--") else None
        if key is not None and words[0] in TAKE_KEYS:
            return f"did you mean --{key}?"
    return f"see: torchstone {words[0] if words else ''} --help"


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    """What was measured beside the rest; lists as lines of words; what is empty left out."""
    flat = {key: value for key, value in found.items() if key != "measured"} | found["measured"]
    joined = {
        key: ", ".join(map(str, value)) if isinstance(value, list | dict) else value for key, value in flat.items()
    }
    return {key: value for key, value in joined.items() if value not in ("", None)}


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    for key, value in found.items():
        sys.stdout.write(f"{key.replace('_', ' ')}: {f'{value:.6g}' if isinstance(value, float) else value}\n")


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _logs(settings: Config) -> Path:
    return Path(settings.output_dir) / "logs"


def _fail(error: TorchstoneError) -> None:
    rank = os.environ.get("RANK", "0")
    if not post.HERE.launched or post.HERE.terminal is not None:
        # Otherwise there is no log, and the launcher says it.
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{'' if rank == '0' else f'rank {rank}: '}error: {error}\n")
    post.write_error(error, str(error), error.exit_code)
    _leave(error.exit_code)


def _crash(error: Exception) -> None:
    """The end of a rank by an error that is not for people: it is in its log, and the launcher says its first line."""
    with suppress(OSError, ValueError):
        traceback.print_exception(error)
    post.write_error(error, f"{type(error).__name__}: {error}", 1)
    _leave(1)


def _leave(code: int) -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if _is_one_of_several():
        # Ranks that wait for this one would have it wait for them, if it ended in good order.
        os._exit(code)
    sys.exit(code)


def _is_one_of_several() -> bool:
    return post.HERE.launched or int(os.environ.get("WORLD_SIZE", "1")) > 1


if __name__ == "__main__":
    program()
