"""Averaged weights: an exponential moving average of the trained weights, corrected for its lag."""

from pathlib import Path

import torch
from torch import Tensor, nn

from strop.models.reference import FrozenModel, FrozenWeights, weights_replaced
from strop.models.values import without_critic

from .state import TensorState, refuse_shards
from .sync_ref import counterparts


class BEMACallback(TensorState):
    """Bias-corrected moving average of the weights (BEMA, arXiv:2508.00180), saved to `<output_dir>/bema` at the end.

    With theta_0 the weights at step `update_after`, every `update_freq` optimizer steps t after it

        beta  = max((lag + multiplier t)^-ema_power, min_ema_multiplier)
        alpha = (lag + multiplier t)^-bias_power
        ema   = (1 - beta) ema + beta theta
        bema  = ema + alpha (theta - theta_0)

    Only trainable weights are averaged, on `device`, in float32 or finer. With `update_ref_model` the trainer's
    reference becomes the average every `ref_model_update_freq` steps from step `ref_model_update_after` on. Each
    checkpoint holds the average (and the reference), and a resumed run goes on with it. Refuses weights sharded by
    ZeRO-3 or FSDP, and runs too short for a single update of either.
    """

    file = "bema.safetensors"

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
    ):
        if update_freq < 1:
            raise ValueError(
                f"update_freq={update_freq}: the average is updated every that many steps, so it must be 1 or more."
            )
        if ref_model_update_freq < 1:
            raise ValueError(
                f"ref_model_update_freq={ref_model_update_freq}: the reference is updated every that many steps, so it "
                "must be 1 or more."
            )
        if not update_ref_model and (ref_model_update_freq, ref_model_update_after) != (400, 0):
            raise ValueError(
                f"ref_model_update_freq={ref_model_update_freq} and ref_model_update_after={ref_model_update_after} "
                "have no effect with update_ref_model=False; set it to True or remove them."
            )
        self.update_freq = update_freq
        self.ema_power = ema_power
        self.bias_power = bias_power
        self.lag = lag
        self.update_after = update_after
        self.multiplier = multiplier
        self.min_ema_multiplier = min_ema_multiplier
        self.device = torch.device(device)
        self.start: dict[str, Tensor] = {}
        """theta_0, by parameter name."""
        self.ema: dict[str, Tensor] = {}
        self.bema: dict[str, Tensor] = {}
        self.update_ref_model = update_ref_model
        self.ref_model_update_freq = ref_model_update_freq
        self.ref_model_update_after = ref_model_update_after
        self.reference: FrozenModel | FrozenWeights | None = None
        """What `update_ref_model` moves; the trainer says so."""
        self.moving: dict[str, Tensor] = {}
        """The reference's counterparts of the trained weights."""

    def beta(self, step: int) -> float:
        """Weight of the current weights in the moving average at `step`."""
        return max((self.lag + self.multiplier * step) ** -self.ema_power, self.min_ema_multiplier)

    def alpha(self, step: int) -> float:
        """Strength of the correction at `step`."""
        return (self.lag + self.multiplier * step) ** -self.bias_power

    def snapshot(self, model: nn.Module) -> dict[str, Tensor]:
        """The trainable weights as they are, copied."""
        trained = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
        return {name: p.to(self.device, torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in trained}

    def restart(self, model: nn.Module) -> None:
        """Lets theta_0 and the moving average be the current weights."""
        self.start = self.snapshot(model)
        self.ema = {name: weight.clone() for name, weight in self.start.items()}

    def update(self, model: nn.Module, step: int) -> None:
        """One step of the average."""
        beta, alpha = self.beta(step), self.alpha(step)
        for name, weight in self.snapshot(model).items():
            self.ema[name].lerp_(weight, beta)
            self.bema[name] = self.ema[name] + alpha * (weight - self.start[name])

    def state(self) -> dict[str, Tensor]:
        """All that a resumed run needs, by names such as "ema/model.norm.weight"."""
        parts = {"start": self.start, "ema": self.ema, "bema": self.bema, "moving": self.moving}
        return {
            f"{part}/{name}": weight.contiguous() for part, weights in parts.items() for name, weight in weights.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Takes up what `state` returned."""
        for key, weight in state.items():
            part, _, name = key.partition("/")
            if part == "moving":
                self.moving[name].copy_(weight)
            else:
                getattr(self, part)[name] = weight.to(self.device)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        refuse_shards(args, "BEMACallback")
        if state.max_steps < self.update_after + self.update_freq:
            raise ValueError(
                f"BEMACallback(update_freq={self.update_freq}, update_after={self.update_after}) would never update "
                f"its average in a run of {state.max_steps} steps, and save the weights the run began with. Choose a "
                "smaller update_freq."
            )
        if self.update_ref_model:
            self.moving = self.reference_weights(model)
            if state.max_steps < (self.ref_model_update_after or self.ref_model_update_freq):
                raise ValueError(
                    f"BEMACallback(ref_model_update_freq={self.ref_model_update_freq}, ref_model_update_after="
                    f"{self.ref_model_update_after}) would never move the reference in a run of {state.max_steps} "
                    "steps; choose fewer, or leave update_ref_model out"
                )
        if state.global_step > 0:
            self.resume(args, state, "weight average")
        else:
            self.restart(model)
            self.bema = {name: weight.clone() for name, weight in self.start.items()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        since = state.global_step - self.update_after
        if since == 0:
            self.restart(model)
        elif since > 0 and since % self.update_freq == 0:
            self.update(model, state.global_step)
        since = state.global_step - self.ref_model_update_after
        if since >= 0 and since % self.ref_model_update_freq == 0:
            for name, reference in self.moving.items():
                reference.copy_(self.bema[name])

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir, "bema")
        with without_critic(model), weights_replaced(model, self.bema):
            model.save_pretrained(folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)

    def reference_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The reference's counterparts of the trained weights."""
        if self.reference is None:
            raise ValueError(
                "BEMACallback(update_ref_model=True) has no reference to update; DPOTrainer, KTOTrainer and BCOTrainer "
                "have one"
            )
        return counterparts(self.reference.weights, model)
