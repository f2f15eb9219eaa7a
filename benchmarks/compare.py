"""The same cases on strop and on TRL, run for run in turn, and the ratios between them.

    python benchmarks/compare.py --ours PYTHON --peer PYTHON_WITH_TRL --model SMOLLM2_FOLDER [--mini]
                                 [--cases sft sft_packed ...] [--runs 3] [--json FILE]

A ratio is TRL's number by ours: above 1, strop takes less. Numbers are medians over the runs.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = [
    *("pack_bfd", "pack_bfd_split", "pack_wrapped", "prepare", "prepare_assistant", "sft", "sft_packed", "sft_long"),
    *("dpo", "dpo_short", "reward", "grpo", "grpo_train"),
]
HEAD = f"{'case':18} {'ours s':>8} {'peer s':>8} {'ratio':>6} {'ours MB':>8} {'peer MB':>8} {'ratio':>6}  ours | peer"


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        if options.mini:
            subprocess.run([options.ours, HERE / "mini.py", options.model, folder], check=True, capture_output=True)
            options.model = folder
        print(HEAD)
        results = {}
        for case in options.cases:
            results[case] = both(case, options)
            print(line(case, *results[case]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, help="Python interpreter with strop")
    parser.add_argument("--peer", required=True, help="Python interpreter with TRL, of an environment of its own")
    parser.add_argument("--model", default="", help="folder of SmolLM2 or a model like it; packing needs none")
    parser.add_argument(
        "--mini", action="store_true", help="train a small random model with this one's tokenizer instead"
    )
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=1800, help="seconds that one run may take")
    parser.add_argument("--json", type=Path, help="file for the results of every run")
    options = parser.parse_args()
    if not options.model and any(not case.startswith("pack_") for case in options.cases):
        parser.error("only the pack_ cases run without a --model")
    return options


def both(case: str, options: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """The runs of a case on strop and on TRL; in turn, so that a busy machine disturbs both alike."""
    ours, peer = [], []
    for _ in range(options.runs):
        ours.append(once(options.ours, "strop", case, options))
        peer.append(once(options.peer, "trl", case, options))
    return ours, peer


def once(python: str, lib: str, case: str, options: argparse.Namespace) -> dict:
    command = [python, str(HERE / "run.py"), case, "--lib", lib, "--threads", str(options.threads)]
    if options.model:
        command += ["--model", options.model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {options.timeout} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def line(case: str, ours: list[dict], peer: list[dict]) -> str:
    """A line of the table. Where one of the two failed, the other's numbers stand alone."""
    cells = [case.ljust(18)]
    for key, spec in (("seconds", "8.2f"), ("peak_mb", "8.0f")):
        a, b = median(ours, key), median(peer, key)
        ratio = f"{b / a:6.2f}" if a and b else " " * 5 + "-"
        cells += [format(a, spec) if a else " " * 7 + "-", format(b, spec) if b else " " * 7 + "-", ratio]
    return f"{' '.join(cells)}  {outcome(ours[0])} | {outcome(peer[0])}"


def median(runs: list[dict], key: str) -> float | None:
    return None if any("error" in run for run in runs) else statistics.median(run[key] for run in runs)


def outcome(run: dict) -> str:
    """What shows that both did the same: first losses, or rows."""
    if "error" in run:
        return f"failed: {run['error']}"
    return f"losses {run['losses'][:3]}" if run["losses"] else f"{run['rows']} rows"


if __name__ == "__main__":
    main()
