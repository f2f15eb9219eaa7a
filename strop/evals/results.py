"""What an evaluation found: numbers with their intervals, as a table, as JSON, and on disk."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strop.evals.answers import Answer
from strop.evals.statistics import Difference, Estimate

RESULTS_FILE = "results.json"
ANSWERS_FILE = "answers.jsonl"
BASELINE_FILE = "answers_of_baseline.jsonl"
ROWS_FILE = "rows.jsonl"
WIDTH = 140
"""Of a table that no terminal limits."""


@dataclass(frozen=True)
class Metric:
    """A number of the model and, where there is another one, of that and how they differ."""

    model: Estimate
    baseline: Estimate | None = None
    difference: Difference | None = None
    p_value: float | None = None
    """Two-sided: of the difference, or of a win rate against 1/2."""

    @property
    def value(self) -> float:
        return self.model.value


@dataclass(frozen=True)
class EvalResults:
    """The metrics of an evaluation by name; `print(results)` is a table, `results["loss"].value` a number."""

    model: str
    metrics: dict[str, Metric]
    baseline: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """What was asked, in JSON's types."""
    notes: list[str] = field(default_factory=list)
    """What is missing, and why."""
    answers: list[list[Answer]] = field(default_factory=list)
    """Of each row, where answers were asked for."""
    baseline_answers: list[list[Answer]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of each row what no answer holds: loss and num_tokens, margin, the same of the baseline, verdicts of a judge."""

    def __getitem__(self, name: str) -> Metric:
        if name not in self.metrics:
            raise KeyError(f"there is no metric {name!r}, only {', '.join(self.metrics)}")
        return self.metrics[name]

    def to_dict(self) -> dict[str, Any]:
        """All but the answers, in JSON's types."""
        return {
            "model": self.model,
            "baseline": self.baseline,
            "metrics": {name: asdict(metric) for name, metric in self.metrics.items()},
            "notes": self.notes,
            "settings": self.settings,
        }

    def save(self, folder: str | Path) -> None:
        """Writes results.json, and rows.jsonl if there is something to say of rows."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        (path / RESULTS_FILE).write_text(text + "\n", encoding="utf-8")
        (path / ROWS_FILE).unlink(missing_ok=True)
        if self.rows:
            (path / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "EvalResults":
        """The numbers that `save` wrote into `folder`. Raises ValueError where there are none."""
        if not (Path(folder) / RESULTS_FILE).is_file():
            raise ValueError(f"there is no {RESULTS_FILE} in {folder}; name the output_dir of an evaluation.")
        content = json.loads((Path(folder) / RESULTS_FILE).read_text(encoding="utf-8"))
        return cls(**content | {"metrics": {name: metric_of(facts) for name, facts in content["metrics"].items()}})

    def table(self) -> Table:
        """The metrics for a terminal."""
        title = f"{self.model} against {self.baseline}" if self.baseline else self.model
        share = f"{100 * self.settings.get('confidence', 0.95):g} %"
        table = Table("", "model", f"{share} interval", box=None, title=title, title_justify="left")
        if self.baseline:
            for header in ("baseline", "difference", f"{share} interval", "p"):
                table.add_column(header)
        table.add_column("n")
        for column in table.columns[1:]:
            column.justify, column.no_wrap = "right", True
        for name, metric in self.metrics.items():
            table.add_row(name, *cells(metric, bool(self.baseline)), style=None)
        table.columns[0].overflow = "fold"
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(self.table())
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def metric_of(facts: dict[str, Any]) -> Metric:
    """A metric from JSON's types."""
    kinds = {"model": Estimate, "baseline": Estimate, "difference": Difference}
    return Metric(**facts | {name: kind(**facts[name]) for name, kind in kinds.items() if facts[name] is not None})


def cells(metric: Metric, compared: bool) -> list[str]:
    """The numbers of a line of the table."""
    found = [number(metric.value), interval(metric.model)]
    if compared:
        difference = metric.difference
        found += [
            "" if metric.baseline is None else number(metric.baseline.value),
            "" if difference is None else number(difference.value, signed=True),
            "" if difference is None else interval(difference, signed=True),
            "" if metric.p_value is None else p_text(metric.p_value),
        ]
    return [*found, str(metric.model.num_prompts)]


def number(value: float, signed: bool = False) -> str:
    """Four digits, three of them behind the point at most."""
    digits = 3 if abs(value) < 100 else 1
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def interval(of: Estimate | Difference, signed: bool = False) -> str:
    if of.low is None or of.high is None:
        return "-"
    return f"{number(of.low, signed)} .. {number(of.high, signed)}"


def p_text(p_value: float) -> str:
    return "<0.001" if p_value < 0.001 else f"{p_value:.3f}"


def append_answers(file: Path, answers: Sequence[Answer]) -> None:
    """Adds answers to a file, a JSON object a line."""
    with file.open("a", encoding="utf-8", errors="backslashreplace") as lines:  # halves of characters
        lines.writelines(json.dumps(asdict(answer), ensure_ascii=False, default=str) + "\n" for answer in answers)
