"""Rows of tokens to the tensors of one forward pass, in one of two layouts.

*packed*: one stream without padding, cut into segments; a row that continues another one names it as its parent and the
shared part is computed once. *padded*: right-padded rows with a mask, shared parts repeated, for models whose attention
strop cannot replace.

Both give the same batch: what the model reads, and four row tensors that no layout changes the meaning of. For B rows
with a loss and up to T own tokens each (what a row shares with others is not its own):

    targets          (B, T) int64  the token to be predicted
    predictors       (B, T) int64  which hidden state predicts it: an index into the model's hidden states, flattened
    completion_mask  (B, T) int64  1 exactly where the loss counts
    ends             (B,)   int64  the hidden state of the row's last token: an index as in predictors

Everything a token has stands at the token's own index of its row; nobody shifts anything. A packed batch also holds
`rows`, the index in `segments` of each of the B rows. Two things on the host complete a batch: `num_tokens`, what the
model reads without padding, and `examples`, the size of each example of the data set that it was made of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from strop.models.segments import Layout, Segments

IGNORE = -100
"""The label of a token without a loss, as in transformers."""

Batch = dict[str, Any]


@dataclass(slots=True)
class TokenRow:
    """One example, or the part of one that others share.

    Example: prompt P P shared by answers A B and C

        TokenRow([P, P], None)
        TokenRow([A, B], [A, B], parent=0)
        TokenRow([C], [C], parent=0)
    """

    input_ids: Sequence[int]
    labels: Sequence[int] | None
    """What each token is scored against: usually itself, -100 for no loss. None: the row is context for others."""
    parent: int = -1
    """Position, in the list of rows, of the row that this one continues; -1 for none."""
    streams: dict[str, Sequence[float]] = field(default_factory=dict)
    """Anything else that each token has, e.g. {"old_logps": [...]}."""


@dataclass(frozen=True, slots=True)
class Example:
    """How much of a batch one example of the data set is."""

    num_rows: int
    """Of the B rows with a loss."""
    num_tokens: int


def collate(rows: Sequence[TokenRow], layout: Layout, pad_token_id: int, multiple_of: int = 1) -> Batch:
    """The batch of `rows`. `multiple_of` rounds the model's time axis up with padding that nothing attends to."""
    segments = Segments(tuple(len(row.input_ids) for row in rows), tuple(row.parent for row in rows))
    scored = [i for i, row in enumerate(rows) if row.labels is not None]
    if layout == "packed":
        batch, first_token, first_predictor = _packed(rows, segments, scored, pad_token_id, multiple_of)
    else:
        batch, first_token, first_predictor = _padded(rows, segments, scored, pad_token_id, multiple_of)
    return batch | _row_tensors([rows[i] for i in scored], first_token, first_predictor)


def _packed(rows, segments: Segments, scored, pad_token_id: int, multiple_of: int):
    stream = torch.cat([_tensor(row.input_ids) for row in rows])
    before = segments.predecessors()
    first_token = [segments.starts[i] for i in scored]
    first_predictor = [int(before[start]) for start in first_token]
    missing = -segments.num_tokens % multiple_of
    if missing:
        stream = torch.cat([stream, torch.full((missing,), pad_token_id)])
        segments = Segments((*segments.lengths, missing), (*segments.parents, -1))
    batch = {
        "input_ids": stream[None],
        "position_ids": segments.position_ids(),
        "segments": segments,
        "rows": tuple(scored),
        "num_tokens": segments.num_tokens - missing,
    }
    return batch, first_token, first_predictor


def _padded(rows, segments: Segments, scored, pad_token_id: int, multiple_of: int):
    whole = [[t for j in (*segments.ancestors(i), i) for t in rows[j].input_ids] for i in scored]
    width = -(-max(map(len, whole)) // multiple_of) * multiple_of
    batch = {
        "input_ids": pad([_tensor(ids) for ids in whole], pad_token_id, width),
        "attention_mask": pad([torch.ones(len(ids), dtype=torch.int64) for ids in whole], 0, width),
        "num_tokens": sum(map(len, whole)),
    }
    first_token = [b * width + segments.depths[i] for b, i in enumerate(scored)]
    first_predictor = [start - 1 if segments.depths[i] else -1 for start, i in zip(first_token, scored, strict=True)]
    return batch, first_token, first_predictor


def _row_tensors(rows: list[TokenRow], first_token: list[int], first_predictor: list[int]) -> dict[str, Tensor]:
    """The layout-independent tensors; `first_token` and `first_predictor` say where each row begins."""
    width = max((len(row.input_ids) for row in rows), default=0)
    labels = pad([_tensor(row.labels) for row in rows], IGNORE, width)
    predictors = torch.tensor(first_token)[:, None] + torch.arange(-1, width - 1)
    predictors[:, 0] = torch.tensor(first_predictor)
    mask = (labels != IGNORE) & (predictors >= 0)  # nothing predicts the first token of a root
    tensors = {
        "targets": labels.masked_fill(~mask, 0),
        "predictors": predictors.masked_fill(~mask, 0),
        "completion_mask": mask.long(),
        "ends": torch.tensor([start + len(row.input_ids) - 1 for start, row in zip(first_token, rows, strict=True)]),
    }
    for name in rows[0].streams if rows else ():
        tensors[name] = pad([torch.as_tensor(row.streams[name]) for row in rows], 0, width)
    return tensors


def pad(rows: Sequence[Tensor], value: float, width: int) -> Tensor:
    """Right-pad 1-dimensional tensors to (len(rows), width)."""
    out = torch.full((len(rows), width), value, dtype=rows[0].dtype)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def as_batch(inputs: Batch) -> Batch:
    """`inputs` of any collator that gives `input_ids` and `labels` of one shape, right-padded or with restarting
    `position_ids`, as a batch. What else it holds goes to the model as it is."""
    if "targets" in inputs:
        return inputs
    if "labels" not in inputs or "input_ids" not in inputs:
        raise ValueError(
            f"the data collator gave {sorted(inputs)}, but a loss needs `input_ids` and `labels` (-100: no loss)"
        )
    known = ("input_ids", "labels", "attention_mask", "position_ids")
    extra = {name: value for name, value in inputs.items() if name not in known}
    if inputs.get("attention_mask") is None and inputs.get("position_ids") is not None:
        return _split_stream(inputs) | {"model_kwargs": extra}
    ids, labels = inputs["input_ids"], inputs["labels"]
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    predictors = torch.arange(-1, ids.numel() - 1, device=ids.device).view_as(ids)
    trained = labels != IGNORE
    trained[:, 0] = False
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "model_kwargs": extra,
        "num_tokens": int(mask.sum()),
        "targets": labels.masked_fill(~trained, 0),
        "predictors": predictors.masked_fill(~trained, 0),
        "completion_mask": trained.long(),
    }


def _split_stream(inputs: Batch) -> Batch:
    """A (1, N) stream whose `position_ids` restart at each row, as a packed batch."""
    ids, labels, positions = (inputs[name][0].tolist() for name in ("input_ids", "labels", "position_ids"))
    starts = [i for i, position in enumerate(positions) if position == 0]
    spans = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
    batch = collate([TokenRow(ids[span], labels[span]) for span in spans], "packed", pad_token_id=0)
    device = inputs["input_ids"].device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def masked_targets(batch: Batch) -> Tensor:
    """(B, T): each row's labels at their own index, -100 where there is no loss."""
    return batch["targets"].masked_fill(batch["completion_mask"] == 0, IGNORE)


def flat_labels(batch: Batch) -> Tensor:
    """Labels at their own index of what the logits are of, same shape, -100 where there is no loss: what functions of
    full logits expect."""
    if "decoder_input_ids" in batch:  # whose logits stand where their label does
        return masked_targets(batch)
    labels = torch.full_like(batch["input_ids"], IGNORE)
    mask = batch["completion_mask"].bool()
    if "segments" in batch:
        starts = torch.tensor([batch["segments"].starts[i] for i in batch["rows"]], device=labels.device)
        places = starts[:, None] + torch.arange(mask.shape[1], device=labels.device)
    else:
        places = batch["predictors"] + 1
    labels.view(-1)[places[mask]] = batch["targets"][mask]
    return labels


def by_example(batch: Batch, values: Tensor, fill: float) -> Tensor:
    """`values` of each token, in the row tensors' shape (B, T, ...) or in that of a packed stream (1, N, ...), with one
    line for each example of the data set: (E, W, ...), its rows one behind the other, then `fill`."""
    sizes = batch.get("examples") or [Example(1, 0)] * len(batch["targets"])
    is_stream = "segments" in batch and values.shape[:2] == batch["input_ids"].shape
    if not is_stream and len(sizes) == len(values):
        return values
    if "segments" in batch:
        spans = [batch["segments"].span(i) for i in batch["rows"]]
    else:
        spans = [slice(0, int(length)) for length in batch["attention_mask"].sum(-1)]
    if is_stream:
        rows = iter([values[0, span] for span in spans])
    else:
        rows = iter([line[: span.stop - span.start] for line, span in zip(values, spans, strict=True)])
    lines = [torch.cat(list(islice(rows, size.num_rows))) for size in sizes]
    return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=fill)


def keep_examples(batch: Batch, count: int) -> Batch:
    """`batch` with a loss on its first `count` examples only; the tokens of the others don't count either."""
    sizes = batch.get("examples") or [Example(1, int(n)) for n in batch["attention_mask"].sum(-1)]
    mask = batch["completion_mask"].clone()
    mask[sum(size.num_rows for size in sizes[:count]) :] = 0
    return batch | {"completion_mask": mask, "num_tokens": sum(size.num_tokens for size in sizes[:count])}


def some_rows(batch: Batch, chosen: slice) -> Batch:
    """The `chosen` of the rows with a loss, and what they continue, as the model reads them without the others.

    `examples` and `num_tokens` go, since they are about whole examples.
    """
    ids, num_rows = batch["input_ids"], len(batch["targets"])
    kept = torch.zeros(ids.shape, dtype=torch.bool)
    replaced: Batch = {}
    if "segments" in batch:
        segments: Segments = batch["segments"]
        left_out = set(batch["rows"]) - set(batch["rows"][chosen])
        indices = [i for i in range(len(segments.lengths)) if i not in left_out]
        for i in indices:
            kept[0, segments.span(i)] = True
        new = {-1: -1} | {old: i for i, old in enumerate(indices)}
        lengths = tuple(segments.lengths[i] for i in indices)
        replaced["segments"] = Segments(lengths, tuple(new[segments.parents[i]] for i in indices))
        replaced["rows"] = tuple(new[i] for i in batch["rows"][chosen])
        replaced |= {name: batch[name][:, kept[0].to(ids.device)] for name in ("input_ids", "position_ids")}
    else:
        kept[chosen] = True
    places = (kept.flatten().cumsum(0) - 1).clamp(min=0).to(ids.device)
    left = {
        name: value[chosen] if isinstance(value, Tensor) and value.shape[:1] == (num_rows,) else value
        for name, value in batch.items()
        if name not in replaced and name not in ("examples", "num_tokens")
    }
    return left | replaced | {name: places[left[name]] for name in ("predictors", "ends")}


def leading_rows(packed: Batch, num_tokens: int) -> Batch:
    """The first rows of a packed batch, with all they continue: two at least and `num_tokens`, if it has so many."""
    segments = packed["segments"]
    count, total = 0, 0
    while count < len(segments.lengths) and (total < num_tokens or count < 2 or segments.parents[count] >= 0):
        total += segments.lengths[count]
        count += 1
    rows = tuple(segment for segment in packed["rows"] if segment < count)
    return {
        "input_ids": packed["input_ids"][:, :total],
        "position_ids": packed["position_ids"][:, :total],
        "segments": Segments(segments.lengths[:count], segments.parents[:count]),
        "rows": rows,
        **{name: packed[name][: len(rows)] for name in ("targets", "predictors", "completion_mask", "ends")},
    }


@dataclass
class SupervisedCollator:
    """Examples {"input_ids"[, "labels" | "completion_mask" and/or "assistant_masks"][, "seq_lengths"]} to a batch.

    An example with `seq_lengths` holds several rows that do not see each other. Without labels, all tokens that no mask
    excludes are trained.
    """

    pad_token_id: int
    layout: Layout = "packed"
    multiple_of: int = 1

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        rows = [list(_rows_of(example)) for example in examples]
        batch = collate([row for several in rows for row in several], self.layout, self.pad_token_id, self.multiple_of)
        sizes = [Example(len(several), sum(len(row.input_ids) for row in several)) for several in rows]
        return batch | {"examples": sizes}


@dataclass
class EncoderDecoderCollator:
    """The same examples for a model whose encoder reads the prompt and whose decoder is trained on the rest.

    The rest begins with the first token that has a label; each of its tokens is predicted from the one before, the
    first from `decoder_start_token_id`. Always padded. Raises ValueError for a row without a prompt.
    """

    pad_token_id: int
    decoder_start_token_id: int
    multiple_of: int = 1

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        rows = [row for example in examples for row in _rows_of(example)]
        cuts = [next(i for i, label in enumerate(row.labels) if label != IGNORE) for row in rows]
        if not all(cuts):
            raise ValueError(
                "a row is trained from its first token on, so the encoder of this model has nothing to read. Give it "
                "rows with prompt and completion, and leave completion_only_loss unset"
            )
        prompts = [_tensor(row.input_ids[:cut]) for row, cut in zip(rows, cuts, strict=True)]
        answers = [_tensor(row.input_ids[cut:]) for row, cut in zip(rows, cuts, strict=True)]
        start = torch.tensor([self.decoder_start_token_id])
        read, written = self._width(prompts), self._width(answers)
        labels = pad([_tensor(row.labels[cut:]) for row, cut in zip(rows, cuts, strict=True)], IGNORE, written)
        return {
            "input_ids": pad(prompts, self.pad_token_id, read),
            "attention_mask": pad([torch.ones_like(prompt) for prompt in prompts], 0, read),
            "decoder_input_ids": pad(
                [torch.cat([start, answer[:-1]]) for answer in answers], self.pad_token_id, written
            ),
            "targets": labels.masked_fill(labels == IGNORE, 0),
            "predictors": torch.arange(labels.numel()).view_as(labels),
            "completion_mask": (labels != IGNORE).long(),
            "num_tokens": sum(map(len, prompts + answers)),
            "examples": [
                Example(1, len(prompt) + len(answer)) for prompt, answer in zip(prompts, answers, strict=True)
            ],
        }

    def _width(self, rows: list[Tensor]) -> int:
        return -(-max(map(len, rows)) // self.multiple_of) * self.multiple_of


def _tensor(numbers: Sequence[int]) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.int64)


def _rows_of(example: dict[str, Any]):
    ids, labels, start = example["input_ids"], _labels_of(example), 0
    for length in example.get("seq_lengths") or [len(ids)]:
        yield TokenRow(ids[start : start + length], labels[start : start + length])
        start += length


def _labels_of(example: dict[str, Any]) -> Sequence[int]:
    if example.get("labels") is not None:
        return example["labels"]
    masks = [example[name] for name in ("completion_mask", "assistant_masks") if example.get(name) is not None]
    if not masks:
        return example["input_ids"]
    return [token if all(kept) else IGNORE for token, *kept in zip(example["input_ids"], *masks, strict=True)]
