"""Special tokens, templates and new tokens: what is written where, what is never shrunk, what is refused."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken
from transformers import GenerationConfig

from strop.models.tokenizers import clone_chat_template, fit_model, new_token_ids, prepare_tokenizer, unseen_token_ids

OTHER_TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}<|stop|>{% endfor %}"


def args(**options):
    return SimpleNamespace(**{"chat_template_path": None, "eos_token": None, "pad_token": None} | options)


@pytest.fixture
def tokenizer(bpe_tokenizer):
    """One that a test may change."""
    return deepcopy(bpe_tokenizer)


@pytest.fixture
def source(tmp_path, bpe_tokenizer):
    """Folder of a tokenizer with another template and three tokens that `bpe_tokenizer` lacks."""
    other = deepcopy(bpe_tokenizer)
    other.add_tokens([AddedToken(name, special=True) for name in ("<|turn|>", "<|stop|>", "<|note|>")])
    other.eos_token = "<|stop|>"
    other.chat_template = OTHER_TEMPLATE
    other.save_pretrained(tmp_path / "source")
    return str(tmp_path / "source")


# special tokens


def test_padding_token_is_the_argument_then_the_tokenizers_own_then_its_end_token(tokenizer):
    prepare_tokenizer(tokenizer, args())
    assert tokenizer.pad_token == "<|endoftext|>"
    prepare_tokenizer(tokenizer, args(pad_token="<|im_start|>"))
    assert tokenizer.pad_token == "<|im_start|>"
    tokenizer.pad_token = None
    prepare_tokenizer(tokenizer, args())
    assert tokenizer.pad_token == "<|im_end|>"


def test_tokens_outside_the_vocabulary_are_refused_with_the_nearest(tokenizer):
    with pytest.raises(ValueError, match=r"eos_token='<\|imend\|>' is not in .* Did you mean '<\|im_end\|>'"):
        prepare_tokenizer(tokenizer, args(eos_token="<|imend|>"))
    with pytest.raises(ValueError, match=r"pad_token='zzz'.*Its special tokens are <\|endoftext\|>"):
        prepare_tokenizer(tokenizer, args(pad_token="zzz"))


def test_without_padding_and_end_token_the_option_is_named(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"neither a padding nor an end-of-sequence token.*pad_token="):
        prepare_tokenizer(tokenizer, args())


def test_model_gets_padding_and_end_token_and_keeps_its_other_ends(tiny_llama, tokenizer):
    tiny_llama.config.eos_token_id = 0
    tiny_llama.generation_config = GenerationConfig(eos_token_id=[0, 7], pad_token_id=5)
    prepare_tokenizer(tokenizer, args(eos_token="<|im_start|>"))
    fit_model(tiny_llama, tokenizer)
    assert (tiny_llama.config.eos_token_id, tiny_llama.config.pad_token_id) == (1, 0)
    assert tiny_llama.generation_config.eos_token_id == [1, 0, 7]
    assert tiny_llama.generation_config.pad_token_id == 0
    fit_model(tiny_llama, tokenizer)
    assert tiny_llama.generation_config.eos_token_id == [1, 0, 7]


def test_what_already_fits_is_left_alone(tiny_llama, tokenizer):
    before = tiny_llama.config.to_dict(), tiny_llama.generation_config.to_dict()
    prepare_tokenizer(tokenizer, args())
    fit_model(tiny_llama, tokenizer)
    assert (tiny_llama.config.to_dict(), tiny_llama.generation_config.to_dict()) == before


def test_a_vocabulary_larger_than_the_models_is_refused(tiny_llama, tokenizer):
    tokenizer.add_tokens([f"<{i}>" for i in range(401 - len(tokenizer))])  # ids 0..400, one more than 400 rows
    with pytest.raises(ValueError, match=r"ids up to 400 .* 400 rows.*resize_token_embeddings\(401\)"):
        fit_model(tiny_llama, tokenizer)


# chat templates


def test_template_of_a_file(tmp_path, tokenizer):
    file = tmp_path / "chat.jinja"
    file.write_text(OTHER_TEMPLATE)
    prepare_tokenizer(tokenizer, args(chat_template_path=str(file)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|turn|>hi<|stop|>"


def test_missing_template_file_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"chat_template_path='nowhere\.jinja'"):
        prepare_tokenizer(tokenizer, args(chat_template_path="nowhere.jinja"))


def test_a_source_without_template_is_refused(tmp_path, tiny_llama, tokenizer):
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "mute")
    with pytest.raises(ValueError, match="has no chat template"):
        clone_chat_template(tiny_llama, tokenizer, str(tmp_path / "mute"))


def test_clone_takes_template_tokens_and_end(tiny_llama, tokenizer, source):
    size, old_rows = len(tokenizer), tiny_llama.get_input_embeddings().weight.detach().clone()
    model, cloned, added = clone_chat_template(tiny_llama, tokenizer, source)
    assert (model, cloned) == (tiny_llama, tokenizer)
    assert added == [size, size + 1, size + 2] == cloned.convert_tokens_to_ids(["<|turn|>", "<|stop|>", "<|note|>"])
    assert cloned.chat_template == OTHER_TEMPLATE
    ids = (cloned.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    assert ids == (size + 1,) * 3
    assert len(cloned) == size + 3  # no filler tokens
    assert torch.equal(model.get_input_embeddings().weight[:size], old_rows[:size])


@pytest.mark.parametrize(("rows", "expected"), [(512, 512), (400, 448)])
def test_clone_grows_to_the_multiple_and_never_shrinks(tiny_llama, tokenizer, source, rows, expected):
    """From 400 rows to hold ids 0..400 and more: 448 = 7 x 64. From 512 rows: nothing to do."""
    tiny_llama.resize_token_embeddings(rows, mean_resizing=False)
    tokenizer.add_tokens([f"<{i}>" for i in range(399 - len(tokenizer))])  # room for one of the three
    clone_chat_template(tiny_llama, tokenizer, source)
    shapes = {tiny_llama.get_input_embeddings().weight.shape[0], tiny_llama.get_output_embeddings().weight.shape[0]}
    assert shapes == {expected} == {tiny_llama.config.vocab_size}


def test_clone_multiple_can_be_chosen(tiny_llama, tokenizer, source):
    tokenizer.add_tokens([f"<{i}>" for i in range(400 - len(tokenizer))])
    clone_chat_template(tiny_llama, tokenizer, source, resize_to_multiple_of=None)
    assert tiny_llama.config.vocab_size == 403


def test_clone_onto_an_adapter_is_refused(tiny_llama, tokenizer, source):
    with pytest.raises(ValueError, match="already has an adapter"):
        clone_chat_template(get_peft_model(tiny_llama, LoraConfig(task_type="CAUSAL_LM")), tokenizer, source)


def test_prepared_and_fitted_is_cloned(tiny_folder, tokenizer, source):
    """The trainer's two halves, tokenizer first, come to the same as `clone_chat_template`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(399 - len(tokenizer))])
    tokenizer.save_pretrained(tiny_folder)  # the model knows these
    prepare_tokenizer(tokenizer, args(chat_template_path=source))
    fit_model(model, tokenizer, may_grow=True)
    assert new_token_ids(tokenizer, model) == [399, 400, 401]
    assert model.config.vocab_size == 448
    assert model.generation_config.eos_token_id[0] == tokenizer.eos_token_id == 400


# tokens the model has never seen


def test_unseen_tokens_are_those_the_saved_tokenizer_lacks(tiny_folder, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert unseen_token_ids(tokenizer, model) == []
    size = len(tokenizer)
    tokenizer.add_tokens(["<tool>", "[PAD]"])
    assert unseen_token_ids(tokenizer, model) == [size, size + 1]
    tokenizer.pad_token = "[PAD]"
    fit_model(model, tokenizer)
    assert new_token_ids(tokenizer, model) == [size]  # padding needs no learning


def test_another_models_tokenizer_has_no_unseen_tokens(tiny_folder, word_tokenizer):
    from transformers import AutoModelForCausalLM

    assert unseen_token_ids(word_tokenizer, AutoModelForCausalLM.from_pretrained(tiny_folder)) == []
