"""DPO starts at ln 2, shares its prompts, and a step's cut changes nothing."""

import copy
import math

import pytest
import torch
from datasets import Dataset

from strop.data.collate import keep_examples
from strop.losses.reduce import StepCounts
from strop.trainer.dpo import DPOConfig, DPOTrainer

PAIRS = Dataset.from_list(
    [
        {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."},
        {"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Ice is hot and fire is cold."},
        {"prompt": "How many legs has a spider?", "chosen": " A spider has eight legs.", "rejected": " Six."},
        {"prompt": "Is fire cold?", "chosen": " Fire is hot.", "rejected": " Yes."},
    ]
)


def train(model, tokenizer, tmp_path, trainer_options=None, **options) -> DPOTrainer:
    defaults = {
        "output_dir": str(tmp_path),
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
    trainer = DPOTrainer(
        model=copy.deepcopy(model),
        args=DPOConfig(**defaults | options),
        train_dataset=PAIRS,
        processing_class=tokenizer,
        **trainer_options or {},
    )
    trainer.train()
    return trainer


def logs(trainer):
    names = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/rejected")
    return torch.tensor([[log[name] for name in names] for log in trainer.state.log_history if "loss" in log])


def assert_same_run(one, other):
    torch.testing.assert_close(logs(one), logs(other), rtol=1e-4, atol=1e-5)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_first_loss_is_ln_2_and_the_reference_stays(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = train(tiny_llama, bpe_tokenizer, tmp_path)
    first, second = logs(trainer)[:, 0].tolist()
    assert first == pytest.approx(math.log(2), abs=1e-6)
    assert second < first
    assert logs(trainer)[0, 4] == 0.5  # ties count half
    for a, b in zip(trainer.reference.model.parameters(), tiny_llama.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "padded"},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"activation_checkpointing": False},
    ],
    ids=str,
)
def test_how_a_step_is_computed_changes_nothing(tiny_llama, bpe_tokenizer, tmp_path, loss_type, options):
    whole = train(tiny_llama, bpe_tokenizer, tmp_path, loss_type=loss_type)
    assert_same_run(train(tiny_llama, bpe_tokenizer, tmp_path, loss_type=loss_type, **options), whole)


def test_logps_are_the_models_own(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = train(tiny_llama, bpe_tokenizer, tmp_path, max_steps=1)
    expected = []
    for pair in trainer.train_dataset:
        ids = torch.tensor([pair["prompt_ids"] + pair["rejected_ids"]])
        own = tiny_llama(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        expected.append(own[len(pair["prompt_ids"]) - 1 :].sum().item())
    assert logs(trainer)[0, 5].item() == pytest.approx(sum(expected) / 4, rel=1e-5)


def test_a_fresh_adapter_is_its_own_reference(tiny_llama, bpe_tokenizer, tmp_path):
    from peft import LoraConfig

    from strop.models.reference import AdapterOff

    trainer = train(tiny_llama, bpe_tokenizer, tmp_path, {"peft_config": LoraConfig(task_type="CAUSAL_LM")})
    assert isinstance(trainer.reference, AdapterOff)
    losses = logs(trainer)[:, 0].tolist()
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] < losses[0]


def test_the_reference_follows_the_policy(tiny_llama, bpe_tokenizer, tmp_path):
    trainer = train(
        tiny_llama,
        bpe_tokenizer,
        tmp_path,
        max_steps=1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.6,
    )
    for ref, policy, start in zip(
        trainer.reference.model.parameters(), trainer.model.parameters(), tiny_llama.parameters(), strict=True
    ):
        torch.testing.assert_close(ref, 0.6 * policy + 0.4 * start)


def test_the_model_cannot_be_its_own_reference(tiny_llama, bpe_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="ref_model is the model itself"):
        DPOTrainer(
            tiny_llama,
            tiny_llama,
            DPOConfig(str(tmp_path), use_cpu=True),
            train_dataset=PAIRS,
            processing_class=bpe_tokenizer,
        )


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_pairs_that_only_fill_up_leave_no_trace(tiny_llama, bpe_tokenizer, tmp_path, loss_type):
    """The gradient of two pairs, one of them without a loss, is that of the other alone, and finite."""
    args = DPOConfig(str(tmp_path), use_cpu=True, loss_type=loss_type)
    trainer = DPOTrainer(tiny_llama, None, args, train_dataset=PAIRS, processing_class=bpe_tokenizer)
    rows = [trainer.train_dataset[i] for i in range(2)]
    both, alone = keep_examples(trainer.data_collator(rows), 1), trainer.data_collator(rows[:1])
    gradients = []
    for batch in (both, alone, keep_examples(both, 0)):
        trainer.model.zero_grad()
        trainer.loss(trainer.model, batch, StepCounts(tokens=1, sequences=2))[0].backward()
        gradients.append(trainer.model.model.layers[0].mlp.up_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[1].abs().max() > 0
    assert (gradients[2] == 0).all()


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5.0}], ids=str)
def test_options_without_effect_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="would have no effect"):
        DPOConfig(str(tmp_path), use_cpu=True, **options)
