"""A trained reward model as a reward function, with its own tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from strop.models.arguments import ModelInitArguments
from strop.models.load import load_model, load_tokenizer
from strop.rewards.reward_model import score
from strop.rewards.texts import Words

PREPARED = ("tools", "chat_template_kwargs")
"""Columns that are part of how a conversation is written."""


class RewardModel:
    """Scores of a reward model, given by name or folder or as an object; each text is prepared as in its training.

    It reads prompts and completions as words, cut into tokens by its own tokenizer, `batch_size` at a time. Raises
    ValueError for models with more than one output, and for an object without a tokenizer.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 8,
        model_init_kwargs: dict[str, Any] | None = None,
    ):
        args = ModelInitArguments(model_init_kwargs=model_init_kwargs)
        self.model = load_model(model, args, auto_class=AutoModelForSequenceClassification, num_labels=1)
        if not hasattr(self.model, "config"):
            raise ValueError(
                f"{type(self.model).__name__} is no model of transformers, so it can't be asked for scores. Write a "
                "reward function that asks it."
            )
        path = getattr(self.model.config, "_name_or_path", "") if isinstance(model, nn.Module) else str(model)
        self.__name__ = path.rstrip("/").rpartition("/")[2] or type(self.model).__name__
        labels = getattr(self.model.config, "num_labels", None)
        if labels != 1:
            raise ValueError(
                f"{self.__name__} has {labels} outputs, but a reward model has one. Train one with `strop reward`, or "
                "write a reward function that makes one number of them."
            )
        if tokenizer is None and not path:
            raise ValueError(
                "a reward model that was not loaded by name needs its tokenizer: RewardModel(model, tokenizer)"
            )
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(path, ModelInitArguments())
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model.eval().requires_grad_(False)
        self.batch_size = batch_size

    def __call__(self, prompts: Sequence[Words], completions: Sequence[Words], **columns: Any) -> torch.Tensor:
        """(N,): the scores."""
        own = {name: columns[name] for name in PREPARED if name in columns}
        return score(self.model, self.tokenizer, prompts, completions, batch_size=self.batch_size, **own)
