"""What a model says of answers that are given: their loss, and which of two it prefers."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from strop.data.collate import SupervisedCollator
from strop.data.formats import CHECKED_ROWS, Row, detect
from strop.data.preference_rows import PreferenceRecipe
from strop.data.prepare import as_columns
from strop.data.prompts import maybe_extract_prompt
from strop.data.recipe import Recipe, RowMaker, check_targets
from strop.evals.statistics import Total
from strop.models.forward import refuse_beyond_positions
from strop.models.logps import logps
from strop.rewards.reward_model import batches_of, collated, score, tokenised

PIECE = 256
"""Rows that are tokens at a time."""
NAME = "evaluation"


@torch.no_grad()
def row_losses(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], recipe: Recipe, batch_size: int = 8
) -> list[Total]:
    """The loss of each row in nats, and how many tokens it is of: those that fine-tuning by `recipe` trains.

    A row that is too long to leave any has no weight. Raises ValueError for rows that can't be prepared, for a recipe
    that makes several of one, and for rows beyond the model's positions.
    """
    if recipe.turns == "expand" or recipe.overlong in ("split", "drop"):
        raise ValueError(
            f"train_on_turns={recipe.turns!r} with overlong={recipe.overlong!r} makes several rows of one, or none, "
            "but an evaluation says something of each row. Set train_on_turns=all or last, and overlong=truncate."
        )
    found = detect(rows[:CHECKED_ROWS], recipe.text_field, NAME)
    check_targets(recipe, found, formats=False)
    maker = RowMaker(tokenizer, recipe, found, NAME)
    pad = tokenizer.pad_token_id or 0
    totals = [Total(0.0, 0.0)] * len(rows)
    for start in range(0, len(rows), PIECE):
        part = rows[start : start + PIECE]
        made = maker(as_columns([dict(row) for row in part]), range(start, start + len(part))).to_pylist()
        kept = sorted((i for i, row in enumerate(made) if row["input_ids"]), key=lambda i: len(made[i]["input_ids"]))
        refuse_beyond_positions(model, max((len(made[i]["input_ids"]) for i in kept), default=0), "evaluate")
        order: Iterator[int] = iter(kept)
        examples = [{name: made[i][name] for name in ("input_ids", "labels")} for i in kept]
        for batch in batches_of(
            model, examples, batch_size, lambda some, layout: SupervisedCollator(pad, layout)(some), None
        ):
            sums = -logps(model, batch).logps.double().sum(-1)
            for total, count in zip(sums.tolist(), batch["completion_mask"].sum(-1).tolist(), strict=True):
                index = start + next(order)
                refuse_no_number(total, index)
                totals[index] = Total(total, count)
    return totals


@torch.no_grad()
def pair_margins(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    recipe: PreferenceRecipe,
    batch_size: int = 8,
    scores: bool = False,
) -> list[float]:
    """How far the chosen answer of each row is above the rejected one: in log-probability (nats), or with `scores` in
    what a reward model says. Raises ValueError for rows without the two."""
    rows = [maybe_extract_prompt(row) for row in rows]
    missing = next((i for i, row in enumerate(rows) if not {"chosen", "rejected"} <= set(row)), None)
    if missing is not None:
        raise ValueError(f"row {missing} has {sorted(rows[missing])}, but pairs are in columns chosen and rejected.")
    pad = tokenizer.pad_token_id or 0
    margins: list[float] = []
    for start in range(0, len(rows), PIECE):
        part = rows[start : start + PIECE]
        words = [row[side] for row in part for side in ("chosen", "rejected")]
        prompts = [row["prompt"] for row in part for _ in range(2)]
        columns = {
            name: [row.get(name) for row in part for _ in range(2)]
            for name in ("tools", "chat_template_kwargs")
            if any(row.get(name) is not None for row in part)
        }
        if scores:
            values = score(model, tokenizer, prompts, words, batch_size=batch_size, recipe=recipe, **columns).tolist()
        else:
            pairs = tokenised(tokenizer, prompts, words, recipe, columns)
            refuse_beyond_positions(model, max(len(p) + len(c) for p, c in pairs), "evaluate")
            values = []
            for batch in batches_of(model, pairs, batch_size, lambda some, layout: collated(some, layout, pad), None):
                values += logps(model, batch).logps.double().sum(-1).tolist()
        for chosen, rejected in zip(values[::2], values[1::2], strict=True):
            refuse_no_number(chosen - rejected, len(margins))
            margins.append(chosen - rejected)
    return margins


def refuse_no_number(value: float, index: int) -> None:
    """Raises ValueError for an infinite number or NaN, which would be the mean of all rows."""
    if not math.isfinite(value):
        raise ValueError(
            f"the model says {value} of row {index}: its weights hold numbers that aren't finite, since training "
            "diverged, or overflow in this dtype. Try another checkpoint, or --dtype float32."
        )
