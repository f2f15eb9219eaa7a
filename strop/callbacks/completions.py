"""What the model writes while it trains: completions of fixed prompts, in a file and on the screen."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerCallback

from strop.models.tokenizers import inner_tokenizer
from strop.rollout.generate import refuse_virtual_tokens

Prompt = str | list[dict[str, Any]]
COLUMNS = ("step", "prompt", "completion")
MAX_NEW_TOKENS = 64


class LogCompletionsCallback(TrainerCallback):
    """Every `freq` optimizer steps (`eval_steps` if not set) completes prompts and writes what came out.

    The prompts are `prompts`, or the column "prompt" of the trainer's evaluation set; the first `num_prompts` of them.
    Rows {"step", "prompt", "completion"} are appended to `<output_dir>/completions.jsonl` and printed as a table; they
    also go to those of wandb, trackio and comet_ml that `report_to` names. Generation has random numbers of its own:
    the run trains as it would without the callback.
    """

    def __init__(
        self,
        trainer: Any = None,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
        prompts: Sequence[Prompt] | None = None,
        batch_size: int = 8,
    ):
        if prompts is None:
            prompts = evaluation_prompts(trainer, type(self).__name__)
        if len(prompts[:num_prompts]) == 0:
            raise ValueError(
                f"{type(self).__name__} has no prompt to complete: {len(prompts)} given, num_prompts={num_prompts}."
            )
        self.prompts = list(prompts[:num_prompts])
        self.generation_config = generation_config
        self.freq = freq
        self.batch_size = batch_size

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if model is not None:
            refuse_virtual_tokens(model, type(self).__name__)
        if not (self.freq or state.eval_steps):
            raise ValueError(
                "LogCompletionsCallback doesn't know when to complete: pass freq (in steps), or set eval_steps."
            )

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step % (self.freq or state.eval_steps):
            return
        with PartialState().split_between_processes(self.prompts) as share:
            rows = self.complete(model, inner_tokenizer(processing_class), share)
        rows = gather_object(rows)
        if state.is_world_process_zero:
            rows = [{"step": state.global_step, **row} for row in rows]
            append(Path(args.output_dir, "completions.jsonl"), rows)
            Console().print(as_table(rows))
            report(args.report_to, rows)

    def generation_options(self) -> dict[str, Any]:
        """The user's generation configuration, else the model's own with room for a short answer."""
        if self.generation_config is None:
            return {"max_new_tokens": MAX_NEW_TOKENS}
        return {"generation_config": self.generation_config}

    def complete(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
    ) -> list[dict[str, str]]:
        """{"prompt", "completion"} of each prompt."""
        texts: list[str] = []
        with evaluating(model), torch.random.fork_rng(), torch.no_grad():
            for first in range(0, len(prompts), self.batch_size):
                ids = [prompt_ids(tokenizer, prompt) for prompt in prompts[first : first + self.batch_size]]
                batch = left_padded(ids, tokenizer.pad_token_id, model.device)
                output = model.generate(**batch, **self.generation_options())
                texts += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return [{"prompt": as_text(p), "completion": text} for p, text in zip(prompts, texts, strict=True)]


def evaluation_prompts(trainer: Any, callback: str) -> Sequence[Prompt]:
    """Column "prompt" of the trainer's evaluation set; `callback` is the name of who asks."""
    dataset = getattr(trainer, "eval_dataset", None)
    if dataset is None:
        raise ValueError(f"{callback} needs prompts: pass prompts=[...], or a trainer with an eval_dataset.")
    names = dataset.column_names if hasattr(dataset, "column_names") else list(dataset)
    if isinstance(dataset, dict) or "prompt" not in names:
        raise ValueError(f'the evaluation set has no column "prompt", but {names}. Pass {callback}(prompts=[...]).')
    return dataset["prompt"]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """`prompt` as the model reads it: messages by the template, text with one beginning-of-sequence token at most."""
    if not isinstance(prompt, str):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    begun = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    ids = tokenizer(prompt, add_special_tokens=not begun)["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token) else ids


def left_padded(rows: list[list[int]], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, (B, W), of rows that end together."""
    width = max(map(len, rows))
    ids = [[pad_token_id] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards the mode each module was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def as_text(prompt: Prompt) -> str:
    """A prompt for reading: messages as "role: content" lines."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def append(file: Path, rows: list[dict[str, Any]]) -> None:
    """Adds `rows` to a JSON-lines file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_table(rows: list[dict[str, Any]]) -> Table:
    """`rows` for the terminal."""
    table = Table(*COLUMNS, title=f"completions at step {rows[0]['step']}", show_lines=True)
    for row in rows:
        table.add_row(*(Text(str(row[column])) for column in COLUMNS))
    return table


def report(trackers: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """Sends `rows` to the trackers asked for that have tables, if the run has started them."""
    values = [[row[column] for column in COLUMNS] for row in rows]
    if "wandb" in trackers:
        import wandb

        wandb.log({"completions": wandb.Table(columns=list(COLUMNS), data=values)})
    if "trackio" in trackers:
        import pandas
        import trackio

        trackio.log({"completions": trackio.Table(dataframe=pandas.DataFrame(values, columns=list(COLUMNS)))})
    if "comet_ml" in trackers:
        import comet_ml

        if (experiment := comet_ml.get_running_experiment()) is not None:
            experiment.log_table("completions.csv", tabular_data=values, headers=list(COLUMNS))
