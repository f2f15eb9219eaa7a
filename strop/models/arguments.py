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
