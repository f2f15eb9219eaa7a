"""Log-probabilities of a batch's targets: the only reader of a model's logits.

A model is called through its own forward, however it is wrapped. Meanwhile its output embedding is replaced by a scorer
that takes the hidden states, keeps those that predict a scored token, and scores them (`strop.models.head`). Prompts
and padding never meet the vocabulary. Shapes: B rows, T tokens, as in `batch["completion_mask"]`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from strop.models.forward import base_model, forward, stand_in, state_indices
from strop.models.head import (
    CPU_TILE_TOKENS,
    Float32Head,
    HeadScores,
    LogitTransform,
    Scoring,
    is_plain_linear,
    score_head,
)

PROBE = 20.0
"""What the model is told its head said; large enough to tell a soft cap of 30 from none in bfloat16."""

_verified: WeakSet[nn.Module] = WeakSet()
"""Models whose own treatment of their logits was seen to be the one that `logit_transform` reads from the config."""


class TokenScores(NamedTuple):
    """What a model says of each target, (B, T), float32, 0 where the completion mask is; None if not asked for."""

    logps: Tensor
    """log p(target), in nats."""
    entropy: Tensor | None = None
    """Entropy of the distribution the target was drawn from, in nats."""
    is_top1: Tensor | None = None
    """1 where the target is the likeliest token; among equals, the first of the vocabulary."""
    mean_logps: Tensor | None = None
    """Log-probability averaged over the vocabulary, for label smoothing."""
    log_collision: Tensor | None = None
    """Log of the chance that two tokens drawn there are the same, sum_v p_v^2; without gradient."""
    aux_loss: Tensor | None = None
    """Load-balancing loss of a mixture of experts, (), if the model returns one."""


def logps(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top1: bool = False,
    mean_logps: bool = False,
    collision: bool = False,
    budget: int | None = None,
) -> TokenScores:
    """Scores of `batch["targets"]` under `model`; logps, entropy and mean_logps are differentiable.

    `temperature` divides the logits. `budget` bounds the bytes that logits take at a time (`strop.models.head.tiling`).
    Raises ValueError if the temperature is not positive, if the model has no output embedding that its forward calls
    once, or if it changes its logits in a way that strop doesn't know.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} can't divide logits; use a positive one (near 0: greedy)")
    base = base_model(model)
    scoring = Scoring(logit_transform(base, temperature), entropy, top1, mean_logps, collision, budget)
    scorer = _HeadScorer(output_embedding(base), batch, scoring)
    with stand_in(scorer.head, scorer.__call__):
        output = forward(model, batch)
    if len(scorer.results) != 1:
        raise ValueError(
            f"{type(base).__name__} called its output embedding {len(scorer.results)} times in one forward pass, so it "
            "can't be told which hidden states predict the next token. Use a model whose forward calls it once"
        )
    verify_transform(base, output.logits)
    # the loss must depend on the model's output: sharded models fetch weights for backward when a gradient reaches it
    link = output.logits.flatten()[:0].sum().float()
    scores = (x + link if x is not None and x.requires_grad else x for x in scorer.results[0])
    return TokenScores(*scores, aux_loss=getattr(output, "aux_loss", None))  # type: ignore[misc, arg-type]


@torch.no_grad()
def top_ids(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B, T) int64: the likeliest token in the place of each target, 0 where the completion mask is."""
    scorer = _TopIds(output_embedding(base_model(model)), batch, Scoring())
    with stand_in(scorer.head, scorer.__call__):
        forward(model, batch)
    return scorer.results[0].logps


def logit_transform(base: nn.Module, temperature: float = 1.0) -> LogitTransform:
    """What `base`, a model of transformers, does to its head's output by its config, then `temperature`."""
    config = base.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    scale *= scaling if config.model_type.startswith("hyperclovax") else 1 / scaling
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return LogitTransform(scale, softcap, temperature)


def verify_transform(base: nn.Module, logits: Tensor) -> None:
    """Raise ValueError if `base` turned `PROBE` into other `logits` than `logit_transform` would."""
    if base in _verified or not logits.numel():
        return
    expected = logit_transform(base).apply_(torch.tensor(PROBE)).item()
    lowest, highest = logits.detach().float().aminmax()
    if not max(abs(lowest.item() - expected), abs(highest.item() - expected)) <= 1e-2 * abs(expected):
        raise ValueError(
            f"{type(base).__name__} turns a logit of {PROBE} into {lowest.item():.4g} to {highest.item():.4g}, but by "
            f"its config it should be {expected:.4g}: log-probabilities would be wrong. strop knows logit_scale, "
            "logits_scaling, output_multiplier, lm_head_multiplier and soft caps; drop what else the model does"
        )
    _verified.add(base)


def output_embedding(base: nn.Module) -> nn.Module:
    """The head of `base`, a model of transformers. Raises ValueError if it has none."""
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{type(base).__name__} has no output embedding (get_output_embeddings() gives {head!r}), so there is "
            "nothing to take log-probabilities from. Load it with a language-model head, e.g. by AutoModelForCausalLM"
        )
    return head


def compute_head_in_float32(model: nn.Module) -> None:
    """Let the head of `model` multiply in float32; its weights stay what they are. Raises ValueError for a head that is
    more than a matrix and a bias: adapters, quantised weights."""
    head = output_embedding(base_model(model))
    if not is_plain_linear(head):
        raise ValueError(
            f"the output embedding is a {type(head).__name__}, which computes in its own way, so it can't be told to "
            "multiply in float32. Leave the head out of the adapter or the quantisation, or drop cast_lm_head_to_fp32"
        )
    head.__class__ = Float32Head


class _HeadScorer:
    """Stands in for an output embedding during one forward pass of `batch`."""

    def __init__(self, head: nn.Module, batch: Mapping[str, Any], scoring: Scoring):
        self.head, self.batch, self.scoring = head, batch, scoring
        self.call = head.forward
        self.results: list[HeadScores] = []

    @torch.compiler.disable  # which tokens have a loss is data
    def __call__(self, hidden: Tensor) -> Tensor:
        """Score `hidden` (..., time, D); returns PROBE for every logit, (..., time, 1), in the graph of the scores."""
        mask = self.batch["completion_mask"].to(hidden.device).bool()
        predictors = state_indices(self.batch["predictors"], hidden, self.batch).to(hidden.device)[mask]
        targets = self.batch["targets"].to(hidden.device)[mask]
        states = hidden.flatten(0, -2).index_select(0, predictors)
        scores = self._score(states, targets)
        self.results.append(HeadScores(*(None if x is None else _on_rows(x, mask) for x in scores)))  # type: ignore[arg-type]
        nothing = scores.logps[:0].sum().to(hidden.dtype)
        return hidden.new_full((*hidden.shape[:-1], 1), PROBE) + nothing

    def _score(self, states: Tensor, targets: Tensor) -> HeadScores:
        return score_head(self.head, states, targets, self.scoring, self.call)


class _TopIds(_HeadScorer):
    """Leaves ids in the place of log-probabilities. Whatever a model does to its logits keeps their order."""

    def _score(self, states: Tensor, targets: Tensor) -> HeadScores:
        ids = torch.cat([self.call(part).argmax(-1) for part in states.split(CPU_TILE_TOKENS)])
        return HeadScores(ids, None, None, None)


def _on_rows(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) float32 (float64 stays) with `values` (M,) where `mask` is 1, 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
