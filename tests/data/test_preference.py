"""Preparation of answers to a prompt over whole data sets: goldens, counts, cache, streams, other rows' completions."""

import json
import logging
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, load_from_disk
from transformers import AutoTokenizer

from strop.data.arguments import PreferenceArguments
from strop.data.preference import (
    LABELLED,
    LABELLED_MISMATCHED,
    PAIRS,
    PAIRS_WITH_MARGIN,
    RANKED,
    TRIPLES,
    partners,
    prepare_preference,
)

HERE = Path(__file__).parents[1] / "goldens"
GOLDENS = json.loads((HERE / "preference_prepared.json").read_text())["cases"]
WANTED = {"dpo": PAIRS, "kto": LABELLED, "reward": PAIRS_WITH_MARGIN, "tpo": TRIPLES}

PAIR = {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."}
ROWS = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n + 2}"} for n in range(8)]


def prepare(rows, tokenizer, wanted=PAIRS, name="train", **settings):
    rows = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return prepare_preference(rows, tokenizer, PreferenceArguments(**settings), wanted, name)


def prepared(rows, tokenizer, wanted=PAIRS, **settings):
    return list(prepare(rows, tokenizer, wanted, **settings)[0])


@pytest.fixture(scope="module")
def golden_tokenizer():
    return AutoTokenizer.from_pretrained(HERE / "tiny_llama")


@pytest.mark.parametrize("case", GOLDENS, ids=[case["name"] for case in GOLDENS])
def test_goldens(golden_tokenizer, case):
    """TRL's ids; those of its reward models are of prompt and side together."""
    method = case["name"].split("_")[0]
    rows = prepared(case["rows"], golden_tokenizer, WANTED[method])
    for column, expected in case["prepared"].items():
        found = [row[column] for row in rows]
        if method == "reward" and column.endswith("_ids"):
            found = [row["prompt_ids"] + row[column] for row in rows]
        assert found == (pytest.approx(expected) if column == "margin" else expected), column


def test_prompt_and_sides_rebuild_the_texts(bpe_tokenizer):
    (pair,) = prepared([PAIR], bpe_tokenizer)
    for side in PAIRS.sides:
        text = bpe_tokenizer.decode(pair["prompt_ids"] + pair[f"{side}_ids"])
        assert text == PAIR["prompt"] + PAIR[side] + bpe_tokenizer.eos_token


class TestWhatComesIn:
    def test_every_kind_of_data_set(self, bpe_tokenizer):
        class Torch(torch.utils.data.Dataset):
            def __len__(self):
                return len(ROWS)

            def __getitem__(self, i):
                return ROWS[i]

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from ROWS

        rows = Dataset.from_list(ROWS)
        kinds = [rows, rows.with_format("torch"), rows.to_iterable_dataset(), Torch(), Stream()]
        first, *others = [prepared(kind, bpe_tokenizer) for kind in kinds]
        assert len(first) == len(ROWS)
        assert all(other == first for other in others)

    def test_a_column_that_only_a_later_row_of_a_list_has_counts(self, bpe_tokenizer):
        rows = [PAIR, PAIR | {"margin": 0.5}]
        for some in (rows, rows[::-1]):
            with pytest.raises(ValueError, match="its margin is None"):
                prepare_preference(some, bpe_tokenizer, PreferenceArguments(), PAIRS_WITH_MARGIN)

    def test_several_processes_make_the_same(self, bpe_tokenizer):
        rows = Dataset.from_list(ROWS)
        assert prepared(rows, bpe_tokenizer, dataset_num_proc=2) == prepared(rows, bpe_tokenizer)

    def test_splits_are_named(self, bpe_tokenizer):
        with pytest.raises(ValueError, match=r"is a DatasetDict with the splits \['train'\]"):
            prepare(DatasetDict(train=Dataset.from_list(ROWS)), bpe_tokenizer)

    def test_missing_sides_are_named(self, bpe_tokenizer):
        with pytest.raises(
            ValueError, match=r"train row 0: it needs 'chosen' and 'rejected', .* among its columns \['text'\]"
        ):
            prepare([{"text": "x"}], bpe_tokenizer)

    def test_no_rows(self, bpe_tokenizer):
        with pytest.raises(ValueError, match="the train data set has no rows"):
            prepare(Dataset.from_dict({"chosen": [], "rejected": []}), bpe_tokenizer)

    def test_the_data_set_itself_stays_as_it_is(self, bpe_tokenizer):
        rows = Dataset.from_list([row | {"source": 1} for row in ROWS])
        dataset, _ = prepare(rows, bpe_tokenizer)
        assert rows.to_list() == [row | {"source": 1} for row in ROWS]
        assert dataset.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"]


class TestPreparedRows:
    @pytest.mark.parametrize("wanted", [PAIRS, LABELLED, LABELLED_MISMATCHED])
    def test_come_back_as_they_are_and_counted(self, bpe_tokenizer, wanted):
        once, first = prepare(ROWS, bpe_tokenizer, wanted)
        twice, second = prepare(once, bpe_tokenizer, wanted)
        assert twice is once
        assert second.to_dict() == first.to_dict() | {"rows_in": len(once)}

    def test_with_a_reference_ahead_of_time_too(self, bpe_tokenizer):
        once, _ = prepare(ROWS, bpe_tokenizer)
        logps = [[-1.0] * len(ids) for ids in once["chosen_ids"]]
        once = once.add_column("ref_chosen_logps", logps)
        twice, _ = prepare(once, bpe_tokenizer)
        assert twice["ref_chosen_logps"][:] == logps
        stream, _ = prepare(once.to_iterable_dataset(), bpe_tokenizer)
        assert [row["ref_chosen_logps"] for row in stream] == logps
        with pytest.raises(
            ValueError, match=r"train row 0: .* ref_chosen_logps, which would no longer be of what is left"
        ):
            prepare(once, bpe_tokenizer, max_completion_length=1)

    def test_a_reference_of_completions_that_are_cut_is_refused(self, bpe_tokenizer):
        rows = [{"prompt": "a" * n, "completion": " b" * n, "label": True} for n in (1, 9)]
        once, _ = prepare(rows, bpe_tokenizer, LABELLED_MISMATCHED)
        once = once.add_column("ref_mismatched_logps", [[-1.0] * len(ids) for ids in once["mismatched_ids"]])
        assert prepare(once, bpe_tokenizer, LABELLED_MISMATCHED)[0] is once
        short = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in once)
        once = once.map(lambda row: {"mismatched_ids": [1] * short})
        with pytest.raises(ValueError, match="has ref_mismatched_logps, but its completions to other prompts"):
            prepare(once, bpe_tokenizer, LABELLED_MISMATCHED, max_length=short)

    def test_are_cut_where_settings_say_so(self, bpe_tokenizer):
        for wanted in (PAIRS, LABELLED_MISMATCHED):
            once, _ = prepare(ROWS, bpe_tokenizer, wanted)
            again = prepared(once, bpe_tokenizer, wanted, max_prompt_length=4, max_completion_length=2)
            assert again == prepared(ROWS, bpe_tokenizer, wanted, max_prompt_length=4, max_completion_length=2)
            assert {len(row["prompt_ids"]) for row in again} == {4}

    def test_ranked_ones(self, bpe_tokenizer):
        rows = [{"prompt": "x", "completions": [" a", " b", " c"][:k]} for k in (2, 3)]
        once, first = prepare(rows, bpe_tokenizer, RANKED)
        twice, second = prepare(once, bpe_tokenizer, RANKED)
        assert twice is once
        assert second.to_dict() == first.to_dict()
        assert len(prepared(once, bpe_tokenizer, RANKED, max_completion_length=1)[1]["completions_ids"][2]) == 1


class TestReport:
    def test_says_what_was_lost(self, bpe_tokenizer, caplog):
        rows = [*ROWS, {"prompt": "a " * 50, "chosen": " b", "rejected": " c"}, ROWS[0] | {"rejected": ""}]
        with caplog.at_level(logging.WARNING):
            _, report = prepare(rows, bpe_tokenizer, max_length=12, max_completion_length=2)
        assert (report.rows_in, report.rows_out, report.untrainable_rows, report.empty_sides) == (10, 9, 1, 1)
        for part in (
            "1 of 10 rows had no room",
            "1 of 10 rows a completion says nothing",
            "completions were truncated",
        ):
            assert part in caplog.text
        assert str(report).startswith("train: 10 rows in, 9 out")
        assert "1 with an empty completion" in str(report)
        numbers = report.to_dict()
        assert numbers["lost_ends"] == report.truncated_completions > 0
        assert numbers["length_max"] == report.percentile(100) > 12

    def test_rows_without_any_token_to_learn_are_not_said_to_be_long(self, bpe_tokenizer):
        with pytest.raises(ValueError, match=r"in none of the 1 rows .* has every completion a token") as refusal:
            prepare([{"prompt_ids": [1, 2], "chosen_ids": [], "rejected_ids": [3]}], bpe_tokenizer)
        assert "max_length" not in str(refusal.value)

    def test_equal_pairs_are_counted_and_refused_if_most_are(self, bpe_tokenizer, caplog):
        pair = {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " The sky is green."}
        _, report = prepare([pair, PAIR], bpe_tokenizer, max_completion_length=3)
        assert report.equal_rows == 1
        assert "in 1 of 2 rows the completions have the same tokens" in caplog.text
        same = [pair, PAIR | {"rejected": PAIR["chosen"]}, PAIR]
        expected = (
            r"in 2 of 3 rows of the train data set .* the same tokens within .*, max_completion_length=3 \(6 comp"
        )
        with pytest.raises(ValueError, match=expected):
            prepare(same, bpe_tokenizer, max_completion_length=3)
        once, _ = prepare(same, bpe_tokenizer)
        with pytest.raises(ValueError, match="in 2 of 2 rows"):
            prepare(once.select([1, 1]), bpe_tokenizer)

    def test_a_ranking_is_equal_where_all_of_it_is(self, bpe_tokenizer):
        rows = [{"prompt": "x", "completions": [" a", " a", " b"]}, {"prompt": "x", "completions": [" a", " a", " a"]}]
        assert prepare(rows, bpe_tokenizer, RANKED)[1].equal_rows == 1
        once, _ = prepare(rows, bpe_tokenizer, RANKED)
        assert prepare(once, bpe_tokenizer, RANKED)[1].equal_rows == 1

    def test_a_triples_reference_may_be_its_chosen_side(self, bpe_tokenizer):
        _, report = prepare([PAIR | {"reference": PAIR["chosen"]}], bpe_tokenizer, TRIPLES)
        assert report.equal_rows == 0

    def test_texts_without_an_end_are_warned_about(self, bpe_tokenizer, caplog):
        tokenizer = type(bpe_tokenizer)(tokenizer_object=bpe_tokenizer.backend_tokenizer)
        (pair,) = prepared([PAIR], tokenizer)
        assert tokenizer.decode(pair["rejected_ids"]) == " Green."
        assert "no end-of-sequence token" in caplog.text


class TestCache:
    def test_key_holds_all_that_rows_depend_on(self, bpe_tokenizer, tmp_path):
        Dataset.from_list(ROWS).save_to_disk(tmp_path / "rows")
        rows = load_from_disk(tmp_path / "rows")

        def key(wanted=PAIRS, **settings):
            return prepare(rows, bpe_tokenizer, wanted, **settings)[0]._fingerprint

        assert key() == key()
        assert key(LABELLED_MISMATCHED) == key(LABELLED_MISMATCHED)
        other = [
            key(LABELLED),
            key(LABELLED_MISMATCHED),
            key(max_length=64),
            key(max_prompt_length=64),
            key(max_completion_length=64),
            key(truncation_mode="keep_end"),
            key(overlong="drop"),
            key(eos_token="<|endoftext|>"),
        ]
        assert len({key(), *other}) == 9

    def test_is_used(self, bpe_tokenizer, tmp_path, monkeypatch):
        Dataset.from_list(ROWS).save_to_disk(tmp_path / "rows")
        first, _ = prepare(load_from_disk(tmp_path / "rows"), bpe_tokenizer)
        monkeypatch.setattr(datasets.arrow_dataset.Dataset, "_map_single", None)
        again, report = prepare(load_from_disk(tmp_path / "rows"), bpe_tokenizer)
        assert again.to_list() == first.to_list()
        assert report.rows_out == len(ROWS)


class TestStreams:
    def test_are_counted_as_they_pass(self, bpe_tokenizer):
        stream, report = prepare(Dataset.from_list(ROWS).to_iterable_dataset(), bpe_tokenizer)
        assert report.rows_in == 0
        assert list(stream) == prepared(ROWS, bpe_tokenizer)
        assert report.to_dict() == prepare(ROWS, bpe_tokenizer)[1].to_dict()

    def test_of_which_nothing_can_be_learned_are_refused_at_once(self, bpe_tokenizer):
        rows = Dataset.from_list([PAIR | {"rejected": PAIR["chosen"]}] * 3)
        with pytest.raises(ValueError, match="in 3 of 3 rows of the train data set"):
            prepare(rows.to_iterable_dataset(), bpe_tokenizer)
        with pytest.raises(ValueError, match="no row of the train data set has room"):
            prepare(Dataset.from_list(ROWS).to_iterable_dataset(), bpe_tokenizer, max_length=1)

    def test_labels_and_ranks(self, bpe_tokenizer):
        for wanted, rows in ((LABELLED, ROWS), (RANKED, [{"prompt": "x", "completions": [" a", " b"]}])):
            stream = Dataset.from_list(rows).to_iterable_dataset()
            assert prepared(stream, bpe_tokenizer, wanted) == prepared(rows, bpe_tokenizer, wanted)


class TestMismatched:
    """Each labelled row is scored with a completion to another prompt, too."""

    @pytest.mark.parametrize(
        ("prompts", "expected"),
        [
            ("abcd", [3, 0, 1, 2]),
            ("aabb", [2, 3, 0, 1]),  # good meets good and bad meets bad where pairs were taken apart
            ("aab", [2, 2, 0]),
            ("abb", [1, 0, 0]),
            ("abca", [2, 0, 1, 2]),  # around the end a prompt meets itself, so the one before is taken
            ("aba", [1, 0, 1]),
        ],
    )
    def test_partners(self, prompts, expected):
        found = partners([prompt.encode() for prompt in prompts], "train")
        assert found.tolist() == expected
        assert all(prompts[i] != prompts[j] for i, j in enumerate(found))

    def test_one_prompt_alone_is_refused(self, bpe_tokenizer):
        rows = [{"prompt": "x", "completion": c, "label": True} for c in (" a", " b")]
        with pytest.raises(ValueError, match=r"all 2 rows of the train data set .* have one prompt"):
            prepare(rows, bpe_tokenizer, LABELLED_MISMATCHED)

    def test_one_prompt_is_enough_to_evaluate(self):
        assert partners([b"x"], "eval").tolist() == [0]

    def test_every_completion_of_pairs_is_used_once_and_under_another_prompt(self, bpe_tokenizer):
        rows = prepared(ROWS, bpe_tokenizer, LABELLED_MISMATCHED)
        by_completion = {tuple(row["completion_ids"]): row for row in rows}
        assert sorted(map(tuple, (row["mismatched_ids"] for row in rows))) == sorted(
            map(tuple, (row["completion_ids"] for row in rows))
        )
        assert len(by_completion) < len(rows)  # n + 2 is the next row's n + 1
        for i, row in enumerate(rows):
            other = rows[i - 2]
            assert row["mismatched_ids"] == other["completion_ids"]
            assert row["prompt_ids"] != other["prompt_ids"]

    def test_it_is_cut_to_what_there_is_room_for(self, bpe_tokenizer):
        rows = [
            {"prompt": "a" * 10, "completion": " b", "label": True},
            {"prompt": "c", "completion": " d" * 9, "label": False},
        ]
        whole = prepared(rows, bpe_tokenizer, LABELLED_MISMATCHED)
        limit = len(whole[0]["prompt_ids"]) + len(whole[0]["completion_ids"]) + 1
        row = prepared(rows, bpe_tokenizer, LABELLED_MISMATCHED, max_length=limit)[0]
        assert row["completion_ids"] == whole[0]["completion_ids"]
        assert row["mismatched_ids"] == whole[0]["mismatched_ids"][: limit - len(row["prompt_ids"])]

    def test_dropped_rows_lend_nothing(self, bpe_tokenizer):
        rows = [{"prompt": p, "completion": " b", "label": True} for p in ("a", "c " * 30, "d")]
        kept = prepared(rows, bpe_tokenizer, LABELLED_MISMATCHED, max_length=20)
        assert len(kept) == 2
        assert kept[0]["mismatched_ids"] == kept[1]["completion_ids"]

    def test_streams(self, bpe_tokenizer, monkeypatch):
        stream = Dataset.from_list(ROWS).to_iterable_dataset()
        assert prepared(stream, bpe_tokenizer, LABELLED_MISMATCHED) == prepared(
            ROWS, bpe_tokenizer, LABELLED_MISMATCHED
        )
        many = [{"prompt": f"{n}", "completion": f" {n}", "label": n % 2 == 0} for n in range(1001)]
        rows = prepared(Dataset.from_list(many).to_iterable_dataset(), bpe_tokenizer, LABELLED_MISMATCHED)
        assert rows[1000]["mismatched_ids"] == rows[999]["completion_ids"]  # alone in its batch
        lengths = np.array([len(row["mismatched_ids"]) for row in rows])
        assert lengths.min() > 0
