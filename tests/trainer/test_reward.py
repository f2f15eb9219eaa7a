"""A reward model learns which answer is preferred, however a step is computed, and scores alike once it is saved."""

import copy
import json
import logging
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
)

from strop.losses.reduce import StepCounts
from strop.rewards.reward_model import score
from strop.trainer.reward import RewardConfig, RewardTrainer

GOLDENS = Path(__file__).parents[1] / "goldens"
RUNS = json.loads((GOLDENS / "reward_runs.json").read_text())["cases"]
PAIRS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot and fire is cold."},
        {"prompt": "How many legs has a spider?", "chosen": " A spider has eight legs.", "rejected": " Six."},
        {"prompt": "Is fire cold?", "chosen": " Fire is hot.", "rejected": " Yes."},
    ]
)
RANKED = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "completions": [" Blue.", " The sky is red.", " Ice."]},
        {"prompt": "Is ice hot?", "completions": [" No.", " Yes, ice is hot."]},
        {"prompt": "Is fire cold?", "completions": [" Hot.", " No", " Yes.", " Fire is cold."]},
    ]
)
METRICS = ("loss", "grad_norm", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")


@pytest.fixture
def reward_model(tiny_llama):
    """The tiny Llama with a head whose scores differ clearly."""
    model = LlamaForSequenceClassification(LlamaConfig(**tiny_llama.config.to_dict() | {"num_labels": 1}))
    model.model.load_state_dict(tiny_llama.model.state_dict())
    torch.nn.init.normal_(model.score.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    return model


def config(folder, **options) -> RewardConfig:
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return RewardConfig(**defaults | options)


def trainer_of(model, tokenizer, folder, rows=PAIRS, trainer_options=None, **options) -> RewardTrainer:
    return RewardTrainer(
        copy.deepcopy(model),
        config(folder, **options),
        train_dataset=rows,
        processing_class=tokenizer,
        **trainer_options or {},
    )


def train(*args, **kwargs) -> RewardTrainer:
    trainer = trainer_of(*args, **kwargs)
    trainer.train()
    return trainer


def logs(trainer) -> torch.Tensor:
    return torch.tensor([[log[name] for name in METRICS] for log in trainer.state.log_history if "loss" in log])


def assert_same_run(one, other):
    torch.testing.assert_close(logs(one), logs(other), rtol=1e-5, atol=1e-5)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# One step


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case["name"])
def test_a_step_gives_trls_numbers(case, tmp_path):
    """Evaluation in one batch: TRL weighs batches of unequal size equally."""
    tokenizer = AutoTokenizer.from_pretrained(GOLDENS / "tiny_llama")
    model = AutoModelForSequenceClassification.from_pretrained(GOLDENS / "tiny_reward")
    rows, options = Dataset.from_list(case["rows"]), {"learning_rate": 1e-2, "max_steps": 1} | case["config"]
    trainer = train(model, tokenizer, tmp_path, rows, {"eval_dataset": rows}, **options)
    for side in ("chosen", "rejected"):
        assert [row["prompt_ids"] + row[f"{side}_ids"] for row in trainer.train_dataset] == case[side]
    log, evaluation = trainer.state.log_history[0], trainer.evaluate()
    for name, value in case["log"].items():
        assert log[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for name, value in case["eval"].items():
        assert evaluation[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("rows", [PAIRS, RANKED], ids=["pairs", "ranked"])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "padded", "pad_to_multiple_of": 16},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "activation_checkpointing": False},
    ],
    ids=str,
)
def test_how_a_step_is_computed_changes_nothing(reward_model, bpe_tokenizer, tmp_path, rows, options):
    whole = train(reward_model, bpe_tokenizer, tmp_path, rows, padding_free=True)
    assert_same_run(train(reward_model, bpe_tokenizer, tmp_path, rows, **options), whole)


def test_nor_with_an_adapter(reward_model, bpe_tokenizer, tmp_path):
    lora = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear")}
    whole = train(reward_model, bpe_tokenizer, tmp_path, PAIRS, lora)
    other = train(reward_model, bpe_tokenizer, tmp_path, PAIRS, lora, layout="padded", activation_checkpointing=False)
    assert_same_run(other, whole)


def test_a_rankings_loss_by_hand(reward_model, bpe_tokenizer, tmp_path):
    """-log of: best of three, then of the two left; and of four, three, two."""
    trainer = trainer_of(reward_model, bpe_tokenizer, tmp_path, RANKED)
    assert trainer.wanted.ranked
    prompts = [row["prompt"] for row in RANKED for _ in row["completions"]]
    values = trainer.score(prompts, [answer for row in RANKED for answer in row["completions"]]).split([3, 2, 4])
    expected = sum(
        math.log(sum(math.exp(x - s[i]) for x in s[i:])) for s in (v.tolist() for v in values) for i in range(len(s))
    )
    rights = [float(s[i] > s[j]) for s in values for i in range(len(s)) for j in range(i + 1, len(s))]
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(expected / 3, rel=1e-5)
    assert log["accuracy"] == pytest.approx(sum(rights) / 10)
    assert log["min_reward"] == pytest.approx(torch.cat(values).min().item(), abs=1e-5)


def test_a_ranking_of_two_is_a_pair(reward_model, bpe_tokenizer, tmp_path):
    two = [{"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]]} for row in PAIRS]
    ranked = train(reward_model, bpe_tokenizer, tmp_path, Dataset.from_list(two))
    assert_same_run(ranked, train(reward_model, bpe_tokenizer, tmp_path))


def test_margins_and_ties(reward_model, bpe_tokenizer, tmp_path):
    """All scores are 0, so a pair's loss is -log sigmoid(-margin), and ties count half."""
    torch.nn.init.zeros_(reward_model.score.weight)
    rows = PAIRS.add_column("margin", [0.0, 1.0, 2.0, -0.5])
    log = train(reward_model, bpe_tokenizer, tmp_path, rows).state.log_history[0]
    assert log["loss"] == pytest.approx(sum(math.log1p(math.exp(m)) for m in (0, 1, 2, -0.5)) / 4)
    assert (log["accuracy"], log["margin"]) == (0.5, 0.0)


def test_pairs_that_only_fill_up_leave_no_trace(reward_model, bpe_tokenizer, tmp_path):
    from strop.data.collate import keep_examples

    trainer = trainer_of(reward_model, bpe_tokenizer, tmp_path)
    rows = [trainer.train_dataset[i] for i in range(2)]
    both, alone = keep_examples(trainer.data_collator(rows), 1), trainer.data_collator(rows[:1])
    assert trainer.count(both) == StepCounts(2, 1)
    grads = []
    for batch in (both, alone, keep_examples(both, 0)):
        trainer.model.zero_grad()
        trainer.loss(trainer.model, batch, StepCounts(2, 1))[0].backward()
        grads.append(trainer.model.model.layers[0].mlp.up_proj.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[1].abs().max() > 0
    assert (grads[2] == 0).all()


# Models


def test_a_language_model_gets_one_new_head_by_the_seed(tiny_folder, tmp_path):
    """Padding that ends texts too is replaced, so that transformers' own reading of the saved model is right."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tiny_folder)
    args = config(tmp_path / "out", max_steps=1)
    heads = []
    for _ in range(2):
        trainer = RewardTrainer(str(tiny_folder), args, train_dataset=PAIRS)
        heads.append(trainer.model.score.weight.detach().clone())
    assert heads[0].shape == (1, 32)
    assert torch.equal(*heads)
    trainer.train()
    trainer.save_model()
    prompts, answers = ["Is ice hot?", "What is the sky?"], [" No.", " The sky is blue and the water is wet."]
    ours = trainer.score(prompts, answers)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    texts = [prompt + answer + tokenizer.eos_token for prompt, answer in zip(prompts, answers, strict=True)]
    plain = saved(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    torch.testing.assert_close(plain.detach(), ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(score(saved, tokenizer, prompts, answers), ours, rtol=1e-5, atol=1e-5)


def test_an_adapter_trains_and_saves_the_head(tiny_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO, "strop")
    peft_config = LoraConfig(r=4, task_type="CAUSAL_LM")
    trainer = RewardTrainer(str(tiny_folder), config(tmp_path / "out"), train_dataset=PAIRS, peft_config=peft_config)
    assert "task_type='CAUSAL_LM' is now 'SEQ_CLS'" in caplog.text
    head = trainer.model.score.modules_to_save["default"].weight
    before = head.detach().clone()
    trainer.train()
    assert not torch.equal(head, before)
    trainer.save_model()
    torch.manual_seed(99)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    loaded = PeftModel.from_pretrained(base, tmp_path / "out")
    ours = trainer.score(["Is ice hot?"], [" No."])
    torch.testing.assert_close(
        score(loaded, trainer.processing_class, ["Is ice hot?"], [" No."]), ours, atol=1e-6, rtol=0
    )
    again = RewardTrainer(str(tmp_path / "out"), config(tmp_path / "again"), train_dataset=PAIRS)
    torch.testing.assert_close(again.score(["Is ice hot?"], [" No."]), ours, atol=1e-6, rtol=0)


def test_an_encoder_reads_whole_rows_padded(word_tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO, "strop")
    torch.manual_seed(0)
    encoder = BertForSequenceClassification(
        BertConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_labels=1,
        )
    )
    rows = Dataset.from_list([{"prompt": "is ice", "chosen": " cold", "rejected": " hot"}] * 2)
    trainer = trainer_of(encoder, word_tokenizer, tmp_path, rows)
    assert "layout: padded (BertForSequenceClassification attends to later tokens" in caplog.text
    start = trainer.score(["is ice"], [" cold"])
    ids = [*word_tokenizer("is ice cold").input_ids, word_tokenizer.eos_token_id]
    torch.testing.assert_close(start, encoder.eval()(torch.tensor([ids])).logits[0].detach())
    trainer.train()
    assert trainer.state.log_history[1]["loss"] < trainer.state.log_history[0]["loss"]
    with pytest.raises(ValueError, match=r"score: rows have up to 603 tokens.*has learned 512 positions"):
        trainer.score(["is ice"], [" cold" * 600])
    with pytest.raises(ValueError, match=r"train: rows have up to 603 tokens.*max_length=512"):
        trainer_of(encoder, word_tokenizer, tmp_path, rows.map(lambda row: {"chosen": " cold" * 600}))


def test_it_learns_in_seconds(tiny_folder, tmp_path):
    """Answers that say "blue" are preferred: above 95 % of pairs with other words around are in order."""
    words = ["sky", "water", "ice", "fire", "spider", "legs", "cold", "wet"]
    sides = [f" The {a} is {{}} and the {b} is {c}." for a in words for b in words for c in words[:3]]
    rows = [
        {"prompt": "What?", "chosen": side.format("blue"), "rejected": sides[-i].format("green")}
        for i, side in enumerate(sides)
    ]
    rows = Dataset.from_list(rows).train_test_split(32, seed=0)
    args = config(
        tmp_path, optim="adamw_torch", learning_rate=3e-3, per_device_train_batch_size=8, max_steps=20, logging_steps=20
    )
    trainer = RewardTrainer(str(tiny_folder), args, train_dataset=rows["train"], eval_dataset=rows["test"])
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.95


# Reading


def test_scores_are_of_the_tokens_that_training_saw(reward_model, bpe_tokenizer, tmp_path):
    trainer = train(reward_model, bpe_tokenizer, tmp_path, max_steps=1)
    prediction = trainer.predict(PAIRS)
    prompts = list(PAIRS["prompt"])
    chosen = trainer.score(prompts, PAIRS["chosen"])
    torch.testing.assert_close(torch.from_numpy(prediction.predictions[:, 0]), chosen, rtol=1e-5, atol=1e-6)
    assert prediction.label_ids.tolist() == [[0, 1]] * 4
    by_hand = []
    for row in trainer.train_dataset:
        ids = torch.tensor([row["prompt_ids"] + row["chosen_ids"]])
        by_hand.append(trainer.model.score(trainer.model.model(ids).last_hidden_state)[0, -1])
    torch.testing.assert_close(torch.cat(by_hand).detach(), chosen, rtol=1e-5, atol=1e-5)
    for size in (1, 3):
        again = score(trainer.model, bpe_tokenizer, prompts, PAIRS["chosen"], batch_size=size)
        torch.testing.assert_close(again, chosen, rtol=1e-5, atol=1e-6)
    wholes = [row["prompt"] + row["chosen"] for row in PAIRS]
    torch.testing.assert_close(trainer.score(None, wholes), chosen, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="prompt: list of 1, completion: list of 2"):
        trainer.score(["a"], ["b", "c"])
    with pytest.raises(ValueError, match="in lists; but here are prompt: str of 2, completion: str of 2"):
        trainer.score("ab", "cd")


def test_messages_are_scored_as_they_are_trained(reward_model, bpe_tokenizer, tmp_path):
    def said(role, content):
        return [{"role": role, "content": content}]

    rows = Dataset.from_list(
        [
            {
                "prompt": said("user", row["prompt"]),
                "chosen": said("assistant", row["chosen"]),
                "rejected": said("assistant", row["rejected"]),
            }
            for row in PAIRS
        ]
    )
    trainer = trainer_of(reward_model, bpe_tokenizer, tmp_path, rows)
    trained = torch.from_numpy(trainer.predict(rows).predictions[:, 1])
    torch.testing.assert_close(trainer.score(rows["prompt"], rows["rejected"]), trained, rtol=1e-5, atol=1e-6)
    wholes = [row["prompt"] + row["rejected"] for row in rows]
    torch.testing.assert_close(trainer.score(None, wholes), trained, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [PAIRS, RANKED], ids=["pairs", "ranked"])
def test_an_evaluation_does_not_depend_on_its_batches(reward_model, bpe_tokenizer, tmp_path, rows):
    def measured(size, evaluated):
        trainer = trainer_of(
            reward_model, bpe_tokenizer, tmp_path, rows, {"eval_dataset": rows}, per_device_eval_batch_size=size
        )
        timing = ("runtime", "per_second", "preparation_time")
        found = trainer.evaluate(evaluated)
        return {name: value for name, value in found.items() if not name.endswith(timing)}

    whole = measured(4, None)
    assert {f"eval_{name}" for name in METRICS if name != "grad_norm"} <= whole.keys()
    assert measured(1, None) == pytest.approx(whole, rel=1e-5)
    assert measured(3, rows) == pytest.approx(whole, rel=1e-5)
    several = measured(4, {"a": rows, "b": rows.select(range(1))})
    assert several["eval_a_loss"] == pytest.approx(whole["eval_loss"])
    assert "eval_b_accuracy" in several


def test_compute_metrics_gets_scores_and_ranks(reward_model, bpe_tokenizer, tmp_path):
    def best_of(predictions):
        scores, ranks = predictions
        return {"filled": int((ranks >= 0).sum()), "widths": scores.shape[1]}

    trainer = trainer_of(
        reward_model, bpe_tokenizer, tmp_path, RANKED, {"eval_dataset": RANKED, "compute_metrics": best_of},
        per_device_eval_batch_size=2,
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert (metrics["eval_filled"], metrics["eval_widths"]) == (9, 4)


# Refused


def test_what_would_go_wrong_is_refused(tiny_llama, reward_model, bpe_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no classification head"):
        trainer_of(tiny_llama, bpe_tokenizer, tmp_path)
    reward_model.config.num_labels = 2
    with pytest.raises(ValueError, match="num_labels=2, but a reward is one number"):
        trainer_of(reward_model, bpe_tokenizer, tmp_path)
    reward_model.config.num_labels = 1
    reward_model.score.requires_grad_(False)
    with pytest.raises(ValueError, match="the head of LlamaForSequenceClassification is frozen"):
        trainer_of(reward_model, bpe_tokenizer, tmp_path)
    with pytest.raises(ValueError, match=r"center_rewards_coefficient=0.1 .* ranked completions"):
        trainer_of(reward_model, bpe_tokenizer, tmp_path, RANKED, center_rewards_coefficient=0.1)
    with pytest.raises(ValueError, match="it needs 'completions'"):
        trainer_of(reward_model, bpe_tokenizer, tmp_path, loss_type="plackett_luce")
    for options in ({"router_aux_loss_coef": 0.1}, {"loss_type": "bradley"}, {"center_rewards_coefficient": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            config(tmp_path, **options)
    assert config(tmp_path, max_length=None).overlong == "truncate"


def test_experts_are_not_balanced_and_that_is_said(bpe_tokenizer, tmp_path, caplog):
    shape = {
        "vocab_size": 400,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_experts": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 1}
    experts = Qwen3MoeConfig(**shape, **heads, num_labels=1, output_router_logits=True)
    trainer = train(AutoModelForSequenceClassification.from_config(experts), bpe_tokenizer, tmp_path)
    assert "the experts of Qwen3MoeForSequenceClassification aren't balanced" in caplog.text
    assert trainer.aux_loss_coef == 0


def test_a_saved_classifier_of_other_labels_is_refused(reward_model, bpe_tokenizer, tmp_path):
    reward_model.config.num_labels = 3
    reward_model.score = torch.nn.Linear(32, 3, bias=False)
    reward_model.save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="saved with num_labels=3, but num_labels=1 is wanted"):
        RewardTrainer(str(tmp_path / "three"), config(tmp_path), train_dataset=PAIRS, processing_class=bpe_tokenizer)
    reward_model.config.num_labels = 2
    AutoModelForTokenClassification.from_config(reward_model.config).save_pretrained(tmp_path / "steps")
    with pytest.raises(ValueError, match="is a LlamaForTokenClassification, saved with num_labels=2, but num_labels=1"):
        RewardTrainer(str(tmp_path / "steps"), config(tmp_path), train_dataset=PAIRS, processing_class=bpe_tokenizer)
