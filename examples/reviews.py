"""Reviews of one sentence, pleased and displeased, made from a few words: data to try preference learning on.

    python examples/reviews.py FOLDER

writes `prompts.jsonl` ("The hotel was"), `pairs.jsonl` with a pleased and a displeased end of each, `texts.jsonl` with
all of these as prompts and completions, and `heldout_prompts.jsonl` and `heldout_pairs.jsonl` about other things.
"""

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRAINED = (
    "hotel soup film train museum garden concert phone jacket lesson bakery ferry play hostel novel camera bicycle "
    "tour festival cafe blender sofa exhibition bus podcast gym market dentist backpack course"
)
HELDOUT = "restaurant book lamp zoo guide pillow song hairdresser tent airport show kettle library taxi cheese painting"
OPENINGS = ("The {} was", "We thought the {} was", "My sister says the {} was", "All in all, the {} was")
PLEASED = (
    "wonderful|a delight from start to finish|well worth the money|lovely, and I would go again|"
    "better than we had hoped|charming and carefully made|the best part of our week|superb in every way"
)
DISPLEASED = (
    "terrible|a disappointment from start to finish|not worth the money|awful, and I would not go again|"
    "worse than we had feared|shabby and carelessly made|the worst part of our week|useless in every way"
)

Row = dict[str, Any]


def prompts(things: str) -> list[Row]:
    """Every opening about every thing, in an order of no meaning."""
    rows = [{"prompt": opening.format(thing)} for thing in things.split() for opening in OPENINGS]
    random.Random(0).shuffle(rows)
    return rows


def pairs(things: str) -> list[Row]:
    """A pleased and a displeased end for every opening, drawn apart, so that they differ in more than one word."""
    rng = random.Random(1)
    ends = list(itertools.product(PLEASED.split("|"), DISPLEASED.split("|")))
    drawn = [(row, *rng.choice(ends)) for row in prompts(things) for _ in range(2)]
    return [{**row, "chosen": f" {good}.", "rejected": f" {bad}."} for row, good, bad in drawn]


def texts(things: str) -> list[Row]:
    """Both ends of every pair: what is pleased and what isn't, as often."""
    return [
        {"prompt": row["prompt"], "completion": row[side]} for row in pairs(things) for side in ("chosen", "rejected")
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    files = {"prompts": prompts(TRAINED), "pairs": pairs(TRAINED), "texts": texts(TRAINED)}
    files |= {"heldout_prompts": prompts(HELDOUT), "heldout_pairs": pairs(HELDOUT)}
    for name, rows in files.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        Path(folder, f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
