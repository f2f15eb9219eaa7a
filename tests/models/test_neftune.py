"""NEFTune's noise: its size by the row's own length, in training mode only."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.data.collate import TokenRow, collate
from strop.models.neftune import neftune, row_lengths

HIDDEN, ALPHA = 64, 5.0
ROWS = [TokenRow([1] * 4, [1] * 4), TokenRow([2] * 25, [2] * 25)]


@pytest.fixture
def model():
    sizes = {"vocab_size": 8, "hidden_size": HIDDEN, "intermediate_size": 8, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).train()


def noise(model, batch):
    embedding, ids = model.get_input_embeddings(), batch["input_ids"]
    clean = embedding(ids)
    with neftune(model, batch, ALPHA):
        return (embedding(ids) - clean).detach()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_noise_is_uniform_within_a_bound_of_the_rows_own_length(model, layout):
    #  bounds 5 / sqrt(4 * 64) = 0.3125 and 5 / sqrt(25 * 64) = 0.125, whatever else is in the batch
    values = noise(model, collate(ROWS, layout, 0))
    short, long = (values[0, :4], values[0, 4:]) if layout == "packed" else (values[0, :4], values[1])
    for part, bound in ((short, 0.3125), (long, 0.125)):
        assert part.abs().max() <= bound
        #  of n uniform numbers in (-a, a): variance a^2 / 3 (standard error 0.9 a^2 / sqrt(9 n)), mean 0
        assert part.square().mean().item() == pytest.approx(bound**2 / 3, rel=5 * 0.9 / math.sqrt(part.numel()))
        assert part.mean().abs() < 5 * bound / math.sqrt(3 * part.numel())


def test_padding_of_the_stream_changes_no_length():
    lengths = row_lengths(collate(ROWS, "packed", 0, multiple_of=32))
    assert lengths[0, :29].tolist() == [4] * 4 + [25] * 25


def test_a_shared_prompt_counts_with_its_longest_completion():
    prompt = TokenRow([1] * 3, None)
    batch = collate([prompt, TokenRow([2], [2], parent=0), TokenRow([2, 2], [2, 2], parent=0)], "packed", 0)
    assert row_lengths(batch).tolist() == [[5, 5, 5, 4, 5, 5]]


def test_no_noise_in_evaluation_nor_afterwards(model):
    batch = collate(ROWS, "packed", 0)
    assert noise(model.eval(), batch).abs().sum() == 0
    model.train()
    noise(model, batch)
    embedding = model.get_input_embeddings()
    assert torch.equal(embedding(batch["input_ids"]), embedding.weight[batch["input_ids"]])


def test_negative_noise_is_refused(model):
    with pytest.raises(ValueError, match="neftune_noise_alpha=-1"), neftune(model, collate(ROWS, "packed", 0), -1):
        pass
