"""Preparation leaves Python's garbage collector as it was."""

import gc

import pytest
from datasets import Dataset

from strop import SFTConfig
from strop.data.prepare import prepare

ROWS = Dataset.from_list([{"text": "a"}])


@pytest.fixture(autouse=True)
def thawed():
    """What the tests froze for their own sake is thawed meanwhile."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_nothing_stays_frozen(bpe_tokenizer, tmp_path):
    prepare(ROWS, bpe_tokenizer, SFTConfig(str(tmp_path), use_cpu=True))
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen(bpe_tokenizer, tmp_path):
    gc.freeze()
    frozen = gc.get_freeze_count()
    prepare(ROWS, bpe_tokenizer, SFTConfig(str(tmp_path), use_cpu=True))
    assert gc.get_freeze_count() == frozen
