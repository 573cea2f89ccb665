"""From rows to micro-batches: what is trained is what was meant, and every token is counted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from caches import build_cache
from tiny import write_rows
from torchstone.config import load_config
from torchstone.config.schema import TrainingConfig
from torchstone.data.batch_sizes import BatchSizes, resolve_batch_sizes
from torchstone.data.collate import BatchShapes, collate
from torchstone.data.encode import TokenSequence
from torchstone.data.formats import IGNORE_INDEX
from torchstone.data.loader import load_data
from torchstone.data.samples import StreamSamples
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import UsageError
from torchstone.observe.console import Console


class TestTokenizer:
    def test_truncation_saved_with_a_tokenizer_is_ignored(
        self, tokenizer_dir: Path, tokenizer: Tokenizer, text_file: Path, tmp_path: Path
    ) -> None:
        """Somebody tokenized with truncation and padding, then saved the tokenizer."""
        hf = load_tokenizer(tokenizer_dir).hf
        hf(["some text", "some more text that is longer"], truncation=True, max_length=4, padding=True)
        hf.save_pretrained(tmp_path / "saved")
        assert '"max_length": 4' in (tmp_path / "saved/tokenizer.json").read_text()
        saved = build_cache(text_file, load_tokenizer(tmp_path / "saved"), cache_dir=tmp_path / "a")
        expected = build_cache(text_file, tokenizer, cache_dir=tmp_path / "b")
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
            build_cache(text_file, load_tokenizer(tmp_path / "huge"), cache_dir=tmp_path)

    def test_large_vocabularies_keep_every_bit_of_an_id(self, tokenizer_dir: Path, tmp_path: Path) -> None:
        large = load_tokenizer(tokenizer_dir)
        large.size = 70_000
        path = write_rows(tmp_path / "large.jsonl", [{"input_ids": [3, 69_999]}])
        assert build_cache(path, large).sequence(0).ids.tolist() == [3, 69_999]

    def test_text_gets_the_tokenizers_bos_once_and_eos(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        from tokenizers.processors import TemplateProcessing

        path = write_rows(tmp_path / "a.jsonl", [{"text": "Hello."}])
        plain = build_cache(path, tokenizer).sequence(0).ids.tolist()
        assert plain == [*tokenizer.encode("Hello."), tokenizer.eos_id]
        tokenizer.save(tmp_path / "with-bos")
        hf = load_tokenizer(tmp_path / "with-bos").hf
        bos = hf.convert_tokens_to_ids("<|user|>")
        hf.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", bos)]
        )
        ids = build_cache(path, Tokenizer(hf, "with bos")).sequence(0).ids.tolist()
        assert ids == [bos, *plain]

    def test_an_answer_stops_at_eos_or_the_end_of_its_turn(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.hf.convert_ids_to_tokens(tokenizer.stop_ids) == ["<|endoftext|>", "<|end|>"]

    def test_conversations_need_no_eos(self, tokenizer_dir: Path, chat_file: Path, tmp_path: Path) -> None:
        hf = load_tokenizer(tokenizer_dir).hf
        hf.eos_token = hf.pad_token = None
        without_eos = Tokenizer(hf, "without eos")
        assert without_eos.pad_id == 0
        assert hf.convert_ids_to_tokens(without_eos.stop_ids) == ["<|end|>"]
        assert len(build_cache(chat_file, without_eos, cache_dir=tmp_path)) == 30
        with pytest.raises(UsageError, match="without eos: the tokenizer has no eos_token"):
            build_cache(write_rows(tmp_path / "t.jsonl", [{"text": "a"}]), without_eos)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_damaged_tokenizer_is_a_usage_error(self, tokenizer_dir: Path, tmp_path: Path, name: str) -> None:
        shutil.copytree(tokenizer_dir, tmp_path / "damaged")
        (tmp_path / "damaged" / name).write_text("[]")
        with pytest.raises(UsageError, match="damaged: Transformers cannot read the tokenizer"):
            load_tokenizer(tmp_path / "damaged")


class TestCounts:
    def test_long_rows_are_counted_and_named(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "long.jsonl", [{"input_ids": list(range(n))} for n in (3, 50, 8, 9)])
        dropped = build_cache(path, tokenizer, max_length=8)
        assert (len(dropped), dropped.counts.dropped_long) == (2, 2)
        assert dropped.counts.examples == [f"{path}:2 (50 tokens)", f"{path}:4 (9 tokens)"]
        cut = build_cache(path, tokenizer, max_length=8, on_long_row="truncate")
        assert (cut.lengths.tolist(), cut.counts.truncated_long) == ([3, 8, 8, 8], 2)
        assert cut.sequence(1).ids.tolist() == list(range(8))

    def test_a_row_without_a_trained_token_after_cutting_is_dropped(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [{"input_ids": [1, 2]}, {"input_ids": [1] * 9, "labels": [-100] * 8 + [1]}]
        path = write_rows(tmp_path / "masked.jsonl", rows)
        counts = build_cache(path, tokenizer, max_length=8, on_long_row="truncate").counts
        assert (counts.dropped_untrained, counts.truncated_long, counts.dropped) == (1, 0, 1)

    def test_a_stream_neither_loses_nor_repeats_a_token(
        self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path
    ) -> None:
        cache = build_cache(text_file, tokenizer, cache_dir=tmp_path)
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
        data = load_data(config, tokenizer, [str(path)], {}, Console("quiet"))
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
        assert all(tensor.shape == (1, 8) and tensor.dtype == torch.int64 for tensor in batch.tensors)

    def test_counts_are_those_of_the_tensors(self) -> None:
        a = TokenSequence(np.array([5, 6, 7]), np.array([5, -100, 7]))
        b = TokenSequence(np.array([8, 9]), np.array([8, 9]))
        batch = collate([[a, b], [b]], pad_id=1)
        # Two documents and padding, a document and padding.
        assert batch.counts == (3, 5, 6)
        assert batch._replace(counts=None).get_counts() == batch.to(torch.device("cpu")).counts == batch.counts


class TestShapesOnAGPU:
    @pytest.mark.parametrize(("multiple", "limit"), [(8, 65536), (8, 40_001), (64, 50_000), (192, 50_000)])
    def test_few_lengths_with_little_padding_within_the_limit(self, multiple: int, limit: int) -> None:
        shapes = BatchShapes(multiple, limit)
        lengths = {longest: shapes.pad_length(longest) for longest in range(1, limit + 1, 7)}
        for longest, length in lengths.items():
            assert longest <= length < limit + multiple
            assert length % multiple == 0
            if multiple == 8 and length < limit:
                # FP8 needs this.
                assert length % 16 == 0
                assert length - longest < max(16, longest / 63)
        assert len({length for longest, length in lengths.items() if 16384 <= longest < 32768}) <= 65
        assert shapes.pad_length(0) == shapes.pad_length(1)

    def test_padding_of_packed_conversations_with_long_tailed_lengths(self) -> None:
        """Steps of 54 conversations with a mean of about 600 tokens, in micro-batches of at most 32768 tokens."""
        rng, shapes, tokens, padding = np.random.default_rng(0), BatchShapes(max_length=32768), 0, 0
        for _ in range(100):
            lengths = np.minimum(8192, np.maximum(2, rng.lognormal(6.0, 0.9, 54).astype(np.int64)))
            for (rows,) in BatchSizes(54, None, 32768).assign_micro_steps(np.arange(54), lengths):
                size = int(lengths[rows[0]].sum())
                length = shapes.pad_length(size)
                assert length <= 32768
                tokens, padding = tokens + size, padding + length - size
        assert padding / tokens < 0.01

    def test_the_longest_document_may_be_padding(self) -> None:
        shapes = BatchShapes(max_length=65536)
        assert shapes.longest_document(4096) == 4096
        padded = [shapes.pad_length(longest) - longest for longest in range(32768, 65537)]
        assert max(padded) <= shapes.longest_document(100) == 1024
        assert BatchShapes().longest_document(100) == 104

    @pytest.mark.parametrize(
        ("total", "rows", "dp", "counts"),
        [(8, 4, 1, (4,)), (9, 8, 1, (1, 8)), (4, 8, 1, (4,)), (10, 4, 2, (1, 4)), (13, 4, 2, (3, 4)), (3, 4, 8, (1,))],
    )
    def test_the_numbers_of_rows_are_those_of_a_complete_step(
        self, total: int, rows: int, dp: int, counts: tuple[int, ...]
    ) -> None:
        sizes = BatchSizes(total, rows, None)
        assert sizes.row_counts(dp) == counts
        shapes = BatchShapes(row_counts=counts)
        micro_steps = sizes.assign_micro_steps(np.arange(total), np.full(total, 5), dp)
        # Every rank has as many rows as the others.
        assert [{shapes.pad_rows(max(1, len(rank))) for rank in ranks} for ranks in micro_steps] == [
            {max(len(rank) for rank in ranks)} for ranks in micro_steps
        ]
        assert {shapes.pad_rows(n) for n in range(1, max(counts) + 1)} == set(counts)

    def test_lengths_are_padded_to_buckets(self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path) -> None:
        """Text has rows of one length, also the last one. Without packing, lengths differ, but not numbers of rows."""
        overrides = {
            "model.depth": 1, "model.tokenizer": "-", "data.path": [str(text_file)], "data.context_length": 60,
            "data.cache_dir": str(tmp_path), "training.batch_size": 4, "training.global_batch_size": 8,
        }  # fmt: skip
        shapes = {}
        for packing in (True, False):
            config = load_config(overrides=overrides | {"data.packing": packing})
            on_cpu, on_gpu = (
                load_data(config, tokenizer, [str(text_file)], {}, Console("quiet"), pad_to_buckets=pad)
                for pad in (False, True)
            )
            assert on_gpu.shapes.has_fixed_length == packing
            last = len(on_gpu.train) - len(on_gpu.train) % 8 - 7
            batches = [list(data.batches(config, 0, last)) for data in (on_cpu, on_gpu)]
            shapes[packing] = {tuple(m.ids.shape) for batch in batches[1] for m in batch.micro_batches}
            for one, other in zip(*batches, strict=True):
                assert (one.tokens, one.loss_tokens) == (other.tokens, other.loss_tokens)
                assert other.padding == sum(m.ids.numel() for m in other.micro_batches) - other.tokens
                assert other.padding >= one.padding
        assert shapes[True] == {(4, 64)}
        assert {rows for rows, _ in shapes[False]} == {4}
        assert {length for _, length in shapes[False]} <= {16, 32, 48, 64}
