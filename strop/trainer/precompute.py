"""Reference log-probabilities as columns of a data set: computed once, and checked before they are used.

Each row carries a key of its tokens and of the reference that scored it. So rows may be saved, loaded, shuffled and
selected, and values of another model, tokenizer or truncation are found out.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.fingerprint import Hasher
from torch import Tensor

KEY = "ref_key"
"""Column of the keys."""


@dataclass(frozen=True)
class ReferenceColumns:
    """Gives data sets the columns `ref_<side>_logps`, one number a token in nats, and `ref_key`."""

    score: Callable[[list[dict[str, Any]]], Tensor]
    """Log-probabilities (B, T) of the completions of some examples, side by side."""
    fingerprint: str
    """Of the reference."""
    sides: tuple[str, ...]
    batch_size: int
    num_processes: int = 1
    process_index: int = 0

    @property
    def columns(self) -> list[str]:
        return [f"ref_{side}_logps" for side in self.sides]

    def __call__(self, rows: Dataset, name: str) -> Dataset:
        """`rows` with the columns; rows that have them come back as they are. Every rank must call it.

        Raises ValueError for columns that were computed from other tokens or with another reference.
        """
        if self.are_in(rows):
            self._check(rows, name)
            return rows
        num_shards = min(self.num_processes, len(rows))  # ranks beyond them repeat the last one
        own = rows.shard(num_shards, min(self.process_index, num_shards - 1), contiguous=True)
        new = {column: List(Value("float32")) for column in self.columns} | {KEY: Value("string")}
        features = Features(rows.features | new)
        options = {
            "batched": True,
            "batch_size": self.batch_size,
            "features": features,
            "new_fingerprint": Hasher.hash((own._fingerprint, self.fingerprint)),
            "desc": f"Reference log-probabilities of {name}",
        }
        computed = own.map(self._computed, **options)
        if computed[KEY][:] != list(self._keys(own)):  # a cache of other rows
            computed = own.map(self._computed, load_from_cache_file=False, **options)
        return computed if self.num_processes == 1 else self._gathered(rows, computed)

    def are_in(self, rows: Dataset) -> bool:
        return bool({*self.columns, KEY} & set(rows.column_names))

    def _computed(self, batch: dict[str, list]) -> dict[str, list]:
        examples = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        scores = self.score(examples).float().cpu().numpy()
        return {
            f"ref_{side}_logps": [line[: len(e[f"{side}_ids"])] for line, e in zip(lines, examples, strict=True)]
            for side, lines in ((side, scores[i :: len(self.sides)]) for i, side in enumerate(self.sides))
        } | {KEY: [self._key(example) for example in examples]}

    def _gathered(self, rows: Dataset, computed: Dataset) -> Dataset:
        new = computed.select_columns([*self.columns, KEY])
        ranks = gather_object([new.to_dict()])[: len(rows)]
        parts = [Dataset.from_dict(part, features=new.features) for part in ranks]
        return concatenate_datasets([rows, concatenate_datasets(parts)], axis=1)

    def _keys(self, rows: Dataset) -> Iterator[str]:
        wanted = ["prompt_ids", *(f"{side}_ids" for side in self.sides)]
        return map(self._key, rows.select_columns(wanted))

    def _key(self, example: dict[str, Any]) -> str:
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=8)
        for column in ("prompt_ids", *(f"{side}_ids" for side in self.sides)):
            ids = np.asarray(example[column], np.int64)
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        return digest.hexdigest()

    def _check(self, rows: Dataset, name: str) -> None:
        missing = [column for column in (*self.columns, KEY) if column not in rows.column_names]
        if missing:
            raise ValueError(
                f"the {name} data set has reference log-probabilities, but no {', '.join(missing)}, so it can't be "
                "told what they were computed with. Remove its columns ref_*, and they are computed anew"
            )
        pairs = enumerate(zip(rows[KEY], self._keys(rows), strict=True))
        stale = next((i for i, (found, expected) in pairs if found != expected), None)
        if stale is not None:
            raise ValueError(
                f"row {stale} of the {name} data set has reference log-probabilities of other tokens (tokenizer, chat "
                "template, truncation), or by another reference (weights, config, precision), so its log-ratios would "
                "be wrong. Remove the columns ref_*, and they are computed anew"
            )
