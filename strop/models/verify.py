"""Check on real numbers that a model says the same in both layouts.

Capability is a claim of a model's code; this is the proof, on the first batch of a run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strop.models.logps import logps
from strop.models.segments import Segments

TOLERANCES = {
    torch.float64: (1e-8, 1e-9),
    torch.float32: (5e-4, 1e-5),
    torch.float16: (0.5, 5e-3),
    torch.bfloat16: (4.0, 5e-2),
}
"""Largest single and largest mean difference of log-probabilities, in nats, that are put down to rounding.

SmolLM2-135M on six rows of 880 tokens, right in both layouts, differs by 8e-6 at most and 5e-8 on average in float32,
by 0.96 and 0.017 in bfloat16. Let two of the six rows see each other and it is 12 and 0.2 in either, so in 16 bit the
mean tells right from wrong, the largest difference hardly.
"""


Reader = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""What a model says of a batch, in numbers whose order doesn't depend on the layout."""


def target_logps(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(M,): log-probabilities of the scored tokens, in nats."""
    return logps(model, batch).logps[batch["completion_mask"].bool()]


class Agreement(NamedTuple):
    """How far what a model says in two layouts lies apart, in nats."""

    largest: float
    mean: float
    agrees: bool


def layouts_agree(
    model: nn.Module, packed: Mapping[str, Any], padded: Mapping[str, Any], read: Reader = target_logps
) -> Agreement:
    """Compare what `model` says of the same rows in both layouts, without dropout; training flags and random states
    stay.

    Numbers that aren't finite never agree.
    """
    with evaluating(model), torch.no_grad():
        difference = (read(model, packed) - read(model, padded)).abs().double()
    if not difference.numel():
        return Agreement(0.0, 0.0, True)
    largest, mean = difference.max().item(), difference.mean().item()
    most, most_on_average = TOLERANCES[coarsest_dtype(model)]
    return Agreement(largest, mean, largest <= most and mean <= most_on_average)


def coarsest_dtype(model: nn.Module) -> torch.dtype:
    """The least precise floating type `model` computes in; 16 bit brain floats where its weights are quantised."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype in TOLERANCES}
    if any(not p.dtype.is_floating_point or p.dtype.itemsize == 1 for p in model.parameters()):
        dtypes.add(torch.bfloat16)
    for device in {p.device.type for p in model.parameters()}:
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode, each of its parts put back afterwards as it was; so are the random states."""
    training = [module for module in model.modules() if module.training]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def padded_from_packed(packed: Mapping[str, Any], pad_token_id: int) -> dict[str, Any]:
    """The padded batch of the rows of a packed one; only what the model reads, `predictors` and `ends` differ."""
    segments: Segments = packed["segments"]
    stream = packed["input_ids"][0]
    spans = [[segments.span(j) for j in (*segments.ancestors(i), i)] for i in packed["rows"]]
    whole = [torch.cat([stream[span] for span in row]) for row in spans]
    width = max(map(len, whole), default=0)
    input_ids = stream.new_full((len(whole), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for b, row in enumerate(whole):
        input_ids[b, : len(row)] = row
        attention_mask[b, : len(row)] = 1
    places = torch.zeros((len(whole), len(stream)), dtype=torch.int64)  # of each row's tokens: by stream, in padded
    for b, row in enumerate(spans):
        own = torch.cat([torch.arange(span.start, span.stop) for span in row])
        places[b, own] = b * width + torch.arange(len(own))
    places = places.to(stream.device)
    predictors, ends = packed["predictors"], packed["ends"]
    replaced = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "predictors": places.gather(1, predictors).masked_fill(packed["completion_mask"] == 0, 0),
        "ends": places.gather(1, ends[:, None])[:, 0],
        "num_tokens": int(attention_mask.sum()),
    }
    return {k: v for k, v in packed.items() if k not in ("segments", "rows", "position_ids")} | replaced
