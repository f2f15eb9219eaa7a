"""What a run shows while it trains: a live panel on a terminal, plain lines in a log file."""

import atexit
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import has_length

HEARTBEAT_S = 30.0
HIDDEN = ("total_flos", "epoch")


def install_progress(trainer: Any) -> None:
    """Shows `trainer`'s runs by a `RichProgressCallback` in place of transformers' bar or printed dicts."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if not any(isinstance(callback, RichProgressCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(RichProgressCallback(live=None if not trainer.args.disable_tqdm else False))


class Speed:
    """Steps and tokens of a run against the clock. Tokens are known from the logs (`num_tokens`, cumulative)."""

    def __init__(self, step: int, total: int, now: float):
        self.first_step = self.step = step
        self.total = total
        self.start = now
        self.first_tokens: tuple[float, float] | None = (0.0, now) if step == 0 else None
        self.last_tokens = self.first_tokens

    def count_tokens(self, num_tokens: float, now: float) -> None:
        """Notes that `num_tokens` are trained by `now`. After a resume the first note is where counting starts."""
        self.last_tokens = (num_tokens, now)
        if self.first_tokens is None:
            self.first_tokens = self.last_tokens

    def tokens_per_second(self) -> float | None:
        """Over the run so far; None until known."""
        if self.first_tokens is None or self.last_tokens is None or self.last_tokens[1] <= self.first_tokens[1]:
            return None
        (before, start), (after, end) = self.first_tokens, self.last_tokens
        return (after - before) / (end - start)

    def remaining(self, now: float) -> float | None:
        """Seconds to the end at the pace so far; None before the first step is done."""
        done = self.step - self.first_step
        return (now - self.start) / done * (self.total - self.step) if done else None


class RichProgressCallback(TrainerCallback):
    """Progress of training and evaluation: steps, loss, tokens/s, time left, the last logs grouped by their prefix.

    On a terminal a panel that redraws itself. Where stderr is no terminal, a plain line for each log, and one at least
    every half minute, so that a log file stays readable. Only the main process shows anything.
    """

    def __init__(self, live: bool | None = None, clock: Callable[[], float] = time.monotonic):
        """`live` chooses between panel and lines; None looks at stderr."""
        self.live = live
        self.clock = clock
        self.view: PanelView | LineView | None = None
        self.speed: Speed | None = None
        self.num_evaluated = 0

    def open(self) -> "PanelView | LineView":
        """The view, made when there is first something to show."""
        if self.view is None:
            live = sys.stderr.isatty() if self.live is None else self.live
            self.view = PanelView() if live else LineView()
            atexit.register(self.close)
            self.excepthook, sys.excepthook = sys.excepthook, self.fail
        return self.view

    def close(self) -> None:
        """Gives the terminal back; also at exit, as a run that fails never ends its callbacks."""
        if self.view is not None:
            self.view.close()
            atexit.unregister(self.close)
            if sys.excepthook == self.fail:
                sys.excepthook = self.excepthook
            self.view = None

    def fail(self, *error: Any) -> None:
        """Shows an error that ends the program on a terminal given back, not above a panel."""
        self.close()
        self.excepthook(*error)

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.close()
            self.speed = Speed(state.global_step, state.max_steps, self.clock())
            self.last_shown = self.clock()
            self.open().begin(self.speed)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.speed is not None and self.open().wants_step(self.clock() - self.last_shown):
            self.show({})

    def on_step_end(self, args, state, control, **kwargs):
        if self.speed is not None:
            self.speed.step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if self.speed is not None and "num_tokens" in logs:
            self.speed.count_tokens(logs["num_tokens"], self.clock())
        self.show({name: value for name, value in logs.items() if name not in HIDDEN})

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if state.is_world_process_zero:
            self.num_evaluated += 1
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self.open().evaluating(self.num_evaluated, total)

    def on_evaluate(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.num_evaluated = 0
            self.open().evaluated()
            if self.speed is None:
                self.close()

    on_predict = on_evaluate

    def on_train_end(self, args, state, control, **kwargs):
        if self.speed is not None:
            self.open().end(self.speed, self.clock())
            self.close()
            self.speed = None

    def show(self, logs: dict[str, Any]) -> None:
        """Brings the view up to date."""
        self.last_shown = self.clock()
        self.open().update(self.speed, logs, self.last_shown)


class LineView:
    """Lines such as "train 20/100 | loss 1.234 | learning_rate 2e-05 | 512 tokens/s | 1:20 left"."""

    def begin(self, speed: Speed) -> None:
        self.print([f"train {speed.step}/{speed.total}", "start"])

    def wants_step(self, since: float) -> bool:
        """A step alone is shown if nothing else was for a while."""
        return since >= HEARTBEAT_S

    def update(self, speed: Speed | None, logs: dict[str, Any], now: float) -> None:
        if speed is None:
            self.print([f"{name} {shown(value)}" for name, value in logs.items()])
            return
        kind = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        values = [f"{name} {shown(value)}" for name, value in logs.items()]
        self.print([f"{kind} {speed.step}/{speed.total}", *values, *pace(speed, now)])

    def evaluating(self, done: int, total: int | None) -> None:
        """Evaluation is one line, with its result."""

    def evaluated(self) -> None:
        """See `evaluating`."""

    def end(self, speed: Speed, now: float) -> None:
        self.print([f"train {speed.step}/{speed.total}", f"done in {duration(now - speed.start)}"])

    def close(self) -> None:
        """Nothing is held open."""

    def print(self, parts: list[str]) -> None:
        print(" | ".join(parts), file=sys.stderr, flush=True)


class PanelView:
    """A panel: a bar of training, one of evaluation while it runs, and a table of the latest value of each metric."""

    def __init__(self, console: Console | None = None):
        columns = (
            TextColumn("{task.description:<5}"),
            BarColumn(None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        )
        self.progress = Progress(*columns, TextColumn("{task.fields[note]}"), expand=True)
        self.train: TaskID | None = None
        self.evaluation: TaskID | None = None
        self.latest: dict[str, Any] = {}
        self.live = Live(console=console or Console(file=sys.stderr), refresh_per_second=4, get_renderable=self.render)
        self.live.start()

    def render(self) -> Panel:
        """The panel as it stands."""
        return Panel(Group(self.progress, metrics_table(self.latest)), title="strop", title_align="left")

    def begin(self, speed: Speed) -> None:
        self.train = self.progress.add_task("train", total=speed.total, completed=speed.step, note="")

    def wants_step(self, since: float) -> bool:
        """A panel shows every step."""
        return True

    def update(self, speed: Speed | None, logs: dict[str, Any], now: float) -> None:
        self.latest |= logs
        if speed is not None:
            self.progress.update(self.train, completed=speed.step, note="  ".join(pace(speed, now)))

    def evaluating(self, done: int, total: int | None) -> None:
        if self.evaluation is None:
            self.evaluation = self.progress.add_task("eval", total=total, note="")
        self.progress.update(self.evaluation, completed=done, total=total or done)

    def evaluated(self) -> None:
        if self.evaluation is not None:
            self.progress.remove_task(self.evaluation)
            self.evaluation = None

    def end(self, speed: Speed, now: float) -> None:
        self.progress.update(self.train, completed=speed.step, note=f"done in {duration(now - speed.start)}")

    def close(self) -> None:
        self.live.stop()


def pace(speed: Speed, now: float) -> list[str]:
    """Tokens a second and the time left, as far as they are known."""
    rate, left = speed.tokens_per_second(), speed.remaining(now)
    parts = [] if rate is None else [f"{rate:,.0f} tokens/s"]
    return [*parts, f"{duration(left)} left"] if left else parts


def metrics_table(logs: dict[str, Any]) -> Table:
    """The metrics of `logs` in columns by the part of their name before "/" or by "eval_"; first those without one."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, value in logs.items():
        prefix, _, rest = name.rpartition("/")
        if not prefix and name.startswith("eval_"):
            prefix, rest = "eval", name.removeprefix("eval_")
        groups.setdefault(prefix, []).append((rest, value))
    table = Table.grid(padding=(0, 3))
    cells = []
    for prefix, metrics in sorted(groups.items()):
        column = Table(title=prefix or None, title_justify="left", show_header=False, box=None)
        for name, value in metrics:
            column.add_row(name, shown(value))
        cells.append(column)
        table.add_column()
    if cells:
        table.add_row(*cells)
    return table


def shown(value: Any) -> str:
    """A metric's value in few characters: four digits that count."""
    if isinstance(value, float):
        return f"{int(value):,}" if value.is_integer() and abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def duration(seconds: float) -> str:
    """E.g. "1:02:03", "2:03"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
