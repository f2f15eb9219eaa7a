"""What a run measures: metrics as weighted sums, and the counters that outlive a restart.

A metric is a pair (sum, weight). Pairs of micro-batches and ranks add up, and are divided once, when they are logged;
so a logged value does not depend on how a step was cut. A metric nothing was added to is absent, never NaN.
Of metrics called min_... or ..._min, max_... or ..._max the least or the greatest is kept, with a weight of 1.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

Metrics = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""Name -> (sum over what was measured, how much was measured)."""


class WeightedSums:
    """Metrics added up since they were last read."""

    def __init__(self, sums: Mapping[str, list[float]] | None = None):
        self.sums: dict[str, Tensor] = {
            name: torch.tensor(pair, dtype=torch.float64) for name, pair in (sums or {}).items()
        }

    def add(self, metrics: Metrics) -> None:
        """Tensors stay on their device, in float64, until they are read."""
        for name, pair in metrics.items():
            device = next((x.device for x in pair if isinstance(x, Tensor)), None)
            new = torch.stack([torch.as_tensor(x, device=device).detach().double() for x in pair])
            old = self.sums.get(name)
            self.sums[name] = new if old is None else _joined(name)(torch.stack([old.to(new.device), new]))

    def totals(self, num_processes: int) -> dict[str, list[float]]:
        """[sum, weight] of each metric over all ranks. Every rank must call it, and gets the same."""
        mine = {name: pair.tolist() for name, pair in self.sums.items()}
        if num_processes == 1:
            return mine
        ranks = gather_object([mine])
        names = dict.fromkeys(name for rank in ranks for name in rank)
        pairs = {
            name: torch.tensor([rank[name] for rank in ranks if name in rank], dtype=torch.float64) for name in names
        }
        return {name: _joined(name)(several).tolist() for name, several in pairs.items()}


def _joined(name: str) -> Callable[[Tensor], Tensor]:
    """What makes one pair of several, (n, 2), of the metric `name`."""
    words = name.rsplit("/", 1)[-1].split("_")
    ends = {words[0], words[-1]}
    return partial(torch.amin if "min" in ends else torch.amax if "max" in ends else torch.sum, dim=0)


def means(sums: Mapping[str, list[float]]) -> dict[str, float]:
    """The weighted mean of each metric that has any weight."""
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


class RunMeter(TrainerCallback, ExportableState):
    """The training metrics of a run, part of its checkpoints: a resumed run logs what the uninterrupted one would
    have."""

    COUNTERS = ("num_tokens", "loss_sum", "epoch", "num_batches")

    def __init__(self):
        self.window = WeightedSums()
        """Since the last log. "loss" has one unit of weight an optimizer step."""
        self.num_tokens = 0
        """Tokens the model has read in training, all ranks together."""
        self.loss_sum = 0.0
        """Sum of the losses of all steps already logged."""
        self.epoch = 0
        """Which pass over the data is running."""
        self.num_batches = 0
        """Micro-batches of it that are trained. A stream knows no length to tell either by."""

    def state(self) -> dict[str, Any]:
        counters = {name: getattr(self, name) for name in self.COUNTERS}
        return {"args": {}, "attributes": {"sums": self.window.totals(1), **counters}}

    def on_train_begin(self, args, state, control, **kwargs):
        new = RunMeter().state()
        saved = state.stateful_callbacks.setdefault(type(self).__name__, new) if state.global_step else new
        self.window = WeightedSums(saved["attributes"]["sums"] if state.is_world_process_zero else {})
        for name in self.COUNTERS:
            setattr(self, name, saved["attributes"][name])

    def on_epoch_end(self, args, state, control, **kwargs):
        self.epoch, self.num_batches = self.epoch + 1, 0

    def collect(self, num_processes: int, is_main: bool) -> None:
        """Before a checkpoint: the main rank, which writes it, takes over the others' sums. Every rank must call it."""
        totals = self.window.totals(num_processes)
        self.window = WeightedSums(totals if is_main else {})

    def drain(self, num_processes: int) -> dict[str, float]:
        """Means over the window, which starts anew. Every rank must call it, and gets the same."""
        totals = self.window.totals(num_processes)
        self.loss_sum += totals.get("loss", [0.0, 0.0])[0]
        self.window = WeightedSums()
        return means(totals)
