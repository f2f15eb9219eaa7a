"""`strop merge`: the whole model says what the adapter on its base says."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from strop.cli.main import main

CLASSES = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.mark.parametrize("task", sorted(CLASSES))
def test_it_says_the_same(task, tmp_path, tiny_folder, bpe_tokenizer, capsys):
    options = {"num_labels": 1} if task == "SEQ_CLS" else {}
    base = CLASSES[task].from_pretrained(tiny_folder, **options)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type=task)
    adapted = get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    bpe_tokenizer.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "run.json").write_text('{"config": {"seed": 3}}')
    assert main(["merge", str(tmp_path / "adapter")]) == 0
    folder = tmp_path / "adapter" / "merged"
    assert f"the whole model is in {folder}" in capsys.readouterr().out
    whole = CLASSES[task].from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(IDS).logits, adapted(IDS).logits, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template == bpe_tokenizer.chat_template
    assert json.loads((folder / "run.json").read_text())["config"] == {"seed": 3}


def test_a_whole_model_is_refused(tiny_folder, capsys):
    assert main(["merge", str(tiny_folder)]) == 2
    assert "is a whole model already; there is nothing to merge" in capsys.readouterr().err
