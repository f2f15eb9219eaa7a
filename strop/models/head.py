"""Scores of target tokens under a language-model head, a tile of tokens at a time.

M tokens, hidden size D, vocabulary V. A head gives raw logits, the model may scale and cap them, a temperature divides:

    z = softcap * tanh(scale * (h W^T + b) / softcap) / temperature        (M, V)
    lse = logsumexp(z)    logp = z[target] - lse    entropy = lse - sum_v p_v z_v    mean_logp = mean_v z_v - lse

Matrix products run in the head's (or autocast's) dtype, everything after them in float32 (float64 for a float64 head).
Tokens are scored in tiles. A tile's logits turn in place into e = exp(z - max z), the one buffer that forward and
backward need: with s = sum_v e_v, the gradient of logp is that of z[target] - sum_v (e_v / s) z_v, so products with e
suffice and p is never written down.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CPU_TILE_TOKENS = 512
TILE_TOKENS = 4096
"""Tokens a tile at most, on a CPU and on accelerators; see `tiling`."""
DEFAULT_BUDGET = 2**30
"""Bytes of logits, in work and kept: 5461 tokens of a vocabulary of 49152."""
CACHE_BYTES = 2**20
"""What a core keeps near while it takes the statistics of some rows."""


class LogitTransform(NamedTuple):
    """What becomes of a head's output before the softmax: softcap * tanh(scale * logits / softcap) / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply_(self, logits: Tensor) -> Tensor:
        """z, in the memory of `logits`."""
        if self.softcap is not None:
            return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return logits if self.factor == 1 else logits.mul_(self.factor)

    def slope(self, z: Tensor) -> Tensor:
        """dz / dlogits at `z`."""
        assert self.softcap is not None
        return (1 - (z * (self.temperature / self.softcap)).square()).mul_(self.factor)

    @property
    def factor(self) -> float:
        """z / logits where nothing is capped."""
        return self.scale / self.temperature


class Scoring(NamedTuple):
    """What to compute of each token besides its log-probability, and in how much memory."""

    transform: LogitTransform = LogitTransform()
    entropy: bool = False
    top1: bool = False
    mean_logps: bool = False
    collision: bool = False
    budget: int | None = None
    """Bytes that logits may take at a time; None: `DEFAULT_BUDGET`. A single token's are always allowed."""


class HeadScores(NamedTuple):
    """One number a token, (M,); None if not asked for."""

    logps: Tensor
    entropy: Tensor | None
    """In nats."""
    is_top1: Tensor | None
    """1 where no other token has a larger logit, nor an earlier one of the vocabulary the same."""
    mean_logps: Tensor | None
    """Averaged over the vocabulary."""
    log_collision: Tensor | None = None
    """log sum_v p_v^2."""


def tiling(vocab_size: int, dtype: torch.dtype, device: torch.device, budget: int | None = None) -> tuple[int, int]:
    """Tokens a tile, and how many tiles may be kept from forward to backward, the rest being computed anew.

    One tile is always in work, so a budget for n tiles keeps n - 1.

    Measured on one core of a Xeon with AVX-512, float32, V 49152, D 288 and 576 (benchmarks/head.py). Products are
    within noise of their best speed from 256 to 1024 tokens a tile, up to a third slower at 64. Keeping a tile costs
    its page faults, a third (D 288) or a fifth (D 576) of computing it anew. So: medium tiles, and keep what fits.
    Forward and backward of 1024 tokens, D 288: plain logits and log_softmax 1.25 s and 541 MiB, tiles kept 0.85 s and
    222 MiB, none kept 1.26 s and 125 MiB; of 4096 tokens 4.4 s and 2.3 GiB, 3.3 s and 0.8 GiB, 4.2 s and 145 MiB.
    The tile of accelerators is not measured: large enough to fill one, within the same budget.
    """
    budget = DEFAULT_BUDGET if budget is None else budget
    token = vocab_size * (_statistics_dtype(dtype).itemsize + (dtype.itemsize if dtype.itemsize < 4 else 0))
    tokens = min(CPU_TILE_TOKENS if device.type == "cpu" else TILE_TOKENS, max(budget // token, 1))
    return tokens, max(budget // (tokens * token) - 1, 0)


def score_head(head: nn.Module, hidden: Tensor, targets: Tensor, scoring: Scoring, call: Callable) -> HeadScores:
    """Scores of `targets` (M,) under `head` at `hidden` (M, D).

    `call` is the head's own forward, used where the head is more than a matrix and a bias: adapters, quantised weights.
    """
    if is_plain_linear(head):
        return score_linear(hidden, head.weight, head.bias, targets, scoring)  # type: ignore[arg-type]
    return score_module(call, hidden, targets, scoring)


def is_plain_linear(head: nn.Module) -> bool:
    """`head` is a matrix and a bias, and nothing else."""
    own_forward = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    return own_forward and type(head.weight.data) is Tensor


class Float32Head(nn.Linear):
    """A linear head whose product is computed in float32, whatever its weights are stored in and autocast says."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(hidden.float(), self.weight.float(), bias)


# ---- statistics of logits ----


class RowStatistics(NamedTuple):
    """What is known of each of M rows of z, (M,) each."""

    largest: Tensor
    """max z."""
    total: Tensor
    """s = sum of exp(z - max z)."""
    logps: Tensor
    entropy: Tensor | None
    is_top1: Tensor | None
    mean_logps: Tensor | None
    log_collision: Tensor | None

    @classmethod
    def empty(cls, num_rows: int, like: Tensor, dtype: torch.dtype, scoring: Scoring) -> "RowStatistics":
        wanted = (True, True, True, scoring.entropy, scoring.top1, scoring.mean_logps, scoring.collision)
        return cls(*(like.new_empty(num_rows, dtype=dtype) if want else None for want in wanted))  # type: ignore[arg-type]

    def at(self, rows: slice) -> "RowStatistics":
        """Views of some of the rows."""
        return RowStatistics(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]

    def scores(self) -> HeadScores:
        return HeadScores(*self[2:])


def _exponentiate_(z: Tensor, targets: Tensor, rows: RowStatistics) -> None:
    """Turn z (m, V) into e in place, and fill `rows`."""
    block = len(z)
    if z.device.type == "cpu":  # five passes over what the cache holds cost less than two over what it doesn't
        block = max(CACHE_BYTES // max(z.shape[1] * z.element_size(), 1), 1)
    for start in range(0, len(z), max(block, 1)):
        part = slice(start, start + block)
        _exponentiate_block_(z[part], targets[part, None], rows.at(part))


def _exponentiate_block_(z: Tensor, targets: Tensor, rows: RowStatistics) -> None:
    torch.amax(z, -1, out=rows.largest)
    z.sub_(rows.largest[:, None])
    target = z.gather(-1, targets).squeeze(-1)
    if rows.is_top1 is not None:
        rows.is_top1.copy_(_is_first_maximum(z, targets.squeeze(-1), target == 0))
    if rows.mean_logps is not None:
        torch.mean(z, -1, out=rows.mean_logps)
    if rows.entropy is None:
        torch.sum(z.exp_(), -1, out=rows.total)
    else:
        e = z.exp()
        torch.sum(e, -1, out=rows.total)
        torch.sum(z.mul_(e), -1, out=rows.entropy)
        z.copy_(e)
    log_total = rows.total.log()
    torch.sub(target, log_total, out=rows.logps)
    if rows.mean_logps is not None:
        rows.mean_logps.sub_(log_total)
    if rows.entropy is not None:
        rows.entropy.div_(rows.total).neg_().add_(log_total)
    if rows.log_collision is not None:
        torch.linalg.vector_norm(z, dim=-1, out=rows.log_collision)
        rows.log_collision.log_().sub_(log_total).mul_(2)


def _is_first_maximum(z: Tensor, targets: Tensor, is_maximum: Tensor) -> Tensor:
    """(m,) bool: whether the target is the maximum of its row of z (m, V), and the first one.

    On a CPU argmax costs more than all other statistics together, so earlier ties are looked for in the rows that
    could have one; an accelerator would have to wait for such a look.
    """
    if z.device.type != "cpu":
        return z.argmax(-1) == targets
    for row in is_maximum.nonzero().flatten().tolist():
        is_maximum[row] = not (z[row, : int(targets[row])] == 0).any()
    return is_maximum


class _ScoreGradients(NamedTuple):
    """Gradients of a loss for the scores of M rows, (M,) each; None where it reads none."""

    logps: Tensor | None
    entropy: Tensor | None
    mean_logps: Tensor | None

    def at(self, rows: slice) -> "_ScoreGradients":
        return _ScoreGradients(*(None if x is None else x[rows] for x in self))

    def of_normaliser(self, like: Tensor) -> Tensor:
        """Gradient for -logsumexp(z), which logps and mean_logps share."""
        return sum((x for x in (self.logps, self.mean_logps) if x is not None), torch.zeros_like(like))


def _logit_gradient(
    e: Tensor, targets: Tensor, rows: RowStatistics, given: _ScoreGradients, transform: LogitTransform
) -> Tensor:
    """Gradient for raw logits (m, V), from e.

    dlogp/dz = onehot - p      dentropy/dz = -p (log p + entropy)      dmean_logp/dz = 1/V - p
    """
    factor = -given.of_normaliser(rows.total)
    gradient = e / rows.total[:, None]
    if given.entropy is None or rows.entropy is None:
        gradient.mul_(factor[:, None])
    else:
        log_p_and_entropy = _log(e, rows.total.dtype).add_((rows.entropy - rows.total.log())[:, None])
        gradient.mul_(log_p_and_entropy.mul_(-given.entropy[:, None]).add_(factor[:, None]))
    if given.mean_logps is not None:
        gradient.add_(given.mean_logps[:, None], alpha=1 / gradient.shape[1])
    if given.logps is not None:
        gradient.scatter_add_(-1, targets[:, None], given.logps[:, None])
    if transform.softcap is None:
        return gradient if transform.factor == 1 else gradient.mul_(transform.factor)
    return gradient.mul_(transform.slope(_log(e, rows.total.dtype).add_(rows.largest[:, None])))


def _log(e: Tensor, dtype: torch.dtype) -> Tensor:
    """log e, finite where e underflowed."""
    return e.to(dtype).clamp(min=torch.finfo(dtype).tiny).log_()


# ---- a matrix and a bias ----


def score_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scoring: Scoring) -> HeadScores:
    """Scores of `targets` (M,) under the head `weight` (V, D), `bias` (V,), at `hidden` (M, D)."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias)):
        return HeadScores(*_LinearScores.apply(hidden, weight, bias, targets, scoring))
    products = _Products(hidden, weight, bias, _product_dtype(weight))
    with torch.autocast(hidden.device.type, enabled=False):
        return _score_tiles(products, targets, scoring)[0].scores()


class _LinearScores(torch.autograd.Function):
    """Differentiable `score_linear`: gradients of logps, entropy and mean_logps for hidden states, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scoring):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        capped = scoring.transform.softcap is not None
        products = _Products(hidden, weight, bias, _product_dtype(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            rows, kept, expected = _score_tiles(
                products,
                targets,
                scoring,
                keep=needs_weight or needs_bias or capped,
                expect=needs_hidden and not capped,
            )
        ctx.scoring, ctx.dtype = scoring, products.dtype
        ctx.save_for_backward(hidden, weight, bias, targets, expected, *rows, *kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in (rows.is_top1, rows.log_collision) if x is not None))
        return tuple(rows.scores())

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logps, d_entropy, _, d_mean_logps, __):
        hidden, weight, bias, targets, expected, *saved = ctx.saved_tensors
        num_rows = len(RowStatistics._fields)
        tape = _Tape(
            _Products(hidden, weight, bias, ctx.dtype),
            targets,
            ctx.scoring,
            RowStatistics(*saved[:num_rows]),
            saved[num_rows:],
        )
        given = _ScoreGradients(d_logps, d_entropy, d_mean_logps)
        with torch.autocast(hidden.device.type, enabled=False):
            if expected is None or d_entropy is not None:
                gradients = _backward_through_logits(tape, given, ctx.needs_input_grad)
            else:
                gradients = _backward_through_expectation(tape, given, expected, ctx.needs_input_grad)
        inputs = (hidden, weight, bias)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)), None, None


class _Products:
    """Matrix products of a head, in the dtype they run in."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        self.dtype = dtype
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)

    def logits(self, tile: slice, out: Tensor | None = None) -> Tensor:
        """Raw logits (m, V) of a tile in the statistics' dtype, in the memory of `out` where that can be."""
        hidden, weight = self.hidden[tile], self.weight.t()
        if self.dtype != _statistics_dtype(self.dtype):
            out = None
        elif out is not None:
            out = out[: len(hidden)]
        if self.bias is None:
            logits = torch.mm(hidden, weight, out=out)
        else:
            logits = torch.addmm(self.bias, hidden, weight, out=out)
        return logits.to(_statistics_dtype(self.dtype))


def _score_tiles(
    products: _Products, targets: Tensor, scoring: Scoring, *, keep: bool = False, expect: bool = False
) -> tuple[RowStatistics, list[Tensor], Tensor | None]:
    """Statistics of all rows; with `keep` the e of the first tiles, as many as the budget allows; with `expect` the
    mean embedding sum_v p_v W_v (M, D), all that the gradient for hidden states needs: a frozen head keeps no tile.
    """
    weight = products.weight
    rows = RowStatistics.empty(len(targets), weight, _statistics_dtype(products.dtype), scoring)
    tokens, num_kept = tiling(len(weight), products.dtype, weight.device, scoring.budget)
    kept: list[Tensor] = []
    expected = torch.empty_like(products.hidden, dtype=rows.total.dtype) if expect else None
    buffer = None
    for tile in _tiles(len(targets), tokens):
        z = scoring.transform.apply_(products.logits(tile, buffer))
        _exponentiate_(z, targets[tile], rows.at(tile))
        e = z.to(products.dtype)
        if expected is not None:
            torch.div(e @ weight, rows.total[tile, None], out=expected[tile])
        if keep and len(kept) < num_kept:
            kept.append(e)
        else:
            buffer = z
    return rows, kept, expected


class _Tape(NamedTuple):
    """What backward knows of forward."""

    products: _Products
    targets: Tensor
    scoring: Scoring
    rows: RowStatistics
    kept: list[Tensor]

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Each tile and its e (m, V), kept or computed anew. The last one's memory serves the next."""
        weight = self.products.weight
        tokens, _ = tiling(len(weight), self.products.dtype, weight.device, self.scoring.budget)
        buffer = None
        for i, tile in enumerate(_tiles(len(self.targets), tokens)):
            if i < len(self.kept):
                yield tile, self.kept[i]
                continue
            buffer = self.scoring.transform.apply_(self.products.logits(tile, buffer))
            yield tile, buffer.sub_(self.rows.largest[tile, None]).exp_().to(self.products.dtype)


class _WeightGradient:
    """Sums x^T y over tiles: the gradient of a head's weight (V, D), and of its bias (V,)."""

    def __init__(self, tape: _Tape, needs_input_grad: tuple[bool, ...]):
        _, needs_weight, needs_bias = needs_input_grad[:3]
        like, dtype = tape.products.weight, tape.rows.total.dtype
        self.weight = torch.zeros_like(like, dtype=dtype) if needs_weight else None
        self.bias = like.new_zeros(len(like), dtype=dtype) if needs_bias else None

    def add(self, x: Tensor, y: Tensor, factor: Tensor) -> None:
        """Add x^T y to the weight's, for x (m, V) and y (m, D), and x^T factor to the bias's, for factor (m,)."""
        if self.weight is not None:
            if x.dtype == self.weight.dtype:
                self.weight.addmm_(x.t(), y)
            else:
                self.weight += x.t() @ y.to(x.dtype)
        if self.bias is not None:
            self.bias += factor.to(x.dtype) @ x


def _backward_through_expectation(
    tape: _Tape, given: _ScoreGradients, expected: Tensor, needs_input_grad: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of logps and mean_logps for hidden states, weight and bias, where logits are not capped.

    With g and k the gradients of a token's logp and mean_logp, its hidden state gets g W[target] + k mean_v W_v -
    (g + k) sum_v p_v W_v. The weight gets the same with its rows and hidden states changed over: one product with e.
    """
    products, targets, rows, scale = tape.products, tape.targets, tape.rows, tape.scoring.transform.factor
    hidden = products.hidden.to(expected.dtype)
    factor = -scale * given.of_normaliser(rows.total)
    d_hidden = expected.mul(factor[:, None])
    gradient = _WeightGradient(tape, needs_input_grad)
    if gradient.weight is not None or gradient.bias is not None:
        factor = factor / rows.total
        for tile, e in tape.tiles():
            gradient.add(e, factor[tile, None] * hidden[tile], factor[tile])
    if given.logps is not None:
        d_target = scale * given.logps
        d_hidden.add_(products.weight[targets] * d_target[:, None])
        if gradient.weight is not None:
            gradient.weight.index_add_(0, targets, hidden * d_target[:, None])
        if gradient.bias is not None:
            gradient.bias.index_add_(0, targets, d_target)
    if given.mean_logps is not None:
        d_mean = given.mean_logps * (scale / len(products.weight))
        d_hidden.add_(torch.outer(d_mean, products.weight.sum(0, dtype=expected.dtype)))
        if gradient.weight is not None:
            gradient.weight.add_(d_mean @ hidden)
        if gradient.bias is not None:
            gradient.bias.add_(d_mean.sum())
    return d_hidden, gradient.weight, gradient.bias


def _backward_through_logits(
    tape: _Tape, given: _ScoreGradients, needs_input_grad: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of any scores for hidden states, weight and bias, tile by tile through the logits' own gradient."""
    products, targets, rows, transform = tape.products, tape.targets, tape.rows, tape.scoring.transform
    d_hidden = torch.empty_like(products.hidden) if needs_input_grad[0] else None
    gradient = _WeightGradient(tape, needs_input_grad)
    for tile, e in tape.tiles():
        d_logits = _logit_gradient(e, targets[tile], rows.at(tile), given.at(tile), transform).to(products.dtype)
        if d_hidden is not None:
            d_hidden[tile] = d_logits @ products.weight
        gradient.add(d_logits, products.hidden[tile], torch.ones_like(rows.total[tile]))
    return d_hidden, gradient.weight, gradient.bias


# ---- any module ----


def score_module(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, scoring: Scoring) -> HeadScores:
    """Scores of `targets` (M,) under any `head` that maps (m, D) to logits (m, V), at `hidden` (M, D).

    What exceeds one tile is computed anew in backward, tile by tile.
    """
    with torch.no_grad():
        logits = head(hidden.new_zeros(1, hidden.shape[1]))
    # the module's own logits and their gradient live beside e
    tokens, num_kept = tiling(3 * logits.shape[-1], logits.dtype, logits.device, scoring.budget)
    repeat = torch.is_grad_enabled() and len(targets) > tokens * (num_kept + 1)
    if torch.is_grad_enabled() and not repeat:
        return _score_logits(head, hidden, targets, scoring)
    parts = []
    for tile in _tiles(len(targets), tokens):
        part = (head, hidden[tile], targets[tile], scoring)
        parts.append(checkpoint(_score_logits, *part, use_reentrant=False) if repeat else _score_logits(*part))
    return _concatenate(parts) if parts else _score_logits(head, hidden, targets, scoring)


def _concatenate(parts: list[HeadScores]) -> HeadScores:
    return HeadScores(*(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)))  # type: ignore[arg-type]


def _score_logits(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, scoring: Scoring) -> HeadScores:
    return HeadScores(*_LogitScores.apply(head(hidden), targets, scoring))


class _LogitScores(torch.autograd.Function):
    """Scores of `targets` (m,) under raw logits (m, V), differentiable in the logits."""

    @staticmethod
    def forward(ctx, logits, targets, scoring):
        rows = RowStatistics.empty(len(targets), logits, _statistics_dtype(logits.dtype), scoring)
        z = scoring.transform.apply_(logits.to(rows.total.dtype, copy=True))
        _exponentiate_(z, targets, rows)
        ctx.scoring, ctx.dtype = scoring, logits.dtype
        ctx.save_for_backward(z, targets, *rows)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in (rows.is_top1, rows.log_collision) if x is not None))
        return tuple(rows.scores())

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logps, d_entropy, _, d_mean_logps, __):
        e, targets, *rows = ctx.saved_tensors
        given = _ScoreGradients(d_logps, d_entropy, d_mean_logps)
        gradient = _logit_gradient(e, targets, RowStatistics(*rows), given, ctx.scoring.transform)
        return gradient.to(ctx.dtype), None, None


# ---- shared ----


def _tiles(num_tokens: int, tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + tokens, num_tokens)) for start in range(0, num_tokens, tokens))


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
