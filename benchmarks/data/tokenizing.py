"""Compare tokenizing a JSONL file with `datasets.map`: the same tokenizer and number of processes, in turn.

    python benchmarks/data/tokenizing.py [--megabytes 40] [--processes 2] [--rounds 3] [--shape text] [--text FILE]

From the file on disk to tokens on disk, without any cache. datasets maps the file in batches of 1000 with the
Transformers tokenizer and keeps only ids (for conversations: apply_chat_template without a mask; Torchstone computes
the mask as well). The ids must be the same. Prints one JSON line each, then the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rows import Prose, chats, texts, write

ReadIds = Callable[[], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=("text", "messages"), default="text")
    parser.add_argument("--text", type=Path, default=None, help="cut the documents out of this file")
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
    arms = {"torchstone": tokenize_with_torchstone, "datasets": tokenize_with_datasets}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    ids: dict[str, np.ndarray] = {}
    for number in range(options.rounds):
        for name, arm in arms.items():
            cache_dir = folder / f"{name}-{number}"
            started = time.perf_counter()
            read_ids = arm(folder, cache_dir, options)
            seconds[name].append(time.perf_counter() - started)
            ids[name] = read_ids()
            shutil.rmtree(cache_dir, ignore_errors=True)
    assert np.array_equal(ids["torchstone"], ids["datasets"]), "the ids differ"
    for name, values in seconds.items():
        median = statistics.median(values)
        print(json.dumps({"arm": name, "shape": options.shape, "megabytes": size / 1e6, "processes": options.processes,
                          "s": median, "all_s": values, "megabytes_per_s": size / 1e6 / median,
                          "tokens_per_s": len(ids[name]) / median}))  # fmt: skip
    ratio = statistics.median(seconds["datasets"]) / statistics.median(seconds["torchstone"])
    print(json.dumps({"torchstone_over_datasets": ratio}))


def tokenize_with_torchstone(folder: Path, cache_dir: Path, options: argparse.Namespace) -> ReadIds:
    from torchstone.data.cache import CacheOptions, open_cache, open_source
    from torchstone.data.tokenize import load_tokenizer
    from torchstone.observe.console import Console

    source = open_source(str(folder / "rows.jsonl"))
    encoding = load_tokenizer(folder / "tokenizer").encoding_config(source.row_format, None, "")
    cache = open_cache(source, encoding, CacheOptions(cache_dir, options.processes), Console("quiet"))
    return lambda: np.array(cache.ids)


def tokenize_with_datasets(folder: Path, cache_dir: Path, options: argparse.Namespace) -> ReadIds:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))

    def encode_texts(batch: dict[str, Any]) -> dict[str, Any]:
        rows = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in rows]}

    def encode_chats(batch: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [tokenizer.apply_chat_template(m, return_dict=False) for m in batch["messages"]]}

    table = datasets.load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(cache_dir)
    )
    encode = encode_texts if options.shape == "text" else encode_chats
    table = table.map(encode, batched=True, num_proc=options.processes, remove_columns=table.column_names,
                      load_from_cache_file=False)  # fmt: skip
    return lambda: np.concatenate(table.with_format("numpy")["input_ids"])


if __name__ == "__main__":
    main()
