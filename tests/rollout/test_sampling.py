"""Laws of drawing tokens: exact distributions, exact log-probabilities, random numbers that depend on a row alone."""

import math

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from strop.rollout.sampling import CHUNK, FIRST_CANDIDATES, Draw, draw_, uniforms
from strop.rollout.types import Completion, Rollout, Sampling

SETTINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.5),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.1),
    "penalty": Sampling(repetition_penalty=1.5),
    "penalty and min_p": Sampling(repetition_penalty=0.7, min_p=0.05, temperature=1.3),
    "all": Sampling(temperature=0.5, top_k=5, top_p=0.8, min_p=0.1, repetition_penalty=1.2),
}


def drawn(logits: Tensor, sampling: Sampling, at: Tensor, seen: Tensor | None = None) -> Draw:
    return draw_(logits / (sampling.temperature or 1), at, sampling, seen)


def definition(logits: Tensor, sampling: Sampling, seen: Tensor) -> Tensor:
    """Log-probabilities (R, V) of what transformers would sample from."""
    if sampling.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, logits)
    logits = TemperatureLogitsWarper(sampling.temperature)(seen, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(seen, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(seen, logits)
    if sampling.min_p:
        logits = MinPLogitsWarper(sampling.min_p)(seen, logits)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("vocab_size", [7, 3000, 16 * CHUNK])
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_log_probabilities_are_those_of_transformers_distribution(sampling, vocab_size):
    logits = torch.randn(32, vocab_size) * 3
    seen = torch.randint(vocab_size, (32, 40))
    draw = drawn(logits.clone(), sampling, uniforms(0, range(32), [0] * 32), seen)
    places = draw.token_ids[:, None]
    expected = definition(logits, sampling, seen).gather(-1, places).squeeze(-1)
    torch.testing.assert_close(draw.sampled_logps, expected, rtol=1e-5, atol=1e-5)
    policy = (logits / sampling.temperature).log_softmax(-1).gather(-1, places).squeeze(-1)
    torch.testing.assert_close(draw.logps, policy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_frequencies_are_the_probabilities(sampling):
    """Pearson's statistic of 4,000 draws stays below its 99.99 % quantile."""
    number, vocab_size = 4000, 8
    logits = torch.linspace(1.5, -1.5, vocab_size)[torch.tensor([3, 0, 7, 5, 1, 6, 2, 4])].expand(number, -1)
    seen = torch.tensor([[1, 2]]).expand(number, -1)
    draw = drawn(logits.clone(), sampling, uniforms(1, range(number), [0] * number), seen)
    expected = definition(logits[:1], sampling, seen[:1])[0].exp() * number
    counts = torch.bincount(draw.token_ids, minlength=vocab_size)
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    quantile = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.9999))
    freedom = int(possible.sum()) - 1  # Wilson and Hilferty's approximation of the chi-square quantile
    assert statistic < freedom * (1 - 2 / (9 * freedom) + quantile * math.sqrt(2 / (9 * freedom))) ** 3


def test_worked_examples():
    half = torch.full((1,), 0.5, dtype=torch.float64)
    draw = drawn(torch.tensor([[2.0, 0.0]]), Sampling(temperature=0.5), half)
    assert draw.logps.item() == pytest.approx(-0.018150, abs=1e-6)
    probabilities = torch.tensor([[0.5, 0.3, 0.2]])
    for at, token, kept in ((0.6, 0, 0.5 / 0.8), (0.7, 1, 0.3 / 0.8), (0.999, 1, 0.3 / 0.8)):
        draw = drawn(probabilities.log(), Sampling(top_p=0.79), half * 2 * at)
        assert draw.token_ids.item() == token
        assert draw.sampled_logps.item() == pytest.approx(math.log(kept), abs=1e-6)
        assert draw.logps.item() == pytest.approx(math.log(probabilities[0, token]), abs=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.95), Sampling(top_p=0.95, min_p=0.5)], ids=["top_p", "min_p"])
def test_top_p_of_flat_rows_looks_beyond_the_first_candidates(sampling):
    logits = torch.randn(6, 4000) * torch.tensor([0.01, 8, 0.01, 8, 1, 8])[:, None]
    at = torch.full((6,), 0.9999, dtype=torch.float64)
    draw = drawn(logits.clone(), sampling, at)
    expected = definition(logits, sampling, torch.zeros(6, 1, dtype=torch.int64))
    assert (expected[0] > -torch.inf).sum() > FIRST_CANDIDATES
    found = expected.gather(-1, draw.token_ids[:, None]).squeeze(-1)
    torch.testing.assert_close(draw.sampled_logps, found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at", [1e-17, 0.5, 1 - 1e-16])
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_what_has_no_probability_is_never_drawn(sampling, at):
    logits = torch.full((4, 3000), -torch.inf)
    logits[range(4), [0, 1023, 1024, 2999]] = 1.0
    draw = drawn(logits, sampling, torch.full((4,), at, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.int64))
    assert draw.token_ids.tolist() == [0, 1023, 1024, 2999]
    assert draw.logps.tolist() == draw.sampled_logps.tolist() == [0.0] * 4


def test_temperature_zero_takes_the_first_of_the_likeliest():
    logits = torch.zeros(2, 5000)
    logits[0, [700, 701, 4000]] = 3.0
    draw = drawn(logits.clone(), Sampling(temperature=0), uniforms(0, [0, 1], [0, 0]))
    assert draw.token_ids.tolist() == [700, 0]
    torch.testing.assert_close(draw.logps, logits.log_softmax(-1)[[0, 1], [700, 0]])
    assert draw.sampled_logps.tolist() == [0.0, 0.0]


def test_uniforms_follow_from_seed_row_and_position():
    number = 4000
    base = uniforms(0, range(number), [0] * number)
    assert base.min() > 0
    assert base.max() < 1
    assert base.mean().item() == pytest.approx(0.5, abs=0.02)
    assert base.var().item() == pytest.approx(1 / 12, abs=0.005)
    others = (uniforms(1, range(number), [0] * number), uniforms(0, range(number), [1] * number))
    for other in (*others, uniforms(0, [0] * number, range(number))):
        correlation = torch.corrcoef(torch.stack([base[1:], other[1:]]))[0, 1]
        assert abs(correlation) < 0.06
    assert uniforms(0, [7, 3], [2, 5])[1] == uniforms(0, [3], [5])[0]
    assert uniforms(-1, [-1], [0]) == uniforms(2**64 - 1, [2**64 - 1], [0])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("max_tokens", 0), ("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)),
        *(("min_p", 2.0), ("repetition_penalty", 0.0), ("stop", ("",)), ("stop", "a")),
    ],
)
def test_settings_that_leave_nothing_to_draw_are_refused(setting, value):
    with pytest.raises(ValueError, match=setting):
        Sampling(**{setting: value})


def test_a_rollout_of_one_answer():
    completion = Completion([7, 8], [-0.5, -0.25], "stop", [-0.1, -0.2])
    rollout = Rollout.single_turn({"prompt": "?"}, [1, 2, 3], completion)
    assert rollout.token_ids == [1, 2, 3, 7, 8]
    assert rollout.completion_mask == [0, 0, 0, 1, 1]
    assert rollout.logps == [0, 0, 0, -0.5, -0.25]
    assert rollout.sampled_logps == [0, 0, 0, -0.1, -0.2]
    assert Rollout.single_turn({}, [1], Completion([7], [-0.5], "length")).sampled_logps is None
