"""Completions during training: what the model is given, what is written where, and that training doesn't notice."""

import json
import sys
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, TrainerState

from strop.callbacks.completions import LogCompletionsCallback, left_padded, prompt_ids

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0)
PROMPTS = ["What is the capital", "How many legs does a spider have?", "Ice"]


def arguments(folder, report_to=()):
    return SimpleNamespace(output_dir=str(folder), report_to=list(report_to))


def state(step, eval_steps=None):
    return TrainerState(global_step=step, max_steps=10, eval_steps=eval_steps, is_world_process_zero=True)


def run(callback, model, tokenizer, folder, steps=(1, 2, 3, 4), **options):
    callback.on_train_begin(arguments(folder), state(0), None)
    for step in steps:
        callback.on_step_end(arguments(folder, **options), state(step), None, model=model, processing_class=tokenizer)


def rows(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_every_freq_steps_a_row_each_prompt(tmp_path, tiny_llama, bpe_tokenizer, capsys):
    callback = LogCompletionsCallback(prompts=PROMPTS, generation_config=GREEDY, freq=2, num_prompts=2)
    run(callback, tiny_llama, bpe_tokenizer, tmp_path)
    assert [(row["step"], row["prompt"]) for row in rows(tmp_path)] == [(s, p) for s in (2, 4) for p in PROMPTS[:2]]
    printed = capsys.readouterr().out
    assert "completions at step 2" in printed
    assert "What is the capital" in printed


def test_completions_are_those_of_each_prompt_alone(tmp_path, tiny_llama, bpe_tokenizer):
    """Padding within a batch changes nothing."""
    tiny_llama.train()
    run(
        LogCompletionsCallback(prompts=PROMPTS, generation_config=GREEDY, freq=1),
        tiny_llama,
        bpe_tokenizer,
        tmp_path,
        [1],
    )
    for row in rows(tmp_path):
        ids = bpe_tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        output = tiny_llama.eval().generate(ids, attention_mask=torch.ones_like(ids), generation_config=GREEDY)
        assert row["completion"] == bpe_tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_training_does_not_notice(tmp_path, tiny_llama, bpe_tokenizer):
    """Modes of all modules and the random state come back, though completions are sampled."""
    sampled = GenerationConfig(max_new_tokens=6, do_sample=True, eos_token_id=2, pad_token_id=0)
    tiny_llama.train()
    tiny_llama.model.layers[0].eval()
    modes = [module.training for module in tiny_llama.modules()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run(LogCompletionsCallback(prompts=PROMPTS, generation_config=sampled, freq=1), tiny_llama, bpe_tokenizer, tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in tiny_llama.modules()] == modes


# what the model is given


@pytest.fixture
def bos_tokenizer(bpe_tokenizer):
    """Puts <|im_start|> (1) before and <|im_end|> (2) after every text."""
    tokenizer = deepcopy(bpe_tokenizer)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    return tokenizer


def test_text_begins_once_and_does_not_end(bos_tokenizer):
    body = bos_tokenizer("Ice is cold", add_special_tokens=False)["input_ids"]
    assert prompt_ids(bos_tokenizer, "Ice is cold") == [1, *body]
    assert prompt_ids(bos_tokenizer, "<|im_start|>Ice is cold") == [1, *body]


def test_messages_are_as_the_template_has_them(bos_tokenizer):
    messages = [{"role": "user", "content": "Ice?"}]
    text = "<|im_start|>user\nIce?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids(bos_tokenizer, messages) == bos_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_rows_end_together():
    batch = left_padded([[5], [6, 7, 8]], 0, torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[0, 0, 5], [6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]


# where prompts come from


def test_prompts_of_the_evaluation_set():
    trainer = SimpleNamespace(eval_dataset=Dataset.from_dict({"prompt": PROMPTS}))
    assert LogCompletionsCallback(trainer, num_prompts=2).prompts == PROMPTS[:2]


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (None, "needs prompts"),
        (SimpleNamespace(eval_dataset=None), "needs prompts"),
        (SimpleNamespace(eval_dataset=Dataset.from_dict({"text": ["a"]})), r'no column "prompt", but \[\'text\'\]'),
    ],
)
def test_no_prompts(trainer, message):
    with pytest.raises(ValueError, match=message):
        LogCompletionsCallback(trainer)


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="no prompt to complete: 0 given"):
        LogCompletionsCallback(prompts=[])


def test_eval_steps_say_when_unless_freq_does(tmp_path):
    callback = LogCompletionsCallback(prompts=PROMPTS)
    with pytest.raises(ValueError, match="pass freq"):
        callback.on_train_begin(arguments(tmp_path), state(0), None)
    callback.on_train_begin(arguments(tmp_path), state(0, eval_steps=5), None)


# trackers


def test_trackers_get_a_table_only_if_asked(tmp_path, tiny_llama, bpe_tokenizer, monkeypatch):
    logged = []
    wandb = SimpleNamespace(log=logged.append, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    callback = LogCompletionsCallback(prompts=PROMPTS[:1], generation_config=GREEDY, freq=1)
    run(callback, tiny_llama, bpe_tokenizer, tmp_path, [1])
    assert logged == []
    run(callback, tiny_llama, bpe_tokenizer, tmp_path, [2], report_to=["wandb"])
    columns, values = logged[0]["completions"]
    assert columns == ["step", "prompt", "completion"]
    assert values == [[2, PROMPTS[0], rows(tmp_path)[0]["completion"]]]
