"""Laws of the packed layout over model families: packed = padded = each row alone, and no row sees another.

Tiny random models in float32. Sliding windows are shorter than rows.
"""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from strop.data.collate import TokenRow, collate
from strop.models.forward import choose_layout, forward, use_packed_attention

VOCABULARY = 48
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
SIZED = GROUPED | {"head_dim": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
EXPERTS = {"num_experts_per_tok": 2}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**SIZED),
    "gemma2": lambda: Gemma2Config(**SIZED, **MIXED, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(**SIZED, **MIXED, query_pre_attn_scalar=8),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=4),
    "phi3": lambda: Phi3Config(**GROUPED),
    "gpt_neox": lambda: GPTNeoXConfig(**SHAPE),
    "gpt2": lambda: GPT2Config(**SHAPE),
    "opt": lambda: OPTConfig(**SHAPE, ffn_dim=32, word_embed_proj_dim=32),
    "gpt_oss": lambda: GptOssConfig(**SIZED, **MIXED, **EXPERTS, num_local_experts=3),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZED, **EXPERTS, num_experts=3, moe_intermediate_size=16),
}


def build(family: str, packed: bool = True):
    """A fresh model, always with the same weights; larger than initial ones, so that attention is far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("sinks"):
                parameter.normal_(std=0.15)
    if packed:
        use_packed_attention(model)
    return model


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def row(length: int, seed: int, parent: int = -1) -> TokenRow:
    ids = tokens(length, seed)
    return TokenRow(ids, ids, parent)


FLAT = [row(9, 1), row(1, 2), row(6, 3), row(12, 4)]
TREE = [TokenRow(tokens(7, 5), None), row(5, 6, 0), row(3, 7, 0), TokenRow(tokens(6, 8), None, 0), row(4, 9, 3)]
TREE += [row(1, 10, 3), row(8, 11)]
"""A prompt with two answers and a second turn that has two more, then a row on its own; windows end in ancestors."""


def scored_logps(model, batch) -> torch.Tensor:
    """Log-probabilities of all scored tokens, row after row."""
    logits = forward(model, batch).logits.flatten(0, 1)
    mask = batch["completion_mask"].bool()
    logps = logits[batch["predictors"][mask]].float().log_softmax(-1)
    return logps.gather(-1, batch["targets"][mask][:, None])[:, 0]


def gradients(model, logps) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logps * torch.linspace(0.5, 1.5, len(logps))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def outcome(model, rows, layout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logps = scored_logps(model, collate(rows, layout, pad_token_id=0))
    return logps.detach(), gradients(model, logps)


def alone(model, rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The outcome with each row, its ancestors before it, in a forward pass of its own without any mask."""
    batch = collate(rows, "padded", pad_token_id=0)
    parts = []
    for i, mask in enumerate(batch["attention_mask"]):
        length = int(mask.sum())
        scored = batch["completion_mask"][i].bool()
        at = batch["predictors"][i][scored] - i * mask.numel()
        logits = model(batch["input_ids"][i : i + 1, :length], use_cache=False).logits[0, at].float()
        parts.append(logits.log_softmax(-1).gather(-1, batch["targets"][i][scored][:, None])[:, 0])
    logps = torch.cat(parts)
    return logps.detach(), gradients(model, logps)


def assert_same(ours, theirs, tolerance: float = 1e-5) -> None:
    """Log-probabilities within `tolerance`; gradients within `tolerance` of their own size.

    Keys' biases have no gradient but rounding, hence the absolute share of the largest gradient's size.
    """
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    largest = max(g.norm().item() for g in theirs[1].values())
    for name, gradient in theirs[1].items():
        error = (ours[1][name] - gradient).norm().item()
        assert error <= tolerance * gradient.norm().item() + 0.01 * tolerance * largest, (name, error)


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.mark.parametrize("rows", [FLAT, TREE], ids=["flat", "tree"])
def test_packed_equals_padded_equals_alone(family, rows):
    """In the tree, a prompt computed once equals a prompt repeated for each of its answers."""
    packed = outcome(build(family), rows, "packed")
    plain = build(family, packed=False)
    assert_same(packed, alone(plain, rows))
    assert_same(packed, outcome(plain, rows, "padded"))


def test_strop_serves_padded_batches_as_the_usual_implementation_does(family):
    assert_same(outcome(build(family), TREE, "padded"), outcome(build(family, packed=False), TREE, "padded"), 1e-6)


def test_a_token_of_one_segment_changes_nothing_in_another(family):
    """Scored are 5, 3, 4, 1 and 7 tokens (nothing predicts a root's first); the row of 3 is another one."""
    model = build(family)
    changed = [*TREE]
    changed[2] = row(3, 99, parent=0)
    with torch.no_grad():
        before, after = (scored_logps(model, collate(r, "packed", pad_token_id=0)) for r in (TREE, changed))
    own = torch.zeros(20, dtype=torch.bool)
    own[5:8] = True
    assert (before - after)[own].abs().min() > 1e-3
    assert (before - after)[~own].abs().max() < 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    """In training mode, where checkpointing acts; dropout is off in all but GPT-2 and OPT, where it is set to 0."""
    model = build(family).train()
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plain = outcome(model, TREE, "packed")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same(outcome(model, TREE, "packed"), plain, 1e-6)


def test_autocast_changes_no_more_than_rounding(family):
    model = build(family)
    with torch.no_grad():
        exact = scored_logps(model, collate(TREE, "padded", pad_token_id=0))
        with torch.autocast("cpu", torch.bfloat16):
            packed = scored_logps(model, collate(TREE, "packed", pad_token_id=0))
            padded = scored_logps(model, collate(TREE, "padded", pad_token_id=0))
    rounding = (padded - exact).abs().mean()
    assert (packed - exact).abs().mean() < 2 * rounding + 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_packed_equals_padded_through_lora(name):
    """Adapters that do something: their second factor, zero at the start, is filled in."""
    model = get_peft_model(build(name, packed=False), LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.2)
    model.eval()
    padded = outcome(model, TREE, "padded")
    use_packed_attention(model)
    assert choose_layout(model)[0] == "packed"
    assert_same(outcome(model, TREE, "packed"), padded)


def test_generation_with_left_padding_is_unchanged(family):
    """Prompts of different lengths, a cache, and for the sliding models more tokens than their window."""
    ids = torch.tensor([[0, 0, 0, *tokens(4, 1)], tokens(7, 2)])
    mask = (ids != 0).long()
    texts = []
    for packed in (False, True):
        model = build(family, packed)
        model.generation_config.pad_token_id = 0
        texts.append(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)
