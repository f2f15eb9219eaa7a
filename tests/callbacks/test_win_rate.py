"""Win rates against the model as it was: who wrote what, what counts as a win, and what a resumed run knows."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, TrainerState

from strop.callbacks.win_rate import WinRateCallback
from strop.models.reference import reference_for
from strop.rewards import BasePairwiseJudge
from strop.trainer.config import SFTConfig
from strop.trainer.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from strop.trainer.sft import SFTTrainer

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0)
PROMPTS = ["What is the capital", "How many legs?", "Ice", "Fire"]


class Says(BasePairwiseJudge):
    """`found` in turn; remembers pairs and orders."""

    def __init__(self, *found):
        self.found = found

    def compare(self, prompts, pairs, flipped):
        self.prompts, self.pairs, self.flipped = list(prompts), list(pairs), list(flipped)
        return [self.found[i % len(self.found)] for i in range(len(pairs))]


class Logs:
    reference = None

    def __init__(self):
        self.logs = []

    def log(self, logs):
        self.logs.append(logs)


@pytest.fixture
def watch(tmp_path, bpe_tokenizer):
    """A callback at step 0, and `evaluate(model, step)`: the metrics after it."""

    def begin(callback, model, step=0, saved=None):
        args = SimpleNamespace(output_dir=str(tmp_path), seed=0)
        state = TrainerState(global_step=step, is_world_process_zero=True)
        state.stateful_callbacks = saved or {}
        known = {"model": model, "processing_class": bpe_tokenizer}
        callback.on_train_begin(args, state, None, **known)

        def evaluate(step=5):
            state.global_step, metrics = step, {"eval_loss": 1.0}
            callback.on_evaluate(args, state, None, metrics=metrics, **known)
            return metrics

        return evaluate

    return begin


def rows(folder):
    return [json.loads(line) for line in (folder / "win_rate.jsonl").read_text().splitlines()]


def moved(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn_like(parameter))


def test_wins_ties_and_no_verdicts(tmp_path, tiny_llama, watch, caplog):
    judge, trainer = Says(0.9, 0.5, 0.4, None), Logs()
    callback = WinRateCallback(judge, trainer, GREEDY, prompts=PROMPTS, use_soft_judge=True)
    metrics = watch(callback, tiny_llama)()
    expected = {"eval_win_rate": 1.5 / 3, "eval_avg_win_prob": 1.8 / 3}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert trainer.logs == [pytest.approx(expected)]
    assert "no verdict on 1 of 4 prompts" in caplog.text
    assert [(row["step"], row["prompt"], row["win"]) for row in rows(tmp_path)] == list(
        zip([5] * 4, PROMPTS, [0.9, 0.5, 0.4, None], strict=True)
    )
    assert judge.prompts == PROMPTS
    hard = WinRateCallback(Says(0.9), Logs(), GREEDY, num_prompts=2, prompts=PROMPTS, shuffle_order=False)
    assert watch(hard, tiny_llama)() == {"eval_loss": 1.0, "eval_win_rate": 1.0}
    assert hard.judge.flipped == [False, False]
    silent = WinRateCallback(Says(None), Logs(), GREEDY, prompts=PROMPTS)
    assert watch(silent, tiny_llama)() == {"eval_loss": 1.0}


@pytest.mark.parametrize("kind", ["none", "copy", "adapter"])
def test_the_baseline_is_the_model_before(kind, tiny_llama, watch):
    model, trainer = tiny_llama, Logs()
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    if kind != "none":
        trainer.reference = reference_for(model)
    judge = Says(1.0)
    evaluate = watch(WinRateCallback(judge, trainer, GREEDY, prompts=PROMPTS), model)
    evaluate(1)
    before = [completion for completion, _ in judge.pairs]
    assert judge.pairs == [(text, text) for text in before]
    moved(model)
    evaluate(2)
    assert [baseline for _, baseline in judge.pairs] == before
    assert [completion for completion, _ in judge.pairs] != before


def test_a_resumed_run_knows_its_baseline(tiny_llama, watch):
    first = WinRateCallback(Says(1.0), Logs(), GREEDY, prompts=PROMPTS)
    watch(first, tiny_llama)
    state = json.loads(json.dumps(first.state()))
    moved(tiny_llama)
    again = WinRateCallback(Says(1.0), Logs(), GREEDY, prompts=PROMPTS)
    watch(again, tiny_llama, step=3, saved={"WinRateCallback": state})
    assert again.baseline == first.baseline
    with pytest.raises(ValueError, match="no baseline to win against"):
        watch(WinRateCallback(Says(1.0), Logs(), GREEDY, prompts=PROMPTS), tiny_llama, step=3)


def test_a_resumed_run_has_the_same_prompts(tiny_llama, watch):
    first = WinRateCallback(Says(1.0), Logs(), GREEDY, prompts=PROMPTS)
    watch(first, tiny_llama)
    other = WinRateCallback(Says(1.0), Logs(), GREEDY, prompts=PROMPTS[::-1])
    with pytest.raises(ValueError, match="on 4 prompts, but those of this WinRateCallback are 4 others"):
        watch(other, tiny_llama, step=3, saved={"WinRateCallback": first.state()})


def test_judges_are_shown_messages_after_messages(tiny_llama, watch):
    judge = Says(1.0)
    asked = [{"role": "user", "content": "Is ice cold?"}]
    watch(WinRateCallback(judge, Logs(), GREEDY, prompts=[asked]), tiny_llama)()
    ((first, second),) = judge.pairs
    assert judge.prompts == [asked]
    assert first == second == [{"role": "assistant", "content": first[0]["content"]}]


def test_in_a_run(tiny_llama, bpe_tokenizer, tmp_path):
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    args = OnlineDPOConfig(
        output_dir=str(tmp_path), use_cpu=True, max_new_tokens=4, max_steps=2, eval_strategy="steps", eval_steps=1,
        per_device_train_batch_size=2, save_strategy="steps", save_steps=1, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    trainer = OnlineDPOTrainer(
        tiny_llama, None, reward, args, train_dataset=data, eval_dataset=data, processing_class=bpe_tokenizer
    )
    trainer.add_callback(WinRateCallback(Says(1.0, 0.0), trainer, GREEDY, num_prompts=3))
    trainer.train()
    found = [log["eval_win_rate"] for log in trainer.state.log_history if "eval_win_rate" in log]
    assert found == pytest.approx([2 / 3] * 2)
    assert trainer.evaluate()["eval_win_rate"] == pytest.approx(2 / 3)
    saved = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert len(saved["stateful_callbacks"]["WinRateCallback"]["attributes"]["baseline"]) == 3
    trainer.add_callback(WinRateCallback(Says(1.0), trainer, GREEDY, num_prompts=3))
    with pytest.raises(ValueError, match="several WinRateCallbacks"):
        trainer.train()


def test_it_may_join_a_run_that_is_resumed(tiny_llama, bpe_tokenizer, tmp_path):
    """The reference is the baseline; the checkpoints from there on have what it wrote."""
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])

    def trainer(**options):
        args = OnlineDPOConfig(
            output_dir=str(tmp_path), use_cpu=True, max_new_tokens=4, save_steps=1, disable_tqdm=True, **options
        )
        reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
        model = copy.deepcopy(tiny_llama)
        return OnlineDPOTrainer(model, None, reward, args, None, data, data, bpe_tokenizer)

    trainer(max_steps=1).train()
    again = trainer(max_steps=2)
    again.add_callback(WinRateCallback(Says(1.0), again, GREEDY, num_prompts=3))
    again.train(resume_from_checkpoint=True)
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert len(saved["stateful_callbacks"]["WinRateCallback"]["attributes"]["baseline"]) == 3


def test_prompts_are_needed(tiny_llama, bpe_tokenizer, tmp_path):
    data = Dataset.from_list([{"text": "Ice is cold."}] * 2)
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1)
    trainer = SFTTrainer(tiny_llama, args, train_dataset=data, processing_class=bpe_tokenizer)
    with pytest.raises(ValueError, match="WinRateCallback needs prompts"):
        WinRateCallback(Says(1.0), trainer)
