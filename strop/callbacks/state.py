"""Callbacks whose tensors are part of a run's checkpoints."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback


class TensorState(TrainerCallback, ABC):
    """A callback with tensors that a resumed run needs. Subclasses write `state` and `load_state`.

    Trainers of strop call `on_checkpoint` while a checkpoint is written, so that it appears whole; those of
    transformers know only `on_save`, after it.
    """

    file: ClassVar[str]
    """Name of the file in a checkpoint."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on with what a checkpoint held."""

    def on_checkpoint(self, folder: Path) -> None:
        """Write the state into `folder`, which becomes a checkpoint. The main process calls it."""
        save_file({name: tensor.contiguous() for name, tensor in self.state().items()}, folder / self.file)

    def on_save(self, args, state, control, **kwargs):
        folder = checkpoint_folder(args, state)
        if state.is_world_process_zero and not (folder / self.file).is_file():
            self.on_checkpoint(folder)

    def resume(self, args: Any, state: Any, what: str) -> None:
        """Take up the state of the checkpoint at the current step; `what` it is, for who looks for it."""
        file = checkpoint_folder(args, state) / self.file
        if not file.is_file():
            raise ValueError(
                f"the run resumes at step {state.global_step}, but there is no {file}, so its {what} can't go on. "
                f"Resume from a checkpoint in {args.output_dir} that was saved with {type(self).__name__}, or leave "
                "the callback out."
            )
        self.load_state(load_file(file))


def checkpoint_folder(args: Any, state: Any) -> Path:
    """Where the trainer puts the checkpoint of the current step."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def refuse_shards(args: Any, what: str) -> None:
    """Refuses runs in which no process holds whole weights."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled() or args.fsdp:
        raise ValueError(
            f"{what} needs whole weights, and ZeRO-3 and FSDP leave each process a part of them. Run it with DDP or "
            "ZeRO-2, or leave it out."
        )
