"""Laws of generators on a reference: they write as the reference, or as the mixture, whatever kind the reference is."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MambaConfig

from strop.models.reference import AdapterOff, FrozenModel, FrozenWeights, reference_for
from strop.rollout.generator import InProcessGenerator
from strop.rollout.mixture import MixtureGenerator, PairedTurns, ReferenceGenerator
from strop.rollout.types import Completion, Sampling

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 3,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2),
    "gpt2": lambda: GPT2Config(**SHAPE),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, **MIXED, num_key_value_heads=2, head_dim=8),
    "mamba": lambda: MambaConfig(**SHAPE, state_size=4),
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [5, 6, 7], [20]]
ROWS = [4, 7, 11, 2]
SAMPLING = Sampling(max_tokens=8, temperature=0.8, seed=3)


def model_of(family="llama", seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


def moved(model):
    """`model`, trained away from what it was."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def written(generator):
    return [c.token_ids for c in generator.generate(PROMPTS, SAMPLING, rows=ROWS)]


def adapter(model, fresh=True):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=fresh)
    return get_peft_model(model, config)


@pytest.mark.parametrize("kind", ["copy", "fresh adapter", "trained adapter", "frozen part"])
def test_a_reference_writes_what_the_policy_wrote_before(kind):
    model = model_of()
    if "adapter" in kind:
        model = adapter(model, fresh=kind == "fresh adapter")
    if kind == "frozen part":
        model.get_input_embeddings().requires_grad_(False)
    before = written(InProcessGenerator(model))
    reference = reference_for(model)
    expected = {"copy": FrozenModel, "fresh adapter": AdapterOff}.get(kind, FrozenWeights)
    assert isinstance(reference, expected)
    moved(model)
    after = written(InProcessGenerator(model))
    assert after != before
    assert written(ReferenceGenerator(reference)) == before
    assert written(MixtureGenerator(model, reference, lambda: 1.0)) == before
    assert written(MixtureGenerator(model, reference, lambda: 0.0)) == after
    assert written(InProcessGenerator(model)) == after  # the policy is itself again


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mixture_is_geometric_token_by_token(family):
    policy, other = model_of(family).double(), model_of(family, seed=1).double()
    generator = MixtureGenerator(policy, FrozenModel(other), lambda: 0.3)
    found = generator.generate(PROMPTS, SAMPLING, rows=ROWS)
    assert len({tuple(c.token_ids) for c in found}) > 2
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            policy_logps, other_logps = (m(input_ids=ids).logits.log_softmax(-1)[0, :-1] for m in (policy, other))
        mixed = ((0.3 * other_logps + 0.7 * policy_logps) / SAMPLING.temperature).log_softmax(-1)
        picked = mixed[len(prompt) - 1 :].gather(-1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logps), picked.float(), rtol=0, atol=2e-5)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 3 else "length")


def test_a_text_follows_from_its_number_and_prompt():
    """Not from what it is written with, nor from how many are written at a time."""
    generator = MixtureGenerator(model_of(), FrozenModel(model_of(seed=1)), lambda: 0.5)
    whole = written(generator)
    generator.max_rows = 1
    assert written(generator) == whole
    (alone,) = generator.generate(PROMPTS[3:], SAMPLING, rows=ROWS[3:])
    assert alone.token_ids == whole[3]
    assert generator.generate([], SAMPLING) == []


def test_virtual_tokens_are_read_once():
    base = model_of()
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(copy.deepcopy(base), config).eval()
    found = MixtureGenerator(model, FrozenModel(base), lambda: 0.0).generate(PROMPTS, SAMPLING)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 3:-1]
        told = (logits / SAMPLING.temperature).log_softmax(-1)[len(prompt) - 1 :]
        picked = told.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logps), picked, rtol=0, atol=2e-5)


def test_prompts_beyond_the_positions_are_refused():
    generator = MixtureGenerator(model_of("gpt2"), FrozenModel(model_of("gpt2")), lambda: 0.5)
    with pytest.raises(ValueError, match="64"):
        generator.generate([[5] * 60], SAMPLING)


class Constant:
    def __init__(self, token):
        self.token = token

    def generate(self, prompts, sampling, *, rows=None, max_tokens=None):
        return [Completion([self.token, row], [0.0, 0.0], "length") for row in rows]


def test_odd_numbers_are_written_by_the_other():
    encoder = SimpleNamespace(
        prompt_ids=lambda row: [row["n"]], prompt_words=lambda row: row["prompt"], words=lambda row, ids: str(ids)
    )
    episodes = PairedTurns(Constant(1), lambda: Constant(2), encoder)
    rows = [{"prompt": "p", "n": n} for n in (7, 7, 8, 8)]
    found = episodes.roll_out(rows, [10, 11, 13, 12], SAMPLING)
    assert [r.completion_ids for r in found] == [[1, 10], [2, 11], [2, 13], [1, 12]]
    assert [r.row["n"] for r in found] == [7, 7, 8, 8]
