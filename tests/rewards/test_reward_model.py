"""Texts are scored with the tokens of training, a shared prompt computed once, and the model left as it was."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from strop.data.collate import collate
from strop.models.forward import use_packed_attention
from strop.models.scores import scores
from strop.rewards.reward_model import WHOLE, collated, score, tokenised

PROMPT = "What is the sky?"
ANSWERS = [" The sky is blue.", " Green.", " Ice is cold, fire is hot."]


@pytest.fixture
def model(tiny_llama):
    config = LlamaConfig(**tiny_llama.config.to_dict() | {"num_labels": 1, "attention_dropout": 0.5})
    return AutoModelForSequenceClassification.from_config(config)


def test_a_prompt_of_several_answers_stands_in_a_batch_once(bpe_tokenizer):
    pairs = tokenised(bpe_tokenizer, [PROMPT] * 3, ANSWERS, WHOLE, {})
    batch = collated(pairs, "packed", 0)
    assert batch["num_tokens"] == len(pairs[0][0]) + sum(len(completion) for _, completion in pairs)
    assert [ids[-1] for _, ids in pairs] == [bpe_tokenizer.eos_token_id] * 3
    assert pairs[1][0] + pairs[1][1] == [*bpe_tokenizer(PROMPT + ANSWERS[1]).input_ids, bpe_tokenizer.eos_token_id]


def test_scores_leave_the_model_as_it_was(model, bpe_tokenizer):
    """Training goes on in training mode, with the random numbers that it would have drawn."""
    model.train()
    state = torch.get_rng_state()
    padded = score(model, bpe_tokenizer, [PROMPT] * 3, ANSWERS)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not padded.requires_grad
    use_packed_attention(model)
    torch.testing.assert_close(score(model, bpe_tokenizer, [PROMPT] * 3, ANSWERS, batch_size=2), padded)
    assert score(model, bpe_tokenizer, [], []).shape == (0,)


def test_columns_reach_the_template(model, bpe_tokenizer):
    bpe_tokenizer = type(bpe_tokenizer)(tokenizer_object=bpe_tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    bpe_tokenizer.chat_template = (
        "{{ tools[0]['function']['name'] if tools else '' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    said = [[{"role": "user", "content": "Is ice hot?"}], [{"role": "assistant", "content": " No."}]]
    tools = [{"type": "function", "function": {"name": "weigh", "parameters": {}}}]
    (plain,), (tooled,) = (
        tokenised(bpe_tokenizer, said[:1], said[1:], WHOLE, columns) for columns in ({}, {"tools": [tools]})
    )
    assert bpe_tokenizer.decode(tooled[0] + tooled[1]) == "weigh" + bpe_tokenizer.decode(plain[0] + plain[1])


def test_what_can_not_be_scored_is_refused(model, bpe_tokenizer):
    with pytest.raises(ValueError, match="prompt: list of 2, completion: list of 1"):
        score(model, bpe_tokenizer, [PROMPT] * 2, ANSWERS[:1])
    with pytest.raises(ValueError, match="prompt: str of 16, completion: list of 16"):
        score(model, bpe_tokenizer, PROMPT, ["a"] * 16)
    with pytest.raises(ValueError, match="row 1: its answers are of the kinds int"):
        score(model, bpe_tokenizer, [PROMPT] * 2, [ANSWERS[0], 3])


def test_a_row_without_a_prompt_is_scored_as_a_whole(model, bpe_tokenizer):
    ((prompt, whole),) = tokenised(bpe_tokenizer, None, [PROMPT + ANSWERS[0]], WHOLE, {})
    assert prompt == []
    from strop.data.collate import TokenRow

    by_hand = scores(model.eval(), collate([TokenRow(whole, whole)], "padded", 0)).detach()
    torch.testing.assert_close(score(model, bpe_tokenizer, None, [PROMPT + ANSWERS[0]]), by_hand)
