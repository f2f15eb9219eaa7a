"""The converter, on a GGUF file written here from a tiny Llama: the same model comes back."""

import subprocess

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.models import smollm2

gguf = pytest.importorskip("gguf")

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdĠ123", "ab"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()  # what the converter writes holds these exactly
    return model


def write_gguf(model, path):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([smollm2.SPECIAL] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    gguf_names = {hub: name for name, hub in smollm2.TENSOR_NAMES.items()}
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*gguf_tensor(name, weight.numpy(), gguf_names, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensor(name, weight, gguf_names, config):
    """GGUF's name and row order of a tensor: in it, rows j and j + half of a rotary head stand side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    parts = name.split(".")
    if parts[-2] in heads:
        pairs = [[row, row + 4] for head in range(heads[parts[-2]]) for row in range(head * 8, head * 8 + 4)]
        weight = weight[np.array(pairs).flatten()]
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{gguf_names['.'.join(parts[3:-1])]}.weight", weight
    return f"{gguf_names['.'.join(parts[:-1])]}.weight", weight


def test_the_same_model_comes_back(llama, tmp_path):
    write_gguf(llama, tmp_path / "tiny.gguf")
    smollm2.convert_llama_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(len(TOKENS))[None]
    torch.testing.assert_close(loaded(ids).logits, llama(ids).logits, rtol=0, atol=0)
    assert loaded.config.rope_parameters["rope_theta"] == 100000.0
    assert loaded.generation_config.eos_token_id == 2


def test_the_tokenizer_merges_splits_digits_and_knows_its_special_tokens(llama, tmp_path):
    write_gguf(llama, tmp_path / "tiny.gguf")
    smollm2.convert_llama_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    #  "ab" is merged, "12" is not, the special token is one id
    assert tokenizer("abc 12<|im_end|>")["input_ids"] == [
        TOKENS.index(t) for t in ("ab", "c", "Ġ", "1", "2", "<|im_end|>")
    ]
    assert tokenizer.decode([11, 5, 7, 8, 2], skip_special_tokens=True) == "abc 1"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template == TEMPLATE


def test_rows_of_a_rotary_head_by_hand():
    #  one head of 4 rows: GGUF has them as 0 2 1 3 (rotary pairs 0-2 and 1-3 side by side)
    stored = np.array([[0.0], [2.0], [1.0], [3.0]])
    assert smollm2.unpermute(stored, num_heads=1).flatten().tolist() == [0, 1, 2, 3]


def test_made_once_and_whole(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    fetched = []

    def fetch(target):
        target.mkdir()
        write_gguf(llama, target / "tiny.gguf")
        fetched.append(target)
        return target / "tiny.gguf"

    monkeypatch.setattr(smollm2, "fetch_gguf", fetch)
    folder = smollm2.smollm2()
    assert folder == smollm2.smollm2() == tmp_path / "cache" / smollm2.FOLDER
    assert len(fetched) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [smollm2.FOLDER]  # no staging left


def test_a_failed_fetch_says_what_to_do_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route to host\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ValueError, match=r"no route to host.*--model"):
        smollm2.smollm2()
    assert list((tmp_path / "cache").iterdir()) == []
