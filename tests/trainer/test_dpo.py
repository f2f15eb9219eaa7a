"""DPO starts at ln 2, and however a step is computed, every loss has the same value and gradient."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from strop.data.collate import keep_examples
from strop.data.preference import PreferenceCollator
from strop.losses.preference import Pairs
from strop.losses.reduce import StepCounts
from strop.trainer.dpo import DPOConfig, DPOTrainer
from strop.trainer.dpo_config import as_list

PAIRS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot and fire is cold."},
        {"prompt": "How many legs has a spider?", "chosen": " A spider has eight legs.", "rejected": " Six."},
        {"prompt": "Is fire cold?", "chosen": " Fire is hot.", "rejected": " Yes."},
    ]
)


def square(pairs, beta):
    """A loss of the user's."""
    return (1 - beta * pairs.margin) ** 2


LOSSES = {
    **{name: {"loss_type": name} for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "bco_pair")},
    **{name: {"loss_type": name} for name in ("sppo_hard", "apo_zero", "apo_down", "discopop", "sft")},
    **{f"smooth {n}": {"loss_type": n, "label_smoothing": 0.2} for n in ("sigmoid", "robust", "exo_pair")},
    **{n: {"loss_type": n} for n in ("aot", "aot_unpaired")},
    "smooth aot": {"loss_type": "aot", "label_smoothing": 0.1},
    "a function": {"loss_type": square},
    "MPO": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "aot and sft": {"loss_type": ["aot", "sigmoid", "sft"], "loss_weights": [1.0, 0.5, 0.1]},
    "RPO": {"rpo_alpha": 0.5},
    "WPO": {"use_weighting": True, "loss_type": ["hinge", "sft"]},
    "LD": {"ld_alpha": 0.3},
    "forward KL": {"f_divergence_type": "forward_kl"},
    "alpha": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.2},
}


def arguments(folder, **options) -> DPOConfig:
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return DPOConfig(**defaults | options)


def train(model, tokenizer, tmp_path, trainer_options=None, **options) -> DPOTrainer:
    trainer = DPOTrainer(
        model=copy.deepcopy(model),
        args=arguments(tmp_path, **options),
        train_dataset=PAIRS,
        processing_class=tokenizer,
        **trainer_options or {},
    )
    trainer.train()
    return trainer


def use(trainer, **options) -> None:
    """Let the trainer go on with these settings."""
    for name, value in ({"loss_type": "sigmoid", "label_smoothing": 0.0} | options).items():
        setattr(trainer.args, name, as_list(value) if name == "loss_type" else value)


def logs(trainer):
    names = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/rejected")
    return torch.tensor([[log[name] for name in names] for log in trainer.state.log_history if "loss" in log])


def other(model) -> LlamaForCausalLM:
    """A model unlike `model`, of the same shape."""
    torch.manual_seed(7)
    return LlamaForCausalLM(model.config).to(model.dtype)


def step(trainer, *batches):
    """The loss of one optimizer step of these micro-batches, and the gradients of trained weights."""
    batches = [dict(batch) for batch in batches]
    counts, _ = trainer._count_over_ranks(batches)
    trainer.look_ahead(batches)
    trainer.model.zero_grad()
    total = 0.0
    for batch in batches:
        share, _ = trainer.loss(trainer.model, batch, counts)
        share.backward()
        total += share.item()
    return total, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def assert_same(one, another):
    """Up to what norms and positions of the model are rounded to, which are float32."""
    assert one[0] == pytest.approx(another[0], rel=1e-6)
    largest = max(gradient.abs().max() for gradient in another[1].values()).item()
    torch.testing.assert_close(one[1], another[1], rtol=1e-5, atol=1e-6 * largest)


@pytest.fixture
def float64_trainer(tiny_llama, bpe_tokenizer, tmp_path):
    """Policy and reference differ."""
    model = tiny_llama.double()
    return DPOTrainer(
        model,
        other(model),
        arguments(tmp_path, activation_checkpointing=False),
        train_dataset=PAIRS,
        processing_class=bpe_tokenizer,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_how_a_step_is_computed_changes_nothing(float64_trainer, bpe_tokenizer, name):
    trainer = float64_trainer
    use(trainer, **LOSSES[name])
    rows = list(trainer.train_dataset)
    collate = trainer.data_collator
    padded = PreferenceCollator(bpe_tokenizer.pad_token_id, "padded")
    whole = step(trainer, collate(rows))
    assert max(gradient.abs().max() for gradient in whole[1].values()) > 1e-4
    assert_same(step(trainer, padded(rows)), whole)
    assert_same(step(trainer, collate(rows[:1]), padded(rows[1:3]), collate(rows[3:])), whole)
    assert_same(step(trainer, collate(rows[::-1])), whole)
    assert_same(step(trainer, keep_examples(collate(rows + rows[:2]), 4)), whole)  # rows that fill up a round
    trainer.model.activation_checkpointing_enable()
    trainer.model.train()
    assert_same(step(trainer, collate(rows)), whole)


@pytest.mark.parametrize("name", LOSSES)
def test_an_adapters_step_neither(tiny_llama, bpe_tokenizer, tmp_path, name):
    model = get_peft_model(tiny_llama.double(), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    args = arguments(tmp_path, **LOSSES[name])
    trainer = DPOTrainer(model, args=args, train_dataset=PAIRS, processing_class=bpe_tokenizer)
    for weight in trainer.reference.weights.values():
        weight += 0.1 * torch.randn_like(weight)
    rows, collate = list(trainer.train_dataset), trainer.data_collator
    whole = step(trainer, collate(rows))
    assert all("lora_" in parameter for parameter in whole[1])
    cut = collate(rows[:3]), PreferenceCollator(0, "padded")(rows[3:])
    assert_same(step(trainer, *cut), whole)
    trainer.model.activation_checkpointing_enable({"use_reentrant": False})
    trainer.model.train()
    assert_same(step(trainer, *cut), whole)


@pytest.mark.parametrize("name", ["sigmoid", "sft", "aot", "aot_unpaired", "aot and sft", "MPO", "RPO", "WPO", "LD"])
def test_evaluation_is_of_the_whole_set(float64_trainer, name):
    """The batch size doesn't matter, and before training eval_loss is the loss of the first step."""
    trainer = float64_trainer
    values = []
    for size in (4, 3):
        use(trainer, per_device_eval_batch_size=size, **LOSSES[name])
        values.append(trainer.evaluate(PAIRS))
    for metric in ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies", "entropy", "mean_token_accuracy"):
        assert values[0][f"eval_{metric}"] == pytest.approx(values[1][f"eval_{metric}"], rel=1e-6), metric
    expected, _ = step(trainer, trainer.data_collator(list(trainer.train_dataset)))
    assert values[0]["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_metrics_are_the_models_own_log_probabilities(float64_trainer):
    """logps and rewards are of all tokens under LD-DPO too; rewards are beta log pi/ref; accuracy is of the chosen."""
    trainer = float64_trainer
    use(trainer, ld_alpha=0.0, beta=0.3)
    metrics = trainer.evaluate(PAIRS)
    values = {side: [[], [], []] for side in ("chosen", "rejected")}
    for pair in trainer.train_dataset:
        for side, lists in values.items():
            ids, start = torch.tensor([pair["prompt_ids"] + pair[f"{side}_ids"]]), len(pair["prompt_ids"])
            for model, sums in zip((trainer.model, trainer.reference.model), lists, strict=False):
                log_p = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
                sums.append(log_p.gather(-1, ids[0, start:, None]).sum().item())
                if model is trainer.model:
                    lists[2] += (log_p.argmax(-1) == ids[0, start:]).tolist()
    for side, (policy, reference, _) in values.items():
        assert metrics[f"eval_logps/{side}"] == pytest.approx(sum(policy) / 4)
        assert metrics[f"eval_rewards/{side}"] == pytest.approx(0.3 * (sum(policy) - sum(reference)) / 4)
    hits = values["chosen"][2]
    assert metrics["eval_mean_token_accuracy"] == pytest.approx(sum(hits) / len(hits))


def test_by_hand(float64_trainer):
    """A pair with log pi -4.0 and -6.4, log ref -5.2 and -6.0, of 4 and 2 tokens."""
    trainer = float64_trainer
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    policy = torch.tensor([[-1.0] * 4, [-3.2] * 2 + [9.0] * 2])
    reference = torch.tensor([[-1.3] * 4, [-3.0] * 2 + [9.0] * 2])
    for expected, options in (
        (0.616344, {}),
        (0.84, {"loss_type": "hinge"}),
        (20.25, {"loss_type": "ipo"}),
        (0.668460, {"loss_type": "sigmoid_norm"}),
        (0.632344, {"label_smoothing": 0.1}),
        (0.596344, {"loss_type": "robust", "label_smoothing": 0.1}),
        (0.960037, {"loss_type": "apo_zero"}),
        (0.990049, {"loss_type": "apo_down"}),
    ):
        use(trainer, **options)
        pairs = trainer.pairs(policy, reference, mask, torch.tensor([True]))
        assert trainer.row_losses(pairs).item() == pytest.approx(expected, abs=1e-6), options


@pytest.mark.parametrize(("options", "expected"), [({"rpo_alpha": 1.0}, 1.616344), ({"rpo_alpha": 0.5}, 1.116344)])
def test_rpo_by_hand(float64_trainer, monkeypatch, options, expected):
    """The same pair: 0.616344 and alpha times the mean negative log-likelihood of the chosen's tokens, 4 / 4."""
    from strop.models.logps import TokenScores
    from strop.trainer import dpo

    trainer = float64_trainer
    use(trainer, **options)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    policy, zeros = torch.tensor([[-1.0] * 4, [-3.2] * 2 + [0.0] * 2]), torch.zeros(2, 4)
    monkeypatch.setattr(dpo, "logps", lambda *_, **__: TokenScores(policy, zeros, zeros))
    batch = {"completion_mask": mask, "reference": torch.tensor([[-1.3] * 4, [-3.0] * 2 + [0.0] * 2])}
    loss, metrics = trainer.loss(trainer.model, batch, StepCounts(4, 1))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics["nll_loss"] == (4.0, 4)
    assert (metrics["rewards/chosen"][0].item(), metrics["rewards/rejected"][0].item()) == pytest.approx((0.12, -0.04))


def test_experts_balancing_loss_is_added_once(float64_trainer, monkeypatch):
    """0.01 of an auxiliary loss of 5 makes 0.05, however the step is cut."""
    from strop.trainer import dpo

    trainer, rows = float64_trainer, list(float64_trainer.train_dataset)
    without = step(trainer, trainer.data_collator(rows))[0]
    trainer.aux_loss_coef, logps = 0.01, dpo.logps
    monkeypatch.setattr(dpo, "logps", lambda *a, **k: logps(*a, **k)._replace(aux_loss=torch.tensor(5.0)))
    assert step(trainer, trainer.data_collator(rows))[0] == pytest.approx(without + 0.05)
    parts = (trainer.data_collator(rows[:1]), trainer.data_collator(rows[1:]))
    assert step(trainer, *parts)[0] == pytest.approx(without + 0.05)


@pytest.mark.parametrize("loss_type", ["sigmoid", "aot"])
def test_experts_balancing_loss_is_part_of_evaluation(float64_trainer, monkeypatch, loss_type):
    """Also where the losses of rows wait for the whole set."""
    from strop.trainer import dpo

    trainer = float64_trainer
    trainer.args.loss_type = [loss_type]
    without = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.aux_loss_coef, logps = 0.01, dpo.logps
    monkeypatch.setattr(dpo, "logps", lambda *a, **k: logps(*a, **k)._replace(aux_loss=torch.tensor(5.0)))
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(without + 0.05)


def test_the_first_loss_is_ln_2_and_the_reference_stays(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = train(tiny_llama, bpe_tokenizer, tmp_path)
    first, second = logs(trainer)[:, 0].tolist()
    assert first == pytest.approx(math.log(2), abs=1e-6)
    assert second < first
    assert logs(trainer)[0, 4] == 0.5  # ties count half
    for a, b in zip(trainer.reference.model.parameters(), tiny_llama.parameters(), strict=True):
        assert torch.equal(a, b)


def test_predict_returns_implicit_rewards(tiny_llama, bpe_tokenizer, tmp_path):
    """(rows, 2) of raw rows; compute_metrics reads the same, and labels that name the chosen's column."""
    seen = []

    def accuracy(predicted):
        seen.append(predicted)
        return {"own": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    trainer = DPOTrainer(
        tiny_llama,
        other(tiny_llama),
        arguments(tmp_path, per_device_eval_batch_size=3),
        eval_dataset=PAIRS,
        processing_class=bpe_tokenizer,
        compute_metrics=accuracy,
    )
    metrics = trainer.evaluate()
    rewards = trainer.predict(PAIRS).predictions
    assert rewards.shape == (4, 2)
    assert rewards[:, 0].mean() == pytest.approx(metrics["eval_rewards/chosen"], rel=1e-5)
    assert metrics["eval_own"] == metrics["eval_rewards/accuracies"]
    assert (seen[0].predictions == rewards).all()


def test_evaluation_on_raw_rows_and_on_several_sets(tiny_llama, bpe_tokenizer, tmp_path):
    sets = {"all": PAIRS, "two": PAIRS.select([1, 2])}
    args = arguments(tmp_path)
    trainer = DPOTrainer(
        tiny_llama, other(tiny_llama), args, train_dataset=PAIRS, eval_dataset=sets, processing_class=bpe_tokenizer
    )
    metrics = trainer.evaluate()
    for name, rows in sets.items():
        raw = trainer.evaluate(rows)
        for metric in ("loss", "rewards/accuracies", "logps/rejected", "entropy"):
            assert metrics[f"eval_{name}_{metric}"] == raw[f"eval_{metric}"]


def test_it_runs_without_arguments(tiny_llama, bpe_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_llama.config._name_or_path = "some/tiny"
    trainer = DPOTrainer(
        model=tiny_llama, ref_model=other(tiny_llama), train_dataset=PAIRS, processing_class=bpe_tokenizer
    )
    assert (trainer.args.output_dir, trainer.args.loss_type) == ("tiny-DPO", ["sigmoid"])


def test_a_function_must_return_a_loss_a_pair(float64_trainer):
    trainer = float64_trainer
    use(trainer, loss_type=lambda pairs, beta: pairs.margin.mean())
    one = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"returned \(\) for 3 pairs"):
        trainer.row_losses(Pairs(one, one, one, one))
