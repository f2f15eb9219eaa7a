"""Where prompts end: prompt + answer is always what was written; what can't be told is refused with its row."""

import random
from typing import ClassVar

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from strop import (
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)
from strop.data.prompts import answers_of, common_length
from strop.data.sides import LABELLED, PAIRS, RANKED, TRIPLES


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


Q, A, B = user("Is ice hot?"), assistant("No."), assistant("Yes.")


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("The sky is blue.", "The sky is green.", ("The sky is", " blue.", " green.")),
        ("blue", "green", ("", "blue", "green")),
        ("blue ", "green", ("", "blue ", "green")),
        ("The answer is 12", "The answer is 13", ("The answer is 1", "2", "3")),
        ("The sky is", "The sky is blue", ("The sky is", "", " blue")),
        ("same", "same", ("same", "", "")),
        ("", "a", ("", "", "a")),
        ("a  b", "a  c", ("a ", " b", " c")),
        ([Q, A], [Q, B], ([Q], [A], [B])),
        ([Q, A, Q, A], [Q, A, Q, B], ([Q, A, Q], [A], [B])),
        ([Q, A], [Q, A], ([Q], [A], [A])),  # a conversation keeps its answer
    ],
)
def test_a_prompt_is_all_that_both_sides_begin_with(chosen, rejected, expected):
    found = extract_prompt({"chosen": chosen, "rejected": rejected, "source": 7})
    assert found == dict(zip(("prompt", "chosen", "rejected"), expected, strict=True)) | {"source": 7}


def test_prompt_and_side_make_the_whole_again():
    rng = random.Random(0)
    for _ in range(2000):
        sides = {side: "".join(rng.choices("ab  \n", k=rng.randint(0, 6))) for side in TRIPLES.sides}
        found = extract_prompt(sides)
        assert {side: found["prompt"] + found[side] for side in sides} == sides
        heads = {found[side][:1] for side in sides}
        assert len(heads) > 1 or heads == {" "} or heads == {""}, (sides, found)


class TestBesideAPrompt:
    def test_texts_stay_as_they_are(self):
        row = {"prompt": "Hello", "chosen": "Hello, you", "rejected": " there"}
        assert maybe_extract_prompt(row) == row

    def test_conversations_that_repeat_it_lose_it(self):
        row = {"prompt": [Q], "chosen": [Q, A], "rejected": [Q, B], "source": 1}
        assert maybe_extract_prompt(row) == row | {"chosen": [A], "rejected": [B]}
        assert maybe_extract_prompt(row | {"prompt": "Is ice hot?"}) == row | {"chosen": [A], "rejected": [B]}

    def test_a_text_before_answers_as_messages_is_a_question(self):
        found = maybe_extract_prompt({"prompt": "Is ice hot?", "chosen": [A], "rejected": [B]})
        assert found == {"prompt": [Q], "chosen": [A], "rejected": [B]}

    def test_rows_without_sides_stay_as_they_are(self):
        assert maybe_extract_prompt({"messages": [Q]}) == {"messages": [Q]}

    @pytest.mark.parametrize(
        ("row", "why"),
        [
            ({"prompt": [Q], "chosen": [Q, A], "rejected": [B]}, "some of its answers begin with the prompt"),
            ({"prompt": [Q], "chosen": [Q, A], "rejected": [Q]}, "the prompt and nothing more"),
            ({"prompt": "Is it?", "chosen": [Q, A], "rejected": [Q, B]}, "'Is it\\?' is none of the messages"),
            ({"prompt": [Q], "chosen": "No.", "rejected": "Yes."}, "prompt is a list but its answers are texts"),
            ({"prompt": "x", "chosen": "No.", "rejected": [B]}, "of the kinds str, list"),
            ({"prompt": "x", "chosen": "No.", "rejected": None}, "no 'rejected' among its columns"),
            ({"prompt": "x", "chosen": "No.", "rejected": "Yes.", "image": 1}, "images, which preference training"),
        ],
    )
    def test_what_cannot_be_told_is_refused(self, row, why):
        with pytest.raises(ValueError, match=why):
            answers_of(row, PAIRS)


class TestDialects:
    def test_sharegpt(self):
        said = [{"from": "human", "value": "Is ice hot?"}]
        row = {
            "conversations": said,
            "chosen": {"from": "gpt", "value": "No."},
            "rejected": {"from": "gpt", "value": "Yes."},
        }
        found = answers_of(row, PAIRS)
        assert (found.prompt, found.sides) == ([Q], [[A], [B]])
        whole = {side: [*said, row[side]] for side in PAIRS.sides}
        assert answers_of(whole, PAIRS).prompt == [Q]

    def test_a_reference_begins_with_the_prompt_too(self):
        row = {"chosen": "a b c", "rejected": "a b d", "reference": "a e"}
        assert answers_of(row, TRIPLES).prompt == "a"

    def test_a_labelled_conversation_ends_with_what_is_labelled(self):
        found = answers_of({"completion": [Q, A], "label": True}, LABELLED)
        assert (found.prompt, found.sides) == ([Q], [[A]])
        with pytest.raises(ValueError, match='could not be told from one text; add a "prompt"'):
            answers_of({"completion": "No.", "label": True}, LABELLED)

    def test_a_pair_among_labelled_rows(self):
        assert answers_of({"chosen": [Q, A], "rejected": [Q, B]}, LABELLED).sides == [[A], [B]]

    @pytest.mark.parametrize("order", [{"scores": [0.1, 3, 2]}, {"ranks": [3, 1, 2]}, {}])
    def test_ranked_completions_stand_best_first(self, order):
        completions = ["c", "a", "b"] if order else ["a", "b", "c"]
        assert answers_of({"prompt": "x", "completions": completions} | order, RANKED).sides == ["a", "b", "c"]

    @pytest.mark.parametrize(
        ("more", "why"),
        [
            ({"completions": "ab"}, "are one text; write them as a list"),
            ({"completions": ["a"]}, "has 1 completions, but a ranking compares two"),
            ({"completions": ["a", "b"], "scores": [1, 1]}, r"scores \[1, 1\] tie"),
            ({"completions": ["a", "b"], "scores": [1]}, "each of its 2 completions needs a number"),
            ({"completions": ["a", "b"], "scores": [1, float("nan")]}, "needs a number"),
            ({"completions": ["a", "b"], "scores": [1, 2], "ranks": [2, 1]}, "scores and ranks"),
            ({"completions": ["a", "b"], "labels": [True, False]}, "the steps of one solution and no ranking"),
        ],
    )
    def test_rankings_without_an_order_are_refused(self, more, why):
        with pytest.raises(ValueError, match=why):
            answers_of({"prompt": "x"} | more, RANKED)

    @pytest.mark.parametrize("empty", ["", "  ", [assistant("")]])
    def test_an_answer_that_says_nothing_is_noticed(self, empty):
        full = "a" if isinstance(empty, str) else [A]
        prompt = "x" if isinstance(empty, str) else [Q]
        rows = [{"prompt": prompt, "chosen": full, "rejected": side} for side in (full, empty)]
        assert [answers_of(row, PAIRS).has_empty_side for row in rows] == [False, True]


class TestUnpairing:
    rows: ClassVar = Dataset.from_list(
        [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}", "source": i} for i in range(3)]
    )
    expected: ClassVar = [
        {"prompt": f"p{i}", "source": i, "completion": f"{side}{i}", "label": side == "c"}
        for i in range(3)
        for side in "cr"
    ]

    @pytest.mark.parametrize("batch_size", [1, 2, 1000])
    def test_every_prefix_is_balanced_whatever_the_batch(self, batch_size):
        assert unpair_preference_dataset(self.rows, batch_size=batch_size).to_list() == self.expected

    def test_streams_and_splits(self):
        stream = maybe_unpair_preference_dataset(self.rows.to_iterable_dataset())
        assert isinstance(stream, IterableDataset)
        assert list(stream) == self.expected
        with pytest.raises(ValueError, match="num_proc=2 would have no effect on a stream"):
            maybe_unpair_preference_dataset(self.rows.to_iterable_dataset(), num_proc=2)
        splits = maybe_unpair_preference_dataset(DatasetDict(train=self.rows))
        assert splits["train"].to_list() == self.expected

    def test_other_rows_stay_as_they_are(self):
        rows = Dataset.from_list(self.expected)
        assert maybe_unpair_preference_dataset(rows) is rows


def test_common_length():
    assert [common_length("abc", other) for other in ("", "a", "abd", "abc", "abcd")] == [0, 1, 2, 3, 3]
