"""Does fine-tuning on a second task forget the first? Full fine-tuning against OSFT, on a CPU, in minutes.

    python benchmarks/continual.py --plot docs/continual.png   three seeds: the figure of the README
    python benchmarks/continual.py --seeds 1 --steps 40        a quick look

A model is pretrained on the demo's corpus and fine-tuned on task A (letters of words, `demo:chat`). Then each arm
fine-tunes it on task B (digits of numbers, `demo:numbers`) alone, and both tasks are watched as validation sets. Right
answers are counted on words and numbers that no training data has. Every arm runs at several learning rates, because a
small one forgets less, whatever the method. One JSON line a run, then a table of the means over the seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from torchstone import api
from torchstone.observe.metrics import read_metrics

TASKS = {"a": "demo:heldout", "b": "demo:numbers-heldout"}
ARMS: dict[str, dict[str, Any]] = {
    "full": {"tuning.method": "full"},
    "osft 0.25": {"tuning.method": "osft", "tuning.unfreeze_rank_ratio": 0.25},
}
LEARNING_RATES = {"full": (2e-4, 5e-4, 2e-3), "osft 0.25": (1e-3, 2e-3, 4e-3)}
# Of the preset demo-chat.
TASK_A_LEARNING_RATE = 2e-3
VALIDATIONS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="on task B")
    parser.add_argument("--folder", type=Path, default=Path("runs/continual"), help="runs in it are not repeated")
    parser.add_argument("--plot", type=Path, help="write the figure to this file (needs matplotlib)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    for seed in range(options.seeds):
        for result in run_seed(seed, options.steps, options.folder / f"seed-{seed}"):
            print(json.dumps({key: value for key, value in result.items() if key != "curves"}), flush=True)
            results.append(result)
    print(table(results))
    if options.plot is not None:
        plot(results, options.plot)


def run_seed(seed: int, steps: int, folder: Path) -> Iterable[dict[str, Any]]:
    pretrained, first = folder / "pretrained", folder / "task-a"
    train("demo", pretrained, {"training.max_steps": 300, "training.seed": seed})
    train("demo-chat", first, {"model.path": str(pretrained), "training.max_steps": 200, "training.seed": seed})
    yield {"seed": seed, "arm": "before task B", "lr": None, **right_answers(first)}
    for arm, settings in ARMS.items():
        for lr in LEARNING_RATES[arm]:
            output = folder / f"{arm}-{lr:g}".replace(" ", "-")
            values = settings | {
                "model.path": str(first), "data.path": "demo:numbers", "training.max_steps": steps,
                "data.validation_path": {name: TASKS[name] for name in ("b", "a")}, "training.seed": seed,
                "training.validate_every_steps": max(1, steps // VALIDATIONS), "optim.learning_rate": lr,
                "optim.weight_decay": 0.0,
            }  # fmt: skip
            train("demo-chat", output, values)
            lines = [line for line in read_metrics(output / "metrics.jsonl") if "val_loss/a" in line]
            curves = {name: [(line["step"], line[f"val_loss/{name}"]) for line in lines] for name in TASKS}
            yield {"seed": seed, "arm": arm, "lr": lr, **right_answers(output), "curves": curves}


def train(preset: str, output: Path, values: dict[str, Any]) -> None:
    if not (output / "checkpoints").is_dir():
        api.train(preset=preset, overrides={"output_dir": str(output), "observe.console": "quiet"} | values)


def right_answers(run: Path) -> dict[str, float]:
    return {name: api.evaluate(str(run), data, 400)["exact_match"] for name, data in TASKS.items()}


def table(results: list[dict[str, Any]]) -> str:
    """The means over the seeds, and the worst and the best seed."""
    rows = ["| | learning rate | task A, right answers | task B |", "|---|---|---|---|"]
    for arm, lr in dict.fromkeys((result["arm"], result["lr"]) for result in results):
        runs = [result for result in results if (result["arm"], result["lr"]) == (arm, lr)]
        cells = []
        for task in TASKS:
            values = [run[task] for run in runs]
            cells.append(f"{mean(values):.0%} ({min(values):.0%} to {max(values):.0%})")
        rows.append(f"| {arm} | {'' if lr is None else f'{lr:g}'} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for arm, marker, label_at in zip(ARMS, ("o", "s"), ((-6, -12), (-6, 6)), strict=True):
        runs = [result for result in results if result["arm"] == arm]
        (points,) = axes[0].plot([run["b"] for run in runs], [run["a"] for run in runs], marker, alpha=0.3)
        color = points.get_color()
        rates = LEARNING_RATES[arm]
        means = {lr: [mean(run[task] for run in runs if run["lr"] == lr) for task in ("b", "a")] for lr in rates}
        axes[0].plot(*zip(*means.values(), strict=True), f"-{marker}", color=color, label=arm)
        for lr, point in means.items():
            axes[0].annotate(f"{lr:g}", point, label_at, textcoords="offset points", ha="right", color=color)
        for number, run in enumerate(run for run in runs if run["lr"] == TASK_A_LEARNING_RATE):
            steps, losses = zip(*run["curves"]["a"], strict=True)
            axes[1].plot(steps, losses, color=color, label=arm if number == 0 else None)
    axes[0].set(xlabel="task B, right answers", ylabel="task A, right answers", xlim=(0.48, 1.02), ylim=(-0.02, 1.02))
    axes[0].set_title("after task B, by learning rate", fontsize=10)
    axes[1].set(xlabel="step of training on task B", ylabel="validation loss of task A", yscale="log")
    axes[1].set_title(f"at a learning rate of {TASK_A_LEARNING_RATE:g}", fontsize=10)
    for axis in axes:
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
