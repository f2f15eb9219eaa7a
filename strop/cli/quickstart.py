"""`strop quickstart`: a small real model learns worded arithmetic in a few minutes, and what it learnt is shown.

The training itself is the public API as anyone would use it: `SFTConfig`, `SFTTrainer`, a LoRA adapter.
"""

import random
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strop.cli.args import Options
from strop.cli.train import is_explained, show_logs

ROWS_PER_STEP = 8
ONE_CHAT_ROW_IN = 4
NUM_HELDOUT = 24
NUM_SCORED = 16
NUM_SHOWN = 3
MAX_NEW_TOKENS = 96

Row = dict[str, Any]


@dataclass
class QuickstartArguments:
    """What is trained on what. Without options: SmolLM2-135M-Instruct on worded arithmetic and conversations."""

    model: str | None = None
    """A folder or hub id of a model to train instead of SmolLM2-135M-Instruct."""

    data: str | None = None
    """Your own rows, e.g. a .jsonl file, instead of the embedded ones. A part is held out to measure on."""

    output_dir: str = "quickstart"
    """Folder for the adapter, checkpoint, metrics and plot."""

    steps: int = 40
    """Optimizer steps, of 8 rows each."""

    learning_rate: float = 1e-3
    """Peak learning rate of the adapter."""

    seed: int = 0
    """Random state of rows and training."""

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} trains nothing; give at least 1.")


@dataclass(frozen=True)
class Task:
    """Rows to train on, rows held out, and the checks of an answer: name -> (answer, row) -> passed."""

    train: list[Row]
    heldout: list[Row]
    checks: dict[str, Callable[[str, Row], bool]]


@dataclass(frozen=True)
class Measured:
    """What a model does on the held-out rows: loss in nats a token, answers, and how many pass each check."""

    loss: float
    answers: list[str]
    passed: dict[str, int]


def main(argv: list[str]) -> int:
    """Run the command; the exit code."""
    options = Options("strop quickstart", [QuickstartArguments], "strop quickstart [options]")
    if {"-h", "--help"} & set(argv):
        options.parser.print_help()
        return 0
    try:
        run(*options.build(options.read(argv)))
    except ValueError as error:
        if not is_explained(error):
            raise
        print(f"strop quickstart: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: QuickstartArguments) -> tuple[Measured, Measured]:
    """Train, and print what changed; the measurements before and after."""
    start = time.monotonic()
    show_logs()
    quieten_libraries()
    task = embedded_task(args.steps * ROWS_PER_STEP, args.seed) if args.data is None else own_task(args.data, args.seed)
    trainer = build_trainer(args, args.model or starting_model(), task)
    say("measuring the model as it is")
    before = measure(trainer, task)
    say(f"training {args.steps} steps of {ROWS_PER_STEP} rows")
    trainer.train()
    say("measuring again")
    after = measure(trainer, task, before)
    trainer.save_model()
    report(task, before, after)
    folder = shlex.quote(args.output_dir)
    print(f"\nDone in {time.monotonic() - start:.0f} s. In {folder}: the adapter, its last checkpoint, metrics.jsonl,")
    print(f"loss.svg and report.html. Talk to it:\n\n    strop chat {folder}\n")
    return before, after


def say(message: str) -> None:
    print(f"- {message}", flush=True)


def quieten_libraries() -> None:
    """Bars and warnings of libraries would stand between the lines that say what happens."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def starting_model() -> str:
    """Folder of SmolLM2-135M-Instruct, made if this is the first time."""
    from strop.models.smollm2 import smollm2

    return str(smollm2(say))


def embedded_task(num_train: int, seed: int) -> Task:
    """Worded arithmetic with some conversations among it; a held-out answer must end in "Answer: N", the right N."""
    from strop.data.samples.arithmetic import answer_is_well_formed, arithmetic_rows, is_correct
    from strop.data.samples.chat import chat_rows

    chats = [last_turn(row["messages"]) for row in chat_rows("train")][: num_train // ONE_CHAT_ROW_IN]
    return Task(
        train=arithmetic_rows(num_train - len(chats), "train", seed) + chats,
        heldout=arithmetic_rows(NUM_HELDOUT, "heldout", seed),
        checks={
            "well-formed answers": lambda answer, row: answer_is_well_formed(answer),
            "correct answers": lambda answer, row: is_correct(answer, row["answer"]),
        },
    )


def own_task(path: str, seed: int) -> Task:
    """A user's rows, shuffled, an eighth (at most `NUM_HELDOUT`) held out. Raises ValueError for fewer than two."""
    from strop.data.formats import maybe_convert_to_chatml
    from strop.data.sources import load_rows

    loaded: Any = load_rows(path, "train")
    rows = [maybe_convert_to_chatml(row) for row in loaded]
    if len(rows) < 2:
        raise ValueError(f"{path} has {len(rows)} rows: at least one to train on and one to measure on are needed.")
    random.Random(seed).shuffle(rows)
    num_heldout = max(1, min(NUM_HELDOUT, len(rows) // 8))
    return Task(train=rows[num_heldout:], heldout=rows[:num_heldout], checks={})


def last_turn(messages: list[dict]) -> Row:
    """A conversation as a prompt and its last answer."""
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def build_trainer(args: QuickstartArguments, model: str, task: Task):
    """An `SFTTrainer` of a LoRA adapter on every linear layer."""
    from datasets import Dataset
    from peft import LoraConfig

    from strop.trainer.config import SFTConfig
    from strop.trainer.sft import SFTTrainer

    config = SFTConfig(
        output_dir=args.output_dir,
        max_steps=args.steps,
        per_device_train_batch_size=ROWS_PER_STEP,
        per_device_eval_batch_size=ROWS_PER_STEP,
        learning_rate=args.learning_rate,
        warmup_steps=max(1, args.steps // 10),
        logging_steps=2,
        save_steps=args.steps,
        save_total_limit=1,
        seed=args.seed,
        max_length=512,
        bf16=cpu_prefers_bfloat16() or None,
        activation_checkpointing=False,
    )
    columns = [name for name in task.train[0] if name in task.heldout[0] and name != "answer"]
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([{name: row[name] for name in columns} for row in task.train]),
        eval_dataset=Dataset.from_list([{name: row[name] for name in columns} for row in task.heldout]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def cpu_prefers_bfloat16() -> bool:
    """There is no accelerator and the CPU multiplies bfloat16 matrices in hardware (about twice as fast)."""
    import torch

    return not torch.accelerator.is_available() and bool(torch.cpu.get_capabilities().get("amx_bf16"))


def measure(trainer, task: Task, before: Measured | None = None) -> Measured:
    """Answers to the held-out prompts, and the held-out loss. With `before`, both sets of answers go on record."""
    rows = [row for row in task.heldout if prompt_of(row) is not None][: NUM_SCORED if task.checks else NUM_SHOWN]
    answers = generate(trainer, [prompt_of(row) for row in rows]) if rows else []
    if before is not None:
        trainer.record.samples = [
            {"prompt": question_of(row), "before": old, "after": new}
            for row, old, new in zip(rows, before.answers, answers, strict=True)
        ]
    passed = {
        name: sum(check(answer, row) for answer, row in zip(answers, rows, strict=True))
        for name, check in task.checks.items()
    }
    return Measured(trainer.evaluate()["eval_loss"], answers, passed)


def prompt_of(row: Row) -> list[dict] | str | None:
    """What a model is shown to answer a row; None for a row that is one text."""
    if "prompt" in row:
        return row["prompt"]
    messages = row.get("messages")
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" and len(messages) > 1 else None


def question_of(row: Row) -> str:
    """The last thing said in a row's prompt."""
    prompt = prompt_of(row)
    return prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""


def generate(trainer, prompts: list[Any]) -> list[str]:
    """The likeliest answer to each prompt, in one batch."""
    import torch

    tokenizer, model = trainer.processing_class, trainer.model
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    width = max(map(len, ids))
    padded = [[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in ids]
    model.eval()
    with torch.inference_mode(), trainer.compute_loss_context_manager():
        out = model.generate(
            input_ids=torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    return [text.strip() for text in tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)]


def prompt_ids(tokenizer, prompt: list[dict] | str) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)


def report(task: Task, before: Measured, after: Measured) -> None:
    """Print both measurements side by side, and some answers."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "before", "after", title="on held-out rows", title_justify="left")
    table.add_row("loss (nats a token)", f"{before.loss:.3f}", f"{after.loss:.3f}")
    for name in task.checks:
        num = len(after.answers)
        table.add_row(name, f"{before.passed[name]}/{num}", f"{after.passed[name]}/{num}")
    console.print(table)
    rows = [row for row in task.heldout if prompt_of(row) is not None]
    shown = list(zip(rows, before.answers, after.answers, strict=False))[:NUM_SHOWN]
    if shown:
        answers = Table("prompt", "before", "after", title="answers", title_justify="left", show_lines=True)
        for row, old, new in shown:
            answers.add_row(*map(escaped, (question_of(row), old, new)))
        console.print(answers)


def escaped(text: str) -> str:
    """`text` with nothing that rich would take for markup."""
    from rich.markup import escape

    return escape(text)
