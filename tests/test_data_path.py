"""From rows to micro-batches: what is trained is what was meant, and every token is accounted for."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import shutil
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch

import processes
from tiny import write_rows
from torchstone.atomic import locked
from torchstone.config import load_config
from torchstone.config.schema import TrainingConfig
from torchstone.data.cache import BuildSettings, TokenCache, find_source, open_cache
from torchstone.data.collate import collate
from torchstone.data.encode import Encoded, Encoder
from torchstone.data.formats import IGNORED
from torchstone.data.loader import load_data
from torchstone.data.packing import Batching, batching
from torchstone.data.sampler import InfiniteSampler
from torchstone.data.samples import StreamRows, split
from torchstone.data.template import ChatTemplate
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import DataError, UsageError
from torchstone.observe.console import Console


def opened(
    path: Path, tokenizer: Tokenizer, tmp_path: Path, limit: int | None = 64, on_long: str = "drop"
) -> TokenCache:
    source = find_source(str(path))
    recipe = tokenizer.recipe(source.shape, limit, on_long)
    return open_cache(source, recipe, BuildSettings(tmp_path / "cache", workers=0), Console("quiet"))


def build_at_once(path: Path, tokenizer_dir: Path, folder: Path, start: Barrier) -> None:
    """Opens the cache the moment all are ready, and notes whether this process was the one to build it."""
    tokenizer = load_tokenizer(tokenizer_dir)
    console = Console("quiet")
    start.wait()

    def say(text: str) -> None:
        if text.startswith("tokenizing"):
            with (folder / "built").open("a") as file:
                file.write("built\n")

    console.say = say  # type: ignore[method-assign]
    source = find_source(str(path))
    cache = open_cache(source, tokenizer.recipe("text", None, ""), BuildSettings(folder / "shared"), console)
    assert cache.ids.size > 1000


class TestRowsRefused:
    @pytest.mark.parametrize(
        ("rows", "reason"),
        [
            ([{"text": ""}], "text is empty"),
            ([{"text": 3}], "text is not a string"),
            ([{"text": None}], "text is not a string"),
            ([{"text": "a \ud800 b"}], "half of a surrogate pair at character 2"),
            ([{"messages": [{"role": "assistant", "content": "\ud800"}]}], "half of a surrogate pair"),
            ([{"input_ids": [1, 2], "len": "2"}], "len says '2'"),
            ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids and 1 labels"),
            ([{"input_ids": [1, 999]}], "id 999 is outside the vocabulary"),
            ([{"input_ids": [1, 2], "len": 3}], "len says 3"),
            ([{"text": "a"}, {"messages": [{"role": "assistant", "content": "a"}]}], "this one has no text"),
            ([], "no rows"),
        ],
    )
    def test_a_row_that_cannot_be_trained_on_stops_with_the_reason(
        self, tmp_path: Path, tokenizer: Tokenizer, rows: list, reason: str
    ) -> None:
        path = write_rows(tmp_path / "rows.jsonl", rows)
        with pytest.raises(DataError, match=reason):
            opened(path, tokenizer, tmp_path)


class TestTemplate:
    def test_only_the_answers_and_their_ends_are_trained(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "First letter of KATO?"},
            {"role": "assistant", "content": "K"},
            {"role": "user", "content": "And the last?"},
            {"role": "assistant", "content": "O it is"},
        ]
        cache = opened(write_rows(tmp_path / "a.jsonl", [{"messages": messages}]), tokenizer, tmp_path)
        sequence = cache.sequence(0)
        trained = sequence.ids[sequence.labels != IGNORED].tolist()
        assert tokenizer.hf.decode(trained) == "K<|end|>O it is<|end|>"
        theirs = tokenizer.hf.apply_chat_template(messages, tokenize=True).input_ids
        assert sequence.ids.tolist() == theirs

    def test_the_prompt_is_transformers_own(self, tokenizer: Tokenizer) -> None:
        messages = [{"role": "user", "content": "Hello."}]
        theirs = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.template.prompt(messages) == theirs

    def test_a_template_that_rewrites_the_past_is_refused(self) -> None:
        template = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", {})
        with pytest.raises(
            DataError, match="renders what stands before message 1 differently once that message follows"
        ):
            template.conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])

    def test_generation_marks_and_loop_controls_are_understood(self) -> None:
        source = (
            "{% for m in messages %}{% if m['role'] == 'tool' %}{% continue %}{% endif %}[{{ m['role'] }}]"
            "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }};{% endgeneration %}"
            "{% else %}{{ m['content'] }};{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rendered = ChatTemplate(source, {}).conversation(messages)
        assert rendered.text == "[user]a;[assistant]b;"
        assert [rendered.text[start:end] for start, end in rendered.trained] == ["b;"]

    def test_a_template_cannot_reach_python(self) -> None:
        template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
        with pytest.raises(DataError, match="refused"):
            template.prompt([{"role": "user", "content": "a"}])

    def test_a_template_sees_what_transformers_gives_it(self, tokenizer: Tokenizer) -> None:
        source = (
            "{% if tools is not none %}TOOLS{% endif %}{{ messages | tojson(ensure_ascii=true) }}"
            "{{ messages[0]['content'] is string }}"
        )
        messages = [{"role": "user", "content": "ä"}]
        theirs = tokenizer.hf.apply_chat_template(messages, chat_template=source, tokenize=False)
        assert ChatTemplate(source, {}).prompt(messages) == theirs

    def test_rendering_equals_transformers_line_by_line(self, tokenizer: Tokenizer) -> None:
        """Blocks on lines of their own leave no blank lines, and special tokens have their names."""
        source = (
            "{{ eos_token }}\n{% for m in messages %}\n  {% if m['role'] == 'user' %}\n[{{ m['content'] }}]\n"
            "  {% else %}\n<{{ m['content'] | tojson }}>{{ pad_token }}\n  {% endif %}\n{% endfor %}\n"
        )
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<ü>"}]
        theirs = tokenizer.hf.apply_chat_template(messages, chat_template=source, tokenize=False)
        assert ChatTemplate(source, tokenizer.hf.special_tokens_map).conversation(messages).text == theirs

    def test_a_turn_that_changes_once_more_follow_is_refused(self) -> None:
        source = "{% for m in messages %}{{ m['content'] }}{% if loop.last %}!{% endif %}{% endfor %}"
        turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
        with pytest.raises(DataError, match="renders message 1 differently once more follows"):
            ChatTemplate(source, {}).conversation([{"role": role, "content": text} for role, text in turns])

    def test_a_token_across_the_seam_is_trained_and_counted(self, tokenizer: Tokenizer) -> None:
        encoder = Encoder(tokenizer.recipe("messages", None, "drop"))
        offsets = np.array([[0, 3], [3, 6], [6, 9], [9, 12]])
        assert encoder._trained(offsets, [(5, 9)]).tolist() == [False, True, True, False]
        assert encoder.counts.straddling_tokens == 1

    def test_whatever_a_template_raises_is_about_the_row(self) -> None:
        with pytest.raises(DataError, match="refused a conversation"):
            ChatTemplate("{{ messages[0] + 1 }}", {}).prompt([{"role": "user", "content": "a"}])

    def test_a_date_in_a_template_stands_still(self) -> None:
        assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).prompt([]) == "01 Jan 2025"

    def test_the_end_of_a_turn_stops_an_answer(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.hf.convert_ids_to_tokens(tokenizer.stop_ids) == ["<|endoftext|>", "<|end|>"]


class TestCache:
    def test_it_is_built_once_and_read_again(self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path) -> None:
        first = opened(text_file, tokenizer, tmp_path)
        stamp = (first.folder / "ids.bin").stat().st_mtime_ns
        again = opened(text_file, tokenizer, tmp_path)
        assert again.folder == first.folder
        assert (again.folder / "ids.bin").stat().st_mtime_ns == stamp

    def test_settings_saved_with_a_tokenizer_do_not_cut_the_data(
        self, tokenizer_dir: Path, tokenizer: Tokenizer, text_file: Path, tmp_path: Path
    ) -> None:
        """Somebody tokenized with truncation and padding, then saved the tokenizer."""
        hf = load_tokenizer(tokenizer_dir).hf
        hf(["some text", "some more text that is longer"], truncation=True, max_length=4, padding=True)
        hf.save_pretrained(tmp_path / "marked")
        assert '"max_length": 4' in (tmp_path / "marked/tokenizer.json").read_text()
        marked = opened(text_file, load_tokenizer(tmp_path / "marked"), tmp_path / "a", limit=None)
        plain = opened(text_file, tokenizer, tmp_path / "b", limit=None)
        assert marked.ids.tolist() == plain.ids.tolist()
        assert marked.key == plain.key

    def test_several_processes_build_one_cache(self, tokenizer_dir: Path, text_file: Path, tmp_path: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(processes.PRELOADED)
        start = context.Barrier(8)
        workers = [
            context.Process(target=build_at_once, args=(text_file, tokenizer_dir, tmp_path, start)) for _ in range(8)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(180)
        assert [worker.exitcode for worker in workers] == [0] * 8
        assert (tmp_path / "built").read_text() == "built\n"

    def test_what_a_failed_build_leaves_is_gone_with_the_next_one(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": 3}])
        with pytest.raises(DataError):
            opened(path, tokenizer, tmp_path)
        (partial,) = (tmp_path / "cache").glob(".*.partial")
        # Not while another process is at it.
        with locked(tmp_path / "cache" / f"{partial.name[1:33]}.lock"):
            opened(write_rows(path, [{"text": "fine"}, {"text": "other"}]), tokenizer, tmp_path)
            assert partial.is_dir()
        opened(write_rows(path, [{"text": "fine"}, {"text": "fine"}]), tokenizer, tmp_path)
        assert not partial.exists()

    def test_a_damaged_cache_is_built_again(self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path) -> None:
        first = opened(text_file, tokenizer, tmp_path)
        whole = first.ids.tolist()
        for name, damage in (
            ("ids.bin", lambda content: content[:-10]),
            ("ids.bin", lambda content: b"\x01" + content[1:]),
            ("offsets.npy", lambda content: b""),
            ("meta.json", lambda content: b"{"),
        ):
            path = first.folder / name
            path.write_bytes(damage(path.read_bytes()))
            assert opened(text_file, tokenizer, tmp_path).ids.tolist() == whole

    def test_whatever_decides_the_tokens_decides_the_key(
        self, tokenizer: Tokenizer, chat_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = {opened(chat_file, tokenizer, tmp_path).key, opened(chat_file, tokenizer, tmp_path, limit=32).key}
        changed = tmp_path / "changed.jsonl"
        changed.write_text(chat_file.read_text().replace("?", "!"))
        keys.add(opened(changed, tokenizer, tmp_path).key)
        template = tokenizer.hf.chat_template
        try:
            tokenizer.hf.chat_template = template.replace("<|end|>", "<|end|>\n")
            keys.add(opened(chat_file, Tokenizer(tokenizer.hf, "edited"), tmp_path).key)
        finally:
            tokenizer.hf.chat_template = template
        from torchstone.data import cache

        monkeypatch.setattr(cache, "CODE_VERSION", cache.CODE_VERSION + 1)
        keys.add(opened(chat_file, tokenizer, tmp_path).key)
        assert len(keys) == 5

    def test_another_tokenizer_has_another_recipe(self, tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
        recipes = [tokenizer.recipe("messages", 64, "drop")]
        for change in (
            lambda hf: hf.add_tokens(["KATO"]),
            lambda hf: setattr(hf, "eos_token", "<|end|>"),
        ):
            hf = load_tokenizer(tokenizer_dir).hf
            change(hf)
            recipes.append(Tokenizer(hf, "changed").recipe("messages", 64, "drop"))
        assert all(a != b for a, b in itertools.combinations(recipes, 2))

    def test_large_vocabularies_keep_every_bit_of_an_id(self, tokenizer_dir: Path, tmp_path: Path) -> None:
        large = load_tokenizer(tokenizer_dir)
        large.size = 70_000
        path = write_rows(tmp_path / "large.jsonl", [{"input_ids": [3, 69_999]}])
        assert opened(path, large, tmp_path).sequence(0).ids.tolist() == [3, 69_999]

    def test_text_ends_with_the_end_of_text(self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path) -> None:
        cache = opened(text_file, tokenizer, tmp_path, limit=None)
        first = json.loads(text_file.read_text().splitlines()[0])["text"]
        assert cache.sequence(0).ids.tolist() == [*tokenizer.encode(first), tokenizer.eos_id]

    def test_text_begins_as_the_tokenizer_has_it(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """A tokenizer that puts a beginning of text in front does so once."""
        from tokenizers.processors import TemplateProcessing

        folder = tmp_path / "with-bos"
        tokenizer.save(folder)
        hf = load_tokenizer(folder).hf
        bos = hf.convert_tokens_to_ids("<|user|>")
        hf.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", bos)]
        )
        path = write_rows(tmp_path / "a.jsonl", [{"text": "Hello."}])
        ids = opened(path, Tokenizer(hf, "with bos"), tmp_path, limit=None).sequence(0).ids.tolist()
        assert ids == [bos, *tokenizer.encode("Hello."), tokenizer.eos_id]

    def test_long_rows_are_counted_and_named(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [{"input_ids": [1] * n} for n in (3, 50, 8, 9)]
        path = write_rows(tmp_path / "long.jsonl", rows)
        dropped = opened(path, tokenizer, tmp_path, limit=8)
        assert (len(dropped), dropped.counts.dropped_long) == (2, 2)
        assert dropped.counts.examples == [f"{path}:2 (50 tokens)", f"{path}:4 (9 tokens)"]
        end_only = {"input_ids": [1] * 9, "labels": [-100] * 8 + [1]}
        masked = write_rows(tmp_path / "masked.jsonl", [{"input_ids": [1, 2]}, end_only])
        nothing_left = opened(masked, tokenizer, tmp_path, limit=8, on_long="truncate").counts
        assert (nothing_left.dropped_untrained, nothing_left.truncated_long, nothing_left.dropped) == (1, 0, 1)
        cut = opened(path, tokenizer, tmp_path, limit=8, on_long="truncate")
        assert (cut.lengths.tolist(), cut.counts.truncated_long) == ([3, 8, 8, 8], 2)
        counted = write_rows(tmp_path / "counted.jsonl", [{"input_ids": list(range(20))}])
        assert opened(counted, tokenizer, tmp_path, 8, "truncate").sequence(0).ids.tolist() == list(range(8))


class TestRows:
    def test_no_token_of_the_stream_is_lost_or_repeated(
        self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path
    ) -> None:
        cache = opened(text_file, tokenizer, tmp_path, limit=None)
        rows = StreamRows(cache, np.arange(len(cache)), 50)
        seen = [i for row in range(len(rows)) for piece in rows.get(row) for i in piece.ids.tolist()]
        assert seen == cache.ids.tolist()
        assert rows.lengths.tolist()[:-1] == [50] * (len(rows) - 1)

    def test_held_out_documents_are_not_trained_on(self) -> None:
        train, held_out = split(np.arange(100), 0.1, seed=3)
        assert (len(train), len(held_out)) == (90, 10)
        assert sorted([*train, *held_out]) == list(range(100))
        assert split(np.arange(100), 0.1, seed=4)[1].tolist() != held_out.tolist()
        with pytest.raises(DataError, match="leaves none to train on"):
            split(np.arange(1), 0.5, seed=0)


class TestTokenizer:
    def test_conversations_need_no_end_of_text(self, tokenizer_dir: Path, chat_file: Path, tmp_path: Path) -> None:
        hf = load_tokenizer(tokenizer_dir).hf
        hf.eos_token = hf.pad_token = None
        without = Tokenizer(hf, "without eos")
        assert without.pad_id == 0
        assert hf.convert_ids_to_tokens(without.stop_ids) == ["<|end|>"]
        assert len(opened(chat_file, without, tmp_path)) == 30
        with pytest.raises(UsageError, match="no end-of-text token"):
            opened(write_rows(tmp_path / "t.jsonl", [{"text": "a"}]), without, tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_damaged_tokenizer_is_wrong_usage(self, tokenizer_dir: Path, tmp_path: Path, name: str) -> None:
        shutil.copytree(tokenizer_dir, tmp_path / "damaged")
        (tmp_path / "damaged" / name).write_text("[]")
        with pytest.raises(UsageError, match="no tokenizer that Transformers can read"):
            load_tokenizer(tmp_path / "damaged")


class TestCounts:
    @pytest.mark.parametrize("packing", [True, False])
    @pytest.mark.parametrize("kind", ["text", "chat", "tokens"])
    def test_loss_tokens_known_ahead_are_the_labels_of_the_tensors(
        self, tokenizer: Tokenizer, text_file: Path, chat_file: Path, tmp_path: Path, kind: str, packing: bool
    ) -> None:
        rng = np.random.default_rng(0)
        rows = [{"input_ids": ids, "labels": [i if rng.random() < 0.5 else -100 for i in ids]} for ids in
                (rng.integers(0, 400, int(rng.integers(1, 30))).tolist() for _ in range(20))]  # fmt: skip
        tokens_file = write_rows(tmp_path / "tokens.jsonl", rows)
        path = {"text": text_file, "chat": chat_file, "tokens": tokens_file}[kind]
        config = load_config(
            overrides={
                "model.depth": 1, "model.tokenizer": "-", "data.path": str(path), "data.packing": packing,
                "data.context_length": 48, "data.cache_dir": str(tmp_path), "training.global_batch_size": 5,
            }
        )  # fmt: skip
        data = load_data(config, tokenizer, [str(path)], None, Console("quiet"))
        if not (kind == "text" and packing):
            assert data.train.lengths.max() <= 48
            assert data.counts.trained_tokens == data.train.loss_tokens.sum()
        batches = list(data.batches(config, 0, len(data.train)))
        assert sum(batch.samples for batch in batches) == len(data.train)
        for batch in batches:
            assert batch.loss_tokens == sum(int((m.labels != IGNORED).sum()) for m in batch.micro_batches)
            assert batch.tokens == sum(int((m.doc_ids >= 0).sum()) for m in batch.micro_batches)
            assert batch.padding == sum(m.ids.numel() for m in batch.micro_batches) - batch.tokens


class TestSampler:
    def test_every_epoch_is_a_permutation_and_they_differ(self) -> None:
        drawn = InfiniteSampler(10, seed=0).take(30).reshape(3, 10)
        assert [sorted(epoch) for epoch in drawn.tolist()] == [list(range(10))] * 3
        assert drawn[0].tolist() != drawn[1].tolist()

    @pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 25])
    def test_going_on_from_any_count_gives_the_same_order(self, start: int) -> None:
        whole = InfiniteSampler(10, seed=7).take(60)
        assert InfiniteSampler(10, seed=7, drawn=start).take(60 - start).tolist() == whole[start:].tolist()

    def test_the_seed_decides_the_order(self) -> None:
        assert InfiniteSampler(50, seed=1).take(50).tolist() != InfiniteSampler(50, seed=2).take(50).tolist()

    def test_without_shuffling_the_order_is_the_files(self) -> None:
        assert InfiniteSampler(3, seed=0, shuffle=False).take(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


class TestBatching:
    @pytest.mark.parametrize(
        ("given", "packed", "by_default", "expected"),
        [
            ({}, False, 8, Batching(8, 8, None)),
            ({}, False, 4, Batching(4, 4, None)),
            ({}, True, 4, Batching(4, None, 128)),
            ({"global_batch_size": 10, "batch_size": 4}, False, 8, Batching(10, 4, None)),
            ({"global_batch_size": 3}, False, 8, Batching(3, 3, None)),
            ({"batch_size": 4, "grad_accum_steps": 3}, False, 8, Batching(12, 4, None)),
            ({"global_batch_size": 10, "grad_accum_steps": 3}, False, 8, Batching(10, 4, None)),
            ({"max_tokens_per_gpu": 512}, False, 8, Batching(4, 4, None)),
            ({"max_tokens_per_gpu": 512, "global_batch_size": 64}, True, 4, Batching(64, None, 512)),
        ],
    )
    def test_what_is_not_given_follows(self, given: dict, packed: bool, by_default: int, expected: Batching) -> None:
        assert batching(TrainingConfig(**given), packed, 128, by_default) == expected

    @pytest.mark.parametrize(
        ("given", "shape", "reason"),
        [
            ({"global_batch_size": 10, "batch_size": 4, "grad_accum_steps": 3}, "text", "make it global_batch_size 12"),
            ({"batch_size": 4, "max_tokens_per_gpu": 512}, "text", "both bound a micro-batch"),
            ({"max_tokens_per_gpu": 100}, "text", "less than one row"),
            ({"global_batch_size": 10, "grad_accum_steps": 8}, "text", "cannot be cut into 8 micro-steps"),
            ({"max_tokens_per_gpu": 100}, "messages", "the longest row must fit"),
            ({"batch_size": 4}, "messages", "has no meaning where conversations are packed"),
            ({"grad_accum_steps": 4}, "messages", "has no meaning where conversations are packed"),
        ],
    )
    def test_numbers_that_contradict_each_other_are_refused(self, given: dict, shape: str, reason: str) -> None:
        with pytest.raises(UsageError, match=reason):
            batching(TrainingConfig(**given), shape == "messages", 128, 8)

    def test_a_global_batch_that_does_not_divide_is_cut_unevenly(self) -> None:
        plan = Batching(10, 4, None).plan(np.arange(10), np.full(10, 5))
        assert [[len(rows) for rows in each] for each in plan] == [[4], [4], [2]]
        two = Batching(10, 4, None).plan(np.arange(10), np.full(10, 5), ranks=2)
        assert two == [[[[0], [1], [2], [3]], [[4], [5], [6], [7]]], [[[8]], [[9]]]]


class TestCollate:
    def test_labels_are_shifted_once_and_stay_in_their_sequence(self) -> None:
        a = Encoded(np.array([5, 6, 7]), np.array([5, -100, 7]))
        b = Encoded(np.array([8, 9]), np.array([8, 9]))
        batch = collate([[a, b]], pad_id=1)
        assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
        assert batch.labels.tolist() == [[-100, 7, -100, 9, -100, -100, -100, -100]]
        assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
        assert batch.doc_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
        assert all(tensor.shape == (1, 8) and tensor.dtype == torch.int64 for tensor in batch)
