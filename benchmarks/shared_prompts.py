"""CPU seconds of what a DPO step computes, one thread, by how a pair's prompt stands in the batch.

OMP_NUM_THREADS=1 python benchmarks/shared_prompts.py MODEL [ROUNDS]

A step scores the answers under the policy, forward and backward, and once more under a reference, forward only.
*once*: both answers continue one prompt. *twice*: each has its own, in a stream without padding. *padded*: the same as
rows of one length. The three are timed in turn.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoTokenizer

from strop.data.collate import IGNORE, Batch, TokenRow, collate
from strop.losses.reduce import masked_sum
from strop.models.arguments import ModelInitArguments
from strop.models.load import load_model
from strop.models.logps import logps
from strop.trainer.layout import settle_layout

CASES = ((384, 64), (128, 128), (16, 200))
"""Tokens of the prompt, and of each answer."""
PAIRS = 4


def rows_of(prompt: int, answer: int, vocab_size: int, is_shared: bool) -> list[TokenRow]:
    """Pairs of random tokens; with each answer its own prompt, or one for both."""
    generator = torch.Generator().manual_seed(0)
    rows: list[TokenRow] = []
    for _ in range(PAIRS):
        question, *answers = (
            torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (prompt, answer, answer)
        )
        if is_shared:
            parent = len(rows)
            rows += [TokenRow(question, None), *(TokenRow(ids, ids, parent) for ids in answers)]
        else:
            rows += [TokenRow(question + ids, [IGNORE] * prompt + ids) for ids in answers]
    return rows


def step(model: torch.nn.Module, batch: Batch) -> Tensor:
    """The summed log-probabilities of the answers under the policy, its gradient, and those under a reference."""
    with torch.no_grad():
        logps(model, batch)
    scores = masked_sum(logps(model, batch).logps, batch["completion_mask"], -1)
    scores.sum().backward()
    model.zero_grad()
    return scores.detach()


def seconds(function: Callable[[], Tensor]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main(name: str, rounds: str = "5") -> None:
    torch.set_num_threads(1)
    model = load_model(name, ModelInitArguments(model_init_kwargs={"dtype": "float32"})).train()
    settle_layout(model, "packed")
    pad, vocab_size = AutoTokenizer.from_pretrained(name).eos_token_id, model.config.vocab_size
    print(f"{'prompt':>7} {'answer':>7} {'once':>9} {'twice':>9} {'padded':>9}   twice/once  padded/once")
    for prompt, answer in CASES:
        shared, repeated = (rows_of(prompt, answer, vocab_size, is_shared) for is_shared in (True, False))
        batches = [collate(shared, "packed", pad), collate(repeated, "packed", pad), collate(repeated, "padded", pad)]
        first, *others = (step(model, batch) for batch in batches)  # which also warms up
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-2)
        times = [[seconds(lambda b=batch: step(model, b)) for batch in batches] for _ in range(int(rounds))]
        once, twice, padded = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = f"{twice / once:10.2f}x {padded / once:11.2f}x"
        print(f"{prompt:7} {answer:7} {once:8.2f}s {twice:8.2f}s {padded:8.2f}s {ratios}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
