"""How often what the model writes while it trains is better than what it wrote before."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from transformers import GenerationConfig
from transformers.trainer_callback import ExportableState

from strop.callbacks.completions import LogCompletionsCallback, Prompt, append, as_text
from strop.models.reference import Computed
from strop.models.tokenizers import inner_tokenizer
from strop.rewards.texts import Words
from strop.rewards.verdicts import verdicts
from strop.rollout.generate import refuse_virtual_tokens

logger = logging.getLogger(__name__)


class WinRateCallback(LogCompletionsCallback, ExportableState):
    """At each evaluation `judge` compares completions of the model with those of the baseline, which is the trainer's
    reference, or without one the model as training begins.

    The judge is one of `strop.rewards.verdicts`; completions of messages are messages, too. Prompts and generation are
    those of LogCompletionsCallback. Logs `eval_win_rate`, the share of prompts on which the model wins, ties counted
    half, and with `use_soft_judge` `eval_avg_win_prob`, the mean probability that it does; both are among the metrics
    that `evaluate` returns. Prompts without a verdict are in neither. Rows {"step", "prompt", "completion", "baseline",
    "win"} are appended to `<output_dir>/win_rate.jsonl`. What the baseline wrote is part of checkpoints; a trainer has
    one such callback.
    """

    def __init__(
        self,
        judge: Any,
        trainer: Any,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        shuffle_order: bool = True,
        use_soft_judge: bool = False,
        prompts: Sequence[Prompt] | None = None,
        batch_size: int = 8,
    ):
        super().__init__(trainer, generation_config, num_prompts, prompts=prompts, batch_size=batch_size)
        self.judge, self.trainer = judge, trainer
        self.shuffle_order, self.use_soft_judge = shuffle_order, use_soft_judge
        self.baseline: list[str] | None = None
        """What the baseline wrote, a prompt each."""

    def state(self) -> dict[str, Any]:
        prompts = [as_text(prompt) for prompt in self.prompts]
        return {"args": {}, "attributes": {"baseline": self.baseline, "prompts": prompts}}

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._refuse_another()
        refuse_virtual_tokens(model, type(self).__name__)
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name) if state.global_step else None
        self.baseline = self._baseline_in(saved["attributes"]) if saved else None
        if state.global_step and not self.baseline and not self._has_reference:
            raise ValueError(
                f"the run resumes at step {state.global_step}, but its checkpoint doesn't hold what the model wrote "
                "before training, so there is no baseline to win against. Resume from a checkpoint that was saved with "
                "WinRateCallback, or leave the callback out."
            )
        if not self.baseline:
            self._write_baseline(model, processing_class)
        state.stateful_callbacks[name] = self.state()  # where transformers looks for it in each checkpoint

    def on_step_end(self, args, state, control, **kwargs):
        """Completions are written at evaluations."""

    def on_evaluate(self, args, state, control, model=None, processing_class=None, metrics=None, **kwargs):
        if self.baseline is None:
            self._write_baseline(model, processing_class)
        assert self.baseline is not None
        written = self.complete_all(model, processing_class)
        rows = [
            {"step": state.global_step, "prompt": prompt, "completion": completion, "baseline": baseline}
            for prompt, completion, baseline in zip(self.prompts, written, self.baseline, strict=True)
        ]
        with PartialState().split_between_processes(rows) as share:
            pairs = [tuple(words(row["prompt"], row[name]) for name in ("completion", "baseline")) for row in share]
            asked = [row["prompt"] for row in share], pairs
            wins = gather_object(verdicts(self.judge, *asked, args.seed, self.shuffle_order))
        rates = self.rates(wins)
        if metrics is not None:
            metrics.update(rates)
        if rates:
            self.trainer.log(dict(rates))
        if state.is_world_process_zero:
            append(
                Path(args.output_dir, "win_rate.jsonl"), [row | {"win": w} for row, w in zip(rows, wins, strict=True)]
            )

    def rates(self, wins: Sequence[float | None]) -> dict[str, float]:
        """What is logged, of the probability that the model wins on each prompt, None where there is no verdict."""
        known = [win for win in wins if win is not None]
        if len(known) < len(wins):
            logger.warning("the judge had no verdict on %d of %d prompts", len(wins) - len(known), len(wins))
        if not known:
            return {}
        rates = {"eval_win_rate": sum((win > 0.5) + 0.5 * (win == 0.5) for win in known) / len(known)}
        return rates | ({"eval_avg_win_prob": sum(known) / len(known)} if self.use_soft_judge else {})

    def complete_all(self, model: nn.Module, processing_class: Any) -> list[str]:
        """A completion of each prompt; every process writes its share."""
        with PartialState().split_between_processes(self.prompts) as share:
            rows = self.complete(model, inner_tokenizer(processing_class), share)
        return [row["completion"] for row in gather_object(rows)]

    def _refuse_another(self) -> None:
        """A second callback of this kind would log under the same names, and take the first one's baseline."""
        callbacks = getattr(getattr(self.trainer, "callback_handler", None), "callbacks", [])
        if sum(isinstance(one, WinRateCallback) for one in callbacks) > 1:
            raise ValueError(
                "the trainer has several WinRateCallbacks, whose win rates have one name and would be taken for each "
                "other's; keep one of them. Other judges can be asked afterwards, by strop.evaluate(judge=...)."
            )

    def _baseline_in(self, saved: dict[str, Any]) -> list[str] | None:
        """What the baseline wrote on these prompts, as a checkpoint has it."""
        prompts = saved.get("prompts")
        if saved["baseline"] and prompts != self.state()["attributes"]["prompts"]:
            raise ValueError(
                f"the checkpoint holds what the baseline wrote on {len(saved['baseline'])} prompts, but those of this "
                f"WinRateCallback are {len(self.prompts)} others. Resume with the same evaluation set and num_prompts."
            )
        return saved["baseline"]

    @property
    def _has_reference(self) -> bool:
        return isinstance(getattr(self.trainer, "reference", None), Computed)

    def _write_baseline(self, model: nn.Module, processing_class: Any) -> None:
        with self._before(model) as before:
            self.baseline = self.complete_all(before, processing_class)

    @contextmanager
    def _before(self, model: nn.Module) -> Iterator[nn.Module]:
        if not self._has_reference:
            yield model
            return
        with self.trainer.reference.acting() as reference:
            yield reference


def words(prompt: Prompt, completion: str) -> Words:
    """A completion as judges and reward functions get it: a text after a text, a message after messages."""
    return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
