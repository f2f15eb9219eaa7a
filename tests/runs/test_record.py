"""The record of a run: what an interrupted run leaves equals what an uninterrupted one leaves."""

import json
import math
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from strop.runs.plot import Frame, loss_curves, loss_svg, thin, ticks
from strop.runs.record import RunRecord, git_state, load_metrics, load_run

TIMES = ("time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime",
         "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time",
         "train_loss")  # fmt: skip  # the mean that transformers reports covers the last process only


class Line(torch.nn.Module):
    """loss = (w * x)**2"""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, labels=None):
        loss = ((self.w * x) ** 2).mean()
        return {"loss": loss, "logits": self.w * x}


class Killed(Exception):
    pass


class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed(f"at {self.step}")


def make_trainer(directory, max_steps=6, callbacks=()):
    args = TrainingArguments(
        output_dir=str(directory), max_steps=max_steps, logging_steps=1, save_steps=2, eval_strategy="steps",
        eval_steps=2, per_device_train_batch_size=1, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
        report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=0, seed=7,
    )  # fmt: skip
    rows = [{"x": float(i % 3), "labels": 0.0} for i in range(12)]
    return Trainer(Line(), args, train_dataset=rows, eval_dataset=rows[:2], callbacks=list(callbacks))


@contextmanager
def recorded(trainer, reports=None):
    """As strop's trainers do it."""
    record = RunRecord({"train": trainer.train_dataset, "eval": trainer.eval_dataset}, reports)
    trainer.add_callback(record)
    try:
        yield record
    except Killed as error:
        record.fail(error)
        raise


def train(directory, resume=None, evaluate_first=False, **settings):
    trainer = make_trainer(directory, **settings)
    with recorded(trainer) as record:
        if evaluate_first:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=resume)
    return trainer, record


def timeless(directory):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in load_metrics(directory)]


@pytest.mark.parametrize("evaluate_first", [False, True])
def test_a_resumed_run_leaves_the_metrics_of_an_uninterrupted_one(tmp_path, evaluate_first):
    train(tmp_path / "whole", evaluate_first=evaluate_first)
    with pytest.raises(Killed):  # steps 3, 4 and 5 are logged, the newest checkpoint is 4
        train(tmp_path / "cut", callbacks=[KillAt(5)], evaluate_first=evaluate_first)
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # torn by the kill
    run = load_run(tmp_path / "cut")
    assert (run["status"], run["error"]) == ("failed", "Killed: at 5")

    train(tmp_path / "cut", resume=str(tmp_path / "cut/checkpoint-2"), evaluate_first=evaluate_first)
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")
    assert load_run(tmp_path / "cut")["resumed_from_step"] == 2


def test_a_longer_run_drops_the_summary_of_the_shorter_one(tmp_path):
    train(tmp_path / "whole", max_steps=6)
    train(tmp_path / "grown", max_steps=4)
    assert "train_runtime" in load_metrics(tmp_path / "grown")[-1]
    train(tmp_path / "grown", max_steps=6, resume=str(tmp_path / "grown/checkpoint-4"))
    whole, grown = timeless(tmp_path / "whole"), timeless(tmp_path / "grown")
    assert [line["step"] for line in grown] == [line["step"] for line in whole]
    assert grown[:-1] == whole[:-1]


def test_a_fresh_run_drops_an_earlier_runs_metrics_but_not_its_own_first_evaluation(tmp_path):
    train(tmp_path, max_steps=4)
    train(tmp_path, max_steps=2, evaluate_first=True)
    first, *rest = load_metrics(tmp_path)
    assert (first["step"], "eval_loss" in first) == (0, True)
    assert [line["step"] for line in rest] == [1, 2, 2, 2]  # two logs, an evaluation, the summary


def test_lines_can_be_read_while_the_run_goes_on(tmp_path):
    seen = []

    class Reader(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            seen.append(load_metrics(args.output_dir)[-1]["step"] if (tmp_path / "metrics.jsonl").exists() else None)

    trainer = make_trainer(tmp_path, max_steps=2)
    with recorded(trainer):
        trainer.add_callback(Reader())  # runs after the record
        trainer.train()
    assert seen == [1, 2, 2, 2]


def test_run_json_says_what_ran(tmp_path):
    train(tmp_path, max_steps=2)
    run = load_run(tmp_path)
    assert (run["status"], run["last_step"], run["seeds"]["seed"]) == ("finished", 2, 7)
    assert run["config"]["learning_rate"] == 0.1
    assert run["model"]["parameters"] == run["model"]["trainable_parameters"] == 1
    assert run["data"] == {"train": {"type": "list", "rows": 12}, "eval": {"type": "list", "rows": 2}}
    assert run["versions"]["torch"] == torch.__version__
    assert run["started"] <= run["ended"]


def test_other_processes_write_nothing(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.state.is_world_process_zero = False
    record = RunRecord()
    record.on_train_begin(trainer.args, trainer.state, trainer.control)
    record.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 1.0})
    record.on_train_end(trainer.args, trainer.state, trainer.control)
    assert not list(tmp_path.glob("*.json*"))


def test_numbers_without_a_value_survive_as_strict_json(tmp_path):
    trainer = make_trainer(tmp_path)
    values = {"loss": math.nan, "grad_norm": math.inf, "array": torch.tensor(0.5)}
    RunRecord().on_log(trainer.args, trainer.state, trainer.control, logs=values)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (line,) = load_metrics(tmp_path)
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == math.inf
    assert line["array"] == 0.5


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is no line of JSON"):
        load_metrics(tmp_path)


def test_the_report_holds_everything_and_escapes_it(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    with recorded(trainer, reports={"train": {"rows": 12, "length": {"p50": 3}}}) as record:
        trainer.train()
        record.samples = [{"prompt": "1 < 2?", "after": "<b>yes</b>"}]
        trainer.evaluate()
    page = (tmp_path / "report.html").read_text()
    assert "1 &lt; 2?" in page
    assert "<b>yes</b>" not in page
    assert "<th>length p50</th><td>3</td>" in page
    assert "<polyline" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is loaded from anywhere


def test_git_state_is_none_outside_a_repository(tmp_path):
    assert git_state(tmp_path) is None


def test_loss_curves_take_losses_only():
    metrics = [
        {"step": 1, "loss": 3.0, "aux_loss": 9.0, "train_loss": 9.0},
        {"step": 2, "loss": math.nan, "eval_loss": 2.5},
        {"step": 2, "eval_maths_loss": 1.5},
    ]
    assert loss_curves(metrics) == {"train": [(1, 3.0)], "eval": [(2, 2.5)], "eval maths": [(2, 1.5)]}


def test_a_curve_is_placed_by_its_axes():
    # x from 0 to 10 over 100 pixels from 60, y from 1 to 3 over 50 pixels from 20 downwards: (5, 2) is in the middle
    assert Frame(60, 20, 100, 50, [0, 5, 10], [1, 2, 3]).place(5, 2) == (110, 45)
    assert Frame(60, 20, 100, 50, [0, 5, 10], [1, 2, 3]).place(0, 3) == (60, 20)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.12, 0.58, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        (3, 3, [2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6]),
    ],
)
def test_ticks_are_round_and_span_the_data(low, high, expected):
    assert ticks(low, high) == expected


def test_thinning_averages_neighbours():
    assert thin([(1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0), (5, 9.0)], at_most=3) == [(1.5, 2.0), (3.5, 6.0), (5.0, 9.0)]


def test_the_svg_is_a_document_with_a_curve_a_set():
    root = ElementTree.fromstring(loss_svg({"train": [(1, 2.0), (2, 1.0)], "eval <x>": [(2, 1.5)]}))
    names = [element.tag.split("}")[1] for element in root]
    assert (names.count("polyline"), names.count("circle")) == (1, 1)
    assert [t.text for t in root if t.text and "loss" in t.text] == ["train loss", "eval <x> loss"]
