"""What the package logs is shown once, and only if the program hasn't decided otherwise."""

import logging

import pytest

from strop.callbacks import log


@pytest.fixture
def logger(monkeypatch):
    """The package's logger as in a program that has not set up logging."""
    logger = logging.getLogger("strop")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    before = logger.level
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(before)


def test_messages_reach_stderr_once(logger, capsys):
    assert not log.is_set_up()
    log.show_logs()
    log.show_logs()
    logging.getLogger("strop.trainer.setup").info("weights %s", "float32")
    assert capsys.readouterr().err == "weights float32\n"


@pytest.mark.parametrize("set_up", [lambda x: x.addHandler(logging.NullHandler()), lambda x: x.setLevel("ERROR")])
def test_a_program_that_sets_up_logging_keeps_its_say(logger, set_up):
    set_up(logger)
    assert log.is_set_up()
