"""Scores of batches against the logits of whole models, whatever their head, wrapper and layout."""

import math
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from strop.data.collate import TokenRow, collate
from strop.losses.supervised import label_smoothed, nll
from strop.models.forward import use_packed_attention
from strop.models.head import LogitTransform
from strop.models.logps import compute_head_in_float32, logit_transform, logps

VOCAB = 31
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
GATED = SIZES | {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GATED),
    "llama tied": transformers.LlamaConfig(**GATED, tie_word_embeddings=True),
    "gemma2 capped": transformers.Gemma2Config(**GATED, final_logit_softcapping=0.5),
    "cohere multiplied": transformers.CohereConfig(**GATED, logit_scale=3.0),
    "granite divided": transformers.GraniteConfig(**GATED, logits_scaling=0.25),
    "gpt2": transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=64),
    "gpt-neox": transformers.GPTNeoXConfig(**SIZES, intermediate_size=24),
    "phi with bias": transformers.PhiConfig(**SIZES, intermediate_size=24),
}
PROMPTS = [[3, 4, 5], [6], [7, 8]]
COMPLETIONS = [[9, 10, 11, 12], [13, 14], [15]]


def causal_lm(name: str):
    """Weights large enough that scales and caps matter; a bias that is not 0."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("lm_head.bias"):
            nn.init.normal_(parameter)
    nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    return model


def batch_of(prompts=PROMPTS, completions=COMPLETIONS, layout="padded"):
    rows = [TokenRow([*p, *c], [-100] * len(p) + c) for p, c in zip(prompts, completions, strict=True)]
    return collate(rows, layout, pad_token_id=0)


def alone(model, prompt, completion):
    """(len(completion), V): logits for each token of the completion, from the model's own forward on one row."""
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1]


def definition(model, temperature=1.0):
    """(B, T) logps, entropy, is_top1 and mean_logps of the batch, row by row from whole logits."""
    width = max(len(p) + len(c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True))
    lines = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        log_p = (alone(model, prompt, completion) / temperature).log_softmax(-1)
        of_target = log_p.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
        top = (log_p.argmax(-1) == torch.tensor(completion)).to(log_p)
        values = torch.stack([of_target, -(log_p.exp() * log_p).sum(-1), top, log_p.mean(-1)])
        before, after = len(prompt), width - len(prompt) - len(completion)
        lines.append(nn.functional.pad(values, (before, after)))
    return torch.stack(lines, dim=1)


def parameter_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


EVERYTHING = {"entropy": True, "top1": True, "mean_logps": True}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_and_gradients_are_those_of_whole_logits(name, layout, temperature):
    model = causal_lm(name).double()  # float32 gradients depend on the kernels of a CPU by more than this tests
    expected = definition(model, temperature)
    wanted = parameter_gradients(model, (expected[0] + 0.1 * expected[1] + 0.3 * expected[3]).sum())
    if layout == "packed":
        use_packed_attention(model)
    scores = logps(model, batch_of(layout=layout), temperature=temperature, **EVERYTHING)
    torch.testing.assert_close(torch.stack([x.to(expected) for x in scores[:4]]), expected, rtol=1e-5, atol=1e-5)
    found = parameter_gradients(model, (scores.logps + 0.1 * scores.entropy + 0.3 * scores.mean_logps).sum())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budget", [1, VOCAB * 4 * 4])
def test_a_budget_changes_no_number(budget):
    model = causal_lm("llama tied")
    whole, tiled = logps(model, batch_of(), **EVERYTHING), logps(model, batch_of(), **EVERYTHING, budget=budget)
    torch.testing.assert_close(tiled, whole)
    torch.testing.assert_close(
        parameter_gradients(model, tiled.logps.sum()), parameter_gradients(model, whole.logps.sum())
    )


def test_what_is_not_asked_for_is_none():
    scores = logps(causal_lm("llama"), batch_of())
    assert scores.logps.shape == batch_of()["completion_mask"].shape
    assert scores[1:] == (None,) * 5


def test_one_token_completion_is_minus_log_p_exactly():
    model = causal_lm("llama")
    scores = logps(model, batch_of([[3, 4, 5]], [[9]]))
    expected = alone(model, [3, 4, 5], [9])[0].log_softmax(-1)[9]
    assert scores.logps.tolist()[0][:3] == [0, 0, 0]
    torch.testing.assert_close(scores.logps[0, 3], expected, rtol=1e-6, atol=0)
    assert sum(g.norm() for g in parameter_gradients(model, scores.logps.sum()).values()) > 0


class Stub(nn.Module):
    """A model whose position i is uniform over the first `choices[i]` tokens, nearly."""

    def __init__(self, choices):
        super().__init__()
        self.config = transformers.LlamaConfig(**GATED)
        self.head = nn.Linear(len(choices), VOCAB, bias=False)
        allowed = torch.arange(VOCAB)[:, None] < torch.tensor(choices)
        self.head.weight.data = torch.where(allowed, 0.0, -1e4)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask, use_cache):
        return CausalLMOutput(logits=self.head(torch.eye(input_ids.shape[1])[None]))


def test_entropy_is_that_of_the_predicting_positions():
    #  tokens 3, 4, 5 are predicted by positions 2, 3, 4: (log 2 + log 16 + log 3) / 3 = 1.521449
    batch = collate([TokenRow([0, 0, 0, 1, 12, 7], [-100, -100, -100, 1, 12, 7])], "padded", 0)
    scores = logps(Stub([8, 4, 2, 16, 3, 5]), batch, entropy=True, top1=True)
    assert scores.entropy.sum().item() / 3 == pytest.approx(1.521449, abs=1e-6)
    #  token 7 is not among position 4's three
    torch.testing.assert_close(scores.logps[0, 3:5], -torch.tensor([2.0, 16.0]).log())
    assert scores.logps[0, 5].item() == pytest.approx(-1e4 - math.log(3))
    assert scores.is_top1.sum() == 0


def test_label_smoothing_is_torchs():
    model = causal_lm("phi with bias")
    scores = logps(model, batch_of(), mean_logps=True)
    ours = label_smoothed(nll(scores.logps), scores.mean_logps, 0.1).sum()
    whole = torch.cat([alone(model, p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    expected = nn.functional.cross_entropy(
        whole, torch.tensor([t for c in COMPLETIONS for t in c]), label_smoothing=0.1, reduction="sum"
    )
    torch.testing.assert_close(ours, expected)


def test_nan_at_positions_without_a_loss_reaches_nothing():
    model = causal_lm("llama")
    batch = batch_of()
    scored = torch.zeros(batch["input_ids"].numel(), dtype=torch.bool)
    scored[batch["predictors"][batch["completion_mask"].bool()]] = True
    clean = logps(model, batch, **EVERYTHING)
    wanted = parameter_gradients(model, clean.logps.sum())["lm_head.weight"]

    def poison(module, inputs, output):
        return output.masked_fill(~scored.view(*output.shape[:2], 1), math.nan)

    model.model.norm.register_forward_hook(poison)
    scores = logps(model, batch, **EVERYTHING)
    torch.testing.assert_close(scores, clean)
    torch.testing.assert_close(parameter_gradients(model, scores.logps.sum())["lm_head.weight"], wanted)


def test_a_batch_without_a_scored_token_still_reaches_every_parameter():
    model = causal_lm("llama")
    batch = collate([TokenRow([1, 2, 3], [-100] * 3)], "padded", 0)
    scores = logps(model, batch, **EVERYTHING)
    assert scores.logps.tolist() == scores.entropy.tolist() == [[0, 0, 0]]
    gradients = parameter_gradients(model, scores.logps.sum())
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert all(g.abs().sum() == 0 for g in gradients.values())


def test_without_grad_mode():
    model = causal_lm("llama")
    with torch.no_grad():
        scores = logps(model, batch_of(), **EVERYTHING)
    assert not scores.logps.requires_grad
    torch.testing.assert_close(torch.stack(scores[:4]), definition(model).detach(), rtol=1e-5, atol=1e-5)


def test_bfloat16_weights_and_autocast_give_float32_scores():
    model, exact = causal_lm("llama"), definition(causal_lm("llama"))[0].detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = logps(model, batch_of()).logps
    rounded = logps(causal_lm("llama").to(torch.bfloat16), batch_of()).logps
    for found in (autocast, rounded):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=0, atol=0.03)
        assert not torch.equal(found, exact)


ADAPTERS = {
    "LoRA on the head": peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False),
    "head saved whole": peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["lm_head"]),
    "head frozen": peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("budget", [None, VOCAB * 4 * 7])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(adapter, budget):
    torch.manual_seed(0)
    model = peft.get_peft_model(causal_lm("llama"), ADAPTERS[adapter])
    virtual = 3 if adapter == "prompt tuning" else 0
    expected = 0
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0, virtual:]
        log_p = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected = expected + log_p.gather(-1, torch.tensor(completion)[:, None]).sum()
    wanted = parameter_gradients(model, expected)
    scores = logps(model, batch_of(), budget=budget)
    torch.testing.assert_close(scores.logps.sum(), expected)
    found = parameter_gradients(model, scores.logps.sum())
    assert any("lora_" in name or "prompt" in name for name in found)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_wrapped_models_are_called_through_their_wrapper():
    model = causal_lm("llama")
    expected = definition(model)[0]

    class Wrapper(nn.Module):
        calls = 0

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **inputs):
            self.calls += 1
            return self.module(**inputs)

    wrapper = Wrapper(model)
    torch.testing.assert_close(logps(wrapper, batch_of()).logps, expected, rtol=1e-5, atol=1e-5)
    assert wrapper.calls == 1


def test_a_compiled_model_is_compiled_once():
    model = Stub([8, 4, 2, 16, 3, 5])
    batch = collate([TokenRow([0, 0, 0, 1, 12, 7], [-100, -100, -100, 1, 12, 7])], "padded", 0)
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(logps(compiled, batch).logps, logps(model, batch).logps)
    before = len(compilations)
    assert before > 0
    for mask in (batch["completion_mask"], torch.ones_like(batch["completion_mask"])):
        logps(compiled, batch | {"completion_mask": mask})
    assert len(compilations) == before


def test_moe_returns_its_auxiliary_loss():
    config = transformers.MixtralConfig(**GATED, num_local_experts=2, output_router_logits=True)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    batch = batch_of()
    expected = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).aux_loss
    torch.testing.assert_close(logps(model, batch).aux_loss, expected)


def test_encoder_decoder():
    """The decoder's hidden states predict; they stand where `decoder_input_ids` do."""
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    source, shifted = torch.tensor([[3, 4, 5, 1, 1], [6, 1, 1, 1, 1]]), torch.tensor([[0, 7, 8], [0, 9, 10]])
    targets = torch.tensor([[7, 8, 1], [9, 10, 1]])
    inputs = {"input_ids": source, "decoder_input_ids": shifted}
    batch = {"targets": targets, "predictors": torch.arange(6).view(2, 3), "completion_mask": torch.ones(2, 3)}
    expected = model(**inputs).logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(logps(model, inputs | batch).logps, expected)


def test_the_head_is_itself_again_afterwards():
    model = causal_lm("llama")
    logps(model, batch_of())
    assert "forward" not in model.lm_head.__dict__
    with pytest.raises(IndexError):
        logps(model, batch_of() | {"targets": torch.full((3, 7), -1), "input_ids": torch.full((3, 7), VOCAB)})
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_type": "llama"}, LogitTransform()),
        ({"model_type": "gemma3", "final_logit_softcapping": 30.0}, LogitTransform(1.0, 30.0)),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 30.0}, LogitTransform(1.0, 30.0)),
        ({"model_type": "cohere2", "logit_scale": 0.25}, LogitTransform(0.25)),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.5}, LogitTransform(0.5)),
        ({"model_type": "granitemoe", "logits_scaling": 8.0}, LogitTransform(0.125)),
        ({"model_type": "hyperclovax", "logits_scaling": 8.0}, LogitTransform(8.0)),
    ],
)
def test_transforms_by_config(settings, expected):
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(**settings))
    assert logit_transform(SimpleNamespace(config=config)) == expected


def test_an_unknown_transform_is_refused():
    model = causal_lm("llama")
    model.register_forward_hook(lambda module, inputs, output: output | {"logits": output.logits * 2})
    with pytest.raises(ValueError, match=r"turns a logit of 20\.0 into 40 to 40, but by its config it should be 20"):
        logps(model, batch_of())


def test_a_model_without_a_head_is_refused():
    model = transformers.AutoModel.from_config(CONFIGS["llama"])
    with pytest.raises(ValueError, match=r"LlamaModel has no output embedding .* AutoModelForCausalLM"):
        logps(model, batch_of())


def test_a_head_that_is_not_called_is_refused():
    model = causal_lm("llama")
    model.forward = model.model.forward
    with pytest.raises(ValueError, match="called its output embedding 0 times"):
        logps(model, batch_of())


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperatures_that_divide_nothing_are_refused(temperature):
    with pytest.raises(ValueError, match=f"temperature={temperature}"):
        logps(causal_lm("llama"), batch_of(), temperature=temperature)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_in_float32_multiplies_in_float32(tiny_llama, autocast):
    model = tiny_llama if autocast else tiny_llama.bfloat16()
    batch = collate([TokenRow(list(range(5, 45)), list(range(5, 45)))], "padded", 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        states = model.model(batch["input_ids"]).last_hidden_state
        rough = logps(model, batch).logps
        compute_head_in_float32(model)
        found = logps(model, batch).logps
    logits = states[0, :-1].float() @ model.lm_head.weight.float().T
    expected = logits.log_softmax(-1).gather(-1, batch["input_ids"][0, 1:, None]).squeeze(-1)
    inside = batch["completion_mask"].bool()
    assert (found[inside] - expected).abs().max() < 1e-5
    assert (rough[inside] - expected).abs().max() > 1e-4
    assert model.lm_head.weight.dtype == (torch.float32 if autocast else torch.bfloat16)
    logps(model, batch).logps.sum().backward()
    assert model.lm_head.weight.grad.abs().max() > 0


def test_a_head_with_an_adapter_cannot_be_told_to_multiply_in_float32(tiny_llama):
    model = peft.get_peft_model(tiny_llama, peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="drop cast_lm_head_to_fp32"):
        compute_head_in_float32(model)
