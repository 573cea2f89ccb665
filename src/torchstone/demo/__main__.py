"""The whole way in a few minutes on a laptop: pretrain, fine-tune, evaluate on unseen words, export, ask.

Every stage is a command that can be typed by hand; the demo prints it before it runs it. `--quick` makes a few steps of
each, enough to see that everything works here and too few to learn anything.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from torchstone import api
from torchstone.errors import TorchstoneError

WANTED = 0.9
QUICK = {"training.max_steps": 8, "optim.warmup_steps": 2}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torchstone.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps only: checks that it runs, learns nothing")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/demo"), help="where everything goes (default: runs/demo)"
    )
    options = parser.parse_args()
    try:
        return run(options.dir, options.quick)
    except TorchstoneError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def run(folder: Path, quick: bool) -> int:
    began = time.monotonic()
    pretrained, chat, exported = folder / "pretrain", folder / "chat", folder / "hf"
    shorter = QUICK if quick else {}
    questions = 40 if quick else None

    title(f"1. Pretrain on the built-in corpus\n$ torchstone train --preset demo --output-dir {pretrained}")
    api.train(preset="demo", overrides={"output_dir": str(pretrained)} | shorter)

    title(f"2. Before fine-tuning\n$ torchstone evaluate {pretrained} --data demo:heldout")
    before = api.evaluate(str(pretrained), "demo:heldout", questions)
    say(f"exact match before: {before['exact_match']:.1%} of {before['questions']} questions about words never seen")

    title(
        "3. Fine-tune on conversations\n"
        f"$ torchstone train --preset demo-chat --model.path {pretrained} --output-dir {chat}"
    )
    api.train(preset="demo-chat", overrides={"model.path": str(pretrained), "output_dir": str(chat)} | shorter)

    title(f"4. After fine-tuning\n$ torchstone evaluate {chat} --data demo:heldout")
    after = api.evaluate(str(chat), "demo:heldout", questions)
    for example in after["examples"]:
        say(f"  {example['question']:<40} {example['answer']}")

    title(f"5. Export and prove it\n$ torchstone export {chat} {exported}")
    shutil.rmtree(exported, ignore_errors=True)
    result = api.export(str(chat), exported)

    title("Done")
    say(f"exact match before: {before['exact_match']:.1%}, after: {after['exact_match']:.1%} "
        f"of {after['questions']} questions about words never seen")  # fmt: skip
    say(f"Hugging Face folder: {exported} (Transformers' logits within {result['max_logit_difference']:.1e} of ours)")
    say(f"talk to it: torchstone chat {exported}")
    say(f"{time.monotonic() - began:.0f} seconds in all")
    if quick or after["exact_match"] >= WANTED:
        return 0
    say(f"that is less than the {WANTED:.0%} the demo is made to reach: something is wrong")
    return 1


def title(text: str) -> None:
    say(f"\n{text}\n")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
