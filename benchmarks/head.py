"""CPU seconds and peak memory of scoring tokens under a language-model head, forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/head.py [--metrics] [--frozen] [--hidden 288 576] [--tokens 256 1024 4096]

Ways: `plain` is logits and `log_softmax` on the same rows; `kept` and `repeated` are `score_linear` with all tiles kept
and none; `auto` is its default budget. `--metrics` adds entropy and top-1 accuracy, which need no gradient. Numbers
come each from a process of its own (least CPU time of `--repeats`; peak of resident memory above what the inputs take).
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor

from strop.models.head import CPU_TILE_TOKENS, Scoring, score_linear

VOCAB = 49152
torch.set_num_threads(1)

WAYS = ("plain", "auto", "kept", "repeated")


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, metrics: bool) -> Tensor:
    logits = hidden @ weight.t()
    logps = logits.log_softmax(-1)
    if metrics:
        with torch.no_grad():
            (logps.exp() * logps).sum(-1)
            logits.argmax(-1)
    return logps.gather(-1, targets[:, None]).squeeze(-1)


def score(way: str, hidden: Tensor, weight: Tensor, targets: Tensor, metrics: bool) -> Tensor:
    if way == "plain":
        return plain(hidden, weight, targets, metrics)
    budget = {"auto": None, "kept": 2**40, "repeated": CPU_TILE_TOKENS * VOCAB * 4}[way]
    return score_linear(hidden, weight, None, targets, Scoring(entropy=metrics, top1=metrics, budget=budget)).logps


def measure(way: str, tokens: int, hidden_size: int, metrics: bool, frozen: bool, repeats: int) -> dict[str, float]:
    """CPU seconds and MiB of one forward and backward."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(VOCAB, hidden_size) * 0.05).requires_grad_(not frozen)
    targets = torch.randint(VOCAB, (tokens,))
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        start = time.process_time()
        score(way, hidden, weight, targets, metrics).sum().backward()
        seconds.append(time.process_time() - start)
    return {"seconds": min(seconds), "MiB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[288, 576])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096, 8192])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--metrics", action="store_true", help="entropy and top-1 accuracy too")
    parser.add_argument("--frozen", action="store_true", help="no gradient for the head's weight")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.tokens[0], args.hidden[0], args.metrics, args.frozen, args.repeats)))
        return
    flags = [f"--{name}" for name in ("metrics", "frozen") if getattr(args, name)]
    for hidden_size in args.hidden:
        for tokens in args.tokens:
            for way in args.ways:
                case = [
                    "--hidden",
                    str(hidden_size),
                    "--tokens",
                    str(tokens),
                    "--repeats",
                    str(args.repeats),
                    "--one",
                    way,
                ]
                out = subprocess.run(
                    [sys.executable, __file__, *case, *flags], capture_output=True, check=True, text=True
                )
                cost = json.loads(out.stdout)
                print(
                    f"D {hidden_size} N {tokens:5} {way:8} {cost['seconds']:7.3f} s {cost['MiB']:7.0f} MiB", flush=True
                )


if __name__ == "__main__":
    main()
