"""From rows to micro-batches: what is trained is what was meant, and every token is counted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import write_rows
from torchstone.config import load_config
from torchstone.config.schema import TrainingConfig
from torchstone.data.batch_sizes import BatchSizes, resolve_batch_sizes
from torchstone.data.cache import CacheOptions, TokenCache, open_cache, open_source
from torchstone.data.collate import collate
from torchstone.data.encode import TokenSequence
from torchstone.data.formats import IGNORE_INDEX
from torchstone.data.loader import load_data
from torchstone.data.samples import StreamSamples
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import UsageError
from torchstone.observe.console import Console


def build_cache(
    path: Path, tokenizer: Tokenizer, tmp_path: Path, max_length: int | None = 64, on_long_row: str = "drop"
) -> TokenCache:
    source = open_source(str(path))
    encoding = tokenizer.encoding_config(source.row_format, max_length, on_long_row)
    return open_cache(source, encoding, CacheOptions(tmp_path / "cache", num_processes=0), Console("quiet"))


class TestTokenizer:
    def test_truncation_saved_with_a_tokenizer_is_ignored(
        self, tokenizer_dir: Path, tokenizer: Tokenizer, text_file: Path, tmp_path: Path
    ) -> None:
        """Somebody tokenized with truncation and padding, then saved the tokenizer."""
        hf = load_tokenizer(tokenizer_dir).hf
        hf(["some text", "some more text that is longer"], truncation=True, max_length=4, padding=True)
        hf.save_pretrained(tmp_path / "saved")
        assert '"max_length": 4' in (tmp_path / "saved/tokenizer.json").read_text()
        saved = build_cache(text_file, load_tokenizer(tmp_path / "saved"), tmp_path / "a", max_length=None)
        expected = build_cache(text_file, tokenizer, tmp_path / "b", max_length=None)
        assert saved.ids.tolist() == expected.ids.tolist()
        assert saved.key == expected.key

    def test_a_huge_id_is_refused_before_anything_is_allocated(
        self, tokenizer_dir: Path, text_file: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(tokenizer_dir, tmp_path / "huge")
        settings = json.loads((tmp_path / "huge/tokenizer.json").read_text())
        settings["model"]["vocab"]["<|huge|>"] = 4_000_000_000
        (tmp_path / "huge/tokenizer.json").write_text(json.dumps(settings))
        with pytest.raises(UsageError, match=r"the token '<\|huge\|>' has the id 4000000000, but ids must be below"):
            build_cache(text_file, load_tokenizer(tmp_path / "huge"), tmp_path)

    def test_large_vocabularies_keep_every_bit_of_an_id(self, tokenizer_dir: Path, tmp_path: Path) -> None:
        large = load_tokenizer(tokenizer_dir)
        large.size = 70_000
        path = write_rows(tmp_path / "large.jsonl", [{"input_ids": [3, 69_999]}])
        assert build_cache(path, large, tmp_path).sequence(0).ids.tolist() == [3, 69_999]

    def test_text_gets_the_tokenizers_bos_once_and_eos(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        from tokenizers.processors import TemplateProcessing

        path = write_rows(tmp_path / "a.jsonl", [{"text": "Hello."}])
        plain = build_cache(path, tokenizer, tmp_path, max_length=None).sequence(0).ids.tolist()
        assert plain == [*tokenizer.encode("Hello."), tokenizer.eos_id]
        tokenizer.save(tmp_path / "with-bos")
        hf = load_tokenizer(tmp_path / "with-bos").hf
        bos = hf.convert_tokens_to_ids("<|user|>")
        hf.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", bos)]
        )
        ids = build_cache(path, Tokenizer(hf, "with bos"), tmp_path, max_length=None).sequence(0).ids.tolist()
        assert ids == [bos, *plain]

    def test_an_answer_stops_at_eos_or_the_end_of_its_turn(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.hf.convert_ids_to_tokens(tokenizer.stop_ids) == ["<|endoftext|>", "<|end|>"]

    def test_conversations_need_no_eos(self, tokenizer_dir: Path, chat_file: Path, tmp_path: Path) -> None:
        hf = load_tokenizer(tokenizer_dir).hf
        hf.eos_token = hf.pad_token = None
        without_eos = Tokenizer(hf, "without eos")
        assert without_eos.pad_id == 0
        assert hf.convert_ids_to_tokens(without_eos.stop_ids) == ["<|end|>"]
        assert len(build_cache(chat_file, without_eos, tmp_path)) == 30
        with pytest.raises(UsageError, match="without eos: the tokenizer has no eos_token"):
            build_cache(write_rows(tmp_path / "t.jsonl", [{"text": "a"}]), without_eos, tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_damaged_tokenizer_is_a_usage_error(self, tokenizer_dir: Path, tmp_path: Path, name: str) -> None:
        shutil.copytree(tokenizer_dir, tmp_path / "damaged")
        (tmp_path / "damaged" / name).write_text("[]")
        with pytest.raises(UsageError, match="damaged: Transformers cannot read the tokenizer"):
            load_tokenizer(tmp_path / "damaged")


class TestCounts:
    def test_long_rows_are_counted_and_named(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "long.jsonl", [{"input_ids": list(range(n))} for n in (3, 50, 8, 9)])
        dropped = build_cache(path, tokenizer, tmp_path, max_length=8)
        assert (len(dropped), dropped.counts.dropped_long) == (2, 2)
        assert dropped.counts.examples == [f"{path}:2 (50 tokens)", f"{path}:4 (9 tokens)"]
        cut = build_cache(path, tokenizer, tmp_path, max_length=8, on_long_row="truncate")
        assert (cut.lengths.tolist(), cut.counts.truncated_long) == ([3, 8, 8, 8], 2)
        assert cut.sequence(1).ids.tolist() == list(range(8))

    def test_a_row_without_a_trained_token_after_cutting_is_dropped(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [{"input_ids": [1, 2]}, {"input_ids": [1] * 9, "labels": [-100] * 8 + [1]}]
        path = write_rows(tmp_path / "masked.jsonl", rows)
        counts = build_cache(path, tokenizer, tmp_path, max_length=8, on_long_row="truncate").counts
        assert (counts.dropped_untrained, counts.truncated_long, counts.dropped) == (1, 0, 1)

    def test_a_stream_neither_loses_nor_repeats_a_token(
        self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path
    ) -> None:
        cache = build_cache(text_file, tokenizer, tmp_path, max_length=None)
        samples = StreamSamples(cache, np.arange(len(cache)), 50)
        ids = [i for n in range(len(samples)) for sequence in samples.get(n) for i in sequence.ids.tolist()]
        assert ids == cache.ids.tolist()
        assert samples.lengths.tolist()[:-1] == [50] * (len(samples) - 1)

    @pytest.mark.parametrize("packing", [True, False])
    @pytest.mark.parametrize("row_format", ["text", "messages", "tokens"])
    def test_planned_counts_are_those_of_the_tensors(
        self, tokenizer: Tokenizer, text_file: Path, chat_file: Path, tmp_path: Path, row_format: str, packing: bool
    ) -> None:
        rng = np.random.default_rng(0)
        rows = [{"input_ids": ids, "labels": [i if rng.random() < 0.5 else -100 for i in ids]} for ids in
                (rng.integers(0, 400, int(rng.integers(1, 30))).tolist() for _ in range(20))]  # fmt: skip
        tokens_file = write_rows(tmp_path / "tokens.jsonl", rows)
        path = {"text": text_file, "messages": chat_file, "tokens": tokens_file}[row_format]
        config = load_config(
            overrides={
                "model.depth": 1, "model.tokenizer": "-", "data.path": str(path), "data.packing": packing,
                "data.context_length": 48, "data.cache_dir": str(tmp_path), "training.global_batch_size": 5,
            }
        )  # fmt: skip
        data = load_data(config, tokenizer, [str(path)], None, Console("quiet"))
        if not (row_format == "text" and packing):
            assert data.train.lengths.max() <= 48
            assert data.counts.trained_tokens == data.train.loss_tokens.sum()
        batches = list(data.batches(config, 0, len(data.train)))
        assert sum(batch.samples for batch in batches) == len(data.train)
        for batch in batches:
            assert batch.loss_tokens == sum(int((m.labels != IGNORE_INDEX).sum()) for m in batch.micro_batches)
            assert batch.tokens == sum(int((m.doc_ids >= 0).sum()) for m in batch.micro_batches)
            assert batch.padding == sum(m.ids.numel() for m in batch.micro_batches) - batch.tokens


class TestBatchSizes:
    @pytest.mark.parametrize(
        ("options", "packed", "default_rows", "expected"),
        [
            ({}, False, 8, BatchSizes(8, 8, None)),
            ({}, False, 4, BatchSizes(4, 4, None)),
            ({}, True, 4, BatchSizes(4, None, 128)),
            ({"global_batch_size": 10, "batch_size": 4}, False, 8, BatchSizes(10, 4, None)),
            ({"global_batch_size": 3}, False, 8, BatchSizes(3, 3, None)),
            ({"batch_size": 4, "grad_accum_steps": 3}, False, 8, BatchSizes(12, 4, None)),
            ({"global_batch_size": 10, "grad_accum_steps": 3}, False, 8, BatchSizes(10, 4, None)),
            ({"max_tokens_per_gpu": 512}, False, 8, BatchSizes(4, 4, None)),
            ({"max_tokens_per_gpu": 512, "global_batch_size": 64}, True, 4, BatchSizes(64, None, 512)),
        ],
    )
    def test_sizes_that_are_not_set_follow(
        self, options: dict[str, int], packed: bool, default_rows: int, expected: BatchSizes
    ) -> None:
        assert resolve_batch_sizes(TrainingConfig(**options), packed, 128, default_rows) == expected

    @pytest.mark.parametrize(
        ("options", "packed", "dp", "expected"),
        [
            ({}, False, 1, BatchSizes(32, 4, None)),
            ({}, False, 16, BatchSizes(32, 2, None)),
            ({}, False, 64, BatchSizes(64, 1, None)),
            ({}, True, 1, BatchSizes(32, None, 128)),
            ({}, True, 64, BatchSizes(64, None, 128)),
            ({"global_batch_size": 8}, True, 1, BatchSizes(8, None, 128)),
            ({"batch_size": 4}, False, 2, BatchSizes(8, 4, None)),
            ({"grad_accum_steps": 3}, False, 1, BatchSizes(12, 4, None)),
        ],
    )
    def test_a_default_for_samples_per_step_applies_if_no_size_is_set(
        self, options: dict[str, int], packed: bool, dp: int, expected: BatchSizes
    ) -> None:
        assert resolve_batch_sizes(TrainingConfig(**options), packed, 128, 4, dp, default_total=32) == expected

    @pytest.mark.parametrize(
        ("options", "packed", "reason"),
        [
            ({"global_batch_size": 10, "batch_size": 4, "grad_accum_steps": 3}, False, "global_batch_size 12"),
            ({"batch_size": 4, "max_tokens_per_gpu": 512}, False, "both limit a micro-batch"),
            ({"max_tokens_per_gpu": 100}, False, "less than one row"),
            ({"global_batch_size": 10, "grad_accum_steps": 8}, False, "does not split into 8 micro-steps"),
            ({"max_tokens_per_gpu": 100}, True, "the longest row must fit"),
            ({"batch_size": 4}, True, "batch_size does not apply to packed conversations"),
            ({"grad_accum_steps": 4}, True, "grad_accum_steps does not apply to packed conversations"),
        ],
    )  # fmt: skip
    def test_contradicting_sizes_are_refused(self, options: dict[str, int], packed: bool, reason: str) -> None:
        with pytest.raises(UsageError, match=reason):
            resolve_batch_sizes(TrainingConfig(**options), packed, 128, 8)

    def test_a_global_batch_that_does_not_divide_is_split_unevenly(self) -> None:
        sizes, samples, lengths = BatchSizes(10, 4, None), np.arange(10), np.full(10, 5)
        assert [[len(rows) for rows in ranks] for ranks in sizes.assign_micro_steps(samples, lengths)] == [
            [4],
            [4],
            [2],
        ]
        assert sizes.assign_micro_steps(samples, lengths, dp=2) == [
            [[[0], [1], [2], [3]], [[4], [5], [6], [7]]],
            [[[8]], [[9]]],
        ]


class TestCollate:
    def test_labels_are_shifted_once_and_stay_in_their_sequence(self) -> None:
        a = TokenSequence(np.array([5, 6, 7]), np.array([5, -100, 7]))
        b = TokenSequence(np.array([8, 9]), np.array([8, 9]))
        batch = collate([[a, b]], pad_id=1)
        assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
        assert batch.labels.tolist() == [[-100, 7, -100, 9, -100, -100, -100, -100]]
        assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
        assert batch.doc_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
        assert all(tensor.shape == (1, 8) and tensor.dtype == torch.int64 for tensor in batch)
