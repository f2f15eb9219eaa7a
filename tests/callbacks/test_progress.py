"""Progress: what a log file and a terminal show, by a clock of our own."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainerState

from strop.callbacks.progress import PanelView, RichProgressCallback, Speed, duration, install_progress, shown


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def state(step=0, total=100, main=True):
    return TrainerState(global_step=step, max_steps=total, is_world_process_zero=main)


def test_lines_of_a_run(clock, capsys):
    """10 steps in 20 s leave 90 steps, 180 s; 5,000 tokens in 20 s are 250 a second."""
    progress = RichProgressCallback(live=False, clock=clock)
    progress.on_train_begin(None, state(), None)
    clock.now = 20.0
    progress.on_step_end(None, state(10), None)
    logs = {"loss": 1.23456, "learning_rate": 2e-5, "num_tokens": 5000, "total_flos": 1.0, "epoch": 0.1}
    progress.on_log(None, state(10), None, logs=logs)
    progress.on_log(None, state(10), None, logs={"eval_loss": 1.5})
    clock.now = 200.0
    progress.on_step_end(None, state(100), None)
    progress.on_train_end(None, state(100), None)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "train 0/100 | start",
        "train 10/100 | loss 1.235 | learning_rate 2e-05 | num_tokens 5,000 | 250 tokens/s | 3:00 left",
        "eval 10/100 | eval_loss 1.5 | 250 tokens/s | 3:00 left",
        "train 100/100 | done in 3:20",
    ]


def test_silence_is_broken_every_half_minute(clock, capsys):
    progress = RichProgressCallback(live=False, clock=clock)
    progress.on_train_begin(None, state(), None)
    for step in range(1, 8):
        progress.on_step_begin(None, state(step - 1), None)
        clock.now += 10.0
        progress.on_step_end(None, state(step), None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["train 0/100", "train 3/100", "train 6/100"]


def test_a_resumed_run_is_timed_from_where_it_resumed():
    """Steps 50 to 60 in 10 s leave 40 s. Tokens count from the first log on: 1,000 in 10 s, not 9,000."""
    speed = Speed(50, 100, 0.0)
    speed.count_tokens(8000, 10.0)
    assert speed.tokens_per_second() is None
    speed.step = 60
    assert speed.remaining(10.0) == 40.0
    speed.count_tokens(9000, 20.0)
    assert speed.tokens_per_second() == 100.0


def test_only_the_main_process_shows_anything(clock, capsys):
    progress = RichProgressCallback(live=False, clock=clock)
    progress.on_train_begin(None, state(main=False), None)
    clock.now = 60.0
    progress.on_step_end(None, state(1, main=False), None)
    progress.on_step_begin(None, state(1, main=False), None)
    progress.on_log(None, state(1, main=False), None, logs={"loss": 1.0})
    progress.on_train_end(None, state(1, main=False), None)
    assert capsys.readouterr() == ("", "")


def test_evaluation_alone_is_a_line_of_its_metrics(capsys):
    progress = RichProgressCallback(live=False)
    progress.on_prediction_step(None, state(), None, eval_dataloader=[1, 2])
    progress.on_log(None, state(), None, logs={"eval_loss": 2.5, "eval_num_tokens": 1234567})
    progress.on_evaluate(None, state(), None)
    assert capsys.readouterr().err.splitlines() == ["eval_loss 2.5 | eval_num_tokens 1,234,567"]


def test_the_panel_on_a_terminal(clock, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=30, color_system=None)
    monkeypatch.setattr("strop.callbacks.progress.PanelView", lambda: PanelView(console))
    progress = RichProgressCallback(live=True, clock=clock)
    progress.on_train_begin(None, state(), None)
    clock.now = 20.0
    progress.on_step_end(None, state(10), None)
    progress.on_step_begin(None, state(10), None)
    progress.on_log(None, state(10), None, logs={"loss": 1.23456, "rewards/chosen": 0.5, "num_tokens": 5000})
    progress.on_prediction_step(None, state(10), None, eval_dataloader=[1, 2, 3])
    progress.view.live.refresh()
    shown_now = screen.getvalue()
    for text in ("train", "10/100", "250 tokens/s", "3:00 left", "eval", "1/3", "loss", "1.235", "rewards", "chosen"):
        assert text in shown_now
    assert "rewards/chosen" not in shown_now
    progress.on_evaluate(None, state(10), None)
    progress.on_train_end(None, state(100), None)
    assert progress.view is None
    assert "done in 0:20" in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back


def test_an_error_that_ends_the_program_finds_the_terminal_given_back(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append((error, progress.view)))
    usual = sys.excepthook
    progress = RichProgressCallback(live=False)
    progress.on_train_begin(None, state(), None)
    sys.excepthook(ValueError, ValueError("no"), None)
    assert seen[0][0][0] is ValueError
    assert seen[0][1] is None
    assert sys.excepthook is usual


def test_installed_in_place_of_the_usual_callbacks():
    callbacks = [ProgressCallback(), SimpleNamespace()]

    def remove(kind):
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, kind)]

    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=callbacks),
        remove_callback=remove,
        add_callback=callbacks.append,
        args=SimpleNamespace(disable_tqdm=True),
    )
    install_progress(trainer)
    install_progress(trainer)
    assert [type(callback).__name__ for callback in callbacks] == ["SimpleNamespace", "RichProgressCallback"]
    assert callbacks[1].live is False  # disable_tqdm asks for no redrawing
    own = RichProgressCallback()
    callbacks[:] = [PrinterCallback(), own]
    install_progress(trainer)
    assert callbacks == [own]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.23456, "1.235"), (2e-5, "2e-05"), (1234567, "1,234,567"), (12000.0, "12,000"), ("nan", "nan"), (True, "True")],
)
def test_values(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (83, "1:23"), (3723, "1:02:03")])
def test_durations(seconds, text):
    assert duration(seconds) == text
