"""Models and datasets on the Hugging Face hub, downloaded into the cache of huggingface_hub.

A model is `org/name`; a dataset is `hub:org/name`, or `hub:org/name/path` for some of its files. `@revision` after the
name is a branch, a tag or a commit. A name with a commit is pinned: it always means the same files, and the hub is not
asked for those that are in the cache. Only files that are read are downloaded. Neither torch nor, as long as no name is
on the hub, huggingface_hub is imported.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any, Literal, NamedTuple

from torchstone.errors import TorchstoneError, UsageError, first_line
from torchstone.observe.console import Console

PREFIX = "hub:"
COMMIT = re.compile(r"[0-9a-f]{40}")
DATASET = re.compile(r"hub:([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.+))?")
# What a model needs besides its weights, in the repository's top folder.
MODEL_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer*", "chat_template*", "merges.txt",
    "vocab.txt", "vocab.json", "added_tokens.json", "special_tokens_map.json", "*.model", "*.tiktoken",
)  # fmt: skip
SUBFOLDERS, CODE = "*/*", "*.py"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors")
DATASET_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
TRAIN_SPLIT = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
# What differs between the shards of a split: a hash, 00001-of-00002, or a number with leading zeros. Other numbers are
# sizes, years or versions: different data.
SHARD_NUMBER = re.compile(r"(?<=-)[0-9a-f]{16}(?=\.)|\d{5}(?=-of-\d{5})|(?<=-of-)\d{5}|(?<!\d)0\d{2,}(?!\d)")
OTHER_SPLIT = re.compile(r"(?<![a-z])(test(ing)?|val(id(ation)?)?|dev|eval(uation)?)(?![a-z])", re.IGNORECASE)
MAX_LISTED = 8
# How long the hub may take to answer which commit a name has; huggingface_hub would wait for ever.
ANSWER_SECONDS = 10.0
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubName:
    """A repository on the hub; `path` selects files of a dataset."""

    repo_type: Literal["model", "dataset"]
    repo: str
    revision: str | None = None
    path: str = ""

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        prefix = PREFIX if self.repo_type == "dataset" else ""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{prefix}{self.repo}{revision}{'/' if self.path else ''}{self.path}"


class Snapshot(NamedTuple):
    """A pinned name, and the folder of its commit in the cache."""

    name: HubName
    folder: Path


def parse_model(name: str) -> HubName | None:
    """A model on the hub; None for a path that exists, or that does not have the form org/name."""
    repo, at, revision = name.partition("@")
    if repo.count("/") != 1 or (at and not revision) or Path(name).exists() or not _is_repo_id(repo):
        return None
    return HubName("model", repo, revision or None)


def parse_data(name: str) -> HubName | None:
    """A dataset on the hub; None for any other path."""
    if not name.startswith(PREFIX) or Path(name).exists():
        return None
    match = DATASET.fullmatch(name)
    path = (match.group(3) or "").rstrip("/") if match else ""
    if match is None or not _is_repo_id(match.group(1)) or (path and {"..", "**", ""} & set(path.split("/"))):
        raise UsageError(
            f"{name!r} does not name a dataset on the hub",
            "write hub:org/name, hub:org/name@revision, or hub:org/name/path with a file, a folder or a glob",
        )
    return HubName("dataset", match.group(1), match.group(2), path)


def download_model(
    name: HubName, console: Console | None = None, weights: bool = True, trust_remote_code: bool = False
) -> Snapshot:
    """Downloads the config, the tokenizer and the weights of a model. Its Python code is left out unless it may run."""
    console = console or Console()
    name, commit, _ = _look_up(name, console)
    files, ignore = ([*MODEL_FILES, CODE], [SUBFOLDERS]) if trust_remote_code else (MODEL_FILES, [SUBFOLDERS, CODE])
    snapshot = _fetch(name, console, "the config and tokenizer", files, ignore, commit)
    if not weights or not (snapshot.folder / "config.json").is_file():
        return snapshot
    # With config.json a list of patterns always matches something. Transformers prefers the single file.
    fetch_weights = partial(_fetch, snapshot.name, console, "the weights")
    fetch_weights(["config.json", WEIGHTS])
    if not (snapshot.folder / WEIGHTS).is_file():
        fetch_weights(["config.json", WEIGHTS_INDEX])
        if not (snapshot.folder / WEIGHTS_INDEX).is_file():
            raise _no_weights(snapshot.name)
        fetch_weights(["config.json", *_indexed_patterns(snapshot.folder / WEIGHTS_INDEX)])
    return snapshot


def download_data(name: HubName, suffixes: Sequence[str], console: Console | None = None) -> Snapshot:
    """Downloads the files that a name selects, by default its training split; only those that end in `suffixes`."""
    console = console or Console()
    name, commit, files = _look_up(name, console)
    if not name.path:
        if files is None:
            raise UsageError(f"{name}: the cache does not say which files it has", f"name them: {name}/PATH")
        name = replace(name, path=_training_files(name, files, suffixes))
    patterns, ignore = [glob.escape(name.path)], list[str]()
    if glob.has_magic(name.path) and name.path not in (files or ()):
        # In the patterns of huggingface_hub a star also matches slashes; in ours it does not.
        patterns, ignore = [name.path], ["*/" * (name.path.count("/") + 1) + "*"]
    else:
        # Texts are often licenses, but not in a folder that is named.
        patterns += [f"{glob.escape(name.path)}/*{suffix}" for suffix in (*suffixes, ".txt", ".txt.gz", ".txt.zst")]
    select = _huggingface_hub().utils.filter_repo_objects
    if files is not None and not any(select(files, allow_patterns=patterns, ignore_patterns=ignore)):
        raise UsageError(f"{name}: the dataset has no such file", _choices(name, _split_patterns(files, suffixes)))
    return _fetch(name, console, "the files", patterns, ignore, commit)


def data_path(snapshot: Snapshot) -> str:
    """The downloaded files as a path: a file, a folder or a glob."""
    path = snapshot.folder / snapshot.name.path
    is_glob = glob.has_magic(snapshot.name.path) and not path.exists()
    return f"{glob.escape(str(snapshot.folder))}/{snapshot.name.path}" if is_glob else str(path)


def _is_repo_id(repo: str) -> bool:
    hub = _huggingface_hub()
    try:
        hub.utils.validate_repo_id(repo)
    except hub.errors.HFValidationError:
        return False
    return True


def _huggingface_hub() -> ModuleType:
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    # Otherwise its requests would tell the version of torch, and which tool started this process.
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    return huggingface_hub


def _look_up(name: HubName, console: Console) -> tuple[HubName, str, list[str] | None]:
    """Returns the name, its commit and the names of its files, downloaded or not. If the hub cannot be reached, takes
    them from the cache and warns; the name is then pinned, so that later calls send no request."""
    if name.is_pinned and (files := _cached_files(name)) is not None:
        return name, str(name.revision), files
    hub = _huggingface_hub()
    if not hub.constants.HF_HUB_OFFLINE:
        console.info(f"asking {hub.constants.ENDPOINT} for {name}")
    try:
        options = {"repo_type": name.repo_type, "revision": name.revision, "timeout": ANSWER_SECONDS}
        info = hub.HfApi().repo_info(name.repo, **options)
        files = [file.rfilename for file in info.siblings or ()]
        # huggingface_hub would make a path of it.
        if not isinstance(info.sha, str) or COMMIT.fullmatch(info.sha) is None:
            raise UsageError(f"{name}: the hub sends {str(info.sha)[:100]!r} instead of a commit", "check HF_ENDPOINT")
        if not all(isinstance(file, str) for file in files):
            raise UsageError(f"{name}: the hub sends files without names", "check HF_ENDPOINT")
        return name, info.sha, files
    except TorchstoneError:
        raise
    except Exception as error:
        folder = _cached_folder(name)
        if folder is None or not _is_unreachable(error):
            raise _explain(name, error) from None
        if not name.is_pinned:
            console.warn(f"{name}: cannot reach the hub ({_reason(error)}): using commit {folder.name} of the cache")
        name = replace(name, revision=folder.name)
        return name, folder.name, _cached_files(name)


def _cached_folder(name: HubName) -> Path | None:
    hub = _huggingface_hub()
    try:
        # An empty list of patterns: the folder is returned even if files are missing.
        return Path(_snapshot_download(name, allow_patterns=[], local_files_only=True))
    except hub.errors.LocalEntryNotFoundError:
        return None


def _cached_files(name: HubName) -> list[str] | None:
    """All files of a repository; None if the cache does not have the list."""
    hub = _huggingface_hub()
    try:
        tree = hub.get_cached_repo_tree(name.repo, repo_type=name.repo_type, revision=name.revision)
    except hub.errors.CachedRepoTreeNotFoundError:
        return None
    return [file.path for file in tree]


def _snapshot_download(name: HubName, **options: Any) -> str:
    download = _huggingface_hub().snapshot_download
    return str(download(name.repo, repo_type=name.repo_type, revision=name.revision, **options))


def _fetch(
    name: HubName,
    console: Console,
    what: str,
    files: Sequence[str],
    ignore: Sequence[str] = (),
    commit: str | None = None,
) -> Snapshot:
    """Downloads the files that match the patterns `files`, unless they are in the cache at `commit`."""
    hub = _huggingface_hub()
    patterns = {"allow_patterns": list(files), "ignore_patterns": list(ignore)}
    has_bars = False
    try:
        _snapshot_download(replace(name, revision=commit or name.revision), **patterns, local_files_only=True)
    except hub.errors.LocalEntryNotFoundError:
        has_bars = console.style == "bar"
        if not hub.constants.HF_HUB_OFFLINE:
            console.info(f"downloading {what} of {name} to {hub.constants.HF_HUB_CACHE}")
    try:
        folder = Path(_download_in_thread(name, patterns, has_bars))
    except TorchstoneError:
        raise
    except Exception as error:
        raise _explain(name, error) from None
    return Snapshot(replace(name, revision=folder.name), folder)


def _download_in_thread(name: HubName, patterns: dict[str, Any], has_bars: bool) -> str:
    """After a signal huggingface_hub would first finish the files that it downloads; here they end with a chunk."""
    is_stopped = Event()

    class Bar(_huggingface_hub().utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | ({} if has_bars else {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            if is_stopped.is_set():
                raise InterruptedError("stopped")
            return super().update(n)

    executor = ThreadPoolExecutor(1)
    try:
        return executor.submit(_snapshot_download, name, **patterns, tqdm_class=Bar).result()
    except BaseException:
        is_stopped.set()
        raise
    finally:
        executor.shutdown(wait=False)


def _indexed_patterns(index: Path) -> list[str]:
    try:
        return sorted({glob.escape(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{index}: not an index of weights: {error!r}") from None


def _no_weights(name: HubName) -> UsageError:
    others = [file for file in _cached_files(name) or () if file.endswith(OTHER_WEIGHTS)]
    found = f"only {', '.join(others[:MAX_LISTED])}" if others else "no weights at all"
    return UsageError(
        f"{name} has no {WEIGHTS} and no {WEIGHTS_INDEX}: {found}",
        "pickles and other formats are not read; choose a repository or revision with safetensors weights, or convert "
        "it with Transformers (save_pretrained) and use the folder",
    )


def _training_files(name: HubName, files: Sequence[str], suffixes: Sequence[str]) -> str:
    """The file or glob of the training split. There must be one, so that no subsets are mixed without being asked."""
    patterns = _split_patterns(files, suffixes)
    chosen = [pattern for pattern in patterns if TRAIN_SPLIT.search(pattern)]
    chosen = chosen or [pattern for pattern in patterns if not OTHER_SPLIT.search(pattern)]
    if len(chosen) == 1:
        return chosen[0]
    if not patterns:
        raise UsageError(f"{name} has no data files", f"supported files: {', '.join(suffixes)}")
    found = "several sets of training files" if chosen else "no training files"
    raise UsageError(f"{name} has {found}: name those to use", _choices(name, chosen or patterns))


def _split_patterns(files: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """The data files, with a glob for the shards of a split, such as data/train-?????-of-?????.parquet."""
    groups: dict[str, list[str]] = {}
    for file in sorted(files):
        folder, slash, base = file.rpartition("/")
        is_hidden = any(part.startswith(".") for part in file.split("/"))
        if not is_hidden and base.endswith(tuple(suffixes)) and base not in DATASET_METADATA:
            pattern = SHARD_NUMBER.sub(lambda match: "?" * len(match[0]), glob.escape(base))
            groups.setdefault(glob.escape(folder + slash) + pattern, []).append(file)
    return [pattern if len(members) > 1 else members[0] for pattern, members in groups.items()]


def _choices(name: HubName, patterns: Sequence[str]) -> str:
    names = [str(replace(name, path=pattern)) for pattern in patterns[:MAX_LISTED]]
    return f"for example {', '.join(names)}" if names else "it has no data files"


def _is_unreachable(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", 500)
    return status >= 500 or status == 429


def _reason(error: BaseException) -> str:
    if isinstance(error, _huggingface_hub().errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return f"{type(error).__name__}: {first_line(error, '')[:200]}"


def _explain(name: HubName, error: Exception) -> Exception:
    """The error to show for one of huggingface_hub; an error of the operating system (a full disk) stays as it is."""
    errors, constants = _huggingface_hub().errors, _huggingface_hub().constants
    if isinstance(error, OSError) and error.errno is not None:
        return error
    prefix = f"{name}: " if name.repo_type == "dataset" else f"{name}: no such folder, and "
    url = f"{constants.ENDPOINT}/{'datasets/' if name.repo_type == 'dataset' else ''}{name.repo}"
    if isinstance(error, errors.GatedRepoError):
        return UsageError(
            f"{name}: the hub gives access only on request (gated)", f"ask for it on {url}, then {LOG_IN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        slash = "; for a branch with a slash in its name, use the commit" if name.repo_type == "dataset" else ""
        return UsageError(
            f"{name}: there is no revision {name.revision}", f"{url}/tree/main lists branches and tags{slash}"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or "401 Unauthorized" in str(error):
        # Without a token, the hub does not tell a private repository from one that does not exist.
        return UsageError(
            f"{prefix}no such {name.repo_type} on {constants.ENDPOINT}",
            f"check the name{_local_folders(name)}; for a private repository, {LOG_IN}",
        )
    if not _is_unreachable(error):
        return UsageError(f"{name}: {constants.ENDPOINT} answered with an error: {_reason(error)}", LOG_IN)
    if constants.HF_HUB_OFFLINE:
        return UsageError(
            f"{prefix}it is not completely in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE to download it",
        )
    folders = _local_folders(name)
    check = f"check the name{folders}; for a model on the hub, " if folders else ""
    return UsageError(
        f"{prefix}it cannot be downloaded from {constants.ENDPOINT}: {_reason(error.__cause__ or error)}",
        f"{check}check the network and HF_ENDPOINT, and run the same command again: files that are complete are kept "
        f"in {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE=1 uses only those",
    )


def _local_folders(name: HubName) -> str:
    """Where a model's name may be the misspelled path of a folder."""
    parent = Path(name.repo).parent
    folders = sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    return f" (folders in {parent}: {', '.join(folders[:MAX_LISTED])})" if folders else ""
