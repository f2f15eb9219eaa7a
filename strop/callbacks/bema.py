"""Averaged weights: an exponential moving average of the trained weights, corrected for its lag."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

FILE = "bema.safetensors"


class BEMACallback(TrainerCallback):
    """Bias-corrected moving average of the weights (BEMA, arXiv:2508.00180), saved to `<output_dir>/bema` at the end.

    With theta_0 the weights at step `update_after`, every `update_freq` optimizer steps t after it

        beta  = max((lag + multiplier t)^-ema_power, min_ema_multiplier)
        alpha = (lag + multiplier t)^-bias_power
        ema   = (1 - beta) ema + beta theta
        bema  = ema + alpha (theta - theta_0)

    Only trainable weights are averaged, on `device`, in float32 or finer. Each checkpoint holds the average, and a
    resumed run goes on with it. Refuses weights sharded by ZeRO-3 or FSDP, and runs too short for a single update.
    """

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
    ):
        if update_freq < 1:
            raise ValueError(
                f"update_freq={update_freq}: the average is updated every that many steps, so it must be 1 or more."
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
        parts = {"start": self.start, "ema": self.ema, "bema": self.bema}
        return {
            f"{part}/{name}": weight.contiguous() for part, weights in parts.items() for name, weight in weights.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Takes up what `state` returned."""
        for key, weight in state.items():
            part, _, name = key.partition("/")
            getattr(self, part)[name] = weight.to(self.device)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        refuse_shards(args)
        if state.max_steps < self.update_after + self.update_freq:
            raise ValueError(
                f"BEMACallback(update_freq={self.update_freq}, update_after={self.update_after}) would never update "
                f"its average in a run of {state.max_steps} steps, and save the weights the run began with. Choose a "
                "smaller update_freq."
            )
        if state.global_step > 0:
            self.load_state(load_file(self.checkpointed(args, state)))
        else:
            self.restart(model)
            self.bema = {name: weight.clone() for name, weight in self.start.items()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        since = state.global_step - self.update_after
        if since == 0:
            self.restart(model)
        elif since > 0 and since % self.update_freq == 0:
            self.update(model, state.global_step)

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            save_file(self.state(), checkpoint_folder(args, state) / FILE)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir, "bema")
        with weights_replaced(model, self.bema):
            model.save_pretrained(folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)

    def checkpointed(self, args: Any, state: Any) -> Path:
        """The file of the average in the checkpoint that the run resumes from."""
        file = checkpoint_folder(args, state) / FILE
        if not file.is_file():
            raise ValueError(
                f"the run resumes at step {state.global_step}, but there is no {file}, so its weight average can't go "
                f"on. Resume from a checkpoint in {args.output_dir} that was saved with BEMACallback, or leave the "
                "callback out."
            )
        return file


def checkpoint_folder(args: Any, state: Any) -> Path:
    """Where the trainer puts the checkpoint of the current step."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def refuse_shards(args: Any) -> None:
    """Refuses runs in which no process holds whole weights."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled() or args.fsdp:
        raise ValueError(
            "BEMACallback averages whole weights, and ZeRO-3 and FSDP leave each process a part of them. Run it with "
            "DDP or ZeRO-2, or leave it out."
        )


@contextmanager
def weights_replaced(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Within it, the parameters of `model` named in `weights` have these values; afterwards their own again."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in weights}
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name].to(parameter.device, parameter.dtype)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
