"""Tokens are those of the whole text for any template, one id ends an answer, long rows give way as settings say."""

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from strop.data.arguments import PreferenceArguments
from strop.data.preference import (
    LABELLED,
    PAIRS,
    PAIRS_WITH_MARGIN,
    RANKED,
    TRIPLES,
    PreferenceFormat,
    prepare_preference,
)
from strop.data.preference_rows import PreferenceRecipe

CHATML = "<|im_start|>{{ m['role'] }}\n{{ %s }}<|im_end|>\n"
HEADER = "<|im_start|>assistant\n"


def template(content="m['content']", opening="", first="", last=""):
    return (
        f"{first}{{% for m in messages %}}{CHATML % content}{{% endfor %}}{last}"
        f"{{% if add_generation_prompt %}}{HEADER}{opening}{{% endif %}}"
    )


TEMPLATES = {
    "chatml": template(),
    "opens a thought": template(opening="<think>\n"),
    "opens and closes a thought": template(opening="<think>\n\n</think>\n\n"),
    "trims": template("m['content'] | trim"),
    "forgets thoughts": template("m['content'] if loop.last else m['content'].split('</think>')[-1]"),
    "system of its own": template(first="<|im_start|>system\nBe brief.<|im_end|>\n"),
    "needs a user": "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no user') }}{% endif %}" + template(),
    "ends": template(last="{% if not add_generation_prompt %}<|endoftext|>{% endif %}"),
    "no marks": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "answers without header": "{% for m in messages %}{{ m['content'] }}{{ '\n' if m['role'] == 'user' }}{% endfor %}",
}
SIDES = {
    "plain": ("No.", "Yes."),
    "one thinks": ("<think>\nIce melts.\n</think>\n\nNo.", "Yes."),
    "both think": ("<think>\nIce melts.\n</think>\n\nNo.", "<think>\nIt burns.\n</think>\n\nYes."),
    "like a mark": ("<b>No.</b>", "<b>Yes.</b>"),
    "white space": ("  No.\n", "\n\nYes. "),
    "one begins the other": ("No", "No, it is cold."),
}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def prepared(rows, tokenizer, wanted=PAIRS, **settings):
    dataset, report = prepare_preference(Dataset.from_list(rows), tokenizer, PreferenceArguments(**settings), wanted)
    return dataset.to_list(), report


def with_template(tokenizer, chat_template):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
    )


class TestTemplates:
    @pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_prompt_and_side_are_the_whole_rendering(self, bpe_tokenizer, name, sides):
        tokenizer = with_template(bpe_tokenizer, TEMPLATES[name])
        prompt = [user("Is ice hot?"), assistant("<think>\nHm.\n</think>\n\nIt is."), user("Sure?")]
        row = dict(zip(PAIRS.sides, ([assistant(side)] for side in sides), strict=True))
        for written in (row | {"prompt": prompt}, {side: prompt + row[side] for side in row}):
            ((pair,), _) = prepared([written], tokenizer)
            for side in PAIRS.sides:
                whole = tokenizer.apply_chat_template(prompt + row[side], tokenize=False)
                assert tokenizer.decode(pair["prompt_ids"] + pair[f"{side}_ids"]) == whole
                said = row[side][0]["content"].strip()  # the start of which a prompt that opens a thought may hold
                assert said.removeprefix("<think>\n") in tokenizer.decode(pair[f"{side}_ids"])

    def test_the_answer_starts_behind_the_header(self, bpe_tokenizer):
        ((pair,), _) = prepared(
            [{"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}], bpe_tokenizer
        )
        assert bpe_tokenizer.decode(pair["prompt_ids"]).endswith(HEADER)
        assert bpe_tokenizer.decode(pair["chosen_ids"]) == "b<|im_end|>\n"

    def test_a_thought_that_only_one_side_has_is_part_of_it(self, bpe_tokenizer):
        tokenizer = with_template(bpe_tokenizer, TEMPLATES["opens a thought"])
        sides = {"chosen": [assistant("<think>\nIce.\n</think>No.")], "rejected": [assistant("Yes.")]}
        ((pair,), _) = prepared([{"prompt": [user("Hot?")]} | sides], tokenizer)
        assert tokenizer.decode(pair["chosen_ids"]).startswith("<think>\nIce.")
        ((pair,), _) = prepared(
            [{"prompt": [user("Hot?")]} | sides | {"rejected": [assistant("<think>\nFire.")]}], tokenizer
        )
        assert tokenizer.decode(pair["chosen_ids"]).startswith("Ice.")

    def test_tools_and_arguments_reach_the_template(self, bpe_tokenizer):
        tokenizer = with_template(bpe_tokenizer, "{{ tools }}{{ mood }}{{ tone }}" + TEMPLATES["chatml"])
        row = {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}
        more = {"tools": '[{"name": "sky"}]', "chat_template_kwargs": {"mood": "calm"}}
        ((pair,), _) = prepared([row | more], tokenizer, chat_template_kwargs={"mood": "wild", "tone": "low"})
        assert tokenizer.decode(pair["prompt_ids"]).startswith("[{'name': 'sky'}]calmlow")
        with pytest.raises(ValueError, match=r"chat_template_kwargs=.* no effect: the rows are plain text"):
            prepared(
                [{"prompt": "a", "chosen": "b", "rejected": "c"}], tokenizer, chat_template_kwargs={"mood": "calm"}
            )

    def test_conversations_without_a_prompt(self, bpe_tokenizer):
        ((pair,), _) = prepared([{"chosen": [assistant("b")], "rejected": [assistant("c")]}], bpe_tokenizer)
        assert bpe_tokenizer.decode(pair["prompt_ids"]) == HEADER
        tokenizer = with_template(bpe_tokenizer, TEMPLATES["needs a user"])
        with pytest.raises(ValueError, match=r"train row 0: .* can't render"):
            prepared([{"chosen": [assistant("b")], "rejected": [assistant("c")]}], tokenizer)


# A tokenizer of letters, so that ids can be written by hand

BOS, EOS, A, B, C, X, AB = range(7)


def letters(around="$A"):
    """Letters with "ab" merged; `around` says what the tokenizer itself puts around a text."""
    vocabulary = {"<s>": BOS, "</s>": EOS, "a": A, "b": B, "c": C, "x": X, "ab": AB}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


class TestEnds:
    @pytest.mark.parametrize("around", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
    @pytest.mark.parametrize("end", ["", "</s>"])
    def test_one_end_and_the_tokenizers_own_start(self, around, end):
        ((row,), _) = prepared([pair("x", "c" + end, "xc" + end)], letters(around))
        start = [BOS] if "<s>" in around else []
        assert row == {"prompt_ids": [*start, X], "chosen_ids": [C, EOS], "rejected_ids": [X, C, EOS]}

    def test_nothing_before_the_answers_but_what_the_tokenizer_writes(self):
        ((row,), _) = prepared([pair("", "c", "xc")], letters("<s> $A"))
        assert row == {"prompt_ids": [BOS], "chosen_ids": [C, EOS], "rejected_ids": [X, C, EOS]}

    def test_another_end_by_name(self):
        ((row,), _) = prepared([pair("x", "c", "xc")], letters(), eos_token="<s>")
        assert row["chosen_ids"] == [C, BOS]

    def test_an_answer_that_says_nothing_ends_and_is_counted(self):
        rows, report = prepared([pair("x", "c", ""), pair("x", "c", "x")], letters())
        assert rows[0]["rejected_ids"] == [EOS]
        assert (report.rows_out, report.empty_sides) == (2, 1)


class TestSeams:
    def test_a_token_across_the_seam_belongs_to_all_sides(self):
        ((row,), report) = prepared([pair("xa", "bc", "cc")], letters())
        assert row == {"prompt_ids": [X], "chosen_ids": [AB, C, EOS], "rejected_ids": [A, C, C, EOS]}
        assert report.merged_boundaries == 1

    def test_a_seam_that_was_only_found_is_none_to_warn_of(self):
        ((row,), report) = prepared([{"chosen": "xab", "rejected": "xac"}], letters())
        assert row == {"prompt_ids": [X], "chosen_ids": [AB, EOS], "rejected_ids": [A, C, EOS]}
        assert report.merged_boundaries == 0

    def test_the_least_of_three_sides_counts(self):
        ((row,), _) = prepared([pair("xa", "cc", "xc") | {"reference": "b"}], letters(), TRIPLES)
        assert row["prompt_ids"] == [X]
        assert row["reference_ids"] == [AB, EOS]


def tokens(prompt, *sides):
    """A pair, or a triple, of so many tokens."""
    ids = {
        f"{name}_ids": [letter] * (length - 1) + [EOS]
        for name, letter, length in zip(TRIPLES.sides, (A, B, C), sides, strict=False)
    }
    return ids | {"prompt_ids": list(range(100, 100 + prompt))}


def lengths(row):
    return [len(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")]


class TestLongRows:
    """A prompt of 10 tokens, chosen 3, rejected 6."""

    @pytest.mark.parametrize(
        ("settings", "kept", "cut", "ends"),
        [
            ({"max_length": None}, [10, 3, 6], 0, 0),
            ({"max_length": 16}, [10, 3, 6], 0, 0),
            ({"max_length": 12}, [10, 2, 2], 2, 2),
            ({"max_length": 13}, [10, 3, 3], 1, 1),
            ({"max_length": 12, "truncation_mode": "keep_end"}, [6, 3, 6], 0, 0),
            ({"max_length": 6, "truncation_mode": "keep_end"}, [1, 3, 5], 1, 1),  # some of the prompt stays
            ({"max_length": 2, "truncation_mode": "keep_end"}, [1, 1, 1], 2, 2),
            ({"max_prompt_length": 4}, [4, 3, 6], 0, 0),
            ({"max_completion_length": 4}, [10, 3, 4], 1, 1),
            ({"max_length": 9, "max_prompt_length": 4, "max_completion_length": 5}, [4, 3, 5], 1, 1),
            ({"max_length": 8, "max_prompt_length": 4}, [4, 3, 4], 1, 1),
            ({"max_length": 8, "max_prompt_length": 4, "truncation_mode": "keep_end"}, [2, 3, 6], 0, 0),
        ],
    )
    def test_what_gives_way(self, settings, kept, cut, ends):
        ((row,), report) = prepared([tokens(10, 3, 6)], letters(), **settings)
        assert lengths(row) == kept
        assert row["prompt_ids"] == list(range(110 - kept[0], 110))  # its end
        assert row["chosen_ids"] == ([A, A, EOS])[: kept[1]]  # their start
        assert (report.truncated_completions, report.lost_ends, report.truncated_prompts) == (cut, ends, kept[0] < 10)
        assert report.tokens_lost == 19 - sum(kept)
        assert (report.tokens, report.trained_tokens) == (sum(kept), sum(kept[1:]))
        assert (report.percentile(50), report.longest_prompt) == (16, 10)

    def test_a_row_without_room_for_its_answers_is_dropped_and_counted(self):
        rows, report = prepared([tokens(10, 3, 6), tokens(2, 3, 6)], letters(), max_length=10)
        assert [lengths(row) for row in rows] == [[2, 3, 6]]
        assert (report.untrainable_rows, report.truncated_rows, report.tokens_lost) == (1, 0, 19)
        with pytest.raises(ValueError, match=r"no row .* within max_length=10: the longest prompt has 10 tokens"):
            prepared([tokens(10, 3, 6)], letters(), max_length=10)

    def test_without_a_prompt_the_first_token_of_a_side_is_not_predicted(self):
        rows, report = prepared([tokens(0, 1, 6), tokens(0, 2, 6)], letters())
        assert [lengths(row) for row in rows] == [[0, 2, 6]]
        assert (report.untrainable_rows, report.trained_tokens) == (1, 6)

    def test_dropped_or_refused(self):
        rows, report = prepared([tokens(10, 3, 6), tokens(2, 3, 6)], letters(), max_length=12, overlong="drop")
        assert (len(rows), report.dropped_rows) == (1, 1)
        with pytest.raises(ValueError, match=r'no row .* 1 of 1 are longer than max_length=12 .* overlong="drop"'):
            prepared([tokens(10, 3, 6)], letters(), max_length=12, overlong="drop")
        with pytest.raises(
            ValueError, match=r"train row 1: its prompt of 10 .* answer of 6 are more than max_length=12"
        ):
            prepared([tokens(2, 3, 6), tokens(10, 3, 6)], letters(), max_length=12, overlong="error")
        assert (
            len(prepared([tokens(10, 3, 6)], letters(), max_length=12, max_prompt_length=6, overlong="error")[0]) == 1
        )

    def test_an_end_that_is_kept_is_not_lost(self, bpe_tokenizer):
        row = {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("cc")]}
        ((whole,), _) = prepared([row], bpe_tokenizer)
        assert bpe_tokenizer.decode(whole["rejected_ids"]).endswith("<|im_end|>\n")
        limit = len(whole["rejected_ids"]) - 1
        _, report = prepared([row], bpe_tokenizer, max_completion_length=limit)
        assert (report.truncated_completions, report.lost_ends) == (1, 0)  # the newline behind the end

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"overlong": "split"}, "overlong='split' is none of truncate, drop, error"),
            ({"truncation_mode": "middle"}, "truncation_mode='middle' is none of"),
            ({"max_prompt_length": 0}, "max_prompt_length=0 leaves no token"),
        ],
    )
    def test_settings_without_sense(self, settings, why):
        with pytest.raises(ValueError, match=why):
            PreferenceRecipe(**settings)


class TestTokens:
    def test_whole_sequences_share_their_prompt(self):
        for suffix in ("ids", "input_ids"):
            row = {f"chosen_{suffix}": [5, 6, 7], f"rejected_{suffix}": [5, 6, 8, 9]}
            assert prepared([row], letters())[0] == [{"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8, 9]}]

    def test_a_sequence_keeps_its_last_token(self):
        ((row,), _) = prepared([{"chosen_ids": [5, 6], "rejected_ids": [5, 6, 7]}], letters())
        assert row == {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [6, 7]}

    @pytest.mark.parametrize(
        ("row", "why"),
        [
            ({"prompt_ids": [[1]], "chosen_ids": [1], "rejected_ids": [2]}, r"prompt_ids begin with \[1\]"),
            ({"prompt_input_ids": [1], "chosen_input_ids": [1], "rejected_input_ids": [2]}, "rename the columns"),
        ],
    )
    def test_what_is_no_row_of_tokens(self, row, why):
        with pytest.raises(ValueError, match=why):
            prepared([row], letters())

    def test_ranked_and_labelled(self):
        ((row,), _) = prepared([{"prompt_ids": [1], "completions_ids": [[2], [3, 4], [5]]}], letters(), RANKED)
        assert row == {"prompt_ids": [1], "completions_ids": [[2], [3, 4], [5]]}
        ((row,), _) = prepared([{"prompt_ids": [1], "completion_ids": [2], "label": 1}], letters(), LABELLED)
        assert row == {"prompt_ids": [1], "completion_ids": [2], "label": True}


class TestNumbers:
    def test_labels(self):
        rows = [{"prompt": "x", "completion": "c", "label": label} for label in (1, 0)]
        assert [row["label"] for row in prepared(rows, letters(), LABELLED)[0]] == [True, False]

    @pytest.mark.parametrize("label", ["yes", -1, None, 0.5])
    def test_labels_that_are_none(self, label):
        rows = [{"prompt": "x", "completion": "c", "label": label}]
        with pytest.raises(ValueError, match=f"train row 0: its label is {label!r}"):
            prepared(rows, letters(), LABELLED)

    def test_pairs_are_two_labelled_rows_each(self):
        rows, report = prepared([pair("x", "a", "b"), pair("xx", "b", "c")], letters(), LABELLED)
        assert [(row["completion_ids"][0], row["label"]) for row in rows] == [
            (A, True),
            (B, False),
            (B, True),
            (C, False),
        ]
        assert [row["prompt_ids"] for row in rows] == [[X], [X], [X, X], [X, X]]
        assert (report.rows_in, report.rows_out, report.equal_rows) == (2, 4, 0)

    def test_margins(self):
        rows, _ = prepared([pair("x", "a", "b") | {"margin": 0.5}], letters(), PAIRS_WITH_MARGIN)
        assert rows[0]["margin"] == 0.5
        assert "margin" not in prepared([pair("x", "a", "b")], letters(), PAIRS_WITH_MARGIN)[0][0]
        for margin in (None, float("nan")):
            rows = [pair("x", "a", "b") | {"margin": m} for m in (1.0, margin)]
            with pytest.raises(ValueError, match=f"train row 1: its margin is {margin}"):
                prepared(rows, letters(), PAIRS_WITH_MARGIN)

    def test_numbers_of_any_name(self):
        weighted = PreferenceFormat(PAIRS.sides, ("weight",))
        assert prepared([pair("x", "a", "b") | {"weight": 2}], letters(), weighted)[0][0]["weight"] == 2.0

    def test_ranked_completions_are_tokenised_in_their_order(self):
        rows = [
            {"prompt": "x", "completions": ["a", "c", "b"], "scores": [1, 3, 2]},
            {"prompt": "x", "completions": ["b", "a"]},
        ]
        rows, report = prepared(rows, letters(), RANKED)
        assert rows[0] == {"prompt_ids": [X], "completions_ids": [[C, EOS], [B, EOS], [A, EOS]]}
        assert (len(rows[1]["completions_ids"]), report.trained_tokens) == (2, 10)
