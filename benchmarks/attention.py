"""CPU seconds of attention over a packed stream, one thread: per segment, and with the dense mask transformers builds.

OMP_NUM_THREADS=1 python benchmarks/attention.py            # flat streams, then prompts shared by answers
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models.attention_kernels import visibility
from strop.models.attention_pieces import Scores, attend_in_pieces
from strop.models.segments import Segments

HEADS, SIZE = 8, 64


def flat(tokens: int, rows: int) -> Segments:
    return Segments((tokens // rows,) * rows, (-1,) * rows)


def shared(prompt: int, answer: int, count: int) -> Segments:
    return Segments((prompt, *(answer,) * count), (-1, *(0,) * count))


def repeated(segments: Segments) -> Segments:
    """The same answers, each with a prompt of its own."""
    lengths = [depth + length for depth, length in zip(segments.depths, segments.lengths, strict=True)][1:]
    return Segments(tuple(lengths), (-1,) * len(lengths))


def per_segment(segments: Segments, window: int | None = None) -> Callable[..., Tensor]:
    return lambda q, k, v: attend_in_pieces(q, k, v, segments, Scores(window=window))


def dense(segments: Segments, window: int | None = None) -> Callable[..., Tensor]:
    n = torch.arange(segments.num_tokens)
    mask = visibility(segments, window, torch.device("cpu"))(0, 0, n[:, None], n)[None, None]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])


def seconds(attend: Callable[..., Tensor], tokens: int, groups: int, repeats: int = 5) -> float:
    """CPU seconds of the fastest of `repeats` forward and backward passes."""
    shapes = ((1, tokens, heads, SIZE) for heads in (HEADS, groups, groups))
    inputs = [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        torch.autograd.grad(attend(*inputs).sum(), inputs)
        times.append(time.process_time() - start)
    return min(times[1:])


def line(name: str, ours: float, other: float) -> None:
    print(f"{name:42} {1000 * ours:8.1f} ms {1000 * other:8.1f} ms {other / ours:6.1f}x")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'flat stream':42} {'segments':>11} {'dense':>11}")
    for tokens, rows in ((1024, 4), (2048, 8), (4096, 16), (2048, 32), (2048, 128)):
        for groups in (HEADS, HEADS // 4):
            ours, other = (seconds(f(flat(tokens, rows)), tokens, groups) for f in (per_segment, dense))
            line(f"{tokens} tokens, {rows} rows, {groups} key heads", ours, other)
    for tokens, window in ((4096, 512), (4096, 1024)):
        ours, other = (seconds(f(flat(tokens, 1), window), tokens, HEADS) for f in (per_segment, dense))
        line(f"{tokens} tokens, 1 row, window {window}", ours, other)
    print(f"\n{'shared prompt':42} {'shared':>11} {'repeated':>11}")
    for prompt, answer, count in ((256, 64, 8), (512, 128, 8), (256, 256, 2), (512, 64, 2), (64, 128, 8)):
        tree = shared(prompt, answer, count)
        ours, other = (seconds(per_segment(s), s.num_tokens, HEADS) for s in (tree, repeated(tree)))
        line(f"prompt {prompt}, {count} answers of {answer}", ours, other)


if __name__ == "__main__":
    main()
