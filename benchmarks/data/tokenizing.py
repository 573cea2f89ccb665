"""Tokenizing a JSONL file here and with `datasets.map`: the same tokenizer, the same processes, the arms in turn.

    python benchmarks/data/tokenizing.py [--megabytes 40] [--processes 2] [--rounds 3] [--shape text] [--text FILE]

From the file on disk to tokens on disk, nothing cached. The arm of datasets loads the file and maps it in batches of
1000 with the Transformers tokenizer, ids only (for conversations: apply_chat_template, without a mask; the arm here
derives one). Both make the same ids, which is checked. A JSON line an arm, then the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rows import Prose, chats, texts, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=("text", "messages"), default="text")
    parser.add_argument("--text", type=Path, default=None, help="take the documents from this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tokenizing-"))
    os.environ["HF_DATASETS_CACHE"], os.environ["HF_HUB_OFFLINE"] = str(folder / "hf"), "1"
    try:
        measure(options, folder)
    finally:
        shutil.rmtree(folder)


def measure(options: argparse.Namespace, folder: Path) -> None:
    from torchstone import train_tokenizer

    prose = Prose(text=options.text)
    size = write(folder / "rows.jsonl", (texts if options.shape == "text" else chats)(prose), options.megabytes)
    train_tokenizer([str(folder / "rows.jsonl")], folder / "tokenizer", 16384, max_bytes=5_000_000, quiet=True)
    arms = {"torchstone": ours, "datasets": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    ids: dict[str, np.ndarray] = {}
    for number in range(options.rounds):
        for name, arm in arms.items():
            place = folder / f"{name}-{number}"
            began = time.perf_counter()
            read = arm(folder, place, options)
            seconds[name].append(time.perf_counter() - began)
            ids[name] = read()
            shutil.rmtree(place, ignore_errors=True)
    assert np.array_equal(ids["torchstone"], ids["datasets"]), "the arms disagree about the tokens"
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(json.dumps({"arm": name, "shape": options.shape, "megabytes": size / 1e6, "processes": options.processes,
                          "s": middle, "all_s": values, "megabytes_per_s": size / 1e6 / middle,
                          "tokens_per_s": len(ids[name]) / middle}))  # fmt: skip
    ratio = statistics.median(seconds["datasets"]) / statistics.median(seconds["torchstone"])
    print(json.dumps({"torchstone_over_datasets": ratio}))


def ours(folder: Path, place: Path, options: argparse.Namespace) -> Any:
    from torchstone.data.cache import BuildSettings, find_source, open_cache
    from torchstone.data.tokenize import load_tokenizer
    from torchstone.observe.console import Console

    source = find_source(str(folder / "rows.jsonl"))
    recipe = load_tokenizer(folder / "tokenizer").recipe(source.shape, None, "")
    cache = open_cache(source, recipe, BuildSettings(place, options.processes), Console("quiet"))
    return lambda: np.array(cache.ids)


def theirs(folder: Path, place: Path, options: argparse.Namespace) -> Any:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    end = tokenizer.eos_token_id

    def encode_texts(batch: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*ids, end] for ids in found]}

    def encode_chats(batch: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [tokenizer.apply_chat_template(m, return_dict=False) for m in batch["messages"]]}

    table = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(place))
    encode = encode_texts if options.shape == "text" else encode_chats
    table = table.map(encode, batched=True, num_proc=options.processes, remove_columns=table.column_names,
                      load_from_cache_file=False)  # fmt: skip
    return lambda: np.concatenate(table.with_format("numpy")["input_ids"])


if __name__ == "__main__":
    main()
