"""The loss of a run as a picture: an SVG drawn here, and a PNG where matplotlib is installed."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

Points = list[tuple[float, float]]

COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#b83280")
MAX_POINTS = 400


class Frame(NamedTuple):
    """Where the axes stand in the picture (pixels), and what they span (data)."""

    left: float
    top: float
    width: float
    height: float
    x_ticks: list[float]
    y_ticks: list[float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a data point."""
        (x_low, x_high), (y_low, y_high) = (self.x_ticks[0], self.x_ticks[-1]), (self.y_ticks[0], self.y_ticks[-1])
        across = self.left + self.width * (x - x_low) / (x_high - x_low)
        return across, self.top + self.height * (y_high - y) / (y_high - y_low)


def save_loss_plot(directory: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Write loss.svg, and loss.png where matplotlib is installed, into `directory`; nothing if no loss was logged."""
    curves = loss_curves(metrics)
    if not curves:
        return
    (directory / "loss.svg").write_text(loss_svg(curves), encoding="utf-8")
    if find_spec("matplotlib"):
        _save_png(directory / "loss.png", curves)


def loss_curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """(step, loss) points of the training loss and of each evaluation set's, by label; finite values only."""
    curves: dict[str, Points] = {}
    for line in metrics:
        for name, value in line.items():
            label = _label(name)
            if label and math.isfinite(value):
                curves.setdefault(label, []).append((line["step"], value))
    return curves


def loss_svg(curves: Mapping[str, Points], width: int = 720, height: int = 400) -> str:
    """The curves as a self-contained SVG document. `curves` holds at least one point."""
    points = [point for curve in curves.values() for point in curve]
    steps, losses = [x for x, _ in points], [y for _, y in points]
    frame = Frame(60, 20, width - 80, height - 70, ticks(min(steps), max(steps)), ticks(min(losses), max(losses)))
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(curves))]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_axes(frame),
        *(_curve(frame, curve, colour) for curve, colour in zip(curves.values(), colours, strict=True)),
        *_legend(frame, list(curves), colours),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def ticks(low: float, high: float, around: int = 6) -> list[float]:
    """About `around` round numbers, evenly spaced, the first at or below `low` and the last at or above `high`."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / around
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def thin(points: Points, at_most: int = MAX_POINTS) -> Points:
    """The points, neighbours averaged until there are no more than `at_most`."""
    size = -(-len(points) // at_most)
    buckets = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in buckets]


def _label(metric: str) -> str | None:
    if metric == "loss":
        return "train"
    if metric == "eval_loss":
        return "eval"
    if metric.startswith("eval_") and metric.endswith("_loss"):
        return "eval " + metric[len("eval_") : -len("_loss")]
    return None


def _axes(frame: Frame) -> list[str]:
    bottom, right = frame.top + frame.height, frame.left + frame.width
    parts = []
    for y in frame.y_ticks:
        _, at = frame.place(frame.x_ticks[0], y)
        parts.append(f'<line x1="{frame.left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{frame.left - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#4a5568">{y:g}</text>')
    for x in frame.x_ticks:
        at, _ = frame.place(x, frame.y_ticks[0])
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#4a5568">{x:g}</text>')
    middle = frame.left + frame.width / 2
    parts.append(f'<line x1="{frame.left}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="#4a5568"/>')
    parts.append(f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle" fill="#4a5568">step</text>')
    return parts


def _curve(frame: Frame, points: Points, colour: str) -> str:
    placed = [frame.place(x, y) for x, y in thin(points)]
    if len(placed) == 1:
        (x, y), *_ = placed
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'


def _legend(frame: Frame, labels: list[str], colours: list[str]) -> list[str]:
    parts = []
    for i, (label, colour) in enumerate(zip(labels, colours, strict=True)):
        x, y = frame.left + frame.width - 130, frame.top + 14 + 18 * i
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}" fill="#1a202c">{escape(label)} loss</text>')
    return parts


def _save_png(path: Path, curves: Mapping[str, Points]) -> None:
    from matplotlib.figure import Figure  # not pyplot, which would pick a window system

    axes = (figure := Figure(figsize=(7.2, 4))).subplots()
    for (label, points), colour in zip(curves.items(), COLOURS * len(curves), strict=False):
        axes.plot(
            *zip(*points, strict=True), label=f"{label} loss", color=colour, marker="o" if len(points) == 1 else ""
        )
    axes.set_xlabel("step")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
