"""A reward model as a reward function: its own tokenizer, any batch size, the scores of `score`."""

import pytest
import torch
from transformers import LlamaForSequenceClassification

from strop.rewards import RewardFunctions, RewardModel, resolve_reward
from strop.rewards.reward_model import score

PROMPTS = ["What is water ?", "Is the sky blue ?", "What is water ?"]
COMPLETIONS = [" Cold .", " Yes .", " Hot ."]


@pytest.fixture
def model(tiny_llama):
    config = tiny_llama.config
    config.num_labels = 1
    return LlamaForSequenceClassification(config).eval()


def test_scores_are_those_of_the_model_and_the_folder_is_its_name(model, bpe_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("out/judge")
    bpe_tokenizer.save_pretrained("out/judge")
    expected = score(model, bpe_tokenizer, PROMPTS, COMPLETIONS)
    rewards = [resolve_reward("out/judge"), "out/judge", model, RewardModel(model, bpe_tokenizer, batch_size=1)]
    functions = RewardFunctions(rewards, tokenizers=[None, None, bpe_tokenizer, None]).to("cpu")
    scores = functions.score(PROMPTS, COMPLETIONS, columns={"answer": [1, 2, 3]})
    assert scores.names[:2] == ["judge", "judge_2"]
    for values in scores.values.T:
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def test_conversations_are_written_by_its_own_template(model, bpe_tokenizer):
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    completions = [[{"role": "assistant", "content": completion}] for completion in COMPLETIONS]
    found = RewardModel(model, bpe_tokenizer)(prompts, completions, level=[1, 2, 3])
    torch.testing.assert_close(found, score(model, bpe_tokenizer, prompts, completions))


def test_it_is_frozen_and_what_scores_nothing_is_refused(model, bpe_tokenizer):
    reward = RewardModel(model, bpe_tokenizer)
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())
    model.config._name_or_path = ""
    with pytest.raises(ValueError, match="needs its tokenizer"):
        RewardModel(model)
    model.config.num_labels = 2
    with pytest.raises(ValueError, match="has 2 outputs, but a reward model has one"):
        RewardModel(model, bpe_tokenizer)
