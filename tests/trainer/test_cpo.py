"""CPO and SimPO: the loss that is asked for, likelihood per token of the step, nothing that depends on batches."""

import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.losses.preference import Pairs
from strop.trainer.cpo import CPOConfig, CPOTrainer, SimPOConfig, SimPOTrainer
from strop.trainer.orpo import ORPOTrainer
from strop.trainer.tpo import TPOTrainer

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = json.loads((GOLDENS / "reference_free_runs.json").read_text())
TRAINERS = {cls.__name__: cls for cls in (CPOTrainer, ORPOTrainer, TPOTrainer)}
ROWS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot and fire is cold."},
        {"prompt": "How many legs has a spider?", "chosen": " A spider has eight legs.", "rejected": " Six."},
        {"prompt": "Is fire cold?", "chosen": " Fire is hot.", "rejected": " Yes."},
    ]
)
PAIR = Pairs(*(torch.tensor([x]).double() for x in (-4.0, -6.4, 4, 2)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, math.log1p(math.exp(-0.24)) + 1.0),  # margin 2.4 times beta 0.1, and 4 nats over 4 tokens
        ({"label_smoothing": 0.1, "cpo_alpha": 0.0}, math.log1p(math.exp(-0.24)) + 0.024),
        ({"loss_type": "hinge", "cpo_alpha": 0.5}, 0.76 + 0.5),
        ({"loss_type": "ipo", "cpo_alpha": 0.0}, (2.2 - 5) ** 2),  # averages -1 and -3.2
        ({"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}, 0.032828),
        ({"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 1.0}, 1.032828),
        #  rewards 1 - e and 1 - e^3.2 with alpha 1
        ({"loss_type": "alphapo", "alpha": 1.0, "simpo_gamma": 0.0}, math.log1p(math.exp(-0.1 * (24.53253 - math.e)))),
    ],
)
def test_losses_by_hand(train, config, expected):
    trainer = train(CPOTrainer, ROWS, max_steps=0, **config).trainer
    nll = -PAIR.chosen / PAIR.chosen_length
    found = trainer.pair_losses(trainer.rewards(PAIR)) + trainer.nll_weight * nll
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_simpo_is_the_papers(train):
    trainer = train(SimPOTrainer, ROWS, max_steps=0).trainer
    assert (trainer.args.beta, trainer.args.simpo_gamma, trainer.nll_weight) == (2.0, 1.0, 0.0)
    assert trainer.pair_losses(trainer.rewards(PAIR)).item() == pytest.approx(0.032828, abs=1e-6)
    with pytest.raises(ValueError, match="loss_type='sigmoid' is unknown; choose one of simpo, alphapo"):
        SimPOConfig(use_cpu=True, loss_type="sigmoid")


def test_how_a_step_is_computed_changes_nothing(assert_cuts_change_nothing):
    whole = assert_cuts_change_nothing(CPOTrainer, ROWS, learning_rate=0.01)
    log, chosen = whole.logs[0], whole.trainer.train_dataset["chosen_ids"]
    assert log["nll_loss"] == pytest.approx(-4 * log["logps/chosen"] / sum(map(len, chosen)), rel=1e-5)


def test_every_loss_has_one_gradient(train, assert_one_gradient):
    trainer = train(CPOTrainer, ROWS, max_steps=0, alpha=0.25).trainer
    for trainer.args.loss_type in ("sigmoid", "hinge", "ipo", "simpo", "alphapo"):
        for trainer.args.cpo_alpha in (0.0, 0.5):
            assert_one_gradient(trainer)


def test_lora_and_micro_batches(train):
    from peft import LoraConfig

    peft_config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"])
    runs = [
        train(CPOTrainer, ROWS, trainer_options={"peft_config": peft_config}, max_steps=3, **options)
        for options in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2})
    ]
    runs[1].assert_same(runs[0])


def test_two_ranks_are_one(train, on_two_ranks):
    """Five pairs in steps of four: in the second step one rank has nothing to learn."""
    rows = Dataset.from_list([*ROWS, {"prompt": "Is it?", "chosen": " It is.", "rejected": " Is it not?"}])

    def results(size):
        options = {"per_device_train_batch_size": size, "per_device_eval_batch_size": 2}
        run = train(CPOTrainer, rows, trainer_options={"eval_dataset": rows}, **options)
        return {"logs": [*run.logs, run.evaluate()], "weights": run.weights, "predicted": run.trainer.predict(rows)[0]}

    alone = results(4)
    for rank in on_two_ranks(lambda: {**results(2), "predicted": None}):
        for one, other in zip(rank["logs"], alone["logs"], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)
    assert alone["predicted"].shape == (5, 2)


def test_a_resumed_run_is_the_run(train, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "logging_steps": 3}
    whole = train(CPOTrainer, ROWS, **options)
    again = train(CPOTrainer, ROWS, resume=f"{tmp_path}/run/checkpoint-2", **options)
    again.assert_same(whole, rtol=0, atol=0)


def test_evaluation_does_not_depend_on_its_batches(train):
    options = {"eval_dataset": {"a": ROWS, "b": ROWS.select([0])}}
    runs = [train(CPOTrainer, ROWS, trainer_options=options, max_steps=0, per_device_eval_batch_size=n) for n in (1, 3)]
    first, second = (run.evaluate() for run in runs)
    assert first == pytest.approx(second, rel=1e-5)
    raw = runs[0].evaluate(ROWS, metric_key_prefix="eval_a")
    assert raw == pytest.approx({name: first[name] for name in raw}, rel=1e-5)
    predicted = runs[0].trainer.predict(ROWS).predictions
    assert predicted.mean(0).tolist() == pytest.approx([first[f"eval_a_rewards/{s}"] for s in ("chosen", "rejected")])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_step_equals_trl(case, tmp_path):
    trainer_class = TRAINERS[case["trainer"]]
    args = trainer_class.config_class(
        output_dir=str(tmp_path),
        use_cpu=True,
        logging_steps=1,
        max_steps=1,
        save_strategy="no",
        lr_scheduler_type="constant",
        learning_rate=1e-2,
        max_grad_norm=1e9,
        optim="sgd",
        disable_tqdm=True,
        **case["config"],
    )
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(GOLDENS / "tiny_llama"),
        args,
        train_dataset=Dataset.from_dict(case["rows"]),
        processing_class=AutoTokenizer.from_pretrained(GOLDENS / "tiny_llama"),
    )
    trainer.train()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    left_out = {"mean_token_accuracy"}
    if case["trainer"] == "ORPOTrainer":
        left_out |= {"loss", "nll_loss", "grad_norm"}  # TRL's likelihood term includes the prompt's tokens
        assert log["loss"] == pytest.approx(log["nll_loss"] - 0.1 * log["log_odds_ratio"], rel=1e-6)
    if trainer.nll_weight == 0:
        left_out |= {"nll_loss"}  # TRL says 0 where the term has no weight; we say what it is
    expected = {name: value for name, value in case["log"].items() if name not in left_out}
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss_type": "kto_pair"},
            "loss_type='kto_pair' is unknown; choose one of sigmoid, hinge, ipo, simpo, alphapo",
        ),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing=0.1 would have no effect with loss_type='ipo'"),
        ({"simpo_gamma": 1.0}, "simpo_gamma=1.0 would have no effect with loss_type='sigmoid'"),
        ({"beta": 0.0}, "beta=0.0 is out of range"),
        ({"cpo_alpha": -1.0}, "cpo_alpha=-1.0 is out of range"),
        ({"generate_during_eval": True}, "LogCompletionsCallback"),
        ({"is_encoder_decoder": True}, "decoder-only models are trained here"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        CPOConfig(str(tmp_path), use_cpu=True, **options)


def test_encoder_decoder_models_are_refused(train):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=400, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder and a decoder"):
        train(CPOTrainer, ROWS, model=T5ForConditionalGeneration(config), max_steps=0)


def test_no_config_is_the_default_one(tiny_folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    trainer = CPOTrainer(str(tiny_folder), train_dataset=ROWS)
    assert trainer.args.output_dir == "tiny-CPO"
    assert isinstance(trainer.args, CPOConfig)
