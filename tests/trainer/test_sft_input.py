"""What SFTTrainer refuses or says before it trains, and what it makes of streams, packs and models afterwards."""

import json
import logging
import warnings

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model

from strop import SFTConfig, SFTTrainer

ROWS = [{"prompt": "What is the sky?", "completion": f" {word}."} for word in ("Blue", "The sky is blue", "Red")]
TOKENS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 3


def trainer_of(model, tokenizer, folder, rows=ROWS, trainer_options=None, **options) -> SFTTrainer:
    defaults = {"use_cpu": True, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True, "optim": "sgd"}
    return SFTTrainer(
        model,
        SFTConfig(output_dir=str(folder), **defaults | options),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        processing_class=tokenizer,
        **trainer_options or {},
    )


def stream_of(rows) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def padding_collator(examples):
    width = max(len(example["input_ids"]) for example in examples)
    return {
        name: torch.tensor([row[name] + [value] * (width - len(row[name])) for row in examples])
        for name, value in (("input_ids", 0), ("labels", -100))
    }


def zero(*args, **kwargs):
    return torch.zeros(())


COLLATOR = {"data_collator": padding_collator}
LOSS = {"compute_loss_func": zero}


@pytest.mark.parametrize(
    ("rows", "given", "options", "words"),
    [
        (ROWS, COLLATOR, {"layout": "packed"}, "layout='packed' would have no effect with a data_collator"),
        (ROWS, COLLATOR, {"padding_free": True}, "padding_free=True would have no effect"),
        (ROWS, COLLATOR, {"pad_to_multiple_of": 8}, "pad_to_multiple_of=8 would have no effect"),
        (ROWS, COLLATOR, {"packing": True}, "rows would read each other"),
        (ROWS, LOSS, {"loss_type": "dft"}, "loss_type='dft' would have no effect with a compute_loss_func"),
        (ROWS, LOSS, {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 would have no effect"),
        (
            TOKENS,
            {"formatting_func": str},
            {"dataset_kwargs": {"skip_prepare_dataset": True}},
            "formatting_func would have no effect",
        ),
        (stream_of(ROWS), {}, {"dataset_num_proc": 2}, "dataset_num_proc=2 would have no effect"),
        (stream_of(ROWS), {}, {"train_sampling_strategy": "group_by_length"}, "can't be sorted"),
        (ROWS, {}, {"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
        (
            [*TOKENS, {"input_ids": [5, 400], "labels": [5, 6]}],
            {},
            {},
            "prepared row 3 of the train .* 400 in input_ids",
        ),
        ([{"input_ids": [5, 6], "labels": [-100, -1]}], {}, {}, "prepared row 0 .* -1 in labels.*from 0 to 399"),
        ([{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}], {}, {}, "train row 0: its attention_mask has zeros"),
    ],
)
def test_what_would_have_no_effect_or_a_wrong_one_is_refused(
    tiny_llama, bpe_tokenizer, tmp_path, rows, given, options, words
):
    with pytest.raises(ValueError, match=words):
        trainer_of(tiny_llama, bpe_tokenizer, tmp_path, rows, given, **options)


def test_a_processing_class_is_a_tokenizer(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="processing_class is a str, not a tokenizer"):
        trainer_of(tiny_llama, "gpt2", tmp_path)


def test_an_optimizer_must_hold_what_is_trained(tiny_llama, bpe_tokenizer, tmp_path):
    """The adapter comes after the optimizer, and freezes all that this one holds."""
    given = {
        "optimizers": (torch.optim.SGD(tiny_llama.parameters(), lr=0.1), None),
        "peft_config": LoraConfig(r=2, target_modules=["q_proj"]),
    }
    with pytest.raises(ValueError, match=r"holds no weight that is trained here.*optimizer_cls_and_kwargs"):
        trainer_of(tiny_llama, bpe_tokenizer, tmp_path, trainer_options=given)


def test_a_users_loss_is_one_number_a_token(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, loss_type=lambda logps: -logps.mean())
    with pytest.raises(ValueError, match=r"returned \(\) for log-probabilities of shape \(3, \d+\)"):
        trainer.train()


def test_a_run_without_a_batch_is_no_success(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, dataloader_drop_last=True, per_device_train_batch_size=4)
    with pytest.raises(ValueError, match=r"nothing was trained.*3 rows in.*drops batches of fewer than 4 rows"):
        trainer.train()


def test_a_stream_that_drops_all_its_rows_is_no_success(tiny_llama, bpe_tokenizer, tmp_path):
    """More rows than are tried at once, fewer than a stream is given up after."""
    rows = stream_of([{"text": "The sky is blue. " * 9}] * 200)
    trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, rows, max_length=8, overlong="drop")
    with pytest.raises(ValueError, match=r"nothing was trained.*200 rows in, 0 out, 200 dropped as too long"):
        trainer.train()


def test_labels_that_train_nothing_are_told_once(tiny_llama, bpe_tokenizer, tmp_path, caplog):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 4
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_steps": 3}
    trainer_of(tiny_llama, bpe_tokenizer, tmp_path, rows, **options).train()
    assert caplog.messages.count("step 1 trains nothing: all its labels are -100") == 1
    assert sum("trains nothing" in message for message in caplog.messages) == 1


def test_rows_longer_than_the_model_are_told(tiny_llama, bpe_tokenizer, tmp_path, caplog):
    tiny_llama.config.max_position_embeddings = 512
    rows = [{"input_ids": [5] * 600}]
    trainer_of(tiny_llama, bpe_tokenizer, tmp_path, rows)
    assert "train: rows have up to 600 tokens, but the model was made for 512" in caplog.text
    caplog.clear()
    trainer_of(tiny_llama, bpe_tokenizer, tmp_path, rows, max_length=512)
    assert "was made for" not in caplog.text


def test_precision_and_data_are_told_at_the_start(tiny_llama, bpe_tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "strop"):
        trainer_of(tiny_llama, bpe_tokenizer, tmp_path)
    assert any(
        message.startswith("weights float32, autocast off, optimizer state float32") for message in caplog.messages
    )
    assert any(message.startswith("train: 3 rows in, 3 out") for message in caplog.messages)


# Evaluation


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_is_evaluated_as_a_set_is(tiny_llama, bpe_tokenizer, tmp_path, packing):
    """Also by a trainer that knew of no stream when it was made."""
    trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, packing=packing, max_length=32)
    of_set, of_stream = trainer.evaluate(ROWS * 3), trainer.evaluate(stream_of(ROWS * 3))
    assert of_stream["eval_loss"] == pytest.approx(of_set["eval_loss"], rel=1e-6)
    assert of_stream["eval_entropy"] == pytest.approx(of_set["eval_entropy"], rel=1e-6)


def test_a_stream_is_evaluated_in_training(tiny_llama, bpe_tokenizer, tmp_path):
    given = {"eval_dataset": stream_of(ROWS)}
    trainer = trainer_of(
        tiny_llama, bpe_tokenizer, tmp_path, trainer_options=given, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert [log["step"] for log in trainer.state.log_history if "eval_loss" in log] == [1]


@pytest.mark.parametrize("wants_logits", [False, True])
def test_predictions_of_packs_hold_every_row(tiny_llama, bpe_tokenizer, tmp_path, wants_logits):
    """One line a pack, its rows one behind the other: nothing is lost, and the accuracy is the one that is logged."""
    given = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)} if wants_logits else {}
    trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, ROWS * 3, given, packing=True, max_length=64)
    predictions, labels, metrics = trainer.predict(ROWS * 3)
    packs = trainer._prepared(ROWS * 3, "test", bpe_tokenizer, trainer.args)
    assert len(labels) == len(packs) < 9
    if wants_logits:  # those predict the next token
        predictions, labels = predictions[:, :-1], labels[:, 1:]
    trained = labels != -100
    assert trained.sum() == sum(label != -100 for row in packs for label in row["labels"])
    assert (predictions == labels)[trained].mean() == pytest.approx(metrics["test_mean_token_accuracy"])


def test_logits_for_metrics_have_one_line_a_row(tiny_llama, bpe_tokenizer, tmp_path):
    shapes = []

    def preprocess(logits, labels):
        shapes.append((tuple(logits.shape), tuple(labels.shape)))
        return logits.argmax(-1)

    given = {"preprocess_logits_for_metrics": preprocess}
    trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, trainer_options=given)
    trainer.predict(ROWS)
    width = max(len(row["input_ids"]) for row in trainer.train_dataset)
    assert shapes == [((3, width, 400), (3, width))]


def test_losses_reach_the_metrics_that_ask_for_them(tiny_llama, bpe_tokenizer, tmp_path):
    given = {"compute_metrics": lambda prediction: {"read": float(prediction.losses.mean())}}
    trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, trainer_options=given, include_for_metrics=["loss"])
    metrics = trainer.evaluate(ROWS)
    assert metrics["eval_read"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


# What is left behind


def test_the_cache_is_off_in_training_only(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    assert tiny_llama.config.use_cache is True
    assert json.loads((tmp_path / "checkpoint-1" / "config.json").read_text())["use_cache"] is True


def test_a_learning_rate_that_a_resumed_run_does_not_take_is_told(tiny_llama, bpe_tokenizer, tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    trainer_of(tiny_llama, bpe_tokenizer, tmp_path, learning_rate=0.5, **options).train()
    for rate, is_told in ((0.5, False), (0.1, True)):
        resumed = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, learning_rate=rate, **options | {"max_steps": 2})
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert ("learning_rate=0.1 has no effect: the run goes on at its checkpoint's, 0.5" in caplog.text) == is_told


def test_an_adapter_is_put_on_without_warnings(tiny_llama, bpe_tokenizer, tmp_path):
    given = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        trainer = trainer_of(tiny_llama, bpe_tokenizer, tmp_path, trainer_options=given)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # as long as peft does that
        get_peft_model(trainer.model.get_base_model(), LoraConfig(r=2, target_modules=["q_proj"]))
