"""Preparation leaves Python's garbage collector as it was."""

import gc

from datasets import Dataset

from strop import SFTConfig
from strop.data.prepare import prepare

ROWS = Dataset.from_list([{"text": "a"}])


def test_nothing_stays_frozen(bpe_tokenizer, tmp_path):
    prepare(ROWS, bpe_tokenizer, SFTConfig(str(tmp_path), use_cpu=True))
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen(bpe_tokenizer, tmp_path):
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        prepare(ROWS, bpe_tokenizer, SFTConfig(str(tmp_path), use_cpu=True))
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
