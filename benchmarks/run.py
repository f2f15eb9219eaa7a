"""One case on one library, in this process; prints one line of JSON.

python benchmarks/run.py CASE --lib strop|trl [--model FOLDER] [--threads 1]
"""

import argparse
import contextlib
import importlib
import json
import os
import resource
import sys
from dataclasses import asdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--lib", default="strop")
    parser.add_argument("--model", default="", help="folder of a model and its tokenizer; packing needs none")
    parser.add_argument(
        "--threads", type=int, default=1, help="1: CPU time is work, not threads waiting for each other"
    )
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with contextlib.redirect_stdout(sys.stderr):
        measured = measure(options.case, options.lib, options.model)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"case": options.case, "lib": options.lib, **measured, "peak_mb": peak_mb}))


def measure(case: str, lib: str, model: str) -> dict:
    # only now, so that the number of threads is set and the help costs nothing
    import datasets
    from cases import CASES

    if case not in CASES:
        raise SystemExit(f"There is no case {case!r}, only {', '.join(CASES)}.")
    datasets.disable_caching()
    datasets.disable_progress_bars()
    return asdict(CASES[case](importlib.import_module(lib), model))


if __name__ == "__main__":
    main()
