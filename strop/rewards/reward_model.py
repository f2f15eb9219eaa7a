"""Scores of texts by a trained reward model, prepared exactly as its training rows were."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from strop.data.collate import Batch, TokenRow, collate
from strop.data.preference_rows import PreferenceMaker, PreferenceRecipe
from strop.data.sides import LABELLED
from strop.data.steps import StepCollator, StepMaker, StepRecipe
from strop.models.attention import NAME
from strop.models.forward import base_model, refuse_beyond_positions
from strop.models.scores import scores, token_outputs
from strop.models.segments import Layout
from strop.models.verify import evaluating

Words = str | list[dict[str, Any]]
"""A text, or messages."""
Ids = tuple[list[int], list[int]]
"""A prompt and a completion in tokens; together they are the tokens of the whole."""

WHOLE = PreferenceRecipe(max_length=None)


@torch.no_grad()
def score(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Words] | None,
    completions: Sequence[Words],
    *,
    batch_size: int = 8,
    recipe: PreferenceRecipe = WHOLE,
    layout: Layout | None = None,
    **columns: Sequence[Any],
) -> Tensor:
    """(N,): what `model` scores each completion, in float32 on the CPU, whatever the batch size.

    Prompts and completions are texts or lists of messages; without prompts the completions are wholes. `recipe` holds
    the training's settings, if they weren't the defaults. `columns` are further ones of the rows: tools,
    chat_template_kwargs. `layout` is the one that the model's attention was made ready for, if not said. Raises
    ValueError for texts that can't be prepared, with their number.
    """
    pairs = tokenised(tokenizer, prompts, completions, recipe, columns)
    refuse_beyond_positions(model, max((len(prompt) + len(side) for prompt, side in pairs), default=0), "score")
    pad = tokenizer.pad_token_id or 0
    parts = [
        scores(model, batch)
        for batch in batches_of(model, pairs, batch_size, lambda part, layout: collated(part, layout, pad), layout)
    ]
    return torch.cat(parts).cpu() if parts else torch.zeros(0)


@torch.no_grad()
def score_steps(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Words],
    solutions: Sequence[Sequence[str]],
    *,
    separator: str = "\n",
    batch_size: int = 8,
    template_options: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    **columns: Sequence[Any],
) -> list[Tensor]:
    """For each solution, a list of steps, the probability that each step is good, (S,), in float32 on the CPU.

    `model` is a process reward model; the rest is as in `score`. Raises ValueError for solutions without steps.
    """
    rows = _columns(prompt=prompts, completions=solutions, **columns)
    rows["labels"] = [[True] * len(steps) for steps in rows["completions"]]
    recipe = StepRecipe(max_length=None, step_separator=separator, template_options=dict(template_options or {}))
    made = StepMaker(tokenizer, recipe, "score")(rows, range(len(rows["prompt"])))
    examples = made.select(["input_ids", "labels"]).to_pylist()
    refuse_beyond_positions(model, max((len(row["input_ids"]) for row in examples), default=0), "score")
    pad = tokenizer.pad_token_id or 0
    judgements: list[Tensor] = []
    for batch in batches_of(model, examples, batch_size, lambda part, layout: StepCollator(pad, layout)(part), layout):
        good = token_outputs(model, batch).softmax(-1)[..., 1].cpu()
        judgements += [row[own] for row, own in zip(good, batch["completion_mask"].bool().cpu(), strict=True)]
    return judgements


Example = TypeVar("Example")


def batches_of(
    model: nn.Module,
    examples: Sequence[Example],
    batch_size: int,
    collate: Callable[[Sequence[Example], Layout], Batch],
    layout: Layout | None,
) -> Iterator[Batch]:
    """The batches of `examples`, where `model` is; meanwhile it is in evaluation mode."""
    base = base_model(model)
    if layout is None:
        layout = "packed" if base.config._attn_implementation == NAME else "padded"  # type: ignore[union-attr]
    device = base.get_input_embeddings().weight.device  # type: ignore[operator, union-attr]
    with evaluating(model):
        for start in range(0, len(examples), batch_size):
            yield on_device(collate(examples[start : start + batch_size], layout), device)


def _columns(**columns: Sequence[Any]) -> dict[str, list[Any]]:
    """The columns as lists. Raises ValueError for columns of different lengths, and for a text in place of a list."""
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1 or any(isinstance(values, str) for values in columns.values()):
        found = ", ".join(f"{name}: {type(columns[name]).__name__} of {n}" for name, n in lengths.items())
        raise ValueError(f"what is to be scored has as many prompts as answers, in lists; but here are {found}")
    return {name: list(values) for name, values in columns.items()}


def tokenised(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Words] | None,
    completions: Sequence[Words],
    recipe: PreferenceRecipe,
    columns: Mapping[str, Sequence[Any]],
) -> list[Ids]:
    """The tokens of each prompt and its completion."""
    if prompts is None:
        prompts = ["" if isinstance(completion, str) else [] for completion in completions]
    rows = _columns(prompt=prompts, completion=completions, **columns)
    rows["label"] = [True] * len(completions)
    maker = PreferenceMaker(tokenizer, recipe, LABELLED, "score", extras=("label",))
    table = maker(rows, range(len(completions))).select(["prompt_ids", "completion_ids"]).to_pydict()
    pairs = list(zip(table["prompt_ids"], table["completion_ids"], strict=True))
    empty = [i for i, (_, completion) in enumerate(pairs) if not completion]
    if empty:
        shown = repr(completions[empty[0]])[:80]
        raise ValueError(f"nothing is left of completion {empty[0]} ({shown}), so it has no score. Raise max_length")
    return pairs


def collated(pairs: Sequence[Ids], layout: Layout, pad_token_id: int) -> Batch:
    """The batch of `pairs`; a packed one holds a prompt of several completions once."""
    rows: list[TokenRow] = []
    parents: dict[tuple[int, ...], int] = {}
    for prompt, completion in pairs:
        if prompt and tuple(prompt) not in parents:
            parents[tuple(prompt)] = len(rows)
            rows.append(TokenRow(prompt, None))
        rows.append(TokenRow(completion, completion, parents[tuple(prompt)] if prompt else -1))
    return collate(rows, layout, pad_token_id)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with its tensors on `device`."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
