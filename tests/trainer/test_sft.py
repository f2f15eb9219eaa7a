"""Laws of supervised fine-tuning: how a step is cut changes neither its loss, its gradient nor its metrics."""

import copy

import pytest
import torch
from datasets import Dataset

from strop import SFTConfig, SFTTrainer
from strop.data.collate import flat_labels

WORDS = [
    "the",
    "sky",
    "is",
    "blue",
    "ice",
    "cold",
    "fire",
    "hot",
    "and",
    "water",
    "wet",
    "how",
    "many",
    "legs",
    "eight",
]


def rows(lengths) -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def words(count):
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator))

    return Dataset.from_list([{"prompt": words(3), "completion": " " + words(n)} for n in lengths])


RAGGED = rows([2, 9, 4, 14, 1, 6, 3, 11])


def config(tmp_path, **options) -> SFTConfig:
    defaults = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "activation_checkpointing": False,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    return SFTConfig(**defaults | options)


def train(model, tokenizer, data, tmp_path, trainer_options=None, **options) -> SFTTrainer:
    trainer = SFTTrainer(
        model=copy.deepcopy(model),
        args=config(tmp_path, **options),
        train_dataset=data,
        processing_class=tokenizer,
        **trainer_options or {},
    )
    trainer.train()
    return trainer


def logs(trainer, *names):
    names = names or ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    return [[log[name] for name in names] for log in trainer.state.log_history if "loss" in log]


def assert_same_run(one, other, rtol=1e-5):
    torch.testing.assert_close(torch.tensor(logs(one)), torch.tensor(logs(other)), rtol=rtol, atol=1e-6)
    for (name, a), b in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", [{}, {"loss_type": "dft"}, {"label_smoothing_factor": 0.1}], ids=str)
@pytest.mark.parametrize(("batch", "accumulate"), [(2, 2), (1, 4)])
def test_micro_batches_are_one_batch(tiny_llama, bpe_tokenizer, tmp_path, batch, accumulate, options):
    whole = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, per_device_train_batch_size=4, **options)
    cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    assert_same_run(train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, **cut, **options), whole)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "padded"},
        {"layout": "padded", "pad_to_multiple_of": 16},
        {"pad_to_multiple_of": 16},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=str,
)
def test_layout_changes_nothing(tiny_llama, bpe_tokenizer, tmp_path, options):
    plain = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, per_device_train_batch_size=4)
    assert_same_run(train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, per_device_train_batch_size=4, **options), plain)


def test_packing_changes_nothing(tiny_llama, bpe_tokenizer, tmp_path):
    """All rows in one step: packed into rows of 32 tokens, or not packed, the step is the same."""
    loose = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, max_steps=1, per_device_train_batch_size=8)
    packed = train(
        tiny_llama,
        bpe_tokenizer,
        RAGGED,
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=8,
        packing=True,
        max_length=64,
    )
    assert 1 < len(packed.train_dataset) < 8
    assert_same_run(packed, loose)


def test_loss_by_hand(tiny_llama, bpe_tokenizer, tmp_path):
    """The step's loss is the sum over all completion tokens of -log p, over their number, from the model's plain
    logits."""
    trainer = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, per_device_train_batch_size=8, max_steps=1)
    total, count = 0.0, 0
    for row in trainer.train_dataset:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        logps = tiny_llama(ids).logits[0, :-1].log_softmax(-1)
        kept = labels[1:] != -100
        total -= logps[kept].gather(-1, labels[1:][kept][:, None]).sum().item()
        count += int(kept.sum())
    assert logs(trainer, "loss")[0][0] == pytest.approx(total / count, rel=1e-5)
    assert count == sum(label != -100 for row in trainer.train_dataset for label in row["labels"])


def test_one_completion_token_costs_its_own_log_probability(tiny_llama, bpe_tokenizer, tmp_path):
    data = Dataset.from_list([{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, -100, 8]}])
    trainer = train(tiny_llama, bpe_tokenizer, data, tmp_path, per_device_train_batch_size=1, max_steps=1)
    expected = -tiny_llama(torch.tensor([[5, 6, 7, 8]])).logits[0, 2].log_softmax(-1)[8].item()
    assert logs(trainer, "loss")[0][0] == pytest.approx(expected, rel=1e-5)


def test_a_row_without_completion_does_not_count(tiny_llama, bpe_tokenizer, tmp_path):
    """Prompt of 20 tokens at max_length 16 leaves nothing to train: the run is that of the other row alone."""
    long = {"input_ids": list(range(5, 29)), "completion_mask": [0] * 20 + [1] * 4}
    short = {"input_ids": list(range(30, 40)), "completion_mask": [0] * 6 + [1] * 4}
    options = {"per_device_train_batch_size": 2, "max_steps": 1, "max_length": 16}
    both = train(tiny_llama, bpe_tokenizer, Dataset.from_list([long, short]), tmp_path, **options)
    alone = train(tiny_llama, bpe_tokenizer, Dataset.from_list([short]), tmp_path, **options)
    assert_same_run(both, alone)


def test_nothing_left_to_train_is_an_error_before_the_model_is_loaded(bpe_tokenizer, tmp_path):
    data = Dataset.from_list([{"input_ids": list(range(24)), "completion_mask": [0] * 20 + [1] * 4}])
    with pytest.raises(ValueError, match="max_length"):
        SFTTrainer("no/such-model", config(tmp_path, max_length=16), train_dataset=data, processing_class=bpe_tokenizer)


def test_a_users_loss_sees_rows_whatever_the_packing(tiny_llama, bpe_tokenizer, tmp_path):
    def log_loss(logps):
        return -logps * 2

    options = {"per_device_train_batch_size": 4, "max_steps": 1}
    twice = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, loss_type=log_loss, **options)
    once = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, **options)
    assert logs(twice, "loss")[0][0] == pytest.approx(2 * logs(once, "loss")[0][0], rel=1e-6)


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_compute_loss_func_gets_logits_and_labels(tiny_llama, bpe_tokenizer, tmp_path, layout):
    def likelihood(outputs, labels, num_items_in_batch):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    with_function = train(
        tiny_llama, bpe_tokenizer, RAGGED, tmp_path, {"compute_loss_func": likelihood}, layout=layout, **options
    )
    plain = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, **options)
    torch.testing.assert_close(
        torch.tensor(logs(with_function, "loss", "grad_norm")), torch.tensor(logs(plain, "loss", "grad_norm"))
    )


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_flat_labels_stand_at_their_own_index(tiny_llama, bpe_tokenizer, tmp_path, layout):
    trainer = SFTTrainer(
        tiny_llama, config(tmp_path, layout=layout), train_dataset=RAGGED, processing_class=bpe_tokenizer
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    labels = flat_labels(batch)
    kept = labels != -100
    assert torch.equal(labels[kept], batch["input_ids"][kept])
    assert kept.sum() == batch["completion_mask"].sum()


def test_evaluation_does_not_depend_on_its_batches(tiny_llama, bpe_tokenizer, tmp_path):
    results = []
    for size in (1, 3, 8):
        args = config(tmp_path, per_device_eval_batch_size=size)
        trainer = SFTTrainer(
            tiny_llama, args, train_dataset=RAGGED, eval_dataset=RAGGED, processing_class=bpe_tokenizer
        )
        metrics = trainer.evaluate()
        results.append([metrics[f"eval_{name}"] for name in ("loss", "entropy", "mean_token_accuracy")])
    torch.testing.assert_close(torch.tensor(results[0]), torch.tensor(results[1]))
    torch.testing.assert_close(torch.tensor(results[0]), torch.tensor(results[2]))


def test_evaluate_takes_what_training_takes(tiny_llama, bpe_tokenizer, tmp_path):
    """Raw rows, prepared rows and a dictionary of either give the same numbers; packed or not."""
    for options in ({}, {"packing": True, "max_length": 64}):
        args = config(tmp_path, per_device_eval_batch_size=3, **options)
        trainer = SFTTrainer(
            tiny_llama, args, train_dataset=RAGGED, eval_dataset=RAGGED, processing_class=bpe_tokenizer
        )
        expected = trainer.evaluate()["eval_loss"]
        assert trainer.evaluate(RAGGED)["eval_loss"] == expected
        assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == expected
        assert (
            trainer.evaluate({"raw": RAGGED, "ready": trainer.eval_dataset}).items()
            >= {
                "eval_raw_loss": expected,
                "eval_ready_loss": expected,
            }.items()
        )


def test_dictionary_of_eval_sets_at_init(tiny_llama, bpe_tokenizer, tmp_path):
    sets = {"short": rows([2, 3]), "one": rows([5])}
    trainer = SFTTrainer(
        tiny_llama, config(tmp_path), train_dataset=RAGGED, eval_dataset=sets, processing_class=bpe_tokenizer
    )
    metrics = trainer.evaluate()
    assert {"eval_short_loss", "eval_one_loss"} <= metrics.keys()
    assert trainer.evaluate(sets["one"])["eval_loss"] == metrics["eval_one_loss"]


def test_evaluation_leaves_training_alone(tiny_llama, bpe_tokenizer, tmp_path):
    options = {"per_device_train_batch_size": 2, "max_steps": 3}
    alone = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, **options)
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    beside = train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path, {"eval_dataset": RAGGED}, **options, **evaluating)
    assert logs(beside) == logs(alone)


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_predict_gives_the_most_likely_ids_beside_the_labels(tiny_llama, bpe_tokenizer, tmp_path, layout):
    args = config(tmp_path, per_device_eval_batch_size=3, layout=layout)
    trainer = SFTTrainer(tiny_llama, args, train_dataset=RAGGED, processing_class=bpe_tokenizer)
    output = trainer.predict(RAGGED)
    kept = output.label_ids != -100
    assert (
        output.predictions.shape
        == output.label_ids.shape
        == (8, max(len(r["input_ids"]) for r in trainer.train_dataset))
    )
    accuracy = (output.predictions[kept] == output.label_ids[kept]).mean()
    assert output.metrics["test_mean_token_accuracy"] == pytest.approx(accuracy)
    row = trainer.train_dataset[1]
    first = row["labels"].index(next(label for label in row["labels"] if label != -100))
    best = tiny_llama(torch.tensor([row["input_ids"]])).logits[0, first - 1].argmax()
    assert output.predictions[1, first] == best


def test_compute_metrics_reads_predictions(tiny_llama, bpe_tokenizer, tmp_path):
    def exact(prediction):
        kept = prediction.label_ids != -100
        return {"exact": (prediction.predictions == prediction.label_ids)[kept].mean()}

    trainer = SFTTrainer(
        tiny_llama,
        config(tmp_path),
        train_dataset=RAGGED,
        eval_dataset=RAGGED,
        processing_class=bpe_tokenizer,
        compute_metrics=exact,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_exact"] == pytest.approx(metrics["eval_mean_token_accuracy"])


def test_inspect_marks_every_token(tiny_llama, bpe_tokenizer, tmp_path, capsys):
    trainer = SFTTrainer(tiny_llama, config(tmp_path), train_dataset=RAGGED, processing_class=bpe_tokenizer)
    trainer.inspect(2)
    marks = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    rows = [trainer.train_dataset[i] for i in range(2)]
    assert marks.count("trained") == sum(label != -100 for row in rows for label in row["labels"])
    assert marks.count("context") == sum(label == -100 for row in rows for label in row["labels"])


def test_a_broken_weight_stops_the_run_before_it_spreads(tiny_llama, bpe_tokenizer, tmp_path):
    with torch.no_grad():
        tiny_llama.lm_head.weight[5] = torch.nan
    with pytest.raises(FloatingPointError, match="the loss at step 1 is nan"):
        train(tiny_llama, bpe_tokenizer, RAGGED, tmp_path)


def test_it_learns(tiny_llama, bpe_tokenizer, tmp_path):
    """A tiny model memorises eight rows: from ln(400) = 6.0 nats a token to less than one."""
    trainer = train(
        tiny_llama, bpe_tokenizer, RAGGED, tmp_path, optim="adamw_torch", learning_rate=1e-2, max_steps=60,
        per_device_train_batch_size=8,
    )  # fmt: skip
    losses = [loss for (loss,) in logs(trainer, "loss")]
    assert losses[0] == pytest.approx(5.99, abs=0.1)
    assert losses[-1] < 1.0
