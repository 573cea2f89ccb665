"""Pins the names on the hub in a config to commits, so that a run keeps the model and the data it started with.

The pinned config is what the run's processes get and what config.json shows. Its names are also in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchstone import hub
from torchstone.checkpoint.load import CHECKPOINTS, named_checkpoint_folder, read_state
from torchstone.checkpoint.manifest import list_checkpoints
from torchstone.config.schema import Config
from torchstone.data.sources import SUFFIXES
from torchstone.errors import CheckpointError, UsageError
from torchstone.hub import HubName
from torchstone.observe.console import Console
from torchstone.parallel.mesh import ParallelContext


def pin_hub_names(config: Config, console: Console, weights: bool = False) -> Config:
    """Downloads what a config names on the hub, and returns the config with the commits.

    A run that is resumed keeps its commits, and needs no `weights` but those of its checkpoint.
    """
    if not hub_names(config):
        return config
    saved = _saved_names(config)
    model, data, weights = config.model, config.data, weights and saved is None

    def pin_model(text: str | None, weights: bool) -> str | None:
        name = None if text is None else hub.parse_model(text)
        if name is None:
            return text
        name = _keep_commit(name, saved or [], console)
        return str(hub.download_model(name, console, weights, model.trust_remote_code).name)

    def pin_data(texts: Sequence[str]) -> tuple[str, ...]:
        names = [(text, hub.parse_data(text)) for text in texts]
        return tuple(
            text
            if name is None
            else str(hub.download_data(_keep_commit(name, saved or [], console), SUFFIXES, console).name)
            for text, name in names
        )

    path = None if data.path is None else pin_data(data.path)
    sets = {name: pin_data(paths) for name, paths in data.validation_sets.items()}
    return replace(
        config,
        model=replace(model, path=pin_model(model.path, weights), tokenizer=pin_model(model.tokenizer, False)),
        data=replace(data, path=path, validation_path=sets.get("", sets) or None),
    )


def hub_names(config: Config) -> list[str]:
    """The names in a config that are on the hub."""
    models = [name for name in (config.model.path, config.model.tokenizer) if name is not None]
    data = (*(config.data.path or ()), *config.data.validation_paths)
    return [name for name in models if hub.parse_model(name)] + [name for name in data if hub.parse_data(name)]


def check_same_commits(config: Config, ctx: ParallelContext) -> None:
    """Raises on all ranks if a branch moved on the hub between the starts of two nodes."""
    names = ctx.all_gather_object(hub_names(config))
    for rank, other in enumerate(names):
        if other != names[0]:
            raise UsageError(
                f"rank {rank} has other commits from the hub than rank 0: {', '.join(other)}; {', '.join(names[0])}",
                "name the commit: org/name@COMMIT",
            )


def _saved_names(config: Config) -> list[HubName] | None:
    """The pinned names in the checkpoint to resume from; None without a checkpoint."""
    resume = config.checkpoint.resume
    folders = [folder for _, folder in reversed(list_checkpoints(Path(config.output_dir) / CHECKPOINTS))]
    if not folders and resume not in ("auto", "never"):
        folders = [named_checkpoint_folder(resume)]
    for folder in folders:
        try:
            names = read_state(folder).get("hub", [])
        except CheckpointError:
            # It is reported when the run looks for its checkpoint.
            continue
        parsed = [hub.parse_data(name) if name.startswith(hub.PREFIX) else hub.parse_model(name) for name in names]
        return [name for name in parsed if name is not None]
    return None


def _keep_commit(name: HubName, saved: Sequence[HubName], console: Console) -> HubName:
    """The name with the commit that the checkpoint has for its repository."""
    others = [other for other in saved if (other.repo_type, other.repo) == (name.repo_type, name.repo)]
    if name.is_pinned or not others:
        return name
    same_files = [other for other in others if other.path == name.path]
    commit, *more = sorted({str(other.revision) for other in same_files or others})
    if more:
        raise UsageError(
            f"{name}: the checkpoint has several commits of it: {', '.join(map(str, same_files or others))}",
            "name the one that this path had: @COMMIT",
        )
    console.info(f"{name}: the run continues with commit {commit}, with which it started")
    return replace(name, revision=commit)
