"""The demo: pretrain, fine-tune, evaluate on unseen words and export, in a few minutes on a laptop.

Every stage is a command that can be typed by hand; the demo prints it first. `--quick` runs a few steps of each, enough
to see that everything works and too few to learn anything.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from torchstone import api, heartbeat
from torchstone.errors import TorchstoneError
from torchstone.terminal import escape_controls

TARGET = 0.9
QUICK = {"training.max_steps": 8, "optim.warmup_steps": 2}


def main() -> int:
    heartbeat.open_standard_streams()
    parser = argparse.ArgumentParser(prog="python -m torchstone.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run only a few steps, too few to learn anything")
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="output folder (default: runs/demo)")
    options = parser.parse_args()
    try:
        return run(options.dir, options.quick)
    except TorchstoneError as error:
        heartbeat.print_line(f"error: {error}")
        return error.exit_code


def run(folder: Path, quick: bool) -> int:
    started = time.monotonic()
    pretrained, chat, exported = folder / "pretrain", folder / "chat", folder / "hf"
    step_overrides = QUICK if quick else {}
    questions = 40 if quick else None

    print_title(f"1. Pretrain on the built-in corpus\n$ torchstone train --preset demo --output-dir {pretrained}")
    api.train(preset="demo", overrides={"output_dir": str(pretrained)} | step_overrides)

    print_title(f"2. Before fine-tuning\n$ torchstone evaluate {pretrained} --data demo:heldout")
    before = api.evaluate(str(pretrained), "demo:heldout", questions)
    print_line(f"exact match before: {before['exact_match']:.1%} of {before['questions']} questions about unseen words")

    print_title(
        "3. Fine-tune on conversations\n"
        f"$ torchstone train --preset demo-chat --model.path {pretrained} --output-dir {chat}"
    )
    api.train(preset="demo-chat", overrides={"model.path": str(pretrained), "output_dir": str(chat)} | step_overrides)

    print_title(f"4. After fine-tuning\n$ torchstone evaluate {chat} --data demo:heldout")
    after = api.evaluate(str(chat), "demo:heldout", questions)
    for example in after["examples"]:
        print_line(f"  {example['question']:<40} {example['answer']}")

    print_title(f"5. Export and verify\n$ torchstone export {chat} {exported}")
    shutil.rmtree(exported, ignore_errors=True)
    result = api.export(str(chat), exported)

    print_title("Done")
    print_line(f"exact match before: {before['exact_match']:.1%}, after: {after['exact_match']:.1%} "
        f"of {after['questions']} questions about unseen words")  # fmt: skip
    print_line(
        f"Hugging Face folder: {exported} (Transformers' logits within {result['max_logit_difference']:.1e} of ours)"
    )
    print_line(f"chat with it: torchstone chat {exported}")
    print_line(f"{time.monotonic() - started:.0f} seconds")
    if quick or after["exact_match"] >= TARGET:
        return 0
    print_line(f"expected at least {TARGET:.0%}: something is wrong")
    return 1


def print_title(text: str) -> None:
    print_line(f"\n{text}\n")


def print_line(text: str) -> None:
    sys.stdout.write(escape_controls(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
