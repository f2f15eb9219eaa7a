"""CPU seconds of writing completions with one thread: strop's generator, transformers' `generate` and its continuous
batching, on the same rows.

    OMP_NUM_THREADS=1 python benchmarks/generation.py MODEL [--ways strop generate continuous] [--rounds 3]

32 rows, up to 128 tokens each, sampled at temperature 1. How long each row writes is set beforehand, with a heavy tail
(a Pareto distribution's quantiles), because how soon a text ends is the model's affair: every way writes the same
number of tokens. Prompts are random tokens, from 32 to 128 of them; `--prompts 8` has four rows to a prompt, as a GRPO
step does, `--prompts 32` one. The ways are timed in turn; the least time of each counts.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from strop.rollout.generator import InProcessGenerator
from strop.rollout.types import Sampling

ROWS = 32
MOST_TOKENS = 128
PROMPT_TOKENS = (32, 128)

Prompts = Sequence[Sequence[int]]


def budgets() -> list[int]:
    """Tokens a row: quantiles of a Pareto distribution with minimum 16 and exponent 1.2, up to `MOST_TOKENS`, mixed."""
    tokens = [min(round(16 * (1 - (i + 0.5) / ROWS) ** (-1 / 1.2)), MOST_TOKENS) for i in range(ROWS)]
    random.Random(0).shuffle(tokens)
    return tokens


def prompts_of(number: int, vocab_size: int) -> list[list[int]]:
    """`ROWS` prompts, `number` different ones."""
    draw = random.Random(1)
    different = [[draw.randrange(vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(number)]
    return [prompt for prompt in different for _ in range(ROWS // number)]


@cache
def generator_of(model) -> InProcessGenerator:
    """One for all rounds, as in a run: the first round checks its completions by a forward pass."""
    return InProcessGenerator(model)


def by_strop(model, prompts: Prompts) -> int:
    sampling = Sampling(max_tokens=MOST_TOKENS, ignore_eos=True)
    written = generator_of(model).generate(prompts, sampling, max_tokens=budgets())
    return sum(len(completion.token_ids) for completion in written)


class Budgets(StoppingCriteria):
    """Ends each row when its tokens are spent."""

    def __init__(self, ends: list[int]):
        self.ends = torch.tensor(ends)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.ends


def by_generate(model, prompts: Prompts) -> int:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=MOST_TOKENS, pad_token_id=0)
    ends = Budgets([width + tokens for tokens in budgets()])
    own, model.generation_config = model.generation_config, GenerationConfig()  # no end of text
    written = model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=[ends])
    model.generation_config = own
    assert written.shape[1] == width + max(budgets())
    return sum(budgets())


def by_continuous_batching(model, prompts: Prompts) -> int:
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=MOST_TOKENS, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(return_logprobs=True, use_async_batching=False, max_memory_percent=0.1)
    tokens = 0
    manager = model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, block=True, timeout=5, warmup=False
    )
    with manager as running:
        for prompt, budget in zip(prompts, budgets(), strict=True):
            running.add_request(list(prompt), max_new_tokens=budget, eos_token_id=-1)
        left = len(prompts)
        while left:
            result = running.get_result(timeout=60)
            if result is not None and result.is_finished():
                left -= 1
                tokens += len(result.generated_tokens)
    return tokens


WAYS: dict[str, Callable] = {
    "strop": by_strop,
    "generate": by_generate,
    "continuous": by_continuous_batching,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--prompts", type=int, default=8, help="different prompts among the rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    prompts = prompts_of(args.prompts, model.config.vocab_size)
    seconds: dict[str, list[float]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way, taken in seconds.items():
            start = time.process_time()
            with torch.no_grad():
                tokens = WAYS[way](model, prompts)
            taken.append(time.process_time() - start)
            assert tokens == sum(budgets()), f"{way} wrote {tokens} tokens, not {sum(budgets())}"
    print(f"{ROWS} rows, {args.prompts} prompts, {sum(budgets())} tokens; a full batch is {ROWS * max(budgets())}")
    for way, taken in seconds.items():
        ratio = min(taken) / min(seconds[args.ways[0]])
        runs = " ".join(f"{x:.2f}" for x in taken)
        print(f"{way:12} {min(taken):7.2f} s  {sum(budgets()) / min(taken):6.1f} tokens/s  {ratio:5.2f} x  ({runs})")


if __name__ == "__main__":
    main()
