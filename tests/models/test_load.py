"""Loading by name: what comes out, in which precision and class, and what an error says."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    CohereConfig,
    CohereForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from strop.models.arguments import ModelInitArguments
from strop.models.load import describe_precision, load_model, load_tokenizer, resolve_dtype


def args(**kwargs) -> ModelInitArguments:
    return ModelInitArguments(model_init_kwargs=kwargs or None)


# dtype


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": None}, torch.float32),
        ({"dtype": "bf16"}, torch.bfloat16),
        ({"dtype": torch.float16}, torch.float16),
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"dtype": "auto"}, torch.float16),
    ],
)
def test_dtype(tiny_folder, tiny_llama, given, expected):
    tiny_llama.half().save_pretrained(tiny_folder)
    model = load_model(str(tiny_folder), args(**given))
    assert {p.dtype for p in model.parameters()} == {expected}


def test_loaded_by_name_is_the_same_as_loaded_by_hand(tiny_folder):
    by_name = load_model(str(tiny_folder), args(dtype="bfloat16"))
    by_hand = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16)
    ids = torch.arange(9)[None]
    assert torch.equal(by_name(input_ids=ids, labels=ids).loss, by_hand(input_ids=ids, labels=ids).loss)


def test_options_may_come_as_json(tiny_folder):
    model = load_model(str(tiny_folder), ModelInitArguments(model_init_kwargs='{"dtype": "bfloat16"}'))
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "nearest"), [("bloat16", "bfloat16"), ("torch.flot32", "float32")])
def test_unknown_dtype_names_the_nearest(dtype, nearest):
    with pytest.raises(ValueError, match=f"unknown dtype '{dtype}'.* Did you mean '{nearest}'"):
        resolve_dtype(dtype)


def test_integers_are_no_dtype_of_weights():
    with pytest.raises(ValueError, match=r"unknown dtype torch\.int8"):
        resolve_dtype(torch.int8)


def test_old_and_new_name_of_dtype_may_not_contradict(tiny_folder):
    with pytest.raises(ValueError, match="dtype='bfloat16' and torch_dtype='float32'"):
        load_model(str(tiny_folder), args(dtype="bfloat16", torch_dtype="float32"))


# class


def test_class_is_the_checkpoints(tiny_folder):
    assert type(load_model(str(tiny_folder), args())) is LlamaForCausalLM


def test_an_encoder_decoder_loads_as_it_was_saved(tmp_path):
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path), args())) is T5ForConditionalGeneration


def test_a_classifier_is_made_where_one_is_asked_for(tiny_folder):
    model = load_model(str(tiny_folder), args(), auto_class=AutoModelForSequenceClassification, num_labels=1)
    assert type(model) is LlamaForSequenceClassification
    assert model.score.weight.shape == (1, 32)


@pytest.mark.parametrize("cls", [LlamaModel, LlamaForSequenceClassification])
def test_a_checkpoint_without_head_is_refused(tmp_path, tiny_llama, cls):
    cls(tiny_llama.config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 weights of LlamaForCausalLM, e\.g\. lm_head\.weight.*random"):
        load_model(str(tmp_path), args())


# a model that is loaded already


def test_a_ready_model_is_returned_as_it_is(tiny_llama):
    assert load_model(tiny_llama, args()) is tiny_llama


def test_options_of_loading_are_refused_for_a_ready_model(tiny_llama):
    with pytest.raises(ValueError, match=r"model_init_kwargs=\{'dtype': 'bf16'\} can't apply"):
        load_model(tiny_llama, args(dtype="bf16"))
    with pytest.raises(ValueError, match=r"quantization_config can't apply"):
        load_model(tiny_llama, args(), quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def test_quantisation_given_twice_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="quantization_config is given twice"):
        load_model(str(tiny_folder), args(quantization_config={"load_in_8bit": True}), {"load_in_4bit": True})


# what isn't there


def test_a_missing_folder_is_named_with_its_nearest_neighbour(tiny_folder):
    with pytest.raises(ValueError, match=r"no folder .*/tinny\. Did you mean '.*/tiny'"):
        load_model(str(tiny_folder.parent / "tinny"), args())


def test_a_folder_without_model_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"without config\.json nor adapter_config\.json.* holds: notes\.txt"):
        load_model(str(tmp_path), args())


def test_a_hub_id_fails_at_once_without_access():
    with pytest.raises(
        ValueError, match=r"'some/model' is neither a folder here nor a model in the cache.*hf download"
    ):
        load_model("some/model", args())


def test_an_unknown_option_is_named(tiny_folder):
    with pytest.raises(ValueError, match=r"knows 'atn_implementation'\. Did you mean 'attn_implementation'"):
        load_model(str(tiny_folder), args(atn_implementation="sdpa"))


def test_a_folder_without_tokenizer_asks_for_one(tmp_path, tiny_llama):
    tiny_llama.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from .*processing_class"):
        load_tokenizer(str(tmp_path), args())


def test_tokenizer(tiny_folder, bpe_tokenizer):
    assert load_tokenizer(str(tiny_folder), args()).get_vocab() == bpe_tokenizer.get_vocab()


# precision in words


def run(**options):
    return SimpleNamespace(**{"bf16": False, "fp16": False, "optim": "adamw_torch", "device": "cpu"} | options)


def test_precision_in_words(tiny_llama):
    words = describe_precision(tiny_llama, run(bf16=True))
    assert words == "weights float32, autocast bfloat16, optimizer state float32, device cpu"
    tiny_llama.model.half()
    words = describe_precision(tiny_llama, run(optim="adamw_bnb_8bit"))
    assert words == "weights float16+float32, autocast off, optimizer state int8, device cpu"


# .gguf files


@pytest.fixture
def gguf_file(tmp_path, tiny_llama, bpe_tokenizer):
    """`tiny_llama` and `bpe_tokenizer` in one file, quantised to 8 bits in blocks of 32."""
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama, bpe_tokenizer, rule="smollm")


def write_gguf(file, model, tokenizer, rule: str):
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    vocabulary += [f"<unused{i}>" for i in range(config.vocab_size - len(vocabulary))]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in vocabulary])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    for name, weight in gguf_tensors(model):
        array = weight.detach().float().numpy()
        if array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_tensors(model):
    """Names and weights as llama.cpp has them: the rows of q and k of each head in the order of its rotary pairs."""
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    yield "token_embd.weight", model.model.embed_tokens.weight
    yield "output_norm.weight", model.model.norm.weight
    yield "output.weight", model.lm_head.weight
    for i, layer in enumerate(model.model.layers):
        for ours, theirs in names.items():
            weight = layer.get_submodule(ours).weight
            if theirs in heads:
                n = heads[theirs]
                weight = weight.view(n, 2, weight.shape[0] // n // 2, -1).transpose(1, 2).reshape(weight.shape)
            yield f"blk.{i}.{theirs}.weight", weight


def test_a_gguf_file_becomes_a_plain_model(gguf_file, tmp_path, tiny_llama):
    """Blocks of 32 have steps of max |w| / 127, kept in float16: an element is off by 1/2 + 127 / 2^11 steps."""
    model = load_model(str(gguf_file), args())
    assert type(model) is LlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, weight in tiny_llama.named_parameters():
        step = weight.abs().max().item() / 127
        torch.testing.assert_close(model.get_parameter(name), weight, rtol=0, atol=(0.5 + 127 / 2**11) * step)
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"), args())
    ids = torch.arange(9)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_gguf_file_may_be_named_apart(gguf_file):
    assert load_model(str(gguf_file.parent), args(gguf_file="tiny.gguf", dtype="bf16")).dtype == torch.bfloat16


def test_a_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"without nothing\.gguf"):
        load_model(str(tmp_path / "nothing.gguf"), args())


def test_gguf_and_quantisation_exclude_each_other(gguf_file):
    with pytest.raises(ValueError, match=r"tiny\.gguf is quantised already"):
        load_model(str(gguf_file), args(), {"load_in_4bit": True})


def test_digits_are_cut_one_by_one_where_the_file_says_so(gguf_file, bpe_tokenizer):
    tokenizer = load_tokenizer(str(gguf_file), args())
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("see  12 cats")
    assert [piece for piece, _ in pieces] == ["see", "ĠĠ", "1", "2", "Ġcats"]
    assert tokenizer.decode(tokenizer("see  12 cats")["input_ids"]) == "see  12 cats"


def test_the_usual_rule_is_left_alone(tmp_path, tiny_llama, bpe_tokenizer):
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "a.gguf", tiny_llama, bpe_tokenizer, rule="gpt-2")), args())
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("see  12 cats")
    assert [piece for piece, _ in pieces] == ["see", "Ġ", "Ġ12", "Ġcats"]


def test_an_unknown_rule_is_refused(tmp_path, tiny_llama, bpe_tokenizer):
    file = write_gguf(tmp_path / "a.gguf", tiny_llama, bpe_tokenizer, rule="martian")
    with pytest.raises(ValueError, match=r"a\.gguf cuts text by the rule 'martian'.*processing_class"):
        load_tokenizer(str(file), args())


# classifiers


def test_a_language_model_as_a_classifier_gets_a_new_head_only(tiny_folder, caplog):
    caplog.set_level(logging.INFO)
    model = load_model(str(tiny_folder), args(), auto_class=AutoModelForSequenceClassification, num_labels=1)
    assert model.score.weight.shape == (1, 32)
    assert "new in LlamaForSequenceClassification, drawn by the seed: score.weight" in caplog.text
    assert "LOAD REPORT" not in caplog.text


def test_a_classifier_without_its_model_is_refused(tiny_folder):
    weights = load_file(tiny_folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.1" not in name}
    save_file(kept, tiny_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 9 weights of LlamaForSequenceClassification, e.g. model.layers.1"):
        load_model(str(tiny_folder), args(), auto_class=AutoModelForSequenceClassification, num_labels=1)


def test_a_family_without_classifiers_is_named(tmp_path):
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    CohereForCausalLM(CohereConfig(**shape, num_attention_heads=2, eos_token_id=3)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a cohere, and transformers has no AutoModelForSequenceClassification"):
        load_model(str(tmp_path), args(), auto_class=AutoModelForSequenceClassification, num_labels=1)
