"""Pairs of a correct and a wrong solution from the model solutions that OpenAI published beside GSM8K (MIT licence).

    python examples/gsm8k_pairs.py example_model_solutions.jsonl FOLDER

The file is grade_school_math/data/example_model_solutions.jsonl of github.com/openai/grade-school-math: for each
question of the test set one solution by each of four models, with whether its result is right. Every right solution of
a question with every wrong one makes a pair; FOLDER/train.jsonl and FOLDER/test.jsonl share no question.
"""

import json
import random
import sys
from pathlib import Path

TEST_QUESTIONS = 200

Row = dict[str, str]


def pairs_of(line: str) -> list[Row]:
    """The pairs of one question."""
    row = json.loads(line)
    solutions = [value for value in row.values() if isinstance(value, dict)]
    right, wrong = ([s["solution"] for s in solutions if s["is_correct"] is which] for which in (True, False))
    return [{"prompt": row["question"], "chosen": r, "rejected": w} for r in right for w in wrong if r != w]


def main(source: str, folder: str) -> None:
    questions = [pairs for line in Path(source).read_text().splitlines() if (pairs := pairs_of(line))]
    random.Random(0).shuffle(questions)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, part in (("test", questions[:TEST_QUESTIONS]), ("train", questions[TEST_QUESTIONS:])):
        rows = [row for pairs in part for row in pairs]
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{name}: {len(rows)} pairs of {len(part)} questions")


if __name__ == "__main__":
    main(*sys.argv[1:])
