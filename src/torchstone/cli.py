"""The commands. torch is only imported inside a command, so that `--help` is instant.

Every config key is a flag (`--optim.learning_rate 1e-4`). These flags are extracted before cyclopts parses the rest,
because their names and types are in the schema.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import sys
import tempfile
import termios
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import App, CycloptsError, Parameter, convert, validators

from torchstone import __version__, heartbeat
from torchstone.atomic import lock_run_folder, write_text
from torchstone.config.help import config_table
from torchstone.config.load import (
    ConfigLayers,
    convert_value,
    explain_name,
    extract_config_flags,
    extract_flags,
    read_config_layers,
    resolve,
    to_dict,
)
from torchstone.config.output_dir import check_output_dir
from torchstone.config.schema import Config, Device, Dtype, Purpose, SystemConfig
from torchstone.errors import (
    MachineError,
    NumericalError,
    OutOfMemoryError,
    StoppedBySignal,
    TorchstoneError,
    UsageError,
    first_line,
    is_out_of_memory,
)
from torchstone.launch import kubernetes, slurm
from torchstone.launch.kubernetes import KubernetesJob
from torchstone.launch.local import WorkerFiles, run_preparation, run_workers
from torchstone.launch.plan import LaunchOptions, LaunchPlan, plan_launch
from torchstone.launch.rendezvous import SECRET_FILE
from torchstone.launch.slurm import SlurmJob
from torchstone.terminal import escape_controls, escape_message, is_terminal
from torchstone.training.generation import DEFAULT_TEMPERATURE, GeneratedText, SamplingOptions
from torchstone.training.stop import handle_stop_signals

if TYPE_CHECKING:
    from torchstone.api import Chat

JsonFlag = Annotated[bool, Parameter(name="--json", negative="")]
PositiveInt = Annotated[int, Parameter(validator=validators.Number(gte=1, lt=2**63))]
NonNegativeInt = Annotated[int, Parameter(validator=validators.Number(gte=0, lt=2**63))]
Switch = Annotated[bool, Parameter(negative="")]
LaunchFlags = Annotated[LaunchOptions, Parameter(name="*")]
NO_LAUNCH_OPTIONS = LaunchOptions()
# Config keys with a flag of their own.
FLAGS_OF_KEYS = {"observe.profile": "--profile", "auto_batch.enabled": "--auto-batch-size"}


@dataclass(frozen=True)
class RunFlags:
    """The flags for a config, of `train` and of the commands that look at the same run.

    Args:
        preset: demo, demo-chat, debug or production; the file and the flags override it.
        debug: The same as --preset debug.
        output_dir: Folder of the run; only train writes there.
        max_steps: Number of optimizer steps.
        profile: Steps to profile, such as 3 (after the first two) or 10-12: a trace and kernel times by kind.
        auto_batch_size: Find the fastest micro-batch that fits; by default on a GPU if no size is set.
    """

    preset: str | None = None
    debug: Switch = False
    output_dir: str | None = None
    max_steps: str | None = None
    profile: str | None = None
    auto_batch_size: bool | None = None

    @property
    def preset_name(self) -> str | None:
        if self.debug and self.preset not in (None, "debug"):
            raise UsageError(f"--debug means --preset debug, but --preset {self.preset} is given too")
        return "debug" if self.debug else self.preset

    def overrides(self, given: Sequence[str]) -> list[tuple[str, Any]]:
        """The settings of the flags. `given`: the config keys that are flags of this call, with underscores."""
        values = {
            "output_dir": self.output_dir,
            "max_steps": self.max_steps,
            "observe.profile": self.profile,
            "auto_batch.enabled": self.auto_batch_size,
        }
        overrides = [(key, value) for key, value in values.items() if value is not None]
        for key, _ in overrides:
            if key in FLAGS_OF_KEYS and key in given:
                raise UsageError(f"{FLAGS_OF_KEYS[key]} and --{key} are the same setting", "give one of them")
        return overrides


SharedFlags = Annotated[RunFlags, Parameter(name="*")]
NO_RUN_FLAGS = RunFlags()
MAX_TOKENS = Parameter(name=("--max-tokens", "--max-new-tokens"), validator=validators.Number(gte=1))
MaxTokens = Annotated[int, MAX_TOKENS]


def _check_not_negative(type_: Any, value: int | str) -> None:
    if isinstance(value, int) and value < 0:
        raise ValueError("Must be >= 0.")


CountOrAll = Annotated[Literal["all"] | int, Parameter(validator=_check_not_negative)]
SamplingFlags = Annotated[SamplingOptions, Parameter(name="*")]
DEFAULT_SAMPLING = SamplingOptions()
COMMAND_GROUPS = ("tokenizer", "launch", "debug")
COMMANDS_WITH_KEYS = ("train", "prepare", "inspect-data", "plan", "diagnose", "launch")
# Config keys of commands that do not train: those that errors about a model or its data name.
MODEL_KEYS = (
    "model.implementation", "model.attention", "model.trust_remote_code", "data.chat_template",
    "system.device", "system.device_id", "system.threads",
)  # fmt: skip
DATA_KEYS = (
    "data.format", "data.columns", "data.context_length", "data.max_samples", "data.packing", "data.text_packing",
    "data.train_on", "data.on_bad_row", "data.on_long_row", "data.cache_dir", "data.prepare_workers",
)  # fmt: skip
KEYS_OF_COMMAND = {"chat": MODEL_KEYS, "generate": MODEL_KEYS, "evaluate": MODEL_KEYS + DATA_KEYS}
KEYS_HELP = "Every config key is a flag: --section.key VALUE. torchstone train --help-keys lists them."
# Errors of a disk, a quota or a limit on file sizes, which Python may raise without a file name.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
OUT_OF_MEMORY_HINT = (
    "end other programs, or use fewer processes (--nproc, data.prepare_workers), a smaller batch, data or model"
)
# Builds the config from its layers; the code in scripts/ passes its own resolver.
Resolver = Callable[[ConfigLayers, Purpose], Config]


def program() -> None:
    """The `torchstone` process."""
    sys.excepthook = _print_crash
    # Libraries log what files contain, such as names in a config.json.
    logging.setLogRecordFactory(_EscapedRecord)
    main(ignore_late_signals=True)


def main(args: list[str] | None = None, resolver: Resolver = resolve, ignore_late_signals: bool = False) -> None:
    """Runs a command (by default the process's arguments), and exits with the code of an error.

    With `ignore_late_signals` a signal that comes after the command does not change the exit code.
    """
    args = sys.argv[1:] if args is None else args
    heartbeat.open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # Characters that a terminal cannot show are escaped.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    flags: list[tuple[str, str]] = []
    try:
        if args[:1] in (["train"], ["doctor"], ["prepare"], ["diagnose"]):
            heartbeat.attach()
        if args[:1] and args[0] in COMMANDS_WITH_KEYS:
            flags, args = extract_config_flags(args)
            # cyclopts has no flag whose value may be left out.
            sections, args = extract_flags(args, lambda name: name == "help_keys", lambda name: True)
            args += [f"--help-keys={'all' if section == 'true' else section}" for _, section in sections]
        elif args[:1] and args[0] in KEYS_OF_COMMAND:
            flags, args = extract_config_flags(args, KEYS_OF_COMMAND[args[0]])
            flags = [(key.replace("-", "_"), value) for key, value in flags]
            _check_same_settings(args, [key for key, _ in flags])
        build_app(Commands(flags, resolver, ignore_late_signals))(args, exit_on_error=False, print_error=False)
        # Not when Python exits: it would then be too late to catch a broken pipe.
        sys.stdout.flush()
    except CycloptsError as error:
        _fail(_usage_error(str(error).strip(), args, [key for key, _ in flags]))
    except TorchstoneError as error:
        _fail(error)
    except BrokenPipeError as error:
        if _is_worker():
            _crash(error)
        # The reader of our output is gone.
        heartbeat.discard_output(sys.stdout)
        heartbeat.discard_output(sys.stderr)
        sys.exit(141)
    except SystemExit as end:
        # rich, which prints the help, turns a broken pipe into exit code 1.
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(141)
        raise
    except KeyboardInterrupt:
        heartbeat.print_line("interrupted")
        _exit(heartbeat.EXIT_INTERRUPTED)
    except Exception as error:
        _fail_after(error)


def build_app(commands: Commands) -> App:
    app = App(
        name="torchstone",
        version=__version__,
        help="Pretrain and fine-tune language models, and prove that the numbers are right.",
        # Rendering markdown would take a quarter of the time of --help.
        help_format="plaintext",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(converter=_convert_strictly),
    )
    tokenizer = App(name="tokenizer", help="Train tokenizers.", help_format="plaintext")
    # Without negative_iterable there would be flags such as --empty-setup.
    launch = App(
        name="launch",
        help="Write (and submit) the files that run a config on a cluster.",
        help_format="plaintext",
        default_parameter=Parameter(negative_iterable=()),
    )
    app.command(commands.train, help_epilogue=KEYS_HELP)
    app.command(commands.prepare, help_epilogue=KEYS_HELP)
    app.command(commands.inspect_data, help_epilogue=KEYS_HELP)
    app.command(commands.plan, help_epilogue=KEYS_HELP)
    app.command(commands.diagnose, help_epilogue=KEYS_HELP)
    app.command(commands.doctor)
    app.command(commands.evaluate, help_epilogue=_keys_help("evaluate"))
    app.command(commands.export)
    app.command(commands.chat, help_epilogue=_keys_help("chat"))
    app.command(commands.generate, help_epilogue=_keys_help("generate"))
    app.command(commands.env)
    app.command(tokenizer)
    tokenizer.command(commands.tokenizer_train, name="train")
    app.command(launch)
    launch.command(commands.launch_slurm, name="slurm", help_epilogue=KEYS_HELP)
    launch.command(commands.launch_kubernetes, name="kubernetes", help_epilogue=KEYS_HELP)
    debug = App(name="debug", help="Read what a run left behind.", help_format="plaintext")
    app.command(debug)
    debug.command(commands.debug_show, name="show")
    return app


@dataclass(frozen=True)
class Commands:
    """The commands, with the `--section.key VALUE` flags of this call."""

    config_flags: list[tuple[str, str]]
    resolver: Resolver
    ignore_late_signals: bool

    def train(
        self,
        config: Path | None = None,
        /,
        *,
        run: SharedFlags = NO_RUN_FLAGS,
        options: LaunchFlags = NO_LAUNCH_OPTIONS,
        max_restarts: NonNegativeInt | None = None,
        print_config: bool = False,
        help_keys: str | None = None,
    ) -> None:
        """Train a model. The same command resumes a run that was stopped.

        Args:
            config: JSON (comments allowed), YAML or TOML file.
            max_restarts: How many times to restart the workers from the last checkpoint after a failure.
            print_config: Print the resolved config as JSON, and what `auto` means here on stderr, and stop.
            help_keys: List the config keys of a section (or of all) with their meanings and defaults, and stop.
        """
        if help_keys is not None:
            sys.stdout.write(config_table(None if help_keys == "all" else help_keys) + "\n")
            return
        try:
            resolved = self._resolve(config, run)
        except UsageError as error:
            saved = Path(run.output_dir or "", "config.json")
            is_bare = config is None and run.preset is None and not (run.debug or self.config_flags)
            if is_bare and run.output_dir and saved.is_file():
                hint = f"to continue the run in {run.output_dir}: torchstone train {saved}"
                raise UsageError(error.message, hint) from None
            raise
        if print_config:
            # For a worker, plan_launch sets WORLD_SIZE.
            environment = dict(os.environ)
            plan = plan_launch(options, resolved.system, environment, max_restarts)
            world_size = int(environment.get("WORLD_SIZE", 1)) if plan is None else plan.world_size
            _print_json(to_dict(resolved))
            from torchstone import api

            heartbeat.print_line(api.describe_defaults(resolved, world_size))
            return
        plan = plan_launch(options, resolved.system, os.environ, max_restarts)
        if plan is not None:
            self._launch(resolved, plan)
            return
        if heartbeat.has_launcher():
            heartbeat.redirect_output(heartbeat.log_file(_log_folder(resolved), int(os.environ["RANK"])))
        heartbeat.begin_startup(of_process=True)
        with handle_stop_signals(ignore_late_signals=self.ignore_late_signals) as raise_if_stopped:
            heartbeat.report_phase("importing torch")
            from torchstone import api

            raise_if_stopped()
            result = api.train_with_config(resolved)
        if result.checkpoint is not None and os.environ.get("RANK", "0") == "0":
            heartbeat.print_line(f"done: step {result.step}, {result.checkpoint}")
        if _is_worker():
            # Library threads may crash a normal interpreter exit after all work is done.
            api.destroy_process_group()
            _exit(0)

    def prepare(
        self,
        config: Path | None = None,
        /,
        *,
        run: SharedFlags = NO_RUN_FLAGS,
        processes: PositiveInt | None = None,
        pin: Path | None = None,
        as_json: JsonFlag = False,
    ) -> None:
        """Tokenize the data of a config into the cache, and stop. Data on the hub is downloaded first.

        Args:
            config: JSON, YAML or TOML file, or the folder of a run.
            processes: First check that the parallel sizes fit this many processes and the model.
            pin: Also download the model from the hub, and write the config with all commits to this file.
            as_json: Print the result as JSON.
        """
        resolved = self._resolve(config, run, purpose="data" if processes is None else "train")
        from torchstone import api

        resolved = api.download_with_config(resolved)
        if processes is not None:
            api.check_parallel_dims(resolved, processes)
        if pin is not None:
            _check_not_an_input(pin, config, *(resolved.data.path or ()), *resolved.data.validation_paths)
            resolved = api.download_with_config(resolved, weights=True)
            write_text(pin, json.dumps(to_dict(resolved), indent=2) + "\n")
        _print_result(api.prepare_with_config(resolved), as_json)

    def inspect_data(
        self,
        config: Path | None = None,
        /,
        *,
        run: SharedFlags = NO_RUN_FLAGS,
        rows: NonNegativeInt = 5,
        tokens: PositiveInt = 400,
        html: Path | None = None,
        as_json: JsonFlag = False,
    ) -> None:
        """Show rows with the tokens that are trained on, counts, lengths, and what would be dropped and why.

        Args:
            config: JSON, YAML or TOML file; --data.path FILE and --model.tokenizer FOLDER are enough.
            rows: Rows to show per source.
            tokens: Tokens to show per row, from its start and its end.
            html: Also write an HTML page to this file.
            as_json: Print unrounded JSON only.
        """
        resolved = self._resolve(config, run, purpose="data")
        from torchstone import api
        from torchstone.data.inspect import html_page, print_report

        if html is not None:
            _check_not_an_input(html, config, *(resolved.data.path or ()), *resolved.data.validation_paths)
        report = api.inspect_data_with_config(resolved, rows, tokens)
        if html is not None:
            html.write_text(html_page(report), encoding="utf-8")
            heartbeat.print_line(f"wrote {html}")
        if as_json:
            _print_json(report)
        else:
            print_report(report, sys.stdout.write, use_color=sys.stdout.isatty())

    def plan(
        self,
        config: Path | None = None,
        /,
        *,
        run: SharedFlags = NO_RUN_FLAGS,
        world: Annotated[PositiveInt | None, Parameter(name=("--world", "--nproc"))] = None,
        gpu: str | None = None,
        search: Switch = False,
        as_json: JsonFlag = False,
    ) -> None:
        """Show what a run needs: memory per rank by component, steps, tokens, hours, checkpoint size. Reads no weights.

        The exit code is 4 if the plan does not fit, or if --search finds nothing that fits.

        Args:
            config: JSON, YAML or TOML file, or the folder of a run.
            world: Processes; by default one for each GPU of this machine.
            gpu: Plan for other GPUs, such as h100-80gb, or for their memory, such as 40GiB.
            search: Also rank the layouts that fit by predicted tokens a second.
            as_json: Print unrounded JSON only.
        """
        resolved = self._resolve(config, run, purpose="plan")
        from torchstone import api
        from torchstone.batchsize.plan import not_fitting
        from torchstone.batchsize.plan_report import report_lines

        result = api.plan_with_config(resolved, world, gpu, search)
        if as_json:
            _print_json(result.to_dict())
        else:
            for line in report_lines(result, "█" if is_terminal(sys.stdout) else "#"):
                _print_line(line)
        if not result.fits and not (result.search is not None and result.search.best):
            sys.stdout.flush()
            raise OutOfMemoryError(*not_fitting(result))

    def tokenizer_train(
        self,
        folder: Path,
        /,
        *,
        data: str,
        vocab_size: PositiveInt = 32768,
        special: str = "",
        chat_template: str = "chatml",
        bos: bool = True,
        pattern: Literal["gpt2", "gpt4", "gpt4o", "qwen2"] = "gpt4",
        min_frequency: PositiveInt = 2,
        max_bytes: PositiveInt | None = None,
        skip_bad_rows: bool = False,
        columns: str = "",
        cache_dir: str = "cache/datasets",
        as_json: JsonFlag = False,
    ) -> None:
        """Train a byte-level BPE tokenizer from texts or conversations, and save it as a Hugging Face folder.

        Args:
            folder: The new folder.
            data: Files, folders, globs or hub:org/name, separated by commas; or demo:corpus.
            vocab_size: Vocabulary size, including special tokens.
            special: Additional special tokens, separated by commas.
            chat_template: A file, or chatml, llama3, alpaca, plain, none; its special tokens are added.
            bos: Begin every text with a BOS token, so that its first token is learned too.
            pattern: How texts are split into words.
            min_frequency: How often a pair of tokens must occur to be merged.
            max_bytes: Stop reading after this many bytes of text.
            skip_bad_rows: Skip rows that cannot be read, instead of stopping.
            columns: Names of the data's columns, such as text=content (see data.columns).
            cache_dir: Folder of the built-in data.
            as_json: Print the result as JSON.
        """
        from torchstone import api

        result = api.train_tokenizer(
            list(convert_value("data.path", data) or ()),
            folder,
            vocab_size,
            [token.strip() for token in special.split(",") if token.strip()],
            None if chat_template == "none" else chat_template,
            pattern,
            min_frequency,
            max_bytes,
            skip_bad_rows,
            cache_dir,
            quiet=as_json,
            columns=columns,
            bos=bos,
        )
        _print_result(result if as_json else _flatten_result(result), as_json)

    def launch_slurm(
        self, job: Annotated[SlurmJob, Parameter(name="*")], *, output: Path | None = None, submit: Switch = False
    ) -> None:
        """Write a SLURM batch script that trains a config, saves before its time limit and requeues itself.

        Args:
            output: File to write; without it the script is printed, or submitted as NAME.sbatch.
            submit: Submit the file with sbatch and print the job id.
        """
        self._write_job(job, output, f"{job.name}.sbatch", slurm.submit if submit else None)

    def launch_kubernetes(
        self, job: Annotated[KubernetesJob, Parameter(name="*")], *, output: Path | None = None, submit: Switch = False
    ) -> None:
        """Write a Kubernetes manifest that trains a config: a TrainJob of Kubeflow Trainer and a ConfigMap.

        Args:
            output: File to write; without it the manifest is printed, or submitted as NAME.yaml.
            submit: Apply the file with kubectl.
        """
        self._write_job(job, output, f"{job.name}.yaml", kubernetes.submit if submit else None)

    def doctor(
        self,
        *,
        options: LaunchFlags = NO_LAUNCH_OPTIONS,
        device: Device = "auto",
        limit: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1e8))] = 60.0,
        output_dir: Path = Path("."),
        only: Literal["machine", "collectives"] | None = None,
        as_json: JsonFlag = False,
    ) -> None:
        """Check this machine, then whether all ranks of a launch reach each other, with correct values, and how fast.

        It runs kernels and writes to disks instead of only reading settings. Each problem comes with a command that
        fixes it.

        Args:
            device: auto, cpu or cuda.
            limit: Timeout in seconds for one collective at one size; the error names the ranks that do not answer.
            output_dir: Folder whose disk is checked; nothing is left there.
            only: machine or collectives, to check only these.
            as_json: Print unrounded JSON only.
        """
        system = SystemConfig(device=device, join_timeout=limit)
        plan = plan_launch(options, system, os.environ)
        if plan is not None:
            args = ["doctor", "--limit", str(limit), "--device", device, f"--output-dir={output_dir}"]
            args += [*(["--only", only] if only else []), *(["--json"] if as_json else [])]
            command = [*_worker_command(), *args]
            sys.exit(run_workers(plan, command, ignore_late_signals=self.ignore_late_signals))
        from torchstone import api

        result = api.doctor(device, limit, as_json, output_dir, only, None if as_json else _write_text)
        report = result["json"]
        if as_json and os.environ.get("RANK", "0") == "0":
            _print_json(report)
        if not all(each["ok"] for each in report["collectives"]):
            raise NumericalError("\n".join(report["errors"]))
        if report["errors"]:
            raise MachineError(
                "\n".join(report["errors"]), None if as_json else "each line with fix: above says what to type"
            )

    def env(self, *, as_json: JsonFlag = False) -> None:
        """Print what a bug report needs: versions, hardware, packages and variables, without secrets.

        Args:
            as_json: Print JSON.
        """
        from torchstone.doctor.environment import as_text, environment

        values = environment()
        if as_json:
            _print_json(values)
        else:
            _write_text(as_text(values))

    def debug_show(self, file: Path, /, *, as_json: JsonFlag = False) -> None:
        """Show a file that a run wrote at a NaN: what was computed, and which tensors are bad.

        Args:
            file: nan_grad_step_N.pt, or debug/nan_debug_step_N.pkl.
            as_json: Print unrounded JSON only.
        """
        from torchstone.training.nan_dump import dump_lines, read_dump, summarize_dump

        summary = summarize_dump(read_dump(file))
        if as_json:
            _print_json(summary)
            return
        for line in dump_lines(summary):
            _print_line(line)

    def diagnose(
        self,
        config: Path | None = None,
        /,
        *,
        run: SharedFlags = NO_RUN_FLAGS,
        options: LaunchFlags = NO_LAUNCH_OPTIONS,
        full: Switch = False,
        only: str = "",
        list_checks: Annotated[bool, Parameter(name="--list", negative="")] = False,
        as_json: JsonFlag = False,
    ) -> None:
        """Check whether training is right, on the model, data and layout of a run, and if not, say where to look.

        Nothing is written into the run's folder. The exit code is 0 if no check fails; otherwise that of the worst:
        3 for data, 6 for the model and its checkpoint, 5 for numbers.

        Args:
            config: JSON, YAML or TOML file, or the folder of a run.
            full: Check whole steps of the run, on whole rows, without limits of time.
            only: Checks to run, separated by commas.
            list_checks: List the checks with what must hold, and stop.
            as_json: Print unrounded JSON only.
        """
        if list_checks:
            _print_checks(as_json)
            return
        names = [name.strip() for name in only.split(",") if name.strip()]
        if names:
            from torchstone.diagnosis.checks import CHECKS
            from torchstone.diagnosis.run_checks import select_checks

            # Before other processes are started.
            select_checks(CHECKS, names)
        resolved = self._resolve(config, run)
        plan = plan_launch(options, resolved.system, os.environ)
        if config is not None and (config / "checkpoints").is_dir() and not (as_json or _is_worker()):
            _print_line(f"checking what {config} starts from; for its checkpoints: --model.path {config}")
        flags = [*(["--full"] if full else []), *([f"--only={only}"] if only else []), *(["--json"] if as_json else [])]
        if plan is not None:
            self._launch_diagnosis(resolved, plan, flags)
            return
        heartbeat.begin_startup(of_process=True)
        from torchstone import api
        from torchstone.diagnosis.report import result_lines, verdict_lines

        is_main = os.environ.get("RANK", "0") == "0"

        def print_lines(lines: Iterable[str]) -> None:
            if is_main and not as_json:
                for line in lines:
                    _print_line(line)
                sys.stdout.flush()

        report = api.diagnose_with_config(
            resolved, full, names, lambda result: print_lines(result_lines(result)), quiet=as_json
        )
        print_lines(verdict_lines(report))
        if is_main and as_json:
            _print_json(report.to_dict())
        if report.error is not None:
            sys.stdout.flush()
            raise report.error
        if _is_worker():
            api.destroy_process_group()
            _exit(0)

    def evaluate(
        self,
        source: str,
        /,
        *,
        data: str,
        questions: CountOrAll = 200,
        extract: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
        max_tokens: Annotated[int | None, MAX_TOKENS] = None,
        context_length: PositiveInt | None = None,
        chat_template: str | None = None,
        device: Device = "auto",
        columns: str = "",
        cache_dir: str = "cache/datasets",
        trust_remote_code: bool = False,
        as_json: JsonFlag = False,
    ) -> None:
        """Compute the loss of a model over a data file and, for conversations, the exact-match accuracy.

        Args:
            source: A run, a checkpoint, a Hugging Face folder, or a model on the hub (org/name).
            data: A file, folder or glob; hub:org/name; or demo:corpus, demo:chat, demo:heldout.
            questions: Rows to answer; 0 for none, all for all.
            extract: Regular expression for the part of an answer that is compared, such as '#### (.+)'.
            max_tokens: Maximum length of an answer in tokens; by default a little more than the longest expected one.
            context_length: Maximum row length in tokens; by default 1024, or the model's maximum if smaller.
            chat_template: A file, or chatml, llama3, alpaca, plain; by default the tokenizer's own.
            device: auto, cpu or cuda.
            columns: Names of the data's columns, such as prompt=question,completion=answer (see data.columns).
            cache_dir: Folder of the token cache.
            trust_remote_code: Run code from the model's folder.
            as_json: Print unrounded JSON only.
        """
        from torchstone import api

        template = {} if chat_template is None else {"data.chat_template": chat_template}
        result = api.evaluate(
            source, data, None if questions == "all" else questions, context_length, device, cache_dir, as_json,
            trust_remote_code, columns, extract=extract, max_tokens=max_tokens,
            overrides=template | dict(self.config_flags),
        )  # fmt: skip
        if as_json:
            _print_json(result)
            return
        examples, count = result.pop("examples", []), result.pop("questions", 0)
        if "exact_match" in result:
            share = result["exact_match"]
            result["exact_match"] = f"{share:.1%} ({round(share * count)} of {count} questions)"
        _print_result(result, as_json)
        for example in examples:
            compared = "" if extract is None else f"{example['extracted']!r}, "
            expected = example["expected"] if extract is None else example["expected_extracted"]
            verdict = "right" if example["right"] else f"wrong: {compared}expected {expected!r}"
            _print_line(f"  {example['question']}  ->  {example['answer']}  ({verdict})")

    def export(
        self,
        source: str,
        target: Path,
        /,
        *,
        dtype: Dtype = "auto",
        verify: bool = True,
        merge: bool = False,
        average_lora_a: bool = False,
        base: str | None = None,
        trust_remote_code: bool = False,
        as_json: JsonFlag = False,
    ) -> None:
        """Write a Hugging Face folder, and verify it by loading it in Transformers. An adapter is written for PEFT.

        Args:
            source: A run (its best checkpoint, else its newest), a checkpoint, a Hugging Face folder, or a hub name.
            target: The new folder.
            dtype: float32, bfloat16 or float16; auto keeps that of the model that a run started from.
            verify: Load the folder in Transformers and compare weights and logits.
            merge: Merge an adapter into its base model, and write the model.
            average_lora_a: For families that store q, k and v as one linear: write one A, the mean, which is not exact.
            base: Where the model is now that LoRA or OSFT has tuned, if it has moved.
            trust_remote_code: Run code from the model's folder.
            as_json: Print the result as JSON.
        """
        from torchstone import api

        result = api.export(source, target, dtype, verify, trust_remote_code, merge, average_lora_a, base)
        _print_result(result, as_json)

    def chat(
        self,
        source: str,
        /,
        *,
        prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
        system: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
        chat_template: str | None = None,
        max_tokens: MaxTokens = 256,
        sampling: SamplingFlags = DEFAULT_SAMPLING,
        device: Device = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        """Chat with a model. An empty line or Ctrl-D ends the chat, /new starts a new conversation.

        Args:
            source: A run, a checkpoint, a Hugging Face folder, or a model on the hub (org/name).
            prompt: Ask this once, print the answer and stop.
            system: The system message of the conversation.
            chat_template: A file, or chatml, llama3, alpaca, plain; by default the tokenizer's own.
            max_tokens: Maximum length of an answer in tokens.
            device: auto, cpu or cuda.
            trust_remote_code: Run code from the model's folder.
        """
        from torchstone import api

        conversation = api.Chat(
            source, max_tokens, device, trust_remote_code, system=system, chat_template=chat_template,
            temperature=sampling.temperature or 0.0, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed,
            overrides=dict(self.config_flags),
        )  # fmt: skip
        if prompt is not None:
            _answer(conversation, prompt)
            return
        while True:
            if sys.stdin.isatty():
                sys.stderr.write("> ")
                sys.stderr.flush()
            line = _read_input(sys.stdin.readline).strip()
            if not line:
                return
            if line == "/new":
                conversation.reset()
                continue
            try:
                _answer(conversation, line)
            except UsageError as error:
                # The conversation fills the context: a person can go on with /new.
                if not sys.stdin.isatty():
                    raise
                heartbeat.print_line(f"error: {error}")

    def generate(
        self,
        source: str,
        prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
        /,
        *,
        max_tokens: MaxTokens = 256,
        sampling: SamplingFlags = DEFAULT_SAMPLING,
        device: Device = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        """Continue a text with a model, without a chat template.

        Args:
            source: A run, a checkpoint, a Hugging Face folder, or a model on the hub (org/name).
            prompt: The text to continue; - reads it from stdin. By default a new document.
            max_tokens: Maximum number of new tokens.
            device: auto, cpu or cuda.
            trust_remote_code: Run code from the model's folder.
        """
        if prompt is not None and re.fullmatch(r"--[a-z][\w.-]*(=\S*)?", prompt):
            raise UsageError(f"unknown option {prompt}", "if it is the prompt, write - and pass it on stdin")
        if prompt == "-":
            prompt = _read_input(sys.stdin.read).removesuffix("\n")
        elif prompt is None and _has_input():
            heartbeat.print_line("stdin is not read; to continue its text, write - as the prompt")
        from torchstone import api

        settings = {"system.device": device, "model.trust_remote_code": trust_remote_code} | dict(self.config_flags)
        if sampling.temperature is None:
            sampling = replace(sampling, temperature=DEFAULT_TEMPERATURE)
        config = api.model_config(source, settings)
        result = api.generate_with_config(config, prompt or "", max_tokens, sampling, _write_text)
        _end_text(result, max_tokens)

    def _resolve(self, config: Path | None, run: RunFlags = NO_RUN_FLAGS, purpose: Purpose = "train") -> Config:
        given = [key.replace("-", "_") for key, _ in self.config_flags]
        overrides = [*self.config_flags, *run.overrides(given)]
        return self.resolver(read_config_layers(config, run.preset_name, overrides), purpose)

    def _launch(self, config: Config, plan: LaunchPlan) -> None:
        """Runs this command in several processes, after one process has checked the layout and tokenized the data.

        The launcher of node 0 locks the run's folder before anything is written there. If no node knows its rank, the
        worker of rank 0 does it later. Every launcher refuses a folder that is not for runs.
        """
        output_dir = Path(config.output_dir)
        is_first_node = plan.nodes.max_nodes == 1 or plan.nodes.node_rank == 0
        check_output_dir(config)
        with ExitStack() as stack:
            lock = stack.enter_context(lock_run_folder(output_dir)) if is_first_node else None
            # Each launch has its own files, so that restarted workers never read the config of another launch.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchstone-")))
            code, pinned = _prepare(config, plan, folder)
            if code == 0:
                secret = output_dir / SECRET_FILE
                files = WorkerFiles(_log_folder(config), pinned.read_text(), lock, secret, output_dir)
                code = run_workers(plan, [*_worker_command(), "train"], files, self.ignore_late_signals)
        if code:
            sys.exit(code)

    def _launch_diagnosis(self, config: Config, plan: LaunchPlan, flags: list[str]) -> None:
        """Runs `diagnose` in several processes. Unlike a training run it has no folder, no lock and no logs."""
        with tempfile.TemporaryDirectory(prefix="torchstone-") as folder:
            # The check bad_rows reports bad rows.
            code, pinned = _prepare(config, plan, Path(folder), "--data.on_bad_row=skip")
            if code == 0:
                args = ["diagnose", str(pinned), f"--data.on_bad_row={config.data.on_bad_row}", *flags]
                code = run_workers(plan, [*_worker_command(), *args], ignore_late_signals=self.ignore_late_signals)
        if code:
            sys.exit(code)

    def _write_job(
        self,
        job: SlurmJob | KubernetesJob,
        output: Path | None,
        default_name: str,
        submit: Callable[[Path], str] | None,
    ) -> None:
        """Prints or writes the file of a job, and submits it. The config flags of this call are validated with the
        config and become part of the job."""
        self._resolve(job.config)
        text = job.render([f"--{key}={value}" for key, value in self.config_flags])
        if output is None and submit is None:
            _write_text(text)
            return
        file = output or Path(default_name)
        _check_not_an_input(file, job.config)
        write_text(file, text)
        heartbeat.print_line(f"wrote {file}")
        if submit is not None:
            _print_line(submit(file))


def _prepare(config: Config, plan: LaunchPlan, folder: Path, *flags: str) -> tuple[int, Path]:
    """Checks the layout and tokenizes the data in one process. Returns its exit code, and the config for the workers,
    with the commits of what is on the hub."""
    file, pinned = folder / "config.json", folder / "pinned.json"
    file.write_text(json.dumps(to_dict(config), indent=2))
    flags = (*flags, *([] if plan.world_size is None else ["--processes", str(plan.world_size)]))
    return run_preparation([*_worker_command(), "prepare", str(file), *flags, "--pin", str(pinned)]), pinned


def _worker_command() -> list[str]:
    """Workers import nothing from the current folder, which may be a stranger's, unless this process does."""
    imports_from_here = not {"", os.getcwd()}.isdisjoint(sys.path)
    return [sys.executable, *([] if imports_from_here else ["-P"]), "-m", "torchstone"]


def _convert_strictly(type_: Any, tokens: Sequence[Any]) -> Any:
    """Converts values like cyclopts, but does not round a fraction to an integer, and expands ~ in --html=~/page."""
    types = {type_, *get_args(type_)}
    for token in tokens if int in types and float not in types else ():
        if re.fullmatch(r"[+-]?\d*\.\d*[1-9]\d*", token.value):
            raise ValueError(f"{token.value} is not an integer")
    value = convert(type_, tokens)
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def _check_not_an_input(target: Path, *inputs: str | Path | None) -> None:
    """Raises if a file to write is one that the command reads."""
    for name in inputs:
        if name is not None and target.exists() and Path(name).exists() and target.samefile(name):
            raise UsageError(f"{target} is an input of this command: it would be overwritten", "choose another name")


def _keys_help(command: str) -> str:
    return f"These config keys are flags, too: {', '.join(f'--{key}' for key in KEYS_OF_COMMAND[command])}."


def _answer(conversation: Chat, question: str) -> None:
    """Prints an answer while it is generated."""
    conversation.ask(question, _write_text)
    if conversation.last is not None:
        _end_text(conversation.last, conversation.max_new_tokens)


def _end_text(result: GeneratedText, max_tokens: int) -> None:
    """Ends the line of a text that was printed while it was generated, and says on stderr if it was cut off."""
    _write_text("\n")
    if result.ended_by == "max_tokens":
        heartbeat.print_line(f"[stopped at --max-tokens {max_tokens}]")
    elif result.ended_by == "context":
        heartbeat.print_line("[stopped: the context of the model is full]")


def _has_input() -> bool:
    """Whether stdin is a pipe or a file with something to read now. Nothing is read."""
    try:
        size = fcntl.ioctl(sys.stdin, termios.FIONREAD, bytes(4))
    except (AttributeError, OSError, TypeError, ValueError):
        # Closed, replaced, or of a kind that cannot tell.
        return False
    return not is_terminal(sys.stdin) and int.from_bytes(size, sys.byteorder) > 0


def _read_input(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise UsageError(f"the input is not UTF-8: {error}") from None


def _check_same_settings(args: Sequence[str], keys: Sequence[str]) -> None:
    """Raises if a flag such as --device and its config key are both given: one would win silently."""
    flags = {arg.partition("=")[0].replace("_", "-") for arg in args}
    for key in keys:
        flag = f"--{key.partition('.')[2].replace('_', '-')}"
        if flag in flags:
            raise UsageError(f"{flag} and --{key} are the same setting", "give one of them")


def _usage_error(message: str, args: list[str], given_keys: list[str]) -> UsageError:
    """The error of cyclopts, and what a flag such as --learning-rate may mean, or else the command's --help."""
    message, _, suggestion = message.partition(" Did you mean ")
    given_keys = [key.replace("-", "_") for key in given_keys]
    for arg, following in pairwise([*args, ""]) if args and args[0] in COMMANDS_WITH_KEYS else ():
        flag, equals, value = arg.partition("=")
        is_unknown = arg.startswith("--") and (f"{flag}." in message or f"{arg}." in message)
        hint = explain_name(flag[2:], value if equals else following, given_keys) if is_unknown else None
        if hint is not None:
            return UsageError(message, hint)
    if message.startswith("Unused Tokens") and args[0] == "chat":
        return UsageError(message, "--prompt TEXT asks one question")
    if suggestion and suggestion.rstrip("?.") not in args:
        return UsageError(message, f"did you mean {suggestion}")
    if args[0:1] == ["launch"] and "Unknown command" in message:
        return UsageError(message, "write torchstone launch slurm CONFIG or torchstone launch kubernetes CONFIG")
    num_words = 0 if not args or "Unknown command" in message else 2 if args[0] in COMMAND_GROUPS else 1
    words = [arg for arg in args[:num_words] if not arg.startswith("-")]
    return UsageError(message, f"see: {' '.join(['torchstone', *words, '--help'])}")


def _flatten_result(result: dict[str, Any]) -> dict[str, Any]:
    """Returns `result` with the `measured` values at the top level, lists as text, and no empty values."""
    flat = {key: value for key, value in result.items() if key != "measured"} | result["measured"]
    texts = {
        key: ", ".join(map(str, value)) if isinstance(value, list | dict) else value for key, value in flat.items()
    }
    return {key: value for key, value in texts.items() if value not in ("", None)}


def _print_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(result)
        return
    for key, value in result.items():
        if value != []:
            _print_line(f"{key.replace('_', ' ')}: {f'{value:.6g}' if isinstance(value, float) else value}")


def _print_checks(as_json: bool) -> None:
    from torchstone.diagnosis.checks import CHECKS

    keys = ("name", "group", "severity", "title", "meaning")
    if as_json:
        _print_json({"checks": [{key: getattr(check, key) for key in keys} for check in CHECKS]})
        return
    for check in CHECKS:
        _print_line(f"{check.name:<20}{check.group:<11}{check.severity:<10}{check.title}")


def _print_line(text: str) -> None:
    sys.stdout.write(f"{escape_message(text)}\n")


def _write_text(text: str) -> None:
    """Writes text at once: escaped to a terminal, unchanged to a file or a pipe."""
    sys.stdout.write(escape_controls(text) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _log_folder(config: Config) -> Path:
    return Path(config.output_dir) / "logs"


def _fail(error: TorchstoneError) -> None:
    rank = os.environ.get("RANK", "0")
    if not heartbeat.has_launcher() or heartbeat.terminal() is not None:
        # A launched worker without a log does not print: its launcher does.
        prefix = "" if rank == "0" else f"rank {rank}: "
        prefix += "" if isinstance(error, StoppedBySignal) else "error: "
        heartbeat.write_to_terminal(sys.stderr, f"{prefix}{error}\n")
    heartbeat.write_error(error, str(error), error.exit_code)
    _exit(error.exit_code)


def _fail_after(error: Exception) -> None:
    """Ends the process after an exception that is not ours. Anything but an out-of-memory or file error is a bug."""
    if is_out_of_memory(error):
        _fail(OutOfMemoryError(f"the machine is out of memory: {first_line(error)}", OUT_OF_MEMORY_HINT))
    if isinstance(error, OSError) and (error.filename is not None or error.errno in DISK_ERRORS):
        # A folder that is a file, a disk that is full or read-only: the user can fix it.
        _fail(UsageError(f"{error.filename or 'cannot write'}: {error.strerror}"))
    if _is_worker():
        _crash(error)
    raise error


def _crash(error: Exception) -> None:
    """Ends a worker after an unexpected error: the traceback goes to its log, the message to the launcher."""
    with suppress(OSError, ValueError):
        sys.stderr.write(_traceback_text(error))
    heartbeat.write_error(error, f"{type(error).__name__}: {error}", 1)
    _exit(1)


class _EscapedRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return escape_message(super().getMessage())


def _print_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replaces Python's own report of an unexpected error, which may quote data."""
    if sys.stderr is not None:
        sys.stderr.write(_traceback_text(error))


def _traceback_text(error: BaseException) -> str:
    return escape_controls("".join(traceback.format_exception(error)))


def _exit(code: int) -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if _is_worker():
        # A normal exit would wait for ranks that wait for this one.
        os._exit(code)
    sys.exit(code)


def _is_worker() -> bool:
    world_size = os.environ.get("WORLD_SIZE", "1")
    return heartbeat.has_launcher() or (world_size.isdecimal() and int(world_size) > 1)


if __name__ == "__main__":
    program()
