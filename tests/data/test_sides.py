"""Batches of answers that share a prompt: a line for each, whatever the layout, and both layouts predict the same."""

import random

import pytest
import torch

from strop.data.collate import Example
from strop.data.sides import LABELLED_MISMATCHED, PAIRS, PAIRS_WITH_MARGIN, RANKED, TRIPLES, PreferenceCollator
from strop.models.forward import use_packed_attention
from strop.models.logps import logps

FORMATS = {"pairs": PAIRS, "triples": TRIPLES, "labelled": LABELLED_MISMATCHED, "ranked": RANKED}


def test_a_packed_pair_holds_its_prompt_once():
    batch = PreferenceCollator(0)([{"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["targets"].tolist() == [[3, 4], [5, 0]]
    assert batch["predictors"].tolist() == [[1, 2], [1, 0]]
    assert batch["ends"].tolist() == [3, 4]
    assert batch["examples"] == [Example(2, 5)]


def test_ranked_examples_say_how_many_rows_they_have():
    examples = [
        {"prompt_ids": [1], "completions_ids": [[2], [3, 4], [5]]},
        {"prompt_ids": [], "completions_ids": [[6, 7], [8, 9]]},
    ]
    batch = PreferenceCollator(0, wanted=RANKED)(examples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch["targets"].tolist() == [[2, 0], [3, 4], [5, 0], [0, 7], [0, 9]]
    assert batch["examples"] == [Example(3, 5), Example(2, 4)]


def test_numbers_of_a_row_have_one_entry_an_example():
    example = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3], "completion_ids": [2], "mismatched_ids": [4]}
    batch = PreferenceCollator(0, wanted=LABELLED_MISMATCHED)([example | {"label": label} for label in (True, False)])
    assert batch["label"].dtype is torch.bool
    assert batch["label"].tolist() == [True, False]
    assert batch["targets"].tolist() == [[2], [4], [2], [4]]
    assert PreferenceCollator(0, wanted=PAIRS_WITH_MARGIN)([example | {"margin": 0.5}])["margin"].tolist() == [0.5]
    assert "margin" not in PreferenceCollator(0, wanted=PAIRS_WITH_MARGIN)([example])


def test_what_a_reference_said_stands_at_its_tokens():
    example = {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}
    example |= {"ref_chosen_logps": [-1.0, -2.0], "ref_rejected_logps": [-3.0]}
    assert PreferenceCollator(0)([example])["ref_logps"].tolist() == [[-1, -2], [-3, 0]]
    ranked = {"prompt_ids": [1], "completions_ids": [[2, 3], [4]], "ref_completions_logps": [[-1.0, -2.0], [-3.0]]}
    assert PreferenceCollator(0, wanted=RANKED)([ranked])["ref_logps"].tolist() == [[-1, -2], [-3, 0]]


def some_examples(wanted, rng):
    def ids(least):
        return [rng.randrange(400) for _ in range(rng.randint(least, 9))]

    def example():
        prompt = ids(0)
        least = 1 if prompt else 2
        if wanted.ranked:
            return {"prompt_ids": prompt, "completions_ids": [ids(least) for _ in range(rng.randint(2, 4))]}
        return {"prompt_ids": prompt} | {f"{side}_ids": ids(least) for side in wanted.sides} | {"label": True}

    return [example() for _ in range(rng.randint(1, 4))]


@pytest.mark.parametrize("name", FORMATS)
def test_packed_and_padded_batches_predict_the_same(tiny_llama, name):
    use_packed_attention(tiny_llama)
    wanted, rng = FORMATS[name], random.Random(0)
    for multiple in (1, 8, 1, 1):
        examples = some_examples(wanted, rng)
        packed, padded = (PreferenceCollator(0, layout, wanted, multiple)(examples) for layout in ("packed", "padded"))
        for tensor in ("targets", "completion_mask"):
            assert torch.equal(packed[tensor], padded[tensor])
        assert packed["examples"] == padded["examples"]
        mask = packed["completion_mask"].bool()
        with torch.no_grad():
            both = [logps(tiny_llama, batch).logps[mask] for batch in (packed, padded)]
        torch.testing.assert_close(*both, atol=1e-5, rtol=0)
        last = [batch["input_ids"].view(-1)[batch["ends"]] for batch in (packed, padded)]
        assert torch.equal(*last)  # the end of a row is its last token, in either layout
        sides = [f"{side}_ids" for side in wanted.sides]
        ids = [row for e in examples for side in sides for row in (e[side] if wanted.ranked else [e[side]])]
        assert last[0].tolist() == [row[-1] for row in ids]
        assert packed["num_tokens"] <= padded["num_tokens"]
