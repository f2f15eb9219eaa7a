"""Hand-written conversations: short, instructive, some with a system prompt, some of several turns."""

import json
from importlib.resources import files

from strop.data.samples.arithmetic import SPLITS

HELDOUT_EVERY = 8


def chat_rows(split: str = "train") -> list[dict]:
    """The conversations of a split, each {"messages": [...]}. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r} of the conversations; choose one of {', '.join(SPLITS)}")
    lines = files("strop.data.samples").joinpath("chat.jsonl").read_text(encoding="utf-8").splitlines()
    is_heldout = split == "heldout"
    return [json.loads(line) for i, line in enumerate(lines) if (i % HELDOUT_EVERY == 0) == is_heldout]
