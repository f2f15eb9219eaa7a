"""Laws of the in-process generator: what is written and with which log-probabilities, whatever it is written with."""

import logging
from collections.abc import Callable

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    T5Config,
)

from strop.data.collate import TokenRow, collate
from strop.models.checkpointing import enable_checkpointing
from strop.models.logps import logps
from strop.rollout import cache, generator, generator_stream
from strop.rollout.cache import Cache
from strop.rollout.generate import refuse_virtual_tokens
from strop.rollout.generator import InProcessGenerator, serving_obstacle
from strop.rollout.rows import end_ids
from strop.rollout.types import Completion, Sampling

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
SIZED = GROUPED | {"head_dim": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
EXPERTS = {"num_experts_per_tok": 2}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama tied": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "gpt2": lambda: GPT2Config(**SHAPE, attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=6),
    "gemma2": lambda: Gemma2Config(**SIZED, **MIXED, query_pre_attn_scalar=8, attn_logit_softcapping=5.0),
    "gemma3": lambda: Gemma3TextConfig(**SIZED, **MIXED, query_pre_attn_scalar=8),
    "gpt_oss": lambda: GptOssConfig(**SIZED, **MIXED, **EXPERTS, num_local_experts=3),
}

PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [11], [5, 6, 7], [11], [20, 21, 22, 23, 24]]
SAMPLED = Sampling(max_tokens=10, temperature=0.8, seed=3)
FILTERED = Sampling(max_tokens=9, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2)


def causal_lm(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def llama(**options) -> PreTrainedModel:
    return causal_lm(LlamaConfig(**(GROUPED | options)))


def training_logps(model, prompts, completions: list[Completion], temperature: float) -> list[list[float]]:
    """Of the completions' tokens, by a padded training forward without dropout."""
    rows = [
        TokenRow([*p, *c.token_ids], [-100] * len(p) + c.token_ids) for p, c in zip(prompts, completions, strict=True)
    ]
    batch = collate(rows, "padded", pad_token_id=0)
    model.eval()
    with torch.no_grad():
        scores = logps(model, batch, temperature=temperature).logps
    return [row[mask.bool()].tolist() for row, mask in zip(scores, batch["completion_mask"], strict=True)]


def assert_same_logps(model, prompts, completions, temperature, atol=1e-5):
    expected = training_logps(model, prompts, completions, temperature)
    for completion, wanted in zip(completions, expected, strict=True):
        assert completion.logps == pytest.approx(wanted, abs=atol)


def texts(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_generate_and_logps_are_those_of_training(name):
    model = causal_lm(FAMILIES[name]()).train()
    own_attention = model.config._attn_implementation
    written = InProcessGenerator(model, max_rows=4).generate(PROMPTS, Sampling(max_tokens=14, temperature=0))
    sampled = InProcessGenerator(model, max_rows=4).generate(PROMPTS, FILTERED)
    assert model.training
    assert model.config._attn_implementation == own_attention
    model.eval()
    config = GenerationConfig(max_new_tokens=14, do_sample=False, pad_token_id=0)
    for prompt, completion in zip(PROMPTS, written, strict=True):
        expected = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert completion.token_ids == expected.tolist()
        assert completion.finish_reason == "length"
    assert_same_logps(model, PROMPTS, written, 1.0)
    assert_same_logps(model, PROMPTS, sampled, FILTERED.temperature)


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED], ids=["plain", "filtered"])
def test_a_row_is_the_same_whatever_it_is_written_with(sampling):
    model = llama(eos_token_id=3)
    together = InProcessGenerator(model).generate(PROMPTS, sampling)
    assert len({tuple(c.token_ids) for c in together}) == len(PROMPTS)
    for max_rows in (1, 3):
        few = InProcessGenerator(model, max_rows=max_rows).generate(PROMPTS, sampling)
        assert texts(few) == texts(together)
    order = [4, 0, 6, 2, 5, 1, 3]
    mixed = InProcessGenerator(model, max_rows=3).generate([PROMPTS[i] for i in order], sampling, rows=order)
    assert texts(mixed) == [together[i].token_ids for i in order]
    for i, prompt in enumerate(PROMPTS):
        (alone,) = InProcessGenerator(model).generate([prompt], sampling, rows=[i])
        assert alone.token_ids == together[i].token_ids
        assert alone.logps == pytest.approx(together[i].logps, abs=1e-5)
        assert alone.finish_reason == together[i].finish_reason
    other = InProcessGenerator(model).generate(PROMPTS, Sampling(**(vars(sampling) | {"seed": 99})))
    assert texts(other) != texts(together)


def test_lone_prompts_of_very_different_lengths(monkeypatch):
    model = llama(max_position_embeddings=256)
    prompts = [[1 + (7 * i + j) % 90 for j in range(length)] for i, length in enumerate((90, 1, 30, 2, 100, 3, 50))]
    monkeypatch.setattr(cache, "FIRST_TOKENS", 2)  # blocks grow
    budgets = [9, 1, 4, 9, 2, 7, 9]
    written = InProcessGenerator(model).generate(prompts, SAMPLED, max_tokens=budgets)
    assert [len(completion.token_ids) for completion in written] == budgets
    assert_same_logps(model, prompts, written, SAMPLED.temperature)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_is_joined", lambda *args: False)  # each row by itself
        assert texts(InProcessGenerator(model).generate(prompts, SAMPLED, max_tokens=budgets)) == texts(written)


def test_rows_enter_in_parts_when_prompts_are_many(monkeypatch):
    model = llama()
    together = InProcessGenerator(model).generate(PROMPTS, SAMPLED)
    monkeypatch.setattr(generator_stream, "PREFILL_TOKENS", 4)
    assert texts(InProcessGenerator(model).generate(PROMPTS, SAMPLED)) == texts(together)


def test_a_prompt_is_read_once_and_the_head_sees_last_positions_only(monkeypatch):
    model = llama()
    tokens, states = [], []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: tokens.append(inputs[0].numel()))
    products = generator_stream.Head._products
    monkeypatch.setattr(
        generator_stream.Head, "_products", lambda self, x: (states.append(len(x)), products(self, x))[1]
    )
    monkeypatch.setattr(InProcessGenerator, "_check", lambda *args: None)
    budgets = [1, 4, 2, 3]
    written = InProcessGenerator(model).generate([[5, 6, 7, 8]] * 3 + [[9]], Sampling(max_tokens=4), max_tokens=budgets)
    assert [len(c.token_ids) for c in written] == budgets
    assert tokens == [4 + 1, 3, 2, 1]
    assert states == [2, 3, 2, 1]


def test_keys_and_values_are_let_go_with_the_last_row(monkeypatch):
    kept = []
    leave = Cache.leave
    rows = []

    def watch(self, done):
        rows.extend(row for row in self.rows if row not in rows)
        leave(self, done)
        kept.append(sum(bool(prefix.keys) for prefix in {row.prefix for row in rows}))

    monkeypatch.setattr(Cache, "leave", watch)
    InProcessGenerator(llama()).generate([[5], [5], [6], [6]], Sampling(max_tokens=4), max_tokens=[2, 4, 3, 3])
    assert kept == [0, 2, 1, 0]


def test_those_expected_to_write_most_enter_first(monkeypatch):
    entered = []
    enter = Cache.enter
    monkeypatch.setattr(
        Cache, "enter", lambda self, rows: (entered.append([r.index for r in rows]), enter(self, rows))[1]
    )
    budgets = [2, 5, 9, 9]
    InProcessGenerator(llama(), max_rows=2).generate([[5]] * 4, Sampling(max_tokens=9), max_tokens=budgets)
    assert [rows for rows in entered if rows] == [[2, 3], [1, 0]]


def test_prompts_in_memory_are_never_more_than_the_places_and_one(monkeypatch):
    """Siblings that end at once make the others of their prompt look short, but not wait."""
    kept, rows, leave = [], [], Cache.leave

    def watch(self, done):
        rows.extend(row for row in self.rows if row not in rows)
        leave(self, done)
        kept.append(sum(bool(prefix.keys) for prefix in {row.prefix for row in rows}))

    monkeypatch.setattr(Cache, "leave", watch)
    model = llama()
    model.generation_config.eos_token_id = list(range(48))  # a row has two tokens on average
    prompts = [[5 + i] for i in range(40) for _ in range(3)]
    InProcessGenerator(model, max_rows=4).generate(prompts, Sampling(max_tokens=9))
    assert max(kept) <= 5


def ids_with_ends(model, tokenizer=None, **settings) -> list[Completion]:
    return InProcessGenerator(model, tokenizer).generate([[5, 6]] * 40, Sampling(max_tokens=30, **settings))


def test_every_end_of_the_generation_config_and_the_tokenizer_stops(word_tokenizer):
    model = llama()
    free = ids_with_ends(model)
    assert {c.finish_reason for c in free} == {"length"}
    model.generation_config.eos_token_id = [7, 9]
    ends = {7, 9, word_tokenizer.eos_token_id, 30}
    assert end_ids(model, word_tokenizer) == ends - {30}
    stopped = ids_with_ends(model, word_tokenizer, stop_token_ids=(30,))
    for row, whole in zip(stopped, free, strict=True):
        first = next((i for i, token in enumerate(whole.token_ids) if token in ends), None)
        assert row.token_ids == (whole.token_ids if first is None else whole.token_ids[: first + 1])
        assert row.finish_reason == ("length" if first is None else "stop")
    assert {row.token_ids[-1] for row in stopped if row.finish_reason == "stop"} == ends
    assert texts(ids_with_ends(model, word_tokenizer, ignore_eos=True)) == texts(free)


def test_stop_texts_end_a_row_with_the_token_that_completes_one(tiny_llama, bpe_tokenizer):
    torch.nn.init.normal_(tiny_llama.lm_head.weight, std=0.05)
    sampling = Sampling(max_tokens=40, stop=("a", "é", "the"))
    written = InProcessGenerator(tiny_llama, bpe_tokenizer).generate([[5, 6]] * 30, sampling)
    assert {c.finish_reason for c in written} == {"stop", "length"}
    for completion in written:
        before, whole = (bpe_tokenizer.decode(ids) for ids in (completion.token_ids[:-1], completion.token_ids))
        assert not any(stop in before for stop in sampling.stop)
        by_text = any(stop in whole for stop in sampling.stop)
        ended = by_text or completion.token_ids[-1] == bpe_tokenizer.eos_token_id
        assert completion.finish_reason == ("stop" if ended else "length")
    with pytest.raises(ValueError, match="no tokenizer"):
        InProcessGenerator(tiny_llama).generate([[5]], sampling)


def test_wrong_prompts_and_budgets_are_refused():
    writer = InProcessGenerator(llama())
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        writer.generate([[1], []], SAMPLED)
    with pytest.raises(ValueError, match=r"max_tokens\[0\]=11"):
        writer.generate([[1]], SAMPLED, max_tokens=[11])
    assert writer.generate([], SAMPLED) == []
    with pytest.raises(ValueError, match="learned 128 positions"):
        InProcessGenerator(causal_lm(FAMILIES["gpt2"]())).generate([[1] * 119], SAMPLED)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0}], ids=str)
def test_weights_that_diverged_are_named(sampling, value):
    model = llama()
    model.lm_head.weight.data[3] = value
    for obstacle in (None, "asked to"):
        writer = InProcessGenerator(model)
        writer.obstacle = obstacle
        with pytest.raises(ValueError, match=r"row \d+ can't go on .* logits are no numbers there .* diverged"):
            writer.generate([[5], [6]], Sampling(max_tokens=9, **sampling))


def test_a_model_in_training_with_adapters_checkpointing_and_dropout(caplog):
    model = llama(attention_dropout=0.5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.5)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    enable_checkpointing(adapted)
    adapted.train()
    adapted.base_model.model.model.layers[0].eval()
    modes = [module.training for module in adapted.modules()]
    state = torch.get_rng_state()
    widths = []
    embedding = adapted.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, inputs, output: widths.append(inputs[0].numel()))
    with caplog.at_level(logging.WARNING):
        written = InProcessGenerator(adapted).generate(PROMPTS, SAMPLED)
    hook.remove()
    assert not caplog.records
    assert max(widths[1 : SAMPLED.max_tokens]) == len(PROMPTS)  # one token a row: keys and values are kept
    assert [module.training for module in adapted.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert model.is_activation_checkpointing
    assert_same_logps(adapted, PROMPTS, written, SAMPLED.temperature)
    with adapted.disable_adapter():
        assert texts(InProcessGenerator(adapted).generate(PROMPTS, SAMPLED)) != texts(written)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16 weights"])
def test_sixteen_bits(autocast):
    model = llama(initializer_range=0.1)
    model = model if autocast else model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        writer = InProcessGenerator(model)
        written = writer.generate(PROMPTS, SAMPLED)
        assert writer.obstacle is None
        assert_same_logps(model, PROMPTS, written, SAMPLED.temperature, atol=0.1)


def test_new_weights_are_written_with_at_once():
    model = llama()
    writer = InProcessGenerator(model)
    before = writer.generate(PROMPTS, SAMPLED)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    after = writer.generate(PROMPTS, SAMPLED)
    assert texts(after) != texts(before)
    assert_same_logps(model, PROMPTS, after, SAMPLED.temperature)


def test_a_stream_that_disagrees_with_training_is_given_up(monkeypatch, caplog):
    model = llama()
    expected = InProcessGenerator(model).generate(PROMPTS, SAMPLED)
    monkeypatch.setattr(generator.Stream, "run", shifted(generator.Stream.run))
    writer = InProcessGenerator(model)
    with caplog.at_level(logging.WARNING):
        assert texts(writer.generate(PROMPTS, SAMPLED)) == texts(expected)
        writer.sync(model)
        writer.generate(PROMPTS, SAMPLED)
    assert len(caplog.records) == 1
    assert "other log-probabilities than in training" in caplog.text


def shifted(run):
    def run_and_shift(self, lockstep=False):
        rows = list(self.waiting)
        run(self, lockstep)
        for row in rows:
            row.logps = [x + 0.01 for x in row.logps]

    return run_and_shift


STATEFUL = SHAPE | {"state_size": 4}
BY_GENERATE: dict[str, Callable[[], PreTrainedModel]] = {
    "mamba": lambda: causal_lm(MambaConfig(**STATEFUL)),
    "t5": lambda: AutoModelForSeq2SeqLM.from_config(
        T5Config(**(SHAPE | {"eos_token_id": 3}), d_model=32, d_kv=8, d_ff=32, num_layers=1, decoder_start_token_id=0)
    ),
}


@pytest.mark.parametrize("name", BY_GENERATE)
def test_other_models_write_by_generate(name, caplog):
    torch.manual_seed(0)
    model = BY_GENERATE[name]().train()
    own = model.generation_config
    with caplog.at_level(logging.WARNING, logger="strop"):
        writer = InProcessGenerator(model)
        written = writer.generate(PROMPTS, FILTERED)
        assert texts(InProcessGenerator(model, max_rows=2).generate(PROMPTS, FILTERED)) == texts(written)
    assert caplog.text.count("transformers' generate") == 2  # one line a generator
    assert model.generation_config is own
    assert model.training
    assert {len(c.token_ids) for c in written if c.finish_reason == "length"} <= {FILTERED.max_tokens}
    if name == "mamba":
        assert_same_logps(model, PROMPTS, written, FILTERED.temperature, atol=1e-4)


VIRTUAL = {
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "zero-init attention": AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2),
}


@pytest.mark.parametrize("name", VIRTUAL)
def test_virtual_tokens_stand_before_a_prompt_once(name):
    """What is written has the log-probabilities of a training forward, alone or beside longer prompts."""
    model = get_peft_model(llama(initializer_range=0.3), VIRTUAL[name])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.5 * torch.randn_like(parameter))
    written = InProcessGenerator(model).generate(PROMPTS, SAMPLED)
    assert len({x for completion in written for x in completion.token_ids}) > 20
    assert_same_logps(model, PROMPTS, written, SAMPLED.temperature, atol=2e-5)


def test_what_writes_by_generate_alone_refuses_virtual_tokens():
    model = llama()
    refuse_virtual_tokens(model, "a chat")
    refuse_virtual_tokens(get_peft_model(llama(), VIRTUAL["zero-init attention"]), "a chat")
    with pytest.raises(ValueError, match="a chat writes by transformers' generate"):
        refuse_virtual_tokens(get_peft_model(model, VIRTUAL["prompt"]), "a chat")


def test_both_ways_write_the_same(caplog):
    model = llama(eos_token_id=3)
    budgets = [3, 10, 5, 10, 1, 10, 8]
    writer = InProcessGenerator(model)
    for sampling in (SAMPLED, Sampling(**(vars(FILTERED) | {"max_tokens": 10}))):
        writer.obstacle = None
        stream = writer.generate(PROMPTS, sampling, max_tokens=budgets)
        writer.obstacle = "asked to"
        other = writer.generate(PROMPTS, sampling, max_tokens=budgets)
        assert texts(stream) == texts(other)
        for one, two in zip(stream, other, strict=True):
            assert one.logps == pytest.approx(two.logps, abs=1e-5)
            assert one.finish_reason == two.finish_reason
            assert (one.sampled_logps is None) == (two.sampled_logps is None)


def test_models_that_share_keys_between_layers_are_named():
    model = llama()
    assert serving_obstacle(model) is None
    model.config.num_kv_shared_layers = 1
    assert "shares keys and values" in str(serving_obstacle(model))
    assert "carries a state" in str(serving_obstacle(BY_GENERATE["mamba"]()))
