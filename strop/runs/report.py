"""report.html: one self-contained page about a run, made from what its other files say."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from strop.runs.plot import loss_curves, loss_svg

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
td, th { border-bottom: 1px solid #e2e8f0; padding: .25rem 1rem .25rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td { font-variant-numeric: tabular-nums; white-space: pre-wrap; overflow-wrap: anywhere; }
.failed { color: #c53030; } .finished { color: #2f855a; } svg { max-width: 100%; height: auto; }
"""


def write_report(
    directory: Path,
    run: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, str]] = (),
) -> None:
    """Write `directory`/report.html."""
    (directory / "report.html").write_text(
        report_html(directory.resolve().name, run, metrics, samples), encoding="utf-8"
    )


def report_html(
    title: str, run: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, str]] = ()
) -> str:
    """The page: summary, loss, last values, data and its preparation, samples, settings; no heading without content."""
    curves = loss_curves(metrics)
    sections = {
        "Loss": loss_svg(curves) if curves else "",
        "Last values": _table(last_values(metrics)),
        "Data": "".join(f"<h3>{escape(name)}</h3>{_table(_flat(facts))}" for name, facts in run["data"].items()),
        "Preparation": "".join(
            f"<h3>{escape(name)}</h3>{_table(_flat(facts))}" for name, facts in run["preparation"].items()
        ),
        "Samples": _grid(samples),
        "Settings": f"<details><summary>{len(run['config'])} settings</summary>{_table(run['config'])}</details>",
    }
    body = "".join(f"<h2>{name}</h2>\n{content}\n" for name, content in sections.items() if content)
    status = escape(run["status"])
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n"
        f'<h1>{escape(title)} <span class="{status}">{status}</span></h1>\n{_table(summary(run))}\n{body}</html>\n'
    )


def summary(run: Mapping[str, Any]) -> dict[str, Any]:
    """The handful of facts that tell one run from another."""
    model, git = run["model"] or {}, run["git"] or {}
    commit = git.get("commit", "")[:12] + (" (modified)" if git.get("modified") else "")
    facts = {
        "model": model.get("name"),
        "parameters": f"{model['parameters']:,} ({model['trainable_parameters']:,} trained)" if model else None,
        "started": run["started"],
        "ended": run.get("ended"),
        "last step": run.get("last_step"),
        "resumed from step": run.get("resumed_from_step"),
        "error": run.get("error"),
        "command": " ".join(run["command"]),
        "commit": commit,
        "seed": run["seeds"]["seed"],
        "device": run["machine"]["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def last_values(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The newest value of everything that was logged."""
    newest: dict[str, Any] = {}
    for line in metrics:
        newest |= line
    return {name: value for name, value in newest.items() if name != "time"}


def _flat(facts: Any, prefix: str = "") -> dict[str, Any]:
    """Nested facts as one level: {"a": {"b": 1}} is {"a b": 1}."""
    if not isinstance(facts, Mapping):
        return {prefix.strip(): facts}
    return {key: value for name, fact in facts.items() for key, value in _flat(fact, f"{prefix}{name} ").items()}


def _table(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(_text(value))}</td></tr>" for name, value in facts.items())
    return f"<table>{rows}</table>" if rows else ""


def _grid(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row.values()) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
