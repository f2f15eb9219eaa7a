"""Outputs of classification heads where they count: a scalar at a row's last token, classes at chosen tokens.

As in `strop.models.logps`, a model is called through its own forward while its head is replaced by a reader that takes
the states asked for and applies the head to those only. Where a row ends is what the batch says, not where padding
seems to begin, so a row's score is the same alone, packed, and padded on either side with any token. A model that pools
its states before its head, as encoders do with their first token, answers with its own logits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from strop.models.forward import base_model, forward, looks_ahead, stand_in, state_indices

HEADS = ("score", "classifier")
"""What transformers calls the head of a classification model."""


def scores(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B,): the scalar of each row at its last token, `batch["ends"]`, in float32 (float64 stays); differentiable.

    A padded batch without `ends` has them where its attention mask ends, whichever side its padding is on. Raises
    ValueError if the model has no head with one output, or pools its states itself and the batch is packed.
    """
    base = checked_head(model, num_labels=1)
    if looks_ahead(base):  # its forward knows which of its states stands for the row
        _refuse_packed(base, batch)
        return _upcast(forward(model, batch).logits[:, 0])
    if "ends" not in batch:
        batch = {**batch, **padded_ends(batch["attention_mask"])}
    reader = _StateReader(base, batch, batch["ends"])
    with stand_in(reader.head, reader.__call__), _some_padding_id(base) as knows_padding:
        output = forward(model, batch)
    if reader.outputs is not None:
        return _linked(reader.outputs[:, 0], output.logits)
    _refuse_packed(base, batch)
    if not knows_padding:
        _refuse_padding_without_id(base, batch)
    return _upcast(output.logits[:, 0])


def token_outputs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B, T, num_labels): the head's outputs at the states `batch["predictors"]`, 0 where the completion mask is, in
    float32 (float64 stays); differentiable. Raises ValueError if the model has no head over tokens."""
    base = checked_head(model)
    mask = batch["completion_mask"].bool()
    reader = _StateReader(base, batch, batch["predictors"][mask])
    with stand_in(reader.head, reader.__call__):
        output = forward(model, batch)
    if reader.outputs is None:
        raise ValueError(
            f"{type(base).__name__} has no output for each token. Load the model by AutoModelForTokenClassification"
        )
    values = _linked(reader.outputs, output.logits)
    mask = mask.to(values.device)
    return values.new_zeros((*mask.shape, values.shape[-1])).masked_scatter(mask[..., None], values)


def end_states(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B, D): the states that `scores` applies the head to, each scaled to a root mean square of 2, to compare layouts.

    A score is one number, in which much cancels; in 16 bit it can't tell a row that sees another from rounding. States
    can, by the tolerances of log-probabilities: SmolLM2-135M in bfloat16 differs between layouts by 0.015 on average,
    by 0.25 if rows see each other.
    """
    return _scaled_states(model, batch, batch["ends"])


def token_states(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(M, D): the same for `token_outputs`."""
    return _scaled_states(model, batch, batch["predictors"][batch["completion_mask"].bool()])


def _scaled_states(model: nn.Module, batch: Mapping[str, Any], indices: Tensor) -> Tensor:
    base = base_model(model)
    reader = _StateReader(base, batch, indices)
    with stand_in(reader.head, reader.__call__):
        forward(model, batch)
    if reader.states is None:
        _refuse_packed(base, batch)
        return batch["input_ids"].new_zeros(0, dtype=torch.float32)
    states = _upcast(reader.states)
    return 2 * states * states.square().mean(-1, keepdim=True).rsqrt()


def classification_head(base: nn.Module) -> nn.Module:
    """The module that turns states into labels. Raises ValueError if `base`, a model of transformers, has none."""
    head = next((getattr(base, name) for name in HEADS if isinstance(getattr(base, name, None), nn.Module)), None)
    if head is None:
        raise ValueError(
            f"{type(base).__name__} has no classification head ({' or '.join(HEADS)}), so there is nothing to score "
            "with. Load it by AutoModelForSequenceClassification, or AutoModelForTokenClassification for steps"
        )
    return head


def checked_head(model: nn.Module, num_labels: int | None = None) -> PreTrainedModel:
    """The model of transformers within `model`, if it has a head with `num_labels` outputs."""
    base = base_model(model)
    classification_head(base)
    found = base.config.num_labels  # type: ignore[union-attr]
    if num_labels is not None and found != num_labels:
        kind = "reward is one number" if num_labels == 1 else "step is good or bad"
        raise ValueError(
            f"{type(base).__name__} has num_labels={found}, but a {kind}. Load it with num_labels={num_labels}, or "
            "pass its name instead of the object"
        )
    return base  # type: ignore[return-value]


def padded_ends(attention_mask: Tensor) -> dict[str, Tensor]:
    """What a padded batch (B, W) needs whose rows may begin anywhere: `ends` (B,) and `position_ids` (B, W)."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = (attention_mask * positions).argmax(-1)
    firsts = torch.arange(len(last), device=last.device) * attention_mask.shape[1]
    return {"ends": firsts + last, "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0)}


def _refuse_packed(base: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    if "segments" in batch:
        raise ValueError(
            f"{type(base).__name__} pools its states before its head, so rows that share a stream would share a score. "
            "Use layout='padded' for this model"
        )


@contextmanager
def _some_padding_id(base: PreTrainedModel) -> Iterator[bool]:
    """Whether its config has a pad_token_id. It has one meanwhile: transformers refuses several padded rows without,
    though where it sees their ends is of no account here."""
    config = base.config.get_text_config()
    own = config.pad_token_id
    config.pad_token_id = 0 if own is None else own
    try:
        yield own is not None
    finally:
        config.pad_token_id = own


def _refuse_padding_without_id(base: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    if len(batch["input_ids"]) > 1:
        raise ValueError(
            f"{type(base).__name__} pools its states by where padding begins, but its config has no pad_token_id; set "
            "it, e.g. model.config.pad_token_id = tokenizer.pad_token_id"
        )


class _StateReader:
    """Stands in for the head of `base` in a forward pass of `batch`; applies it to the states at `indices`, (M,)."""

    def __init__(self, base: nn.Module, batch: Mapping[str, Any], indices: Tensor):
        head = classification_head(base)
        self.head, self.batch, self.indices = head, batch, indices
        self.call = head.forward
        inner = getattr(head, "original_module", getattr(head, "base_layer", head))  # PEFT's wrappers
        self.is_a_map = isinstance(inner, nn.Linear) or head is getattr(base, "score", None)
        """Whether it maps state by state; a larger one may pool, as those of RoBERTa and its kin do."""
        self.outputs: Tensor | None = None
        """(M, num_labels); None where the head isn't called with a state a token."""
        self.states: Tensor | None = None
        """(M, D), likewise."""

    @torch.compiler.disable  # where rows end is data
    def __call__(self, hidden: Tensor, *args, **kwargs) -> Tensor:
        """For states (rows, time, D) nothing, (rows, time, num_labels), in the graph of what was read."""
        if hidden.ndim != 3 or not self.is_a_map:
            return self.call(hidden, *args, **kwargs)
        indices = state_indices(self.indices, hidden, self.batch).to(hidden.device)
        self.states = hidden.flatten(0, 1).index_select(0, indices)
        self.outputs = self._apply(self.states)
        nothing = self.outputs[:0].sum().to(hidden.dtype)
        return hidden.new_zeros((*hidden.shape[:-1], self.outputs.shape[-1])) + nothing

    def _apply(self, states: Tensor) -> Tensor:
        """In float32: rounded to 16 bit, scores of similar answers would tie."""
        with torch.autocast(states.device.type, enabled=False):
            if type(self.head) is nn.Linear and type(self.head.weight.data) is Tensor:
                bias = None if self.head.bias is None else _upcast(self.head.bias)
                return F.linear(_upcast(states), _upcast(self.head.weight), bias)
            own = next((p.dtype for p in self.head.parameters() if p.dtype.is_floating_point), states.dtype)
            return _upcast(self.call(states.to(own)))


def _upcast(values: Tensor) -> Tensor:
    return values.float() if values.dtype.itemsize < 4 else values


def _linked(values: Tensor, output: Tensor) -> Tensor:
    """`values` through the model's output: sharded models fetch weights for backward when a gradient reaches it."""
    return values + output.flatten()[:0].sum().to(values.dtype) if values.requires_grad else values
