"""What the package logs is shown once, and only if the program hasn't decided otherwise."""

import logging

import pytest

from strop.callbacks import log


def untouched(monkeypatch) -> logging.Logger:
    """The package's logger as in a program that has not set up logging (pytest does, so not in a fixture)."""
    logger = logging.getLogger("strop")
    for name, value in (("handlers", []), ("propagate", False), ("level", logging.NOTSET)):
        monkeypatch.setattr(logger, name, value)
    logger.manager._clear_cache()
    return logger


def test_messages_reach_stderr_once(monkeypatch, capsys):
    untouched(monkeypatch)
    assert not log.is_set_up()
    log.show_logs()
    log.show_logs()
    logging.getLogger("strop.trainer.setup").info("weights %s", "float32")
    assert capsys.readouterr().err == "weights float32\n"


@pytest.mark.parametrize("set_up", [lambda x: x.addHandler(logging.NullHandler()), lambda x: x.setLevel("ERROR")])
def test_a_program_that_sets_up_logging_keeps_its_say(monkeypatch, set_up):
    set_up(untouched(monkeypatch))
    assert log.is_set_up()
