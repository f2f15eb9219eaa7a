"""Settings of what is done to a model. A field's docstring is its help on the command line and in the docs."""

from dataclasses import dataclass
from typing import Any


@dataclass
class ModelInitArguments:
    """How a model given by name or path is loaded, and what runs inside its forward pass."""

    model_init_kwargs: dict[str, Any] | str | None = None
    """Keyword arguments of `from_pretrained`, e.g. {"dtype": "bfloat16"}; only for a model given as a string."""

    trust_remote_code: bool = False
    """Run code that comes with the model."""

    router_aux_loss_coef: float | None = None
    """Weight of a mixture of experts' load-balancing loss; the model's own if not set, 0 for none."""

    activation_offloading: bool = False
    """Keep activations in host memory between forward and backward (needs an accelerator)."""


@dataclass
class ReferenceArguments:
    """The policy that training is compared with: by default the model as it was before."""

    precompute_ref_log_probs: bool = False
    """Ask the reference once for all rows before training, and keep no second model in memory."""

    precompute_ref_batch_size: int | None = None
    """Rows in a batch of that pass; per_device_eval_batch_size if not set."""

    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv:2404.09656)."""

    ref_model_sync_steps: int = 512
    """Optimizer steps between two updates of the reference."""

    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the updated reference, in (0, 1]."""
