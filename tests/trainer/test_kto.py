"""KTO: one baseline a step, whatever its batches; classes that are absent leave no trace."""

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.trainer.kto import KTOConfig, KTOTrainer, tell_imbalance
from strop.trainer.labelled import Labelled

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = json.loads((GOLDENS / "labelled_runs.json").read_text())["kto"]
ROWS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "completion": " The sky is blue.", "label": True},
        {"prompt": "What is the sky?", "completion": " Green.", "label": False},
        {"prompt": "Is ice hot?", "completion": " No.", "label": True},
        {"prompt": "How many legs has a spider?", "completion": " Six, as I was told.", "label": False},
    ]
)
PAIRS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot and fire is cold."},
    ]
)
LOSSES = ["kto", "apo_zero_unpaired"]


def rows_of(*pairs: tuple[float, bool], mismatched: float = 0.0) -> Labelled:
    log_ratios, labels = zip(*pairs, strict=True)
    ratio = torch.tensor(log_ratios, dtype=torch.float64)
    return Labelled(ratio, torch.tensor(labels), torch.full_like(ratio, mismatched))


@pytest.mark.parametrize(
    ("rows", "config", "expected"),
    [
        (rows_of((0.5, True)), {}, [0.487503]),  # 1 - sigmoid(0.1 * 0.5)
        (rows_of((0.5, True), mismatched=0.3), {}, [0.495000]),
        (rows_of((0.5, True), mismatched=-0.3), {}, [0.487503]),  # a negative estimate of a KL counts as 0
        (rows_of((0.5, True), (0.5, False)), {"desirable_weight": 2.0}, [0.975005, 0.512497]),
        (rows_of((0.5, True), (0.5, False)), {"undesirable_weight": 0.5}, [0.487503, 0.256249]),
    ],
)
def test_losses_by_hand(train, rows, config, expected):
    trainer = train(KTOTrainer, ROWS, max_steps=0, **config).trainer
    torch.testing.assert_close(trainer.row_losses(rows), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_first_loss_is_one_half(train, loss_type):
    first = train(KTOTrainer, ROWS, max_steps=1, loss_type=loss_type).logs[0]
    assert first["loss"] == pytest.approx(0.5, abs=1e-6)
    assert first.get("kl", 0.0) == pytest.approx(0.0, abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert ("kl" in first) == (loss_type == "kto")


@pytest.fixture
def moved(tiny_llama):
    """A policy that is no longer its reference, whose mismatched log-ratios have a positive mean."""
    policy = copy.deepcopy(tiny_llama)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def test_how_a_step_is_computed_changes_nothing(assert_cuts_change_nothing, tiny_llama, moved):
    others = [
        {"precompute_ref_log_probs": True},
        {"layout": "padded", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ]
    options = {"model": moved, "trainer_options": {"ref_model": tiny_llama}}
    assert assert_cuts_change_nothing(KTOTrainer, ROWS, *others, **options).logs[0]["kl"] > 0.01


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_step_has_one_gradient(train, assert_one_gradient, tiny_llama, moved, loss_type):
    options = {"ref_model": tiny_llama}
    assert_one_gradient(train(KTOTrainer, ROWS, moved, options, max_steps=0, loss_type=loss_type, beta=1.0).trainer)


def test_lora_and_micro_batches(train):
    from peft import LoraConfig

    def lora(**options):
        peft_config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"])
        return train(KTOTrainer, ROWS, trainer_options={"peft_config": peft_config}, max_steps=3, **options)

    whole = lora()
    assert whole.logs[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    lora(per_device_train_batch_size=2, gradient_accumulation_steps=2).assert_same(whole)


def test_a_prompt_is_computed_once_and_mismatched_rows_have_no_graph(train, moved):
    """Tokens of each forward pass of the policy that has a graph, and of those without."""
    seen: dict[bool, list[int]] = {True: [], False: []}

    def tokens(**options):
        run = train(KTOTrainer, ROWS, max_steps=0, activation_checkpointing=False, **options)
        for found in seen.values():
            found.clear()
        embedding = run.trainer.model.get_input_embeddings()
        embedding.register_forward_hook(lambda module, args, out: seen[torch.is_grad_enabled()].append(args[0].numel()))
        run.trainer.layout_guard.is_trusted = True
        run.trainer.args.max_steps = 1
        run.trainer.train()
        columns = run.trainer.train_dataset
        return [sum(map(len, columns[name])) for name in ("prompt_ids", "completion_ids", "mismatched_ids")]

    prompts, completions, mismatched = tokens()
    assert (sum(seen[True]), sum(seen[False])) == (prompts + completions + mismatched, 0)
    tokens(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert (sum(seen[True]), sum(seen[False])) == (prompts + completions, prompts + mismatched)


@pytest.mark.parametrize("label", [True, False])
def test_a_class_without_rows_is_absent(train, label):
    rows = ROWS.remove_columns("label").add_column("label", [label] * len(ROWS))
    present, absent = ("chosen", "rejected") if label else ("rejected", "chosen")
    for log in train(KTOTrainer, rows, per_device_train_batch_size=1, gradient_accumulation_steps=4).logs:
        assert {f"rewards/{present}", f"logps/{present}", "kl"} <= log.keys()
        assert not {f"rewards/{absent}", f"logps/{absent}", "rewards/margins"} & log.keys()
        assert all(value == value for value in log.values())


def test_pairs_are_two_rows_each(train):
    labelled = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in PAIRS
        for side in ("chosen", "rejected")
    ]
    options = {"train_sampling_strategy": "sequential"}
    train(KTOTrainer, PAIRS, **options).assert_same(train(KTOTrainer, Dataset.from_list(labelled), **options))


def test_evaluation_does_not_depend_on_its_batches(train, tiny_llama, moved):
    sets = {"a": ROWS, "b": PAIRS}
    options = {"ref_model": tiny_llama, "eval_dataset": sets}
    runs = [train(KTOTrainer, ROWS, moved, options, max_steps=0, per_device_eval_batch_size=size) for size in (1, 3, 8)]
    first, *others = [run.evaluate() for run in runs]
    for other in others:
        assert first == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert {"eval_a_loss", "eval_a_kl", "eval_b_rewards/margins"} <= first.keys()
    raw = runs[0].evaluate(ROWS, metric_key_prefix="eval_a")
    assert raw == pytest.approx({name: first[name] for name in raw}, rel=1e-5)
    trained = train(KTOTrainer, ROWS, moved, {"ref_model": tiny_llama}, max_steps=1).logs[0]
    assert {name: raw[f"eval_a_{name}"] for name in ("loss", "kl")} == pytest.approx(
        {name: trained[name] for name in ("loss", "kl")}, rel=1e-4
    )


def test_predictions_are_rewards_with_their_labels(train):
    run = train(KTOTrainer, ROWS, max_steps=0)
    output = run.trainer.predict(ROWS)
    assert output.predictions.shape == (len(ROWS),)
    assert abs(output.predictions).max() < 1e-5
    assert output.label_ids.tolist() == ROWS["label"][:]


def test_two_ranks_are_one(train, on_two_ranks, tiny_llama, moved):
    """Five rows in steps of four: in the second step one rank has nothing to learn."""
    rows = Dataset.from_list([*ROWS, {"prompt": "Is fire cold?", "completion": " Yes.", "label": False}])

    def results(**options):
        run = train(
            KTOTrainer,
            rows,
            model=moved,
            trainer_options={"ref_model": tiny_llama, "eval_dataset": rows},
            per_device_eval_batch_size=2,
            **options,
        )
        return {"logs": run.logs, "weights": run.weights, "evaluation": run.evaluate()}

    alone = results(per_device_train_batch_size=4)
    for rank in on_two_ranks(lambda: results(per_device_train_batch_size=2)):
        for one, other in zip([*rank["logs"], rank["evaluation"]], [*alone["logs"], alone["evaluation"]], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_a_resumed_run_is_the_run(train, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "logging_steps": 3}
    whole = train(KTOTrainer, ROWS, output_dir=str(tmp_path / "whole"), **options)
    again = train(
        KTOTrainer, ROWS, output_dir=str(tmp_path / "whole"), resume=f"{tmp_path}/whole/checkpoint-2", **options
    )
    again.assert_same(whole, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_step_equals_trl(case, tmp_path):
    args = KTOConfig(
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
    trainer = KTOTrainer(
        AutoModelForCausalLM.from_pretrained(GOLDENS / "tiny_llama"),
        AutoModelForCausalLM.from_pretrained(GOLDENS / "tiny_llama_ref"),
        args,
        train_dataset=Dataset.from_dict(case["rows"]),
        processing_class=AutoTokenizer.from_pretrained(GOLDENS / "tiny_llama"),
    )
    trainer.train()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    expected = case["log"]
    if case["config"].get("loss_type"):
        assert expected.pop("kl") == 0  # nothing is estimated there, and we log nothing
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_imbalance_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        tell_imbalance([True] * 4 + [False] * 3, 1.0, 1.0)  # 4 / 3 is 1.33
        tell_imbalance([True, True], 1.0, 1.0)
        tell_imbalance([True, False], 1.0, 0.0)
        assert not caplog.messages
        tell_imbalance([True] + [False] * 3, 1.0, 1.0)
    assert "desirable_weight between 3 and 3.99" in caplog.text


def test_losses_of_batches_are_refused(train):
    """Their baseline is that of the whole set."""
    with pytest.raises(ValueError, match="this loss is one of the whole set"):
        train(KTOTrainer, ROWS, include_for_metrics=["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "foo"}, "loss_type='foo' is unknown; choose one of kto, apo_zero_unpaired"),
        ({"beta": 0}, "beta=0 is out of range"),
        ({"desirable_weight": -1}, "desirable_weight=-1 is out of range"),
        ({"generate_during_eval": True}, "LogCompletionsCallback"),
        ({"ref_model_sync_steps": 5}, "would have no effect with sync_ref_model=False"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        KTOConfig(str(tmp_path), use_cpu=True, **options)
