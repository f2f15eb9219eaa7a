"""Attention over segments, in pieces and by kernels, against the definition written out token by token.

A GPU's kernels are stood in for by a kernel written out here, which runs on the CPU.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.testing import assert_close

from strop.models.attention_kernels import (
    Gathered,
    block_mask,
    choose_kernel,
    flex,
    kernel_for,
    varlen,
    varlen_layout,
    visibility,
)
from strop.models.attention_pieces import MIN_BLOCK, Cut, Scores, attend_in_pieces, cut, plain_attention, visible
from strop.models.segments import Segments

FLAT = Segments((3, 2, 4), (-1, -1, -1))
TREE = Segments((5, 3, 1, 4, 2, 6), (-1, 0, 0, 1, 1, -1))
CASES = {"flat": FLAT, "one": Segments((6,), (-1,)), "tree": TREE}


def dense_mask(segments: Segments, window: int | None) -> torch.Tensor:
    """(N, N) bool, token by token from the definition: own branch, not later, not further back than the window."""
    branch = [[*segments.ancestors(i), i] for i in range(len(segments.lengths))]
    owner = [i for i, length in enumerate(segments.lengths) for _ in range(length)]
    position = segments.position_ids()[0].tolist()
    n = segments.num_tokens
    own = [[owner[k] in branch[i] for k in range(n)] for i in range(len(branch))]
    seen = [[own[owner[q]][k] and 0 <= position[q] - position[k] < (window or n) for k in range(n)] for q in range(n)]
    return torch.tensor(seen)


def reference(query, key, value, segments, scores: Scores):
    """Softmax attention over the stream, one head at a time, (1, N, H, V)."""
    mask, heads = dense_mask(segments, scores.window), []
    for head in range(query.shape[1]):
        group = head * key.shape[1] // query.shape[1]
        scale = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
        logits = scale * query[0, head] @ key[0, group].T
        if scores.softcap is not None:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        weights = logits.exp() * mask
        total = weights.sum(-1, keepdim=True) + (0 if scores.sinks is None else scores.sinks[head].exp())
        heads.append(weights / total @ value[0, group])
    return torch.stack(heads, dim=1)[None]


def qkv(n: int, value_size: int = 8, dtype=torch.float64):
    shapes = ((1, 4, n, 8), (1, 2, n, 8), (1, 2, n, value_size))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kind", ["fused", "scaled", "softcap", "sinks"])
def test_equals_the_definition_in_value_and_gradient(segments, window, kind):
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    extra = {"fused": {}, "scaled": {"scaling": 0.7}, "softcap": {"softcap": 0.5}, "sinks": {"sinks": sinks}}[kind]
    scores = Scores(window=window, **extra)
    inputs = qkv(segments.num_tokens)
    trained = [*inputs, sinks] if kind == "sinks" else inputs
    ours, theirs = attend_in_pieces(*inputs, segments, scores), reference(*inputs, segments, scores)
    direction = torch.randn_like(theirs)
    assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for a, b in zip(*(torch.autograd.grad((x * direction).sum(), trained) for x in (ours, theirs)), strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_long_segments_are_cut_for_a_window_and_stay_right():
    """Two segments take two blocks each, and the children's window reaches into the parent's last two blocks."""
    segments = Segments((MIN_BLOCK + 7, 9, MIN_BLOCK + 3), (-1, 0, 0))
    scores = Scores(window=40)
    inputs = qkv(segments.num_tokens)
    assert_close(attend_in_pieces(*inputs, segments, scores), reference(*inputs, segments, scores))


def test_value_heads_may_have_another_size():
    inputs = qkv(TREE.num_tokens, value_size=6)
    assert_close(attend_in_pieces(*inputs, TREE, Scores()), reference(*inputs, TREE, Scores()))


def test_cut_of_a_tree():
    assert cut(Segments((3, 2, 1), (-1, 0, 0)), None) == Cut((3, 2, 1), ((0,), (0, 1), (0, 2)))


def test_cut_drops_stretches_no_query_of_the_window_can_see():
    """Window 2: the first query of the grandchild stands at position 4, so it sees 3 and 4; the root ends with 2."""
    assert cut(Segments((3, 1, 2), (-1, 0, 1)), 2).seen == ((0,), (0, 1), (1, 2))


def test_cut_of_a_long_segment_sees_only_the_block_before():
    n = MIN_BLOCK
    assert cut(Segments((3 * n,), (-1,)), n) == Cut((n, n, n), ((0,), (0, 1), (1, 2)))


def test_visible_by_hand():
    """Two queries at positions 2 and 3, window 2: they see 1, 2 and 2, 3."""
    assert visible(2, 2, 2).tolist() == [[False, True, True, False], [False, False, True, True]]


@pytest.mark.parametrize("kind", [{}, {"softcap": 2.0}])
def test_dropout_drops_and_rescales(kind):
    """Values are all 1, so without dropout each result is 1. With it, each is a sum of kept weights over 1 - p."""
    query, key, _ = qkv(8, dtype=torch.float32)
    value = torch.ones(1, 2, 8, 4)
    segments = Segments((8,), (-1,))
    draws = torch.stack(
        [attend_in_pieces(query, key, value, segments, Scores(dropout=0.5, **kind)) for _ in range(400)]
    )
    first = draws[:, 0, 0, :, 0]  # one weight, 1: kept as 2 or dropped
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert_close(draws.mean(0), torch.ones_like(draws[0]), atol=0.25, rtol=0)


def test_a_mask_made_in_inference_mode_serves_training():
    segments = Segments((4, 3), (-1, 0))
    with torch.inference_mode():
        attend_in_pieces(*qkv(7), segments, Scores())
    inputs = qkv(7)
    attend_in_pieces(*inputs, segments, Scores()).sum().backward()
    assert inputs[0].grad is not None


def test_plain_attention_of_padding_stays_finite():
    query, key, value = qkv(4)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[0] = False
    assert plain_attention(query, key, value, mask, Scores(softcap=1.0)).isfinite().all()


# --- kernels

CPU = torch.device("cpu")
SINK = torch.tensor([0.3, -1.0, 2.0, 0.0])


def bottom_right(query, key, value, layout, scores: Scores):
    """A varlen kernel written out: causality is aligned at the last query and the last key of each sequence."""
    results = []
    bounds_q, bounds_k = layout.cu_seq_q.tolist(), layout.cu_seq_k.tolist()
    for i in range(len(bounds_q) - 1):
        q, k = slice(*bounds_q[i : i + 2]), slice(*bounds_k[i : i + 2])
        assert q.stop - q.start <= layout.max_q
        assert k.stop - k.start <= layout.max_k
        heads = query.shape[1] // key.shape[1]
        keys, values = (x[k].repeat_interleave(heads, dim=1) for x in (key, value))
        logits = torch.einsum("qhd,khd->hqk", query[q], keys) * query.shape[-1] ** -0.5
        rows, columns = logits.shape[1:]
        distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        seen = (distance >= 0) & (distance < (scores.window or columns + 1))
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(results)


@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("window", [None, 1, 4])
def test_varlen_equals_the_definition_in_value_and_gradient(segments, window):
    scores = Scores(window=window)
    inputs = qkv(segments.num_tokens)
    ours, theirs = varlen(*inputs, segments, scores, bottom_right), reference(*inputs, segments, scores)
    direction = torch.randn_like(theirs)
    assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad((x * direction).sum(), inputs) for x in (ours, theirs)), strict=True):
        # a gathered key's gradient is summed in float32
        assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_varlen_layout_of_the_example():
    layout = varlen_layout(Segments((3, 2, 1), (-1, 0, 0)), None, CPU)
    assert layout.cu_seq_q.tolist() == [0, 3, 5, 6]
    assert layout.cu_seq_k.tolist() == [0, 3, 8, 12]
    assert layout.gathered is not None
    assert layout.gathered.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5]
    assert (layout.max_q, layout.max_k) == (3, 5)


def test_varlen_layout_keeps_the_keys_of_a_window_only():
    """Window 2: the child's first query sees one key before it, the prompt's last."""
    layout = varlen_layout(Segments((3, 2), (-1, 0)), 2, CPU)
    assert layout.gathered is not None
    assert layout.gathered.tolist() == [0, 1, 2, 2, 3, 4]


def test_a_flat_stream_gathers_nothing():
    assert varlen_layout(Segments((3, 2), (-1, -1)), None, CPU).gathered is None


def test_the_gradient_of_gathered_keys_is_summed_over_their_uses():
    """Key 0 is used by 2048 answers, each giving 17 / 4096, exact in bfloat16: 8.5 in all. Key 1 is used once."""
    x = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0] * 2048 + [1])
    (gradient,) = torch.autograd.grad(Gathered.apply(x, index).sum() * 17 / 4096, x)
    assert gradient.flatten().tolist() == [8.5, 17 / 4096]


@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("extra", [{}, {"window": 3}, {"softcap": 0.5}, {"sinks": SINK}, {"window": 2, "sinks": SINK}])
def test_flex_equals_the_definition(segments, extra):
    scores = Scores(**extra)
    inputs = [x.detach() for x in qkv(segments.num_tokens, dtype=torch.float32)]
    assert_close(flex(*inputs, segments, scores), reference(*inputs, segments, scores), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_visibility_is_the_definition(window):
    n = TREE.num_tokens
    query, key = torch.arange(n)[:, None], torch.arange(n)[None]
    assert torch.equal(visibility(TREE, window, CPU)(0, 0, query, key), dense_mask(TREE, window))


def test_block_mask_skips_blocks_of_other_rows():
    """Three rows of one block of 128 each: only the three blocks of the diagonal are computed, 1/3 of all."""
    mask = block_mask(Segments((128, 128, 128), (-1, -1, -1)), None, CPU)
    assert isinstance(mask, BlockMask)
    assert mask.sparsity() == pytest.approx(100 * 2 / 3, abs=0.01)


HALF = {"half": True, "sizes": (64, 64), "scores": Scores(), "flash_attn": True, "varlen": True}


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "flash_attn"),
        ({"flash_attn": False}, "varlen"),
        ({"flash_attn": False, "varlen": False}, "flex"),
        ({"half": False}, "flex"),
        ({"scores": Scores(sinks=SINK)}, "flex"),
        ({"scores": Scores(dropout=0.1)}, "flash_attn"),
        ({"scores": Scores(dropout=0.1), "flash_attn": False}, None),
        ({"scores": Scores(softcap=30.0)}, "flash_attn"),
        ({"scores": Scores(softcap=30.0), "flash_attn": False}, "flex"),
        ({"scores": Scores(window=8), "flash_attn": False}, "varlen"),
        ({"sizes": (192, 128)}, "flex"),
    ],
)
def test_no_kernel_is_chosen_that_would_ignore_a_score(change, kernel):
    assert choose_kernel(**(HALF | change)) == kernel


def test_a_cpu_has_no_kernel():
    query, _, value = qkv(4)
    assert kernel_for(query, value, Scores()) is None
