"""A reference model that follows the policy (TR-DPO, arXiv:2404.09656)."""

import torch
from torch.nn import Module
from transformers import TrainerCallback


class SyncRefModelCallback(TrainerCallback):
    """Every `ref_model_sync_steps`, ref <- alpha * policy + (1 - alpha) * ref with alpha = `ref_model_mixup_alpha`.

    Both are fields of the trainer's config.
    """

    def __init__(self, ref_model: Module, accelerator=None):
        """`accelerator` is accepted for TRL's sake."""
        self.ref_model = ref_model

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % args.ref_model_sync_steps:
            return
        for reference, policy in zip(self.ref_model.parameters(), model.parameters(), strict=True):
            reference.lerp_(policy.to(reference.dtype), args.ref_model_mixup_alpha)
