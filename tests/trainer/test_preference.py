"""What trainers on completions of one prompt share: parts of a loss with units of their own, rows raw or prepared."""

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from strop import DPOConfig, DPOTrainer
from strop.losses.reduce import StepCounts
from strop.trainer import preference
from strop.trainer.preference import Parts, disable_dropout, means_of, num_tokens

PAIRS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot and fire is cold."},
        {"prompt": "Is fire cold?", "chosen": " Fire is hot.", "rejected": " Yes."},
    ]
)


def build(model, tokenizer, folder, train_dataset=PAIRS, eval_dataset=None, collator=None, **options):
    args = DPOConfig(str(folder), use_cpu=True, max_steps=1, disable_tqdm=True, **options)
    return DPOTrainer(model, None, args, collator, train_dataset, eval_dataset, tokenizer)


def test_parts_are_divided_by_their_own_counts():
    """Two micro-batches of a step of 4 examples and 10 tokens: (6 + 2) / 4 + (5 + 15) / 10 = 4."""
    counts = StepCounts(tokens=10, sequences=4)
    shares = [Parts(torch.tensor(6.0), torch.tensor(5.0)).share(counts), Parts(2.0, 15.0).share(counts)]
    assert sum(shares) == 4.0
    assert Parts(0.0, 0.0).share(StepCounts(0, 0)) == 0.0


def test_means_carry_their_weight():
    assert means_of({"a": torch.tensor([1.0, 2.0])}, 2) == {"a": (torch.tensor(3.0), 2)}


def test_dropout_is_switched_off_in_layers_only():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3))
    disable_dropout(model)
    assert model[1].p == 0.0


def test_sets_are_prepared_once(tiny_llama, bpe_tokenizer, tmp_path, monkeypatch):
    """A DatasetDict, one set of one row; prepared rows and streams of them evaluate alike."""
    seen, prepare = [], preference.prepare_preference
    monkeypatch.setattr(preference, "prepare_preference", lambda *a: seen.append(a[-1]) or prepare(*a))
    sets = DatasetDict(all=PAIRS, one=PAIRS.select([1]))
    trainer = build(tiny_llama, bpe_tokenizer, tmp_path, eval_dataset=sets, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert seen == ["train", "eval_all", "eval_one"]
    metrics = trainer.evaluate()
    for rows in (PAIRS, trainer.train_dataset, PAIRS.to_iterable_dataset(), {"again": PAIRS}):
        found = trainer.evaluate(rows)
        prefix = "eval_again" if isinstance(rows, dict) else "eval"
        for name in ("loss", "rewards/margins", "logps/chosen"):
            assert found[f"{prefix}_{name}"] == pytest.approx(metrics[f"eval_all_{name}"], rel=1e-6)
    assert metrics["eval_one_logps/chosen"] == trainer.evaluate(PAIRS.select([1]))["eval_logps/chosen"]


@pytest.mark.parametrize("options", [{"layout": "padded"}, {"padding_free": True}, {"pad_to_multiple_of": 8}], ids=str)
def test_layout_options_beside_a_collator_are_refused(tiny_llama, bpe_tokenizer, tmp_path, options):
    with pytest.raises(ValueError, match="a data_collator of your own"):
        build(tiny_llama, bpe_tokenizer, tmp_path, collator=lambda rows: {}, **options)


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_batches_of_similar_lengths(tiny_llama, bpe_tokenizer, tmp_path, strategy):
    """A row is as long as its prompt and both completions; what is predicted keeps the order of the rows."""
    trainer = build(tiny_llama, bpe_tokenizer, tmp_path, train_sampling_strategy=strategy)
    rows = trainer.train_dataset
    lengths = [sum(len(row[f"{part}_ids"]) for part in ("prompt", "chosen", "rejected")) for row in rows]
    assert trainer._get_train_sampler().lengths == lengths
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0
    rewards = trainer.predict(PAIRS).predictions
    for i in range(len(PAIRS)):
        assert rewards[i] == pytest.approx(trainer.predict(PAIRS.select([i])).predictions[0], rel=1e-4, abs=1e-5)


def test_completions_in_a_list_add_up():
    assert (num_tokens([5, 6]), num_tokens([[5, 6], [7], []]), num_tokens([])) == (2, 3, 0)


def test_packed_on_request_equals_padded(tiny_llama, bpe_tokenizer, tmp_path):
    """Pairs of lengths (3, 9) and (12, 2): log-probabilities of each row to 1e-5."""
    ids = torch.randint(3, 380, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Dataset.from_list(
        [
            {"prompt_ids": [5, 6], "chosen_ids": ids[0][:3], "rejected_ids": ids[1][:9]},
            {"prompt_ids": [7], "chosen_ids": ids[2], "rejected_ids": ids[3][:2]},
        ]
    )
    found = []
    for options in ({"padding_free": True}, {"layout": "padded"}):
        trainer = build(tiny_llama, bpe_tokenizer, tmp_path, rows, **options)
        batch = trainer.data_collator(list(trainer.train_dataset))
        found.append(trainer.reference.logps(batch))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_no_dropout_is_left():
    """Neither in layers nor in what attention is called with: the policy in training says what it says at rest."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, attention_dropout=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    disable_dropout(model)
    ids = torch.arange(8)[None]
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)
    assert model.config.attention_dropout == 0.5
