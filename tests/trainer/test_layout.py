"""The packed layout is trusted after a comparison only; a model that mixes its rows is trained on padded ones."""

import logging

import pytest
import torch
from datasets import Dataset

from strop import SFTConfig, SFTTrainer
from strop.data.collate import TokenRow, collate, leading_rows
from strop.models import attention
from strop.models.segments import Segments
from strop.trainer.layout import LayoutGuard, settle_layout

ROWS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]


def packed(rows=ROWS):
    return collate([TokenRow(ids, ids) for ids in rows], "packed", 0)


@pytest.fixture
def rows_mix(monkeypatch):
    """Attention as if the stream were one row."""

    def over_all(query, key, value, segments, scores):
        whole = Segments((segments.num_tokens,), (-1,))
        return over_pieces(query, key, value, whole, scores)

    over_pieces = attention.attend_in_pieces
    monkeypatch.setattr(attention, "attend_in_pieces", over_all)


def test_a_right_model_keeps_its_packed_batches(tiny_llama):
    assert settle_layout(tiny_llama) == "packed"
    guard, batch = LayoutGuard(), packed()
    assert guard(tiny_llama, batch) is batch
    assert guard.is_trusted is True


def test_a_model_that_mixes_rows_gets_them_padded(tiny_llama, rows_mix, caplog):
    settle_layout(tiny_llama)
    guard = LayoutGuard()
    batch = guard(tiny_llama, packed())
    assert guard.is_trusted is False
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0], [9, 10, 11, 0, 0], [12, 13, 14, 15, 16]]
    assert "so this run pads its rows" in caplog.text


def test_a_batch_of_one_row_proves_nothing(tiny_llama, rows_mix):
    settle_layout(tiny_llama)
    guard = LayoutGuard()
    guard(tiny_llama, packed(ROWS[:1]))
    assert guard.is_trusted is None
    guard(tiny_llama, packed())
    assert guard.is_trusted is False


def test_at_least_two_rows_are_compared_however_long():
    assert leading_rows(packed(), 1)["segments"].lengths == (4, 3)
    assert leading_rows(packed(), 8)["segments"].lengths == (4, 3, 5)
    shared = [TokenRow([1, 2], None), TokenRow([3], [3], 0), TokenRow([4], [4], 0), TokenRow([5], [5])]
    assert leading_rows(collate(shared, "packed", 0), 1)["rows"] == (1, 2)


def test_a_run_on_a_mixing_model_is_the_padded_run(tiny_llama, bpe_tokenizer, tmp_path, monkeypatch):
    data = Dataset.from_list([{"input_ids": ids} for ids in ROWS])
    start = {name: value.clone() for name, value in tiny_llama.state_dict().items()}
    results = []
    for layout in ("padded", "auto"):
        tiny_llama.load_state_dict(start)
        args = SFTConfig(str(tmp_path), use_cpu=True, max_steps=2, optim="sgd", learning_rate=0.1, logging_steps=1)
        args.layout, args.save_strategy = layout, "no"
        trainer = SFTTrainer(tiny_llama, args, train_dataset=data, processing_class=bpe_tokenizer)
        trainer.train()
        results.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        monkeypatch.setattr(attention, "attend_in_pieces", lambda *args: torch.zeros(1, args[0].shape[2], 4, 8))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_what_can_not_be_had_is_refused(tiny_llama, caplog):
    caplog.set_level(logging.INFO, "strop")
    assert settle_layout(tiny_llama, "padded") == "padded"
    assert "layout: padded (as asked for)" in caplog.text
    tiny_llama.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="layout='packed' can't be had for LlamaForCausalLM"):
        settle_layout(tiny_llama, "packed")
