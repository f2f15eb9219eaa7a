"""A run that learns nothing, or has nothing left to learn, says so once."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from strop.callbacks.alarms import PreferenceAlarm

ARGS = SimpleNamespace(learning_rate=1e-6, beta=0.1)
IDLE = {"loss": 0.69, "rewards/margins": 0.0, "rewards/accuracies": 0.5, "learning_rate": 1e-6}
SATURATED = {"loss": 1e-4, "rewards/margins": 90.0, "rewards/accuracies": 1.0, "learning_rate": 1e-6}
LEARNS = {"loss": 0.5, "rewards/margins": 0.4, "rewards/accuracies": 0.8, "learning_rate": 1e-6}


def told(caplog, logs) -> list[str]:
    alarm = PreferenceAlarm(patience=3)
    for step, entry in enumerate(logs, 1):
        alarm.on_log(ARGS, TrainerState(global_step=step, is_world_process_zero=True), None, logs=entry)
    return [record.getMessage() for record in caplog.records]


UNPAIRED = {"loss": 0.5, "rewards/margins": 0.0, "kl": 0.0, "learning_rate": 1e-6}


@pytest.mark.parametrize(
    ("entry", "words"), [(IDLE, "exactly 0"), (SATURATED, "nothing is left to learn"), (UNPAIRED, "exactly 0")]
)
def test_it_warns_once_at_the_third_log(caplog, entry, words):
    messages = told(caplog, [entry] * 5)
    assert len(messages) == 1
    assert messages[0].startswith("step 3: ")
    assert words in messages[0]


@pytest.mark.parametrize(
    "logs",
    [
        [IDLE, IDLE, LEARNS, IDLE, IDLE],
        [SATURATED, SATURATED, LEARNS, SATURATED],
        [IDLE | {"learning_rate": 0.0}] * 5,  # warming up
        [{"eval_loss": 0.1}, {"train_loss": 0.0}] * 3,
    ],
)
def test_it_is_silent_otherwise(caplog, logs):
    assert not told(caplog, logs)
