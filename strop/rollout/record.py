"""Every rollout of a run, on disk and on the screen."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strop.rewards.texts import Words, conversation_text
from strop.rollout.types import Rollout

FOLDER = "rollouts"
"""Of the output folder."""

Line = dict[str, Any]


def lines_of(step: int, rollouts: Sequence[Rollout]) -> list[Line]:
    """What is kept of each rollout: step, prompt, completion, each reward, advantage, truncated, and what reward
    functions gave to `log_extra`."""
    return [
        {
            "step": step,
            "prompt": plain(rollout.prompt),
            "completion": plain(rollout.completion),
            **rollout.rewards,
            **rollout.extras,
            "advantage": rollout.advantage,
            "truncated": rollout.finish_reason == "length",
        }
        for rollout in rollouts
    ]


def write(output_dir: str | Path, name: str, lines: Sequence[Line]) -> Path:
    """Write rollouts/<name>.jsonl; one of that name, from a run that was resumed before it, is replaced."""
    file = Path(output_dir, FOLDER, f"{name}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", errors="backslashreplace") as stream:  # half characters of log_extra
        stream.writelines(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
    return file


def show(lines: Sequence[Line], count: int | None = None, unique_prompts: bool = False) -> None:
    """Print a table of `lines`: `count` of them drawn at random, all if None; one a prompt with `unique_prompts`."""
    if unique_prompts:
        lines = list({json.dumps(line["prompt"], default=str): line for line in reversed(lines)}.values())[::-1]
    if count is not None and count < len(lines):
        lines = random.Random(lines[0]["step"]).sample(lines, count)
    if lines:
        Console().print(table_of(lines))


def table_of(lines: Sequence[Line]) -> Table:
    """`lines` for the terminal."""
    names = list(dict.fromkeys(name for line in lines for name in line if name != "step"))
    table = Table(*names, title=f"completions at step {lines[0]['step']}", show_lines=True)
    for line in lines:
        table.add_row(*(Text(_shown(line.get(name))) for name in names))
    return table


def plain(words: Words) -> Any:
    """Words as JSON can hold them: a text, or messages."""
    return words if isinstance(words, str) else [dict(message) for message in words]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return conversation_text(value)
    return "" if value is None else str(value)
