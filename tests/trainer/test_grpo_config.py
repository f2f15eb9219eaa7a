"""TRL's names are taken, at TRL's own values; what the chosen loss doesn't use is not."""

import pytest

from strop import compat
from strop.losses.policy import POLICY_LOSSES
from strop.trainer.grpo_config import LOSSES, GRPOConfig
from strop.trainer.rloo import RLOOConfig

SHARED = {
    **{"model_init_kwargs": None, "trust_remote_code": False, "router_aux_loss_coef": None, "disable_dropout": False},
    **{"num_generations_eval": None, "max_completion_length": 512, "ds3_gather_for_generation": True},
    **{"shuffle_dataset": True, "pad_to_multiple_of": "auto", "generation_batch_size": None},
    **{"steps_per_generation": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None},
    **{"generation_kwargs": None, "chat_template_kwargs": None, "repetition_penalty": 1.0},
    **{"cache_implementation": None, "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm"},
    **{"vllm_enable_sleep_mode": False, "vllm_structured_outputs_regex": None, "vllm_server_base_url": None},
    **{"vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0},
    **{"vllm_group_port": 51216, "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": None},
    **{"vllm_tensor_parallel_size": 1, "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None},
    **{"reward_weights": None, "mask_truncated_completions": False, "sync_ref_model": False},
    **{"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "log_completions": False, "log_multimodal": True},
    **{"num_completions_to_print": None, "log_unique_prompts": False},
    **{"use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None},
    **{"learning_rate": 1e-6, "remove_unused_columns": False},
}
"""Of both configs of TRL 1.16, with their values there."""
GRPO = SHARED | {
    **{"cast_lm_head_to_fp32": False, "num_generations": 8, "beta": 0.0, "delta": None, "loss_type": "dapo"},
    **{"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0},
    **{"vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "importance_sampling_level": "token", "scale_rewards": "group"},
    **{"multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0, "entropy_coef": 0.0},
    **{"use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005},
    **{"entropy_target": 0.2, "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True},
    **{"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0},
    **{"vllm_importance_sampling_clip_min": None, "off_policy_mask_threshold": None, "use_bias_correction_kl": True},
    **{"log_completions_hub_repo": None},
}
RLOO = SHARED | {"num_generations": 2, "beta": 0.05, "normalize_advantages": False, "reward_clip_range": None}
OLD = {"use_transformers_paged": False, "vllm_importance_sampling_cap": 3.0, "max_new_tokens": 512}
OTHER_DEFAULTS = {"disable_dropout", "epsilon", "importance_sampling_level", "generation_batch_size"} | {
    "steps_per_generation",
    "pad_to_multiple_of",
}
"""Whose own default is another, or is settled by the config."""
REFUSED = {
    **{"use_vllm": True, "cache_implementation": "static", "transformers_continuous_batching_config": {"max": 1}},
    **{"vllm_server_port": 8001, "log_completions_hub_repo": "me/rollouts"},
}
"""What this generator doesn't have."""


def config(config_class, **given):
    return config_class(**{"output_dir": "unused", "use_cpu": True} | given)


@pytest.mark.parametrize(("config_class", "names"), [(GRPOConfig, GRPO), (RLOOConfig, RLOO)])
def test_every_name_of_trl_is_taken_at_its_value(config_class, names):
    plain = config(config_class)
    for name, value in names.items():
        found = getattr(config(config_class, **{name: value}), name)
        if name not in OTHER_DEFAULTS:
            assert found == value == getattr(plain, name), name
    config(config_class, **names)


@pytest.mark.parametrize("name", sorted(OLD))
def test_old_names_are_taken(name, monkeypatch):
    monkeypatch.setattr(compat, "_warned", set())
    with pytest.warns(FutureWarning, match="is now called"):
        config(GRPOConfig, **{name: OLD[name]})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_there_is_not_is_refused(name):
    with pytest.raises(ValueError, match=name):
        config(GRPOConfig, **{name: REFUSED[name]})


OPTIONS = {
    **{"epsilon": 0.3, "epsilon_high": 2.0, "delta": 4.0, "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 1.5},
    **{"vespo_k_pos": 1.5, "vespo_lambda_pos": 1.5, "vespo_k_neg": 1.5, "vespo_lambda_neg": 1.5},
}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_options_of_one_loss_are_refused_by_others(loss_type):
    for name, value in OPTIONS.items():
        if name in POLICY_LOSSES[loss_type].options:
            assert config(GRPOConfig, loss_type=loss_type, **{name: value}).loss_options[name] == value
        else:
            with pytest.raises(ValueError, match=f"{name}={value} would have no effect with loss_type='{loss_type}'"):
                config(GRPOConfig, loss_type=loss_type, **{name: value})
