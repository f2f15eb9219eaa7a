"""The record that a run leaves in its output directory, readable without any service.

    metrics.jsonl   one line a log: step, epoch, time, and everything the trainer logged
    run.json        what ran: resolved config, versions, commit, command line, data, seeds, and how it ended
    loss.svg        training and evaluation loss (loss.png too where matplotlib is installed)
    report.html     all of it on one page

`RunRecord` writes them, and every strop trainer has one; `load_metrics` and `load_run` read them back.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from strop.runs.plot import save_loss_plot
from strop.runs.report import write_report

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"

PACKAGES = ("strop", "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")


class RunRecord(TrainerCallback):
    """Writes the record of a run into `args.output_dir`, on the main process only.

    `datasets` are the prepared data sets by name and `reports` their preparation reports; `samples` are rows for the
    report, such as {"prompt": ..., "before": ..., "after": ...}, and may be filled until the run ends. An exception
    reaches a callback only if whoever calls `train` hands it to `fail`.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any] | None = None,
        reports: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, str]] = (),
    ):
        self.datasets = dict(datasets or {})
        self.reports = dict(reports or {})
        self.samples = samples
        self._run: dict[str, Any] = {}
        self._directory: Path | None = None
        self._loose_from: int | None = None  # where in the file this object's lines of no training run begin
        self._is_training = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if not state.is_world_process_zero:
            return
        self._directory = Path(args.output_dir)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._cut_metrics(self._directory / METRICS_FILE, state)
        self._run = _plain(describe_run(args, model, self.datasets, self.reports))
        if state.global_step:
            self._run["resumed_from_step"] = state.global_step
        self._is_training = True
        self._write_run()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._loose_from is None and not self._is_training:
            self._loose_from = path.stat().st_size if path.exists() else 0
        line = {"step": state.global_step, "epoch": state.epoch, "time": round(time.time(), 3)}
        _append(path, line | {name: value for name, value in (logs or {}).items() if name not in line})
        if self._run and not self._is_training:  # an evaluation after the end belongs on the page
            self._render()

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._end("finished", last_step=state.global_step)
            self._loose_from = None

    def fail(self, error: BaseException) -> None:
        """Close the record of a run that `error` ended; nothing if none is open."""
        if self._is_training:
            self._end("failed", error=f"{type(error).__name__}: {error}")

    def _end(self, status: str, **facts: Any) -> None:
        self._is_training = False
        self._run |= {"status": status, "ended": _now(), **facts}
        self._write_run()
        self._render()

    def _render(self) -> None:
        assert self._directory is not None
        save_loss_plot(self._directory, load_metrics(self._directory))
        write_report(self._directory, self._run, load_metrics(self._directory), self.samples)

    def _write_run(self) -> None:
        assert self._directory is not None
        replace_text(self._directory / RUN_FILE, json.dumps(self._run, indent=2, ensure_ascii=False) + "\n")

    def _cut_metrics(self, path: Path, state) -> None:
        """Leave in the file what a run that was never interrupted would have written before `state`.

        A fresh run keeps what this object logged just before it (an evaluation of the untrained model) and no line of
        an earlier run. A resumed run keeps the earlier process's lines that its checkpoint knows of.
        """
        path.touch()
        content = path.read_bytes()
        own = len(content) if self._loose_from is None else self._loose_from
        if state.global_step:
            lines = _lines_until(content[:own].decode().splitlines(keepends=True), state)
            kept = "".join(lines).encode()
        else:
            kept = content[own:]
        replace_text(path, kept.decode())


def load_metrics(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of `directory`/metrics.jsonl, oldest first. A last line torn by a kill is left out.

    Raises ValueError naming the line if any other one is no JSON.
    """
    path = Path(directory) / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.endswith("\n")]


def load_run(directory: str | os.PathLike) -> dict[str, Any]:
    """What `directory`/run.json says."""
    return json.loads((Path(directory) / RUN_FILE).read_text(encoding="utf-8"))


def describe_run(args, model, datasets: Mapping[str, Any], reports: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a run as it starts, as plain values for JSON."""
    return {
        "status": "running",
        "started": _now(),
        "command": sys.argv,
        "directory": os.getcwd(),
        "git": git_state(),
        "versions": {"python": platform.python_version()} | _versions(PACKAGES),
        "machine": {"system": platform.platform(), "device": str(args.device), "processes": args.world_size},
        "seeds": {"seed": args.seed, "data_seed": args.data_seed},
        "model": _describe_model(model),
        "data": _describe_all(datasets),
        "preparation": dict(reports),
        "config": args.to_dict(),
    }


def git_state(directory: str | os.PathLike = ".") -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it, of the repository around `directory`; None outside one."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        return {"commit": commit, "modified": bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def describe_dataset(dataset: Any) -> dict[str, Any]:
    """Rows, columns and the fingerprint that `datasets` keeps of the contents, as far as `dataset` knows them."""
    facts: dict[str, Any] = {"type": type(dataset).__name__}
    if hasattr(dataset, "__len__"):
        facts["rows"] = len(dataset)
    for name, attribute in (("columns", "column_names"), ("fingerprint", "_fingerprint")):
        if getattr(dataset, attribute, None) is not None:
            facts[name] = getattr(dataset, attribute)
    return facts


def _describe_all(datasets: Mapping[str, Any]) -> dict[str, Any]:
    described = {}
    for name, dataset in datasets.items():
        if isinstance(dataset, Mapping):
            described |= {f"{name}/{part}": describe_dataset(data) for part, data in dataset.items()}
        else:
            described[name] = describe_dataset(dataset)
    return described


def _describe_model(model) -> dict[str, Any] | None:
    if model is None:
        return None
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {
        "name": getattr(getattr(model, "config", None), "_name_or_path", None),
        "class": type(model).__name__,
        "parameters": sum(n for n, _ in sizes),
        "trainable_parameters": sum(n for n, trained in sizes if trained),
    }


def _lines_until(lines: list[str], state) -> list[str]:
    """The lines logged before the checkpoint that `state` was loaded from.

    A step's line, its evaluations and its checkpoint have the same step, and a run's summary that of its last
    checkpoint, so at the checkpoint's own step only as many lines count as its history holds.
    """
    at_step = sum(entry["step"] == state.global_step for entry in state.log_history)
    kept = []
    for line in lines:
        step = json.loads(line)["step"] if line.endswith("\n") else math.inf
        if step < state.global_step or (step == state.global_step and at_step > 0):
            kept.append(line)
            at_step -= step == state.global_step
    return kept


def _append(path: Path, line: dict[str, Any]) -> None:
    """Add one line in one write, so that readers and kills see whole lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_plain(line), ensure_ascii=False, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write `path` so that it holds the old text or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _plain(value: Any) -> Any:
    """`value` as strict JSON: non-finite numbers become the strings that `float` reads, unknown objects their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:  # a number of numpy or torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    to_dict = None if isinstance(value, type) else getattr(value, "to_dict", None)
    if to_dict is not None:
        return _plain(to_dict())
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is no line of JSON ({error}); was the file edited? It starts: {line[:60]!r}"
        ) from error
    return {name: float(value) if value in ("nan", "inf", "-inf") else value for name, value in values.items()}


def _git(directory: str | os.PathLike, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {name: metadata.version(name) for name in packages}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
