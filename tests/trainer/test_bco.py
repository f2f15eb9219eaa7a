"""BCO: a running mean that moves once a step, survives a restart, and rows weighed by their prompts."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from strop.trainer.bco import BCOConfig, BCOTrainer, RunningMean
from strop.trainer.density_ratio import fit, sample
from strop.trainer.labelled import Labelled

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "labelled_runs.json").read_text())["bco"]
ROWS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "completion": " The sky is blue.", "label": True},
        {"prompt": "What is the sky?", "completion": " Green.", "label": False},
        {"prompt": "Is ice hot?", "completion": " No.", "label": True},
        {"prompt": "How many legs has a spider?", "completion": " Six, as I was told.", "label": False},
    ]
)


def bag_of_bytes(input_ids, attention_mask):
    """(B, 3): how often ids of three residues stand in a prompt."""
    return torch.stack([((input_ids % 3 == i) * attention_mask).sum(-1) for i in range(3)], -1).float()


@pytest.fixture
def moved(tiny_llama):
    """A policy that is no longer its reference."""
    policy = copy.deepcopy(tiny_llama)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def test_three_steps_equal_trl(train):
    trainer = train(BCOTrainer, ROWS, max_steps=0, beta=GOLDEN["beta"]).trainer
    trainer.model.train()
    for step in GOLDEN["steps"]:
        ratios = [
            torch.tensor(step[f"policy_{side}_logps"]).double() - torch.tensor(step[f"ref_{side}_logps"]).double()
            for side in ("chosen", "rejected")
        ]
        rows = Labelled(torch.cat(ratios), torch.tensor([True] * len(ratios[0]) + [False] * len(ratios[1])))
        losses = trainer.row_losses(rows)
        torch.testing.assert_close(losses, torch.tensor(step["losses"]).double(), rtol=1e-6, atol=1e-7)
        assert trainer.args.beta * trainer.baseline == pytest.approx(step["delta"], rel=1e-6)
        trainer.running.on_step_end(None, None, None)
    assert trainer.running.count == GOLDEN["steps"][-1]["running"]["count"]


def test_the_first_loss_is_ln_2_and_evaluation_moves_nothing(train):
    run = train(BCOTrainer, ROWS, trainer_options={"eval_dataset": ROWS}, max_steps=1)
    assert run.logs[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    before = run.trainer.running.mean, run.trainer.running.count
    assert before[1] == len(ROWS)
    assert run.evaluate()["eval_delta"] == pytest.approx(0.1 * before[0])
    assert (run.trainer.running.mean, run.trainer.running.count) == before


def test_how_a_step_is_computed_changes_nothing(assert_cuts_change_nothing, tiny_llama, moved):
    run = assert_cuts_change_nothing(BCOTrainer, ROWS, model=moved, trainer_options={"ref_model": tiny_llama})
    assert abs(run.logs[0]["delta"]) > 1e-3
    assert run.trainer.running.count == len(ROWS)


def test_a_step_has_one_gradient(train, assert_one_gradient, tiny_llama, moved):
    trainer = train(BCOTrainer, ROWS, moved, {"ref_model": tiny_llama}, max_steps=0, beta=1.0).trainer
    look_ahead = trainer.look_ahead

    def another_step(batches):
        trainer.running.next = None
        look_ahead(batches)

    trainer.look_ahead = another_step
    assert_one_gradient(trainer)


def test_two_ranks_are_one_and_keep_one_mean(train, on_two_ranks, tiny_llama, moved, bpe_tokenizer):
    rows = Dataset.from_list([*ROWS, {"prompt": "Is fire cold?", "completion": " Yes.", "label": False}])
    options = {"ref_model": tiny_llama, "eval_dataset": rows}
    options |= {"embedding_func": bag_of_bytes, "embedding_tokenizer": bpe_tokenizer}

    def results(size):
        run = train(BCOTrainer, rows, moved, options, per_device_train_batch_size=size, per_device_eval_batch_size=2)
        mean = {"mean": run.trainer.running.mean, "count": run.trainer.running.count}
        return {"logs": [*run.logs, run.evaluate(), mean], "weights": run.weights}

    alone = results(4)
    ranks = on_two_ranks(lambda: results(2))
    for rank in ranks:
        for one, other in zip(rank["logs"], alone["logs"], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)
    assert ranks[0]["logs"][-1] == ranks[1]["logs"][-1]


def test_a_resumed_run_is_the_run(train, tmp_path, bpe_tokenizer):
    embedding = {"embedding_func": bag_of_bytes, "embedding_tokenizer": bpe_tokenizer}
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 1}
    options |= {"gradient_accumulation_steps": 2, "logging_steps": 3, "trainer_options": embedding}
    whole = train(BCOTrainer, ROWS, **options)
    again = train(BCOTrainer, ROWS, resume=f"{tmp_path}/run/checkpoint-2", **options)
    again.assert_same(whole, rtol=0, atol=0)
    for name in ("mean", "count"):
        assert getattr(again.trainer.running, name) == getattr(whole.trainer.running, name)
    with pytest.raises(ValueError, match="the classifier of prompts differs from the checkpoint's"):
        train(BCOTrainer, ROWS.select([0, 1, 3]), resume=f"{tmp_path}/run/checkpoint-2", **options)


class TestDensityRatio:
    def test_the_classifier_is_where_its_gradient_is_zero(self):
        torch.manual_seed(0)
        vectors, labels = torch.randn(30, 4).double(), torch.arange(30) % 3 == 0
        classifier = fit(vectors, labels)
        #  balanced log-loss + |w|^2 / 2: rows of a class of n_c weigh 30 / (2 n_c), which is 1.5 and 0.75 here
        errors = torch.where(labels, 1.5, 0.75) * (classifier(vectors) - labels.double())
        torch.testing.assert_close(vectors.T @ errors + classifier.weight, torch.zeros(4).double(), rtol=0, atol=1e-6)
        assert errors.sum().abs() < 1e-6

    def test_rows_of_one_class_are_refused(self):
        with pytest.raises(ValueError, match="3 desirable and 0 undesirable"):
            fit(torch.ones(3, 2).double(), torch.ones(3, dtype=torch.bool))

    def test_a_sample_has_as_many_of_each_class(self):
        drawn = sample([True] * 8 + [False] * 3, 4, seed=0)
        assert sorted(drawn)[-3:] == [8, 9, 10]
        assert len(set(drawn)) == len(drawn) == 7

    def test_undesirable_rows_weigh_what_their_prompts_are_worth(self, train, bpe_tokenizer):
        embedding = {"embedding_func": bag_of_bytes, "embedding_tokenizer": bpe_tokenizer, "eval_dataset": ROWS}
        run = train(BCOTrainer, ROWS, trainer_options=embedding, max_steps=1, max_density_ratio=1.2)
        prompts = bpe_tokenizer(ROWS["prompt"][:], padding=True, return_tensors="pt")
        p = run.trainer.running.classifier(bag_of_bytes(prompts["input_ids"], prompts["attention_mask"]).double())
        expected = torch.where(torch.tensor(ROWS["label"][:]), 1.0, (p / (1 - p)).clamp(0.5, 1.2))
        found = torch.tensor(run.trainer.train_dataset["weight"][:])
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        assert found[[1, 3]].unique().numel() == 2
        assert run.logs[0]["loss"] == pytest.approx(math.log(2) * expected.mean().item(), rel=1e-5)
        raw = run.evaluate(ROWS, metric_key_prefix="eval")
        assert raw == pytest.approx(run.evaluate(), rel=1e-6)

    @pytest.mark.parametrize(
        ("config", "options", "message"),
        [
            ({"prompt_sample_size": 8}, {}, "prompt_sample_size=8 would have no effect with no embedding_func"),
            ({}, {"embedding_func": bag_of_bytes}, "embedding_func and embedding_tokenizer belong together"),
        ],
    )
    def test_what_lacks_its_counterpart_is_refused(self, train, config, options, message):
        with pytest.raises(ValueError, match=message):
            train(BCOTrainer, ROWS, trainer_options=options, max_steps=0, **config)


def test_rows_count_for_good_when_their_step_is_over():
    running = RunningMean()
    running.include(torch.tensor([1.0, 3.0]))
    running.on_step_end(None, None, None)
    running.include(torch.tensor([5.0]))
    assert running.next == (3.0, 3)
    assert (running.mean, running.count) == (2.0, 2)


def test_settings_that_make_no_sense_are_refused(tmp_path):
    for options, message in (
        ({"min_density_ratio": 2.0, "max_density_ratio": 1.0}, "max_density_ratio=1.0 is out of range"),
        ({"model_adapter_name": "x"}, "the model's active adapter is trained"),
    ):
        with pytest.raises(ValueError, match=message):
            BCOConfig(str(tmp_path), use_cpu=True, **options)
