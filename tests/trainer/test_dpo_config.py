"""What a DPOConfig refuses, before anything is loaded: values out of range, and options that the losses don't read."""

import dataclasses
import json

import pytest

from strop.losses.preference import PREFERENCE_LOSSES, hinge, sigmoid
from strop.trainer.dpo_config import DPOConfig

# Fields of TRL 1.16's config beyond those of transformers.
TRL_FIELDS = (
    "model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout dataset_num_proc max_length "
    "truncation_mode padding_free pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size loss_type "
    "loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau "
    "activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps pad_token"
)


def config(**options) -> DPOConfig:
    return DPOConfig("unused", use_cpu=True, **options)


def test_every_field_of_trl_is_there():
    assert set(TRL_FIELDS.split()) <= {field.name for field in dataclasses.fields(DPOConfig)}


def test_losses_are_a_list():
    assert config().loss_type == ["sigmoid"]
    assert config(loss_type="ipo").loss_type == ["ipo"]
    both = config(loss_type=["sigmoid", "sft"], loss_weights=[0.5, 2.0])
    assert both.pair_losses == [(0.5, sigmoid)]
    assert both.nll_weight == 2.0
    assert dataclasses.replace(both, beta=0.2).loss_type == ["sigmoid", "sft"]


@pytest.mark.parametrize("loss", [*PREFERENCE_LOSSES, "sft"])
def test_every_loss_is_taken(loss):
    args = config(loss_type=loss, label_smoothing=1e-3 if loss == "exo_pair" else 0.0)
    assert len(args.pair_losses) == (loss != "sft")


def squared(pairs, beta):
    return (1 - beta * pairs.margin) ** 2


def test_a_function_is_a_loss_and_goes_through_json():
    """One of the table is called by its name, so that aot sees a whole step however it is given."""
    path = f"{squared.__module__}:squared"
    args = config(loss_type=["strop.losses.preference:aot", hinge, squared])
    assert args.loss_type == ["aot", "hinge", squared]
    names = json.loads(json.dumps(args.to_dict()))["loss_type"]
    assert names == ["aot", "hinge", path]


def test_options_reach_the_losses_that_have_them():
    args = config(loss_type=["discopop", "robust"], label_smoothing=0.2, discopop_tau=0.3)
    assert [args.loss_options(loss) for _, loss in args.pair_losses] == [{"tau": 0.3}, {"smoothing": 0.2}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sigmiod"}, "loss_type='sigmiod' is unknown.*Did you mean 'sigmoid'"),
        ({"loss_type": []}, "is no loss"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, r"loss_weights=\[1.0\] are 1, but .* are 2"),
        ({"beta": 0.0}, "beta=0.0 is out of range"),
        ({"beta": 0.0, "sync_ref_model": True}, "beta=0.0 is out of range"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5 is out of range"),
        ({"loss_type": "robust", "label_smoothing": 0.6}, "label_smoothing=0.6 is out of range"),
        ({"loss_type": "exo_pair"}, 'label_smoothing=0.0 makes loss_type="exo_pair" infinite'),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing=0.1 would have no effect with loss_type='ipo'"),
        ({"discopop_tau": 0.1}, "discopop_tau=0.1 would have no effect with loss_type='sigmoid'"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau=0.0 is out of range"),
        ({"length_column_name": "size"}, "length_column_name='size' would have no effect"),
        ({"ld_alpha": 2.0}, "ld_alpha=2.0 is out of range"),
        ({"ld_alpha": -0.1}, "ld_alpha=-0.1 is out of range"),
        ({"loss_type": "sft", "ld_alpha": 0.5}, "ld_alpha=0.5 would have no effect with loss_type='sft'"),
        ({"loss_type": "sft", "use_weighting": True}, "use_weighting=True would have no effect with loss_type='sft'"),
        ({"loss_type": ["aot", "sft"], "use_weighting": True}, "use_weighting=True would have no effect"),
        ({"f_divergence_type": "kl"}, "f_divergence_type='kl' is unknown"),
        ({"loss_type": "bco_pair", "f_divergence_type": "forward_kl"}, "bco_pair is derived for log pi/ref itself"),
        ({"loss_type": ["sigmoid", "aot"], "f_divergence_type": "forward_kl"}, "aot is derived for log pi/ref itself"),
        ({"f_alpha_divergence_coef": 0.7}, "f_alpha_divergence_coef=0.7 would have no effect"),
        ({"rpo_alpha": 0.0}, "rpo_alpha=0.0 is out of range"),
        ({"rpo_alpha": 1.0, "loss_type": ["sigmoid", "sft"]}, "two names of one term"),
        ({"precompute_ref_batch_size": 4}, "precompute_ref_batch_size=4 would have no effect"),
        ({"precompute_ref_log_probs": True, "sync_ref_model": True}, "sync_ref_model=True moves the reference"),
        ({"ref_model_sync_steps": 4}, "ref_model_sync_steps=4 would have no effect"),
        ({"sync_ref_model": True, "ref_model_sync_steps": 0}, "ref_model_sync_steps=0 is out of range"),
        ({"sync_ref_model": True, "ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha=0.0 is out of range"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 would have no effect"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 would have no effect"),
    ],
    ids=str,
)
def test_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)
