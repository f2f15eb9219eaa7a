"""A reference that follows the policy (TR-DPO, arXiv:2404.09656)."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Module

from strop.models.reference import FrozenModel, FrozenWeights
from strop.models.values import without_critic

from .state import TensorState, refuse_shards


class SyncRefModelCallback(TensorState):
    """Every `ref_model_sync_steps`, ref <- alpha * policy + (1 - alpha) * ref with alpha = `ref_model_mixup_alpha`.

    Both are fields of the trainer's config. Weights are paired by name; those that aren't trained stay. Each checkpoint
    holds the reference, and a resumed run goes on with it. Refuses a reference that lacks weights of the policy, and
    runs too short for a single update.
    """

    file = "reference.safetensors"

    def __init__(self, ref_model: Module | FrozenModel | FrozenWeights, accelerator=None):
        """`accelerator` is accepted for TRL's sake."""
        self.reference = FrozenModel(ref_model) if isinstance(ref_model, Module) else ref_model
        self.moving: dict[str, Tensor] = {}
        """The reference's counterparts of the trained weights."""

    def state(self) -> dict[str, Tensor]:
        return self.moving

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, weight in state.items():
            self.moving[name].copy_(weight)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        refuse_shards(args, "a moving reference")
        if state.max_steps < args.ref_model_sync_steps:
            raise ValueError(
                f"ref_model_sync_steps={args.ref_model_sync_steps} would never move the reference in a run of "
                f"{state.max_steps} steps; choose fewer, or leave sync_ref_model out"
            )
        self.moving = counterparts(self.reference.weights, model)
        if state.global_step > 0:
            self.resume(args, state, "reference")

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % args.ref_model_sync_steps:
            return
        for name, policy in trained_weights(model).items():
            reference = self.moving[name]
            reference.lerp_(policy.to(reference), args.ref_model_mixup_alpha)


def trained_weights(model: Module) -> dict[str, Tensor]:
    """Those of the policy."""
    with without_critic(model):
        return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def counterparts(weights: Mapping[str, Tensor], model: Module) -> dict[str, Tensor]:
    """Those of `weights` that have the names of the trained weights of `model`; refuses where there are none."""
    trained = trained_weights(model)
    missing = [name for name, w in trained.items() if name not in weights or weights[name].shape != w.shape]
    if missing:
        raise ValueError(
            f"the reference can't follow the policy: it has no {missing[0]!r} of the same shape ({len(missing)} of "
            f"{len(trained)} trained weights have no counterpart). Leave ref_model out, or pass a model of the same "
            "architecture with the same adapter"
        )
    return {name: weights[name] for name in trained}
