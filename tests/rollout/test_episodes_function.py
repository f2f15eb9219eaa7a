"""What a rollout function of the user's returns becomes rollouts, or an error that says which row is wrong."""

import logging
import math

import pytest

from strop.rollout.encode import Encoder
from strop.rollout.episodes_function import FunctionEpisodes
from strop.rollout.types import Sampling

ROWS = [{"prompt": "a"}, {"prompt": "b"}]
GOOD = {
    "prompt_ids": [[3], [4, 5]],
    "completion_ids": [[6, 7, 2], [8]],
    "logprobs": [[-1.0, -2.0, -3.0], [-4.0]],
}


def rollouts(tokenizer, returned, rows=ROWS):
    seen = []

    def function(prompts, trainer):
        seen.append((prompts, trainer))
        return returned

    episodes = FunctionEpisodes(function, "the trainer", Encoder(tokenizer), end_ids={2})
    made = episodes.roll_out(rows, range(len(rows)), Sampling(max_tokens=8))
    assert seen == [([row["prompt"] for row in rows], "the trainer")]
    return made


def test_ids_and_log_probabilities_are_taken_as_they_are(word_tokenizer):
    first, second = rollouts(word_tokenizer, GOOD)
    assert (first.token_ids, first.completion_mask, first.logps) == ([3, 6, 7, 2], [0, 1, 1, 1], [0, -1, -2, -3])
    assert (first.prompt_length, first.finish_reason) == (1, "stop")
    assert (second.token_ids, second.prompt_length, second.finish_reason) == ([4, 5, 8], 2, "length")
    assert first.completion == word_tokenizer.decode([6, 7])


def test_a_mask_says_what_the_policy_did_not_write(word_tokenizer):
    first, second = rollouts(word_tokenizer, GOOD | {"env_mask": [[1.0, 0, True], [1]]})
    assert (first.completion_mask, first.logps, first.length) == ([0, 1, 0, 1], [0, -1, 0, -3], 2)
    assert "env_mask" not in first.columns
    assert second.completion_mask == [0, 0, 1]


def test_other_fields_are_columns_for_rewards(word_tokenizer):
    first, second = rollouts(word_tokenizer, GOOD | {"score": [1, 2], "round": 7})
    assert (first.columns, second.columns) == ({"score": 1, "round": 7}, {"score": 2, "round": 7})


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        (None, [[False, True, False, True], [False, False, True]]),
        ([None, [-4.0]], [[False, True, False, True], [False, False, False]]),
        ([[-1.0, None, None], [-4.0]], [[False, False, False, True], [False, False, False]]),
    ],
)
def test_unknown_log_probabilities_are_nan(word_tokenizer, caplog, given, unknown):
    with caplog.at_level(logging.WARNING):
        written = rollouts(word_tokenizer, GOOD | {"logprobs": given, "env_mask": [[1, 0, 1], [1]]})
    assert [[math.isnan(logp) for logp in one.logps] for one in written] == unknown
    count = sum(map(sum, unknown))
    assert caplog.text.count(f"no logprobs for {count} of the 3 tokens written") == 1


def test_an_empty_completion_is_one_cut_short(word_tokenizer):
    _, second = rollouts(word_tokenizer, GOOD | {"completion_ids": [[6, 7, 2], []], "logprobs": None})
    assert (second.length, second.finish_reason) == (0, "length")


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ([], "returned list; it returns a mapping"),
        ({"prompt_ids": [], "completion_ids": [], "logprob": None}, "but not logprobs.*Did you mean 'logprob'"),
        (GOOD | {"completion_ids": [[6, 7, 2]]}, "1 completion_ids for 2 prompts"),
        (GOOD | {"score": [1]}, "1 score for 2 prompts"),
        (GOOD | {"logprobs": [[-1.0], [-4.0]]}, "3 completion_ids but 1 logprobs for row 0"),
        (GOOD | {"env_mask": [[1, 0, 1], [1, 1]]}, "1 completion_ids but 2 env_mask for row 1"),
        (GOOD | {"prompt_ids": [[], [4]]}, "no prompt_ids for row 0"),
        (GOOD | {"completion_ids": [[6, 7, -2], [8]]}, "completion_ids with '-2' for row 0 .* ids of tokens"),
        (GOOD | {"completion_ids": [[6, 7, 2.5], [8]]}, r"completion_ids with '2.5' for row 0"),
        (GOOD | {"completion_ids": [[6, 7, 2], "x"]}, "completion_ids with 'x' for row 1"),
        (GOOD | {"env_mask": [[1, 2, 1], [1]]}, "env_mask with '2' for row 0 .* 0 and 1"),
        (GOOD | {"logprobs": [[-1.0, [-2.0], -3.0], [-4.0]]}, r"logprobs with '\[-2.0\]' for row 0"),
        (GOOD | {"prompt_ids": None}, "returned NoneType as prompt_ids"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_said(word_tokenizer, returned, reason):
    with pytest.raises(ValueError, match=reason):
        rollouts(word_tokenizer, returned)


def test_a_function_is_needed(word_tokenizer):
    with pytest.raises(ValueError, match="rollout_func=3"):
        FunctionEpisodes(3, None, Encoder(word_tokenizer), ())
