"""How much likelier a prompt is among desirable rows than among undesirable ones, from a classifier of embeddings.

BCO weighs undesirable rows by it where the two come from different sources (arXiv:2404.04656 sec. 3.3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, Value
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PreTrainedTokenizerBase

from strop.losses.unpaired import density_ratio

COLUMN = "weight"
"""Of a data set: the factor of each row's loss."""
BATCH = 32


@dataclass(frozen=True)
class Embedder:
    """Prompts to vectors: `function(input_ids=..., attention_mask=...)` gives (B, D) for texts tokenised together."""

    function: Callable[..., Tensor]
    tokenizer: PreTrainedTokenizerBase
    num_processes: int
    process_index: int
    device: torch.device

    def __call__(self, texts: list[str]) -> Tensor:
        """(n, D) float64, on the host. Every rank must call it, embeds its share, and gets all."""
        share = -(-len(texts) // self.num_processes)
        own = texts[self.process_index * share : (self.process_index + 1) * share]
        vectors = [self._embedded(own[i : i + BATCH]) for i in range(0, len(own), BATCH)]
        ranks = gather_object([vectors]) if self.num_processes > 1 else [vectors]
        return torch.cat([vector for rank in ranks for vector in rank])

    @torch.no_grad()
    def _embedded(self, texts: list[str]) -> Tensor:
        inputs = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self.device)
        vectors = self.function(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        if vectors.shape[:1] != (len(texts),) or vectors.ndim != 2:
            raise ValueError(
                f"embedding_func returned {tuple(vectors.shape)} for {len(texts)} prompts; it must return one vector a "
                "prompt, (prompts, dimensions)"
            )
        return vectors.double().cpu()


@dataclass(frozen=True)
class Classifier:
    """Logistic regression: P(desirable | prompt) from an embedding."""

    weight: Tensor
    """(D,) float64."""
    bias: Tensor
    """()."""

    def __call__(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.weight + self.bias).sigmoid()


def fit(vectors: Tensor, desirable: Tensor) -> Classifier:
    """The classifier of the least balanced log-loss, every class with half the weight, and ridge penalty 1/2 |w|^2.

    Raises ValueError if a class has no row.
    """
    counts = torch.stack([(~desirable).sum(), desirable.sum()])
    if not counts.all():
        raise ValueError(
            f"there are {int(counts[1])} desirable and {int(counts[0])} undesirable rows, so prompts of the two can't "
            "be told apart. Give rows of both classes, or no embedding_func"
        )
    row_weight = (len(desirable) / (2 * counts))[desirable.long()].double()
    sign = torch.where(desirable, 1.0, -1.0).double()
    parameters = torch.zeros(vectors.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=1000, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        margin = sign * (vectors @ parameters[:-1] + parameters[-1])
        loss = (row_weight * softplus(-margin)).sum() + 0.5 * parameters[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    solution = parameters.detach()
    return Classifier(solution[:-1], solution[-1])


def sample(labels: list[bool], size: int, seed: int) -> list[int]:
    """Indices of up to `size` rows of each class, drawn without replacement."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    for value in (False, True):
        members = torch.tensor([i for i, label in enumerate(labels) if bool(label) == value], dtype=torch.int64)
        drawn += members[torch.randperm(len(members), generator=generator)[:size]].tolist()
    return drawn


def weighted_rows(rows: Dataset, vectors: Tensor, classifier: Classifier, low: float, high: float) -> Dataset:
    """`rows` with the column `weight`: the density ratio of undesirable ones, 1 for desirable ones."""
    ratios = density_ratio(classifier(vectors), low, high)
    labels = torch.tensor(rows["label"][:], dtype=torch.bool)
    weights: Any = torch.where(labels, 1.0, ratios).tolist()
    rows = rows.remove_columns([COLUMN]) if COLUMN in rows.column_names else rows
    return rows.add_column(COLUMN, weights).cast_column(COLUMN, Value("float32"))
