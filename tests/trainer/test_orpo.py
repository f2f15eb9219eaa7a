"""ORPO: likelihood of the chosen completions and the log odds ratio."""

import pytest
import torch
from datasets import Dataset

from strop.losses.preference import Pairs
from strop.trainer.orpo import ORPOConfig, ORPOTrainer

ROWS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot and fire is cold."},
        {"prompt": "How many legs has a spider?", "chosen": " A spider has eight legs.", "rejected": " Six."},
        {"prompt": "Is fire cold?", "chosen": " Fire is hot.", "rejected": " Yes."},
    ]
)


def test_the_loss_by_hand(train):
    """Averages -1 and -3.2: log odds -0.541325 and -3.158371, so 1 + 0.1 * 0.070473."""
    trainer = train(ORPOTrainer, ROWS, max_steps=0, beta=0.1).trainer
    pair = Pairs(*(torch.tensor([x]).double() for x in (-4.0, -6.4, 4, 2)))
    found = trainer.pair_losses(trainer.rewards(pair)) - trainer.nll_weight * pair.chosen / pair.chosen_length
    assert found.item() == pytest.approx(1.007047, abs=1e-6)


def test_a_step_has_one_gradient(train, assert_one_gradient):
    assert_one_gradient(train(ORPOTrainer, ROWS, max_steps=0).trainer)


def test_the_likelihood_is_that_of_the_chosen_without_their_prompts(train, tiny_llama):
    run = train(ORPOTrainer, ROWS, max_steps=1)
    total, count = 0.0, 0
    for row in run.trainer.train_dataset:
        ids = torch.tensor([row["prompt_ids"] + row["chosen_ids"]])
        own = tiny_llama(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        total -= own[len(row["prompt_ids"]) - 1 :].sum().item()
        count += len(row["chosen_ids"])
    log = run.logs[0]
    assert log["nll_loss"] == pytest.approx(total / count, rel=1e-5)
    assert log["loss"] == pytest.approx(log["nll_loss"] - 0.1 * log["log_odds_ratio"], rel=1e-6)


def test_settings_that_make_no_sense_are_refused(tmp_path):
    for options, message in (({"beta": -1.0}, "beta=-1.0 is out of range"), ({"padding_value": 0}, "pad_token")):
        with pytest.raises(ValueError, match=message):
            ORPOConfig(str(tmp_path), use_cpu=True, **options)
