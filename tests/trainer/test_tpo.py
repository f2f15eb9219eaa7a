"""TPO: a pair without a reference policy, and the likelihood of a third completion."""

import math

import pytest
import torch
from datasets import Dataset

from strop.losses.preference import Pairs
from strop.trainer.tpo import TPOConfig, TPOTrainer

ROWS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green.", "reference": " Blue."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot.", "reference": " Ice is cold."},
        {
            "prompt": "How many legs?",
            "chosen": " Eight legs.",
            "rejected": " Six.",
            "reference": " It has eight.",
        },
        {"prompt": "Is fire cold?", "chosen": " Fire is hot.", "rejected": " Yes.", "reference": " No, fire is hot."},
    ]
)
PAIR = Pairs(*(torch.tensor([x]).double() for x in (-4.0, -6.4, 4, 2)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"beta": 0.1}, math.log1p(math.exp(-0.24))),
        ({"beta": 2.0, "loss_type": "tpo-l", "tpo_l_gamma": 1.0}, 0.032828),  # averages -1 and -3.2
        ({"beta": 0.1, "loss_type": "hinge"}, 0.76),
    ],
)
def test_losses_by_hand(train, config, expected):
    trainer = train(TPOTrainer, ROWS, max_steps=0, **config).trainer
    assert trainer.pair_losses(trainer.rewards(PAIR)).item() == pytest.approx(expected, abs=1e-6)


def test_every_loss_has_one_gradient(train, assert_one_gradient):
    trainer = train(TPOTrainer, ROWS, max_steps=0).trainer
    for trainer.args.loss_type in ("sigmoid", "hinge", "ipo", "tpo-l"):
        assert_one_gradient(trainer)


def test_the_likelihood_is_that_of_the_reference(train, tiny_llama):
    run = train(TPOTrainer, ROWS, max_steps=1, tpo_alpha=0.5, beta=1e-9)
    total, count = 0.0, 0
    for row in run.trainer.train_dataset:
        ids = torch.tensor([row["prompt_ids"] + row["reference_ids"]])
        own = tiny_llama(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        total -= own[len(row["prompt_ids"]) - 1 :].sum().item()
        count += len(row["reference_ids"])
    assert run.logs[0]["nll_loss"] == pytest.approx(total / count, rel=1e-5)
    assert run.logs[0]["loss"] == pytest.approx(math.log(2) + 0.5 * total / count, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tpo_l_gamma": 1.0}, "tpo_l_gamma=1.0 would have no effect with loss_type='sigmoid'"),
        ({"loss_type": "simpo"}, "choose one of sigmoid, hinge, ipo, tpo-l"),
        ({"tpo_alpha": -1.0}, "tpo_alpha=-1.0 is out of range"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        TPOConfig(str(tmp_path), use_cpu=True, **options)


def test_rows_without_a_reference_are_refused(train):
    with pytest.raises(ValueError, match="reference"):
        train(TPOTrainer, ROWS.remove_columns("reference"), max_steps=0)
