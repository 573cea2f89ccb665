"""Refuses an `output_dir` whose files a run would overwrite: that of a model, of data or of another project.

Without torch: a launcher checks it before it starts anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchstone.atomic import read_json_or_empty
from torchstone.config.schema import Config
from torchstone.errors import UsageError

# The config of a run has had these since the first version.
SECTIONS = ("model", "data", "training", "optim", "checkpoint", "observe", "system")


def check_output_dir(config: Config) -> None:
    """Raises UsageError if the folder belongs to something else than a run. Other files, such as logs, are allowed."""
    folder = Path(config.output_dir)
    if not folder.is_dir():
        return
    hint = f"choose another folder, such as --output-dir runs/{folder.resolve().name}"
    for key, names in _inputs(config).items():
        for path in (Path(name).expanduser() for name in names):
            if path.is_dir() and folder.samefile(path):
                raise UsageError(f"output_dir {folder} is the folder of {key}: a run would write its files there", hint)
    if is_run(folder):
        return
    for name in ("config.json", "metrics.jsonl"):
        if os.path.lexists(folder / name):
            raise UsageError(
                f"output_dir {folder} has a {name} that is not from a run: training would overwrite it", hint
            )


def is_run(folder: Path) -> bool:
    """Whether a run was started in a folder: it has its config or, if that is damaged, a checkpoint."""
    values = read_json_or_empty(folder / "config.json")
    has_config = "output_dir" in values and all(isinstance(values.get(section), dict) for section in SECTIONS)
    return has_config or any(folder.glob("checkpoints/step-*/manifest.json"))


def _inputs(config: Config) -> dict[str, list[str]]:
    """What the run reads, by key."""
    model, data, tuning = config.model, config.data, config.tuning
    single = {"model.path": model.path, "model.tokenizer": model.tokenizer, "tuning.adapter": tuning.adapter}
    return {key: [name] for key, name in single.items() if name is not None} | {
        "data.path": list(data.path or ()),
        "data.validation_path": list(data.validation_paths),
        "tuning.frozen_adapters": list((tuning.frozen_adapters or {}).values()),
    }
