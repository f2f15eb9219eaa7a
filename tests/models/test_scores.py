"""A row's score is the head at its last token: alone, packed with a shared prompt, padded on either side, with any
padding token. Tiny random models in float32, float64 where it is about equality.
"""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    ModernBertConfig,
    MPNetConfig,
    OPTConfig,
    Qwen3Config,
    RobertaConfig,
)
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from strop.data.collate import TokenRow, collate
from strop.models.adapters import apply_peft
from strop.models.forward import choose_layout, use_packed_attention
from strop.models.scores import end_states, scores, token_outputs, token_states
from strop.models.segments import Segments
from strop.models.verify import layouts_agree, padded_from_packed

END = 2
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": END,  # the trap: what fills up also ends
    "bos_token_id": None,
    "eos_token_id": END,
}
DECODERS = {
    "llama": lambda **more: LlamaConfig(**SHAPE | more),
    "qwen3": lambda **more: Qwen3Config(**SHAPE, head_dim=8, num_key_value_heads=2, **more),
    "gpt2": lambda **more: GPT2Config(**SHAPE, **more),
    "opt": lambda **more: OPTConfig(**SHAPE, ffn_dim=32, word_embed_proj_dim=32, **more),
    "falcon": lambda **more: FalconConfig(**SHAPE, **more),  # padded only
}
CLASSIC = SHAPE | {"pad_token_id": 0}
ENCODERS = {
    "bert": lambda **more: BertConfig(**CLASSIC, **more),
    "roberta": lambda **more: RobertaConfig(**CLASSIC, **more),
    "distilbert": lambda **more: DistilBertConfig(
        vocab_size=48, dim=32, hidden_dim=32, n_layers=2, n_heads=4, pad_token_id=0, **more
    ),
    "modernbert": lambda **more: ModernBertConfig(**CLASSIC, cls_token_id=3, sep_token_id=4, **more),
    "mpnet": lambda **more: MPNetConfig(**CLASSIC, **more),
}

PROMPT = [5, END, 6, 7]
PAIR = [TokenRow(PROMPT, None), TokenRow([8, 9, END], [8, 9, END], 0), TokenRow([10, END, END, 11, END], [1] * 5, 0)]
ROWS = [*PAIR, TokenRow([5, END, 6, 7, END], [0] * 5)]
WHOLE = [PROMPT + PAIR[1].input_ids, PROMPT + PAIR[2].input_ids, ROWS[3].input_ids]


def build(configs, name, auto=AutoModelForSequenceClassification, num_labels=1, dtype=torch.float64):
    torch.manual_seed(0)
    model = auto.from_config(configs[name](num_labels=num_labels)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


def alone(model, ids) -> torch.Tensor:
    """The head at the last of the states that the backbone gives a row of its own."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    states = base.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state
    return base.score(states)[0, -1, 0]


def left_padded(token):
    width = max(map(len, WHOLE)) + 3
    ids = [[token] * (width - len(row)) + row for row in WHOLE]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in WHOLE]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def gradients(model, values):
    model.zero_grad()
    (values * torch.tensor([1.0, -0.5, 2.0])).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", DECODERS)
def test_a_score_is_the_same_wherever_its_row_stands(name):
    model = build(DECODERS, name)
    expected = torch.stack([alone(model, ids) for ids in WHOLE])
    grads = gradients(model, expected)
    if choose_layout(model)[0] == "packed":
        use_packed_attention(model)
    layouts = ["padded"] if name == "falcon" else ["packed", "padded"]
    batches = [collate(ROWS, layout, pad, 8) for layout in layouts for pad in (0, END)]
    batches += [left_padded(0), left_padded(END)]
    for batch in batches:
        values = scores(model, batch)
        torch.testing.assert_close(values, expected.detach(), rtol=1e-6, atol=1e-6)  # norms and angles are float32
        for parameter, grad in gradients(model, values).items():
            torch.testing.assert_close(grad, grads[parameter], rtol=1e-5, atol=1e-6, msg=parameter)


def test_the_ends_trap_of_issue_35352():
    """[5, 2, 6, 7, 2] with 2 as end and padding: the head's value at the last real position, however it is padded."""
    model = build(DECODERS, "llama")
    row = [5, END, 6, 7, END]
    expected = alone(model, row).item()
    for ids, mask in ((row, [1] * 5), (row + [END] * 3, [1] * 5 + [0] * 3), ([END] * 3 + row, [0] * 3 + [1] * 5)):
        batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask])}
        assert scores(model, batch).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoders_score_is_its_own_logit_whatever_the_padding(name):
    model = build(ENCODERS, name)
    layout, reason = choose_layout(model)
    assert layout == "padded"
    assert "attends to later tokens" in reason or name == "mpnet"
    expected = torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids in WHOLE])
    torch.testing.assert_close(scores(model, collate(ROWS, "padded", 0, 8)), expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="Use layout='padded'"):
        scores(model, collate(ROWS, "packed", 0))


@pytest.mark.parametrize(("configs", "name"), [(DECODERS, "llama"), (DECODERS, "gpt2"), (ENCODERS, "bert")])
def test_outputs_stand_at_their_own_tokens(configs, name):
    model = build(configs, name, AutoModelForTokenClassification, num_labels=2)
    rows = [TokenRow([5, 6, 7, 8], [-100, 1, -100, 0]), TokenRow([9, 10], [-100, 0])]
    whole = [model(torch.tensor([row.input_ids])).logits[0] for row in rows]
    expected = torch.zeros(2, 4, 2, dtype=torch.float64)
    expected[0, 1], expected[0, 3], expected[1, 1] = whole[0][1], whole[0][3], whole[1][1]
    if configs is DECODERS:
        use_packed_attention(model)
    for layout in ("packed", "padded") if configs is DECODERS else ("padded",):
        batch = collate(rows, layout, 0)
        batch["predictors"] = (batch["predictors"] + 1) * batch["completion_mask"]
        torch.testing.assert_close(token_outputs(model, batch), expected, rtol=1e-9, atol=1e-9)
        if layout == "packed":
            torch.testing.assert_close(token_outputs(model, padded_from_packed(batch, 0)), expected)


def test_adapters_and_their_heads():
    """Through PEFT's wrappers of model and head, trained or switched off."""
    model = build(DECODERS, "llama")
    plain = scores(model, collate(ROWS, "padded", END)).detach()
    model = apply_peft(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).double().eval()
    with torch.no_grad():
        model.score.modules_to_save["default"].weight.add_(0.5)
    use_packed_attention(model)
    padded = scores(model, collate(ROWS, "padded", END))
    assert (padded - plain).abs().min() > 1e-3
    packed = scores(model, collate(ROWS, "packed", END))
    torch.testing.assert_close(packed, padded, rtol=1e-9, atol=1e-9)
    assert gradients(model, packed)["base_model.model.score.modules_to_save.default.weight"].abs().max() > 0
    with model.disable_adapter():
        torch.testing.assert_close(scores(model, collate(ROWS, "packed", END)), plain)


def test_virtual_tokens_move_the_ends():
    model = build(DECODERS, "llama", dtype=torch.float32)
    model = get_peft_model(model, PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)).eval()
    one_by_one = [scores(model, collate([TokenRow(ids, ids)], "padded", END)) for ids in WHOLE]
    torch.testing.assert_close(scores(model, collate(ROWS, "padded", END)), torch.cat(one_by_one))


def test_the_head_computes_in_float32_under_autocast():
    model = build(DECODERS, "llama", dtype=torch.float32)
    batch = collate(ROWS, "padded", END)
    with torch.autocast("cpu", torch.bfloat16):
        values = scores(model, batch)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
    torch.testing.assert_close(values, scores(model, batch), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_are_told_apart_by_states(dtype):
    """Rows that see each other are found in either precision; rounding is not."""
    model = build(DECODERS, "llama", dtype=dtype)
    use_packed_attention(model)
    packed = collate([TokenRow([i, *range(5, 20), END], [1] * 17) for i in range(5, 9)], "packed", 0)
    padded = padded_from_packed(packed, 0)
    assert layouts_agree(model, packed, padded, end_states).agrees
    assert layouts_agree(model, packed, padded, token_states).agrees
    one_row = packed | {"segments": Segments((68,), (-1,))}
    assert not layouts_agree(model, one_row, padded, end_states).agrees


def test_what_has_no_score_is_refused():
    language_model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no classification head.*AutoModelForSequenceClass"):
        scores(language_model, collate(ROWS, "padded", 0))
    with pytest.raises(ValueError, match="num_labels=2, but a reward is one number"):
        scores(build(DECODERS, "llama", num_labels=2), collate(ROWS, "padded", 0))


def test_rows_end_where_they_do_though_a_config_names_no_padding():
    model = build(DECODERS, "llama")
    batch = collate(ROWS, "padded", 0)
    expected = scores(model, batch)
    model.config.pad_token_id = None
    torch.testing.assert_close(scores(model, batch), expected)
    assert model.config.pad_token_id is None


def test_a_model_that_looks_for_padding_itself_must_know_it():
    class Pooling(LlamaForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            del self.score
            self.classifier = torch.nn.Sequential(torch.nn.Linear(config.hidden_size, 1))

        def forward(self, input_ids, attention_mask=None, **kwargs):
            states = self.model(input_ids, attention_mask).last_hidden_state
            return SequenceClassifierOutputWithPast(logits=self.classifier(states[:, -1]))

    model = Pooling(DECODERS["llama"](num_labels=1, pad_token_id=None))
    assert scores(model, collate([TokenRow([5, 6], [5, 6])], "padded", 0)).shape == (1,)
    with pytest.raises(ValueError, match=r"pools its states by where padding begins.*model.config.pad_token_id ="):
        scores(model, collate(ROWS, "padded", 0))
